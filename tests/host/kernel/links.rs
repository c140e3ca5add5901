// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Stand-ins for the functions of `linux/rbtree.h`. These trees are not balanced: a new node
//! becomes the root, and a node moves down to a leaf before its removal. Each call therefore
//! changes more links than the kernel's function does. All nodes are black once they are in a tree.

use std::ptr;

use crate::bindings::{rb_node, rb_root};

type Link = *mut rb_node;

const BLACK: usize = 1;

fn parent(node: Link) -> Link {
    // SAFETY: `node` is a node of a tree.
    ptr::with_exposed_provenance_mut(unsafe { (*node).__rb_parent_color & !3 })
}

/// Returns the link to the left child if `left`, otherwise the link to the right child.
fn child(node: Link, left: bool) -> *mut Link {
    // SAFETY: `node` is a node of a tree.
    unsafe {
        match left {
            true => &raw mut (*node).rb_left,
            false => &raw mut (*node).rb_right,
        }
    }
}

fn get(node: Link, left: bool) -> Link {
    // SAFETY: `node` is a node of a tree.
    unsafe { *child(node, left) }
}

fn is_left(node: Link, above: Link) -> bool {
    !above.is_null() && get(above, true) == node
}

/// Makes `node` a child of `above`, or the root if `above` is null. `node` may be null.
fn link(root: *mut rb_root, above: Link, left: bool, node: Link) {
    // SAFETY: The pointers are nodes of a tree, and its root.
    unsafe {
        match above.is_null() {
            true => (*root).rb_node = node,
            false => *child(above, left) = node,
        }
        if !node.is_null() {
            (*node).__rb_parent_color = above.expose_provenance() | BLACK;
        }
    }
}

/// Moves `node` to the place of its parent, which becomes a child of `node`.
fn rotate(root: *mut rb_root, node: Link) {
    let above = parent(node);
    let top = parent(above);
    let (left, above_left) = (is_left(node, above), is_left(above, top));
    link(root, above, left, get(node, !left));
    link(root, node, !left, above);
    link(root, top, above_left, node);
}

#[no_mangle]
pub(super) extern "C-unwind" fn rb_insert_color(node: Link, root: *mut rb_root) {
    // SAFETY: `node` is a node of a tree.
    let colour = unsafe { (*node).__rb_parent_color & 3 };
    assert_eq!(colour, 0, "a new node is red");
    while !parent(node).is_null() {
        rotate(root, node);
    }
    link(root, ptr::null_mut(), false, node);
}

#[no_mangle]
pub(super) extern "C-unwind" fn rb_erase(node: Link, root: *mut rb_root) {
    let children = || [true, false].map(|left| get(node, left));
    let links = children();
    while let Some(child) = children().into_iter().find(|child| !child.is_null()) {
        rotate(root, child);
    }
    let above = parent(node);
    link(root, above, is_left(node, above), ptr::null_mut());
    // The kernel's function leaves the old links in the node.
    // SAFETY: `node` is alive, and in no tree any more.
    unsafe { ((*node).rb_left, (*node).rb_right) = links.into() };
}

/// Checks the links below a root. Returns the number of nodes.
pub(super) fn check(root: &rb_root) -> usize {
    below(root.rb_node, ptr::null_mut())
}

fn below(node: Link, above: Link) -> usize {
    if node.is_null() {
        return 0;
    }
    // SAFETY: `node` is a node of a tree.
    let word = unsafe { (*node).__rb_parent_color };
    assert_eq!(word, above.addr() | BLACK);
    below(get(node, true), node) + below(get(node, false), node) + 1
}

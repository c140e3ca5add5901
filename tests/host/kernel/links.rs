// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Textbook red-black trees on the structures of `linux/rbtree.h`: a red node has black children,
//! and each path from a node down to an empty link has the same number of black nodes.

use std::ptr;

use crate::bindings::{rb_node, rb_root};

type Link = *mut rb_node;

const RED: usize = 0;
const BLACK: usize = 1;

fn colour(node: Link) -> usize {
    if node.is_null() {
        return BLACK;
    }
    // SAFETY: `node` is a node of a tree.
    unsafe { (*node).__rb_parent_color & 1 }
}

fn parent(node: Link) -> Link {
    // SAFETY: `node` is a node of a tree.
    ptr::with_exposed_provenance_mut(unsafe { (*node).__rb_parent_color & !3 })
}

fn set(node: Link, parent: Link, colour: usize) {
    // SAFETY: `node` is a node of a tree.
    unsafe { (*node).__rb_parent_color = parent.expose_provenance() | colour };
}

fn paint(node: Link, colour: usize) {
    set(node, parent(node), colour);
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

fn is_left(node: Link, parent: Link) -> bool {
    get(parent, true) == node
}

/// Puts `new` into the place of `old` below `above`. Does not read `old`.
fn replace(root: *mut rb_root, above: Link, old: Link, new: Link) {
    // SAFETY: The pointers are nodes of a tree, and its root.
    unsafe {
        match above.is_null() {
            true => (*root).rb_node = new,
            false => *child(above, is_left(old, above)) = new,
        }
    }
    if !new.is_null() {
        set(new, above, colour(new));
    }
}

/// Moves `node` down to the left or to the right. The child on the other side takes the place of
/// `node`.
fn rotate(root: *mut rb_root, node: Link, left: bool) {
    let up = get(node, !left);
    let inner = get(up, left);
    replace(root, parent(node), node, up);
    // SAFETY: The pointers are nodes of a tree.
    unsafe {
        *child(node, !left) = inner;
        *child(up, left) = node;
    }
    if !inner.is_null() {
        set(inner, node, colour(inner));
    }
    set(node, up, colour(node));
}

#[no_mangle]
pub(super) extern "C-unwind" fn rb_insert_color(node: Link, root: *mut rb_root) {
    assert_eq!(colour(node), RED, "a new node is red");
    let mut node = node;
    loop {
        let above = parent(node);
        if above.is_null() {
            return paint(node, BLACK);
        }
        if colour(above) == BLACK {
            return;
        }
        let top = parent(above);
        let left = is_left(above, top);
        let uncle = get(top, !left);
        if colour(uncle) == RED {
            paint(above, BLACK);
            paint(uncle, BLACK);
            paint(top, RED);
            node = top;
            continue;
        }
        let mut above = above;
        if is_left(node, above) != left {
            rotate(root, above, left);
            above = node;
        }
        paint(above, BLACK);
        paint(top, RED);
        return rotate(root, top, !left);
    }
}

#[no_mangle]
pub(super) extern "C-unwind" fn rb_erase(node: Link, root: *mut rb_root) {
    let (left, right) = (get(node, true), get(node, false));
    let (mut at, mut above, lost);
    if left.is_null() || right.is_null() {
        at = if left.is_null() { right } else { left };
        above = parent(node);
        lost = colour(node);
        replace(root, above, node, at);
    } else {
        // The next node in the order takes the place of the node.
        let mut next = right;
        while !get(next, true).is_null() {
            next = get(next, true);
        }
        lost = colour(next);
        at = get(next, false);
        above = parent(next);
        if above == node {
            above = next;
        } else {
            replace(root, above, next, at);
            // SAFETY: The pointers are nodes of a tree.
            unsafe { *child(next, false) = right };
            set(right, next, colour(right));
        }
        replace(root, parent(node), node, next);
        // SAFETY: The pointers are nodes of a tree.
        unsafe { *child(next, true) = left };
        set(left, next, colour(left));
        paint(next, colour(node));
    }
    if lost == RED {
        return;
    }
    // The paths through `at` lack a black node.
    while !above.is_null() && colour(at) == BLACK {
        let left = is_left(at, above);
        let mut beside = get(above, !left);
        if colour(beside) == RED {
            paint(beside, BLACK);
            paint(above, RED);
            rotate(root, above, left);
            beside = get(above, !left);
        }
        if colour(get(beside, true)) == BLACK && colour(get(beside, false)) == BLACK {
            paint(beside, RED);
            at = above;
            above = parent(at);
            continue;
        }
        if colour(get(beside, !left)) == BLACK {
            paint(get(beside, left), BLACK);
            paint(beside, RED);
            rotate(root, beside, !left);
            beside = get(above, !left);
        }
        paint(beside, colour(above));
        paint(above, BLACK);
        paint(get(beside, !left), BLACK);
        rotate(root, above, left);
        return;
    }
    if !at.is_null() {
        paint(at, BLACK);
    }
}

/// Checks the links and colours below a root. Returns the number of nodes.
pub(super) fn check(root: &rb_root) -> usize {
    assert_eq!(colour(root.rb_node), BLACK);
    below(root.rb_node, ptr::null_mut()).1
}

/// Returns the number of black nodes on each path down, and the number of nodes.
fn below(node: Link, above: Link) -> (usize, usize) {
    if node.is_null() {
        return (1, 0);
    }
    assert_eq!(parent(node), above);
    if colour(node) == RED {
        assert_eq!(colour(above), BLACK, "a red node below a red one");
    }
    let left = below(get(node, true), node);
    let right = below(get(node, false), node);
    assert_eq!(left.0, right.0, "paths with other numbers of black nodes");
    (left.0 + colour(node), left.1 + right.1 + 1)
}

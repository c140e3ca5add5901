// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Red-black trees: `struct rb_root` and `struct rb_node` of the kernel.
//!
//! C header: `include/linux/rbtree.h`.

use core::{cmp::Ordering, marker::PhantomData, mem::MaybeUninit, ptr};

use crate::{
    alloc::{AllocError, Flags, KBox},
    bindings,
};

/// A key and its value, linked into a tree.
#[repr(C)]
struct Node<K, V> {
    /// First: a pointer to it is a pointer to the node.
    links: bindings::rb_node,
    key: K,
    value: V,
}

/// Memory for a node of a tree.
pub struct RBTreeNodeReservation<K, V>(KBox<MaybeUninit<Node<K, V>>>);

impl<K, V> RBTreeNodeReservation<K, V> {
    /// Allocates the memory. May sleep.
    pub fn new(flags: Flags) -> Result<Self, AllocError> {
        Ok(RBTreeNodeReservation(KBox::new_uninit(flags)?))
    }

    /// Makes a node in this memory.
    pub fn into_node(self, key: K, value: V) -> RBTreeNode<K, V> {
        let links = bindings::rb_node::default();
        RBTreeNode(KBox::write(self.0, Node { links, key, value }))
    }
}

/// A node that is in no tree.
pub struct RBTreeNode<K, V>(KBox<Node<K, V>>);

impl<K, V> RBTreeNode<K, V> {
    /// Frees the node, and returns what was in it.
    pub fn to_key_value(self) -> (K, V) {
        let Node { key, value, .. } = KBox::into_inner(self.0);
        (key, value)
    }
}

/// Values in the order of their keys, each of which is there once.
///
/// # Invariants
///
/// Each `rb_node` that `root` leads to is the first field of a [`Node`] that came from [`KBox::into_raw`] and that this tree
/// owns. The nodes are in the order of their keys.
pub struct RBTree<K, V> {
    root: bindings::rb_root,
    _owns: PhantomData<Node<K, V>>,
}

// SAFETY: The tree owns its keys and values.
unsafe impl<K: Send, V: Send> Send for RBTree<K, V> {}
// SAFETY: A shared tree gives shared references to its values.
unsafe impl<K: Sync, V: Sync> Sync for RBTree<K, V> {}

impl<K, V> RBTree<K, V> {
    /// Returns an empty tree.
    pub const fn new() -> Self {
        RBTree {
            root: bindings::rb_root {
                rb_node: ptr::null_mut(),
            },
            _owns: PhantomData,
        }
    }
}

impl<K: Ord, V> RBTree<K, V> {
    /// Adds `node`, and returns the node that had the same key.
    pub fn insert(&mut self, node: RBTreeNode<K, V>) -> Option<RBTreeNode<K, V>> {
        let old = self.remove_node(&node.0.key);
        let new = KBox::into_raw(node.0);
        let mut parent = ptr::null_mut::<bindings::rb_node>();
        let mut place: *mut *mut bindings::rb_node = &raw mut self.root.rb_node;
        // SAFETY: By the type invariant every node on the way is alive, and `&mut self` makes it ours. `new` is alive and in no
        // tree. `place` is the empty link below `parent` where the key belongs, so that `rb_insert_color()` finds `new` as
        // `rb_link_node()` leaves it.
        // INVARIANT: `new` is a node of `KBox::into_raw`, in its place.
        unsafe {
            while !(*place).is_null() {
                parent = *place;
                place = match (*new).key.cmp(&(*parent.cast::<Node<K, V>>()).key) {
                    Ordering::Less => &raw mut (*parent).rb_left,
                    _ => &raw mut (*parent).rb_right,
                };
            }
            let links = &raw mut (*new).links;
            // The two lowest bits are the colour: 0 is red.
            (*links).__rb_parent_color = parent.expose_provenance();
            *place = links;
            bindings::rb_insert_color(links, &mut self.root);
        }
        old
    }

    fn find(&self, key: &K) -> Option<*mut Node<K, V>> {
        let mut at = self.root.rb_node;
        while !at.is_null() {
            let node = at.cast::<Node<K, V>>();
            // SAFETY: A node of this tree by the type invariant.
            at = unsafe {
                match key.cmp(&(*node).key) {
                    Ordering::Less => (*at).rb_left,
                    Ordering::Greater => (*at).rb_right,
                    Ordering::Equal => return Some(node),
                }
            };
        }
        None
    }

    /// Returns the value of `key`.
    pub fn get(&self, key: &K) -> Option<&V> {
        // SAFETY: A node of this tree by the type invariant, borrowed as the tree is.
        self.find(key).map(|node| unsafe { &(*node).value })
    }

    /// Returns the value of `key`.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // SAFETY: A node of this tree by the type invariant, borrowed as the tree is: `&mut self` excludes others.
        self.find(key).map(|node| unsafe { &mut (*node).value })
    }

    fn remove_node(&mut self, key: &K) -> Option<RBTreeNode<K, V>> {
        let node = self.find(key)?;
        // SAFETY: A node of this tree by the type invariant, which `rb_erase()` takes out of it. It came from
        // `KBox::into_raw`, and nobody else has a pointer to it any more.
        unsafe {
            bindings::rb_erase(&raw mut (*node).links, &mut self.root);
            Some(RBTreeNode(KBox::from_raw(node)))
        }
    }

    /// Removes the node of `key`, frees it, and returns its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (_, value) = self.remove_node(key)?.to_key_value();
        Some(value)
    }
}

impl<K, V> Drop for RBTree<K, V> {
    /// Frees the nodes, children before their parents.
    fn drop(&mut self) {
        let mut at = self.root.rb_node;
        // SAFETY: Nodes of this tree by the type invariant, which nobody looks at any more. A node is freed when both its links
        // are empty, and the link of its parent is emptied then. The parent's address is that of a node or 0.
        unsafe {
            while !at.is_null() {
                if !(*at).rb_left.is_null() {
                    at = (*at).rb_left;
                } else if !(*at).rb_right.is_null() {
                    at = (*at).rb_right;
                } else {
                    let parent: *mut bindings::rb_node =
                        ptr::with_exposed_provenance_mut((*at).__rb_parent_color & !3);
                    if !parent.is_null() {
                        if (*parent).rb_left == at {
                            (*parent).rb_left = ptr::null_mut();
                        } else {
                            (*parent).rb_right = ptr::null_mut();
                        }
                    }
                    drop(KBox::from_raw(at.cast::<Node<K, V>>()));
                    at = parent;
                }
            }
        }
    }
}

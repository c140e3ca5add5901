// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Red-black trees: `struct rb_root` and `struct rb_node` of the kernel.
//!
//! C header: `include/linux/rbtree.h`.

use core::{
    cmp::Ordering,
    marker::PhantomData,
    mem::MaybeUninit,
    ptr, //
};

use crate::{
    alloc::{
        AllocError,
        Flags,
        KBox, //
    },
    bindings,
};

/// A key and its value, linked into a tree.
#[repr(C)]
struct Node<K, V> {
    /// The first field, so that a pointer to the links is also a pointer to the node.
    links: bindings::rb_node,
    key: K,
    value: V,
}

// SAFETY: Only the tree uses the links, so a node owns just its key and its value.
unsafe impl<K: Send, V: Send> Send for Node<K, V> {}
// SAFETY: A shared node only gives out shared references to its key and its value.
unsafe impl<K: Sync, V: Sync> Sync for Node<K, V> {}

/// Memory for one node of a tree.
pub struct RBTreeNodeReservation<K, V>(KBox<MaybeUninit<Node<K, V>>>);

impl<K, V> RBTreeNodeReservation<K, V> {
    /// Allocates the memory. May sleep.
    pub fn new(flags: Flags) -> Result<Self, AllocError> {
        Ok(RBTreeNodeReservation(KBox::new_uninit(flags)?))
    }

    /// Makes a node in the memory without allocating.
    pub fn into_node(self, key: K, value: V) -> RBTreeNode<K, V> {
        let links = bindings::rb_node {
            __rb_parent_color: 0,
            rb_right: ptr::null_mut(),
            rb_left: ptr::null_mut(),
        };
        RBTreeNode(KBox::write(self.0, Node { links, key, value }))
    }
}

/// A node that is in no tree. The drop frees the node and drops its key and value.
pub struct RBTreeNode<K, V>(KBox<Node<K, V>>);

/// A map from keys to values, in the order of the keys.
///
/// # Invariants
///
/// - Each `rb_node` that `root` leads to is the first field of a [`Node`] that came from
///   [`KBox::into_raw`]. The tree owns these nodes.
/// - The links form a binary search tree: nodes on the left have smaller keys, and nodes on the
///   right have larger keys.
/// - The links and colours are as `rb_insert_color()` and `rb_erase()` leave them.
pub struct RBTree<K, V> {
    pub(crate) root: bindings::rb_root,
    _owns: PhantomData<Node<K, V>>,
}

// SAFETY: A tree owns its keys and values. No node points to the `rb_root`, so the tree may move.
unsafe impl<K: Send, V: Send> Send for RBTree<K, V> {}
// SAFETY: A shared tree only gives out shared references to its values, and compares shared
// references to its keys.
unsafe impl<K: Sync, V: Sync> Sync for RBTree<K, V> {}

impl<K, V> RBTree<K, V> {
    /// Returns an empty tree without allocating.
    pub const fn new() -> Self {
        // INVARIANT: There are no nodes.
        RBTree {
            root: bindings::rb_root {
                rb_node: ptr::null_mut(),
            },
            _owns: PhantomData,
        }
    }
}

impl<K, V> Default for RBTree<K, V> {
    fn default() -> Self {
        RBTree::new()
    }
}

impl<K: Ord, V> RBTree<K, V> {
    /// Adds a node, and returns the node that had the same key. Allocates nothing.
    pub fn insert(&mut self, node: RBTreeNode<K, V>) -> Option<RBTreeNode<K, V>> {
        let old = self.remove_node(&node.0.key);
        let new = KBox::into_raw(node.0);
        let mut parent = ptr::null_mut::<bindings::rb_node>();
        let mut place: *mut *mut bindings::rb_node = &raw mut self.root.rb_node;
        // SAFETY: By the type invariant, each node on the way is alive, and `&mut self` excludes
        // other users. `new` is alive and in no tree. `place` is the empty link where the key
        // belongs. `parent` is the node that has this link, or null for the root.
        // `rb_insert_color()` requires a node that is linked as `rb_link_node()` links it. The
        // writes below link `new` in this way.
        // INVARIANT: `new` came from `KBox::into_raw`. `new` is in its place in the order, and no
        // other node has its key any more.
        unsafe {
            while !(*place).is_null() {
                parent = *place;
                place = match (*new).key.cmp(&(*parent.cast::<Node<K, V>>()).key) {
                    Ordering::Less => &raw mut (*parent).rb_left,
                    _ => &raw mut (*parent).rb_right,
                };
            }
            let links = &raw mut (*new).links;
            // A node that was in a tree still has the links of that tree.
            links.write(bindings::rb_node {
                // The two lowest bits are the colour; red is 0.
                __rb_parent_color: parent.expose_provenance(),
                rb_right: ptr::null_mut(),
                rb_left: ptr::null_mut(),
            });
            *place = links;
            bindings::rb_insert_color(links, &raw mut self.root);
        }
        old
    }

    /// Returns the node of `key`.
    fn find(&self, key: &K) -> Option<*mut Node<K, V>> {
        let mut at = self.root.rb_node;
        while !at.is_null() {
            let node = at.cast::<Node<K, V>>();
            // SAFETY: By the type invariant `at` is a node of this tree, which is borrowed.
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
        // SAFETY: The node belongs to this tree by the type invariant, and lives as long as the
        // tree is borrowed.
        self.find(key).map(|node| unsafe { &(*node).value })
    }

    /// Returns a mutable reference to the value of `key`.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // SAFETY: The node belongs to this tree by the type invariant, and lives as long as the
        // tree is borrowed. `&mut self` excludes other borrows.
        self.find(key).map(|node| unsafe { &mut (*node).value })
    }

    /// Removes the node of `key` from the tree and returns it.
    fn remove_node(&mut self, key: &K) -> Option<RBTreeNode<K, V>> {
        let node = self.find(key)?;
        // SAFETY: By the type invariant, `node` is in this tree and came from `KBox::into_raw`.
        // `rb_erase()` removes the last pointer to the node.
        unsafe {
            bindings::rb_erase(&raw mut (*node).links, &raw mut self.root);
            Some(RBTreeNode(KBox::from_raw(node)))
        }
    }

    /// Removes the node of `key` from the tree, frees the node, drops the key, and returns the
    /// value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let node = self.remove_node(key)?;
        Some(KBox::into_inner(node.0).value)
    }
}

impl<K, V> Drop for RBTree<K, V> {
    /// Drops and frees the nodes, children before their parents, without recursion.
    fn drop(&mut self) {
        let mut at = self.root.rb_node;
        // SAFETY: By the type invariant, the links lead to nodes that this tree owns. No code uses
        // the tree any more. The loop drops a node only when both of its links are empty, and then
        // empties the link that leads to it, so no node is dropped twice. The parent of a node is
        // null, or a node that is dropped later. The address of the parent was exposed by `insert`,
        // or when the parent's pointer was passed to C.
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

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Compares red-black trees with `BTreeMap`.

use std::collections::BTreeMap;
use std::ptr;

use proptest::collection::vec;
use proptest::prelude::*;

use super::fakes::{failing_after, requests, without_leaks};
use super::links::check;
use super::Counted;
use crate::bindings::rb_node;
use crate::prelude::*;
use crate::rbtree::{RBTree, RBTreeNodeReservation};

const CASES: u32 = 512;

#[derive(Clone, Debug)]
enum Step {
    Insert(u8, u32),
    Remove(u8),
    Change(u8, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // The keys are few enough to repeat, and many enough for a tree of several levels.
    let key = 0..48_u8;
    let step = prop_oneof![
        3 => (key.clone(), any::<u32>()).prop_map(|(key, value)| Step::Insert(key, value)),
        2 => key.clone().prop_map(Step::Remove),
        1 => (key, any::<u32>()).prop_map(|(key, value)| Step::Change(key, value)),
    ];
    vec(step, 0..200)
}

/// A value that counts its drops.
type Value = (u32, Counted);

/// Adds a value, and returns the key's old value. Allocates only the node.
fn insert(tree: &mut RBTree<u8, Value>, key: u8, value: Value) -> Option<u32> {
    let place = RBTreeNodeReservation::new(GFP_KERNEL).unwrap();
    requests();
    let node = place.into_node(key, value);
    let old = tree.insert(node);
    assert_eq!(requests(), []);
    // A node has no method that returns its value. This function therefore moves the node to
    // another tree, and removes the value from that tree.
    let old = old?;
    let mut other = RBTree::new();
    assert!(other.insert(old).is_none());
    Some(other.remove(&key).expect("the key of the old node").0)
}

/// Returns the addresses of the nodes, in the order of the links.
fn nodes(at: *mut rb_node, all: &mut Vec<usize>) {
    if !at.is_null() {
        // SAFETY: `at` is a node of a tree that is borrowed.
        let (left, right) = unsafe { ((*at).rb_left, (*at).rb_right) };
        nodes(left, all);
        all.push(at.addr());
        nodes(right, all);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tree_is_a_sorted_map(steps in steps()) {
        without_leaks(|| {
            let (drops, counted) = Counted::new();
            let mut tree = RBTree::new();
            let mut map = BTreeMap::new();
            let mut made = 0;
            for step in steps {
                match step {
                    Step::Insert(key, value) => {
                        made += 1;
                        let old = insert(&mut tree, key, (value, counted.clone()));
                        assert_eq!(old, map.insert(key, value));
                    }
                    Step::Remove(key) => {
                        let old = tree.remove(&key).map(|(value, _)| value);
                        assert_eq!(old, map.remove(&key));
                    }
                    Step::Change(key, value) => {
                        if let Some(old) = tree.get_mut(&key) {
                            old.0 = value;
                        }
                        map.entry(key).and_modify(|old| *old = value);
                    }
                }
                assert_eq!(check(&tree.root), map.len());
                assert_eq!(drops.get(), made - map.len());
            }
            for key in 0..=48 {
                assert_eq!(tree.get(&key).map(|value| value.0), map.get(&key).copied());
                assert_eq!(tree.get_mut(&key).map(|value| value.0), map.get(&key).copied());
            }
            // The order of the links is the order of the keys.
            let mut linked = Vec::new();
            nodes(tree.root.rb_node, &mut linked);
            let values = map.keys().map(|key| ptr::from_ref(tree.get(key).unwrap()).addr());
            let size = size_of::<Value>() + size_of::<rb_node>() + 8;
            assert!(linked.iter().zip(values).all(|(node, value)| (*node..*node + size).contains(&value)));
            // A tree may move.
            let moved = Box::new(tree);
            assert_eq!(check(&moved.root), map.len());
            drop(moved);
            assert_eq!(drops.get(), made);
        });
    }
}

#[test]
fn an_empty_tree_has_nothing() {
    let mut tree = RBTree::<u8, u8>::new();
    assert_eq!(tree.get(&0), None);
    assert_eq!(tree.get_mut(&0), None);
    assert_eq!(tree.remove(&0), None);
}

#[test]
fn a_node_of_one_tree_goes_into_another() {
    without_leaks(|| {
        let place = || RBTreeNodeReservation::new(GFP_KERNEL).unwrap();
        let mut first = RBTree::new();
        for key in 0..7_u8 {
            first.insert(place().into_node(key, key));
        }
        // The node of key 3 has a child, because the trees of `links` are not balanced.
        let node = first
            .insert(place().into_node(3, 30))
            .expect("the old node");
        let mut second = RBTree::new();
        assert!(second.insert(node).is_none());
        // SAFETY: The root is a node of a tree that is borrowed.
        let links = unsafe {
            (
                (*second.root.rb_node).rb_left,
                (*second.root.rb_node).rb_right,
            )
        };
        if links != (ptr::null_mut(), ptr::null_mut()) {
            // Dropping both trees would free memory twice.
            std::mem::forget((first, second));
            panic!("a tree of one node leads to others");
        }
        assert_eq!(check(&second.root), 1);
        assert_eq!(second.get(&3), Some(&3));
        assert_eq!(first.get(&3), Some(&30));
        assert_eq!(check(&first.root), 7);
    });
}

#[test]
fn memory_that_is_not_used_for_a_node_is_freed() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        assert!(RBTreeNodeReservation::<u8, Counted>::new(GFP_KERNEL).is_ok());
        assert!(failing_after(0, || RBTreeNodeReservation::<u8, u8>::new(GFP_KERNEL)).is_err());
        drop(
            RBTreeNodeReservation::new(GFP_KERNEL)
                .unwrap()
                .into_node(1_u8, value),
        );
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn a_long_tree_is_dropped_without_recursion() {
    // The number of nodes would overflow the stack if the drop recursed from node to node.
    without_leaks(|| {
        let mut tree = RBTree::new();
        for key in 0..5_000_u32 {
            tree.insert(
                RBTreeNodeReservation::new(GFP_KERNEL)
                    .unwrap()
                    .into_node(key, key),
            );
        }
        assert_eq!(check(&tree.root), 5_000);
    });
}

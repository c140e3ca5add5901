// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Compares the list of `src/node_list.rs` with a vector.

use proptest::collection::vec;
use proptest::prelude::*;

use super::node_list::{Node, NodeList};

const CASES: u32 = 512;
const NODES: usize = 12;
const CURSORS: usize = 3;

/// The value of a cursor.
const CURSOR: u32 = 0;

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Remove(usize),
    /// Moves a cursor to the first node whose value is at least the given one. If the flag is set,
    /// the search starts at the beginning of the list.
    Seek(usize, bool, u32),
    RemoveCursor(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..NODES).prop_map(Step::Push),
        3 => (0..NODES).prop_map(Step::Remove),
        4 => (0..CURSORS, any::<bool>(), 0..100_u32).prop_map(|(c, anew, from)| Step::Seek(c, anew, from)),
        1 => (0..CURSORS).prop_map(Step::RemoveCursor),
    ];
    vec(step, 0..200)
}

/// Returns a node that does not move.
fn node() -> Box<Node<u32>> {
    // SAFETY: Each test has one list. The list's nodes lie in boxes, and the test removes each node
    // from the list before it drops the box.
    Box::new(unsafe { Node::new(CURSOR) })
}

/// Returns the position of a node or cursor in the vector. Numbers below `NODES` are nodes, and the
/// other numbers are cursors.
fn position(all: &[usize], which: usize) -> Option<usize> {
    all.iter().position(|at| *at == which)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn a_list_behaves_like_a_vector(steps in steps()) {
        let mut nodes: Vec<_> = (0..NODES + CURSORS).map(|_| node()).collect();
        let mut list = NodeList::new();
        let mut vector: Vec<usize> = Vec::new();
        let mut values = [CURSOR; NODES + CURSORS];
        let mut last = 0;
        for step in steps {
            match step {
                Step::Push(which) => {
                    if position(&vector, which).is_none() {
                        last += 1;
                        values[which] = last;
                        *list.value(&nodes[which]) = last;
                        vector.push(which);
                    }
                    list.push(&nodes[which]);
                }
                Step::Remove(which) => {
                    list.remove(&nodes[which]);
                    vector.retain(|at| *at != which);
                }
                Step::RemoveCursor(cursor) => {
                    list.remove(&nodes[NODES + cursor]);
                    vector.retain(|at| *at != NODES + cursor);
                }
                Step::Seek(cursor, anew, from) => {
                    let cursor = NODES + cursor;
                    let start = position(&vector, cursor).filter(|_| !anew).unwrap_or(0);
                    vector.retain(|at| *at != cursor);
                    let stop = (start..vector.len()).find(|at| values[vector[*at]] >= from);
                    let want = stop.map(|at| values[vector[at]]);
                    vector.insert(stop.unwrap_or(vector.len()), cursor);
                    let found = list.seek(&nodes[cursor], anew, |value| *value >= from);
                    prop_assert_eq!(found.copied(), want);
                }
            }
            // Another cursor visits the whole list.
            let other = node();
            let mut seen = Vec::new();
            let mut next = 1;
            while let Some(value) = list.seek(&other, next == 1, |value| *value >= next) {
                seen.push(*value);
                next = *value + 1;
            }
            list.remove(&other);
            let want: Vec<u32> = vector.iter().map(|at| values[*at]).filter(|value| *value != CURSOR).collect();
            prop_assert_eq!(seen, want);
        }
        for (which, node) in nodes.iter_mut().enumerate() {
            prop_assert_eq!(node.is_linked(), position(&vector, which).is_some());
            list.remove(node);
            prop_assert!(!node.is_linked());
        }
        prop_assert!(list.seek(&nodes[0], true, |_| true).is_none());
        list.remove(&nodes[0]);
    }
}

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the substitute `kernel` crate, and of the module's node list. The node list
//! (`src/node_list.rs`) also has `unsafe` code, and uses nothing of the kernel.
//! `portable/kernel/lib.rs` is the root of this test program.
//!
//! - `fakes`: the functions of `portable/shim.c`, in Rust. The functions panic if the crate breaks
//!   a contract of C.
//! - `links`: `rb_insert_color()` and `rb_erase()`, in Rust.
//! - The other files: the tests, one file for each part of the crate.

mod alloc_tests;
mod fakes;
mod links;
#[path = "../../../src/node_list.rs"]
mod node_list;
mod node_list_tests;
mod pin_init_tests;
mod rbtree_tests;
mod sync_tests;
mod text_tests;

use std::cell::Cell;
use std::rc::Rc;

/// A value that counts its drops.
#[derive(Clone)]
struct Counted(Rc<Cell<usize>>);

impl Counted {
    /// Returns the counter, and a value.
    fn new() -> (Rc<Cell<usize>>, Counted) {
        let count = Rc::new(Cell::new(0));
        (count.clone(), Counted(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

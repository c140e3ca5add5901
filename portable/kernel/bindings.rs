// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Types and functions of the kernel's C code, the same for all kernels. `layout.c` asserts the
//! sizes and offsets below when the module is built. `shim.c` defines the functions named `shim_*`.

#![allow(
    missing_docs,
    non_camel_case_types,
    reason = "names of C, which C's headers document"
)]

use crate::ffi::{
    c_char,
    c_int,
    c_uint,
    c_ulong,
    c_void, //
};

pub type bool_ = bool;
pub type u32_ = u32;
pub type u64_ = u64;
pub type pid_t = c_int;
pub type umode_t = u16;
pub type dma_addr_t = u64;
pub type spinlock_t = spinlock;

/// Declares types that Rust code only uses behind pointers, without knowing their size.
macro_rules! opaque {
    ($($type:ident)*) => {
        $(
            #[repr(C)]
            pub struct $type {
                _opaque: [u8; 0],
            }
        )*
    };
}

opaque!(device lock_class_key module mutex pci_dev rw_semaphore seq_file spinlock wait_queue_head);

#[derive(Clone, Copy)]
#[repr(C)]
pub struct scatterlist {
    pub page_link: c_ulong,
    pub offset: c_uint,
    pub length: c_uint,
    pub dma_address: dma_addr_t,
    pub dma_length: c_uint,
    _padding: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct sg_table {
    pub sgl: *mut scatterlist,
    pub nents: c_uint,
    pub orig_nents: c_uint,
}

impl Default for sg_table {
    fn default() -> Self {
        sg_table {
            sgl: core::ptr::null_mut(),
            nents: 0,
            orig_nents: 0,
        }
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct dma_iova_state {
    pub addr: dma_addr_t,
    pub __size: u64,
}

#[repr(C)]
pub struct rb_node {
    pub __rb_parent_color: c_ulong,
    pub rb_right: *mut rb_node,
    pub rb_left: *mut rb_node,
}

#[repr(C)]
pub struct rb_root {
    pub rb_node: *mut rb_node,
}

pub const PCI_ANY_ID: c_int = -1;

/// Declares C functions. In host tests the functions are Rust functions, which may panic.
macro_rules! c_functions {
    ($($all:tt)*) => {
        #[cfg(not(test))]
        extern "C" {
            $($all)*
        }
        #[cfg(test)]
        extern "C-unwind" {
            $($all)*
        }
    };
}

c_functions! {
    pub fn shim_alloc(size: usize, warn: bool) -> *mut c_void;
    pub fn shim_free(memory: *mut c_void);
    pub fn shim_valloc(size: usize, warn: bool) -> *mut c_void;
    pub fn shim_vfree(memory: *mut c_void);

    pub fn shim_print(level: c_int, text: *const c_char, length: c_int);

    pub fn shim_mutex_init(lock: *mut mutex, name: *const c_char, key: *mut lock_class_key);
    pub fn shim_mutex_lock(lock: *mut mutex);
    pub fn shim_mutex_unlock(lock: *mut mutex);
    pub fn shim_spin_lock(lock: *mut spinlock_t);
    pub fn shim_spin_unlock(lock: *mut spinlock_t);
    #[link_name = "shim_down_read"]
    pub fn down_read(lock: *mut rw_semaphore);
    #[link_name = "shim_up_read"]
    pub fn up_read(lock: *mut rw_semaphore);
    #[link_name = "shim_down_write"]
    pub fn down_write(lock: *mut rw_semaphore);
    #[link_name = "shim_up_write"]
    pub fn up_write(lock: *mut rw_semaphore);

    pub fn shim_wait_init(
        queue: *mut wait_queue_head,
        name: *const c_char,
        key: *mut lock_class_key,
    );
    pub fn shim_wait(queue: *mut wait_queue_head, lock: *mut mutex);
    pub fn shim_wake_all(queue: *mut wait_queue_head);
    pub fn shim_sleep(microseconds: u64);

    #[link_name = "shim_seq_write"]
    pub fn seq_write(seq: *mut seq_file, text: *const c_void, length: usize);
    #[link_name = "shim_sg_next"]
    pub fn sg_next(at: *mut scatterlist) -> *mut scatterlist;
    #[link_name = "shim_module_get"]
    pub fn try_module_get(module: *mut module) -> bool;
    #[link_name = "shim_module_put"]
    pub fn module_put(module: *mut module);

    pub fn pci_dev_get(pdev: *mut pci_dev) -> *mut pci_dev;
    pub fn pci_dev_put(pdev: *mut pci_dev);
    pub fn pci_get_device(vendor: c_uint, device: c_uint, from: *mut pci_dev) -> *mut pci_dev;
    pub fn rb_erase(node: *mut rb_node, root: *mut rb_root);
    pub fn rb_insert_color(node: *mut rb_node, root: *mut rb_root);
    pub fn sg_free_table(table: *mut sg_table);
}

#[cfg(peermem_kunit)]
pub use crate::kunit::c::*;

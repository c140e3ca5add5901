// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the Rust code knows of the kernel's C: nothing that differs from kernel to kernel. `layout.c` holds the kernel at
//! hand to what is written here, so that one object serves them all.

#![allow(non_camel_case_types, non_snake_case, clippy::missing_safety_doc)]

use crate::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

pub type bool_ = bool;
pub type u8_ = u8;
pub type u16_ = u16;
pub type u32_ = u32;
pub type u64_ = u64;
pub type pid_t = c_int;
pub type umode_t = u16;
pub type dma_addr_t = u64;

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

// Behind pointers alone.
opaque!(device pci_dev dentry module seq_file rw_semaphore spinlock);

macro_rules! room {
    ($($type:ident: $bytes:literal;)*) => {
        $(
            /// Room for one of C's in any kernel: `layout.c` has the same number.
            #[derive(Clone, Copy)]
            #[repr(C)]
            pub struct $type {
                _room: [u64; $bytes / 8],
            }
        )*
    };
}

room! {
    mutex: 160;
    wait_queue_head: 96;
    lock_class_key: 64;
}

pub type wait_queue_head_t = wait_queue_head;
pub type spinlock_t = spinlock;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct scatterlist {
    pub page_link: c_ulong,
    pub offset: c_uint,
    pub length: c_uint,
    pub dma_address: dma_addr_t,
    pub dma_length: c_uint,
    _more: c_uint,
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

impl Default for rb_node {
    fn default() -> Self {
        rb_node {
            __rb_parent_color: 0,
            rb_right: core::ptr::null_mut(),
            rb_left: core::ptr::null_mut(),
        }
    }
}

#[repr(C)]
pub struct rb_root {
    pub rb_node: *mut rb_node,
}

pub const PCI_ANY_ID: c_int = -1;

extern "C" {
    pub fn shim_alloc(size: usize, warn: bool) -> *mut c_void;
    pub fn shim_free(memory: *mut c_void);
    pub fn shim_valloc(size: usize) -> *mut c_void;
    pub fn shim_vfree(memory: *mut c_void);
    pub fn shim_print(level: c_int, text: *const c_char, length: c_int);
    pub fn shim_mutex_init(lock: *mut mutex, name: *const c_char, key: *mut lock_class_key);
    pub fn shim_mutex_lock(lock: *mut mutex);
    pub fn shim_mutex_unlock(lock: *mut mutex);
    pub fn shim_spin_lock(lock: *mut spinlock_t);
    pub fn shim_spin_unlock(lock: *mut spinlock_t);
    pub fn shim_wait_init(queue: *mut wait_queue_head, name: *const c_char, key: *mut lock_class_key);
    pub fn shim_wait(queue: *mut wait_queue_head, lock: *mut mutex);
    pub fn shim_wake_all(queue: *mut wait_queue_head);
    pub fn shim_sleep(microseconds: u64);
    pub fn shim_seq_write(seq: *mut seq_file, text: *const c_void, length: usize);
    pub fn shim_module_get(module: *mut module) -> bool;
    pub fn shim_module_put(module: *mut module);

    pub fn shim_sg_next(at: *mut scatterlist) -> *mut scatterlist;
    pub fn sg_free_table(table: *mut sg_table);
    pub fn pci_dev_get(pdev: *mut pci_dev) -> *mut pci_dev;
    pub fn pci_dev_put(pdev: *mut pci_dev);
    pub fn pci_get_device(vendor: c_uint, device: c_uint, from: *mut pci_dev) -> *mut pci_dev;
    pub fn shim_down_read(lock: *mut rw_semaphore);
    pub fn shim_up_read(lock: *mut rw_semaphore);
    pub fn shim_down_write(lock: *mut rw_semaphore);
    pub fn shim_up_write(lock: *mut rw_semaphore);
    pub fn rb_insert_color(node: *mut rb_node, root: *mut rb_root);
    pub fn rb_erase(node: *mut rb_node, root: *mut rb_root);
}

// By the names that the `kernel` crate has for them.
pub use shim_down_read as down_read;
pub use shim_down_write as down_write;
pub use shim_module_get as try_module_get;
pub use shim_module_put as module_put;
pub use shim_seq_write as seq_write;
pub use shim_sg_next as sg_next;
pub use shim_up_read as up_read;
pub use shim_up_write as up_write;


// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The result of functions that fail only for lack of memory.

use crate::alloc::AllocError;

pub type Result<T> = std::result::Result<T, AllocError>;

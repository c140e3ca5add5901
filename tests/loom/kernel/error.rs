// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The result of functions that fail for want of memory alone.

use crate::alloc::AllocError;

pub type Result<T> = std::result::Result<T, AllocError>;

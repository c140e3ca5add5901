// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A library for `LD_PRELOAD`. Registers GPU memory by dma-buf for programs that only call
//! `ibv_reg_mr`, where the kernel has no peer memory. docs/dma-buf.md is the page for users.
//!
//! Every provider of rdma-core (`libmlx5`, `librxe`, …) calls `ibv_cmd_reg_mr` in libibverbs. This
//! library has functions of the same names ([`entry`]), which the dynamic linker finds first. They
//! call the real functions ([`verbs`]). If a real function fails on GPU memory, [`register`] exports
//! the memory ([`cuda`]) and registers the dma-buf. If dma-buf fails as well, [`report`] prints the
//! reason, and the program gets the error of its own call.
//!
//! No function takes a lock. After the first registration of a provider, a registration that succeeds
//! allocates nothing.

mod cuda;
mod devx;
mod entry;
mod register;
mod report;
mod verbs;

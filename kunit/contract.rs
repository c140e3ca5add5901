// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the module's two clients, on fakes of ib_core and nvidia.ko. The tests check how the
//! clients describe themselves to ib_core. They also check behaviour that needs real kernel locks,
//! or an ib_core that the test VM does not have.

use core::mem::{
    self,
    offset_of, //
};

use kernel::str::CStr;

use crate::{
    c::{
        peer_memory_client_ex,
        PEER_MEM_INVALIDATE_UNMAPS, //
    },
    clients::Persistent,
    ib::ClientRegistration,
    params,
    setup::*, //
};

suite!(
    mod peermem_client;

    /// MLNX_OFED 4.9 reads two function pointers directly behind the `peer_memory_client`
    /// structure, and calls each pointer that is not null.
    fn each_client_describes_itself() {
        let described = || descriptions().first().copied().ok_or(ENOENT);
        let seen = persistent(c"nv_mem").map(|_up| described())??;
        check!(!seen.can_revoke && !seen.flag);
        check!(seen.version_len.is_some_and(|len| len > 0 && len <= 14));
        let seen = revocable(ClientUnmaps).map(|_up| described())??;
        check!(seen.can_revoke && seen.flag);
        let least = offset_of!(peer_memory_client_ex, flags) + size_of::<u32>();
        check!(seen.ex_size >= least && seen.ex_size <= size_of::<peer_memory_client_ex>());
        same!((seen.name, seen.flags), (NvMem, PEER_MEM_INVALIDATE_UNMAPS));
        let seen = revocable(CoreUnmaps).map(|_up| described())??;
        check!(seen.can_revoke && seen.flag);
        same!((seen.ex_size, seen.flags, seen.pointers), (0, 0, [0, 0]));
    }

    fn what_does_not_fit_its_field_is_not_registered() {
        let attempt = |name: &CStr, version: &CStr| {
            ClientRegistration::<Persistent>::new(name, version, ClientUnmaps).err()
        };
        // The name may have 64 bytes and the version 15 bytes, including the NUL.
        let name = c"0123456789012345678901234567890123456789012345678901234567890123";
        let rest = c"012345678901234567890123456789012345678901234567890123456789012";
        same!(attempt(name, c"1"), Some(EINVAL));
        same!(attempt(c"nv_mem", c"0123456789abcde"), Some(EINVAL));
        logged![];
        same!(attempt(rest, c"0123456789abcd"), None);
        logged![Register(Other), Unregister(Other)];
    }

    /// A ticket from the client's first registration may still exist. A second registration of the
    /// client therefore returns `EBUSY`.
    fn a_client_that_revokes_is_registered_once() {
        drop(revocable(ClientUnmaps)?);
        log();
        let again = ClientRegistration::<OfTest>::new(c"nv_mem", params::version(), ClientUnmaps);
        same!(again.err(), Some(EBUSY));
        logged![];
    }

    /// If the first client has refused a range, the second client refuses the range in the same
    /// registration as well. In every other case, the second client takes the range.
    fn what_the_first_client_refuses_is_refused_once() {
        let range = pages(1);
        // The first two calls of `refuse` run while only the first client is registered.
        let refuse = move || {
            check!(fail_once(Call::Pin, ENOMEM.to_errno()).is_ok());
            check!(not_mine(range));
        };
        // A refusal on another thread has no effect on this thread.
        let first = revocable(ClientUnmaps)?;
        Thread::start(refuse)?.join();
        let second = persistent(c"nv_mem_nc")?;
        check!(!not_mine(cannot_lose(range)));
        drop((second, first));
        // The module forgets the refusal when ib_core next asks the first client about any range,
        // or asks the second client about the refused range.
        let _first = revocable(ClientUnmaps)?;
        refuse();
        let _second = persistent(c"nv_mem_nc")?;
        check!(!not_mine(pages(2)));
        check!(!not_mine(cannot_lose(range)));
        for next in rows([range, cannot_lose(range), cannot_lose(pages(2))]) {
            refuse();
            check!(!not_mine(next));
        }
    }

    /// Only OFED 4.9 releases a region inside the callback, and the test VM has another ib_core.
    fn ofed_4_9_releases_inside_the_callback() {
        let _up = revocable(CoreUnmaps)?;
        let range = Request {
            form: Form::Ofed49,
            ..pages(4)
        };
        get(range).ok_or(EIO)?;
        log();
        free_memory();
        logged![Callback, Invalidate, BarUnmap, Release, CallbackReturns];
        // The callback comes on the thread of another process.
        get(range).ok_or(EIO)?;
        log();
        Thread::start(free_memory)?.join();
        logged![Callback, Invalidate, BarUnmap, Release, CallbackReturns];
    }

    /// nvidia.ko holds the GPUs' locks while a callback runs. A callback must therefore not wait
    /// for an allocation, which may take long. Here, the callback comes during the first allocation
    /// for the list of physical addresses. For a long list, this allocation is for the first chunk.
    /// For a short list, it is for the whole list.
    fn a_callback_beside_an_allocation_of_acquire_waits_for_nothing() {
        let _up = revocable(ClientUnmaps)?;
        with(|world| world.table.address = EVERY_OTHER);
        for count in rows([1, 4, THREE_CHUNKS]) {
            log();
            at(Point::Allocating, || {
                if let Ok(thread) = Thread::start(free_memory) {
                    let ends = thread.ends();
                    check!(ends);
                    if !ends {
                        // The drop of `thread` would wait for the thread, and the thread waits for
                        // this registration.
                        mem::forget(thread);
                    }
                }
            })?;
            check!(not_mine(pages(count)));
            logged![Pin, Callback, CallbackReturns];
        }
    }

    /// lockdep makes this check, so the test can fail only on the debug kernel, which has lockdep.
    /// This callback drops the last reference to the region, and so takes every lock that a
    /// callback can take.
    fn no_lock_that_a_callback_takes_is_held_across_an_allocation() {
        let _up = revocable(ClientUnmaps)?;
        fake_user_limit(1 << 20);
        with(|world| world.table.address = EVERY_OTHER);
        let orphan = get(pages(THREE_CHUNKS)).ok_or(EIO)?;
        Thread::start(move || orphan.release())?.join();
        log();
        free_memory_in_reclaim();
        logged![Callback, CallbackReturns];
        fake_user_limit(0);
    }
);

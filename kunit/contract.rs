// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Rules that hold for every client of ib_core: its description, the ranges that it refuses, its
//! registration and its end.

use core::mem::offset_of;

use kernel::str::CStr;

use crate::{
    c::peer_memory_client_ex,
    clients::Persistent,
    ib::ClientRegistration,
    log::history,
    params,
    setup::*, //
};

fn described() -> Result<Description> {
    Ok(*descriptions().first().ok_or(ENOENT)?)
}

/// Returns the number of the next record.
fn recorded() -> u64 {
    history(|history| {
        let mut next = 0;
        while let Some((_, number)) = history.from(false, next) {
            next = number;
        }
        next
    })
}

suite!(
    mod peermem_client;

    fn a_client_has_all_functions_and_a_version_of_14_characters_at_most(_: NoClient) {
        let look = || -> Result {
            let seen = described()?;
            check!(seen.complete);
            same!(seen.name, NvMem);
            check!(seen.version_len.is_some_and(|len| len > 0 && len <= 14));
            Ok(())
        };
        persistent(c"nv_mem").map(|_up| look())??;
        revocable(ClientUnmaps).map(|_up| look())??;
    }

    fn a_client_that_never_revokes_takes_no_invalidation_and_has_no_flag(_: PersistentClient) {
        let seen = described()?;
        check!(!seen.can_revoke);
        check!(!seen.flag);
    }

    fn a_client_that_unmaps_by_itself_says_so_behind_the_structure(_: RevocableClient) {
        let seen = described()?;
        check!(seen.can_revoke && seen.flag);
        let least = offset_of!(peer_memory_client_ex, flags) + size_of::<u32>();
        check!(seen.ex_size >= least && seen.ex_size <= size_of::<peer_memory_client_ex>());
        same!(seen.flags, crate::c::PEER_MEM_INVALIDATE_UNMAPS);
    }

    /// MLNX_OFED 4.9 calls the functions that these pointers name, and ignores null pointers.
    fn ofed_4_9_finds_two_null_pointers_behind_the_structure(_: CoreUnmapsClient) {
        let seen = described()?;
        check!(seen.can_revoke && seen.flag);
        same!((seen.ex_size, seen.flags), (0, 0));
        same!(seen.pointers, [0, 0]);
    }

    fn a_registration_that_returns_null_is_an_error_and_is_not_undone(_: NoClient) {
        for _ in 0..2 {
            fail_once(Call::Register, 0)?;
            check!(persistent(c"nv_mem").is_err());
            logged![Register(NvMem)];
        }
        fail_once(Call::Register, 0)?;
        check!(revocable(ClientUnmaps).is_err());
        logged![Register(NvMem)];
    }

    fn what_does_not_fit_its_field_is_not_registered(_: NoClient) {
        let attempt = |name: &CStr, version: &CStr| {
            ClientRegistration::<Persistent>::new(name, version, ClientUnmaps).err()
        };
        // A name fits into 64 bytes and a version into 15 bytes, both with the NUL.
        let name = c"0123456789012345678901234567890123456789012345678901234567890123";
        let rest = c"012345678901234567890123456789012345678901234567890123456789012";
        same!(attempt(name, c"1"), Some(EINVAL));
        same!(attempt(c"nv_mem", c"0123456789abcde"), Some(EINVAL));
        logged![];
        same!(attempt(rest, c"0123456789abcd"), None);
        logged![Register(Other), Unregister(Other)];
    }

    /// Tickets of the first registration may still exist, so a second registration returns `EBUSY`.
    fn a_client_that_revokes_is_registered_once(_: NoClient) {
        drop(revocable(ClientUnmaps)?);
        log();
        let again = ClientRegistration::<OfTest>::new(c"nv_mem", params::version(), ClientUnmaps);
        same!(again.err(), Some(EBUSY));
        logged![];
    }

    /// ib_core may call `acquire` while the client is being registered.
    fn acquire_says_not_mine_before_the_module_is_up_and_after(_: NoClient) {
        let range = range();
        at(Point::Registering, move || check!(not_mine(range)))?;
        let version = params::version();
        let registration = ClientRegistration::<Persistent>::new(c"nv_mem", version, ClientUnmaps)?;
        let ready = Ready::new();
        get(range)?.release();
        drop(ready);
        log();
        check!(not_mine(range));
        logged![Acquire];
        drop(registration);
    }

    fn acquire_says_not_mine_when_the_module_is_going(_: BothClients) {
        with(|world| world.going = true);
        check!(not_mine(range()));
        logged![Acquire, Acquire];
    }

    fn each_refusal_is_kept_and_what_is_taken_leaves_nothing(_: BothClients) {
        let before = recorded();
        let mut range = range();
        // No other test uses this range.
        range.addr += 0x1234_0000;
        get(range)?.release();
        same!(recorded() - before, 0);
        // A repeated refusal has no record of its own.
        for _ in rows([1, 2]) {
            fail_once(Call::Pin, ENOMEM.to_errno())?;
            check!(not_mine(range));
            same!(recorded() - before, 1);
        }
        with(|world| world.going = true);
        check!(not_mine(range));
        same!(recorded() - before, 2);
    }

    /// The fake of ib_core checks the context after each `acquire` that returns 0.
    fn acquire_that_says_not_mine_leaves_the_context_and_has_nothing(_: BothClients) {
        for code in rows([EINVAL, ENOMEM, EIO, ENODEV, EBUSY]) {
            for nic in rows([EachNic::CAN_LOSE, EachNic::CANNOT_LOSE]) {
                fail_once(Call::Pin, code.to_errno())?;
                fail_once(Call::PinPersistent, code.to_errno())?;
                log();
                check!(not_mine(nic.range()));
                match nic.can_lose {
                    true => logged![Acquire, Pin, Acquire],
                    false => logged![Acquire, PinPersistent],
                }
                with(|world| world.nothing_fails());
                same!(holds(), 0);
            }
        }
    }

    /// A positive code must not reach ib_core, which would take it for success or turn it into a
    /// pointer.
    fn a_positive_code_of_a_pin_is_a_refusal(_: BothClients) {
        for code in rows([1, 5, c_int::MAX]) {
            fail_once(Call::Pin, code)?;
            check!(not_mine(EachNic::CAN_LOSE.range()));
            fail_once(Call::PinPersistent, code)?;
            check!(not_mine(EachNic::CANNOT_LOSE.range()));
        }
    }

    /// The second client refuses a range that the first has just refused for the same NIC. The
    /// second client takes all other ranges.
    fn what_the_first_client_refuses_is_refused_once(_: BothClients) {
        let can_lose = EachNic::CAN_LOSE.range();
        let cannot_lose = EachNic::CANNOT_LOSE.range();
        for next in rows([can_lose, cannot_lose, EachNic::CANNOT_LOSE.pages(1)]) {
            fail_once(Call::Pin, ENOMEM.to_errno())?;
            check!(not_mine(can_lose));
            get(next)?.release();
        }
        // A refusal on another thread does not count on this thread.
        fail_once(Call::Pin, ENOMEM.to_errno())?;
        Thread::start(move || check!(not_mine(can_lose)))?.join();
        get(cannot_lose)?.release();
    }

    /// ib_core asks no client after the first one, as between the registrations of the two clients.
    fn what_the_first_client_refuses_is_forgotten_in_the_next_search(_: NoClient) {
        let _first = revocable(ClientUnmaps)?;
        fail_once(Call::Pin, ENOMEM.to_errno())?;
        check!(not_mine(range()));
        let _second = persistent(c"nv_mem_nc")?;
        get(pages(1))?.release();
        get(EachNic::CANNOT_LOSE.range())?.release();
    }

    fn a_range_that_is_none_is_not_pinned(_: BothClients) {
        for (addr, len) in rows([
            (VA, 0),
            (0, 0),
            (u64::MAX, 1),
            (u64::MAX - 0xffff, 0xffff),
            (VA, usize::MAX),
            (0, (1 << 40) + 1),
            (1, 1 << 40),
        ]) {
            check!(not_mine(Request::new(addr, len)));
            logged![Acquire, Acquire];
        }
    }

    /// NICs that cannot lose a registration get the client that never revokes.
    fn clients_are_asked_in_order_and_only_what_the_nic_can_do(nic: EachNic) {
        let names = descriptions();
        same!(names.len(), 2);
        same!(names.first().map(|seen| seen.name), Some(NvMem));
        same!(names.last().map(|seen| seen.name), Some(NvMemNc));
        let umem = get(nic.range())?;
        same!(log().get(..2), Some(&[Acquire, nic.pin][..]));
        umem.release();
    }

    fn unregistering_waits_for_the_last_region(_: NoClient) {
        let mut up = Some(persistent(c"nv_mem")?);
        let first = get(pages(1))?;
        let second = get(pages(2))?;
        log();
        let thread = Thread::start(move || {
            drop(up.take());
            record(Mark("unregistered"));
        })?;
        check!(thread.waits());
        first.release();
        check!(thread.waits());
        second.release();
        thread.join();
        same!(regions(), 0);
        let log = log();
        same!(log.first(), Some(&Unregister(NvMem)));
        same!(log.last(), Some(&Mark("unregistered")));
        let released = log.iter().filter(|event| **event == PutPersistent);
        same!(released.count(), 2);
    }

    /// A region that pins memory keeps the module loaded.
    fn a_region_holds_the_module(nic: EachNic) {
        let umem = get(nic.range())?;
        check!(holds() > 0);
        umem.release();
        same!(holds(), 0);
    }
);

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What holds for every client of ib_core's: how it describes itself, when it says that a range is not
//! its, how it is registered and unregistered.

use kernel::prelude::*;

#[kunit_tests(peermem_client)]
mod tests {
    use core::mem::offset_of;

    use kernel::{
        prelude::*,
        str::CStr, //
    };

    use crate::{
        c::peer_memory_client_ex,
        clients::{
            Persistent,
            Ready, //
        },
        fakes::{
            at,
            check,
            fail_once,
            log,
            logged,
            record,
            same,
            test,
            with,
            Call,
            Event,
            Name,
            Point,
            Thread, //
        },
        ib::{
            Invalidation,
            Registration, //
        },
        ib_core::{
            descriptions,
            get,
            not_mine,
            regions,
            Description, //
        },
        log::journal,
        params,
        setup::{
            pages,
            persistent,
            persistent_as,
            revocable,
            OfTest,
            PAGES, //
        }, //
    };

    fn described() -> Result<Description> {
        Ok(*descriptions().first().ok_or(ENOENT)?)
    }

    #[test]
    fn a_client_has_all_functions_and_a_version_of_14_characters_at_most() -> Result {
        test(|| {
            for up in [true, false] {
                let persistent = up.then(persistent).transpose()?;
                let revocable = (!up)
                    .then(|| revocable(Invalidation::ClientUnmaps))
                    .transpose()?;
                let seen = described()?;
                check!(seen.complete);
                same!(seen.name, Name::NvMem);
                check!(seen.version_len.is_some_and(|len| len > 0 && len <= 14));
                drop((persistent, revocable));
            }
            Ok(())
        })
    }

    #[test]
    fn a_client_that_never_revokes_takes_no_invalidation_and_has_no_flag() -> Result {
        test(|| {
            let up = persistent()?;
            let seen = described()?;
            check!(!seen.can_revoke);
            check!(!seen.flag);
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn a_client_that_unmaps_by_itself_says_so_behind_the_structure() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let seen = described()?;
            check!(seen.can_revoke && seen.flag);
            let least = offset_of!(peer_memory_client_ex, flags) + size_of::<u32>();
            check!(seen.ex_size >= least && seen.ex_size <= size_of::<peer_memory_client_ex>());
            same!(seen.flags, crate::c::PEER_MEM_INVALIDATE_UNMAPS);
            drop(up);
            Ok(())
        })
    }

    /// It calls what they point to, and leaves a client alone that has any.
    #[test]
    fn ofed_4_9_finds_two_null_pointers_behind_the_structure() -> Result {
        test(|| {
            let up = revocable(Invalidation::CoreUnmaps)?;
            let seen = described()?;
            check!(seen.can_revoke && seen.flag);
            same!((seen.ex_size, seen.flags), (0, 0));
            same!(seen.pointers, [0, 0]);
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn a_registration_that_returns_null_is_an_error_and_is_not_undone() -> Result {
        test(|| {
            for _ in 0..2 {
                fail_once(Call::Register, 0)?;
                check!(persistent().is_err());
                logged![Event::Register(Name::NvMem)];
            }
            fail_once(Call::Register, 0)?;
            check!(revocable(Invalidation::ClientUnmaps).is_err());
            logged![Event::Register(Name::NvMem)];
            Ok(())
        })
    }

    #[test]
    fn what_does_not_fit_its_field_is_not_registered() -> Result {
        test(|| {
            let attempt = |name: &CStr, version: &CStr| {
                Registration::<Persistent>::new(name, version, Invalidation::ClientUnmaps).err()
            };
            // 64 bytes with the NUL, and 15.
            let name = c"0123456789012345678901234567890123456789012345678901234567890123";
            let rest = c"012345678901234567890123456789012345678901234567890123456789012";
            same!(attempt(name, c"1"), Some(EINVAL));
            same!(attempt(c"nv_mem", c"0123456789abcde"), Some(EINVAL));
            check!(log().is_empty());
            same!(attempt(rest, c"0123456789abcd"), None);
            logged![Event::Register(Name::Other), Event::Unregister(Name::Other)];
            Ok(())
        })
    }

    /// Tickets of the first time may be left.
    #[test]
    fn a_client_that_revokes_is_registered_once() -> Result {
        test(|| {
            drop(revocable(Invalidation::ClientUnmaps)?);
            log();
            let again = Registration::<OfTest>::new(
                c"nv_mem",
                params::version(),
                Invalidation::ClientUnmaps,
            );
            same!(again.err(), Some(EBUSY));
            logged![];
            Ok(())
        })
    }

    /// ib_core may ask while the client is being registered.
    #[test]
    fn acquire_says_not_mine_before_the_module_is_up_and_after() -> Result {
        test(|| {
            let range = pages(PAGES);
            at(Point::Registering, move || {
                check!(not_mine(range));
            })?;
            let registration = Registration::<Persistent>::new(
                c"nv_mem",
                params::version(),
                Invalidation::ClientUnmaps,
            )?;
            let ready = Ready::new();
            get(range).map_err(|_| EIO)?.release();
            drop(ready);
            log();
            check!(not_mine(range));
            logged![Event::Acquire];
            drop(registration);
            Ok(())
        })
    }

    #[test]
    fn acquire_says_not_mine_when_the_module_is_going() -> Result {
        test(|| {
            let both = (revocable(Invalidation::ClientUnmaps)?, persistent()?);
            log();
            with(|world| world.going = true);
            check!(not_mine(pages(PAGES)));
            logged![Event::Acquire, Event::Acquire];
            with(|world| world.going = false);
            drop(both);
            Ok(())
        })
    }

    /// The number of the record to come.
    fn recorded() -> u64 {
        journal(|journal| {
            let mut next = 0;
            while let Some((_, number)) = journal.from(false, next) {
                next = number;
            }
            next
        })
    }

    #[test]
    fn each_refusal_is_kept_and_what_is_taken_leaves_nothing() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            let before = recorded();
            let mut range = pages(PAGES);
            // No other test's: what repeats has no record of its own.
            range.addr += 0x1234_0000;
            get(range).map_err(|_| EIO)?.release();
            same!(recorded() - before, 0);
            for times in [2, 2] {
                fail_once(Call::Pin, ENOMEM.to_errno())?;
                fail_once(Call::PinPersistent, ENOMEM.to_errno())?;
                check!(not_mine(range));
                same!(recorded() - before, times);
            }
            with(|world| world.going = true);
            check!(not_mine(range));
            with(|world| world.going = false);
            same!(recorded() - before, 4);
            drop(both);
            Ok(())
        })
    }

    /// The context is looked at wherever `acquire` says so.
    #[test]
    fn acquire_that_says_not_mine_leaves_the_context_and_has_nothing() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            for code in [EINVAL, ENOMEM, EIO, ENODEV, EBUSY] {
                fail_once(Call::Pin, code.to_errno())?;
                fail_once(Call::PinPersistent, code.to_errno())?;
                log();
                check!(not_mine(pages(PAGES)));
                logged![
                    Event::Acquire,
                    Event::Pin,
                    Event::Acquire,
                    Event::PinPersistent
                ];
                same!(with(|world| world.holds), 0);
            }
            drop(both);
            Ok(())
        })
    }

    /// Neither as success nor as anything else: ib_core would make a pointer of it.
    #[test]
    fn a_positive_code_of_a_pin_is_a_refusal() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            for code in [1, 5, c_int::MAX] {
                fail_once(Call::Pin, code)?;
                fail_once(Call::PinPersistent, code)?;
                check!(not_mine(pages(PAGES)));
            }
            drop(both);
            Ok(())
        })
    }

    #[test]
    fn a_range_that_is_none_is_not_pinned() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            log();
            for (addr, len) in [
                (crate::setup::VA, 0),
                (0, 0),
                (u64::MAX, 1),
                (u64::MAX - 0xffff, 0xffff),
                (crate::setup::VA, usize::MAX),
                (0, (1 << 40) + 1),
                (1, 1 << 40),
            ] {
                let mut range = pages(PAGES);
                (range.addr, range.len) = (addr, len);
                check!(not_mine(range));
                logged![Event::Acquire, Event::Acquire];
            }
            drop(both);
            Ok(())
        })
    }

    /// Cards that cannot lose a registration are for the client that never revokes.
    #[test]
    fn clients_are_asked_in_order_and_only_what_the_card_can_do() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            let names = descriptions();
            same!(names.len(), 2);
            same!(names.first().map(|seen| seen.name), Some(Name::NvMem));
            same!(names.last().map(|seen| seen.name), Some(Name::NvMemNc));
            let mut range = pages(PAGES);
            for (can_lose, pin) in [(true, Event::Pin), (false, Event::PinPersistent)] {
                range.can_lose = can_lose;
                log();
                let umem = get(range).map_err(|_| EIO)?;
                same!(log().get(..2), Some(&[Event::Acquire, pin][..]));
                umem.release();
            }
            drop(both);
            Ok(())
        })
    }

    #[test]
    fn unregistering_waits_for_the_last_region() -> Result {
        test(|| {
            let up = persistent()?;
            let first = get(pages(1)).map_err(|_| EIO)?;
            let second = get(pages(2)).map_err(|_| EIO)?;
            log();
            let mut up = Some(up);
            let thread = Thread::start(move || {
                drop(up.take());
                record(Event::Mark("unregistered"));
            })?;
            check!(thread.waits());
            first.release();
            check!(thread.waits());
            second.release();
            thread.join();
            same!(regions(), 0);
            let log = log();
            same!(log.first(), Some(&Event::Unregister(Name::NvMem)));
            same!(log.last(), Some(&Event::Mark("unregistered")));
            let released = log.iter().filter(|event| **event == Event::PutPersistent);
            same!(released.count(), 2);
            Ok(())
        })
    }

    /// What pins memory keeps the module loaded.
    #[test]
    fn a_region_holds_the_module() -> Result {
        test(|| {
            let both = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            for can_lose in [true, false] {
                let mut range = pages(PAGES);
                range.can_lose = can_lose;
                let umem = get(range).map_err(|_| EIO)?;
                check!(with(|world| world.holds) > 0);
                umem.release();
                same!(with(|world| world.holds), 0);
            }
            drop(both);
            Ok(())
        })
    }
}

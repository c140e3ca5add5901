// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The memory goes first: what a callback of nvidia.ko's and the calls of ib_core's do to each other, at every
//! step of a registration.
//!
//! Where two threads take part, each is stopped at a named point, or seen to sleep for a lock: no test
//! depends on time.

use kernel::prelude::*;

#[kunit_tests(peermem_revocation)]
mod tests {
    use kernel::prelude::*;

    use crate::{
        fakes::{
            at,
            check,
            free_memory,
            free_memory_at,
            join_kept,
            keep,
            log,
            logged,
            pins,
            record,
            same,
            test,
            with,
            Event::*,
            Gate,
            Point,
            Thread,
            KIB_64, //
        },
        ib::Invalidation::{
            self,
            ClientUnmaps,
            CoreUnmaps, //
        },
        ib_core::{
            failure,
            free_at,
            get,
            not_mine,
            Device,
            Failed,
            Form,
            Request,
            Umem, //
        },
        setup::{
            pages,
            persistent_as,
            revocable,
            PAGES,
            VA, //
        }, //
    };

    /// A registration that is up.
    fn mapped(request: Request) -> Result<Umem> {
        let umem = get(request).map_err(|_| EIO)?;
        log();
        Ok(umem)
    }

    /// Runs `body` with the revocable client alone, and looks that the module is not held at the end.
    fn with_client(invalidation: Invalidation, body: impl FnOnce() -> Result) -> Result {
        test(|| {
            let up = revocable(invalidation)?;
            log();
            body()?;
            same!(with(|world| world.holds), 0);
            drop(up);
            Ok(())
        })
    }

    // --- one thread: what is called, in which order ----------------------------------------------

    #[test]
    fn a_client_that_unmaps_stops_the_card_first_and_core_calls_neither_function() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_memory();
            logged![
                Callback,
                Invalidate(umem.ticket()),
                CardStops,
                BarUnmap,
                CallbackReturns
            ];
            umem.release();
            // A revoked pin is not put: its table's address may be another pin's.
            logged![Release];
            Ok(())
        })
    }

    /// `peerdirect_support=1`.
    #[test]
    fn a_client_that_does_not_unmap_has_both_called_inside_the_invalidation() -> Result {
        with_client(CoreUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_memory();
            logged![
                Callback,
                Invalidate(umem.ticket()),
                CardStops,
                DmaUnmap,
                BarUnmap,
                PutPages,
                CallbackReturns
            ];
            umem.release();
            logged![Release];
            Ok(())
        })
    }

    #[test]
    fn ofed_4_9_releases_inside_the_callback_on_its_thread() -> Result {
        with_client(CoreUnmaps, || {
            let mut request = pages(PAGES);
            request.form = Form::Ofed49;
            let umem = mapped(request)?;
            free_memory();
            logged![
                Callback,
                Invalidate(umem.ticket()),
                CardStops,
                DmaUnmap,
                BarUnmap,
                PutPages,
                Release,
                CallbackReturns
            ];
            Ok(())
        })
    }

    #[test]
    fn ofed_4_9_releases_inside_the_callback_of_another_process() -> Result {
        with_client(CoreUnmaps, || {
            let mut request = pages(PAGES);
            request.form = Form::Ofed49;
            let _umem = mapped(request)?;
            Thread::start(free_memory)?.join();
            check!(log().contains(&Release));
            Ok(())
        })
    }

    /// Before get_pages has given a ticket there is nobody to revoke: get_pages fails.
    #[test]
    fn a_failing_get_pages_is_followed_by_release_alone() -> Result {
        with_client(ClientUnmaps, || {
            free_at(Point::BeforeGetPages)?;
            let failed = failure(pages(PAGES));
            same!(failed, Some(Failed::GetPages(EINVAL.to_errno())));
            logged![Acquire, Pin, Callback, CallbackReturns, GetPages, Release];
            Ok(())
        })
    }

    #[test]
    fn a_callback_before_the_pin_has_returned_makes_acquire_say_not_mine() -> Result {
        with_client(ClientUnmaps, || {
            free_at(Point::Pinning)?;
            check!(not_mine(pages(PAGES)));
            logged![Acquire, Pin, Callback, CallbackReturns];
            Ok(())
        })
    }

    /// And the persistent client, which is asked next, takes what is there then.
    #[test]
    fn memory_that_was_revoked_in_acquire_is_offered_to_the_next_client() -> Result {
        test(|| {
            let up = (revocable(ClientUnmaps)?, persistent_as(c"nv_mem_nc")?);
            log();
            free_at(Point::Pinning)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            logged![
                Acquire,
                Pin,
                Callback,
                CallbackReturns,
                Acquire,
                PinPersistent,
                GetPages,
                DmaMap,
                Map,
                PageSize
            ];
            umem.release();
            drop(up);
            Ok(())
        })
    }

    /// They are small numbers, and 0 is one.
    #[test]
    fn a_ticket_of_any_value_comes_back_as_it_is() -> Result {
        with_client(ClientUnmaps, || {
            for ticket in [0, 1, 7, 0x8000_0000, 0xffff_fffe, 0xffff_ffff, u64::MAX] {
                let mut request = pages(PAGES);
                request.ticket = Some(ticket);
                let umem = mapped(request)?;
                free_memory();
                logged![
                    Callback,
                    Invalidate(ticket),
                    CardStops,
                    BarUnmap,
                    CallbackReturns
                ];
                umem.release();
                log();
            }
            Ok(())
        })
    }

    #[test]
    fn every_region_of_an_allocation_is_revoked_by_its_own_ticket() -> Result {
        with_client(ClientUnmaps, || {
            let first = mapped(pages(PAGES))?;
            let second = mapped(pages(1))?;
            free_memory();
            logged![
                Callback,
                Invalidate(first.ticket()),
                CardStops,
                BarUnmap,
                CallbackReturns,
                Callback,
                Invalidate(second.ticket()),
                CardStops,
                BarUnmap,
                CallbackReturns
            ];
            first.release();
            second.release();
            Ok(())
        })
    }

    #[test]
    fn a_region_is_revoked_once() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_memory();
            log();
            free_memory();
            logged![];
            umem.release();
            Ok(())
        })
    }

    /// With the table zeroed that ib_core has no more.
    #[test]
    fn dma_unmap_after_an_invalidation_does_nothing() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_memory();
            log();
            umem.release_with_late_unmap();
            logged![DmaUnmap, PutPages, Release];
            Ok(())
        })
    }

    /// `ib_umem_stop_invalidation_notifier()` lets go of its lock, and writes to the table.
    #[test]
    fn the_table_is_there_for_ib_core_after_a_revocation() -> Result {
        with_client(ClientUnmaps, || {
            for count in [1, PAGES, 300] {
                with(|world| {
                    world.table.address = |page| crate::fakes::BAR + 2 * page * KIB_64;
                });
                let mut request = pages(count);
                request.addr += 100;
                request.len -= 200;
                let umem = mapped(request)?;
                free_at(Point::BeforeDmaUnmap)?;
                umem.stop();
                let log = log();
                same!(log.first(), Some(&Callback));
                same!(log.get(1), Some(&Invalidate(umem.ticket())));
                check!(!log.contains(&CardStops));
                same!(log.last(), Some(&PutPages));
                umem.release();
            }
            Ok(())
        })
    }

    #[test]
    fn a_callback_between_dma_unmap_and_put_pages_finds_nothing_mapped() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_at(Point::BeforePutPages)?;
            umem.release();
            logged![
                DmaUnmap,
                BarUnmap,
                Callback,
                Invalidate(umem.ticket()),
                CallbackReturns,
                PutPages,
                Release
            ];
            Ok(())
        })
    }

    /// The ticket is forgotten by ib_core, and known to the module.
    #[test]
    fn a_callback_right_before_release_does_nothing_to_ib_core() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            free_at(Point::BeforeRelease)?;
            umem.release();
            check!(!log().contains(&CardStops));
            Ok(())
        })
    }

    /// Where the put did nothing, a callback comes after `release`. By then the ticket is another
    /// region's.
    #[test]
    fn a_callback_after_release_does_not_revoke_the_next_owner_of_the_ticket() -> Result {
        with_client(ClientUnmaps, || {
            let mut request = pages(PAGES);
            request.ticket = Some(3);
            let orphan = mapped(request)?;
            Thread::start(move || orphan.release())?.join();
            same!(pins(), 1);
            request.addr = VA + (1 << 30);
            let next = mapped(request)?;
            free_memory_at(VA);
            logged![Callback, CallbackReturns];
            free_memory();
            logged![
                Callback,
                Invalidate(3),
                CardStops,
                BarUnmap,
                CallbackReturns
            ];
            next.release();
            Ok(())
        })
    }

    // --- two threads -----------------------------------------------------------------------------

    /// Starts a callback, which comes as far as `mapping_lock`.
    fn callback_waits_at(point: Point) -> Result {
        at(point, || {
            if let Ok(thread) = Thread::start(free_memory) {
                check!(thread.waits());
                keep(thread);
            }
        })
    }

    /// ib_core has its `mapping_lock` from get_pages on, and the callback wants it, with the API lock held:
    /// dma_map can wait for neither, and nobody would unmap what it maps now.
    #[test]
    fn dma_map_after_a_callback_has_begun_is_refused() -> Result {
        with_client(ClientUnmaps, || {
            let mut request = pages(PAGES);
            request.ticket = Some(9);
            callback_waits_at(Point::BeforeDmaMap)?;
            let failed = failure(request);
            same!(failed, Some(Failed::DmaMap(EINVAL.to_errno())));
            join_kept();
            let log = log();
            let want = [
                Acquire,
                Pin,
                GetPages,
                Callback,
                Invalidate(9),
                DmaMap,
                PutPages,
            ];
            same!(log.get(..7), Some(&want[..]));
            // And these two, in either order.
            same!(log.len(), 9);
            check!(log.contains(&Release) && log.contains(&CallbackReturns));
            Ok(())
        })
    }

    #[test]
    fn a_callback_after_dma_map_waits_for_ib_core_and_revokes_then() -> Result {
        for invalidation in [ClientUnmaps, CoreUnmaps] {
            with_client(invalidation, || {
                let mut request = pages(PAGES);
                request.ticket = Some(9);
                callback_waits_at(Point::BeforeActivate)?;
                let umem = get(request).map_err(|_| EIO)?;
                join_kept();
                let log = log();
                same!(
                    log.get(..9),
                    Some(
                        &[
                            Acquire,
                            Pin,
                            GetPages,
                            DmaMap,
                            BarMap,
                            PageSize,
                            Callback,
                            Invalidate(9),
                            CardStops
                        ][..]
                    )
                );
                check!(log.contains(&BarUnmap));
                umem.release();
                Ok(())
            })?;
        }
        Ok(())
    }

    /// ib_core holds `mapping_lock` around them. That they take no API lock there is looked at wherever a
    /// region is registered: see `fakes::api_locked`.
    #[test]
    fn get_pages_and_dma_map_take_no_lock_that_is_held_around_a_callback() -> Result {
        for invalidation in [ClientUnmaps, CoreUnmaps] {
            with_client(invalidation, || {
                let umem = mapped(pages(PAGES))?;
                umem.stop();
                umem.release();
                // And where they fail.
                let mut request = pages(PAGES);
                request.device = Device::NULL;
                check!(get(request).is_err());
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A callback that has found its pin alive, and one in every later state: `release` on another thread
    /// waits for each. ib_core clears a pointer after `release` that the invalidation reads.
    #[test]
    fn release_waits_for_a_callback_inside_ib_core() -> Result {
        for point in [
            Point::InvalidateGotRef,
            Point::InvalidateLocked,
            Point::InvalidateUnlocked,
            Point::BarUnmapping,
        ] {
            with_client(ClientUnmaps, || {
                let umem = mapped(pages(PAGES))?;
                // The unmapping of a release is none of the callback's: stopped before it begins.
                let gate = Gate::at(point)?;
                let callback = Thread::start(free_memory)?;
                gate.reached();
                let release = Thread::start(move || {
                    umem.release();
                    record(Mark("released"));
                })?;
                check!(release.waits());
                check!(!log().contains(&Mark("released")));
                gate.open();
                callback.join();
                release.join();
                check!(log().contains(&Mark("released")));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The process that pinned releases: its put waits for the API lock, and finds nothing then.
    #[test]
    fn a_put_beside_a_callback_waits_and_finds_nothing() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            umem.stop();
            log();
            let gate = Gate::at(Point::CallingBack)?;
            let callback = Thread::start(free_memory)?;
            gate.reached();
            let passed = gate.clone();
            // When the put has come as far as the lock.
            at(Point::Putting, move || passed.open())?;
            umem.release();
            callback.join();
            logged![Release, Callback, CallbackReturns, PutNothing];
            Ok(())
        })
    }

    /// nvidia.ko's mark comes after ours; what is put in between is another pin's.
    #[test]
    fn no_pin_is_made_between_the_look_and_the_put() -> Result {
        test(|| {
            let up = (revocable(ClientUnmaps)?, persistent_as(c"nv_mem_nc")?);
            for can_lose in [true, false] {
                let umem = mapped(pages(PAGES))?;
                umem.stop();
                log();
                let mut request = pages(PAGES);
                request.can_lose = can_lose;
                at(Point::Putting, move || {
                    let thread = Thread::start(move || {
                        check!(get(request).map(|umem| umem.release()).is_ok());
                    });
                    if let Ok(thread) = thread {
                        check!(thread.waits());
                        let log = log();
                        check!(!log.contains(&Pin) && !log.contains(&PinPersistent));
                        keep(thread);
                    }
                })?;
                umem.release();
                join_kept();
                free_memory();
            }
            drop(up);
            Ok(())
        })
    }

    /// The gate is for puts alone: registrations of many processes pin beside each other.
    #[test]
    fn pins_are_made_beside_each_other() -> Result {
        with_client(ClientUnmaps, || {
            let gate = Gate::at(Point::Pinning)?;
            let first = Thread::start(|| {
                if let Ok(umem) = get(pages(PAGES)) {
                    umem.release();
                }
            })?;
            gate.reached();
            let second = get(pages(1)).map_err(|_| EIO)?;
            second.stop();
            gate.open();
            first.join();
            second.release();
            Ok(())
        })
    }

    /// ib_core's thread is in dma_unmap with `mapping_lock` held, the callback wants that lock and has the
    /// API lock: neither dma_unmap nor put_pages may take it.
    #[test]
    fn dma_unmap_and_put_pages_need_nothing_that_a_callback_has() -> Result {
        with_client(CoreUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            callback_waits_at(Point::BeforeDmaUnmap)?;
            umem.stop();
            join_kept();
            logged![
                Callback,
                Invalidate(umem.ticket()),
                DmaUnmap,
                BarUnmap,
                PutPages,
                CallbackReturns
            ];
            umem.release();
            logged![Release];
            Ok(())
        })
    }

    /// A client that unmaps is called beside its own invalidation: one of the two unmaps.
    #[test]
    fn dma_unmap_beside_a_callback_that_unmaps_waits_and_does_nothing() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            let gate = Gate::at(Point::BarUnmapping)?;
            let callback = Thread::start(free_memory)?;
            gate.reached();
            let late = umem.clone();
            let unmap = Thread::start(move || late.release_with_late_unmap())?;
            check!(unmap.waits());
            gate.open();
            callback.join();
            unmap.join();
            let log = log();
            same!(log.iter().filter(|event| **event == BarUnmap).count(), 1);
            check!(log.contains(&DmaUnmap));
            Ok(())
        })
    }

    #[test]
    fn a_callback_beside_dma_unmap_waits_and_does_nothing() -> Result {
        with_client(ClientUnmaps, || {
            let umem = mapped(pages(PAGES))?;
            let gate = Gate::at(Point::BarUnmapping)?;
            let other = umem.clone();
            let unmap = Thread::start(move || other.stop())?;
            gate.reached();
            let callback = Thread::start(free_memory)?;
            check!(callback.waits());
            gate.open();
            unmap.join();
            callback.join();
            let log = log();
            same!(log.iter().filter(|event| **event == BarUnmap).count(), 1);
            umem.release();
            Ok(())
        })
    }

    /// A callback stays on its thread while others come and go.
    #[test]
    fn a_callback_of_one_region_does_not_keep_another_from_its_release() -> Result {
        with_client(ClientUnmaps, || {
            let first = mapped(pages(PAGES))?;
            let mut request = pages(PAGES);
            request.addr = VA + (1 << 30);
            let second = mapped(request)?;
            second.stop();
            let gate = Gate::at(Point::InvalidateLocked)?;
            let callback = Thread::start(|| free_memory_at(VA))?;
            gate.reached();
            // By another process, for a put waits for the API lock, and thus for every callback.
            let other = second.clone();
            Thread::start(move || other.release())?.join();
            gate.open();
            callback.join();
            free_memory();
            first.release();
            Ok(())
        })
    }

    /// A put would get -EIO there.
    #[test]
    fn a_region_released_inside_the_callback_of_another_is_put_by_its_own_callback() -> Result {
        with_client(ClientUnmaps, || {
            let first = mapped(pages(PAGES))?;
            let mut request = pages(PAGES);
            request.addr = VA + (1 << 30);
            let second = mapped(request)?;
            // Outside mapping_lock, which the release takes too, its own one.
            at(Point::InvalidateUnlocked, move || second.release())?;
            free_memory_at(VA);
            logged![
                Callback,
                Invalidate(first.ticket()),
                CardStops,
                DmaUnmap,
                BarUnmap,
                PutPages,
                Release,
                BarUnmap,
                CallbackReturns
            ];
            check!(with(|world| world.holds) > 0);
            first.release();
            log();
            free_memory();
            logged![Callback, CallbackReturns];
            Ok(())
        })
    }

    /// Tickets and the handle of the client go together.
    #[test]
    fn a_callback_after_the_client_is_gone_does_not_use_its_handle() -> Result {
        test(|| {
            let up = revocable(ClientUnmaps)?;
            let orphan = mapped(pages(PAGES))?;
            Thread::start(move || orphan.release())?.join();
            drop(up);
            log();
            free_memory();
            logged![Callback, CallbackReturns];
            same!(with(|world| world.holds), 0);
            Ok(())
        })
    }
}

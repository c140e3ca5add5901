// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests in which the memory is freed before the region is released. A callback of nvidia.ko runs
//! beside the calls of ib_core at every step of a registration.
//!
//! In tests with two threads, each thread is stopped at a named point, or is observed to sleep for
//! a lock. No test depends on time.

use crate::setup::*;

/// Returns a range of another allocation.
fn elsewhere() -> Request {
    let mut request = range();
    request.addr = VA + (1 << 30);
    request
}

fn with_ticket(ticket: u64) -> Request {
    let mut request = range();
    request.ticket = Some(ticket);
    request
}

fn of_ofed_4_9() -> Request {
    let mut request = range();
    request.form = Form::Ofed49;
    request
}

/// Starts a callback at `point`. The callback waits for `mapping_lock`.
fn callback_waits_at(point: Point) -> Result {
    at(point, || {
        if let Ok(thread) = Thread::start(free_memory) {
            check!(thread.waits());
            keep(thread);
        }
    })
}

/// Starts a thread that stays at `point` until the latch is opened.
fn stopped_at(point: Point, body: impl FnMut() + Send + 'static) -> Result<(Latch, Thread)> {
    let latch = Latch::at(point)?;
    let thread = Thread::start(body)?;
    latch.reached();
    Ok((latch, thread))
}

/// Checks that the second thread waits for the first, until the latch that stops the first is
/// opened.
fn waits_for((latch, first): (Latch, Thread), second: Thread) {
    check!(second.waits());
    latch.open();
    first.join();
    second.join();
}

/// The revocable client alone. Each test runs once with a client that unmaps, and once with an
/// ib_core that unmaps.
struct EachInvalidation;

impl SetUp for EachInvalidation {
    fn case(mut body: impl FnMut(&Self) -> Result) -> Result {
        for core_unmaps in rows([false, true]) {
            if core_unmaps {
                CoreUnmapsClient::case(|_| body(&EachInvalidation))?;
            } else {
                RevocableClient::case(|_| body(&EachInvalidation))?;
            }
        }
        Ok(())
    }
}

suite!(
    mod peermem_revocation;

    // --- one thread: the calls and their order ---------------------------------------------------

    fn a_client_that_unmaps_stops_the_nic_first_and_core_calls_neither_function(
        _: RevocableClient,
    ) {
        let umem = mapped(range())?;
        calls!(free_memory() =>
            Callback, Invalidate(umem.ticket()), NicStops, BarUnmap, CallbackReturns);
        // A revoked pin is not put, because another pin may have the address of its table.
        calls!(umem.release() => Release);
    }

    fn a_client_that_does_not_unmap_has_both_called_inside_the_invalidation(_: CoreUnmapsClient) {
        let umem = mapped(range())?;
        calls!(free_memory() =>
            Callback, Invalidate(umem.ticket()), NicStops, DmaUnmap, BarUnmap, PutPages,
            CallbackReturns);
        calls!(umem.release() => Release);
    }

    fn ofed_4_9_releases_inside_the_callback_on_its_thread(_: CoreUnmapsClient) {
        let umem = mapped(of_ofed_4_9())?;
        calls!(free_memory() =>
            Callback, Invalidate(umem.ticket()), NicStops, DmaUnmap, BarUnmap, PutPages, Release,
            CallbackReturns);
    }

    fn ofed_4_9_releases_inside_the_callback_of_another_process(_: CoreUnmapsClient) {
        let _umem = mapped(of_ofed_4_9())?;
        Thread::start(free_memory)?.join();
        check!(log().contains(&Release));
    }

    /// Before get_pages passes the ticket, nothing can be revoked, so get_pages fails.
    fn a_failing_get_pages_is_followed_by_release_alone(_: RevocableClient) {
        free_at(Point::BeforeGetPages)?;
        same!(failure(range()), Some(Failed::GetPages(EINVAL.to_errno())));
        logged![Acquire, Pin, Callback, CallbackReturns, GetPages, Release];
    }

    fn a_callback_before_the_pin_has_returned_makes_acquire_say_not_mine(_: RevocableClient) {
        free_at(Point::Pinning)?;
        check!(not_mine(range()));
        logged![Acquire, Pin, Callback, CallbackReturns];
    }

    /// nvidia.ko holds the locks of the GPUs while it waits for a callback, and an allocation may
    /// take long. The first allocation either grows the list of the pages read so far, or completes
    /// the list.
    fn a_callback_beside_an_allocation_of_acquire_waits_for_nothing(_: RevocableClient) {
        lies(EVERY_OTHER);
        for count in rows([1, PAGES, THREE_CHUNKS]) {
            at(Point::Allocating, || {
                if let Ok(thread) = Thread::start(free_memory) {
                    check!(!thread.waits());
                    keep(thread);
                }
            })?;
            check!(not_mine(pages(count)));
            join_kept();
            logged![Acquire, Pin, Callback, CallbackReturns];
        }
    }

    /// lockdep makes the check, so the test can fail only on the debug kernel. The callback takes
    /// all locks that any callback can take, because it drops the last reference to the region.
    fn no_lock_that_a_callback_takes_is_held_across_an_allocation(_: NoClient) {
        let _up = revocable(ClientUnmaps)?;
        fake_user_limit(1 << 20);
        lies(EVERY_OTHER);
        let orphan = mapped(pages(THREE_CHUNKS))?;
        Thread::start(move || orphan.release())?.join();
        log();
        calls!(free_memory_in_reclaim() => Callback, CallbackReturns);
        fake_user_limit(0);
    }

    /// ib_core asks the persistent client next, which does not take the new memory at the address.
    fn memory_that_was_revoked_in_acquire_is_not_the_next_clients(_: BothClients) {
        free_at(Point::Pinning)?;
        let is_refused = calls!(not_mine(range()) =>
            Acquire, Pin, Callback, CallbackReturns, Acquire);
        check!(is_refused);
    }

    /// Tickets are small numbers, and 0 is a ticket.
    fn a_ticket_of_any_value_comes_back_as_it_is(_: RevocableClient) {
        for ticket in rows([0, 1, 7, 0x8000_0000, 0xffff_fffe, 0xffff_ffff, u64::MAX]) {
            let umem = mapped(with_ticket(ticket))?;
            calls!(free_memory() =>
                Callback, Invalidate(ticket), NicStops, BarUnmap, CallbackReturns);
            umem.release();
        }
    }

    fn every_region_of_an_allocation_is_revoked_by_its_own_ticket(_: RevocableClient) {
        let first = mapped(range())?;
        let second = mapped(pages(1))?;
        calls!(free_memory() =>
            Callback, Invalidate(first.ticket()), NicStops, BarUnmap, CallbackReturns,
            Callback, Invalidate(second.ticket()), NicStops, BarUnmap, CallbackReturns);
        first.release();
        second.release();
    }

    fn a_region_is_revoked_once(_: RevocableClient) {
        let umem = mapped(range())?;
        free_memory();
        log();
        calls!(free_memory() => );
        umem.release();
    }

    /// The call passes an empty table, because ib_core no longer has the real one.
    fn dma_unmap_after_an_invalidation_does_nothing(_: RevocableClient) {
        let umem = mapped(range())?;
        free_memory();
        log();
        calls!(umem.release_with_late_unmap() => DmaUnmap, PutPages, Release);
    }

    /// `ib_umem_stop_invalidation_notifier()` releases its lock, and writes to the table.
    fn the_table_is_there_for_ib_core_after_a_revocation(_: RevocableClient) {
        lies(EVERY_OTHER);
        for count in rows([1, PAGES, THREE_CHUNKS]) {
            let mut request = pages(count);
            request.addr += 100;
            request.len -= 200;
            let umem = mapped(request)?;
            free_at(Point::BeforeDmaUnmap)?;
            umem.stop();
            let log = log();
            same!(log.first(), Some(&Callback));
            same!(log.get(1), Some(&Invalidate(umem.ticket())));
            check!(!log.contains(&NicStops));
            same!(log.last(), Some(&PutPages));
            umem.release();
        }
    }

    fn a_callback_between_dma_unmap_and_put_pages_finds_nothing_mapped(_: RevocableClient) {
        let umem = mapped(range())?;
        free_at(Point::BeforePutPages)?;
        calls!(umem.release() =>
            DmaUnmap, BarUnmap, Callback, Invalidate(umem.ticket()), CallbackReturns, PutPages,
            Release);
    }

    /// ib_core has forgotten the ticket, but the module still has it.
    fn a_callback_right_before_release_does_nothing_to_ib_core(_: RevocableClient) {
        let umem = mapped(range())?;
        free_at(Point::BeforeRelease)?;
        umem.release();
        check!(!log().contains(&NicStops));
    }

    /// If the put did nothing, a callback comes after `release`, when another region has the
    /// ticket.
    fn a_callback_after_release_does_not_revoke_the_next_owner_of_the_ticket(_: RevocableClient) {
        let orphan = mapped(with_ticket(3))?;
        Thread::start(move || orphan.release())?.join();
        same!(pins(), 1);
        let mut request = elsewhere();
        request.ticket = Some(3);
        let next = mapped(request)?;
        calls!(free_memory_at(VA) => Callback, CallbackReturns);
        calls!(free_memory() => Callback, Invalidate(3), NicStops, BarUnmap, CallbackReturns);
        next.release();
    }

    // --- two threads -----------------------------------------------------------------------------

    /// ib_core holds `mapping_lock` from get_pages on. The callback waits for `mapping_lock` with
    /// the API lock held. dma_map can wait for neither lock, and no later call would unmap a
    /// mapping that dma_map made at this point.
    fn dma_map_after_a_callback_has_begun_is_refused(_: RevocableClient) {
        callback_waits_at(Point::BeforeDmaMap)?;
        let failed = failure(with_ticket(9));
        same!(failed, Some(Failed::DmaMap(EINVAL.to_errno())));
        join_kept();
        let log = log();
        same!(log.get(..3), Some(&[Acquire, Pin, GetPages][..]));
        let want = [Callback, Invalidate(9), DmaMap, PutPages];
        same!(log.get(3..7), Some(&want[..]));
        // The last two calls come in either order.
        same!(log.len(), 9);
        check!(log.contains(&Release) && log.contains(&CallbackReturns));
    }

    fn a_callback_after_dma_map_waits_for_ib_core_and_revokes_then(_: EachInvalidation) {
        callback_waits_at(Point::BeforeActivate)?;
        let umem = get(with_ticket(9))?;
        join_kept();
        let log = log();
        let want = [Acquire, Pin, GetPages, DmaMap, BarMap, PageSize];
        same!(log.get(..6), Some(&want[..]));
        let want = [Callback, Invalidate(9), NicStops];
        same!(log.get(6..9), Some(&want[..]));
        check!(log.contains(&BarUnmap));
        umem.release();
    }

    /// ib_core holds `mapping_lock` around get_pages and dma_map. `fakes::api_locked` checks in
    /// every registration that get_pages and dma_map do not take the API lock.
    fn get_pages_and_dma_map_take_no_lock_that_is_held_around_a_callback(_: EachInvalidation) {
        let umem = mapped(range())?;
        umem.stop();
        umem.release();
        // The same holds for a registration that fails.
        let mut request = range();
        request.device = Device::NULL;
        check!(get(request).is_err());
    }

    /// The callback has found its pin alive, or is in any later state. In each state, `release` on
    /// another thread waits for the callback, because the invalidation reads a pointer that ib_core
    /// clears after `release`.
    fn release_waits_for_a_callback_inside_ib_core(_: RevocableClient) {
        for point in rows([
            Point::InvalidateGotRef,
            Point::InvalidateLocked,
            Point::InvalidateUnlocked,
            // The release must not unmap while the callback unmaps. The callback is therefore
            // stopped just before it unmaps.
            Point::BarUnmapping,
        ]) {
            let umem = mapped(range())?;
            let (latch, callback) = stopped_at(point, free_memory)?;
            let release = Thread::start(move || {
                umem.release();
                record(Mark("released"));
            })?;
            check!(release.waits());
            check!(!log().contains(&Mark("released")));
            latch.open();
            callback.join();
            release.join();
            check!(log().contains(&Mark("released")));
            same!(pins(), 0);
        }
    }

    /// The process that made the pin releases the region. The put waits for the API lock, and then
    /// finds no pin.
    fn a_put_beside_a_callback_waits_and_finds_nothing(_: RevocableClient) {
        let umem = mapped(range())?;
        umem.stop();
        log();
        let (latch, callback) = stopped_at(Point::CallingBack, free_memory)?;
        // The latch opens when the put has reached the lock.
        at(Point::Putting, move || latch.open())?;
        umem.release();
        callback.join();
        logged![Release, Callback, CallbackReturns, PutNothing];
    }

    /// The module marks the pin before nvidia.ko does. Between the two marks, another pin may get
    /// the table's address.
    fn no_pin_is_made_between_the_check_and_the_put(nic: EachNic) {
        let umem = mapped(range())?;
        umem.stop();
        log();
        let request = nic.range();
        at(Point::Putting, move || {
            let thread = Thread::start(move || same!(failure(request), None));
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

    /// Only puts take the semaphore exclusively, so many processes can pin at the same time.
    fn pins_are_made_beside_each_other(_: RevocableClient) {
        let (latch, first) = stopped_at(Point::Pinning, || same!(failure(range()), None))?;
        let second = get(pages(1))?;
        second.stop();
        latch.open();
        first.join();
        second.release();
    }

    /// The thread of ib_core is in dma_unmap with `mapping_lock` held. The callback waits for
    /// `mapping_lock` with the API lock held. Neither dma_unmap nor put_pages may take the API
    /// lock.
    fn dma_unmap_and_put_pages_need_nothing_that_a_callback_has(_: CoreUnmapsClient) {
        let umem = mapped(range())?;
        callback_waits_at(Point::BeforeDmaUnmap)?;
        umem.stop();
        calls!(join_kept() =>
            Callback, Invalidate(umem.ticket()), DmaUnmap, BarUnmap, PutPages, CallbackReturns);
        calls!(umem.release() => Release);
    }

    /// A client that unmaps can be called during its own invalidation. Either dma_unmap or the
    /// callback unmaps the region, never both.
    fn dma_unmap_beside_a_callback_that_unmaps_waits_and_does_nothing(_: RevocableClient) {
        let umem = mapped(range())?;
        let callback = stopped_at(Point::BarUnmapping, free_memory)?;
        let unmap = Thread::start(move || umem.release_with_late_unmap())?;
        waits_for(callback, unmap);
        let log = log();
        same!(log.iter().filter(|event| **event == BarUnmap).count(), 1);
        check!(log.contains(&DmaUnmap));
    }

    fn a_callback_beside_dma_unmap_waits_and_does_nothing(_: RevocableClient) {
        let umem = mapped(range())?;
        let other = umem.clone();
        let unmap = stopped_at(Point::BarUnmapping, move || other.stop())?;
        waits_for(unmap, Thread::start(free_memory)?);
        let log = log();
        same!(log.iter().filter(|event| **event == BarUnmap).count(), 1);
        umem.release();
    }

    /// A callback stays on its thread while other regions are registered and released.
    fn a_callback_of_one_region_does_not_keep_another_from_its_release(_: RevocableClient) {
        let first = mapped(range())?;
        let second = mapped(elsewhere())?;
        second.stop();
        let (latch, callback) = stopped_at(Point::InvalidateLocked, || free_memory_at(VA))?;
        // Another process releases the region, because a put waits for the API lock, and thus for
        // every callback.
        Thread::start(move || second.release())?.join();
        latch.open();
        callback.join();
        free_memory();
        first.release();
    }

    /// A put inside a callback would fail with -EIO.
    fn a_region_released_inside_the_callback_of_another_is_put_by_its_own_callback(
        _: RevocableClient,
    ) {
        let first = mapped(range())?;
        let second = mapped(elsewhere())?;
        // The release is outside `mapping_lock`, because it takes the `mapping_lock` of its own
        // region.
        at(Point::InvalidateUnlocked, move || second.release())?;
        calls!(free_memory_at(VA) =>
            Callback, Invalidate(first.ticket()), NicStops, DmaUnmap, BarUnmap, PutPages, Release,
            BarUnmap, CallbackReturns);
        check!(holds() > 0);
        first.release();
        log();
        calls!(free_memory() => Callback, CallbackReturns);
    }

    /// The tickets and the handle of the client end together.
    fn a_callback_after_the_client_is_gone_does_not_use_its_handle(_: NoClient) {
        let up = revocable(ClientUnmaps)?;
        let orphan = mapped(range())?;
        Thread::start(move || orphan.release())?.join();
        drop(up);
        log();
        calls!(free_memory() => Callback, CallbackReturns);
    }
);

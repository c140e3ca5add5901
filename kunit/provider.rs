// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of nvidia.ko's answers and of the module's response: page tables and mappings in every
//! form, and puts that fail.

use crate::setup::*;

/// Checks which of the two clients take a table that differs from a good one by `change`.
fn table(change: impl FnOnce(&mut TableForm), revocable: bool, persistent: bool) -> Result {
    with(|world| {
        world.table = TableForm::GOOD;
        change(&mut world.table);
    });
    for nic in rows([EachNic::CAN_LOSE, EachNic::CANNOT_LOSE]) {
        let can_lose = nic.can_lose;
        log();
        let failed = failure(nic.range());
        let taken = persistent || (can_lose && revocable);
        same!(failed, (!taken).then_some(Failed::NotMine));
        let log = log();
        let count = |event| log.iter().filter(|have| **have == event).count();
        // Each client that ib_core asks makes one pin and one put, even if the client does not take
        // the range. ib_core asks the persistent client after the revocable client, if the
        // revocable client cannot map the memory.
        let asked = usize::from(can_lose);
        same!((count(Pin), count(Put)), (asked, asked));
        let asked = usize::from(!can_lose || (!revocable && persistent));
        same!((count(PinPersistent), count(PutPersistent)), (asked, asked));
        same!(pins(), 0);
    }
    Ok(())
}

suite!(
    mod peermem_provider;

    fn tables_of_1_2_and_of_2_x_are_known_and_no_others(_: BothClients) {
        for (version, known) in rows([
            (0x0001_0002, true),
            (0x0001_0003, true),
            (0x0002_0000, true),
            (0x0002_0007, true),
            (0, false),
            (0x0001_0001, false),
            (0x0000_0002, false),
            (0x0003_0000, false),
            (u32::MAX, false),
        ]) {
            table(|form| form.version = version, known, known)?;
        }
    }

    fn tables_have_pages_of_64_or_128_kib(_: BothClients) {
        for page_size in rows([0, 3, u32::MAX]) {
            table(|form| form.page_size = page_size, false, false)?;
        }
        // The module checks the pages of the mapping against the pages of the table.
        with(|world| world.mapping.page_size = 2);
        let large = |form: &mut TableForm| (form.page_size, form.address) = (2, EVERY_OTHER);
        table(large, true, true)?;
    }

    fn a_range_that_is_no_multiple_of_the_pages_is_refused(_: BothClients) {
        with(|world| (world.table.page_size, world.table.surplus) = (2, 1));
        check!(not_mine(pages(3)));
        same!(pins(), 0);
    }

    fn a_table_has_exactly_the_pages_of_the_range(_: BothClients) {
        for surplus in rows([-4, -1, 1, 100]) {
            table(|form| form.surplus = surplus, false, false)?;
        }
        table(|form| form.no_pages = true, false, false)?;
    }

    /// For the persistent client, nvidia.ko maps the cached memory. The revocable client only knows
    /// addresses in a BAR.
    fn memory_that_cpus_cache_is_for_the_persistent_client(_: BothClients) {
        table(|form| form.flags = 1, false, true)?;
        // The module ignores unknown flags.
        table(|form| form.flags = 2, true, true)?;
    }

    /// The structure of version 1.2 ends before the flags.
    fn a_table_of_1_2_has_no_flags(_: BothClients) {
        let old = |form: &mut TableForm| (form.version, form.flags) = (0x0001_0002, u32::MAX);
        table(old, true, true)?;
    }

    fn memory_outside_a_bar_is_for_the_persistent_client(_: BothClients) {
        for address in rows([
            (|page| IO + page * KIB_64) as Layout,
            |page| UNASSIGNED + page * KIB_64,
            |page| RAM + page * KIB_64,
            |page| BAR - KIB_64 + page * KIB_64,
            |page| BAR + BAR_LEN - 3 * KIB_64 + page * KIB_64,
            // Only the last page is outside of the BAR.
            |page| if page == 3 { IO } else { EVERY_OTHER(page) },
        ]) {
            table(|form| form.address = address, false, true)?;
        }
        let last = |page| BAR + BAR_LEN - 4 * KIB_64 + page * KIB_64;
        table(|form| form.address = last, true, true)?;
    }

    fn success_without_a_table_is_a_refusal(_: PersistentClient) {
        with(|world| world.table.no_table = true);
        check!(not_mine(range()));
        same!(holds(), 0);
        forget_pins();
    }

    /// Without a table, the module cannot put the pin, so the callback may still come.
    fn a_revocable_pin_without_a_table_holds_the_module_until_its_callback(_: RevocableClient) {
        with(|world| world.table.no_table = true);
        check!(not_mine(range()));
        same!(holds(), 1);
        calls!(free_memory() => Acquire, Pin, Callback, CallbackReturns);
    }

    /// The module unmaps a mapping that it refuses, if nvidia.ko has returned one.
    fn a_mapping_is_one_of_2_3_with_the_pages_of_its_table(_: ProviderMaps) {
        let refused = Some(Failed::DmaMap(EINVAL.to_errno()));
        for (change, want) in rows([
            ((|_| ()) as fn(&mut MappingForm), None),
            (|form| form.version = 0x0002_0004, None),
            (|form| form.version = 0x0002_0002, refused),
            (|form| form.version = 0x0003_0003, refused),
            (|form| form.version = 0x0001_0003, refused),
            (|form| form.page_size = 0, refused),
            (|form| form.page_size = 2, refused),
            (|form| form.surplus = 1, refused),
            (|form| form.surplus = -1, refused),
            (|form| form.no_addresses = true, refused),
        ]) {
            with(|world| {
                world.mapping = MappingForm::GOOD;
                change(&mut world.mapping);
            });
            if want.is_none() {
                same!(failure(range()), want);
                log();
                continue;
            }
            let failed = calls!(failure(range()) =>
                Acquire, PinPersistent, GetPages, DmaMap, Map, Unmap, PutPages, Release, PutPersistent);
            same!(failed, want);
        }
        with(|world| world.mapping.no_mapping = true);
        let failed = calls!(failure(range()) =>
            Acquire, PinPersistent, GetPages, DmaMap, Map, PutPages, Release, PutPersistent);
        same!(failed, refused);
    }

    /// `ENOMEM` means that the put has done nothing.
    fn a_revocable_put_that_fails_with_enomem_is_tried_again(_: RevocableClient) {
        let umem = get(range())?;
        fail(Call::Put, 1, 3, ENOMEM.to_errno())?;
        umem.stop();
        log();
        calls!(umem.release() => Release, Put, Put, Put, Put);
    }

    fn a_revocable_put_that_fails_with_enomem_for_ever_is_given_up(_: RevocableClient) {
        let umem = get(range())?;
        fail(Call::Put, 1, u32::MAX, ENOMEM.to_errno())?;
        umem.stop();
        log();
        calls!(umem.release() =>
            Release, Put, Put, Put, Put, Put, Put, Put, Put, Put, Put, Put);
        with(|world| world.nothing_fails());
        same!(pins(), 1);
        check!(holds() > 0);
        free_memory();
    }

    /// A persistent put that fails has already dropped its reference to the GPU.
    fn a_persistent_put_that_fails_is_not_tried_again(_: PersistentClient) {
        for code in rows([ENOMEM, EIO, EINVAL, EBUSY, ENODEV]) {
            let umem = get(range())?;
            fail_once(Call::PutPersistent, code.to_errno())?;
            umem.stop();
            log();
            calls!(umem.release() => Release, PutPersistent);
        }
    }

    /// The pin still exists, and its callback will come.
    fn a_revocable_put_that_fails_otherwise_holds_the_module_until_the_callback(
        _: RevocableClient,
    ) {
        let umem = get(range())?;
        fail_once(Call::Put, EIO.to_errno())?;
        umem.stop();
        log();
        calls!(umem.release() => Release, Put);
        check!(holds() > 0);
        calls!(free_memory() => Callback, CallbackReturns);
    }

    /// By the next try, the table of another pin may have the address of the revoked pin's table.
    fn a_pin_that_is_revoked_between_two_tries_is_not_put_again(_: RevocableClient) {
        let umem = get(range())?;
        fail_once(Call::Put, ENOMEM.to_errno())?;
        free_at(Point::PutFailed)?;
        umem.stop();
        log();
        calls!(umem.release() => Release, Put, Callback, CallbackReturns);
    }

    fn an_unmapping_that_fails_does_not_keep_the_pin(_: ProviderMaps) {
        let umem = mapped(range())?;
        fail_once(Call::Unmap, EINVAL.to_errno())?;
        calls!(umem.release() => DmaUnmap, Unmap, PutPages, Release, PutPersistent);
    }

    /// nvidia.ko lets only the process that made the pin put it. For every other process, nvidia.ko
    /// returns 0 and does nothing.
    fn a_revocable_pin_is_not_put_by_another_process_and_stays_until_its_callback(_: NoClient) {
        let up = revocable(ClientUnmaps)?;
        let umem = mapped(range())?;
        Thread::start(move || umem.release())?.join();
        logged![DmaUnmap, BarUnmap, PutPages, Release];
        same!(pins(), 1);
        // The pin holds the module but not the client, which can be unregistered.
        drop(up);
        check!(holds() > 0);
        log();
        calls!(free_memory() => Callback, CallbackReturns);
    }

    fn a_persistent_pin_is_put_by_any_process(_: PersistentClient) {
        let umem = mapped(range())?;
        Thread::start(move || umem.release())?.join();
        logged![DmaUnmap, BarUnmap, PutPages, Release, PutPersistent];
    }

    /// nvidia.ko holds a number that this module never reuses.
    fn a_callback_for_a_pin_that_is_gone_finds_nothing(_: RevocableClient) {
        let umem = get(range())?;
        let (callback, gone) = callback_of_first_pin().ok_or(ENOENT)?;
        umem.release();
        let umem = get(range())?;
        let (_, number) = callback_of_first_pin().ok_or(ENOENT)?;
        check!(number != gone);
        log();
        for number in rows([gone, 0, usize::MAX]) {
            calls!(call_back_again(callback, number) => );
        }
        umem.release();
    }
);

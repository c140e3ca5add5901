// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What nvidia.ko may answer, and what the module makes of it: page tables and mappings in every form, puts
//! that fail.

use kernel::prelude::*;

#[kunit_tests(peermem_provider)]
mod tests {
    use kernel::prelude::*;

    use crate::{
        fakes::{
            call_back_again,
            callback_of_first_pin,
            check,
            fail,
            fail_once,
            forget_pins,
            free_memory,
            log,
            logged,
            pins,
            same,
            test,
            with,
            Call,
            Event::*,
            MappingForm,
            Point,
            TableForm,
            Thread,
            BAR,
            BAR_LEN,
            IO,
            KIB_64,
            RAM,
            UNASSIGNED, //
        },
        ib::Invalidation,
        ib_core::{
            free_at,
            get,
            not_mine,
            Failed, //
        },
        setup::{
            pages,
            persistent,
            persistent_as,
            revocable,
            PAGES, //
        }, //
    };

    /// A table in this form: which of the two clients are to take it?
    fn table(form: TableForm, revocable: bool, persistent: bool) -> Result {
        with(|world| world.table = form);
        for can_lose in [true, false] {
            let mut range = pages(PAGES);
            range.can_lose = can_lose;
            log();
            let got = get(range);
            same!(got.as_ref().err(), {
                let taken = persistent || (can_lose && revocable);
                (!taken).then_some(&Failed::NotMine)
            });
            if let Ok(umem) = got {
                umem.release();
            }
            let log = log();
            let count = |event| log.iter().filter(|have| **have == event).count();
            // Each is asked, pins once, and gives it back once, whether it takes the range or not.
            let asked = usize::from(can_lose);
            same!((count(Pin), count(Put)), (asked, asked));
            let asked = usize::from(!(can_lose && revocable));
            same!((count(PinPersistent), count(PutPersistent)), (asked, asked));
            same!(pins(), 0);
        }
        Ok(())
    }

    fn tables(body: impl FnOnce(TableForm) -> Result) -> Result {
        test(|| {
            let up = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            body(with(|world| world.table))?;
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn tables_of_1_2_and_of_2_x_are_known_and_no_others() -> Result {
        tables(|good| {
            for (version, known) in [
                (0x0001_0002, true),
                (0x0001_0003, true),
                (0x0002_0000, true),
                (0x0002_0007, true),
                (0, false),
                (0x0001_0001, false),
                (0x0000_0002, false),
                (0x0003_0000, false),
                (u32::MAX, false),
            ] {
                table(TableForm { version, ..good }, known, known)?;
            }
            Ok(())
        })
    }

    #[test]
    fn tables_have_pages_of_64_or_128_kib() -> Result {
        tables(|good| {
            for (page_size, known) in [(0, false), (3, false), (u32::MAX, false)] {
                table(TableForm { page_size, ..good }, known, known)?;
            }
            // The mapping's pages are checked against the table's.
            with(|world| world.mapping.page_size = 2);
            let large = TableForm {
                page_size: 2,
                address: |page| BAR + 2 * page * KIB_64,
                ..good
            };
            table(large, true, true)
        })
    }

    #[test]
    fn a_range_that_is_no_multiple_of_the_pages_is_refused() -> Result {
        tables(|good| {
            with(|world| {
                world.table = TableForm {
                    page_size: 2,
                    surplus: 1,
                    ..good
                };
            });
            check!(not_mine(pages(3)));
            same!(pins(), 0);
            Ok(())
        })
    }

    #[test]
    fn a_table_has_exactly_the_pages_of_the_range() -> Result {
        tables(|good| {
            for surplus in [-4, -1, 1, 100] {
                table(TableForm { surplus, ..good }, false, false)?;
            }
            let no_pages = true;
            table(TableForm { no_pages, ..good }, false, false)
        })
    }

    /// The persistent client has nvidia.ko map it; the addresses of a BAR are all the other knows.
    #[test]
    fn memory_that_cpus_cache_is_for_the_persistent_client() -> Result {
        tables(|good| {
            table(TableForm { flags: 1, ..good }, false, true)?;
            // Other flags are not known, and change nothing.
            table(TableForm { flags: 2, ..good }, true, true)
        })
    }

    /// The structure ends before them.
    #[test]
    fn a_table_of_1_2_has_no_flags() -> Result {
        tables(|good| {
            let old = TableForm {
                version: 0x0001_0002,
                flags: u32::MAX,
                ..good
            };
            table(old, true, true)
        })
    }

    #[test]
    fn memory_outside_a_bar_is_for_the_persistent_client() -> Result {
        tables(|good| {
            for address in [
                (|page| IO + page * KIB_64) as fn(u64) -> u64,
                |page| UNASSIGNED + page * KIB_64,
                |page| RAM + page * KIB_64,
                |page| BAR - KIB_64 + page * KIB_64,
                |page| BAR + BAR_LEN - 3 * KIB_64 + page * KIB_64,
                // The last page alone.
                |page| {
                    if page == 3 {
                        IO
                    } else {
                        BAR + 2 * page * KIB_64
                    }
                },
            ] {
                table(TableForm { address, ..good }, false, true)?;
            }
            let address = |page| BAR + BAR_LEN - 4 * KIB_64 + page * KIB_64;
            table(TableForm { address, ..good }, true, true)
        })
    }

    #[test]
    fn success_without_a_table_is_a_refusal() -> Result {
        test(|| {
            let up = persistent()?;
            with(|world| world.table.no_table = true);
            check!(not_mine(pages(PAGES)));
            same!(with(|world| world.holds), 0);
            forget_pins();
            drop(up);
            Ok(())
        })
    }

    /// There is nothing to put it by, so its callback may come.
    #[test]
    fn a_revocable_pin_without_a_table_holds_the_module_until_its_callback() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            with(|world| world.table.no_table = true);
            log();
            check!(not_mine(pages(PAGES)));
            same!(with(|world| world.holds), 1);
            free_memory();
            logged![Acquire, Pin, Callback, CallbackReturns];
            drop(up);
            Ok(())
        })
    }

    /// One that is refused is unmapped, if it is one.
    #[test]
    fn a_mapping_is_one_of_2_3_with_the_pages_of_its_table() -> Result {
        test(|| {
            let up = persistent()?;
            let good = with(|world| world.mapping);
            let refused = Some(Failed::DmaMap(EINVAL.to_errno()));
            for (form, want) in [
                (good, None),
                (
                    MappingForm {
                        version: 0x0002_0004,
                        ..good
                    },
                    None,
                ),
                (
                    MappingForm {
                        version: 0x0002_0002,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        version: 0x0003_0003,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        version: 0x0001_0003,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        page_size: 0,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        page_size: 2,
                        ..good
                    },
                    refused,
                ),
                (MappingForm { surplus: 1, ..good }, refused),
                (
                    MappingForm {
                        surplus: -1,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        no_addresses: true,
                        ..good
                    },
                    refused,
                ),
                (
                    MappingForm {
                        no_mapping: true,
                        ..good
                    },
                    refused,
                ),
            ] {
                with(|world| world.mapping = form);
                log();
                let got = get(pages(PAGES));
                same!(got.as_ref().err(), want.as_ref());
                if let Ok(umem) = got {
                    umem.release();
                } else if form.no_mapping {
                    logged![
                        Acquire,
                        PinPersistent,
                        GetPages,
                        DmaMap,
                        Map,
                        PutPages,
                        Release,
                        PutPersistent
                    ];
                } else {
                    logged![
                        Acquire,
                        PinPersistent,
                        GetPages,
                        DmaMap,
                        Map,
                        Unmap,
                        PutPages,
                        Release,
                        PutPersistent
                    ];
                }
            }
            drop(up);
            Ok(())
        })
    }

    /// It says that nothing was done.
    #[test]
    fn a_revocable_put_that_fails_with_enomem_is_tried_again() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            fail(Call::Put, 1, 3, ENOMEM.to_errno())?;
            umem.stop();
            log();
            umem.release();
            logged![Release, Put, Put, Put, Put];
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn a_revocable_put_that_fails_with_enomem_for_ever_is_given_up() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            fail(Call::Put, 1, u32::MAX, ENOMEM.to_errno())?;
            umem.release();
            with(|world| world.nothing_fails());
            same!(pins(), 1);
            check!(with(|world| world.holds) > 0);
            free_memory();
            drop(up);
            Ok(())
        })
    }

    /// Any failure has dropped the GPU's reference already.
    #[test]
    fn a_persistent_put_that_fails_is_not_tried_again() -> Result {
        test(|| {
            let up = persistent()?;
            for code in [ENOMEM, EIO, EINVAL, EBUSY, ENODEV] {
                let umem = get(pages(PAGES)).map_err(|_| EIO)?;
                fail_once(Call::PutPersistent, code.to_errno())?;
                umem.stop();
                log();
                umem.release();
                logged![Release, PutPersistent];
            }
            drop(up);
            Ok(())
        })
    }

    /// The pin is still there, and its callback will come.
    #[test]
    fn a_revocable_put_that_fails_otherwise_holds_the_module_until_the_callback() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            fail_once(Call::Put, EIO.to_errno())?;
            umem.stop();
            log();
            umem.release();
            logged![Release, Put];
            check!(with(|world| world.holds) > 0);
            free_memory();
            logged![Callback, CallbackReturns];
            drop(up);
            Ok(())
        })
    }

    /// By the next try the address of its table may be another pin's.
    #[test]
    fn a_pin_that_is_revoked_between_two_tries_is_not_put_again() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            fail_once(Call::Put, ENOMEM.to_errno())?;
            free_at(Point::PutFailed)?;
            umem.stop();
            log();
            umem.release();
            logged![Release, Put, Callback, CallbackReturns];
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn an_unmapping_that_fails_does_not_keep_the_pin() -> Result {
        test(|| {
            let up = persistent()?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            fail_once(Call::Unmap, EINVAL.to_errno())?;
            log();
            umem.release();
            logged![DmaUnmap, Unmap, PutPages, Release, PutPersistent];
            drop(up);
            Ok(())
        })
    }

    /// nvidia.ko takes it from the process that pinned, and says 0 to every other, with nothing done.
    #[test]
    fn a_revocable_pin_is_not_put_by_another_process_and_stays_until_its_callback() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let other = umem.clone();
            log();
            Thread::start(move || other.release())?.join();
            logged![DmaUnmap, BarUnmap, PutPages, Release];
            same!(pins(), 1);
            // The module, but not the client: that can be unregistered.
            drop(up);
            check!(with(|world| world.holds) > 0);
            log();
            free_memory();
            logged![Callback, CallbackReturns];
            Ok(())
        })
    }

    #[test]
    fn a_persistent_pin_is_put_by_any_process() -> Result {
        test(|| {
            let up = persistent()?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let other = umem.clone();
            log();
            Thread::start(move || other.release())?.join();
            logged![DmaUnmap, Unmap, PutPages, Release, PutPersistent];
            drop(up);
            Ok(())
        })
    }

    /// What nvidia.ko has of ours is a number, and it is not used twice.
    #[test]
    fn a_callback_for_a_pin_that_is_gone_finds_nothing() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let (callback, gone) = callback_of_first_pin().ok_or(ENOENT)?;
            umem.release();
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let (_, number) = callback_of_first_pin().ok_or(ENOENT)?;
            check!(number != gone);
            log();
            for number in [gone, 0, usize::MAX] {
                call_back_again(callback, number);
            }
            logged![];
            umem.release();
            drop(up);
            Ok(())
        })
    }
}

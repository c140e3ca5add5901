// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What others see of the clients: what is counted of each, and the directory that shows it where ib_core
//! does not.

use kernel::prelude::*;

#[kunit_tests(peermem_showing)]
mod tests {
    use kernel::{
        prelude::*,
        str::CStr,
        sync::atomic::Relaxed, //
    };

    use crate::{
        clients::{
            Persistent,
            Revocable, //
        },
        device::{
            Gpus,
            PciAddress, //
        },
        entries::{
            self,
            Cursor, //
        },
        extents::PageSize,
        fakes::{
            check,
            fail,
            free_memory,
            logged,
            mm_is_missing,
            occupy,
            read_shown,
            roll_from,
            same,
            show_memory_peers,
            shows,
            test,
            Call,
            Event::*,
            Thread, //
        },
        ib::{
            Client,
            Invalidation, //
        },
        ib_core::{
            failure,
            get,
            Form, //
        },
        memory_peers::MemoryPeers,
        params,
        record::Flavour,
        registry::{
            Book,
            Living,
            State, //
        },
        setup::{
            pages,
            persistent,
            persistent_as,
            revocable,
            PAGES,
            VA, //
        },
        tally::Statistics,
        task, //
    };

    const FIRST: &CStr = c"nv_mem";
    const SECOND: &CStr = c"nv_mem_nc";
    const FILES: [&CStr; 8] = [
        c"version",
        c"num_alloc_mrs",
        c"num_dealloc_mrs",
        c"num_reg_pages",
        c"num_dereg_pages",
        c"num_reg_bytes",
        c"num_dereg_bytes",
        c"num_free_callbacks",
    ];

    fn one() -> [(&'static CStr, &'static Statistics); 1] {
        [(FIRST, Persistent::statistics())]
    }

    fn two() -> [(&'static CStr, &'static Statistics); 2] {
        [
            (FIRST, Revocable::statistics()),
            (SECOND, Persistent::statistics()),
        ]
    }

    // --- the directory ---------------------------------------------------------------------------

    #[test]
    fn it_is_there_from_show_to_drop_and_not_before() -> Result {
        test(|| {
            // Twice: a module that is loaded again.
            for _ in 0..2 {
                let peers = MemoryPeers::look(FIRST)?;
                check!(!shows(None, None));
                let peers = peers.show(&one());
                for file in FILES {
                    check!(shows(Some(FIRST), Some(file)));
                }
                check!(!shows(Some(SECOND), None));
                drop(peers);
                check!(!shows(None, None));
                logged![Shows, Hides];
            }
            Ok(())
        })
    }

    #[test]
    fn each_client_has_its_own_numbers_and_all_have_one_version() -> Result {
        test(|| {
            let peers = MemoryPeers::look(FIRST)?.show(&two());
            let up = persistent()?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            for (name, statistics) in two() {
                let all = [
                    &statistics.alloc_mrs,
                    &statistics.dealloc_mrs,
                    &statistics.reg_pages,
                    &statistics.dereg_pages,
                    &statistics.reg_bytes,
                    &statistics.dereg_bytes,
                    &statistics.free_callbacks,
                ];
                let mut files = FILES.iter();
                let version = read_shown(name, files.next().ok_or(ENOENT)?)?;
                let (newline, version) = version.split_last().ok_or(EINVAL)?;
                same!(*newline, b'\n');
                check!(version == params::version().to_bytes());
                for (file, counter) in files.zip(all) {
                    let text = read_shown(name, file)?;
                    let (newline, digits) = text.split_last().ok_or(EINVAL)?;
                    same!(*newline, b'\n');
                    let number = digits.iter().fold(0u64, |number, digit| {
                        number * 10 + u64::from(digit.wrapping_sub(b'0'))
                    });
                    same!(number, counter.load(Relaxed));
                }
            }
            umem.release();
            drop((up, peers));
            Ok(())
        })
    }

    #[test]
    fn that_of_ib_core_is_left_alone() -> Result {
        test(|| {
            let peers = MemoryPeers::look(FIRST)?;
            // As an ib_core that makes it with its first client.
            occupy(Some(FIRST));
            let peers = peers.show(&one());
            check!(shows(Some(FIRST), None) && !shows(Some(FIRST), Some(c"version")));
            drop(peers);
            check!(shows(Some(FIRST), None));
            logged![];
            Ok(())
        })
    }

    #[test]
    fn a_stranger_s_is_left_alone_though_it_lacks_a_client() -> Result {
        test(|| {
            for client in [None, Some(FIRST)] {
                occupy(client);
                let peers = MemoryPeers::look(FIRST)?.show(&two());
                check!(!shows(Some(SECOND), None));
                drop(peers);
                check!(shows(None, None));
                logged![];
            }
            Ok(())
        })
    }

    #[test]
    fn one_that_was_there_before_is_left_alone() -> Result {
        test(|| {
            occupy(Some(FIRST));
            drop(MemoryPeers::look(FIRST)?.show(&one()));
            check!(shows(Some(FIRST), None));
            logged![];
            Ok(())
        })
    }

    #[test]
    fn the_parameter_turns_it_off() -> Result {
        test(|| {
            show_memory_peers(false);
            let peers = MemoryPeers::look(FIRST)?.show(&one());
            check!(!shows(None, None));
            drop(peers);
            logged![];
            Ok(())
        })
    }

    #[test]
    fn without_sys_kernel_mm_there_is_none_and_no_harm() -> Result {
        test(|| {
            mm_is_missing();
            drop(MemoryPeers::look(FIRST)?.show(&one()));
            logged![];
            Ok(())
        })
    }

    #[test]
    fn what_could_not_be_made_whole_is_not_there_at_all() -> Result {
        test(|| {
            for (call, nth) in [
                (Call::Kobject, 1),
                (Call::Kobject, 2),
                (Call::Kobject, 3),
                (Call::Group, 1),
                (Call::Group, 2),
            ] {
                fail(call, nth, 1, 0)?;
                let peers = MemoryPeers::look(FIRST)?.show(&two());
                check!(!shows(None, None));
                drop(peers);
                if (call, nth) == (Call::Kobject, 1) {
                    logged![];
                } else {
                    logged![Shows, Hides];
                }
            }
            Ok(())
        })
    }

    #[test]
    fn there_is_one_at_a_time() -> Result {
        test(|| {
            let peers = MemoryPeers::look(FIRST)?.show(&one());
            same!(MemoryPeers::look(FIRST).err(), Some(EBUSY));
            check!(shows(Some(FIRST), None));
            drop(peers);
            drop(MemoryPeers::look(FIRST)?);
            Ok(())
        })
    }

    // --- the roll --------------------------------------------------------------------------------

    /// The only one on the roll.
    fn only() -> Result<Living> {
        let living = roll_from(0).ok_or(ENOENT)?;
        check!(roll_from(living.number + 1).is_none());
        Ok(living)
    }

    /// Number and state of all, as a reader meets them.
    fn standing() -> Result<KVec<(u64, State)>> {
        let mut all = KVec::new();
        let mut next = 0;
        while let Some(living) = roll_from(next) {
            check!(living.number >= next);
            next = living.number + 1;
            all.push((living.number, living.state), GFP_KERNEL)?;
        }
        Ok(all)
    }

    #[test]
    fn a_registration_is_on_the_roll_from_acquire_to_release() -> Result {
        test(|| {
            let up = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            for (can_lose, flavour) in [(false, Flavour::Persistent), (true, Flavour::Revocable)] {
                let mut request = pages(PAGES);
                request.can_lose = can_lose;
                let umem = get(request).map_err(|_| EIO)?;
                let living = only()?;
                same!(living.state, State::Mapped);
                same!(living.entries, 1);
                // As the fakes have it: domain 3, bus 0x81, device 1, function 0.
                same!(living.hca, Some(PciAddress(3 << 16 | 0x8108)));
                same!(living.new.flavour, flavour);
                same!(
                    (living.new.span.start(), living.new.span.len()),
                    (VA, BYTES)
                );
                same!((living.new.page, living.new.pieces), (PageSize::KIB_64, 1));
                same!(living.new.gpus, Gpus::one(0));
                same!(living.new.task, task::task());
                umem.stop();
                let living = only()?;
                same!(living.state, State::Pinned);
                same!((living.entries, living.hca), (0, None));
                umem.release();
                check!(roll_from(0).is_none());
            }
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn many_are_met_in_their_order_and_leave_in_any() -> Result {
        test(|| {
            const COUNT: u64 = 64;
            let up = persistent()?;
            let before = entries::book(|book| book.last());
            let mut umems = KVec::new();
            for _ in 0..COUNT {
                umems.push(get(pages(PAGES)).ok(), GFP_KERNEL)?;
            }
            let all = standing()?;
            same!(all.len(), umems.len());
            for (at, (number, _)) in all.iter().enumerate() {
                same!(*number, before + 1 + at as u64);
            }
            // 37 and 64 have no factor in common: each once, the last one neither first nor last.
            for step in 0..COUNT {
                let at = (step * 37 + 11) % COUNT;
                let umem = umems.get_mut(at as usize).and_then(Option::take);
                umem.ok_or(EIO)?.release();
                same!(standing()?.len() as u64, COUNT - 1 - step);
                let next = roll_from(before + 1 + at);
                check!(next.is_none_or(|living| living.number > before + 1 + at));
                // One comes and goes behind all of them.
                get(pages(PAGES)).map_err(|_| EIO)?.release();
            }
            drop(up);
            Ok(())
        })
    }

    /// One reads on behind what it has met, another from its beginning, beside them a third that never reads on.
    #[test]
    fn readers_go_on_where_they_were_whatever_goes_and_comes() -> Result {
        test(|| {
            const COUNT: u64 = 32;
            let up = persistent()?;
            let new = || KBox::pin_init(Cursor::new(), GFP_KERNEL);
            let (reader, other, idle) = (new()?, new()?, new()?);
            let first = entries::book(Book::last) + 1;
            check!(reader.find(0).is_none() && idle.find(0).is_none());
            let mut umems = KVec::new();
            for _ in 0..COUNT {
                umems.push(get(pages(PAGES)).ok(), GFP_KERNEL)?;
            }
            let number = |found: Option<Living>| found.map(|living| living.number);
            for at in 0..COUNT {
                let here = first + at;
                // Again, as where a line did not fit, and what it met may be gone by then.
                same!(number(reader.find(here)), Some(here));
                same!(number(reader.find(here)), Some(here));
                same!(number(other.find(0)), Some(here));
                let umem = umems.get_mut(at as usize).and_then(Option::take);
                umem.ok_or(EIO)?.release();
                let next = (at + 1 < COUNT).then_some(here + 1);
                same!(number(reader.find(here)), next);
                same!(number(roll_from(here)), next);
            }
            // Behind the end, where one comes.
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let last = entries::book(Book::last);
            for cursor in [&idle, &other, &reader, &idle] {
                same!(number(cursor.find(first)), Some(last));
                same!(number(cursor.find(last + 1)), None);
            }
            drop(reader);
            umem.release();
            check!(other.find(0).is_none() && idle.find(0).is_none());
            drop((up, idle));
            Ok(())
        })
    }

    #[test]
    fn who_was_revoked_is_on_the_roll_until_the_release() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            free_memory();
            let living = only()?;
            same!((living.state, living.entries), (State::Revoked, 1));
            umem.release();
            check!(roll_from(0).is_none());
            drop(up);
            Ok(())
        })
    }

    /// Another process releases: nvidia.ko does not take the pin from it.
    #[test]
    fn who_is_kept_is_on_the_roll_until_the_memory_is_freed() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            Thread::start(move || umem.release())?.join();
            let living = only()?;
            same!((living.state, living.entries), (State::Kept, 0));
            free_memory();
            check!(roll_from(0).is_none());
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn who_was_refused_was_never_on_the_roll() -> Result {
        test(|| {
            let up = persistent()?;
            let before = entries::book(|book| (book.last(), book.counts()));
            fail(Call::PinPersistent, 1, 1, -12)?;
            check!(failure(pages(PAGES)).is_some());
            same!(entries::book(|book| (book.last(), book.counts())), before);
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn lives_are_counted() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let counts = || entries::book(|book| book.counts()[Flavour::Revocable as usize]);
            let before = counts();
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            let now = counts();
            same!(
                (now.registered, now.mapped),
                (before.registered + 1, before.mapped + 1)
            );
            same!((now.alive, now.alive_bytes), (1, BYTES));
            free_memory();
            same!(counts().revoked, before.revoked + 1);
            umem.release();
            let now = counts();
            same!(now.released, before.released + 1);
            same!((now.alive, now.alive_bytes), (0, 0));
            drop(up);
            Ok(())
        })
    }

    // --- the numbers -----------------------------------------------------------------------------

    type Numbers = [u64; 7];

    fn numbers(of: &Statistics) -> Numbers {
        [
            of.alloc_mrs.load(Relaxed),
            of.dealloc_mrs.load(Relaxed),
            of.reg_pages.load(Relaxed),
            of.dereg_pages.load(Relaxed),
            of.reg_bytes.load(Relaxed),
            of.dereg_bytes.load(Relaxed),
            of.free_callbacks.load(Relaxed),
        ]
    }

    /// What `body` adds to the client's numbers.
    fn added(of: &Statistics, body: impl FnOnce()) -> Numbers {
        let before = numbers(of);
        body();
        let mut gain = numbers(of);
        for (gain, before) in gain.iter_mut().zip(before) {
            *gain -= before;
        }
        gain
    }

    const BYTES: u64 = PAGES * crate::fakes::KIB_64;

    #[test]
    fn a_registration_counts_when_it_is_mapped_and_when_it_ends() -> Result {
        test(|| {
            let up = persistent()?;
            let of = Persistent::statistics();
            let mut umem = None;
            let gain = added(of, || umem = get(pages(PAGES)).ok());
            same!(gain, [1, 0, 1, 0, BYTES, 0, 0]);
            let umem = umem.ok_or(EIO)?;
            same!(added(of, || umem.release()), [0, 1, 0, 1, 0, BYTES, 0]);
            drop(up);
            Ok(())
        })
    }

    /// As ib_core: what the application asked for, and entries of the table.
    #[test]
    fn bytes_are_those_asked_for_and_pages_are_entries() -> Result {
        test(|| {
            crate::fakes::with(|world| {
                world.table.address = |page| crate::fakes::BAR + page * 2 * crate::fakes::KIB_64;
            });
            let up = revocable(Invalidation::ClientUnmaps)?;
            let of = Revocable::statistics();
            let mut request = pages(PAGES);
            request.addr += 10;
            request.len -= 20;
            let gain = added(of, || {
                if let Ok(umem) = get(request) {
                    umem.release();
                }
            });
            same!(gain, [1, 1, PAGES, PAGES, BYTES - 20, BYTES - 20, 0]);
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn a_registration_that_fails_counts_for_nothing() -> Result {
        test(|| {
            let up = persistent()?;
            let of = Persistent::statistics();
            for call in [Call::PinPersistent, Call::Map, Call::SgAlloc] {
                fail(call, 1, 1, -12)?;
                let gain = added(of, || check!(failure(pages(PAGES)).is_some()));
                same!(gain, [0; 7]);
            }
            drop(up);
            Ok(())
        })
    }

    /// ib_core counts a region as gone with the revocation, and its bytes when the application gives it up.
    #[test]
    fn a_revocation_counts_once_and_the_bytes_follow() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let of = Revocable::statistics();
            let umem = get(pages(PAGES)).map_err(|_| EIO)?;
            same!(added(of, free_memory), [0, 1, 0, 0, 0, 0, 1]);
            same!(added(of, || umem.release()), [0, 0, 0, 1, 0, BYTES, 0]);
            drop(up);
            Ok(())
        })
    }

    #[test]
    fn where_core_unmaps_all_of_it_counts_with_the_revocation() -> Result {
        test(|| {
            let up = revocable(Invalidation::CoreUnmaps)?;
            let of = Revocable::statistics();
            for form in [Form::Modern, Form::Ofed49] {
                let mut request = pages(PAGES);
                request.form = form;
                let umem = get(request).map_err(|_| EIO)?;
                same!(added(of, free_memory), [0, 1, 0, 1, 0, BYTES, 1]);
                if form == Form::Modern {
                    same!(added(of, || umem.release()), [0; 7]);
                }
            }
            drop(up);
            Ok(())
        })
    }
}

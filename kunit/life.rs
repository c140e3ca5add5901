// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Test of the whole module from its init to its exit, with the parameters that the test module was
//! loaded with.
//!
//! Many of the module's objects can exist only once, as in the shipped module. The module therefore
//! runs once, while the test module is loaded, and the test checks the record of that run. To
//! record a run with other parameters, load the test module again with those parameters.

use crate::{
    setup::*,
    PeerMem, //
};

/// The record of one run of the module, from init to exit.
pub(crate) struct Life {
    peerdirect_support: c_int,
    persistent_api_support: c_int,
    fail_registration: u32,
    /// The result of the module's init.
    result: Result,
    log: KVec<Event>,
    clients: KVec<Description>,
    /// Objects left at the end: references to the module, nvidia.ko's pins, and references to
    /// remembered devices.
    left: (i64, usize, u32),
}

/// Runs the module from init to exit. The caller must call this function once, before it creates
/// any other singleton.
pub(crate) fn live(module: &'static ThisModule) -> Result {
    let (mut peerdirect_support, mut persistent_api_support, mut fail_registration) = (0, 0, 0);
    fake_loaded_with(
        &mut peerdirect_support,
        &mut persistent_api_support,
        &mut fail_registration,
    );
    let life = alone(|| {
        fake_parameters(peerdirect_support, persistent_api_support);
        if fail_registration > 0 {
            fail(Call::Register, fail_registration, 1, 0)?;
        }
        // Simulates an ib_core that calls `acquire` of each client before the module's init has
        // ended.
        for _ in 0..2 {
            at(Point::Registering, || {
                record(Mark(if not_mine(pages(1)) { "asked" } else { "taken" }));
            })?;
        }
        let init = <PeerMem as kernel::Module>::init(module);
        let result = init.as_ref().map(|_| ()).map_err(|error| *error);
        let clients = descriptions();
        record(Mark("up"));
        if init.is_ok() {
            not_mine(pages(1));
            record(Mark("for a NIC that cannot revoke"));
            not_mine(cannot_lose(pages(1)));
        }
        record(Mark("exit"));
        drop(init);
        Ok(Life {
            peerdirect_support,
            persistent_api_support,
            fail_registration,
            result,
            log: log(),
            clients,
            left: (holds(), pins(), fake_remembered()),
        })
    })?;
    remember(life);
    Ok(())
}

impl Life {
    /// Returns `true` if all parameters are valid and no registration fails.
    fn is_good(&self) -> bool {
        self.fail_registration == 0
            && (0..=1).contains(&self.peerdirect_support)
            && (0..=1).contains(&self.persistent_api_support)
    }

    /// Checks that the calls from `at` on are those in `want`, and advances `at` behind them.
    fn next(&self, at: &mut usize, want: &[Event]) {
        let from = *at;
        *at += want.len();
        same!(self.log.get(from..*at), Some(want));
    }
}

/// Calls of a registration by the revocable client.
const REVOCABLE: [Event; 5] = [Pin, BarMap, BarUnmap, Release, Put];
/// Calls of a registration by the persistent client.
const PERSISTENT: [Event; 5] = [PinPersistent, BarMap, BarUnmap, Release, PutPersistent];
/// Calls by which the module asks nvidia.ko if the NIC reaches the GPU. The module asks once, after
/// the pin of the persistent client's first registration.
const QUESTION: [Event; 6] = [PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent];

suite!(
    mod peermem_life;

    /// The module creates the directory last. If the directory existed earlier, an ib_core that
    /// creates its own directory of this name would fail. To wait for callbacks, the module puts a
    /// table that nvidia.ko does not know, as its last call. nvidia.ko takes the API lock for this
    /// put, and so returns only after a running callback.
    fn the_calls_from_init_to_exit() {
        remembered(|life| {
            let is_revocable = life.persistent_api_support == 0;
            let want = if life.is_good() { Ok(()) } else { Err(EINVAL) };
            same!(life.result, want);
            same!(life.left, (0, 0, 0));
            let seen = life
                .clients
                .iter()
                .map(|seen| (seen.can_revoke, seen.flags));
            let flags = u32::from(life.peerdirect_support == 0);
            let mut at = 0;
            let asked = Mark("asked");
            if !life.is_good() {
                check!(life.clients.is_empty());
                let init: &[Event] = match life.fail_registration {
                    1 => &[Register(NvMem), PutNothing],
                    2 => &[
                        Register(NvMem),
                        asked,
                        Register(NvMemNc),
                        Unregister(NvMem),
                        PutNothing,
                    ],
                    _ => &[],
                };
                life.next(&mut at, init);
                life.next(&mut at, &[Mark("up"), Mark("exit")]);
            } else if is_revocable {
                check!(seen.eq([(true, flags), (false, 0)]));
                life.next(
                    &mut at,
                    &[Register(NvMem), asked, Register(NvMemNc), asked, Shows],
                );
                life.next(&mut at, &[Mark("up")]);
                life.next(&mut at, &REVOCABLE);
            } else {
                check!(seen.eq([(false, 0)]));
                life.next(&mut at, &[Register(NvMem), asked, Shows, Mark("up")]);
                life.next(&mut at, &PERSISTENT[..1]);
                life.next(&mut at, &QUESTION);
                life.next(&mut at, &PERSISTENT[1..]);
            }
            if life.is_good() {
                life.next(
                    &mut at,
                    &[Mark("for a NIC that cannot revoke"), PinPersistent],
                );
                if is_revocable {
                    life.next(&mut at, &QUESTION);
                }
                life.next(&mut at, &PERSISTENT[1..]);
                life.next(&mut at, &[Mark("exit"), Hides]);
                if is_revocable {
                    life.next(
                        &mut at,
                        &[Unregister(NvMemNc), Unregister(NvMem), PutNothing],
                    );
                } else {
                    life.next(&mut at, &[Unregister(NvMem)]);
                }
            }
            same!(at, life.log.len());
            Ok(())
        })?;
    }
);

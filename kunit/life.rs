// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the whole module from its init to its exit, with the parameters that the test module
//! was loaded with.
//!
//! Many of the module's objects can exist only once, as in the shipped module. The module therefore
//! runs once, while the test module is loaded, and the tests check the record of that run. To
//! record a run with other parameters, load the test module again with those parameters.

use crate::{
    setup::*,
    PeerMem, //
};

/// The record of one run of the module, from init to exit.
pub(crate) struct Life {
    pub(crate) peerdirect_support: c_int,
    pub(crate) persistent_api_support: c_int,
    pub(crate) fail_registration: u32,
    /// The result of init.
    result: Result,
    log: KVec<Event>,
    clients: KVec<Description>,
    /// Values left at the end: references to the module, nvidia.ko's pins, and remembered devices.
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
        // ib_core asks each client before the module is up.
        for _ in 0..2 {
            at(Point::Registering, || {
                record(Mark("asked"));
                if !not_mine(range()) {
                    record(Mark("taken"));
                }
            })?;
        }
        let init = <PeerMem as kernel::Module>::init(module);
        let result = init.as_ref().map(|_| ()).map_err(|error| *error);
        let clients = descriptions();
        record(Mark("up"));
        if init.is_ok() {
            for nic in [EachNic::CAN_LOSE, EachNic::CANNOT_LOSE] {
                failure(nic.range());
            }
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

impl SetUp for Life {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        test(|| remembered(body))
    }
}

impl Life {
    /// Returns `true` if all parameters are valid and no registration fails.
    fn is_good(&self) -> bool {
        self.fail_registration == 0
            && (0..=1).contains(&self.peerdirect_support)
            && (0..=1).contains(&self.persistent_api_support)
    }

    /// Returns the calls between two marks: the calls of init, of use, or of exit.
    fn part(&self, from: &'static str, to: &'static str) -> &[Event] {
        let mark = |name| self.log.iter().position(|event| *event == Mark(name));
        let start = mark(from).map_or(0, |at| at + 1);
        let end = mark(to).unwrap_or(self.log.len());
        self.log.get(start..end).unwrap_or(&[])
    }
}

suite!(
    mod peermem_life;

    fn init_succeeds_with_parameters_of_0_and_1_alone(life: Life) {
        let want = if life.is_good() { Ok(()) } else { Err(EINVAL) };
        same!(life.result, want);
    }

    fn the_revocable_client_is_registered_first_and_has_the_name_that_all_look_for(life: Life) {
        let registered = life.part("", "up").iter();
        let registered = registered.filter(|event| matches!(event, Register(_)));
        let want: &[Event] = match (life.is_good(), life.persistent_api_support) {
            (true, 1) => &[Register(NvMem)],
            (true, _) => &[Register(NvMem), Register(NvMemNc)],
            // No registration follows the failed one.
            (false, 0) if life.fail_registration == 2 => &[Register(NvMem), Register(NvMemNc)],
            (false, _) if life.fail_registration == 1 => &[Register(NvMem)],
            (false, _) => &[],
        };
        check!(registered.eq(want));
    }

    fn the_parameters_choose_the_modes_and_who_unmaps(life: Life) {
        let unmaps = |seen: &Description| (seen.can_revoke, seen.flags, seen.pointers == [0, 0]);
        let mut seen = life.clients.iter().map(unmaps);
        if life.is_good() {
            if life.persistent_api_support == 0 {
                let by_itself = life.peerdirect_support == 0;
                let want = (true, u32::from(by_itself), !by_itself);
                same!(seen.next(), Some(want));
            }
            same!(seen.next(), Some((false, 0, true)));
        }
        same!(seen.next(), None);
    }

    fn nothing_is_taken_before_the_module_is_up(life: Life) {
        let init = life.part("", "up");
        same!(
            init.contains(&Mark("asked")),
            !life.clients.is_empty() || life.fail_registration == 2
        );
        check!(!init.contains(&Mark("taken")));
        check!(!init.contains(&Pin) && !init.contains(&PinPersistent));
    }

    fn a_range_goes_to_the_first_client_that_the_nic_can_use(life: Life) {
        let used = life.part("up", "exit");
        let count = |event| used.iter().filter(|have| **have == event).count();
        let want = match (life.is_good(), life.persistent_api_support) {
            (false, _) => (0, 0),
            // The module makes one more pin, of one page, to check that the NIC reaches the GPU.
            (true, 0) => (1, 2),
            (true, _) => (0, 3),
        };
        same!((count(Pin), count(PinPersistent)), want);
        same!((count(Put), count(PutPersistent)), want);
    }

    /// The last call puts a table that nvidia.ko never returned. The put takes the API lock.
    fn the_last_thing_is_a_fence_on_the_api_lock_where_there_are_callbacks(life: Life) {
        let exit = life.part("exit", "");
        let want: &[Event] = match (life.is_good(), life.persistent_api_support) {
            (true, 0) => &[Hides, Unregister(NvMemNc), Unregister(NvMem), PutNothing],
            (true, _) => &[Hides, Unregister(NvMem)],
            (false, _) => &[],
        };
        same!(exit, want);
    }

    fn an_init_that_fails_undoes_what_it_did(life: Life) {
        if life.is_good() {
            return Ok(());
        }
        check!(life.clients.is_empty());
        let init = life.part("", "up");
        if life.fail_registration == 2 {
            same!(
                init.get(init.len().saturating_sub(3)..),
                Some(&[Register(NvMemNc), Unregister(NvMem), PutNothing][..])
            );
        }
        let count = |wanted: fn(&Event) -> bool| init.iter().filter(|e| wanted(e)).count();
        let registered = count(|event| matches!(event, Register(_)));
        let refused = usize::from(registered > 0);
        same!(
            registered - refused,
            count(|event| matches!(event, Unregister(_)))
        );
    }

    /// If the module showed the directory earlier, an ib_core that creates the directory itself
    /// would fail.
    fn others_see_the_clients_when_ib_core_knows_all_of_them(life: Life) {
        let init = life.part("", "up");
        let shows = init.iter().filter(|event| **event == Shows).count();
        same!(shows, usize::from(life.is_good()));
        check!(!life.is_good() || init.last() == Some(&Shows));
    }

    fn nothing_is_left_of_it(life: Life) {
        same!(life.left, (0, 0, 0));
    }
);

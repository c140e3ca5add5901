// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Models of operations that run concurrently.
//!
//! Models with two threads run all interleavings. Models with three threads run the interleavings
//! with a bounded number of preemptions. The memory may be freed before the registration, at any
//! point during it, or after it. If the memory is freed before the registration, the registration
//! fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use loom::model::Builder;
use loom::sync::Mutex;
use loom::thread;
use loom::thread::JoinHandle;

use crate::callback_pin::{CallbackPin, Revoke};
use crate::can_fail;
use crate::fakes::ib_core::LEN;
use crate::fakes::provider::ALLOCATION;
use crate::fakes::world::{world, Mode, World};
use crate::mr::MAX_LEN;
use crate::ranges::{PageSize, Span};
use crate::reason::{PutError, Reason, ENOMEM};
use crate::registry::State;

/// Maximum number of preemptions with three threads, unless `LOOM_MAX_PREEMPTIONS` is set. A
/// preemption is a switch away from a thread that could continue.
const PREEMPTIONS: usize = 3;

/// Runs `f`, described by `model`, once for every interleaving of its two threads. ib_core has only
/// one ticket number, and so reuses it at once.
fn explore(model: &str, mode: Mode, f: impl Fn() + Send + Sync + 'static) {
    let count = check(Builder::new(), None, move || {
        World::run(mode, can_fail::broken(), 1, &f);
    });
    figures(model, "2, all", mode, count);
}

/// Runs `f`, described by `model`, once for every interleaving of its three threads within the
/// preemption bound. ib_core has two ticket numbers, one for each registration.
fn explore_three(model: &str, mode: Mode, f: impl Fn() + Send + Sync + 'static) {
    let builder = Builder::new();
    let bound = builder.preemption_bound.unwrap_or(PREEMPTIONS);
    let count = check(builder, Some(bound), move || {
        World::run(mode, can_fail::broken(), 2, &f);
    });
    figures(model, &format!("3, {bound} preemptions"), mode, count);
}

/// Prints the figures of a model for `docs/verification.md`. The test runner reads the lines.
fn figures(model: &str, threads: &str, mode: Mode, interleavings: usize) {
    let mode = match mode {
        Mode::Unmaps => "UNMAPS",
        Mode::Legacy => "legacy",
        Mode::Ofed49 => "OFED 4.9",
    };
    println!("figure: model {model}");
    println!("figure: threads {threads}");
    println!("figure: mode {mode}");
    println!("figure: interleavings {interleavings}");
}

fn check(
    mut builder: Builder,
    bound: Option<usize>,
    run: impl Fn() + Send + Sync + 'static,
) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    builder.preemption_bound = bound;
    // No limit ends the search early.
    builder.max_branches = 100_000;
    builder.max_duration = None;
    builder.max_permutations = None;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        run();
    });
    count.load(Ordering::Relaxed)
}

fn free(allocation: u64) {
    let start = allocation * ALLOCATION;
    world().provider.free_part(start, start + ALLOCATION);
}

/// Registers memory and deregisters it again.
fn live(allocation: u64) {
    let world = world();
    if let Some(umem) = world.ib_core.register(allocation) {
        world.ib_core.deregister(&umem);
    }
    assert_eq!(
        world.state(allocation),
        None,
        "the registration is in the registry after its release"
    );
}

/// Registers memory, and deregisters it in another process: a child after fork, or a process that
/// received the file descriptor.
fn live_and_die_elsewhere(allocation: u64) {
    let world = world();
    if let Some(umem) = world.ib_core.register(allocation) {
        world.become_process(2);
        world.ib_core.deregister(&umem);
        let state = world.state(allocation);
        assert!(
            matches!(state, None | Some(State::Orphaned)),
            "a released registration is {state:?} in the registry"
        );
    }
}

fn spawn(f: impl FnOnce() + 'static) -> JoinHandle<()> {
    thread::spawn(f)
}

fn join(thread: JoinHandle<()>) {
    thread.join().expect("no panic");
}

/// Makes the tests of models that run in several modes.
macro_rules! in_modes {
    ($($(#[$doc:meta])* $name:ident: $model:ident($mode:ident);)+) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            $model(Mode::$mode);
        }
    )+};
}

in_modes! {
    free_beside_a_life_unmaps: free_beside_a_life(Unmaps);
    free_beside_a_life_legacy: free_beside_a_life(Legacy);
    /// In this mode, ib_core releases inside the callback.
    free_beside_a_life_ofed49: free_beside_a_life(Ofed49);
    free_beside_the_end_and_a_second_life_unmaps: free_beside_the_end(Unmaps);
    free_beside_the_end_and_a_second_life_legacy: free_beside_the_end(Legacy);
    /// The second table reuses the pointer of the first as soon as that pointer is free.
    free_beside_two_lives_unmaps: free_beside_two_lives(Unmaps);
    free_beside_two_lives_legacy: free_beside_two_lives(Legacy);
    two_frees_beside_two_lives_unmaps: two_frees_beside_two_lives(Unmaps);
    two_frees_beside_two_lives_legacy: two_frees_beside_two_lives(Legacy);
}

fn free_beside_a_life(mode: Mode) {
    explore(
        "a free during a whole registration, from `acquire` to `release`",
        mode,
        || {
            let free = spawn(|| free(1));
            live(1);
            join(free);
        },
    );
}

fn free_beside_the_end(mode: Mode) {
    explore(
        "a free during `dereg` and a second registration with the same ticket and table pointer",
        mode,
        || {
            let umem = world().ib_core.register(1).expect("nobody frees yet");
            let free = spawn(|| free(1));
            world().ib_core.deregister(&umem);
            // The next registration reuses the ticket and the table pointer.
            live(2);
            join(free);
        },
    );
}

/// Another process deregisters, and nvidia.ko does not unpin for that process. The pin's entry
/// stays, and the callback may come after all other objects of the registration are freed.
#[test]
fn free_beside_a_life_that_ends_in_another_process() {
    explore(
        "a free during a registration that another process releases",
        Mode::Unmaps,
        || {
            let free = spawn(|| free(1));
            live_and_die_elsewhere(1);
            join(free);
        },
    );
}

#[test]
fn free_beside_a_put_that_is_tried_again() {
    explore(
        "a free during a put that first fails with -ENOMEM",
        Mode::Unmaps,
        || {
            world().provider.failing.borrow_mut().push(ENOMEM);
            let umem = world().ib_core.register(1).expect("nobody frees yet");
            let free = spawn(|| free(1));
            world().ib_core.deregister(&umem);
            join(free);
        },
    );
}

/// Unloads the module as soon as no reference keeps it loaded, at any point of the callback.
#[test]
fn free_beside_an_end_in_another_process_and_the_unloading() {
    explore(
        "a free during a release by another process, and the unloading",
        Mode::Unmaps,
        || {
            let umem = world().ib_core.register(1).expect("nobody frees yet");
            let free = spawn(|| free(1));
            world().become_process(2);
            world().ib_core.deregister(&umem);
            world().provider.unload();
            join(free);
        },
    );
}

/// Ends a process. If `unlisted`, the process has closed its descriptor first, and nvidia.ko no
/// longer has the process in its list.
fn free_beside_an_exit(unlisted: bool) {
    world().exits.set(true);
    let umem = world().ib_core.register(1).expect("nobody frees yet");
    let free = spawn(|| free(1));
    world().provider.unlisted.set(unlisted);
    world().ib_core.deregister(&umem);
    world().provider.unload();
    join(free);
}

#[test]
fn free_beside_an_exit_and_the_unloading() {
    explore(
        "a free during the exit of the process, and the unloading",
        Mode::Unmaps,
        || free_beside_an_exit(false),
    );
}

#[test]
fn free_beside_an_exit_that_the_provider_does_not_find_and_the_unloading() {
    explore(
        "a free during the exit of a process that is no longer in nvidia.ko's list, and the unloading",
        Mode::Unmaps,
        || free_beside_an_exit(true),
    );
}

/// Walks the registry like a reader of the file `registrations`, which releases the lock between
/// two lines.
fn look() {
    let world = world();
    let mut next = 0;
    loop {
        let found = world.registry.with(|registry| {
            let (number, registration) = registry.registrations.range(next..).next()?;
            let gone = world.provider.is_gone(registration.info.span.start());
            Some((*number, registration.state, gone))
        });
        let Some((number, state, gone)) = found else {
            return;
        };
        assert!(
            !gone || !matches!(state, State::Pinned | State::Mapped),
            "a reader sees memory that is gone as {state:?}"
        );
        next = number + 1;
    }
}

/// If a registration succeeds, the registry shows the loss of its memory, whenever the callback
/// comes.
#[test]
fn free_beside_a_registration_shows_in_the_registry() {
    explore(
        "a free during a registration, which the registry then shows as revoked",
        Mode::Unmaps,
        || {
            world().registry.watched.set(true);
            let free = spawn(|| free(1));
            let umem = world().ib_core.register(1);
            join(free);
            let state = umem.as_ref().map(|_| State::Revoked);
            assert_eq!(world().state(1), state);
            if let Some(umem) = umem {
                world().ib_core.deregister(&umem);
            }
            assert_eq!(world().state(1), None);
        },
    );
}

/// Runs a reader of the registry during `life`, a registration whose memory is freed at a fixed
/// point.
fn a_reader_beside(model: &str, life: fn()) {
    explore(model, Mode::Unmaps, move || {
        world().registry.watched.set(true);
        let reader = spawn(look);
        life();
        join(reader);
    });
}

#[test]
fn a_reader_beside_a_life_that_is_revoked() {
    a_reader_beside(
        "a reader of the registry during a registration that is revoked",
        || {
            let umem = world().ib_core.register(1).expect("nobody frees yet");
            free(1);
            assert_eq!(world().state(1), Some(State::Revoked));
            world().ib_core.deregister(&umem);
            assert_eq!(world().state(1), None);
        },
    );
}

#[test]
fn a_reader_beside_a_life_that_is_orphaned() {
    a_reader_beside(
        "a reader of the registry during a registration that another process releases, and the free after it",
        || {
            live_and_die_elsewhere(1);
            assert_eq!(world().state(1), Some(State::Orphaned));
            free(1);
            assert_eq!(world().state(1), None);
        },
    );
}

fn free_beside_two_lives(mode: Mode) {
    explore_three("a free during two concurrent registrations", mode, || {
        let free = spawn(|| free(1));
        let other = spawn(|| live(2));
        live(1);
        join(free);
        join(other);
    });
}

fn two_frees_beside_two_lives(mode: Mode) {
    explore_three(
        "two frees during two registrations, one after the other",
        mode,
        || {
            let first = spawn(|| free(1));
            let second = spawn(|| free(2));
            live(1);
            live(2);
            join(first);
            join(second);
        },
    );
}

/// Two registrations that end in another process leave two entries behind.
#[test]
fn two_frees_beside_two_ends_in_another_process() {
    explore_three(
        "two frees during two registrations that another process releases",
        Mode::Unmaps,
        || {
            let first = spawn(|| free(1));
            let second = spawn(|| free(2));
            live_and_die_elsewhere(1);
            world().become_process(1);
            live_and_die_elsewhere(2);
            join(first);
            join(second);
        },
    );
}

/// Stand-in for a region: two pins, which may be released inside the callback of one of them.
struct Pins {
    pins: Mutex<Vec<CallbackPin>>,
    inside: bool,
}

impl Pins {
    fn new(inside: bool) -> Arc<Pins> {
        let this = Arc::new(Pins {
            pins: Mutex::new(Vec::new()),
            inside,
        });
        for allocation in [1, 2] {
            let held = hold(allocation, this.clone()).expect("nobody frees yet");
            this.pins.lock().expect("no poison").push(held);
        }
        this
    }

    fn release(&self) {
        let pins = std::mem::take(&mut *self.pins.lock().expect("no poison"));
        drop(pins);
    }
}

impl Revoke for Pins {
    fn revoke(&self) {
        if self.inside {
            self.release();
        }
    }

    fn orphaned(&self) {}
}

fn hold(allocation: u64, owner: Arc<dyn Revoke>) -> Result<CallbackPin, Reason> {
    let span = Span::covering(allocation * ALLOCATION, LEN, PageSize::KIB_64, MAX_LEN)?;
    CallbackPin::new(span, owner)
}

/// OFED 4.9 and a region of two pins: the live pin is not put under the API lock, because another
/// thread may wait for that lock with `put_rwsem` held.
#[test]
fn release_of_two_pins_inside_a_callback_beside_a_get() {
    explore(
        "two pins: released inside the callback of one, while another thread pins memory",
        Mode::Ofed49,
        || {
            let pins = Pins::new(true);
            let free = spawn(|| free(1));
            let got = hold(3, pins);
            drop(got.expect("nobody frees it"));
            join(free);
            assert_eq!(*world().provider.orphaned.borrow(), [PutError::InCallback]);
        },
    );
}

#[test]
fn release_of_two_pins_beside_the_free_of_one() {
    explore(
        "two pins: released during the free of one",
        Mode::Unmaps,
        || {
            let pins = Pins::new(false);
            let free = spawn(|| free(1));
            pins.release();
            join(free);
            assert_eq!(*world().provider.orphaned.borrow(), []);
        },
    );
}

#[test]
fn release_of_two_pins_beside_two_frees() {
    explore_three("two pins: released during two frees", Mode::Unmaps, || {
        let pins = Pins::new(false);
        let first = spawn(|| free(1));
        let second = spawn(|| free(2));
        pins.release();
        join(first);
        join(second);
        assert_eq!(*world().provider.orphaned.borrow(), []);
    });
}

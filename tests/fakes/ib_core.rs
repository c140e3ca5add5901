// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A model of ib_core and an RDMA driver. The model follows the test VM's `peer_mem.c` function by
//! function, wherever a client can tell the difference. The model has one client, which can revoke.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fakes::env::{Held, MrStats, PciDevice, SgTableHead};
use crate::fakes::provider::ALLOCATION;
use crate::fakes::world::{world, Break, Memory, Mode, World};
use crate::mr::Mr as _;
use crate::ranges::AddrRange;
use crate::reason::Reason;
use crate::revocable::RevocableMr;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Cell, Condvar, Mutex, MutexGuard, RefCell};

/// Length of a registration, in bytes.
pub(crate) const LEN: u64 = 1 << 16;

#[derive(Clone, Copy, Default, Eq, PartialEq)]
enum State {
    #[default]
    Unmapped,
    Mapped,
    Invalidated,
}

/// The fields that `mapping_lock` guards.
#[derive(Default)]
struct Mapped {
    state: State,
    /// `true` once the driver's invalidation function is set.
    func: bool,
}

/// A `struct ib_umem_peer`, and the driver's state of the registration.
#[derive(Default)]
pub(crate) struct Umem {
    number: usize,
    kref: AtomicUsize,
    /// The memory of the structure itself, which is freed when `kref` reaches 0.
    record: usize,
    /// `true` while ib_core's pointer to the client is set.
    client: AtomicBool,
    mapping_lock: Mutex<Mapped>,
    context: RefCell<Option<Held<RevocableMr>>>,
    /// A [`Memory`] that stands for the client's context. It exists from `acquire` until `release`
    /// returns.
    lives: usize,
    /// The scatter list that `dma_map` returned.
    table: Cell<Option<usize>>,
    ticket: Cell<Option<usize>>,
    /// The memory that the HCA uses after `dma_map`: the DMA mapping, and the mapped GPU memory.
    mapping: RefCell<Vec<usize>>,
    /// The driver's own lock. `true` while the HCA may use the memory.
    hca: Mutex<bool>,
    /// OFED 4.9: `None` until a thread claims the registration to end it. `Some(false)` while an
    /// invalidation runs. `Some(true)` after an invalidation, or once a deregistration has begun.
    taken: Mutex<Option<bool>>,
    done: Condvar,
}

/// The tickets: an xarray with `XA_FLAGS_ALLOC`, protected by `xa_lock`.
#[derive(Default)]
struct Tickets {
    limit: usize,
    next: usize,
    umems: BTreeMap<usize, Arc<Umem>>,
}

impl Tickets {
    /// Stand-in for `xa_alloc_cyclic()`.
    fn alloc(&mut self, umem: &Arc<Umem>) -> Option<usize> {
        let ticket = (0..self.limit)
            .map(|i| (self.next + i) % self.limit)
            .find(|ticket| !self.umems.contains_key(ticket))?;
        self.next = ticket + 1;
        self.umems.insert(ticket, umem.clone());
        Some(ticket)
    }
}

#[derive(Default)]
pub(crate) struct Core {
    peer_memory_mutex: Mutex<()>,
    umems: Mutex<Tickets>,
    /// All registrations, including those that have ended.
    all: RefCell<Vec<Arc<Umem>>>,
    /// Tickets that were dropped unused. See `Break::StaleTicket`.
    stale: RefCell<Vec<(usize, usize)>>,
    /// The reasons why registrations failed.
    pub(crate) refusals: RefCell<Vec<Reason>>,
}

impl Core {
    pub(crate) fn new(tickets: usize) -> Self {
        Core {
            umems: Mutex::new(Tickets {
                limit: tickets,
                ..Tickets::default()
            }),
            ..Core::default()
        }
    }

    pub(crate) fn umem(&self, number: usize) -> Arc<Umem> {
        self.all.borrow()[number].clone()
    }

    fn tickets(&self) -> MutexGuard<'_, Tickets> {
        self.umems.lock().expect("no poison")
    }

    fn add(&self, world: &World, mr: Held<RevocableMr>) -> Arc<Umem> {
        let mut all = self.all.borrow_mut();
        let umem = Arc::new(Umem {
            number: all.len(),
            kref: AtomicUsize::new(1),
            record: world.alloc("ib_core's record"),
            client: AtomicBool::new(true),
            context: RefCell::new(Some(mr)),
            lives: world.alloc("a registration"),
            ..Umem::default()
        });
        all.push(umem.clone());
        umem
    }

    /// Registers as `ibv_reg_mr()` does: calls `ib_peer_umem_get()`, then the driver reads the
    /// scatter list and calls `ib_umem_activate_invalidation_notifier()`.
    pub(crate) fn register(&self, allocation: u64) -> Option<Arc<Umem>> {
        self.try_register(allocation)
            .map_err(|reason| self.refusals.borrow_mut().push(reason))
            .ok()
    }

    fn try_register(&self, allocation: u64) -> Result<Arc<Umem>, Reason> {
        let world = world();
        let guard = self.peer_memory_mutex.lock().expect("no poison");
        let mr = Held::pin(allocation * ALLOCATION, LEN)?;
        drop(guard);

        let umem = self.add(&world, mr);
        let mut mapped = umem.mapping_lock();
        let ticket = self.tickets().alloc(&umem).expect("enough tickets");
        umem.ticket.set(Some(ticket));

        let prepared = umem
            .call(|mr| mr.set_ticket(Ticket::new(ticket, &umem)))
            .and_then(|()| umem.call(|mr| mr.map(&PciDevice(Some(umem.number)))));
        let table = match prepared {
            Ok(SgTableHead { entries, memory }) => {
                assert_eq!(entries.len(), 1);
                memory
            }
            Err(reason) => {
                self.tickets().umems.remove(&ticket);
                drop(mapped);
                umem.put();
                umem.client_release();
                return Err(reason);
            }
        };
        umem.table.set(Some(table));
        umem.write_table();
        mapped.state = State::Mapped;
        // The driver reads the scatter list and gives the memory to the HCA.
        world.memory(table).read();
        *umem.hca.lock().expect("no poison") = true;
        mapped.func = true;
        drop(mapped);
        Ok(umem)
    }

    /// Deregisters as `ibv_dereg_mr()` does: the driver stops the HCA, then calls
    /// `ib_umem_stop_invalidation_notifier()` and `ib_peer_umem_release()`.
    pub(crate) fn deregister(&self, umem: &Umem) {
        if world().mode == Mode::Ofed49 {
            return self.deregister_49(umem);
        }
        umem.stop_hca();
        umem.stop_notifier();
        if let Some(ticket) = umem.ticket.take() {
            self.tickets().umems.remove(&ticket);
        }
        umem.client_release();
        umem.memory().read();
        umem.client.store(false, Ordering::Relaxed);
        umem.put();
    }

    /// Deregisters as OFED 4.9 does: the first thread to claim the registration unmaps and releases
    /// it. If an invalidation comes first, the deregistration waits for the invalidation. If the
    /// deregistration comes first, an invalidation returns at once. In this model, the
    /// deregistration has then already stopped the HCA.
    fn deregister_49(&self, umem: &Umem) {
        umem.stop_hca();
        let mut taken = umem.taken.lock().expect("no poison");
        if taken.is_some() {
            while *taken == Some(false) {
                taken = umem.done.wait(taken).expect("no poison");
            }
        } else {
            *taken = Some(true);
            drop(taken);
            if let Some(ticket) = umem.ticket.take() {
                self.tickets().umems.remove(&ticket);
            }
            umem.stop_notifier();
            umem.client_release();
        }
        umem.put();
    }

    /// Stand-in for `ib_invalidate_peer_memory()`. ib_core knows only the number `ticket`. For the
    /// checks, `meant` is the registration that the caller intends to revoke.
    pub(crate) fn invalidate(&self, ticket: usize, meant: &Umem) {
        let world = world();
        let valid = world.memory(meant.lives);
        // A ticket must be used only until `release` of its registration has returned.
        valid.read();
        let found = {
            let tickets = self.tickets();
            tickets.umems.get(&ticket).cloned().inspect(|umem| {
                umem.memory().read();
                umem.kref.fetch_add(1, Ordering::Relaxed);
            })
        };
        if let Some(umem) = found {
            // Once ib_core has erased a ticket, it may give the number to another registration,
            // even before the client's `release` has cleared its copy of the ticket.
            let erased = meant.ticket.get().is_none();
            assert!(
                umem.number == meant.number || erased,
                "another owner's registration is revoked"
            );
            if world.mode == Mode::Ofed49 {
                umem.invalidate_49();
            } else {
                umem.invalidate();
            }
            umem.put();
        }
        if world.mode != Mode::Ofed49 {
            valid.read();
        }
    }

    /// Invalidates, inside a callback, with the tickets that `release` has cleared. Only
    /// `Break::StaleTicket` keeps such tickets.
    pub(crate) fn stale_tickets(&self) {
        let stale = std::mem::take(&mut *self.stale.borrow_mut());
        for (ticket, meant) in stale {
            self.invalidate(ticket, &self.umem(meant));
        }
    }

    pub(crate) fn check_empty(&self) {
        assert!(self.tickets().umems.is_empty(), "a ticket is left");
        self.all.borrow_mut().clear();
    }
}

impl Umem {
    /// Records that the client has mapped the memory.
    pub(crate) fn mapped(&self, mapping: usize, gpus: &[usize]) {
        self.mapping.replace([gpus, &[mapping]].concat());
    }

    fn memory(&self) -> Arc<Memory> {
        world().memory(self.record)
    }

    fn mapping_lock(&self) -> MutexGuard<'_, Mapped> {
        self.memory().read();
        self.mapping_lock.lock().expect("no poison")
    }

    /// Calls the client. Checks that the registration is not released during the call.
    fn call<R>(&self, f: impl FnOnce(&RevocableMr) -> R) -> R {
        let lives = world().memory(self.lives);
        lives.read();
        let context = self.context.borrow();
        let result = f(context.as_ref().expect("a call after release"));
        lives.read();
        result
    }

    /// Writes the first and the last entry of the scatter list, like `peer_trim()` and
    /// `peer_untrim()`.
    fn write_table(&self) {
        world().memory(self.table.get().expect("mapped")).write();
    }

    /// Frees the scatter list if `dma_map` has returned one. See `Break::EarlyTable`.
    pub(crate) fn free_table(&self) {
        if let Some(table) = self.table.get() {
            world().memory(table).free();
        }
    }

    /// Stand-in for `peer_umem_put()`.
    fn put(&self) {
        if self.kref.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.memory().free();
        }
    }

    /// Stand-in for `peer_client_release()`.
    fn client_release(&self) {
        let world = world();
        let context = self.context.borrow_mut().take();
        drop(context.expect("released twice"));
        world.memory(self.lives).free();
    }

    /// Stops the HCA, as the driver does. The HCA may have used the memory until now.
    fn stop_hca(&self) {
        let world = world();
        let mut hca = self.hca.lock().expect("no poison");
        if std::mem::replace(&mut *hca, false) {
            for memory in self.mapping.borrow().iter() {
                world.memory(*memory).read();
            }
        }
    }

    /// Stand-in for `peer_unmap()`.
    fn unmap(&self, from: State, to: State) {
        if from == State::Mapped {
            self.write_table();
            if to == State::Unmapped {
                self.call(RevocableMr::unmap);
            }
            self.table.set(None);
        }
    }

    /// Stand-in for `ib_umem_stop_invalidation_notifier()`.
    fn stop_notifier(&self) {
        let unmaps = world().mode == Mode::Unmaps;
        let mut mapped = self.mapping_lock();
        mapped.func = false;
        let from = std::mem::replace(&mut mapped.state, State::Unmapped);
        if unmaps {
            drop(mapped);
            self.unmap(from, State::Unmapped);
        } else {
            self.unmap(from, State::Unmapped);
            drop(mapped);
        }
    }

    fn invalidate(&self) {
        let unmaps = world().mode == Mode::Unmaps;
        let mut mapped = self.mapping_lock();
        assert!(
            self.client.load(Ordering::Relaxed),
            "ib_core follows a pointer that it has cleared after release"
        );
        if mapped.state == State::Mapped {
            if mapped.func {
                self.stop_hca();
            }
            mapped.state = if unmaps {
                State::Invalidated
            } else {
                State::Unmapped
            };
            self.unmap(State::Mapped, mapped.state);
        }
        drop(mapped);
    }

    /// Invalidates as OFED 4.9 does: on this thread, the driver's function unmaps and releases the
    /// registration.
    fn invalidate_49(&self) {
        // A failed registration has nothing to unmap or release.
        if self.mapping_lock().state != State::Mapped {
            return;
        }
        let mut taken = self.taken.lock().expect("no poison");
        if taken.is_some() {
            return;
        }
        *taken = Some(false);
        drop(taken);
        self.stop_hca();
        self.stop_notifier();
        if let Some(ticket) = self.ticket.take() {
            world().ib_core.tickets().umems.remove(&ticket);
        }
        self.client_release();
        *self.taken.lock().expect("no poison") = Some(true);
        self.done.notify_all();
    }
}

/// ib_core's number for a registration. `umem` identifies the registration for the checks.
#[derive(Default)]
pub(crate) struct Ticket {
    number: usize,
    /// `None` if a test made the ticket and acts as ib_core itself.
    umem: Option<usize>,
    used: bool,
}

impl Ticket {
    fn new(number: usize, umem: &Umem) -> Self {
        Ticket {
            number,
            umem: Some(umem.number),
            used: false,
        }
    }

    pub(crate) fn invalidate(mut self, _stats: &MrStats) {
        self.used = true;
        let world = world();
        world.record("ib_core revokes");
        world.hook(&world.on_revoke);
        if let Some(umem) = self.umem.filter(|_| !world.is_broken(Break::Silent)) {
            let umem = world.ib_core.umem(umem);
            world.ib_core.invalidate(self.number, &umem);
        }
        world.record("ib_core revoked");
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let world = world();
        if world.is_broken(Break::StaleTicket) && !self.used {
            let stale = self.umem.map(|umem| (self.number, umem));
            world.ib_core.stale.borrow_mut().extend(stale);
        }
    }
}

/// Shortens the first and the last entry, so that the list begins and ends at kernel pages instead
/// of peer pages. The result is the list that an HCA sees.
///
/// `entries` cover whole peer pages of `peer` bytes around `[addr, addr + len)`. Kernel pages have
/// `kernel` bytes. Fails if an entry is too short to be trimmed, where ib_core's unsigned
/// arithmetic would wrap.
pub(crate) fn trim(
    entries: &mut [AddrRange],
    addr: u64,
    len: u64,
    peer: u64,
    kernel: u64,
) -> Result<(), &'static str> {
    if peer <= kernel {
        return Ok(());
    }
    let head = down(addr, kernel) - down(addr, peer);
    let tail = up(addr + len, peer) - up(addr + len, kernel);
    let first = entries.first_mut().ok_or("no first entry")?;
    first.addr += head;
    first.len = first
        .len
        .checked_sub(head)
        .ok_or("the first entry is too short")?;
    let last = entries.last_mut().ok_or("no last entry")?;
    last.len = last
        .len
        .checked_sub(tail)
        .filter(|&len| len > 0)
        .ok_or("the last entry is too short")?;
    Ok(())
}

fn down(value: u64, to: u64) -> u64 {
    value & !(to - 1)
}

fn up(value: u64, to: u64) -> u64 {
    down(value + to - 1, to)
}

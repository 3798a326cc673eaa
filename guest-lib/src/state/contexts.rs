//! Contexts: the existing ones, the current one of each thread, and the primary ones.

use crate::{
    error::{Error, Result},
    session::{Session, waiting::pause},
    state::{
        devices::Devices,
        green::{Greens, is_view},
        streams::Streams,
        thread,
    },
};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use sluice_cuda_frontend::retains::{Retainer, Retains};
use sluice_protocol::{
    calls::wire,
    field::{Mint, Ordinal},
    handle::{Context as Kind, Id},
    limits,
};
use std::{
    sync::{Condvar, Mutex, MutexGuard},
    time::Duration,
};

struct ContextSlot {
    /// Raw id, 0 while free.
    raw: AtomicU64,
    /// Stream slot of the legacy default stream, [`NONE`] while the context is not active.
    legacy: AtomicU32,
    device: AtomicU32,
    flags: AtomicU32,
}

const NONE: u32 = u32::MAX;

/// Interval between requests to a busy worker.
const BUSY: Duration = Duration::from_millis(1);

/// The contexts of the session. The first slots are the devices' primary contexts, which have a handle before they are
/// active.
pub(crate) struct Contexts {
    slots: Vec<ContextSlot>,
    /// Slots of primary contexts, one for each device.
    primaries: usize,
    state: Mutex<ContextsState>,
    /// Notifies threads that wait to activate a context while it ends.
    ended: Condvar,
    /// The green contexts, each a part of a primary one.
    pub(crate) greens: Greens,
}

struct ContextsState {
    generations: Vec<u32>,
    /// Retain counts of the primary contexts.
    retained: Vec<Retains>,
    /// Contexts that are ending: out of use here, not yet gone on the host.
    ending: Vec<bool>,
}

/// A context that may be used.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    /// Its raw id; for a green context that of the primary one.
    pub(crate) raw: u64,
    pub(crate) device: i32,
    /// Stream slot of its default stream, or one that no stream has.
    pub(crate) legacy: u32,
    pub(crate) flags: u32,
    /// Raw id of the green context, 0 for a context that is none.
    pub(crate) green: u64,
}

impl Context {
    /// The id by which the host knows it.
    pub(crate) fn id(&self) -> Result<Id<Kind>> {
        Id::from_raw(self.raw).ok_or(Error::INVALID_CONTEXT)
    }
}

/// A context that is to be activated.
struct New {
    raw: u64,
    device: i32,
    /// The number of its device on the host's side.
    ordinal: u32,
    flags: u32,
    is_primary: bool,
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Contexts {
        let slots = (0..limits::CONTEXTS)
            .map(|index| {
                let primary = (index as usize) < devices;
                ContextSlot {
                    raw: AtomicU64::new(if primary { Id::<Kind>::new(index, 1).raw() } else { 0 }),
                    legacy: AtomicU32::new(NONE),
                    device: AtomicU32::new(if primary { index } else { 0 }),
                    flags: AtomicU32::new(0),
                }
            })
            .collect();
        let state = ContextsState {
            generations: vec![1; limits::CONTEXTS as usize],
            retained: vec![Retains::default(); devices],
            ending: vec![false; limits::CONTEXTS as usize],
        };
        Contexts {
            slots,
            primaries: devices,
            state: Mutex::new(state),
            ended: Condvar::new(),
            greens: Greens::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ContextsState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn slot(&self, raw: u64) -> Option<&ContextSlot> {
        let slot = self.slots.get(Id::<Kind>::from_raw(raw)?.index())?;
        (slot.raw.load(Ordering::Acquire) == raw).then_some(slot)
    }

    /// The handles of the active contexts, without green ones.
    pub(crate) fn active(&self) -> impl Iterator<Item = u64> + '_ {
        let active = self.slots.iter().filter(|slot| slot.legacy.load(Ordering::Acquire) != NONE);
        active.map(|slot| slot.raw.load(Ordering::Acquire))
    }

    /// The handle of a device's primary context, active or not.
    pub(crate) fn primary(&self, device: i32) -> Result<u64> {
        Ok(self.slots[self.primary_index(device)?].raw.load(Ordering::Acquire))
    }

    fn primary_index(&self, device: i32) -> Result<usize> {
        let index = usize::try_from(device).ok().filter(|index| *index < self.primaries);
        index.ok_or(Error::INVALID_DEVICE)
    }

    /// True if a handle names a context, active or not.
    pub(crate) fn exists(&self, raw: u64) -> bool {
        if is_view(raw) { self.greens.of_view(raw).is_ok() } else { self.slot(raw).is_some() }
    }

    /// Raw id of the calling thread's current context as the host knows it, 0 for none.
    pub(crate) fn current_on_host(&self) -> u64 {
        match thread::current_context() {
            view if is_view(view) => self.greens.of_view(view).map_or(0, |green| green.primary),
            raw => raw,
        }
    }

    /// The device of a context, active or not.
    pub(crate) fn device(&self, raw: u64) -> Result<i32> {
        if is_view(raw) {
            return Ok(self.greens.of_view(raw)?.device);
        }
        let slot = self.slot(raw).ok_or(Error::INVALID_CONTEXT)?;
        Ok(slot.device.load(Ordering::Relaxed).cast_signed())
    }

    /// A number of a context, or of the current one for 0, that no other context of the process has or will have.
    pub(crate) fn unique_id(&self, raw: u64) -> Result<u64> {
        let raw = if raw == 0 { thread::current_context() } else { raw };
        if is_view(raw) {
            // The tag of the handle distinguishes it.
            return self.greens.of_view(raw).map(|green| green.view());
        }
        let id = Id::<Kind>::from_raw(raw).filter(|_| self.exists(raw)).ok_or(Error::INVALID_CONTEXT)?;
        Ok(u64::from(id.generation()) << 32 | (id.index() as u64 + 1))
    }

    /// An active context by handle.
    pub(crate) fn get(&self, raw: u64) -> Result<Context> {
        if is_view(raw) { self.of_view(raw) } else { self.of_slot(raw) }
    }

    /// The context of a green context's handle. Apart from the path of launches, which is short without it.
    #[cold]
    fn of_view(&self, raw: u64) -> Result<Context> {
        let green = self.greens.of_view(raw)?;
        let primary = self.of_slot(green.primary)?;
        let legacy = green.default.unwrap_or(NONE);
        Ok(Context { legacy, green: green.id.raw(), ..primary })
    }

    #[inline]
    fn of_slot(&self, raw: u64) -> Result<Context> {
        let slot = self.slot(raw).ok_or(Error::INVALID_CONTEXT)?;
        match slot.legacy.load(Ordering::Acquire) {
            NONE => Err(Error::CONTEXT_IS_DESTROYED),
            legacy => Ok(Context {
                raw,
                device: slot.device.load(Ordering::Relaxed).cast_signed(),
                legacy,
                flags: slot.flags.load(Ordering::Relaxed),
                green: 0,
            }),
        }
    }

    /// The calling thread's current context, healthy.
    pub(crate) fn current(&self, session: &Session) -> Result<Context> {
        session.healthy()?;
        match thread::current_context() {
            0 => Err(Error::INVALID_CONTEXT),
            // The handle was valid when it became current.
            raw => self.get(raw).map_err(|_| Error::CONTEXT_IS_DESTROYED),
        }
    }

    fn activate(&self, session: &Session, streams: &Streams, new: &New) -> Result {
        let New { raw, device, ordinal, flags, is_primary } = *new;
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_CONTEXT)?;
        let slot = &self.slots[id.index()];
        let legacy = streams.take(session, raw, 0, 0)?;
        let created = session.sync(
            0,
            &wire::context_create::Args {
                context: Mint(id),
                device: Ordinal(ordinal),
                flags,
                primary: is_primary,
                stream: legacy.slot,
            },
        );
        if let Err(error) = created {
            streams.put_back(legacy);
            return Err(error);
        }
        streams.hold_with_context(legacy);
        session.forget_late_errors(raw);
        slot.device.store(device.cast_unsigned(), Ordering::Relaxed);
        slot.flags.store(flags, Ordering::Relaxed);
        slot.legacy.store(legacy.slot, Ordering::Release);
        Ok(())
    }

    /// Ends a context: runs the destructors that programs and runtimes have tied to it, then takes it out of use; `end` waits for its
    /// work and destroys it. `false` if the destructors, or another thread, did so meanwhile. No lock is held while a destructor
    /// runs, since it may call any function of the driver, nor during the wait for the work.
    fn deactivate(&self, raw: u64, end: impl FnOnce(Id<Kind>) -> Result) -> Result<bool> {
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_CONTEXT)?;
        self.get(raw)?;
        sluice_cuda_frontend::tables::context_destroyed(
            usize::try_from(raw).map_err(|_| Error::INVALID_CONTEXT)?,
        );
        {
            let mut state = self.lock();
            if self.slots[id.index()].legacy.swap(NONE, Ordering::AcqRel) == NONE {
                return Ok(false);
            }
            state.ending[id.index()] = true;
        }
        let ended = end(id);
        self.lock().ending[id.index()] = false;
        self.ended.notify_all();
        ended.map(|()| true)
    }

    /// Destroys a context on the host, once its work is complete.
    pub(crate) fn destroy_on_host(session: &Session, id: Id<Kind>) -> Result {
        // No work of this context is under way. The worker may not see that while its queue holds work of others, which is not an
        // error of this call.
        while let Err(error) = session.sync(0, &wire::context_destroy::Args { context: id }) {
            if error != Error::NOT_READY {
                return Err(error);
            }
            pause(BUSY);
        }
        Ok(())
    }

    /// Creates an ordinary context and makes it current.
    pub(crate) fn create(
        &self,
        session: &Session,
        streams: &Streams,
        devices: &Devices,
        device: i32,
        flags: u32,
    ) -> Result<u64> {
        let ordinal = devices.get(device)?.ordinal;
        let raw = {
            let mut state = self.lock();
            let index = (self.primaries..self.slots.len())
                .find(|index| self.slots[*index].raw.load(Ordering::Relaxed) == 0)
                .ok_or(Error::OUT_OF_MEMORY)?;
            state.generations[index] = state.generations[index].wrapping_add(1);
            let raw =
                Id::<Kind>::new(u32::try_from(index).map_err(|_| Error::UNKNOWN)?, state.generations[index])
                    .raw();
            self.slots[index].raw.store(raw, Ordering::Release);
            raw
        };
        let new = New { raw, device, ordinal, flags, is_primary: false };
        if let Err(error) = self.activate(session, streams, &new) {
            self.release(raw);
            return Err(error);
        }
        thread::push(raw);
        Ok(raw)
    }

    fn release(&self, raw: u64) {
        if let Some(slot) = self.slot(raw) {
            slot.raw.store(0, Ordering::Release);
        }
    }

    /// Destroys an ordinary context; if it is current here, the thread has no current context afterwards.
    pub(crate) fn destroy(&self, raw: u64, end: impl FnOnce(Id<Kind>) -> Result) -> Result {
        let id = Id::<Kind>::from_raw(raw).filter(|_| self.exists(raw)).ok_or(Error::INVALID_CONTEXT)?;
        if id.index() < self.primaries {
            return Err(Error::INVALID_CONTEXT);
        }
        if self.deactivate(raw, end)? {
            self.release(raw);
        }
        if thread::current_context() == raw {
            thread::pop();
        }
        Ok(())
    }

    /// Retains a device's primary context, activating it if it is not.
    pub(crate) fn retain_primary(
        &self,
        session: &Session,
        streams: &Streams,
        devices: &Devices,
        device: i32,
        by: Retainer,
    ) -> Result<u64> {
        let index = self.primary_index(device)?;
        let (raw, mut state) = self.active_primary(session, streams, devices, device)?;
        state.retained[index].add(by);
        Ok(raw)
    }

    /// Returns the current context, or without one the primary context of the first device, which most runtimes use next: for
    /// calls that need no context themselves, but whose work on the host does. It becomes active without a retain, so that it ends
    /// when the program releases it.
    pub(crate) fn for_look_up(&self, session: &Session, streams: &Streams, devices: &Devices) -> Result<u64> {
        match self.current_on_host() {
            0 => Ok(self.active_primary(session, streams, devices, 0)?.0),
            current => Ok(current),
        }
    }

    /// A device's primary context, made active if it is not, and the state in which it is.
    fn active_primary(
        &self,
        session: &Session,
        streams: &Streams,
        devices: &Devices,
        device: i32,
    ) -> Result<(u64, MutexGuard<'_, ContextsState>)> {
        let (raw, index) = (self.primary(device)?, self.primary_index(device)?);
        let mut state = self.lock();
        while state.ending[index] {
            state = self.ended.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        if self.get(raw).is_err() {
            let flags = self.slots[index].flags.load(Ordering::Relaxed);
            let ordinal = devices.get(device)?.ordinal;
            self.activate(session, streams, &New { raw, device, ordinal, flags, is_primary: true })?;
        }
        Ok((raw, state))
    }

    /// Releases a device's primary context; the last release resets it. `false` if the holder has not retained it.
    pub(crate) fn release_primary(
        &self,
        device: i32,
        by: Retainer,
        end: impl FnOnce(Id<Kind>) -> Result,
    ) -> Result<bool> {
        let (raw, index) = (self.primary(device)?, self.primary_index(device)?);
        let is_held = {
            let mut state = self.lock();
            let retained = &mut state.retained[index];
            if !retained.remove(by) {
                return Ok(false);
            }
            retained.is_held()
        };
        if !is_held && self.get(raw).is_ok() {
            self.deactivate(raw, end)?;
        }
        Ok(true)
    }

    /// Takes back a green context's retain of a device's primary context, with which it ends.
    pub(crate) fn forget_retain(&self, device: i32) -> Result {
        let index = self.primary_index(device)?;
        let mut state = self.lock();
        state.retained[index].remove(Retainer::GreenContext);
        Ok(())
    }

    /// Destroys everything in a device's primary context, however many retain it.
    pub(crate) fn reset_primary(&self, device: i32, end: impl FnOnce(Id<Kind>) -> Result) -> Result {
        let raw = self.primary(device)?;
        let index = self.primary_index(device)?;
        self.lock().retained[index] = Retains::default();
        if self.get(raw).is_ok() { self.deactivate(raw, end).map(drop) } else { Ok(()) }
    }

    /// The flags of a device's primary context, and true if it is active.
    pub(crate) fn primary_state(&self, device: i32) -> Result<(u32, bool)> {
        let raw = self.primary(device)?;
        let slot = self.slot(raw).ok_or(Error::INVALID_DEVICE)?;
        Ok((slot.flags.load(Ordering::Relaxed), slot.legacy.load(Ordering::Acquire) != NONE))
    }

    /// Sets the flags of a context.
    pub(crate) fn set_flags(&self, raw: u64, flags: u32) -> Result {
        self.slot(raw).ok_or(Error::INVALID_CONTEXT)?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
}

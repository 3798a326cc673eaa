//! Contexts: which exist, which is current where, and the primary ones.

use crate::{
    error::{Error, Result},
    process::Process,
    thread,
};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{Context as Kind, Id},
    limits,
};
use std::{
    sync::{Condvar, Mutex, MutexGuard},
    time::Duration,
};

struct Slot {
    /// Raw id, 0 while free.
    raw: AtomicU64,
    /// Stream slot of the legacy default stream, [`NONE`] while the context is not active.
    legacy: AtomicU32,
    device: AtomicU32,
    flags: AtomicU32,
}

const NONE: u32 = u32::MAX;

/// How long until a worker that is busy is asked again.
const BUSY: Duration = Duration::from_millis(1);

/// The contexts of the session. The first slots are the devices' primary contexts, which have a handle before they are
/// active.
pub(crate) struct Contexts {
    slots: Vec<Slot>,
    state: Mutex<State>,
    /// Tells who waits to activate a context that is just ending.
    ended: Condvar,
}

struct State {
    generations: Vec<u32>,
    /// Retain counts of the primary contexts.
    retained: Vec<u32>,
    /// Contexts that are ending: out of use here, not yet gone on the host.
    ending: Vec<bool>,
}

/// A context that may be used.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    pub(crate) raw: u64,
    pub(crate) device: i32,
    /// Stream slot of its legacy default stream.
    pub(crate) legacy: u32,
    pub(crate) flags: u32,
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Contexts {
        let slots = (0..limits::CONTEXTS)
            .map(|index| {
                let primary = (index as usize) < devices;
                Slot {
                    raw: AtomicU64::new(if primary { Id::<Kind>::new(index, 1).raw() } else { 0 }),
                    legacy: AtomicU32::new(NONE),
                    device: AtomicU32::new(if primary { index } else { 0 }),
                    flags: AtomicU32::new(0),
                }
            })
            .collect();
        let state = State {
            generations: vec![1; limits::CONTEXTS as usize],
            retained: vec![0; devices],
            ending: vec![false; limits::CONTEXTS as usize],
        };
        Contexts { slots, state: Mutex::new(state), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn slot(&self, raw: u64) -> Option<&Slot> {
        let slot = self.slots.get(Id::<Kind>::from_raw(raw)?.index())?;
        (slot.raw.load(Ordering::Acquire) == raw).then_some(slot)
    }

    /// The handle of a device's primary context, active or not.
    pub(crate) fn primary(&self, process: &Process, device: i32) -> Result<u64> {
        process.devices.get(device)?;
        let index = usize::try_from(device).map_err(|_| Error::INVALID_DEVICE)?;
        Ok(self.slots[index].raw.load(Ordering::Acquire))
    }

    /// Whether a handle names a context, active or not.
    pub(crate) fn exists(&self, raw: u64) -> bool {
        self.slot(raw).is_some()
    }

    /// The device of a context, active or not.
    pub(crate) fn device(&self, raw: u64) -> Result<i32> {
        let slot = self.slot(raw).ok_or(Error::INVALID_CONTEXT)?;
        Ok(slot.device.load(Ordering::Relaxed).cast_signed())
    }

    /// A number of a context, or of the current one for 0, that no other context of the process has or will have.
    pub(crate) fn unique_id(&self, raw: u64) -> Result<u64> {
        let raw = if raw == 0 { thread::current_context() } else { raw };
        let id = Id::<Kind>::from_raw(raw).filter(|_| self.exists(raw)).ok_or(Error::INVALID_CONTEXT)?;
        Ok(u64::from(id.generation()) << 32 | (id.index() as u64 + 1))
    }

    /// An active context by handle.
    pub(crate) fn get(&self, raw: u64) -> Result<Context> {
        let slot = self.slot(raw).ok_or(Error::INVALID_CONTEXT)?;
        match slot.legacy.load(Ordering::Acquire) {
            NONE => Err(Error::CONTEXT_IS_DESTROYED),
            legacy => Ok(Context {
                raw,
                device: slot.device.load(Ordering::Relaxed).cast_signed(),
                legacy,
                flags: slot.flags.load(Ordering::Relaxed),
            }),
        }
    }

    /// The calling thread's current context, healthy.
    pub(crate) fn current(&self, process: &Process) -> Result<Context> {
        process.session.healthy()?;
        match thread::current_context() {
            0 => Err(Error::INVALID_CONTEXT),
            // It was a context when it became current.
            raw => self.get(raw).map_err(|_| Error::CONTEXT_IS_DESTROYED),
        }
    }

    fn activate(&self, process: &Process, raw: u64, device: i32, flags: u32, primary: bool) -> Result {
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_CONTEXT)?;
        let slot = &self.slots[id.index()];
        let ordinal = process.devices.get(device)?.ordinal;
        let legacy = process.streams.take(process, raw, 0, 0)?;
        let created = process.session.sync(
            0,
            wire::context_create::CALL,
            |writer| wire::context_create::put(writer, Mint(id), ordinal, flags, primary, legacy.slot),
            wire::context_create::Reply::get,
        );
        if let Err(error) = created {
            process.streams.put_back(legacy);
            return Err(error);
        }
        process.session.forget_late_errors(raw);
        slot.device.store(device.cast_unsigned(), Ordering::Relaxed);
        slot.flags.store(flags, Ordering::Relaxed);
        slot.legacy.store(legacy.slot, Ordering::Release);
        Ok(())
    }

    /// Ends a context: runs what programs and runtimes have tied to it, then takes it out of use, waits for its work, and
    /// destroys it. `false` when the destructors, or another thread, did so meanwhile. Nothing is locked while a destructor
    /// runs, which may come back to any function of the driver, nor while the work is waited for.
    fn deactivate(&self, process: &Process, raw: u64) -> Result<bool> {
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_CONTEXT)?;
        self.get(raw)?;
        sluice_cuda_abi::tables::context_destroyed(usize::try_from(raw).map_err(|_| Error::INVALID_CONTEXT)?);
        {
            let mut state = self.lock();
            if self.slots[id.index()].legacy.swap(NONE, Ordering::AcqRel) == NONE {
                return Ok(false);
            }
            state.ending[id.index()] = true;
        }
        let ended = self.end(process, id);
        self.lock().ending[id.index()] = false;
        self.ended.notify_all();
        ended.map(|()| true)
    }

    fn end(&self, process: &Process, id: Id<Kind>) -> Result {
        let raw = id.raw();
        let streams = process.streams.retire_context(raw);
        for (stream, sequence) in process.streams.posted(raw, false) {
            process.session.wait_complete(stream, sequence)?;
        }
        process.device_map.forget_context(raw);
        // Nothing of this context is under way. The worker may not see that while its queue has work of others, which is no
        // error of this call.
        while let Err(error) = process.session.sync(
            0,
            wire::context_destroy::CALL,
            |writer| wire::context_destroy::put(writer, id),
            wire::context_destroy::Reply::get,
        ) {
            if error != Error::NOT_READY {
                return Err(error);
            }
            std::thread::sleep(BUSY);
        }
        process.streams.give_all(streams);
        process.events.forget_context(raw);
        process.modules.forget_context(process, raw);
        process.functions.forget_launches(id.index());
        process.arena.forget_context(raw);
        process.managed.forget_context(raw);
        Ok(())
    }

    /// Creates an ordinary context and makes it current.
    pub(crate) fn create(&self, process: &Process, device: i32, flags: u32) -> Result<u64> {
        process.devices.get(device)?;
        let raw = {
            let mut state = self.lock();
            let first = process.devices.count();
            let index = (first..self.slots.len())
                .find(|index| self.slots[*index].raw.load(Ordering::Relaxed) == 0)
                .ok_or(Error::OUT_OF_MEMORY)?;
            state.generations[index] = state.generations[index].wrapping_add(1);
            let raw =
                Id::<Kind>::new(u32::try_from(index).map_err(|_| Error::UNKNOWN)?, state.generations[index])
                    .raw();
            self.slots[index].raw.store(raw, Ordering::Release);
            raw
        };
        if let Err(error) = self.activate(process, raw, device, flags, false) {
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

    /// Destroys an ordinary context; if it is current here, it is current no more.
    pub(crate) fn destroy(&self, process: &Process, raw: u64) -> Result {
        let id = Id::<Kind>::from_raw(raw).filter(|_| self.exists(raw)).ok_or(Error::INVALID_CONTEXT)?;
        if id.index() < process.devices.count() {
            return Err(Error::INVALID_CONTEXT);
        }
        if self.deactivate(process, raw)? {
            self.release(raw);
        }
        if thread::current_context() == raw {
            thread::pop();
        }
        Ok(())
    }

    /// Retains a device's primary context, activating it if it is not.
    pub(crate) fn retain_primary(&self, process: &Process, device: i32) -> Result<u64> {
        let raw = self.primary(process, device)?;
        let index = usize::try_from(device).map_err(|_| Error::INVALID_DEVICE)?;
        let mut state = self.lock();
        while state.ending[index] {
            state = self.ended.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        if self.get(raw).is_err() {
            let flags = self.slots[index].flags.load(Ordering::Relaxed);
            self.activate(process, raw, device, flags, true)?;
        }
        state.retained[index] = state.retained[index].saturating_add(1);
        Ok(raw)
    }

    /// Releases a device's primary context; the last release resets it.
    pub(crate) fn release_primary(&self, process: &Process, device: i32) -> Result {
        let raw = self.primary(process, device)?;
        let index = usize::try_from(device).map_err(|_| Error::INVALID_DEVICE)?;
        let left = {
            let mut state = self.lock();
            let left = state.retained[index].checked_sub(1).ok_or(Error::INVALID_CONTEXT)?;
            state.retained[index] = left;
            left
        };
        if left == 0 && self.get(raw).is_ok() { self.deactivate(process, raw).map(drop) } else { Ok(()) }
    }

    /// Destroys everything in a device's primary context, whoever retains it.
    pub(crate) fn reset_primary(&self, process: &Process, device: i32) -> Result {
        let raw = self.primary(process, device)?;
        if self.get(raw).is_ok() { self.deactivate(process, raw).map(drop) } else { Ok(()) }
    }

    /// Flags of a device's primary context, and whether it is active.
    pub(crate) fn primary_state(&self, process: &Process, device: i32) -> Result<(u32, bool)> {
        let raw = self.primary(process, device)?;
        let slot = self.slot(raw).ok_or(Error::INVALID_DEVICE)?;
        Ok((slot.flags.load(Ordering::Relaxed), slot.legacy.load(Ordering::Acquire) != NONE))
    }

    /// Sets the flags of a context.
    pub(crate) fn set_flags(&self, raw: u64, flags: u32) -> Result {
        self.slot(raw).ok_or(Error::INVALID_CONTEXT)?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
}

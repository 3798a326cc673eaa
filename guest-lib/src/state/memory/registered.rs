//! Memory of the program that it registered (`cuMemHostRegister`).
//!
//! Devices reach guest memory only if it is a resource of the transport, so registered memory becomes one: its pages are replaced by those
//! of a resource, with the same bytes, at the program's address ([`takeover`]). The worker maps the resource inside the window; that
//! address is the memory's address on the device. It is not the program's, and attribute 91
//! (`CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`) says so. When the memory is unregistered, the pages become private again.
//!
//! The program's memory beside the registered range, in the same pages, moves with it. Memory that other processes share cannot
//! move, so it is refused. A page belongs to one registration at most.

#![expect(unsafe_code, reason = "replaces pages of the program's memory")]

use crate::{
    error::{Error, Result},
    log,
    session::{Reach, Session, SharedArena},
};
use core::sync::atomic::{AtomicUsize, Ordering};
use rustix::fd::{AsFd as _, OwnedFd};
use sluice_protocol::limits;
use sluice_shared_memory::{
    Reservation,
    ranges::{Free, Range},
    takeover::{self, FilePages, TakeOverError},
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

const PAGE: u64 = 4096;

/// True if this kernel lets a process register memory.
pub(crate) fn is_possible() -> bool {
    static POSSIBLE: OnceLock<bool> = OnceLock::new();
    *POSSIBLE.get_or_init(takeover::is_possible)
}

/// The memory that the program has registered.
#[derive(Default)]
pub(crate) struct Registered {
    /// Addresses of registered memory on the device.
    window: OnceLock<Reservation>,
    /// Number of registrations, read by calls that only ask whether there are any.
    count: AtomicUsize,
    state: Mutex<RegisteredState>,
    /// Held while memory is registered or unregistered.
    turn: Mutex<()>,
}

#[derive(Default)]
struct RegisteredState {
    /// Registrations by the address of their first page.
    list: BTreeMap<u64, Registration>,
    /// The free parts of the window.
    free: Option<Free>,
}

/// A registered range.
struct Registration {
    /// The range, as the program gave it.
    pointer: u64,
    bytes: u64,
    /// The whole pages of the range, in the program and in the window.
    pages: u64,
    window: u64,
    /// The resources, in the order of their addresses.
    shared: Vec<SharedArena>,
    context: u64,
}

impl Registration {
    /// The address on the device of an address in the range.
    fn on_device(&self, address: u64) -> u64 {
        self.window + (address - self.pointer / PAGE * PAGE)
    }
}

/// A registered range, in the program and on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisteredRange {
    pub(crate) pointer: u64,
    pub(crate) device: u64,
    pub(crate) bytes: u64,
}

impl RegisteredState {
    /// The registration of a range that contains an address of the program.
    fn containing(&self, address: u64) -> Option<&Registration> {
        let (_, found) = self.list.range(..=address).next_back()?;
        address.checked_sub(found.pointer).is_some_and(|at| at < found.bytes).then_some(found)
    }
}

impl Registered {
    fn lock(&self) -> MutexGuard<'_, RegisteredState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if an address may be one of registered memory on the device.
    pub(crate) fn has_device_address(&self, address: u64) -> bool {
        self.window.get().is_some_and(|window| address.wrapping_sub(window.base()) < window.bytes())
    }

    /// The registered range that contains an address of the program.
    pub(crate) fn find(&self, address: u64) -> Option<RegisteredRange> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let state = self.lock();
        let found = state.containing(address)?;
        Some(RegisteredRange {
            pointer: found.pointer,
            device: found.on_device(found.pointer),
            bytes: found.bytes,
        })
    }

    /// Registers memory.
    pub(crate) fn register(
        &self,
        session: &Session,
        context: u64,
        pointer: u64,
        bytes: u64,
    ) -> Result<RegisteredRange> {
        let first = pointer / PAGE * PAGE;
        let end = pointer.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(PAGE));
        let pages = end.ok_or(Error::INVALID_VALUE)? - first;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let resources = usize_of(pages.div_ceil(limits::RESOURCE_BYTES));
        let overlaps = |(at, other): (&u64, &Registration)| *at < first + pages && first < at + other.pages;
        if self.lock().list.iter().any(overlaps) {
            return Err(Error::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let used: usize = self.lock().list.values().map(|other| other.shared.len()).sum();
        if used + resources > limits::REGISTERED_RESOURCES {
            log::warn(format_args!(
                "cuMemHostRegister: a process has at most {} resources of registered memory",
                limits::REGISTERED_RESOURCES
            ));
            return Err(Error::OUT_OF_MEMORY);
        }
        let window = self.window()?;
        let range = {
            let mut state = self.lock();
            let free = state.free.get_or_insert_with(|| Free::new(window.base(), window.bytes()));
            free.take(pages).ok_or(Error::OUT_OF_MEMORY)?
        };
        let mut shared = Vec::new();
        let taken = share(session, window, range, &mut shared).and_then(|()| {
            let files = files(session, &shared)?;
            let taken = with_pages(&files, &shared, |parts| {
                // SAFETY: the program hands the range over; the resources were just made for it.
                unsafe {
                    takeover::take_over(usize_of(first), usize_of(pages), usize_of(range.offset), parts)
                }
            });
            taken.map_err(|error| refused(pointer, bytes, &error))
        });
        if let Err(error) = taken {
            self.unshare(session, window, range, shared);
            return Err(error);
        }
        let made = Registration { pointer, bytes, pages, window: range.offset, shared, context };
        let device = made.on_device(pointer);
        self.lock().list.insert(first, made);
        self.count.fetch_add(1, Ordering::Release);
        Ok(RegisteredRange { pointer, device, bytes })
    }

    /// Forgets the registration that begins at an address of the program; `after` then waits for the work that uses it.
    pub(crate) fn unregister(
        &self,
        session: &Session,
        pointer: u64,
        after: impl FnOnce(RegisteredRange) -> Result,
    ) -> Result {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let first = pointer / PAGE * PAGE;
        let gone = {
            let mut state = self.lock();
            match state.containing(pointer) {
                Some(found) if found.pointer == pointer => state.list.remove(&first),
                Some(_) => return Err(Error::INVALID_VALUE),
                None => None,
            }
        };
        let gone = gone.ok_or(Error::HOST_MEMORY_NOT_REGISTERED)?;
        self.count.fetch_sub(1, Ordering::Release);
        // From here on copies take the range for memory of the program, which it is in any case.
        let ended = after(RegisteredRange { pointer, device: gone.on_device(pointer), bytes: gone.bytes });
        let Registration { pages, window, shared, .. } = gone;
        let handed = files(session, &shared).and_then(|files| {
            with_pages(&files, &shared, |parts| {
                // SAFETY: the range has the resources' pages since it was registered, and no work uses them any more.
                unsafe { takeover::hand_back(usize_of(first), usize_of(pages), usize_of(window), parts) }
            })
            .map_err(|error| {
                log::warn(format_args!("{pages} bytes stay shared with the worker: {error}"));
                Error::OUT_OF_MEMORY
            })
        });
        if handed.is_ok() && ended.is_ok() {
            self.unshare(session, self.window()?, Range { offset: window, bytes: pages }, shared);
        }
        ended.and(handed)
    }

    /// The registrations of a context, by their addresses in the program.
    pub(crate) fn of_context(&self, context: u64) -> Vec<u64> {
        let state = self.lock();
        state.list.values().filter(|found| found.context == context).map(|found| found.pointer).collect()
    }

    fn window(&self) -> Result<&Reservation> {
        if let Some(window) = self.window.get() {
            return Ok(window);
        }
        let window = super::windows::reserve()?;
        Ok(self.window.get_or_init(|| window))
    }

    /// Has the worker unmap resources, and frees their addresses. What fails stays in use.
    fn unshare(&self, session: &Session, window: &Reservation, range: Range, shared: Vec<SharedArena>) {
        for part in shared {
            if let Err(error) = session.detach(window, part) {
                log::warn(format_args!("memory of a registration stays shared with the worker: {error:?}"));
                return;
            }
        }
        if let Some(free) = &mut self.lock().free {
            free.give(range);
        }
    }
}

/// Shares a range of the window with the worker, in resources of the greatest size.
fn share(session: &Session, window: &Reservation, range: Range, shared: &mut Vec<SharedArena>) -> Result {
    let mut done = 0;
    while done < range.bytes {
        let part = (range.bytes - done).min(limits::RESOURCE_BYTES);
        let (reach, made) = session.attach(window, range.offset + done, part)?;
        shared.push(made);
        if reach == Reach::Gathered {
            log::warn(format_args!(
                "no registered host memory: the device cannot reach this machine's memory in place"
            ));
            return Err(Error::NOT_SUPPORTED);
        }
        done += part;
    }
    Ok(())
}

/// The files of resources, with the places of the resources in them.
fn files(session: &Session, shared: &[SharedArena]) -> Result<Vec<(OwnedFd, u64)>> {
    shared.iter().map(|part| session.file_pages(part)).collect()
}

/// Gives `act` the pages of resources.
fn with_pages<R>(
    files: &[(OwnedFd, u64)],
    shared: &[SharedArena],
    act: impl FnOnce(&[FilePages<'_>]) -> R,
) -> R {
    let parts: Vec<_> = files
        .iter()
        .zip(shared)
        .map(|((file, offset), part)| FilePages {
            file: file.as_fd(),
            offset: *offset,
            bytes: usize_of(part.bytes()),
        })
        .collect();
    act(&parts)
}

/// The driver's answer for memory that cannot be registered.
fn refused(pointer: u64, bytes: u64, error: &TakeOverError) -> Error {
    if matches!(error, TakeOverError::Unmapped(_)) {
        return Error::INVALID_VALUE;
    }
    log::warn(format_args!("cannot register {bytes} bytes at {pointer:#x}: {error}"));
    match error {
        TakeOverError::Kernel { error: rustix::io::Errno::NOMEM, .. } => Error::OUT_OF_MEMORY,
        _ => Error::NOT_SUPPORTED,
    }
}

/// An address or a length of this process.
fn usize_of(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

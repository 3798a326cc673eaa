//! Device addresses: the windows they lie in, and the allocations in them.
//!
//! The windows are reserved in this process, so no host pointer can ever look like a device pointer. A session begins with one, and gets
//! more when a program reserves more addresses than are left. They take addresses only.

use crate::{
    error::{Error, Result},
    log,
    session::Session,
    state::streams::{StreamRef, Streams},
};
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, Size},
    limits,
};
use sluice_shared_memory::Reservation;
use std::{
    collections::BTreeMap,
    ops::{Bound, Range},
    sync::{
        Mutex, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// A new value for `CU_POINTER_ATTRIBUTE_BUFFER_ID`, which no other allocation had or will have.
pub(crate) fn identity() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

const PAGE: u64 = 4096;

/// A live range of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMapRange {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Distinguishes it from an earlier allocation at its address.
    pub(crate) identity: u64,
    /// Raw id of the context it belongs to.
    pub(crate) context: u64,
    pub(crate) kind: RangeOrigin,
}

/// The origin of a range of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeOrigin {
    /// Allocated on its own.
    Own,
    /// Allocated from the pool with this handle.
    Pool(u64),
    /// A module's variable, which the program must not free.
    Global,
    /// The program's own mapping, to which it has access.
    Mapped,
    /// Memory of another process, on this device.
    Imported(i32),
    /// The library's own, which the program must not free.
    Internal,
}

/// The address windows of the session: the first is there from the beginning, and none ends.
struct Windows {
    list: [OnceLock<Reservation>; limits::WINDOWS],
    /// Held while one is added.
    growing: Mutex<()>,
}

impl Windows {
    fn new(first: Reservation) -> Windows {
        let mut list = [const { OnceLock::new() }; limits::WINDOWS];
        list[0] = OnceLock::from(first);
        Windows { list, growing: Mutex::default() }
    }

    /// True if a range lies in one window.
    fn hold(&self, start: u64, bytes: u64) -> bool {
        let windows = self.list.iter().map_while(OnceLock::get);
        let mut left = windows.map(|window| (start.wrapping_sub(window.base()), window.bytes()));
        left.any(|(offset, length)| offset < length && bytes <= length - offset)
    }

    /// Adds a window of `bytes` at least. The caller holds `growing`.
    fn grow(&self, session: &Session, bytes: u64) -> Result {
        let place = self.list.iter().find(|place| place.get().is_none()).ok_or(Error::OUT_OF_MEMORY)?;
        // A unit stays free between windows, so that no range reaches from one into the next.
        let step = bytes.checked_add(limits::UNIT).ok_or(Error::OUT_OF_MEMORY)?;
        let step = step.checked_next_multiple_of(limits::SESSION_WINDOW_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
        if step > limits::WIDE_WINDOW_BYTES {
            return Err(Error::OUT_OF_MEMORY);
        }
        let (bounds, bytes) = (limits::WIDE_WINDOW_BOUNDS, step - limits::UNIT);
        for number in 1..=(bounds.end - bounds.start) / step {
            let base = bounds.end - number * step;
            let Ok(window) = Reservation::new(base, bytes) else { continue };
            match session.sync(0, &wire::window_reserve::Args { base, bytes: Size(bytes) }) {
                Ok(_) => {
                    place.get_or_init(|| window);
                    return Ok(());
                }
                Err(error) => {
                    log::info(format_args!("window at {base:#x} refused by the worker: {error:?}"));
                    session.alive()?;
                }
            }
        }
        Err(Error::OUT_OF_MEMORY)
    }
}

/// The live ranges, and the reservations around them.
pub(crate) struct DeviceMap {
    ranges: RwLock<BTreeMap<u64, DeviceMapRange>>,
    windows: Windows,
    /// Pages outside the window that hold variables of modules.
    pages: Mutex<BTreeMap<u64, Reservation>>,
}

impl DeviceMap {
    /// Finds a window that is free in this process and in the worker. All candidates begin at the same place: only mappings that
    /// grew down from the top of the address space may be in the way.
    pub(crate) fn open(session: &Session) -> Result<DeviceMap> {
        let base = limits::WINDOW_BOUNDS.end - limits::SESSION_WINDOW_BYTES;
        for shift in 0..6 {
            let bytes = limits::SESSION_WINDOW_BYTES >> shift;
            let Ok(window) = Reservation::new(base, bytes) else { continue };
            let reserved = session.sync(0, &wire::window_reserve::Args { base, bytes: Size(bytes) });
            match reserved {
                Ok(_) => {
                    return Ok(DeviceMap {
                        ranges: RwLock::default(),
                        windows: Windows::new(window),
                        pages: Mutex::default(),
                    });
                }
                Err(error) => {
                    log::info(format_args!("window at {base:#x} refused by the worker: {error:?}"));
                    session.alive()?;
                }
            }
        }
        log::error(format_args!(
            "no range of addresses is free for device memory in {:#x?}",
            limits::WINDOW_BOUNDS
        ));
        Err(Error::OUT_OF_MEMORY)
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, DeviceMapRange>> {
        self.ranges.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, DeviceMapRange>> {
        self.ranges.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records a range that the host has returned.
    pub(crate) fn enter(&self, start: u64, bytes: u64, context: u64, kind: RangeOrigin) -> Result<u64> {
        let (within, last) = (self.windows.hold(start, bytes), start.checked_add(bytes));
        let mut ranges = self.write();
        let overlaps = || {
            let (_, below) = ranges.range(..last.unwrap_or(start)).next_back()?;
            (below.start + below.bytes > start).then_some(())
        };
        if !within || overlaps().is_some() {
            // The range could be other memory of the program.
            log::error(format_args!("the host returned an impossible range: {bytes} bytes at {start:#x}"));
            return Err(Error::UNKNOWN);
        }
        ranges.insert(start, DeviceMapRange { start, bytes, identity: identity(), context, kind });
        Ok(start)
    }

    /// Allocates device memory from a pool, by its number on the host; 0 is no pool.
    pub(crate) fn allocate(
        &self,
        session: &Session,
        context: u64,
        pool: u32,
        origin: RangeOrigin,
        bytes: u64,
    ) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let allocated = session.sync(context, &wire::memory_allocate::Args { pool, bytes: Size(bytes) });
        // A size beyond the record's bound is more than any device has.
        let start = allocated
            .map_err(|error| if bytes > limits::ALLOCATION_BYTES { Error::OUT_OF_MEMORY } else { error })?;
        self.enter(start.address, bytes, context, origin)
    }

    /// Removes a range if it begins at `start` and may be freed so. This comes first, so that a range is freed once, even if
    /// several threads try.
    fn take(&self, start: u64, may: impl FnOnce(RangeOrigin) -> bool) -> Result<DeviceMapRange> {
        let mut ranges = self.write();
        ranges.get(&start).filter(|range| may(range.kind)).ok_or(Error::INVALID_VALUE)?;
        ranges.remove(&start).ok_or(Error::INVALID_VALUE)
    }

    /// Frees an allocation when no work uses it. Address 0 frees nothing.
    pub(crate) fn free(&self, session: &Session, streams: &Streams, start: u64) -> Result {
        if start == 0 {
            return Ok(());
        }
        let range = self.take(start, |kind| matches!(kind, RangeOrigin::Own | RangeOrigin::Pool(_)))?;
        Self::give(session, streams, range)
    }

    /// Frees an allocation that no work uses. It may have ended with its context.
    pub(crate) fn free_unused(&self, session: &Session, start: u64) {
        if let Ok(range) = self.take(start, |kind| matches!(kind, RangeOrigin::Own | RangeOrigin::Internal)) {
            // After a failure the session is over, and its memory with it.
            let free = wire::memory_free::Args { address: DeviceAddress(range.start) };
            let _ = session.post(range.context, None, &free);
        }
    }

    /// Closes memory of another process when no work uses it.
    pub(crate) fn close(&self, session: &Session, streams: &Streams, start: u64) -> Result {
        let range = self.take(start, |kind| matches!(kind, RangeOrigin::Imported(_)))?;
        Self::give(session, streams, range)
    }

    /// Frees an allocation in the order of a stream.
    pub(crate) fn free_ordered(&self, session: &Session, stream: StreamRef<'_>, start: u64) -> Result {
        let range = self.take(start, |kind| matches!(kind, RangeOrigin::Own | RangeOrigin::Pool(_)))?;
        let freed = session.post(
            stream.context,
            Some(stream.target()),
            &wire::memory_free_ordered::Args { address: DeviceAddress(range.start) },
        );
        freed.map(drop).inspect_err(|_| {
            // The host did not free it.
            self.write().insert(range.start, range);
        })
    }

    /// Sets or removes the access to the program's own mapping.
    pub(crate) fn reach(&self, start: u64, bytes: u64, may: bool) {
        let mut ranges = self.write();
        if ranges.get(&start).is_some_and(|range| range.kind == RangeOrigin::Mapped) {
            ranges.remove(&start);
        }
        if may {
            let range =
                DeviceMapRange { start, bytes, identity: identity(), context: 0, kind: RangeOrigin::Mapped };
            ranges.insert(start, range);
        }
    }

    fn give(session: &Session, streams: &Streams, range: DeviceMapRange) -> Result {
        streams.wait_all(session)?;
        session
            .post(range.context, None, &wire::memory_free::Args { address: DeviceAddress(range.start) })
            .map(drop)
    }

    /// Forgets memory of the library's own that is being freed.
    pub(crate) fn forget(&self, start: u64) {
        let mut ranges = self.write();
        if ranges.get(&start).is_some_and(|range| range.kind == RangeOrigin::Internal) {
            ranges.remove(&start);
        }
    }

    /// Forgets the memory of a context, variables included; the host frees it with the context.
    pub(crate) fn forget_context(&self, context: u64) {
        self.write().retain(|_, range| range.context != context);
    }

    /// The live range that contains an address.
    pub(crate) fn find(&self, address: u64) -> Option<DeviceMapRange> {
        let ranges = self.read();
        let (_, range) = ranges.range((Bound::Unbounded, Bound::Included(address))).next_back()?;
        (address - range.start < range.bytes).then_some(*range)
    }

    /// True if an address can only be device memory, allocated or not: host memory never lies there.
    pub(crate) fn reserves(&self, address: u64) -> bool {
        self.windows.hold(address, 1)
    }

    /// Reserves addresses for the program's own mappings, in a new window if the others have too few left.
    pub(crate) fn reserve(&self, session: &Session, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        let ask = || session.sync(0, &wire::va_range_reserve::Args { bytes, alignment, hint });
        let mut reserved = ask();
        if matches!(reserved, Err(Error::OUT_OF_MEMORY)) {
            let _growing = self.windows.growing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            // Another thread may have added one meanwhile.
            reserved = ask();
            if matches!(reserved, Err(Error::OUT_OF_MEMORY)) {
                self.windows.grow(session, bytes.saturating_add(alignment))?;
                reserved = ask();
            }
        }
        let start = reserved?.address;
        if self.windows.hold(start, bytes) { Ok(start) } else { Err(Error::UNKNOWN) }
    }

    /// Checks that `bytes` from `address` lie in one live range.
    pub(crate) fn check(&self, address: u64, bytes: u64) -> Result {
        let mut range = self.find(address).ok_or(Error::INVALID_VALUE)?;
        let end = address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
        // The program's own mappings may be adjacent.
        while end > range.start + range.bytes {
            let next = self.find(range.start + range.bytes).ok_or(Error::INVALID_VALUE)?;
            if range.kind != RangeOrigin::Mapped || next.kind != RangeOrigin::Mapped {
                return Err(Error::INVALID_VALUE);
            }
            range = next;
        }
        Ok(())
    }

    /// Records a module's variable. The driver chose its address, which must not be in use here, or a host
    /// pointer would look like a device pointer.
    pub(crate) fn add_global(&self, start: u64, bytes: u64, context: u64) -> Result {
        let end = start.checked_add(bytes.max(1)).and_then(|end| end.checked_next_multiple_of(PAGE));
        let (mut at, end) = (start - start % PAGE, end.ok_or(Error::UNKNOWN)?);
        let mut pages = self.pages.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while at < end {
            let before = pages.range(..=at).next_back().map(|(base, held)| base + held.bytes());
            if let Some(covered) = before.filter(|covered| *covered > at) {
                at = covered;
                continue;
            }
            let next = pages.range(at..).next().map_or(end, |(base, _)| end.min(*base));
            let reservation = Reservation::new(at, next - at).map_err(|error| {
                log::error(format_args!(
                    "this process has memory of its own at the address of a module's variable: {error}"
                ));
                Error::OUT_OF_MEMORY
            })?;
            pages.insert(at, reservation);
            at = next;
        }
        self.write().insert(
            start,
            DeviceMapRange { start, bytes, identity: identity(), context, kind: RangeOrigin::Global },
        );
        Ok(())
    }

    /// Makes pages of a module's variables accessible for the program, filled with zeroes, or takes them away.
    pub(crate) fn let_access(&self, range: Range<u64>, may: bool) -> Result {
        let pages = self.pages.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (base, held) in pages.range(..range.end) {
            let (start, end) = (range.start.max(*base), range.end.min(base + held.bytes()));
            if start < end {
                let change = if may { Reservation::fill } else { Reservation::unmap };
                change(held, start, end - start).map_err(|error| {
                    log::error(format_args!("cannot map the pages of a variable: {error}"));
                    Error::OUT_OF_MEMORY
                })?;
            }
        }
        Ok(())
    }

    /// Forgets a module's variable.
    pub(crate) fn remove(&self, start: u64, context: u64) {
        let mut ranges = self.write();
        // It may have ended with its context, and its address may belong to another.
        if ranges
            .get(&start)
            .is_some_and(|range| range.kind == RangeOrigin::Global && range.context == context)
        {
            ranges.remove(&start);
        }
    }
}

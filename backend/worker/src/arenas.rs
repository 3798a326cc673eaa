//! Guest memory of the session: mapped at the guest's own addresses, pinned for the driver.
//!
//! The control thread maps the resources that the device names; the memory helper pins them. No descriptor outlives its
//! message.
//!
//! Pages that cannot be mapped contiguously (pieces of huge pages, or too many runs) are *gathered*: accessed through a few
//! windows, page by page. Private memory then lies at the arena's address, and the driver accesses that memory: it is filled
//! from the guest's pages before the driver copies from there, and emptied into them after the driver has copied there and
//! before the copy is reported as complete. The device accesses a gathered arena in no other way.

use core::sync::atomic::{AtomicBool, Ordering};
use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::fstat,
    io::Errno,
};
use sluice_driver::{Code, HostRange, Rows, code};
use sluice_protocol::{limits, session::Attachment, shared::Shared};
use sluice_shared_memory::{Gathered, Mapping, Run, gathered::Source, mapping::MapError};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

/// The pages of a resource in this process.
#[derive(Debug)]
pub(crate) enum Pages {
    /// Contiguous in the address space.
    InPlace(Mapping),
    /// Not contiguous.
    Gathered(Gathered),
}

impl Pages {
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Pages::InPlace(mapping) => mapping.bytes(),
            Pages::Gathered(pages) => pages.bytes(),
        }
    }

    /// The state of the attachment that the guest reads.
    pub(crate) const fn attachment(&self) -> Attachment {
        match self {
            Pages::InPlace(mapping) => Attachment::Adopted(mapping.bytes()),
            Pages::Gathered(pages) => Attachment::Gathered(pages.bytes()),
        }
    }
}

/// Reads or writes both kinds of pages in the same way.
macro_rules! either {
    ($self:ident, $words:ident => $do:expr) => {
        match $self {
            Pages::InPlace(mapping) => {
                let $words = mapping.words();
                $do
            }
            Pages::Gathered($words) => $do,
        }
    };
}

impl Shared for Pages {
    #[inline]
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        either!(self, words => words.load_u32(at, order))
    }
    #[inline]
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        either!(self, words => words.store_u32(at, value, order));
    }
    #[inline]
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        either!(self, words => words.swap_u32(at, value))
    }
    #[inline]
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        either!(self, words => words.load_u64(at, order))
    }
    #[inline]
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        either!(self, words => words.store_u64(at, value, order));
    }
    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        either!(self, words => words.read(at, into));
    }
    #[inline]
    fn write(&self, at: usize, from: &[u8]) {
        either!(self, words => words.write(at, from));
    }
    #[inline]
    fn fence(&self) {
        core::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// One attached resource.
#[derive(Debug)]
pub(crate) struct Arena {
    slot: u32,
    base: u64,
    bytes: u64,
    /// `None` only in unit tests of the address map.
    pages: Option<Pages>,
    /// Private memory at the arena's address; for gathered pages only.
    bounce: Option<Mapping>,
}

/// A resource as the control thread maps it.
#[derive(Debug)]
pub(crate) struct MappedResource {
    base: u64,
    pages: Pages,
    bounce: Option<Mapping>,
    /// The number of mappings it takes.
    runs: usize,
}

impl MappedResource {
    /// A resource whose pages are contiguous.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn in_place(mapping: Mapping) -> MappedResource {
        MappedResource { base: mapping.base(), pages: Pages::InPlace(mapping), bounce: None, runs: 1 }
    }

    /// The pages alone, for the control resource.
    pub(crate) fn into_pages(self) -> Pages {
        self.pages
    }

    pub(crate) const fn pages(&self) -> &Pages {
        &self.pages
    }

    /// The part of the session's limits that it takes.
    pub(crate) fn extent(&self) -> ResourceExtent {
        let bounce = self.bounce.as_ref().map_or(0, Mapping::bytes);
        ResourceExtent { bytes: self.pages.bytes(), runs: self.runs, bounce }
    }
}

impl Arena {
    pub(crate) fn new(slot: u32, mapped: MappedResource) -> Arena {
        let MappedResource { base, pages, bounce, runs: _ } = mapped;
        Arena { slot, base, bytes: pages.bytes(), pages: Some(pages), bounce }
    }

    #[cfg(test)]
    pub(crate) fn for_test(slot: u32, base: u64, bytes: u64) -> Arena {
        Arena { slot, base, bytes, pages: None, bounce: None }
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) const fn base(&self) -> u64 {
        self.base
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if the device accesses the guest's pages directly.
    pub(crate) const fn is_in_place(&self) -> bool {
        self.bounce.is_none()
    }

    /// The state of the attachment that the guest reads.
    pub(crate) fn attachment(&self) -> Attachment {
        self.pages.as_ref().map_or(Attachment::Detached, Pages::attachment)
    }

    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        if let Some(pages) = &self.pages {
            pages.read(at, into);
        }
    }

    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        if let Some(pages) = &self.pages {
            pages.write(at, from);
        }
    }

    /// Copies between the guest's pages and the private memory, in direction `way`.
    fn bounce(&self, way: CopyDirection, at: usize, bytes: usize) {
        let (Some(Pages::Gathered(pages)), Some(bounce)) = (&self.pages, &self.bounce) else { return };
        match way {
            CopyDirection::Fetch => pages.copy_to(at, &bounce.words(), at, bytes),
            CopyDirection::Deliver => pages.copy_from(at, &bounce.words(), at, bytes),
        }
    }
}

/// A direction of a copy between the guest's pages and the private memory that stands for them.
#[derive(Clone, Copy, Debug)]
enum CopyDirection {
    Fetch,
    Deliver,
}

/// The part of the session's limits that an attached resource takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceExtent {
    /// Bytes of guest memory.
    pub(crate) bytes: u64,
    /// Runs that are mapped one by one.
    pub(crate) runs: usize,
    /// Bytes of private memory.
    pub(crate) bounce: u64,
}

/// The slots in use and their extents (the table in the guest's page is only for the guest to read), and the gathered arenas.
#[derive(Debug, Default)]
pub(crate) struct Attached {
    slots: Mutex<HashMap<u32, ResourceExtent>>,
    /// Set with the first gathered arena, so that a session without any takes no lock.
    any: AtomicBool,
    gathered: RwLock<BTreeMap<u64, Arc<Arena>>>,
}

impl Attached {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, ResourceExtent>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sum of the extents of all slots; `None` if `slot` is in use.
    pub(crate) fn total_without(&self, slot: u32) -> Option<ResourceExtent> {
        let slots = self.lock();
        let sum = |sum: ResourceExtent, one: &ResourceExtent| ResourceExtent {
            bytes: sum.bytes.saturating_add(one.bytes),
            runs: sum.runs.saturating_add(one.runs),
            bounce: sum.bounce.saturating_add(one.bounce),
        };
        (!slots.contains_key(&slot)).then(|| slots.values().fold(ResourceExtent::default(), sum))
    }

    pub(crate) fn insert(&self, slot: u32, extent: ResourceExtent) {
        self.lock().insert(slot, extent);
    }

    pub(crate) fn remove(&self, slot: u32) {
        self.lock().remove(&slot);
    }

    /// Records an arena if its pages are gathered, before the guest may name it.
    pub(crate) fn adopted(&self, arena: &Arc<Arena>) {
        if !arena.is_in_place() {
            let mut gathered = self.gathered.write().unwrap_or_else(PoisonError::into_inner);
            gathered.insert(arena.base(), Arc::clone(arena));
            self.any.store(true, Ordering::Release);
        }
    }

    /// Drops an arena, so that nothing here keeps it mapped.
    pub(crate) fn detached(&self, arena: &Arena) {
        if !arena.is_in_place() {
            self.gathered.write().unwrap_or_else(PoisonError::into_inner).remove(&arena.base());
        }
    }

    /// Copies from the guest's pages to private memory before the driver reads a range of host memory.
    pub(crate) fn fetch(&self, from: u64, rows: Rows) {
        self.carry(CopyDirection::Fetch, from, rows);
    }

    /// Copies from private memory to the guest's pages after the driver has written a range of host memory.
    pub(crate) fn deliver(&self, to: u64, rows: Rows) {
        self.carry(CopyDirection::Deliver, to, rows);
    }

    /// True if a range touches a gathered arena.
    pub(crate) fn is_gathered(&self, address: u64, bytes: u64) -> bool {
        let mut any = false;
        self.parts(address, bytes, |_, _, _| any = true);
        any
    }

    fn carry(&self, way: CopyDirection, address: u64, rows: Rows) {
        // Ranges were checked, so nothing overflows; the bytes between rows stay as they are.
        for row in 0..rows.height {
            let at = address.wrapping_add(row.wrapping_mul(rows.pitch));
            self.parts(at, rows.width, |arena, at, bytes| arena.bounce(way, at, bytes));
        }
    }

    /// Visits the parts of a range that lie in gathered arenas.
    fn parts(&self, address: u64, bytes: u64, mut visit: impl FnMut(&Arena, usize, usize)) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let gathered = self.gathered.read().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(bytes);
        let first = gathered.range(..=address).next_back().map_or(address, |(base, _)| *base);
        for (base, arena) in gathered.range(first..end.max(first)) {
            let (from, to) = (address.max(*base), end.min(base.saturating_add(arena.bytes())));
            let at = usize::try_from(from - base);
            let part = to.checked_sub(from).filter(|part| *part > 0).map(usize::try_from);
            if let (Ok(at), Some(Ok(part))) = (at, part) {
                visit(arena, at, part);
            }
        }
    }
}

/// The reason why guest pages are refused.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Slot, address, size or number of runs is out of bounds.
    #[error("attachment {slot}: {bytes:#x} bytes in {runs} runs at {address:#x} are outside the bounds")]
    Bounds {
        /// Entry of the attach table.
        slot: u32,
        /// The address of the mapping.
        address: u64,
        /// Total bytes.
        bytes: u64,
        /// Number of runs.
        runs: u32,
    },
    /// A run lies behind the end of its region; an access there would be a SIGBUS.
    #[error("a run of {bytes:#x} bytes at {offset:#x} lies outside its region of {size:#x}")]
    Run {
        /// Offset in the region.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of the region.
        size: u64,
    },
    /// The parts of a memory file are not in order, or not inside the file.
    #[error("the parts of a memory file of {0:#x} bytes are not in order or not inside it")]
    Extents(u64),
    /// The bytes of private memory would exceed the limit.
    #[error("attachment {0} needs {1:#x} more bytes of private memory, beyond the limit of {bound:#x}", bound = limits::BOUNCE_BYTES)]
    Bounce(u32, u64),
    /// The message is not the next part of the attachment: it names another slot, or its list of runs is short.
    #[error("a message of attachment {0} is not its next part")]
    Parts(u32),
    /// A descriptor cannot be read.
    #[error("cannot read a descriptor: {0}")]
    Descriptor(#[from] Errno),
    /// The pages cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl AttachError {
    /// The code for the guest.
    pub(crate) const fn code(&self) -> Code {
        match self {
            AttachError::Bounds { .. }
            | AttachError::Run { .. }
            | AttachError::Extents(_)
            | AttachError::Parts(_)
            | AttachError::Map(MapError::Layout(_) | MapError::Outside { .. }) => code::INVALID_VALUE,
            AttachError::Map(MapError::Reserve { .. }) => code::ALREADY_MAPPED,
            // No mappings left even for windows.
            AttachError::Bounce(..) | AttachError::Descriptor(_) | AttachError::Map(_) => code::OUT_OF_MEMORY,
        }
    }
}

/// A resource as its messages come in, one per memory region.
#[derive(Debug)]
pub(crate) struct Incoming {
    slot: u32,
    address: u64,
    bytes: u64,
    runs: usize,
    parts: Vec<MessagePart>,
    /// The extent of the resources that the session has mapped already, and the number of runs that it may map one by one.
    mapped: ResourceExtent,
    most: usize,
}

/// The content of one message.
#[derive(Debug)]
struct MessagePart {
    file: OwnedFd,
    granule: u64,
    extents: Vec<Run>,
    runs: Vec<Run>,
}

/// The counts in a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) runs: u32,
    pub(crate) extents: u32,
    pub(crate) granule: u64,
}

/// Limit on memory regions of one resource; the vhost-user protocol allows fewer.
const REGIONS: usize = 512;

impl Incoming {
    /// Begins with the first message. `mapped` is the extent of the session's mapped resources, `most` the number of runs it
    /// may map one by one.
    pub(crate) fn new(
        slot: u32,
        address: u64,
        bytes: u64,
        mapped: ResourceExtent,
        most: usize,
    ) -> Result<Incoming, AttachError> {
        let bounds = limits::WINDOW_BOUNDS;
        let whole = bytes > 0 && bytes.is_multiple_of(4096) && address.is_multiple_of(4096);
        let inside = match slot {
            0 => address == 0 && bytes <= limits::RESOURCE_BYTES,
            _ => address >= bounds.start && address.checked_add(bytes).is_some_and(|end| end <= bounds.end),
        };
        let affordable = mapped.bytes.checked_add(bytes).is_some_and(|all| all <= limits::SESSION_BYTES);
        if slot < limits::ATTACHMENTS && whole && inside && affordable && bytes <= limits::RESOURCE_BYTES {
            Ok(Incoming { slot, address, bytes, runs: 0, parts: Vec::new(), mapped, most })
        } else {
            Err(AttachError::Bounds { slot, address, bytes, runs: 0 })
        }
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    /// Takes one message's list and memory file.
    pub(crate) fn push(&mut self, counts: Counts, list: &OwnedFd, file: OwnedFd) -> Result<(), AttachError> {
        let Counts { runs, extents, granule } = counts;
        let (count, before) = (runs as usize, extents as usize);
        self.runs = self.runs.saturating_add(count);
        if count == 0
            || self.runs > limits::RESOURCE_RUNS
            || before > limits::EXTENTS
            || self.parts.len() >= REGIONS
        {
            let (slot, address, bytes) = (self.slot, self.address, self.bytes);
            return Err(AttachError::Bounds { slot, address, bytes, runs });
        }
        let mut extents = read_runs(list.as_fd(), before + count)?;
        if extents.len() != before + count {
            return Err(AttachError::Parts(self.slot));
        }
        let runs = extents.split_off(before);
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        let mut end = 0;
        for extent in &extents {
            let after = extent.offset.checked_add(extent.bytes);
            match after.filter(|after| extent.offset >= end && *after <= size && extent.bytes > 0) {
                Some(after) => end = after,
                None => return Err(AttachError::Extents(size)),
            }
        }
        for run in &runs {
            if run.offset.checked_add(run.bytes).is_none_or(|end| end > size) {
                return Err(AttachError::Run { offset: run.offset, bytes: run.bytes, size });
            }
        }
        self.parts.push(MessagePart { file, granule, extents, runs });
        Ok(())
    }

    /// Maps all parts at the resource's address, or gathers them; closes the descriptors.
    pub(crate) fn map(self) -> Result<MappedResource, AttachError> {
        if self.fits() {
            let pieces = self.parts.iter().flat_map(|part| {
                let file: BorrowedFd<'_> = part.file.as_fd();
                part.runs.iter().map(move |run| (file, *run))
            });
            match Mapping::scattered(self.address, self.bytes, pieces) {
                Ok(mapping) => {
                    let (base, pages) = (mapping.base(), Pages::InPlace(mapping));
                    return Ok(MappedResource { base, pages, bounce: None, runs: self.runs });
                }
                // Mappings ran out in spite of the check: an operator may have lowered `vm.max_map_count`.
                Err(MapError::Piece { error: Errno::NOMEM, .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.gather()
    }

    /// True if every run can be mapped by itself: the runs are not too many, and none is a part of a huge page (the kernel
    /// refuses to map a part, or maps the whole page if only its end is missing).
    fn fits(&self) -> bool {
        let whole = |part: &MessagePart, value: u64| part.granule > 0 && value.is_multiple_of(part.granule);
        self.mapped.runs.saturating_add(self.runs) <= self.most
            && self.parts.iter().all(|part| {
                part.granule == 4096
                    || (self.address != 0
                        && whole(part, self.address)
                        && part.runs.iter().all(|run| whole(part, run.offset) && whole(part, run.bytes)))
            })
    }

    fn gather(self) -> Result<MappedResource, AttachError> {
        let sources: Vec<Source<'_>> = self
            .parts
            .iter()
            .map(|part| Source {
                file: part.file.as_fd(),
                extents: &part.extents,
                granule: part.granule,
                runs: &part.runs,
            })
            .collect();
        let Incoming { slot, address, bytes, mapped, .. } = self;
        // The driver never touches the control resource, so it needs no private memory.
        let bounce = match slot {
            0 => None,
            _ if mapped.bounce.saturating_add(bytes) > limits::BOUNCE_BYTES => {
                return Err(AttachError::Bounce(slot, bytes));
            }
            _ => Some(Mapping::private(address, bytes)?),
        };
        let pages = Gathered::map(bytes, &sources, limits::WINDOWS_PER_RESOURCE)?;
        tracing::info!(
            slot,
            bytes,
            runs = self.runs,
            windows = pages.mapped(),
            "guest memory is not contiguous and is accessed through windows"
        );
        Ok(MappedResource { base: address, pages: Pages::Gathered(pages), bounce, runs: 0 })
    }
}

fn read_runs(list: BorrowedFd<'_>, count: usize) -> Result<Vec<Run>, AttachError> {
    let mut bytes = vec![0; count * Run::BYTES];
    let mut done = 0;
    while done < bytes.len() {
        let got = rustix::io::pread(list, &mut bytes[done..], done as u64)?;
        if got == 0 {
            break;
        }
        done += got;
    }
    Ok(Run::list(&bytes[..done]).collect())
}

/// Arena memory that stays mapped while this lives.
#[derive(Clone, Debug)]
pub(crate) struct HeldRange {
    host: HostRange,
    arenas: Vec<Arc<Arena>>,
}

impl HeldRange {
    /// A range that lies in these arenas, which come in the order of their addresses.
    pub(crate) const fn new(host: HostRange, arenas: Vec<Arc<Arena>>) -> HeldRange {
        HeldRange { host, arenas }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.host.bytes()
    }

    /// Copies the first bytes out, once; the guest may write meanwhile.
    pub(crate) fn read(&self, into: &mut [u8]) {
        let mut done = 0;
        self.pieces(into.len(), |arena, offset, bytes| {
            arena.read(offset, &mut into[done..done + bytes]);
            done += bytes;
        });
    }

    /// Copies bytes to the start of the range, as many as fit.
    pub(crate) fn write(&self, from: &[u8]) {
        let mut done = 0;
        self.pieces(from.len(), |arena, offset, bytes| {
            arena.write(offset, &from[done..done + bytes]);
            done += bytes;
        });
    }

    /// Visits the parts of the first `bytes` bytes, arena by arena.
    fn pieces(&self, bytes: usize, mut visit: impl FnMut(&Arena, usize, usize)) {
        let mut at = self.host.address();
        let mut left = (bytes as u64).min(self.host.bytes());
        for arena in &self.arenas {
            let offset = at - arena.base();
            let part = left.min(arena.bytes() - offset);
            let (Ok(offset), Ok(length)) = (usize::try_from(offset), usize::try_from(part)) else { return };
            visit(arena, offset, length);
            (at, left) = (at + part, left - part);
        }
    }
}

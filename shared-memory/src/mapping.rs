//! Mappings of shared pages, and reservations of addresses for them.

#![expect(unsafe_code, reason = "mmap, and access through raw pointers to memory that other processes write")]

use crate::run::Run;
use core::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    time::Duration,
};
use rustix::{
    event::Timespec,
    fd::BorrowedFd,
    io::Errno,
    mm::{self, MapFlags, ProtFlags},
    thread::futex,
};
use sluice_protocol::shared::Shared;

/// The reason why pages cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The addresses are taken or not allowed.
    #[error("cannot reserve addresses {base:#x} + {bytes:#x}: {error}")]
    Reserve {
        /// The requested first address; 0 for any.
        base: u64,
        /// The requested length in bytes.
        bytes: u64,
        /// The kernel's error.
        error: Errno,
    },
    /// One piece could not be mapped into the reservation. ENOMEM: `vm.max_map_count` is reached; EINVAL: a piece of a huge
    /// page.
    #[error("cannot map a piece of {bytes:#x} bytes at offset {offset:#x}: {error}")]
    Piece {
        /// Offset in the region's file.
        offset: u64,
        /// Length of the piece in bytes.
        bytes: u64,
        /// The kernel's error.
        error: Errno,
    },
    /// A piece lies outside the parts of its file that may be mapped.
    #[error("a piece of {bytes:#x} bytes at offset {offset:#x} is outside the parts that may be mapped")]
    Outside {
        /// Offset in the region's file.
        offset: u64,
        /// Length of the piece in bytes.
        bytes: u64,
    },
    /// The pieces lie in too many parts of their files.
    #[error("the pieces lie in more than {0} parts of memory")]
    Windows(usize),
    /// The pieces do not add up to the length, or are not whole pages.
    #[error("the pieces do not add up to {0:#x} bytes of whole pages")]
    Layout(u64),
}

/// Addresses kept free of other mappings: `PROT_NONE` until pages are mapped over parts of them. Dropping it unmaps the
/// whole range, with all mappings in it.
#[derive(Debug)]
pub struct Reservation {
    base: usize,
    bytes: usize,
}

impl Reservation {
    /// Reserves `bytes` at exactly `base`, without replacing a mapping, or at any address for `base` 0.
    ///
    /// # Errors
    /// [`MapError::Reserve`] if the range is taken (EEXIST) or refused.
    pub fn new(base: u64, bytes: u64) -> Result<Reservation, MapError> {
        let error = |error| MapError::Reserve { base, bytes, error };
        let address = usize::try_from(base).map_err(|_| error(Errno::INVAL))?;
        let length = usize::try_from(bytes).map_err(|_| error(Errno::INVAL))?;
        let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        if address != 0 {
            flags |= MapFlags::FIXED_NOREPLACE;
        }
        // SAFETY: an anonymous mapping that replaces nothing: either FIXED_NOREPLACE or at the kernel's choice.
        let got = unsafe {
            mm::mmap_anonymous(core::ptr::without_provenance_mut(address), length, ProtFlags::empty(), flags)
        }
        .map_err(error)?;
        let reservation = Reservation { base: got.expose_provenance(), bytes: length };
        // Kernels before 4.17 treat FIXED_NOREPLACE as a hint.
        if address != 0 && got.addr() != address {
            return Err(error(Errno::EXIST));
        }
        reservation.keep(reservation.base, length).map_err(error)?;
        Ok(reservation)
    }

    /// Reserves `bytes` from the next multiple of `align`, outside the windows of sessions.
    ///
    /// # Errors
    /// [`MapError::Reserve`] if there is no such range.
    pub fn apart(bytes: u64, align: u64) -> Result<Reservation, MapError> {
        const TEBIBYTE: u64 = 1 << 40;
        let refused = |error| MapError::Reserve { base: 0, bytes, error };
        let bytes = bytes.checked_add(align).ok_or(refused(Errno::NOMEM))?;
        // The kernel places mappings downwards from the stack, so large ones would be inside the windows.
        let bounds = sluice_protocol::limits::WINDOW_BOUNDS;
        let mut last = refused(Errno::NOMEM);
        for base in (16 * TEBIBYTE..bounds.start).step_by(4 << 40) {
            if base.checked_add(bytes).is_none_or(|end| end > bounds.start) {
                break;
            }
            match Reservation::new(base, bytes) {
                Ok(reservation) => return Ok(reservation),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Address of the first byte.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.base as u64
    }

    /// Length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Maps `bytes` of `file` from `offset` into the reservation at `at`, readable and writable, replacing earlier mappings.
    ///
    /// # Errors
    /// [`MapError`] if the range is not inside the reservation or the kernel refuses.
    pub fn map(&self, at: u64, file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), MapError> {
        let (address, length) = self.place(at, file, offset, bytes)?;
        self.keep(address, length).map_err(|error| MapError::Piece { offset, bytes, error })
    }

    /// Maps as [`Self::map`] does, for the caller to keep from children. Returns the address and length.
    fn place(
        &self,
        at: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
    ) -> Result<(usize, usize), MapError> {
        let (address, length) = self.part(at, bytes).ok_or(MapError::Layout(bytes))?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let pointer = core::ptr::without_provenance_mut(address);
        // SAFETY: the range lies inside this reservation, so no mapping of other code is replaced.
        unsafe { mm::mmap(pointer, length, ProtFlags::READ | ProtFlags::WRITE, flags, file, offset) }
            .map_err(|error| MapError::Piece { offset, bytes, error })?;
        Ok((address, length))
    }

    /// Keeps a part, which lies inside, from children: they must not see, or keep alive, memory that is shared with the host.
    fn keep(&self, address: usize, length: usize) -> Result<(), Errno> {
        debug_assert!(address - self.base + length <= self.bytes, "the part lies inside");
        let pointer = core::ptr::without_provenance_mut(address);
        // SAFETY: advice about mappings of this reservation; it touches no memory.
        unsafe { mm::madvise(pointer, length, mm::Advice::LinuxDontFork) }
    }

    /// Maps private memory of zeroes into the reservation at `at`, readable and writable, replacing earlier mappings. Untouched
    /// pages take no memory.
    ///
    /// # Errors
    /// [`MapError`] if the range is not inside the reservation or the kernel refuses.
    pub fn fill(&self, at: u64, bytes: u64) -> Result<(), MapError> {
        self.lay(at, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Returns a part to `PROT_NONE`.
    ///
    /// # Errors
    /// [`MapError`] if the range is not inside the reservation or the kernel refuses.
    pub fn unmap(&self, at: u64, bytes: u64) -> Result<(), MapError> {
        self.lay(at, bytes, ProtFlags::empty())
    }

    fn lay(&self, at: u64, bytes: u64, access: ProtFlags) -> Result<(), MapError> {
        let (address, length) = self.part(at, bytes).ok_or(MapError::Layout(bytes))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let pointer = core::ptr::without_provenance_mut(address);
        let error = |error| MapError::Reserve { base: at, bytes, error };
        // SAFETY: the range lies inside this reservation; the caller ensures that its mappings are not used any more.
        unsafe { mm::mmap_anonymous(pointer, length, access, flags) }.map_err(error)?;
        self.keep(address, length).map_err(error)
    }

    /// Access to `bytes` at `address`, inside the reservation and mapped; elsewhere an access is a fault.
    pub(crate) fn words(&self, address: usize, bytes: usize) -> Words {
        let inside = address.checked_sub(self.base).and_then(|at| at.checked_add(bytes));
        assert!(inside.is_some_and(|end| end <= self.bytes), "{address:#x} is not in this reservation");
        Words { base: address, bytes }
    }

    /// The address and length of a part, if it lies inside.
    fn part(&self, at: u64, bytes: u64) -> Option<(usize, usize)> {
        let (address, length) = (usize::try_from(at).ok()?, usize::try_from(bytes).ok()?);
        let inside = address.checked_sub(self.base)?.checked_add(length)? <= self.bytes;
        (inside && length > 0).then_some((address, length))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone; users of mappings in it hold this reservation.
        let unmapped = unsafe { mm::munmap(core::ptr::without_provenance_mut(self.base), self.bytes) };
        debug_assert!(unmapped.is_ok(), "the range was mapped by us");
    }
}

/// Shared pages, contiguous in this process regardless of their places in files.
#[derive(Debug)]
pub struct Mapping {
    reservation: Reservation,
}

impl Mapping {
    /// Maps pieces of files one behind the other, at exactly `base` or at any address for 0. The caller has checked the runs
    /// against the files' sizes: an access behind the end of a file is a SIGBUS. A child that the process makes before this returns
    /// may inherit the pages.
    ///
    /// # Errors
    /// [`MapError`] if addresses are taken, pieces are not whole pages, or the kernel refuses.
    pub fn scattered<'f>(
        base: u64,
        bytes: u64,
        pieces: impl IntoIterator<Item = (BorrowedFd<'f>, Run)>,
    ) -> Result<Mapping, MapError> {
        let reservation = Reservation::new(base, bytes)?;
        let mut at = reservation.base();
        let end = reservation.base() + reservation.bytes();
        for (file, run) in pieces {
            let whole = run.bytes > 0 && run.bytes.is_multiple_of(4096) && run.offset.is_multiple_of(4096);
            if !whole || run.bytes > end - at {
                return Err(MapError::Layout(bytes));
            }
            reservation.place(at, file, run.offset, run.bytes)?;
            at += run.bytes;
        }
        if at != end {
            return Err(MapError::Layout(bytes));
        }
        // All pieces at once: a call for each would double the time for a guest with scattered pages.
        let kept = reservation.keep(reservation.base, reservation.bytes);
        kept.map_err(|error| MapError::Piece { offset: 0, bytes, error })?;
        Ok(Mapping { reservation })
    }

    /// Maps private memory of zeroes, at exactly `base` or at any address for 0. Untouched pages take no memory.
    ///
    /// # Errors
    /// [`MapError`] if addresses are taken or the kernel refuses.
    pub fn private(base: u64, bytes: u64) -> Result<Mapping, MapError> {
        let reservation = Reservation::new(base, bytes)?;
        reservation.fill(reservation.base(), reservation.bytes())?;
        Ok(Mapping { reservation })
    }

    /// Maps the first `bytes` of a file that another process writes, read-only: a write is a fault. The caller has
    /// checked the file's size.
    ///
    /// # Errors
    /// [`MapError`] if the kernel refuses.
    pub fn read_only(file: BorrowedFd<'_>, bytes: u64) -> Result<Mapping, MapError> {
        let reservation = Reservation::new(0, bytes)?;
        let error = |error| MapError::Piece { offset: 0, bytes, error };
        let (pointer, length) = (core::ptr::without_provenance_mut(reservation.base), reservation.bytes);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: exactly the new reservation is replaced.
        unsafe { mm::mmap(pointer, length, ProtFlags::READ, flags, file, 0) }.map_err(error)?;
        Ok(Mapping { reservation })
    }

    /// Address of the first byte.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.reservation.base()
    }

    /// Length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.reservation.bytes()
    }

    /// Access to the words and bytes of the mapping.
    #[must_use]
    pub fn words(&self) -> Words {
        Words { base: self.reservation.base, bytes: self.reservation.bytes }
    }
}

/// Access to a mapping without owning it. The caller of [`Words::new`] keeps the mapping alive.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    base: usize,
    bytes: usize,
}

impl Words {
    /// Gives access to `bytes` at `base`.
    ///
    /// # Safety
    /// The range is mapped readable and writable for as long as the value or a copy of it is used, `base` is aligned to 8,
    /// and no Rust reference to non-atomic bytes of it exists.
    #[must_use]
    pub const unsafe fn new(base: usize, bytes: usize) -> Words {
        Words { base, bytes }
    }

    /// Copies bytes to another mapping.
    pub fn copy_to(&self, at: usize, other: &Words, other_at: usize, bytes: usize) {
        let from: *const u8 = self.pointer(at, bytes);
        let into: *mut u8 = other.pointer(other_at, bytes);
        // SAFETY: both ranges are valid for their length. They may be the same pages, which a guest can cause; other
        // processes may write meanwhile, and the bytes are then any mixture.
        unsafe { core::ptr::copy(from, into, bytes) }
    }

    /// Sleeps while the 32-bit word at `at` has this value, until a thread wakes its sleepers, or for this time. May
    /// return early.
    pub fn sleep_while(&self, at: usize, value: u32, limit: Duration) {
        let Ok(limit) = Timespec::try_from(limit) else { return };
        // The result does not matter, because the caller looks again. AGAIN: the word has changed; TIMEDOUT, INTR: as documented.
        let _ = futex::wait(self.word32(at), futex::Flags::empty(), value, Some(&limit));
    }

    /// Wakes at most so many threads, in any process, that sleep for the 32-bit word at `at`.
    pub fn wake(&self, at: usize, most: u32) {
        // It fails only if there is no such word.
        let _ = futex::wake(self.word32(at), futex::Flags::empty(), most);
    }

    #[inline]
    fn pointer<T>(&self, at: usize, bytes: usize) -> *mut T {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if !inside || !at.is_multiple_of(align_of::<T>()) {
            self.outside(at, bytes);
        }
        core::ptr::with_exposed_provenance_mut(self.base.wrapping_add(at))
    }

    /// Panics, and returns no error: offsets are constants of the protocol or masked to the ring.
    #[cold]
    fn outside(&self, at: usize, bytes: usize) -> ! {
        panic!("offset {at:#x} + {bytes:#x} outside a mapping of {:#x}", self.bytes)
    }

    #[inline]
    fn word32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: in range and aligned (checked above), mapped (contract), and an atomic may be shared with other
        // processes.
        unsafe { AtomicU32::from_ptr(self.pointer(at, 4)) }
    }

    #[inline]
    fn word64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as for `word32`.
        unsafe { AtomicU64::from_ptr(self.pointer(at, 8)) }
    }
}

// Inlined, because a call makes some twenty accesses, and calling the function takes more instructions than the access.
impl Shared for Words {
    #[inline]
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.word32(at).load(order)
    }
    #[inline]
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.word32(at).store(value, order);
    }
    #[inline]
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        self.word32(at).swap(value, Ordering::SeqCst)
    }
    #[inline]
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.word64(at).load(order)
    }
    #[inline]
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.word64(at).store(value, order);
    }
    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        let from: *const u8 = self.pointer(at, into.len());
        // SAFETY: both ranges are valid for their length and cannot overlap (`into` is private). The other party may write
        // meanwhile; the bytes are then any mixture, which decoding expects.
        unsafe { core::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }
    #[inline]
    fn write(&self, at: usize, from: &[u8]) {
        let into: *mut u8 = self.pointer(at, from.len());
        // SAFETY: as for `read`.
        unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }
    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

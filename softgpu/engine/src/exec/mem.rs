//! Device memory through raw pointers: every address passes the range cache first. In one file, so that a review of this unsafe
//! code reads one.
//!
//! Lanes of other threads, and other processes, may write the same bytes at the same time; that is the memory model of
//! the device. Accesses that promise atomicity use host atomics, the others are plain copies of at most their width.

#![expect(unsafe_code, reason = "device addresses are host addresses that the mapping table lists")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one check of an address covers accesses of every width"
)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::atomic::AtomicOp;
use super::lanes::each;
use super::{Fail, PARAM_WINDOW};
use crate::api::{FaultKind, LOCAL_WINDOW, Memory, SHARED_WINDOW};
use crate::code_pages::RunScratch;
use crate::ir::{Inst, flag};
use crate::ptx::Space;
use crate::regs::Frame;

/// The last ranges found for reading and for writing. Ranges stay valid until the launch ends.
#[derive(Default)]
pub(crate) struct Ranges {
    read: (u64, u64),
    write: (u64, u64),
    /// The textures and surfaces found, which are ranges of their own.
    pub(crate) images: super::found::FoundImages,
    /// The ranges of machine code, and its memory.
    pub(crate) scratch: Box<RunScratch>,
}

impl Ranges {
    /// True if `len` bytes at `addr` may be accessed.
    #[inline(always)]
    pub(crate) fn check(&mut self, memory: &dyn Memory, addr: u64, len: u64, write: bool) -> bool {
        let (lo, hi) = if write { self.write } else { self.read };
        (addr >= lo && addr < hi && hi - addr >= len) || self.miss(memory, addr, len, write)
    }

    #[cold]
    #[inline(never)]
    fn miss(&mut self, memory: &dyn Memory, addr: u64, len: u64, write: bool) -> bool {
        let Some(end) = addr.checked_add(len) else { return false };
        let mut at = addr;
        // `Memory` may list adjacent ranges separately.
        while at < end {
            match memory.range(at, write) {
                Some(r) if r.contains(&at) => {
                    let cache = if write { &mut self.write } else { &mut self.read };
                    *cache = (r.start, r.end);
                    at = r.end;
                }
                _ => return false,
            }
        }
        true
    }
}

/// The memory spaces of a running warp.
pub(crate) struct Spaces<'a> {
    pub(crate) memory: &'a dyn Memory,
    pub(crate) params: &'a [u8],
    pub(crate) shared: *mut u8,
    pub(crate) shared_len: u64,
    pub(crate) local: *mut u8,
    pub(crate) local_stride: u64,
}

/// A block of bytes into which pointers may be kept: owned by the engine, or lent by the device for a launch.
pub(crate) struct Bytes {
    own: Vec<u64>,
    /// First word and number of words of the lent memory.
    lent: Option<(NonNull<u64>, usize)>,
}

// SAFETY: lent memory has no other user, like the vector.
unsafe impl Send for Bytes {}

/// Words for `len` bytes of a block: accesses may look slightly past the end.
fn words_of(len: usize) -> usize {
    len.div_ceil(8) + 2
}

impl Bytes {
    /// Grows to at least `len` bytes and keeps the old contents.
    pub(crate) fn resize(&mut self, len: usize) {
        let words = words_of(len);
        if self.lent.is_some_and(|(_, lent)| lent >= words) {
            return;
        }
        if self.own.len() < words {
            self.own.resize(words, 0);
        }
        if let Some((start, lent)) = self.lent.take() {
            // SAFETY: the lent memory has `lent` words and is no part of the vector, which has room for more.
            unsafe { self.own.as_mut_ptr().copy_from_nonoverlapping(start.as_ptr(), lent) };
        }
    }

    pub(crate) const fn new() -> Bytes {
        Bytes { own: Vec::new(), lent: None }
    }

    /// Bytes that the device must lend for a block of `len` bytes.
    pub(crate) fn loan(len: usize) -> u64 {
        (words_of(len) as u64 * 8).next_multiple_of(256)
    }

    /// Uses memory of the device for `len` bytes, from now until [`Bytes::unlend`]. Until then the device guarantees
    /// [`Bytes::loan`] bytes at the address.
    pub(crate) fn lend(&mut self, address: u64, len: usize) {
        let start = core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        self.lent = NonNull::new(start).map(|start| (start, words_of(len)));
    }

    /// Uses the engine's own memory again.
    pub(crate) fn unlend(&mut self) {
        self.lent = None;
    }

    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.lent.map_or(self.own.as_mut_ptr(), |(start, _)| start.as_ptr()).cast()
    }

    /// Makes rows of `old` bytes rows of `new` bytes.
    pub(crate) fn restride(&mut self, rows: usize, old: usize, new: usize) {
        self.resize(rows * new);
        if old == 0 || !old.is_multiple_of(8) || !new.is_multiple_of(8) {
            return;
        }
        let start = self.pointer();
        for row in (1..rows).rev() {
            // SAFETY: `resize` has made room for all the rows; they may overlap.
            unsafe { start.wrapping_add(row * old).copy_to(start.wrapping_add(row * new), old) };
        }
    }
}

/// The memory that an address refers to.
enum AddressedMemory {
    Host(*mut u8),
    Local(u64),
    Shared(u64),
    Param(u64),
}

impl Spaces<'_> {
    /// Finds and checks the place of an access by one lane.
    #[inline(always)]
    fn place(
        &self,
        ranges: &mut Ranges,
        space: Space,
        addr: u64,
        len: u64,
        write: bool,
        lane: usize,
    ) -> Result<AddressedMemory, Fail> {
        match space {
            Space::Global | Space::Const => {
                if ranges.check(self.memory, addr, len, write) {
                    Ok(AddressedMemory::Host(host(addr)))
                } else {
                    Err(Fail::new(FaultKind::IllegalAddress, lane, addr))
                }
            }
            Space::Generic => {
                if ranges.check(self.memory, addr, len, write) {
                    Ok(AddressedMemory::Host(host(addr)))
                } else if SHARED_WINDOW.contains(&addr) {
                    Ok(AddressedMemory::Shared(addr - SHARED_WINDOW.start))
                } else if LOCAL_WINDOW.contains(&addr) && addr < PARAM_WINDOW {
                    Ok(AddressedMemory::Local(addr - LOCAL_WINDOW.start))
                } else if LOCAL_WINDOW.contains(&addr) && !write {
                    Ok(AddressedMemory::Param(addr - PARAM_WINDOW))
                } else {
                    Err(Fail::new(FaultKind::IllegalAddress, lane, addr))
                }
            }
            Space::Shared => Ok(AddressedMemory::Shared(addr)),
            Space::Local => Ok(AddressedMemory::Local(addr)),
            Space::Param => Ok(AddressedMemory::Param(addr)),
        }
    }

    /// A pointer to `len` bytes for one lane.
    #[inline(always)]
    pub(crate) fn pointer(
        &self,
        ranges: &mut Ranges,
        space: Space,
        addr: u64,
        len: u64,
        write: bool,
        lane: usize,
    ) -> Result<*mut u8, Fail> {
        let bound = |offset: u64, size: u64| offset < size && size - offset >= len;
        match self.place(ranges, space, addr, len, write, lane)? {
            AddressedMemory::Host(p) => Ok(p),
            AddressedMemory::Shared(at) if bound(at, self.shared_len) => Ok(offset(self.shared, at)),
            AddressedMemory::Local(at) if bound(at, self.local_stride) => {
                Ok(offset(self.local, lane as u64 * self.local_stride + at))
            }
            AddressedMemory::Param(at) if !write && bound(at, self.params.len() as u64) => {
                Ok(offset(self.params.as_ptr().cast_mut(), at))
            }
            _ => Err(Fail::new(FaultKind::LaunchFailed, lane, addr)),
        }
    }
}

pub(super) fn host(addr: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0))
}

#[inline(always)]
fn offset(base: *mut u8, at: u64) -> *mut u8 {
    base.wrapping_add(usize::try_from(at).unwrap_or(usize::MAX))
}

/// Reads 1, 2, 4 or 8 bytes.
#[inline(always)]
pub(super) fn read(p: *const u8, size: u32, atomic: bool) -> u64 {
    // SAFETY: the caller checked `size` bytes at `p` and their alignment; concurrent writers are the device's memory model.
    unsafe {
        if atomic {
            return match size {
                1 => u64::from(AtomicU8::from_ptr(p.cast_mut()).load(Ordering::SeqCst)),
                2 => u64::from(AtomicU16::from_ptr(p.cast_mut().cast()).load(Ordering::SeqCst)),
                4 => u64::from(AtomicU32::from_ptr(p.cast_mut().cast()).load(Ordering::SeqCst)),
                _ => AtomicU64::from_ptr(p.cast_mut().cast()).load(Ordering::SeqCst),
            };
        }
        match size {
            1 => u64::from(p.read_volatile()),
            2 => u64::from(p.cast::<u16>().read_volatile()),
            4 => u64::from(p.cast::<u32>().read_volatile()),
            _ => p.cast::<u64>().read_volatile(),
        }
    }
}

/// Writes 1, 2, 4 or 8 bytes.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "only the low bytes are stored")]
pub(super) fn write(p: *mut u8, size: u32, value: u64, atomic: bool) {
    // SAFETY: as in `read`, and the caller checked the right to write.
    unsafe {
        if atomic {
            match size {
                1 => AtomicU8::from_ptr(p).store(value as u8, Ordering::SeqCst),
                2 => AtomicU16::from_ptr(p.cast()).store(value as u16, Ordering::SeqCst),
                4 => AtomicU32::from_ptr(p.cast()).store(value as u32, Ordering::SeqCst),
                _ => AtomicU64::from_ptr(p.cast()).store(value, Ordering::SeqCst),
            }
            return;
        }
        match size {
            1 => p.write_volatile(value as u8),
            2 => p.cast::<u16>().write_volatile(value as u16),
            4 => p.cast::<u32>().write_volatile(value as u32),
            _ => p.cast::<u64>().write_volatile(value),
        }
    }
}

#[inline(always)]
pub(super) fn address(frame: &Frame, i: &Inst, lane: usize) -> u64 {
    if i.has(flag::ADDR32) {
        // 32-bit addresses of shared and local memory wrap at 32 bits.
        u64::from(frame.get::<u32>(i.a, lane)).wrapping_add_signed(i.imm) & 0xffff_ffff
    } else {
        frame.get::<u64>(i.a, lane).wrapping_add_signed(i.imm)
    }
}

/// The first address when the lanes access consecutive elements.
#[inline(always)]
fn consecutive(frame: &Frame, i: &Inst, size: u64) -> Option<u64> {
    let first = frame.get::<u64>(i.a, 0);
    let mut wrong = [0u64; 8];
    for at in [0usize, 8, 16, 24] {
        let a: [u64; 8] = frame.load8(i.a, at);
        for n in 0..8 {
            wrong[n] |= a[n] ^ first.wrapping_add(((at + n) as u64).wrapping_mul(size));
        }
    }
    (wrong.iter().fold(0, |x, y| x | y) == 0).then(|| first.wrapping_add_signed(i.imm))
}

/// Eight offsets into shared memory.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "32-bit addresses wrap")]
fn shared_offsets(frame: &Frame, i: &Inst, first: usize) -> [u32; 8] {
    let mut a: [u32; 8] = frame.load8(i.a, first);
    for offset in &mut a {
        *offset = offset.wrapping_add(i.imm as u32);
    }
    a
}

/// True if all words that a full warp accesses in shared memory are in range and aligned.
#[inline(always)]
fn shared_words(frame: &Frame, i: &Inst, spaces: &Spaces<'_>) -> bool {
    let (mut top, mut low) = ([0u32; 8], [0u32; 8]);
    for first in [0usize, 8, 16, 24] {
        let offsets = shared_offsets(frame, i, first);
        for n in 0..8 {
            top[n] = top[n].max(offsets[n]);
            low[n] |= offsets[n];
        }
    }
    let top = top.iter().fold(0, |x: u32, &y| x.max(y));
    let low = low.iter().fold(0, |x, y| x | y);
    low & 3 == 0 && u64::from(top) + 4 <= spaces.shared_len
}

/// Eight words of shared memory. Tiles are mostly read as runs or from one address; a gather does not speed these up.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn gather_avx2(base: *const u8, offsets: [u32; 8]) -> [u32; 8] {
    use core::arch::x86_64::{
        __m256i, _mm256_add_epi32, _mm256_cmpeq_epi32, _mm256_i32gather_epi32, _mm256_loadu_si256,
        _mm256_movemask_epi8, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_storeu_si256,
    };
    let mut out = [0u32; 8];
    // SAFETY: both arrays have the 32 bytes of a vector. Every offset plus 4 is inside the block, which is below 2 GiB
    // (`shared_words`); hence all words between the first and the last offset of a run are inside too.
    unsafe {
        let index = _mm256_loadu_si256(offsets.as_ptr().cast::<__m256i>());
        let first = _mm256_set1_epi32(offsets[0].cast_signed());
        let run = _mm256_add_epi32(first, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        let value = if _mm256_movemask_epi8(_mm256_cmpeq_epi32(index, run)) == -1 {
            _mm256_loadu_si256(base.add(offsets[0] as usize).cast::<__m256i>())
        } else if _mm256_movemask_epi8(_mm256_cmpeq_epi32(index, first)) == -1 {
            _mm256_set1_epi32(base.add(offsets[0] as usize).cast::<i32>().read())
        } else {
            _mm256_i32gather_epi32::<1>(base.cast(), index)
        };
        _mm256_storeu_si256(out.as_mut_ptr().cast::<__m256i>(), value);
    }
    out
}

#[inline(always)]
fn gather<const FAST: bool>(base: *const u8, offsets: [u32; 8]) -> [u32; 8] {
    #[cfg(target_arch = "x86_64")]
    if FAST {
        // SAFETY: FAST is only instantiated after the feature check of the dispatch.
        return unsafe { gather_avx2(base, offsets) };
    }
    let mut out = [0u32; 8];
    for n in 0..8 {
        // SAFETY: every offset plus 4 is inside the block (`shared_words`).
        out[n] = unsafe { base.add(offsets[n] as usize).cast::<u32>().read() };
    }
    out
}

#[inline(always)]
pub(super) fn misaligned(addr: u64, size: u64) -> bool {
    addr & (size - 1) != 0
}

/// `ld` in every space.
#[inline(always)]
pub(crate) fn load<const FAST: bool>(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = i.ty.bytes();
    let wide = i.has(flag::WIDE_D);
    let atomic = i.has(flag::ATOMIC);
    if mask == !0 && i.n == 1 && !atomic && ((size == 4 && !wide) || (size == 8 && wide)) {
        if !matches!(i.space, Space::Shared | Space::Local | Space::Param) && !i.has(flag::ADDR32) {
            if let Some(first) = consecutive(frame, i, u64::from(size))
                && !misaligned(first, u64::from(size))
                && ranges.check(spaces.memory, first, u64::from(size) * 32, false)
            {
                // SAFETY: the whole run was checked; the slot has 32 lanes of this width.
                unsafe {
                    if wide {
                        frame.store(i.d, &host(first).cast::<[u64; 32]>().read_unaligned());
                    } else {
                        frame.store(i.d, &host(first).cast::<[u32; 32]>().read_unaligned());
                    }
                }
                return Ok(());
            }
            if !wide && i.space == Space::Global && load_eights(spaces, ranges, frame, i) {
                return Ok(());
            }
        } else if i.space == Space::Shared
            && size == 4
            && i.has(flag::ADDR32)
            && shared_words(frame, i, spaces)
        {
            for first in [0usize, 8, 16, 24] {
                frame.store8(i.d, first, gather::<FAST>(spaces.shared, shared_offsets(frame, i, first)));
            }
            return Ok(());
        }
    }
    load_lanes(spaces, ranges, frame, i, extra, mask)
}

/// Loads 32 bits per lane, in groups of eight lanes with consecutive or equal addresses. Returns false, without an effect, if a
/// group has others.
#[inline(never)]
fn load_eights(spaces: &Spaces<'_>, ranges: &mut Ranges, frame: &Frame, i: &Inst) -> bool {
    let mut out = [0u32; 32];
    for (group, to) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let a: [u64; 8] = frame.load8(i.a, group * 8);
        let first = a[0].wrapping_add_signed(i.imm);
        let step = a[1].wrapping_sub(a[0]);
        let regular =
            (0u64..8).zip(a).fold(0, |wrong, (n, x)| wrong | (x ^ a[0].wrapping_add(n.wrapping_mul(step))))
                == 0;
        if !regular
            || (step != 0 && step != 4)
            || misaligned(first, 4)
            || !ranges.check(spaces.memory, first, 4 + 7 * step, false)
        {
            return false;
        }
        *to = if step == 4 {
            // SAFETY: the 32 bytes of the group were checked.
            unsafe { host(first).cast::<[u32; 8]>().read_unaligned() }
        } else {
            // SAFETY: the four bytes were checked, and are aligned.
            [unsafe { host(first).cast::<u32>().read_volatile() }; 8]
        };
    }
    frame.store(i.d, &out);
    true
}

#[inline(never)]
fn load_lanes(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = i.ty.bytes();
    let wide = i.has(flag::WIDE_D);
    let atomic = i.has(flag::ATOMIC);
    let total = u64::from(size) * u64::from(i.n);
    let sign = if i.ty.signed() && size < 8 { 64 - size * 8 } else { 0 };
    // Computes all addresses first: a destination may be the address register.
    let mut addresses = [0u64; 32];
    each(mask, |lane| addresses[lane] = address(frame, i, lane));
    let slots = extra.get(i.e as usize..i.e as usize + usize::from(i.n)).unwrap_or(&[]);
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        let addr = addresses[lane];
        if misaligned(addr, total.next_power_of_two()) {
            return Err(Fail::new(FaultKind::Misaligned, lane, addr));
        }
        let p = spaces.pointer(ranges, i.space, addr, total, false, lane)?;
        for (n, &slot) in slots.iter().enumerate() {
            let v = read(p.wrapping_add(n * size as usize), size, atomic);
            let v = ((v << sign).cast_signed() >> sign).cast_unsigned();
            frame.set_bits(slot, lane, wide, v);
        }
    }
    Ok(())
}

/// `st` in every space.
#[inline(always)]
pub(crate) fn store(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = i.ty.bytes();
    let wide = i.has(flag::WIDE_B);
    let atomic = i.has(flag::ATOMIC);
    if mask == !0 && i.n == 1 && !atomic && ((size == 4 && !wide) || (size == 8 && wide)) {
        if !matches!(i.space, Space::Shared | Space::Local) && !i.has(flag::ADDR32) {
            if let Some(first) = consecutive(frame, i, u64::from(size))
                && !misaligned(first, u64::from(size))
                && ranges.check(spaces.memory, first, u64::from(size) * 32, true)
            {
                // SAFETY: the whole run was checked for writing; the slot has 32 lanes of this width.
                unsafe {
                    if wide {
                        host(first).cast::<[u64; 32]>().write_unaligned(frame.load(i.b));
                    } else {
                        host(first).cast::<[u32; 32]>().write_unaligned(frame.load(i.b));
                    }
                }
                return Ok(());
            }
        } else if i.space == Space::Shared
            && size == 4
            && i.has(flag::ADDR32)
            && shared_words(frame, i, spaces)
        {
            for first in [0usize, 8, 16, 24] {
                let offsets = shared_offsets(frame, i, first);
                let values: [u32; 8] = frame.load8(i.b, first);
                for n in 0..8 {
                    // SAFETY: every offset plus 4 is inside the block (`shared_words`).
                    unsafe { spaces.shared.add(offsets[n] as usize).cast::<u32>().write(values[n]) };
                }
            }
            return Ok(());
        }
    }
    store_lanes(spaces, ranges, frame, i, extra, mask)
}

#[inline(never)]
fn store_lanes(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = i.ty.bytes();
    let wide = i.has(flag::WIDE_B);
    let atomic = i.has(flag::ATOMIC);
    let total = u64::from(size) * u64::from(i.n);
    let slots = extra.get(i.e as usize..i.e as usize + usize::from(i.n)).unwrap_or(&[]);
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        let addr = address(frame, i, lane);
        if misaligned(addr, total.next_power_of_two()) {
            return Err(Fail::new(FaultKind::Misaligned, lane, addr));
        }
        let p = spaces.pointer(ranges, i.space, addr, total, true, lane)?;
        for (n, &slot) in slots.iter().enumerate() {
            write(p.wrapping_add(n * size as usize), size, frame.bits(slot, lane, wide), atomic);
        }
    }
    Ok(())
}

/// `atom` and `red`, for the lanes in ascending order.
pub(crate) fn atomic(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = i.ty.bytes();
    let wide = size == 8;
    let op = AtomicOp::ALL[usize::from(i.sub) % AtomicOp::ALL.len()];
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        let addr = address(frame, i, lane);
        if misaligned(addr, u64::from(size)) {
            return Err(Fail::new(FaultKind::Misaligned, lane, addr));
        }
        if i.space == Space::Generic && LOCAL_WINDOW.contains(&addr) {
            return Err(Fail::new(FaultKind::AddressSpace, lane, addr));
        }
        let p = spaces.pointer(ranges, i.space, addr, u64::from(size), true, lane)?;
        let shared = i.space == Space::Shared || SHARED_WINDOW.contains(&addr);
        if size == 16 {
            let slots = extra.get(i.e as usize..i.e as usize + 6).unwrap_or(&[0; 6]);
            let get = |n: usize| {
                let half = |n: usize| u128::from(frame.get::<u64>(slots[n], lane));
                half(n) | half(n + 1) << 64
            };
            let (b, c) = (get(2), get(4));
            let new = |old| match op {
                AtomicOp::Cas if old == b => c,
                AtomicOp::Cas => old,
                _ => b,
            };
            let old = exchange_pair(p, !shared, new);
            for (slot, half) in slots.iter().zip(halves(old)) {
                frame.set(*slot, lane, half);
            }
            continue;
        }
        let (b, c) = (frame.bits(i.b, lane, wide), frame.bits(i.c, lane, wide));
        let old = if shared {
            // One worker owns the block, so plain accesses are enough.
            let old = read(p, size, false);
            write(p, size, op.apply(i.ty, old, b, c), false);
            old
        } else {
            exchange(p, size, |old| op.apply(i.ty, old, b, c))
        };
        if i.d != crate::regs::NONE {
            frame.set_bits(i.d, lane, wide, old);
        }
    }
    Ok(())
}

/// Performs an atomic read-modify-write on host memory.
#[expect(clippy::cast_possible_truncation, reason = "values have the size of the atomic")]
pub(super) fn exchange(p: *mut u8, size: u32, f: impl Fn(u64) -> u64) -> u64 {
    // SAFETY: the caller checked the bytes for writing and their alignment.
    unsafe {
        match size {
            2 => {
                let a = AtomicU16::from_ptr(p.cast());
                u64::from(
                    a.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(f(u64::from(v)) as u16))
                        .unwrap_or_else(|v| v),
                )
            }
            4 => {
                let a = AtomicU32::from_ptr(p.cast());
                u64::from(
                    a.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(f(u64::from(v)) as u32))
                        .unwrap_or_else(|v| v),
                )
            }
            _ => {
                let a = AtomicU64::from_ptr(p.cast());
                a.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(f(v))).unwrap_or_else(|v| v)
            }
        }
    }
}

/// The low and the high half.
#[expect(clippy::cast_possible_truncation, reason = "halves")]
fn halves(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

/// Replaces 16 bytes if they are `old`. Returns the bytes that were there.
///
/// # Safety
///
/// The bytes may be written, their address is a multiple of 16, and the processor has the instruction.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn compare_exchange(p: *mut u8, old: u128, new: u128) -> u128 {
    let ([mut low, mut high], [new_low, new_high]) = (halves(old), halves(new));
    // SAFETY: the caller's promise. The compiler keeps `rbx` for itself, so the code restores it.
    unsafe {
        core::arch::asm!(
            "xchg rsi, rbx",
            "lock cmpxchg16b [rdi]",
            "mov rbx, rsi",
            in("rdi") p,
            inout("rsi") new_low => _,
            in("rcx") new_high,
            inout("rax") low,
            inout("rdx") high,
            options(nostack),
        );
    }
    u128::from(low) | u128::from(high) << 64
}

/// Exchanges 16 bytes, atomically if others may access them. Returns the old value.
fn exchange_pair(p: *mut u8, atomic: bool, f: impl Fn(u128) -> u128) -> u128 {
    let (low, high) = (p, p.wrapping_add(8));
    let plain = || u128::from(read(low, 8, false)) | u128::from(read(high, 8, false)) << 64;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if atomic && is_x86_feature_detected!("cmpxchg16b") {
        let mut old = plain();
        loop {
            // SAFETY: the processor has the instruction; the caller checked the 16 bytes for writing, and their alignment.
            let found = unsafe { compare_exchange(p, old, f(old)) };
            if found == old {
                return old;
            }
            old = found;
        }
    }
    // Without such an instruction the threads of the process take turns.
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _turn = atomic.then(|| TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    let old = plain();
    let new = f(old);
    for (p, half) in [low, high].into_iter().zip(halves(new)) {
        write(p, 8, half, false);
    }
    old
}

/// `cp.async`, executed at once: copies global to shared memory and clears the bytes beyond the source size.
pub(crate) fn copy_async(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let size = u64::from(i.n);
    let at = i.e as usize;
    let from_imm = match extra.get(at..at + 2) {
        Some([low, high]) => u64::from(*low) | u64::from(*high) << 32,
        _ => 0,
    };
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        let to = address(frame, i, lane);
        let from = frame.get::<u64>(i.b, lane).wrapping_add(from_imm);
        let take =
            if i.c == crate::regs::NONE { size } else { u64::from(frame.get::<u32>(i.c, lane)).min(size) };
        if misaligned(to, size) || misaligned(from, size) {
            return Err(Fail::new(FaultKind::Misaligned, lane, if misaligned(to, size) { to } else { from }));
        }
        let d = spaces.pointer(ranges, Space::Shared, to, size, true, lane)?;
        let mut buffer = [0u8; 16];
        if take > 0 {
            let s = spaces.pointer(ranges, Space::Global, from, take, false, lane)?;
            // SAFETY: `take` bytes were checked at `s`; the buffer has 16.
            unsafe {
                core::ptr::copy_nonoverlapping(s, buffer.as_mut_ptr(), usize::try_from(take).unwrap_or(0))
            };
        }
        // SAFETY: `size` bytes, at most 16, were checked at `d`.
        unsafe { core::ptr::copy_nonoverlapping(buffer.as_ptr(), d, usize::try_from(size).unwrap_or(0)) };
    }
    Ok(())
}

/// Copies bytes between two places, which may overlap.
pub(crate) fn copy(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    to: (Space, u64),
    from: (Space, u64),
    bytes: u64,
    lane: usize,
) -> Result<(), Fail> {
    if bytes == 0 {
        return Ok(());
    }
    let s = spaces.pointer(ranges, from.0, from.1, bytes, false, lane)?;
    let d = spaces.pointer(ranges, to.0, to.1, bytes, true, lane)?;
    // SAFETY: `bytes` bytes were checked at both; `copy` allows overlap.
    unsafe { core::ptr::copy(s, d, usize::try_from(bytes).unwrap_or(0)) };
    Ok(())
}

/// Reads one scalar at any alignment, for host functions.
pub(crate) fn peek(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    space: Space,
    addr: u64,
    size: u32,
    lane: usize,
) -> Result<u64, Fail> {
    let p = spaces.pointer(ranges, space, addr, u64::from(size), false, lane)?;
    let mut out = 0;
    for n in (0..size as usize).rev() {
        // SAFETY: `size` bytes were checked.
        out = (out << 8) | u64::from(unsafe { p.add(n).read_volatile() });
    }
    Ok(out)
}

/// Writes one scalar, at any alignment (matrix stores).
pub(crate) fn poke(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    space: Space,
    addr: u64,
    size: u32,
    lane: usize,
    value: u64,
) -> Result<(), Fail> {
    let p = spaces.pointer(ranges, space, addr, u64::from(size), true, lane)?;
    for (n, byte) in value.to_le_bytes().iter().take(size as usize).enumerate() {
        // SAFETY: `size` bytes were checked for writing.
        unsafe { p.add(n).write_volatile(*byte) };
    }
    Ok(())
}

/// A fence between the threads of the launch and the host.
pub(crate) fn fence() {
    core::sync::atomic::fence(Ordering::SeqCst);
}

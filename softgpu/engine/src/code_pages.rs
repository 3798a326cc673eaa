//! Machine code in the area of the process, and the call of that code.

#![expect(unsafe_code, reason = "the code is called")]

use core::ffi::c_void;
use core::ops::Range;

use crate::code_area::CodeArea;
use crate::regs::Frame;

/// Machine code, until it is dropped.
pub(crate) struct CodePages {
    area: &'static CodeArea,
    range: Range<usize>,
}

impl CodePages {
    /// Places `code`. `None` if the system refuses memory for code, or there is no room.
    pub(crate) fn new(code: &[u8]) -> Option<CodePages> {
        let area = CodeArea::of_process()?;
        Some(CodePages { area, range: area.place(code)? })
    }
}

/// Ranges of device memory that a thread keeps for its runs. Functions with more accesses share them.
pub(crate) const SITES: usize = 128;
/// Loads of a run from different addresses.
pub(crate) const MAX_LOADS: usize = 16;
/// Stores and atomics of a run.
pub(crate) const MAX_STORES: usize = 8;
/// Units of the slots of a run that have an older value if the run declines.
pub(crate) const MAX_SAVED: usize = 16 * 64;

/// The memory of a thread for its runs.
#[repr(C)]
pub(crate) struct RunScratch {
    /// Start and length of the range that each site read last, and of the one that it wrote last. Accesses share sites, and a range for
    /// reading may be read-only.
    read: [[u64; 2]; SITES],
    written: [[u64; 2]; SITES],
    /// The addresses of each load, for eight lanes: the first one, their shape, and all.
    first: [u64; MAX_LOADS],
    shape: [u32; MAX_LOADS],
    lanes: [[u64; 8]; MAX_LOADS],
    /// The same of each store, for 32 lanes.
    store_first: [[u64; 4]; MAX_STORES],
    store_shape: [[u32; 4]; MAX_STORES],
    store_lanes: [[u64; 32]; MAX_STORES],
    /// The values of eight lanes that were loaded one by one.
    values: [u64; 8],
    saved: [u32; MAX_SAVED],
}

/// The offset of a field of [`RunScratch`].
macro_rules! offset {
    ($name:ident) => {{
        const OFFSET: usize = core::mem::offset_of!(RunScratch, $name);
        const { assert!(OFFSET < 1 << 20) };
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "checked above")]
        let offset = OFFSET as i32;
        offset
    }};
}

impl RunScratch {
    pub(crate) const READ: i32 = offset!(read);
    pub(crate) const WRITTEN: i32 = offset!(written);
    pub(crate) const FIRST: i32 = offset!(first);
    pub(crate) const SHAPE: i32 = offset!(shape);
    pub(crate) const LANES: i32 = offset!(lanes);
    pub(crate) const STORE_FIRST: i32 = offset!(store_first);
    pub(crate) const STORE_SHAPE: i32 = offset!(store_shape);
    pub(crate) const STORE_LANES: i32 = offset!(store_lanes);
    pub(crate) const VALUES: i32 = offset!(values);
    pub(crate) const SAVED: i32 = offset!(saved);

    /// Makes a range that permits the access the range of a site for reading or for writing. Returns false if it was that already.
    pub(crate) fn enter(&mut self, site: usize, write: bool, range: &Range<u64>) -> bool {
        // A length fits a signed comparison.
        let new = [range.start, (range.end - range.start).min(u64::MAX >> 1)];
        let ranges = if write { &mut self.written } else { &mut self.read };
        let Some(known) = ranges.get_mut(site) else { return false };
        core::mem::replace(known, new) != new
    }
}

impl Default for RunScratch {
    fn default() -> RunScratch {
        RunScratch {
            read: [[0; 2]; SITES],
            written: [[0; 2]; SITES],
            first: [0; MAX_LOADS],
            shape: [0; MAX_LOADS],
            lanes: [[0; 8]; MAX_LOADS],
            store_first: [[0; 4]; MAX_STORES],
            store_shape: [[0; 4]; MAX_STORES],
            store_lanes: [[0; 32]; MAX_STORES],
            values: [0; 8],
            saved: [0; MAX_SAVED],
        }
    }
}

/// The indices of the threads of a warp in their block, and their lanes.
pub(crate) type WarpThreads = [[u32; 32]; 4];

/// The state that a run and the interpreter share.
#[repr(C)]
pub(crate) struct RunCall<'s> {
    /// The lanes that run.
    pub(crate) mask: u32,
    /// The lanes that the budget stopped before their next iteration.
    pub(crate) running: u32,
    pub(crate) budget: i32,
    /// The rest of the budget.
    pub(crate) left: i32,
    /// Shared memory of the block, and its length.
    pub(crate) shared: *mut u8,
    pub(crate) shared_len: u64,
    pub(crate) scratch: &'s mut RunScratch,
    /// The address outside the range of its site.
    pub(crate) missed: u64,
    pub(crate) threads: &'s WarpThreads,
    /// The index of the block.
    pub(crate) block: [u32; 3],
}

impl RunCall<'_> {
    pub(crate) const MASK: i32 = 0;
    pub(crate) const RUNNING: i32 = 4;
    pub(crate) const BUDGET: i32 = 8;
    pub(crate) const LEFT: i32 = 12;
    pub(crate) const SHARED: i32 = 16;
    pub(crate) const SHARED_LEN: i32 = 24;
    pub(crate) const SCRATCH: i32 = 32;
    pub(crate) const MISSED: i32 = 40;
    pub(crate) const THREADS: i32 = 48;
    pub(crate) const BLOCK: i32 = 56;
}

/// The end of a run.
pub(crate) enum RunEnd {
    Done,
    /// The interpreter must execute the instructions of the run, which has had no effect.
    Declined,
    /// An address of an access is not in the range of its site for reading or for writing. The run has had no effect.
    Missed {
        site: usize,
        write: bool,
    },
}

impl RunEnd {
    pub(crate) const DECLINED: u32 = 1;

    /// The number that a run returns for a miss.
    pub(crate) fn missed(site: usize, write: bool) -> u32 {
        2 + 2 * u32::try_from(site).unwrap_or(0) + u32::from(write)
    }

    fn of(code: u32) -> RunEnd {
        match code {
            0 => RunEnd::Done,
            RunEnd::DECLINED => RunEnd::Declined,
            code => RunEnd::Missed { site: (code as usize - 2) / 2, write: code & 1 != 0 },
        }
    }
}

/// Calls the run at an offset, which the translation placed there.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
pub(crate) fn call(pages: &CodePages, offset: usize, frame: &Frame, call: &mut RunCall<'_>) -> RunEnd {
    type Function = unsafe extern "sysv64" fn(*mut u32, *const u32, *mut RunCall<'_>) -> u32;
    let start = pages.area.start().as_ptr().wrapping_byte_add(pages.range.start + offset);
    let (regs, consts) = frame.areas();
    // SAFETY: the emitter has put a function of this type there, for a processor with AVX2.
    let function = unsafe { core::mem::transmute::<*mut c_void, Function>(start) };
    // SAFETY: the function accesses the slots of its instructions, which are inside the two areas, the call and its scratch, and those
    // bytes of shared memory, and of the ranges in the scratch, whose addresses it has checked.
    RunEnd::of(unsafe { function(regs, consts, call) })
}

/// There is no machine code for other processors.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn call(pages: &CodePages, offset: usize, frame: &Frame, call: &mut RunCall<'_>) -> RunEnd {
    let _ = (pages.area.start(), offset, frame.areas(), call);
    unreachable!("code is only made for x86-64");
}

impl Drop for CodePages {
    fn drop(&mut self) {
        // No thread executes the code: a launch holds the module that owns it.
        self.area.give_back(self.range.clone());
    }
}

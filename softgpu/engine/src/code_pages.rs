//! Memory for machine code: written first, then executable and never writable again; and the call of that code.

#![expect(unsafe_code, reason = "the system maps and protects pages, and the code in them is called")]

use core::ffi::c_void;
use core::ptr::NonNull;

use crate::regs::Frame;

/// CodePages with code, until they are dropped.
pub(crate) struct CodePages {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: nothing writes to the pages after their creation.
unsafe impl Send for CodePages {}
// SAFETY: as above.
unsafe impl Sync for CodePages {}

impl CodePages {
    /// Maps `code`. `None` if the system refuses memory, or code.
    pub(crate) fn new(code: &[u8]) -> Option<CodePages> {
        let len = code.len().max(1).next_multiple_of(4096);
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let pages = CodePages { start: NonNull::new(start)?, len };
        // SAFETY: the mapping has room for the code, and no other user.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), start.cast(), code.len()) };
        // SAFETY: the mapping is ours.
        let result = unsafe { libc::mprotect(start, len, libc::PROT_READ | libc::PROT_EXEC) };
        (result == 0).then_some(pages)
    }
}

/// The state that a run and the interpreter share.
#[repr(C)]
pub(crate) struct RunCall {
    /// The lanes that run.
    pub(crate) mask: u32,
    /// The lanes that the budget stopped before their next iteration.
    pub(crate) running: u32,
    pub(crate) budget: i32,
    /// The rest of the budget.
    pub(crate) left: i32,
    /// Shared memory of the block, and its length.
    pub(crate) shared: *mut u8,
    pub(crate) shared_len: u32,
}

impl RunCall {
    pub(crate) const MASK: i32 = 0;
    pub(crate) const RUNNING: i32 = 4;
    pub(crate) const BUDGET: i32 = 8;
    pub(crate) const LEFT: i32 = 12;
    pub(crate) const SHARED: i32 = 16;
    pub(crate) const SHARED_LEN: i32 = 24;
}

/// Calls the run at an offset, which the translation placed there. Returns false if it declines.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
pub(crate) fn call(pages: &CodePages, offset: usize, frame: &Frame, call: &mut RunCall) -> bool {
    type Function = unsafe extern "sysv64" fn(*mut u32, *const u32, *mut RunCall) -> u32;
    let start = pages.start.as_ptr().wrapping_byte_add(offset);
    let (regs, consts) = frame.areas();
    // SAFETY: the emitter has put a function of this type there, for a processor with AVX2.
    let function = unsafe { core::mem::transmute::<*mut c_void, Function>(start) };
    // SAFETY: the function accesses the slots of its instructions, which are inside the two areas, the call, and those words of shared
    // memory whose addresses it has checked.
    unsafe { function(regs, consts, call) == 0 }
}

/// There is no machine code for other processors.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn call(pages: &CodePages, offset: usize, frame: &Frame, call: &mut RunCall) -> bool {
    let _ = (pages.start, offset, frame.areas(), call);
    unreachable!("code is only made for x86-64");
}

impl Drop for CodePages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing executes it: a launch holds the module that owns it.
        unsafe { libc::munmap(self.start.as_ptr(), self.len) };
    }
}

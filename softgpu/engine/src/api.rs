//! The types at the boundary of the engine: the resources that a device lends to a launch, and the results it gets back.
//!
//! Nothing here parses or executes. A device address is a host virtual address; the engine accesses memory only in ranges that
//! [`Memory`] returns.

use core::ops::Range;

/// Generic addresses of shared memory. Reserved by the device, never mapped.
pub const SHARED_WINDOW: Range<u64> = 0x7c00_0000_0000..0x7c04_0000_0000;

/// Generic addresses of local memory (and, in its upper half, of kernel parameters). Reserved, never mapped.
pub const LOCAL_WINDOW: Range<u64> = 0x7c10_0000_0000..0x7c14_0000_0000;

/// The mapping table of one context. The interpreter calls it on every miss of its range cache.
///
/// Every returned range must stay mapped, readable (and writable if `write` was set) until the launch that requested it ends: the
/// engine reads and writes it through raw pointers.
pub trait Memory: Sync {
    /// Returns the widest range `[lo, hi)` around `addr` that permits the access; `None` means an illegal address.
    fn range(&self, addr: u64, write: bool) -> Option<Range<u64>>;
}

/// The host services that kernels use.
pub trait Runtime: Sync {
    /// Receives the text of a `printf`.
    fn print(&self, text: &[u8]);
    /// Receives one line of text about a failed assertion.
    fn report(&self, text: &[u8]);
    /// Allocates from the device heap. Returns 0 if the heap is full.
    fn malloc(&self, bytes: u64) -> u64;
    /// Frees a block of the device heap.
    fn free(&self, address: u64);
    /// Sets the value of a handle for a conditional node of a graph. Returns false if there is no such handle.
    fn set_conditional(&self, _handle: u64, _value: u32) -> bool {
        false
    }
    /// Lends memory for the shared and local memory of a block, without clearing it. Returns the address of `bytes` bytes, a
    /// multiple of 16; the engine alone uses them until it gives them back. Returns 0 if there is no memory: the engine then uses
    /// its own.
    fn take_scratch(&self, _bytes: u64) -> u64 {
        0
    }
    /// Takes back memory of `take_scratch`.
    fn give_scratch(&self, _address: u64, _bytes: u64) {}
    /// The calling thread is about to execute blocks. The call may wait for the thread's turn.
    fn begin_slice(&self) {}
    /// The calling thread has completed a piece of work. The call may wait for the thread's next turn.
    fn yield_now(&self) {}
    /// The calling thread has no more blocks to execute.
    fn end_slice(&self) {}
}

/// One launchable kernel of a module.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Name as written in the PTX.
    pub name: String,
    /// Parameters, in order.
    pub params: Vec<Param>,
    /// Size of the parameter block.
    pub param_bytes: u32,
    /// Static shared memory per block.
    pub static_shared: u32,
    /// Local memory per thread, without that of called functions.
    pub local_bytes: u32,
    /// The most threads of a block: the product of `.maxntid`, or 1024, as far as registers suffice.
    pub max_threads: u32,
    /// `.reqntid`.
    pub required_block: Option<[u32; 3]>,
    /// Estimated registers per thread, for occupancy.
    pub registers: u32,
    /// The architecture of the text's `.target`, times ten.
    pub target: u32,
    /// The reason that the kernel cannot run: it, or a function that it calls, has an instruction that the engine does not execute.
    pub refusal: Option<LoadError>,
    pub(crate) function: usize,
}

/// One kernel parameter in the parameter block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// A module-scope variable that needs storage on the device.
#[derive(Clone, Debug)]
pub struct Global {
    /// The name as written in the PTX.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Alignment in bytes.
    pub align: u32,
    /// True if the variable is in the constant space.
    pub constant: bool,
    /// True if the variable has an initialiser; without one its storage keeps its old contents.
    pub initialised: bool,
    /// `.attribute(.managed)`.
    pub managed: bool,
    /// True if the variable is visible outside its module (`.visible`, `.weak`, `.common`).
    pub visible: bool,
}

/// The reason that a module does not load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadErrorKind {
    /// The text is not PTX, or it is invalid PTX.
    Syntax,
    /// The `.version` is newer than the engine supports.
    Version,
    /// A `.target` above the device, or architecture-specific.
    Target,
    /// A known instruction or feature that this engine does not execute. In a function, it refuses only that function.
    Unsupported,
    /// A symbol is used but not defined.
    Link,
}

/// A module that does not load. The message names the instruction and the reason.
#[derive(Clone, Debug, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct LoadError {
    /// The class, which decides the CUDA error code.
    pub kind: LoadErrorKind,
    /// Line in the PTX text, from 1.
    pub line: u32,
    /// Description of the error.
    pub message: String,
}

/// The reason that a launch ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The address is not mapped, or its mapping lacks the requested right.
    IllegalAddress,
    /// The address is not a multiple of the access size.
    Misaligned,
    /// A generic address lies in a window that the instruction may not access.
    AddressSpace,
    /// The target of a call is not a function.
    InvalidPc,
    /// `__assertfail` was called.
    Assert,
    /// `trap` or `brkpt` was executed.
    Trap,
    /// An operand of a barrier or a mask of threads has no valid value, or the engine does not execute the instruction.
    IllegalInstruction,
    /// Shared or local memory was out of range, or no thread can make progress.
    LaunchFailed,
    /// Calls are nested too deep, or their variables take more than the local memory of a thread.
    StackOverflow,
    /// The time limit of the launch expired.
    Timeout,
    /// The stop flag was set.
    Stopped,
}

/// The first fault of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Index of the block.
    pub cta: [u32; 3],
    /// Index of the thread in its block.
    pub thread: [u32; 3],
    /// The address, if the kind has one.
    pub address: u64,
    /// Line in the PTX text.
    pub line: u32,
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (c, t) = (self.cta, self.thread);
        write!(
            f,
            "{:?} at PTX line {}, address {:#x}, block ({},{},{}) thread ({},{},{})",
            self.kind, self.line, self.address, c[0], c[1], c[2], t[0], t[1], t[2]
        )
    }
}

impl std::error::Error for Fault {}

//! The types at the boundary of the engine: the resources that a device lends to a launch, and the results it gets back.
//!
//! Nothing here parses or executes. A device address is a host virtual address; the engine touches memory only where [`Memory`]
//! vouches for it.

use core::ops::Range;

/// Generic addresses of shared memory. Reserved by the device, never mapped by anyone.
pub const SHARED_WINDOW: Range<u64> = 0x7c00_0000_0000..0x7c04_0000_0000;

/// Generic addresses of local memory (and, in its upper half, of kernel parameters). Reserved, never mapped.
pub const LOCAL_WINDOW: Range<u64> = 0x7c10_0000_0000..0x7c14_0000_0000;

/// The mapping table of one context. Consulted on every miss of the interpreter's range cache.
///
/// Every range that an implementation returns must stay mapped, readable (and writable when asked so) until the launch
/// that asked has ended: the engine reads and writes it through raw pointers.
pub trait Memory: Sync {
    /// The widest accessible range `[lo, hi)` that contains `addr`, with the asked right; `None` is an illegal address.
    fn range(&self, addr: u64, write: bool) -> Option<Range<u64>>;
}

/// What kernels may ask of the host side.
pub trait Runtime: Sync {
    /// Text of `printf`.
    fn print(&self, text: &[u8]);
    /// A line of text about an assertion that failed.
    fn report(&self, text: &[u8]);
    /// Allocates from the device heap; 0 is none left.
    fn malloc(&self, bytes: u64) -> u64;
    /// Frees a block of the device heap.
    fn free(&self, address: u64);
    /// Memory for the shared and local memory of a block, whose contents are left as they are: an address of so many
    /// bytes, a multiple of 16, which nobody else uses until it is given back. 0 is none: the engine has memory of its
    /// own, then.
    fn take_scratch(&self, _bytes: u64) -> u64 {
        0
    }
    /// Gives that memory back.
    fn give_scratch(&self, _address: u64, _bytes: u64) {}
    /// This thread is about to execute blocks, and may be held until it is its turn.
    fn sit(&self) {}
    /// The thread has done a piece of work and may be held until it is its turn again.
    fn breathe(&self) {}
    /// The thread has done what it sat down for.
    fn rise(&self) {}
}

/// One launchable kernel of a module.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The name as written in the PTX.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// Size of the parameter block.
    pub param_bytes: u32,
    /// Static shared memory per block.
    pub static_shared: u32,
    /// Local memory per thread, without that of called functions.
    pub local_bytes: u32,
    /// Product of `.maxntid`, or 1024.
    pub max_threads: u32,
    /// `.reqntid`.
    pub required_block: Option<[u32; 3]>,
    /// An estimate of the registers per thread, for occupancy.
    pub registers: u32,
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
    /// In the constant space.
    pub constant: bool,
    /// Has an initialiser; without one the storage is left as it is found.
    pub initialised: bool,
    /// `.attribute(.managed)`.
    pub managed: bool,
    /// Visible outside its module (`.visible`, `.weak`, `.common`).
    pub visible: bool,
}

/// Why a module does not load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadErrorKind {
    /// Not PTX, or PTX that cannot mean anything.
    Syntax,
    /// A `.version` newer than what is understood.
    Version,
    /// A `.target` above the device, or architecture-specific.
    Target,
    /// A known instruction or feature that this engine does not execute.
    Unsupported,
    /// A symbol that is used and not defined.
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
    /// What is wrong.
    pub message: String,
}

/// Why a launch ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// No mapping, or not the right asked for.
    IllegalAddress,
    /// An address that is not a multiple of the access.
    Misaligned,
    /// A generic address in a window where the instruction may not go.
    AddressSpace,
    /// A call target that is no function.
    InvalidPc,
    /// `__assertfail`.
    Assert,
    /// `trap` and `brkpt`.
    Trap,
    /// Shared or local memory out of range, stack overflow, or no thread can make progress.
    LaunchFailed,
    /// The time limit of the device.
    Timeout,
    /// The stop flag.
    Stopped,
}

/// The first fault of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The block.
    pub cta: [u32; 3],
    /// The thread in its block.
    pub thread: [u32; 3],
    /// The address, where the kind has one.
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

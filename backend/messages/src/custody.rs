//! Custody: the protocol by which device memory is lent to workers.
//!
//! The arbiter of a placement unit owns all memory of the unit in *chunks* and lends them to workers as descriptors. A worker
//! sends [`Request`]s on a socket of its own and gets [`Answer`]s; each lending is a *lease* with a number that is never used
//! again. The arbiter's grants to a VM stand in the *custody page*, one per worker, which the worker can only read.
//!
//! A request that carries a `serial` is answered by a message that carries it too. A worker that breaks the protocol is ended.
//! A worker reports its use of the unit's time in the *report page*, which only it writes and its arbiter reads, and signals
//! the arbiter by an eventfd, the *bell*. The arbiter trusts no report about memory: a lease is over for the VM's quota when
//! the worker gives it back, and its memory serves another VM only when every process that ever imported it is gone.

use crate::control::messages;
use core::sync::atomic::Ordering;
pub use sluice_protocol::limits::UNIT;
use sluice_protocol::{
    field::{Field, FieldError, Reader, Writer},
    shared::Shared,
};

const MIB: u64 = 1 << 20;

/// Sizes of chunks in bytes, largest first. The last one is the unit of quotas and of addresses: every driver's allocation
/// granularity seen divides it.
pub const CLASSES: [u64; 3] = [512 * MIB, 32 * MIB, UNIT];

/// What makes a driver take device memory for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Growth {
    /// A context.
    Context = 0,
    /// An image: code and variables.
    Module = 1,
    /// A limit of a context: stack, heap, printf buffer.
    Limit = 2,
    /// Local memory at the first launch of a function.
    Launch = 3,
}

impl Growth {
    /// The value with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Growth> {
        match number {
            0 => Some(Growth::Context),
            1 => Some(Growth::Module),
            2 => Some(Growth::Limit),
            3 => Some(Growth::Launch),
            _ => None,
        }
    }
}

messages! {
    /// From a worker to the arbiter that lends it memory.
    enum Request {
        /// The guest's own number of its process, for lists that only its VM sees.
        1 Hello { /** A process number of the guest. */ process: u32 } fds 0,
        /// Lend a chunk. Answered by `Lent` or `Refused`.
        2 Take { /** Comes back in the answer. */ serial: u64, /** One of [`CLASSES`]. */ bytes: u64 } fds 0,
        /// The lease is over: the worker says that it has unmapped the chunk and released its handle.
        3 Give { /** The lease. */ lease: u64 } fds 0,
        /// Bytes of leased chunks that nothing is allocated in: they count as free for the guest, and can be recalled.
        4 Idle { /** Bytes in all. */ bytes: u64 } fds 0,
        /// The driver is about to take memory for itself. Answered by `Granted` when there is room for it, with the bytes that it
        /// may take beyond this before the next one; by `Refused` when the VM's quota is reached.
        5 Grow {
            /** Comes back in the answer. */ serial: u64,
            /** A [`Growth`]. */ reason: u32,
            /** What it will take, as far as is known. */ bytes: u64,
            /** What is left of the bytes that earlier answers gave beyond that. */ left: u64
        } fds 0,
        /// The driver has taken what was granted.
        6 Grown { /** That of the `Grow`. */ serial: u64 } fds 0,
        /// Adds a leased chunk to a share, which other workers of the same VM may open. `share` 0 makes a new one. Answered
        /// by `Shared` with its number.
        7 Share { /** Comes back in the answer. */ serial: u64, /** The share. */ share: u128, /** The lease. */ lease: u64 } fds 0,
        /// Ends a share of this worker. What others have opened stays theirs.
        8 Unshare { /** The share. */ share: u128 } fds 0,
        /// Lends the chunks of a share of the same VM, in order: `Lent` for each, or `Refused`. They are charged once.
        9 Open { /** Comes back in the answers. */ serial: u64, /** The share. */ share: u128 } fds 0,
        /// Counts guest memory that the driver is about to pin. Answered by `Granted` or `Refused`.
        10 Pin { /** Comes back in the answer. */ serial: u64, /** Bytes. */ bytes: u64 } fds 0,
        /// Guest memory is no longer pinned.
        11 Unpin { /** Bytes. */ bytes: u64 } fds 0,
        /// The `index`-th worker of the VM. Answered by `Process`, or by `Refused` behind the last one.
        12 Process { /** Comes back in the answer. */ serial: u64, /** From 0. */ index: u32 } fds 0,
        /// The driver has given back what it had taken. It stays charged until the inventory confirms it, and counts for the
        /// next `Grow` of this worker.
        13 Shrunk { /** A [`Growth`]. */ reason: u32, /** What it was granted for that. */ bytes: u64 } fds 0,
    }
    /// From an arbiter to a worker.
    enum Answer begins Welcome {
        /// First of all. Descriptors: the custody page, which cannot be written through it; the report page; the bell, an
        /// eventfd.
        1 Welcome {
            /** [`crate::control::VERSION`]; first in every one. */ version: u32,
            /** The placement unit. */ unit: u32,
            /** Epoch of the VM. */ epoch: u64,
            /** What the VM may have, in bytes. */ limit: u64
        } fds 3,
        /// A chunk. Descriptor: what the driver imports it by.
        2 Lent {
            /** That of the request. */ serial: u64,
            /** The lease. */ lease: u64,
            /** Bytes of the chunk. */ bytes: u64,
            /** Whether more chunks of the same share follow. */ more: bool
        } fds 1,
        /// Yes.
        3 Granted { /** That of the request. */ serial: u64, /** What the request says it is. */ value: u64 } fds 0,
        /// No.
        4 Refused { /** That of the request. */ serial: u64, /** A CUresult. */ error: u32 } fds 0,
        /// Give back idle chunks, up to so many bytes; another worker of the VM wants them.
        5 Recall { /** Bytes. */ bytes: u64 } fds 0,
        /// A worker of the same VM.
        6 Process {
            /** That of the request. */ serial: u64,
            /** The guest's number of its process; 0 if it did not say. */ process: u32,
            /** Bytes lent to it that are not idle, and what its driver takes. */ bytes: u64
        } fds 0,
        /// The lease is in a share.
        7 Shared {
            /** That of the request. */ serial: u64,
            /** The share: 128 random bits, which open it for every process of the VM that knows them. */ share: u128
        } fds 0,
    }
}

/// The custody page: what a worker reads without asking.
pub mod page {
    use super::{Ordering, Shared};

    /// Bytes of the page.
    pub const BYTES: usize = 4096;
    /// What [`MAGIC_AT`] holds: `sluicecu`.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"sluicecu");
    /// The magic number, written last.
    pub const MAGIC_AT: usize = 0;
    /// Epoch of the VM.
    pub const EPOCH: usize = 8;
    /// What the VM may have, in bytes; a multiple of [`super::UNIT`].
    pub const LIMIT: usize = 16;
    /// Bytes of its quota in use: lent to all workers of the VM, those they call idle not counted, and what drivers take.
    pub const USED: usize = 24;
    /// Microseconds of work, by estimate, that the worker may have under way; 0 while it may submit none. Beside them, maybe,
    /// [`TELL`]. A futex: whoever waits for it is woken when it changes from 0.
    pub const PERMIT: usize = 32;
    /// Somebody else wants the device and waits for the worker to have nothing to do: it rings when that is so. A worker without
    /// a permit rings in any case, then, and when it needs one, and when the device begins with what was held.
    pub const TELL: u32 = 1 << 31;
    /// 1 while drivers may take memory within the margins of their last grants; 0 while every growth has to be asked for.
    pub const OPEN: usize = 36;

    /// Free and total bytes of the VM on this unit, as its guest sees them.
    pub fn memory(page: &impl Shared) -> (u64, u64) {
        let limit = page.load_u64(LIMIT, Ordering::Acquire);
        let used = page.load_u64(USED, Ordering::Acquire);
        (limit.saturating_sub(used), limit)
    }
}

/// The report page: what a worker does with a unit's time, and how much it has done. Only the worker's own VM is charged by it.
pub mod report {
    /// Bytes of the page.
    pub const BYTES: usize = 4096;
    /// 1 while work waits: for a permit, or for earlier work to end.
    pub const WAITING: usize = 0;
    /// Pieces of work that were submitted and could run at once, in all.
    pub const BEGUN: usize = 8;
    /// Of these and of those in [`FREED`], pieces that ended.
    pub const ENDED: usize = 16;
    /// Nanoseconds in which some was under way, up to [`COUNTED`].
    pub const BUSY: usize = 24;
    /// A time of the monotonic clock: what was under way since then is not in [`BUSY`].
    pub const COUNTED: usize = 32;
    /// Pieces of work that were submitted behind a wait which is over.
    pub const FREED: usize = 40;
    /// Kernels launched.
    pub const LAUNCHES: usize = 64;
    /// Copies submitted.
    pub const COPIES: usize = 72;
    /// Bytes of these.
    pub const COPIED: usize = 80;
    /// Calls of the guest that came as far as the worker, counted on the session's first device.
    pub const CALLS: usize = 88;
}

//! Custody: the protocol for lending device memory to workers.
//!
//! The arbiter of a placement unit owns all memory of the unit in *chunks* and lends them to workers as descriptors. A worker
//! sends [`CustodyRequest`]s on a socket of its own and gets [`CustodyAnswer`]s; each lending is a *lease* with a number that is never used
//! again. The arbiter's grants to a VM are in the *custody page*, one per worker, which the worker can only read.
//!
//! A request that carries a `serial` is answered by a message that carries it too. A worker that breaks the protocol is ended.
//! A worker reports its use of the unit's time in the *report page*, which only it writes and its arbiter reads, and signals
//! the arbiter by an eventfd. The arbiter trusts no report about memory: a lease is over for the VM's quota when
//! the worker gives it back, and its memory serves another VM only when every process that ever imported it is gone.

use crate::control::messages;
use core::sync::atomic::Ordering;
pub use sluice_protocol::limits::UNIT;
use sluice_protocol::{
    field::{Field, FieldError, Reader, Writer},
    numbered,
    shared::Shared,
};

const MIB: u64 = 1 << 20;

/// Sizes of chunks in bytes, largest first. The last one is the unit of quotas and of addresses: every driver's observed allocation
/// granularity divides it.
pub const CLASSES: [u64; 3] = [512 * MIB, 32 * MIB, UNIT];

numbered! {
    /// The reasons for which a driver takes device memory for itself.
    pub enum Growth {
        /// A new context.
        Context = 0,
        /// An image: code and variables.
        Module = 1,
        /// A limit of a context: stack, heap, printf buffer.
        Limit = 2,
        /// Local memory at the first launch of a function.
        Launch = 3,
        /// An executable graph.
        Graph = 4,
        /// An array, or the descriptors of texture and surface objects.
        Array = 5,
        /// The queues of a green context.
        Queues = 6,
    }
}

messages! {
    /// From a worker to the arbiter that lends it memory.
    enum CustodyRequest {
        /// The guest's own number of its process, for lists that only its VM sees.
        1 Hello { /** A process number of the guest. */ process: u32 } fds 0,
        /// Lend a chunk. Answered by `Lent` or `Refused`.
        2 Take { /** Comes back in the answer. */ serial: u64, /** One of [`CLASSES`]. */ bytes: u64 } fds 0,
        /// Ends a lease: the worker reports that it has unmapped the chunk and released its handle.
        3 Give { /** The lease. */ lease: u64 } fds 0,
        /// Bytes of leased chunks without allocations: they count as free for the guest, and can be recalled.
        4 Idle { /** Bytes in all. */ bytes: u64 } fds 0,
        /// The driver is about to take memory for itself. Answered by `Granted` if there is room for it, with a margin: bytes
        /// that it may take beyond this without a request; by `Refused` if the VM's quota is reached.
        5 Grow {
            /** Comes back in the answer. */ serial: u64,
            /** A [`Growth`]. */ reason: u32,
            /** The bytes that it will take, as an estimate. */ bytes: u64,
            /** Bytes of finished growth within the margins of all earlier answers. */ spent: u64
        } fds 0,
        /// The driver has taken the granted memory.
        6 Grown { /** The serial of the `Grow`. */ serial: u64 } fds 0,
        /// Adds a leased chunk to a share, which other workers of the same VM may open. `share` 0 makes a new one. Answered
        /// by `Shared` with its number.
        7 Share { /** Comes back in the answer. */ serial: u64, /** The share. */ share: u128, /** The lease. */ lease: u64 } fds 0,
        /// Ends a share of this worker. Leases that others have opened remain.
        8 Unshare { /** The share. */ share: u128 } fds 0,
        /// Lends the chunks of a share of the same VM, in order: `Lent` for each, or `Refused`. They are charged once.
        9 Open { /** Comes back in the answers. */ serial: u64, /** The share. */ share: u128 } fds 0,
        /// Counts guest memory that the driver is about to pin. Answered by `Granted` or `Refused`.
        10 Pin { /** Comes back in the answer. */ serial: u64, /** Bytes. */ bytes: u64 } fds 0,
        /// Ends the count of pinned guest memory.
        11 Unpin { /** Bytes. */ bytes: u64 } fds 0,
        /// The `index`-th worker of the VM. Answered by `Process`, or by `Refused` behind the last one.
        12 Process { /** Comes back in the answer. */ serial: u64, /** The index, from 0. */ index: u32 } fds 0,
        /// The driver has given back memory that it had taken. It stays charged until the inventory confirms it, and covers the
        /// next `Grow` of this worker if the VM has room for both: the driver may have kept it.
        13 Shrunk { /** A [`Growth`]. */ reason: u32, /** The bytes granted for it. */ bytes: u64 } fds 0,
    }
    /// From an arbiter to a worker.
    enum CustodyAnswer begins Welcome {
        /// Always the first. Descriptors: the custody page, which the worker cannot write; the report page; the eventfd by
        /// which the worker signals the arbiter.
        1 Welcome {
            /** [`crate::control::VERSION`]; first in every one. */ version: u32,
            /** The placement unit. */ unit: u32,
            /** Epoch of the VM. */ epoch: u64,
            /** The VM's quota in bytes. */ limit: u64
        } fds 3,
        /// A chunk. Descriptor: for the driver to import it.
        2 Lent {
            /** The request's serial. */ serial: u64,
            /** The lease. */ lease: u64,
            /** Bytes of the chunk. */ bytes: u64,
            /** True if more chunks of the same share follow. */ more: bool
        } fds 1,
        /// The request is granted.
        3 Granted { /** The request's serial. */ serial: u64, /** The value that the request defines. */ value: u64 } fds 0,
        /// The request is refused.
        4 Refused { /** The request's serial. */ serial: u64, /** A CUresult. */ error: u32 } fds 0,
        /// Asks for idle chunks, up to this many bytes; another worker of the VM needs them.
        5 Recall { /** Bytes. */ bytes: u64 } fds 0,
        /// A worker of the same VM.
        6 Process {
            /** The request's serial. */ serial: u64,
            /** The guest's number of its process; 0 if it reported none. */ process: u32,
            /** Bytes lent to it that are not idle, and its driver's bytes. */ bytes: u64
        } fds 0,
        /// The lease is in a share.
        7 Shared {
            /** The request's serial. */ serial: u64,
            /** The share: 128 random bits, which open it for every process of the VM that knows them. */ share: u128
        } fds 0,
    }
}

/// The custody page: values that a worker reads without a request.
pub mod page {
    use super::{Ordering, Shared};

    /// Bytes of the page.
    pub const BYTES: usize = 4096;
    /// Value of the word at [`MAGIC_AT`]: `sluicecu`.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"sluicecu");
    /// The magic number, written last.
    pub const MAGIC_AT: usize = 0;
    /// Epoch of the VM.
    pub const EPOCH: usize = 8;
    /// The VM's quota in bytes; a multiple of [`super::UNIT`].
    pub const LIMIT: usize = 16;
    /// Used bytes of the quota: those lent to all workers of the VM, except idle ones, and those of drivers.
    pub const USED: usize = 24;
    /// Microseconds of estimated work that the worker may have under way; 0 if it may submit none. [`TELL`] may be set in the same word.
    /// A futex: [`SLEEPERS`] of its waiters are woken when it changes from 0.
    pub const PERMIT: usize = 32;
    /// More than the threads of a worker that wait for [`PERMIT`] at once: its submitter and its helpers.
    pub const SLEEPERS: u32 = 8;
    /// Another VM waits for the device: the worker rings once it has no work. A worker without a permit rings in any case then,
    /// when it needs a permit, and when the device begins held work.
    pub const TELL: u32 = 1 << 31;
    /// 1 while drivers may take memory within the margins of their last grants; 0 while every growth needs a request.
    pub const OPEN: usize = 36;

    /// Free and total bytes of the VM on this unit, as its guest sees them.
    pub fn memory(page: &impl Shared) -> (u64, u64) {
        let limit = page.load_u64(LIMIT, Ordering::Acquire);
        let used = page.load_u64(USED, Ordering::Acquire);
        (limit.saturating_sub(used), limit)
    }
}

/// The report page: a worker's use of a unit's time, and its counts of work. Only the worker's own VM is charged by it.
pub mod report {
    /// Bytes of the page.
    pub const BYTES: usize = 4096;
    /// 1 while work waits: for a permit, or for earlier work to end.
    pub const WAITING: usize = 0;
    /// Number of pieces of work that were submitted and could run at once.
    pub const BEGUN: usize = 8;
    /// Number of ended pieces of work, of these and of those in [`FREED`].
    pub const ENDED: usize = 16;
    /// Nanoseconds in which some work was under way, up to [`COUNTED`].
    pub const BUSY: usize = 24;
    /// A time of the monotonic clock: time since then is not in [`BUSY`] yet.
    pub const COUNTED: usize = 32;
    /// Number of pieces of work that were submitted behind a wait that is over.
    pub const FREED: usize = 40;
    /// Number of launched kernels.
    pub const LAUNCHES: usize = 64;
    /// Number of submitted copies.
    pub const COPIES: usize = 72;
    /// Bytes of the copies.
    pub const COPIED: usize = 80;
    /// Number of guest calls that reached the worker, counted on the session's first device.
    pub const CALLS: usize = 88;
}

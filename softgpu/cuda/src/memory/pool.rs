//! Pools: memory that is allocated and freed in stream order.
//!
//! A pool has pages of the device, divided into blocks. A block that is freed in a stream is *pending* until the stream reaches
//! that point. Until then only an allocation that is ordered after it may use it: one in the same stream, or one that is made to
//! wait. Pages without a block stay with the pool up to its threshold; pages beyond it go back to the device when the program
//! synchronises.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{ALIGNMENT, Block, BlockKind, Maker, Space};
use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::schedule::{Key, Point, QueuedWork, scheduler};

/// Pools that programs can name.
pub(crate) static POOLS: Registry<Pool> = Registry::new(Kind::Pool, Error::INVALID_VALUE);

/// Settings and counters of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    /// Non-zero if freed blocks may be used again: after events, when they happen to be free, or by waiting.
    pub(crate) reuse: [u32; 3],
    /// Bytes that the pool may keep in pages without a block.
    pub(crate) threshold: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
}

/// A block that is freed when its stream reaches a point.
struct Pending {
    point: Point,
    block: Block,
}

/// A pool that processes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedPool {
    /// Different, in practice, from that of any other pool.
    pub(crate) identity: u64,
    /// True for a pool of another process, from which nothing is allocated here.
    pub(crate) imported: bool,
}

impl SharedPool {
    /// A new identity.
    pub(crate) fn new() -> SharedPool {
        // Each state has keys of its own.
        SharedPool { identity: RandomState::new().build_hasher().finish(), imported: false }
    }
}

/// A pool of one device.
pub(crate) struct Pool {
    /// All pools of the device.
    pools: &'static Pools,
    pub(crate) handle: u64,
    /// Maximum size in bytes; 0 means no limit of its own.
    pub(crate) max_bytes: u64,
    /// True for the pool that a device has from the start.
    pub(crate) is_default: bool,
    /// The identity by which processes share it, if they may.
    pub(crate) shared: Option<SharedPool>,
    numbers: Mutex<Numbers>,
    pending: Mutex<BTreeMap<u64, Pending>>,
    next: AtomicU64,
    /// True after the handle is destroyed; the pool ends with its last block.
    ended: AtomicBool,
}

/// The pools of a device. They live as long as the process.
pub(crate) struct Pools {
    /// Ordinal of the device.
    device: i32,
    space: &'static Space,
    /// Pools with a handle or with memory, by their handles.
    all: Mutex<BTreeMap<u64, Arc<Pool>>>,
    /// Handle of the default pool, which is created at its first use.
    default: Mutex<u64>,
    /// Handle of the pool for allocations that name none; 0 means the default pool.
    current: AtomicU64,
    /// True if blocks have come back to pools since the last synchronisation checked.
    loose: AtomicBool,
}

fn rounded(bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)
}

impl Pool {
    /// Creates a pool of a device, with its handle.
    pub(crate) fn create(
        pools: &'static Pools,
        max_bytes: u64,
        is_default: bool,
        shared: Option<SharedPool>,
    ) -> Result<Arc<Pool>> {
        let make = |handle| Pool {
            pools,
            handle,
            max_bytes,
            is_default,
            shared,
            numbers: Mutex::new(Numbers {
                reuse: [1; 3],
                threshold: 0,
                reserved_high: 0,
                used: 0,
                used_high: 0,
            }),
            pending: Mutex::default(),
            next: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        };
        let (handle, pool) = POOLS.insert_with(make)?;
        lock(&pools.all).insert(handle, Arc::clone(&pool));
        Ok(pool)
    }

    /// `cuMemPoolDestroy`: the pool ends with its last block.
    pub(crate) fn destroy(handle: u64) -> Result {
        let pool = POOLS.get(handle)?;
        if pool.is_default {
            return Err(Error::INVALID_VALUE);
        }
        POOLS.remove(handle)?;
        let current = &pool.pools.current;
        // Fails if another pool is the device's current one.
        let _ = current.compare_exchange(handle, 0, Ordering::AcqRel, Ordering::Acquire);
        pool.ended.store(true, Ordering::Release);
        pool.trim(0);
        Ok(())
    }

    /// True for a pool of another process.
    pub(crate) fn is_imported(&self) -> bool {
        self.shared.is_some_and(|shared| shared.imported)
    }

    /// Returns the settings and counters.
    pub(crate) fn numbers(&self) -> Numbers {
        *lock(&self.numbers)
    }

    /// Changes settings or counters.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Numbers)) {
        change(&mut lock(&self.numbers));
    }

    /// Sets the bytes that the pool may keep; the next synchronisation applies it.
    pub(crate) fn set_threshold(&self, bytes: u64) {
        self.change(|numbers| numbers.threshold = bytes);
        self.pools.loose.store(true, Ordering::Release);
    }

    /// Returns the ordinal of its device.
    pub(crate) fn device(&self) -> i32 {
        self.pools.device
    }

    /// Returns the bytes of the device that the pool has.
    pub(crate) fn reserved(&self) -> u64 {
        self.pools.space.pool_bytes(self.handle)
    }

    /// `cuMemAllocFromPoolAsync`: the memory is valid from the next operation of the stream with that queue on.
    pub(crate) fn allocate(&self, maker: Maker, queue: Key, bytes: u64) -> Result<u64> {
        let size = rounded(bytes)?;
        if self.is_imported() {
            return Err(Error::INVALID_VALUE);
        }
        let space = self.pools.space;
        let start = match self.take_pending(maker, queue, size) {
            Some(block) => {
                space.adopt_pool_block(maker, &block, bytes);
                block.start
            }
            None => match space.allocate_in_pool(maker, bytes, self.handle, self.max_bytes) {
                Err(Error::OUT_OF_MEMORY) => {
                    self.make_room(queue);
                    space.allocate_in_pool(maker, bytes, self.handle, self.max_bytes)?
                }
                other => other?,
            },
        };
        let reserved = self.reserved();
        self.change(|numbers| {
            numbers.used += size;
            numbers.used_high = numbers.used_high.max(numbers.used);
            numbers.reserved_high = numbers.reserved_high.max(reserved);
        });
        Ok(start)
    }

    /// Takes a pending block of exactly that size that the stream may use: its own, or another stream's, for which it then waits.
    fn take_pending(&self, maker: Maker, queue: Key, size: u64) -> Option<Block> {
        let waits = self.numbers().reuse[2] != 0;
        let taken = {
            let mut pending = lock(&self.pending);
            let fits = |other: &Pending| rounded(other.block.bytes) == Ok(size);
            let own = |other: &Pending| other.point.queue == queue;
            let found = pending.iter().find(|(_, other)| fits(other) && own(other)).or_else(|| {
                // A stream never waits for work of another context.
                let context = |other: &Pending| other.block.maker.core == maker.core;
                pending.iter().find(|(_, other)| waits && fits(other) && context(other))
            });
            let number = found.map(|(number, _)| *number)?;
            pending.remove(&number)?
        };
        if taken.point.queue != queue {
            scheduler().submit_now(queue, vec![taken.point], QueuedWork::Marker);
        }
        self.change(|numbers| numbers.used -= taken.block.bytes.next_multiple_of(ALIGNMENT));
        Some(taken.block)
    }

    /// Handles a shortage of device memory: waits for pending blocks of the same stream, for which the new block would have to
    /// wait anyway, and lets every pool give back its unused pages.
    fn make_room(&self, queue: Key) {
        let points: Vec<Point> = {
            let pending = lock(&self.pending);
            let points = pending.values().map(|pending| pending.point);
            points.filter(|point| point.queue == queue).collect()
        };
        for point in points {
            scheduler().wait(point);
        }
        for pool in self.pools.all() {
            pool.trim(0);
        }
    }

    /// `cuMemFreeAsync` of a withdrawn block of this pool.
    pub(crate) fn free_in_order(self: &Arc<Self>, queue: Key, block: Block) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let pool = Arc::clone(self);
        // Operations in front take the lock.
        scheduler().wait_for_room(queue);
        // Holds the lock until the entry is inserted: the stream may reach the point at once.
        let mut pending = lock(&self.pending);
        let finish = Box::new(move |_| {
            // One step for other threads: the block is either pending or back in the pool.
            let mut pending = lock(&pool.pending);
            let Some(done) = pending.remove(&number) else { return };
            pool.pools.space.release(&done.block);
            drop(pending);
            pool.count_back(&done.block);
        });
        let point = scheduler().submit_now(queue, Vec::new(), QueuedWork::Callback(finish));
        pending.insert(number, Pending { point, block });
    }

    /// Takes back a block that nothing uses.
    pub(crate) fn take_back(&self, block: &Block) {
        self.pools.space.release(block);
        self.count_back(block);
    }

    fn count_back(&self, block: &Block) {
        self.change(|numbers| numbers.used -= block.bytes.next_multiple_of(ALIGNMENT));
        self.pools.loose.store(true, Ordering::Release);
        if self.ended.load(Ordering::Acquire) {
            self.trim(0);
        }
    }

    /// Gives unused pages back to the device down to `keep` bytes, unless running operations may access them.
    pub(crate) fn trim(&self, keep: u64) {
        self.pools.space.trim_pool(self.handle, keep);
        if self.ended.load(Ordering::Acquire) && lock(&self.pending).is_empty() && self.reserved() == 0 {
            lock(&self.pools.all).remove(&self.handle);
            self.pools.space.forget_pool(self.handle);
        }
    }
}

impl Pools {
    /// Creates the pools of a device; there are none at first.
    pub(crate) fn new(device: i32, space: &'static Space) -> Pools {
        Pools {
            device,
            space,
            all: Mutex::default(),
            default: Mutex::new(0),
            current: AtomicU64::new(0),
            loose: AtomicBool::new(false),
        }
    }

    /// Returns every pool that has memory or a handle.
    pub(crate) fn all(&self) -> Vec<Arc<Pool>> {
        lock(&self.all).values().cloned().collect()
    }

    /// Returns the pool of `cuMemAllocAsync`.
    pub(crate) fn current(&'static self) -> Result<Arc<Pool>> {
        match self.current.load(Ordering::Acquire) {
            0 => self.default(),
            // The pool may just have been destroyed.
            handle => POOLS.get(handle).or_else(|_| self.default()),
        }
    }

    /// Selects the pool of `cuMemAllocAsync`.
    pub(crate) fn set_current(&self, handle: u64) {
        self.current.store(handle, Ordering::Release);
    }

    /// Returns the pool that the device has from the start.
    pub(crate) fn default(&'static self) -> Result<Arc<Pool>> {
        let mut handle = lock(&self.default);
        if *handle == 0 {
            *handle = Pool::create(self, 0, true, None)?.handle;
        }
        POOLS.get(*handle)
    }

    /// Called when the program has synchronised: pools give back pages beyond their thresholds.
    pub(crate) fn trim(&self) {
        if self.loose.swap(false, Ordering::AcqRel) {
            for pool in self.all() {
                let keep = if pool.ended.load(Ordering::Acquire) { 0 } else { pool.numbers().threshold };
                pool.trim(keep);
                if pool.reserved() > keep.max(pool.numbers().used) {
                    // An operation runs, or a block occupies pages: the next synchronisation tries again.
                    self.loose.store(true, Ordering::Release);
                }
            }
        }
    }

    /// Takes back a block of a pool.
    pub(crate) fn take_back(&self, block: &Block) {
        debug_assert_eq!(block.kind, BlockKind::Pool);
        let pool = lock(&self.all).get(&block.pool).cloned();
        match pool {
            Some(pool) => pool.take_back(block),
            None => self.space.release(block),
        }
    }
}

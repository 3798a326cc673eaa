//! Pools: memory that is taken and given back in the order of a stream.
//!
//! A pool has pages of the device, carved into blocks. A block that is freed in a stream is *pending* until the stream comes to
//! that point. Until then only an allocation that is ordered behind it may have it: one in the same stream, or one that is made
//! to wait. Pages without a block stay with the pool up to its threshold; pages beyond it go back to the device when the
//! program synchronises.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{ALIGNMENT, Block, BlockKind};
use crate::context::lock;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::handles::{Kind, Registry};
use crate::process;
use crate::schedule::{Point, Work};
use crate::stream::Target;

/// Pools that programs can name.
pub(crate) static POOLS: Registry<Pool> = Registry::new(Kind::Pool, Error::INVALID_VALUE);

/// What can be set of a pool, and what is counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    /// Whether freed blocks may be used again: behind events, when they happen to be free, by waiting.
    pub(crate) reuse: [u32; 3],
    /// Bytes that the pool may keep without a block in them.
    pub(crate) threshold: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
}

/// A block that is freed when its stream comes there.
struct Pending {
    point: Point,
    block: Block,
}

/// See the module.
pub(crate) struct Pool {
    pub(crate) gpu: &'static Gpu,
    pub(crate) handle: u64,
    /// Bytes that it may have at most; 0 is no limit of its own.
    pub(crate) max_bytes: u64,
    /// The pool that a device has from the start.
    pub(crate) is_default: bool,
    numbers: Mutex<Numbers>,
    pending: Mutex<BTreeMap<u64, Pending>>,
    next: AtomicU64,
    /// Its handle is gone; it ends with its last block.
    ended: AtomicBool,
}

fn rounded(bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)
}

impl Pool {
    /// A new pool of a device, with its handle.
    pub(crate) fn create(gpu: &'static Gpu, max_bytes: u64, is_default: bool) -> Result<Arc<Pool>> {
        let make = |handle| Pool {
            gpu,
            handle,
            max_bytes,
            is_default,
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
        lock(&gpu.pools).insert(handle, Arc::clone(&pool));
        Ok(pool)
    }

    /// `cuMemPoolDestroy`: the pool ends with its last block.
    pub(crate) fn destroy(handle: u64) -> Result {
        let pool = POOLS.get(handle)?;
        if pool.is_default {
            return Err(Error::INVALID_VALUE);
        }
        POOLS.remove(handle)?;
        let current = &pool.gpu.current_pool;
        // Fails when another pool is the device's.
        let _ = current.compare_exchange(handle, 0, Ordering::AcqRel, Ordering::Acquire);
        pool.ended.store(true, Ordering::Release);
        pool.trim(0);
        Ok(())
    }

    /// Settings and counts.
    pub(crate) fn numbers(&self) -> Numbers {
        *lock(&self.numbers)
    }

    /// Changes settings or counts.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Numbers)) {
        change(&mut lock(&self.numbers));
    }

    /// Bytes of the device that it has.
    pub(crate) fn reserved(&self) -> u64 {
        self.gpu.space.pool_bytes(self.handle)
    }

    /// `cuMemAllocFromPoolAsync`: valid at the stream's next operation.
    pub(crate) fn allocate(&self, target: &Target, bytes: u64) -> Result<u64> {
        let size = rounded(bytes)?;
        if target.core.gpu.ordinal != self.gpu.ordinal {
            return Err(Error::INVALID_VALUE);
        }
        let space = &self.gpu.space;
        let start = match self.take_pending(target, size) {
            Some(block) => {
                space.adopt_pool_block(&target.core, &block, bytes);
                block.start
            }
            None => match space.allocate_in_pool(&target.core, bytes, self) {
                Err(Error::OUT_OF_MEMORY) => {
                    self.make_room(target);
                    space.allocate_in_pool(&target.core, bytes, self)?
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

    /// A pending block of exactly that size that the stream may have: its own, or another's that it is made to wait for.
    fn take_pending(&self, target: &Target, size: u64) -> Option<Block> {
        let waits = self.numbers().reuse[2] != 0;
        let taken = {
            let mut pending = lock(&self.pending);
            let fits = |other: &Pending| rounded(other.block.bytes) == Ok(size);
            let own = |other: &Pending| other.point.queue == target.queue;
            let found = pending.iter().find(|(_, other)| fits(other) && own(other)).or_else(|| {
                // Work of another context never waits in this one's streams.
                let context = |other: &Pending| other.block.core == target.core.id;
                pending.iter().find(|(_, other)| waits && fits(other) && context(other))
            });
            let number = found.map(|(number, _)| *number)?;
            pending.remove(&number)?
        };
        if taken.point.queue != target.queue {
            process::scheduler().submit(target.queue, vec![taken.point], Work::Marker);
        }
        self.change(|numbers| numbers.used -= taken.block.bytes.next_multiple_of(ALIGNMENT));
        Some(taken.block)
    }

    /// The device is short of memory: waits for what is pending in the same stream, for which the new block would have
    /// to wait anyway, and has every pool give back what it does not use.
    fn make_room(&self, target: &Target) {
        let points: Vec<Point> = {
            let pending = lock(&self.pending);
            let points = pending.values().map(|pending| pending.point);
            points.filter(|point| point.queue == target.queue).collect()
        };
        for point in points {
            process::scheduler().wait(point);
        }
        for pool in self.gpu.all_pools() {
            pool.trim(0);
        }
    }

    /// `cuMemFreeAsync` of a block of this pool that was withdrawn.
    pub(crate) fn free_in_order(self: &Arc<Self>, target: &Target, block: Block) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let pool = Arc::clone(self);
        // The lock is held until the entry is there: the stream may come to the point at once.
        let mut pending = lock(&self.pending);
        let finish = Box::new(move |_| {
            // One step for whoever looks for memory: the block is pending, or it is the pool's again.
            let mut pending = lock(&pool.pending);
            let Some(done) = pending.remove(&number) else { return };
            pool.gpu.space.release(&done.block);
            drop(pending);
            pool.count_back(&done.block);
        });
        let point = process::scheduler().submit(target.queue, Vec::new(), Work::Callback(finish));
        pending.insert(number, Pending { point, block });
    }

    /// A block has come back; nothing uses it any more.
    pub(crate) fn take_back(&self, block: &Block) {
        self.gpu.space.release(block);
        self.count_back(block);
    }

    fn count_back(&self, block: &Block) {
        self.change(|numbers| numbers.used -= block.bytes.next_multiple_of(ALIGNMENT));
        self.gpu.loose.store(true, Ordering::Release);
        if self.ended.load(Ordering::Acquire) {
            self.trim(0);
        }
    }

    /// Gives unused pages back to the device until only so many bytes are left, as far as nothing runs that might look
    /// at them.
    pub(crate) fn trim(&self, keep: u64) {
        self.gpu.space.trim_pool(self.handle, keep);
        if self.ended.load(Ordering::Acquire) && lock(&self.pending).is_empty() && self.reserved() == 0 {
            lock(&self.gpu.pools).remove(&self.handle);
        }
    }
}

impl Gpu {
    /// Every pool that has memory or a handle.
    pub(crate) fn all_pools(&self) -> Vec<Arc<Pool>> {
        lock(&self.pools).values().cloned().collect()
    }

    /// The pool that `cuMemAllocAsync` takes from.
    pub(crate) fn pool(&'static self) -> Result<Arc<Pool>> {
        match self.current_pool.load(Ordering::Acquire) {
            0 => self.default_pool(),
            // It may just have been destroyed.
            handle => POOLS.get(handle).or_else(|_| self.default_pool()),
        }
    }

    /// The pool that the device has from the start.
    pub(crate) fn default_pool(&'static self) -> Result<Arc<Pool>> {
        let mut handle = lock(&self.default_pool);
        if *handle == 0 {
            *handle = Pool::create(self, 0, true)?.handle;
        }
        POOLS.get(*handle)
    }

    /// The program has synchronised: pools give back what is beyond their thresholds.
    pub(crate) fn trim_pools(&self) {
        if self.loose.swap(false, Ordering::AcqRel) {
            for pool in self.all_pools() {
                let keep = if pool.ended.load(Ordering::Acquire) { 0 } else { pool.numbers().threshold };
                pool.trim(keep);
                if pool.reserved() > keep.max(pool.numbers().used) {
                    // Something runs, or pages are held by a block: the next synchronisation looks again.
                    self.loose.store(true, Ordering::Release);
                }
            }
        }
    }

    /// Ends a block of a pool.
    pub(crate) fn return_to_pool(&self, block: &Block) {
        debug_assert_eq!(block.kind, BlockKind::Pool);
        let pool = lock(&self.pools).get(&block.pool).cloned();
        match pool {
            Some(pool) => pool.take_back(block),
            None => self.space.release(block),
        }
    }
}

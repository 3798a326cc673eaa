//! The visible GPUs: the identity of each, its addresses in this process, and its share of the processor.
//!
//! The start of the driver installs them; calls look up one or all. A GPU knows the queues of its living contexts, to wait for
//! them, and the blocks in its space, to free them; it does not know the contexts.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use softgpu_device::{Capability, Config, Has, Identity, MODELS};

use crate::error::{Error, Result};
use crate::lifetime;
use crate::lock::lock;
use crate::memory::{Block, BlockKind, Pools, Rates, Space};
use crate::queues::{Joint, Queues};
use crate::share::Share;
use crate::visible::Face;

static GPUS: OnceLock<Vec<&'static VisibleGpu>> = OnceLock::new();

/// Sets the visible GPUs. Called once, when the driver has started.
pub(crate) fn install(gpus: Vec<&'static VisibleGpu>) {
    // The driver starts once, so this cannot fail.
    let _ = GPUS.set(gpus);
}

/// The visible GPUs.
pub(crate) fn all() -> Result<&'static [&'static VisibleGpu]> {
    lifetime::check()?;
    GPUS.get().map(Vec::as_slice).ok_or(Error::NOT_INITIALIZED)
}

/// Waits for all work of this process on every GPU, before memory that all of them reach is freed.
pub(crate) fn drain_all() -> Result {
    all()?.iter().for_each(|gpu| gpu.drain());
    Ok(())
}

/// The visible GPUs, also while the process exits.
pub(crate) fn installed() -> impl Iterator<Item = &'static VisibleGpu> {
    GPUS.get().into_iter().flatten().copied()
}

/// Returns the GPU of an ordinal.
pub(crate) fn at(ordinal: i32) -> Result<&'static VisibleGpu> {
    let gpus = all()?;
    let index = usize::try_from(ordinal).map_err(|_| Error::INVALID_DEVICE)?;
    gpus.get(index).copied().ok_or(Error::INVALID_DEVICE)
}

/// The capability for which images are chosen: a library is loaded for all visible GPUs, so it is the lowest of theirs.
pub(crate) fn image_capability() -> &'static Capability {
    let visible = installed().map(|gpu| gpu.capability());
    visible.min_by_key(|capability| capability.sm()).unwrap_or(MODELS[0].capability)
}

/// A visible GPU. Lives as long as the process.
pub(crate) struct VisibleGpu {
    pub(crate) ordinal: i32,
    /// The board; `face` is the part that the program sees.
    pub(crate) identity: Identity,
    pub(crate) face: Face,
    /// True if the device reports that its memory corrects errors.
    pub(crate) ecc: bool,
    /// Time that a kernel may run.
    pub(crate) time_limit: Option<Duration>,
    /// Properties that it reports although it does not have them.
    pub(crate) has: Vec<Has>,
    pub(crate) space: &'static Space,
    pub(crate) pools: Pools,
    /// This process's share of the processor, for kernels.
    pub(crate) share: Share,
    /// Device memory that its contexts take.
    pub(crate) rates: Rates,
    /// The queues of living contexts, for calls that wait for the whole device.
    queues: Mutex<Vec<Arc<Queues>>>,
}

impl VisibleGpu {
    pub(crate) fn new(
        ordinal: i32,
        identity: Identity,
        face: Face,
        config: &Config,
        space: &'static Space,
        rates: Rates,
        cores: usize,
    ) -> VisibleGpu {
        let share = Share::new(Arc::clone(space.owner()), cores);
        VisibleGpu {
            ordinal,
            identity,
            face,
            ecc: config.ecc,
            time_limit: config.time_limit,
            has: config.has.clone(),
            space,
            pools: Pools::new(ordinal, space),
            share,
            rates,
            queues: Mutex::default(),
        }
    }

    /// Adds the queues of a new context.
    pub(crate) fn adopt(&self, queues: Arc<Queues>) {
        lock(&self.queues).push(queues);
    }

    /// Removes the queues of an ended context.
    pub(crate) fn disown(&self, queues: &Arc<Queues>) {
        lock(&self.queues).retain(|other| !Arc::ptr_eq(other, queues));
    }

    /// Waits for all work of this process that was submitted to the device so far.
    pub(crate) fn drain(&self) {
        let alive = lock(&self.queues).clone();
        for queues in alive {
            queues.drain();
        }
    }

    /// `cuMemFree` and similar calls: waits for work that may use the block, then frees it.
    pub(crate) fn free(&self, start: u64, kinds: &[BlockKind]) -> Result {
        let block = self.space.withdraw(start, kinds)?;
        self.drain();
        for peer in self.space.peers() {
            at(peer)?.drain();
        }
        self.release(&block)
    }

    /// True if a copy or a fill of this GPU may access a range: all of it is accessible and, in a heap, a part of one allocation.
    pub(crate) fn permits(&self, range: &Range<u64>, write: bool) -> Result<bool> {
        Ok(self.space.table.spans().covers(range, write)
            && all()?.iter().all(|gpu| gpu.space.keeps_to_a_block(range)))
    }

    /// Frees a withdrawn block; the last work that was submitted for it has ended.
    pub(crate) fn release(&self, block: &Block) -> Result {
        if block.is_host() {
            for other in self.others()? {
                other.space.table.remove(block.start);
                other.space.running.wait();
            }
        }
        if block.kind == BlockKind::Pool {
            self.pools.take_back(block);
        } else {
            self.space.release(block);
        }
        Ok(())
    }

    /// Makes host memory accessible to the other GPUs, as one address space requires.
    pub(crate) fn share_host(&self, start: u64, bytes: u64, write: bool) -> Result {
        for other in self.others()? {
            other.space.table.insert(start..start + bytes, true, write);
        }
        Ok(())
    }

    fn others(&self) -> Result<impl Iterator<Item = &'static VisibleGpu>> {
        let ordinal = self.ordinal;
        Ok(all()?.iter().copied().filter(move |other| other.ordinal != ordinal))
    }

    /// Frees everything that a context allocated; the context's own work has ended.
    pub(crate) fn free_all_of(&self, core: u64) {
        for block in self.space.withdraw_all_of(core) {
            // Fails only when the process exits: then no memory needs to be given back.
            let _ = self.release(&block);
        }
        self.pools.trim();
    }

    /// The block that contains an address.
    pub(crate) fn block_at(&self, address: u64) -> Option<Block> {
        self.space.block_at(address)
    }

    /// The compute capability, with the limits of a multiprocessor.
    pub(crate) fn capability(&self) -> &'static Capability {
        self.identity.model.capability
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.face.multiprocessors
    }

    /// PCI bus; domain and device are 0.
    pub(crate) fn pci_bus(&self) -> u32 {
        self.identity.index + 1
    }
}

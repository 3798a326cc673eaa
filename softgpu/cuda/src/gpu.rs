//! A visible GPU: its identity, its primary context, its addresses in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use softgpu_device::Identity;

use crate::context::{Context, Core, lock};
use crate::error::{Error, Result};
use crate::memory::{Block, BlockKind, Pool, Rates, Space};
use crate::process;
use crate::share::Share;
use crate::visible::Face;

/// The compute capability that every model reports, times 10.
pub(crate) const CAPABILITY: u32 = softgpu_device::CAPABILITY.0 * 10 + softgpu_device::CAPABILITY.1;
/// Limits of a multiprocessor of that capability.
pub(crate) const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 32;
pub(crate) const REGISTERS_PER_MULTIPROCESSOR: u32 = 65_536;
pub(crate) const SHARED_PER_MULTIPROCESSOR: u32 = 164 << 10;
/// Shared memory that the system takes of each block.
pub(crate) const SHARED_RESERVED: u32 = 1 << 10;
/// Shared memory of a block that did not ask for more, and the most it may ask for.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;
pub(crate) const SHARED_PER_BLOCK_OPTIN: u32 = 163 << 10;
pub(crate) const WARP: u32 = 32;

/// See the module. Lives as long as the process.
pub(crate) struct Gpu {
    pub(crate) ordinal: i32,
    /// The board; what the program sees of it is in `face`.
    pub(crate) identity: Identity,
    pub(crate) face: Face,
    /// Whether its memory is said to correct errors.
    pub(crate) ecc: bool,
    pub(crate) space: Space,
    /// This process's part of the processor, for kernels.
    pub(crate) share: Share,
    /// How much device memory its contexts take.
    pub(crate) rates: Rates,
    primary: OnceLock<Arc<Context>>,
    /// Flags that the primary context gets when it comes to life.
    pub(crate) primary_flags: AtomicU32,
    /// Pools with a handle or with memory, by their handles.
    pub(crate) pools: Mutex<BTreeMap<u64, Arc<Pool>>>,
    /// The handle of the first one, made when it is first asked for.
    pub(crate) default_pool: Mutex<u64>,
    /// The handle of the one that allocations without a pool use; 0 is the default one.
    pub(crate) current_pool: AtomicU64,
    /// Blocks have come back to pools since a synchronisation looked at them.
    pub(crate) loose: AtomicBool,
    /// Contexts that are alive, for calls that wait for the whole device.
    cores: Mutex<Vec<Arc<Core>>>,
}

impl Gpu {
    pub(crate) fn new(
        ordinal: i32,
        identity: Identity,
        face: Face,
        ecc: bool,
        space: Space,
        rates: Rates,
        cores: usize,
    ) -> Gpu {
        let share = Share::new(Arc::clone(space.owner()), cores);
        Gpu {
            ordinal,
            identity,
            face,
            ecc,
            space,
            share,
            rates,
            primary: OnceLock::new(),
            primary_flags: AtomicU32::new(0),
            pools: Mutex::default(),
            default_pool: Mutex::new(0),
            current_pool: AtomicU64::new(0),
            loose: AtomicBool::new(false),
            cores: Mutex::default(),
        }
    }

    /// Registers the primary context, which is not alive yet. Once, when the driver starts.
    pub(crate) fn prepare(&'static self) -> Result {
        let context = Context::register(self, 0, PRIMARY_VERSION)?;
        // The driver starts once, so there is no other.
        let _ = self.primary.set(context);
        Ok(())
    }

    /// The primary context.
    pub(crate) fn primary(&self) -> &Arc<Context> {
        self.primary.get().expect("the driver registers it before it hands out the GPU")
    }

    /// Takes note of a context that has come to life.
    pub(crate) fn adopt(&self, core: Arc<Core>) {
        lock(&self.cores).push(core);
    }

    /// Waits for all work of this process on the device that was submitted so far.
    pub(crate) fn drain(&self) {
        let cores = lock(&self.cores).clone();
        for core in cores {
            core.drain(process::scheduler());
        }
    }

    /// `cuMemFree` and its like: waits for what may use the block, then ends it.
    pub(crate) fn free(&self, start: u64, kinds: &[BlockKind]) -> Result {
        let block = self.space.withdraw(start, kinds)?;
        self.drain();
        self.release(&block)
    }

    /// Ends a block that was withdrawn; the last work that was submitted for it has ended.
    fn release(&self, block: &Block) -> Result {
        if block.is_host() {
            for other in self.others()? {
                other.space.table.remove(block.start);
                other.space.running.wait();
            }
        }
        if block.kind == BlockKind::Pool {
            self.return_to_pool(block);
        } else {
            self.space.release(block);
        }
        Ok(())
    }

    /// Makes host memory accessible to the other GPUs, too: with one address space, it always is.
    pub(crate) fn share_host(&self, start: u64, bytes: u64, write: bool) -> Result {
        for other in self.others()? {
            other.space.table.insert(start..start + bytes, true, write);
        }
        Ok(())
    }

    fn others(&self) -> Result<impl Iterator<Item = &'static Gpu>> {
        let ordinal = self.ordinal;
        Ok(process::driver()?.gpus().iter().copied().filter(move |other| other.ordinal != ordinal))
    }

    /// Ends everything that a context allocated; its own work has ended.
    pub(crate) fn free_all_of(&self, core: u64) {
        lock(&self.cores).retain(|other| other.id != core);
        for block in self.space.withdraw_all_of(core) {
            // Fails only when the process is ending: then nothing has to be given back.
            let _ = self.release(&block);
        }
        self.trim_pools();
    }

    /// The block that a pointer points into.
    pub(crate) fn block_at(&self, address: u64) -> Option<Block> {
        self.space.block_at(address)
    }

    /// Multiprocessors.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.face.multiprocessors
    }

    /// PCI bus; domain and device are 0.
    pub(crate) fn pci_bus(&self) -> u32 {
        self.identity.index + 1
    }

    /// Retains the primary context; the first retain brings it to life.
    pub(crate) fn retain_primary(&self) -> Result<Arc<Context>> {
        let context = self.primary();
        let mut retained = lock(&context.retained);
        if !context.is_active() {
            self.adopt(context.activate()?);
            context.flags.store(self.primary_flags.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        *retained += 1;
        Ok(Arc::clone(context))
    }

    /// Releases the primary context; the last release ends it.
    pub(crate) fn release_primary(&self) -> Result {
        let context = self.primary();
        let mut retained = lock(&context.retained);
        *retained = retained.checked_sub(1).ok_or(Error::INVALID_CONTEXT)?;
        if *retained == 0 {
            context.deactivate();
        }
        Ok(())
    }

    /// Ends the primary context whoever retains it.
    pub(crate) fn reset_primary(&self) {
        let context = self.primary();
        let mut retained = lock(&context.retained);
        *retained = 0;
        context.deactivate();
        self.primary_flags.store(0, Ordering::Relaxed);
    }
}

/// What `cuCtxGetApiVersion` answers for primary contexts.
const PRIMARY_VERSION: u32 = 3020;

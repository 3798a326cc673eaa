//! The book of a GPU's addresses in this process, and the heap behind `cuMemAlloc`.
//!
//! Small blocks share 2 MiB chunks; large ones have pages of their own. A chunk goes back to the device with its last
//! block. Addresses are handed out upwards through one window and not used again until it wraps, so that a stale
//! pointer does not soon point at something else.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use softgpu_device::{Allocation, MemoryPolicy, Owner, PAGE_BYTES, Reservation, Use};

use sluice_cuda_abi::managed::Advised;

use super::arena::Arena;
use super::host;
use super::ipc::Opened;
use super::virtual_memory::{Mapping, map, unmap};
use super::{ALIGNMENT, Block, BlockKind, HostFlags, Pool, Running, Table};
use crate::context::{Core, lock};
use crate::error::{Error, Result};
use crate::log::log;

/// Blocks up to this size share chunks.
const SMALL: u64 = PAGE_BYTES / 2;

/// Pages mapped in the window for the heap.
struct Chunk {
    /// Its pages; they go back with the chunk.
    pages: Arc<Allocation>,
    bytes: u64,
    /// How it is carved; `None` for a block of its own.
    arena: Option<Arena>,
    home: Home,
}

/// Whose blocks a chunk holds. They never share one, so that each can be accounted for, and a pool's pages are its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// The program's.
    Heap,
    /// The driver's own.
    Driver,
    /// Those of the pool with this handle.
    Pool(u64),
    /// Another process's.
    Imported,
}

/// Reserved addresses of the program.
pub(super) struct Reserved {
    pub(super) reservation: Reservation,
}

pub(super) struct Book {
    pub(super) blocks: BTreeMap<u64, Block>,
    chunks: BTreeMap<u64, Chunk>,
    window: Reservation,
    /// Where the next chunk goes, if it is free.
    next: u64,
    pub(super) reserved: BTreeMap<u64, Reserved>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// What the program said of managed memory.
    pub(super) advised: Advised,
    /// Names of other processes' memory, by the blocks they were opened as.
    pub(super) opened: BTreeMap<u64, Opened>,
}

/// See the module.
pub(crate) struct Space {
    pub(super) owner: Arc<Owner>,
    policy: MemoryPolicy,
    pub(super) book: Mutex<Book>,
    pub(crate) table: Table,
    pub(crate) running: Running,
    ids: AtomicU64,
}

impl Space {
    /// The addresses of one GPU, with a window for its heap.
    pub(crate) fn new(owner: Arc<Owner>, window: Reservation, policy: MemoryPolicy) -> Space {
        let next = window.address();
        let book = Book {
            blocks: BTreeMap::new(),
            chunks: BTreeMap::new(),
            window,
            next,
            reserved: BTreeMap::new(),
            mappings: BTreeMap::new(),
            advised: Advised::default(),
            opened: BTreeMap::new(),
        };
        Space {
            owner,
            policy,
            book: Mutex::new(book),
            table: Table::default(),
            running: Running::default(),
            ids: AtomicU64::new(1),
        }
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// `cuMemAlloc`: the contents are what somebody left there.
    pub(crate) fn allocate(&self, core: &Core, bytes: u64, kind: BlockKind) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)?;
        let home = if kind == BlockKind::Internal { Home::Driver } else { Home::Heap };
        let mut book = lock(&self.book);
        let start = if rounded <= SMALL {
            match book.carve(rounded, home) {
                Some(start) => start,
                None => {
                    self.add_chunk(&mut book, PAGE_BYTES, true, home)?;
                    book.carve(rounded, home).ok_or(Error::OUT_OF_MEMORY)?
                }
            }
        } else {
            let pages = rounded.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
            self.add_chunk(&mut book, pages, false, home)?
        };
        self.enter(&mut book, core, Block { bytes, ..self.block(start, kind) });
        Ok(start)
    }

    /// A block that is nobody's yet.
    pub(super) fn block(&self, start: u64, kind: BlockKind) -> Block {
        Block { start, bytes: 0, kind, core: 0, context: 0, flags: 0, pool: 0, id: self.next_id() }
    }

    /// Enters a block of device memory for a context.
    pub(super) fn enter(&self, book: &mut Book, core: &Core, block: Block) {
        if self.policy == MemoryPolicy::Strict {
            self.table.insert(block.range(), true, true);
        }
        book.blocks.insert(block.start, Block { core: core.id, context: core.handle, ..block });
    }

    /// `cuMemAllocAsync`: a block in pages of a pool, which gets more where it needs them.
    pub(super) fn allocate_in_pool(&self, core: &Core, bytes: u64, pool: &Pool) -> Result<u64> {
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)?;
        let home = Home::Pool(pool.handle);
        let mut book = lock(&self.book);
        let start = match book.carve(rounded, home) {
            Some(start) => start,
            None => {
                let more = rounded.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
                let total = book.bytes_of(home).saturating_add(more);
                if pool.max_bytes != 0 && total > pool.max_bytes {
                    return Err(Error::OUT_OF_MEMORY);
                }
                self.add_chunk(&mut book, more, true, home)?;
                book.carve(rounded, home).ok_or(Error::OUT_OF_MEMORY)?
            }
        };
        let block = Block { bytes, pool: pool.handle, ..self.block(start, BlockKind::Pool) };
        self.enter(&mut book, core, block);
        Ok(start)
    }

    /// A block of a pool that was freed in a stream becomes another one of the same size.
    pub(super) fn adopt_pool_block(&self, core: &Core, old: &Block, bytes: u64) {
        if self.policy == MemoryPolicy::Strict {
            self.table.remove(old.start);
        }
        let block = Block { bytes, pool: old.pool, ..self.block(old.start, BlockKind::Pool) };
        self.enter(&mut lock(&self.book), core, block);
    }

    /// Bytes of the device that a pool has.
    pub(super) fn pool_bytes(&self, pool: u64) -> u64 {
        lock(&self.book).bytes_of(Home::Pool(pool))
    }

    /// Gives pages of a pool without a block back to the device, down to `keep` bytes; none while something runs.
    pub(super) fn trim_pool(&self, pool: u64, keep: u64) {
        let home = Home::Pool(pool);
        let mut book = lock(&self.book);
        let mut left = book.bytes_of(home);
        let unused = |chunk: &&Chunk| chunk.home == home && chunk.arena.as_ref().is_some_and(Arena::is_empty);
        let starts: Vec<u64> =
            book.chunks.iter().filter(|(_, chunk)| unused(chunk)).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(bytes) = book.chunks.get(&start).map(|chunk| chunk.bytes) else { continue };
            if left - bytes < keep {
                continue;
            }
            let whole = self.policy == MemoryPolicy::Mmu;
            if whole {
                self.table.remove(start);
            }
            // What starts from now on does not find the pages; what runs may have found them.
            if !self.running.is_idle() {
                if whole {
                    self.table.insert(start..start + bytes, true, true);
                }
                return;
            }
            unmap(start, bytes);
            book.chunks.remove(&start);
            left -= bytes;
        }
    }

    fn add_chunk(&self, book: &mut Book, bytes: u64, shared: bool, home: Home) -> Result<u64> {
        let purpose = if home == Home::Driver { Use::Driver } else { Use::Heap };
        let pages = self.owner.allocate(bytes, purpose).map_err(|error| {
            log!("{error}");
            Error::OUT_OF_MEMORY
        })?;
        self.place(book, pages, shared, home)
    }

    /// Maps pages in the window.
    pub(super) fn place(
        &self,
        book: &mut Book,
        pages: Arc<Allocation>,
        shared: bool,
        home: Home,
    ) -> Result<u64> {
        let bytes = pages.bytes();
        let start = book.free_window(bytes).ok_or(Error::OUT_OF_MEMORY)?;
        map(start, &pages, 0, bytes)?;
        let arena = shared.then(|| Arena::new(bytes));
        book.chunks.insert(start, Chunk { pages, bytes, arena, home });
        if self.policy == MemoryPolicy::Mmu {
            self.table.insert(start..start + bytes, true, true);
        }
        Ok(start)
    }

    /// Takes a block of one of these kinds out of the book; its memory stays accessible until [`Space::release`].
    pub(crate) fn withdraw(&self, start: u64, kinds: &[BlockKind]) -> Result<Block> {
        let mut book = lock(&self.book);
        match book.blocks.get(&start) {
            Some(block) if kinds.contains(&block.kind) => {
                let block = *block;
                book.blocks.remove(&start);
                Ok(block)
            }
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Ends a block that was withdrawn, once nothing that runs can use it.
    pub(crate) fn release(&self, block: &Block) {
        match block.kind {
            BlockKind::Device | BlockKind::Internal | BlockKind::Pool | BlockKind::Imported => {
                self.release_device(block);
            }
            BlockKind::Host | BlockKind::Managed => {
                lock(&self.book).advised.forget(&block.range());
                self.table.remove(block.start);
                self.running.wait();
                host::release(block);
            }
            BlockKind::Registered => {
                self.table.remove(block.start);
                self.running.wait();
            }
        }
    }

    fn release_device(&self, block: &Block) {
        let rounded = block.bytes.next_multiple_of(ALIGNMENT);
        let strict = self.policy == MemoryPolicy::Strict;
        if strict {
            self.table.remove(block.start);
        }
        let mut book = lock(&self.book);
        let Some((start, chunk)) = book.chunks.range_mut(..=block.start).next_back() else { return };
        let start = *start;
        if let Some(arena) = &mut chunk.arena {
            arena.give(block.start - start, rounded);
            if !arena.is_empty() || matches!(chunk.home, Home::Pool(_)) {
                return;
            }
        }
        let Some(chunk) = book.chunks.remove(&start) else { return };
        if !strict {
            self.table.remove(start);
        }
        // Nobody can be given these addresses while they are still in the window's way.
        let bytes = chunk.bytes;
        let ending = Chunk { pages: Arc::clone(&chunk.pages), bytes, arena: None, home: chunk.home };
        book.chunks.insert(start, ending);
        drop(book);
        self.running.wait();
        unmap(start, bytes);
        lock(&self.book).chunks.remove(&start);
        drop(chunk);
    }

    /// Pinned host memory.
    pub(crate) fn allocate_host(&self, core: &Core, bytes: u64, flags: HostFlags) -> Result<u64> {
        let start = host::allocate(bytes)?;
        self.add_host(core, start, bytes, flags.0, BlockKind::Host, true);
        Ok(start)
    }

    /// Host memory of the program becomes accessible for the device. The caller has asked every GPU's book whether the
    /// range is new.
    pub(crate) fn register_host(&self, core: &Core, start: u64, bytes: u64, flags: HostFlags) -> Result {
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        host::check(start, bytes)?;
        self.add_host(core, start, bytes, flags.0, BlockKind::Registered, flags.may_write());
        Ok(())
    }

    /// Managed memory: memory of the host that every GPU reaches.
    pub(crate) fn allocate_managed(&self, core: &Core, bytes: u64, flags: u32) -> Result<u64> {
        let start = host::allocate(bytes)?;
        self.add_host(core, start, bytes, flags, BlockKind::Managed, true);
        Ok(start)
    }

    fn add_host(&self, core: &Core, start: u64, bytes: u64, flags: u32, kind: BlockKind, write: bool) {
        let (context, core) = (core.handle, core.id);
        let block = Block { bytes, core, context, flags, ..self.block(start, kind) };
        let mut book = lock(&self.book);
        book.blocks.insert(start, block);
        self.table.insert(start..start + bytes, true, write);
    }

    /// The block that an address lies in.
    pub(crate) fn block_at(&self, address: u64) -> Option<Block> {
        let book = lock(&self.book);
        let (_, block) = book.blocks.range(..=address).next_back()?;
        block.range().contains(&address).then_some(*block)
    }

    /// Whether anything of a range belongs to the device, accessible or not: then it is not pageable host memory.
    pub(crate) fn is_device_range(&self, range: &Range<u64>) -> bool {
        lock(&self.book).is_device_range(range)
    }

    /// Whether a block lies in a range.
    pub(crate) fn overlaps_block(&self, range: &Range<u64>) -> bool {
        lock(&self.book).overlaps_block(range)
    }

    /// Takes every block of a context out of the book, for [`Space::release`].
    pub(crate) fn withdraw_all_of(&self, core: u64) -> Vec<Block> {
        let mut book = lock(&self.book);
        let blocks: Vec<Block> = book.blocks.values().filter(|block| block.core == core).copied().collect();
        for block in &blocks {
            book.blocks.remove(&block.start);
            if block.kind == BlockKind::Imported {
                book.opened.remove(&block.start);
            }
        }
        blocks
    }

    /// Free and total bytes of the device, as the living leave it.
    pub(crate) fn information(&self) -> (u64, u64) {
        let device = self.owner.device();
        device.collect();
        (self.owner.free_bytes(), self.owner.total_bytes())
    }

    /// Bytes of the device.
    pub(crate) fn total(&self) -> u64 {
        self.owner.total_bytes()
    }

    /// The owner of this process's memory.
    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }
}

impl Book {
    /// Pages of one home, in bytes.
    fn bytes_of(&self, home: Home) -> u64 {
        self.chunks.values().filter(|chunk| chunk.home == home).map(|chunk| chunk.bytes).sum()
    }

    /// The pages that an address lies in, and where they start.
    pub(super) fn pages_at(&self, address: u64) -> Option<(u64, &Arc<Allocation>)> {
        let (start, chunk) = self.chunks.range(..=address).next_back()?;
        (address < start + chunk.bytes).then_some((*start, &chunk.pages))
    }

    /// Whether the program's own heap has pages of that allocation.
    pub(super) fn has_own_pages(&self, name: (u32, u32)) -> bool {
        let mut own = self.chunks.values().filter(|chunk| chunk.home != Home::Imported);
        own.any(|chunk| chunk.pages.name() == name)
    }

    fn carve(&mut self, bytes: u64, home: Home) -> Option<u64> {
        let mut chunks = self.chunks.iter_mut().filter(|(_, chunk)| chunk.home == home);
        chunks.find_map(|(start, chunk)| Some(start + chunk.arena.as_mut()?.take(bytes)?))
    }

    /// Free addresses in the window, upwards from the last ones.
    fn free_window(&mut self, bytes: u64) -> Option<u64> {
        let (first, end) = (self.window.address(), self.window.address() + self.window.bytes());
        for start in [self.next, first] {
            let mut at = start;
            let chunks = self.chunks.range(..start).next_back().into_iter().chain(self.chunks.range(start..));
            for (other, chunk) in chunks {
                if at + bytes <= *other {
                    break;
                }
                at = at.max(other + chunk.bytes);
            }
            if at + bytes <= end {
                self.next = at + bytes;
                return Some(at);
            }
        }
        None
    }

    fn overlaps_block(&self, range: &Range<u64>) -> bool {
        let before = self.blocks.range(..range.end).next_back();
        before.is_some_and(|(_, block)| block.range().end > range.start)
    }

    fn is_device_range(&self, range: &Range<u64>) -> bool {
        let overlaps = |start: u64, bytes: u64| start < range.end && range.start < start + bytes;
        let reserved = self.reserved.range(..range.end).next_back();
        overlaps(self.window.address(), self.window.bytes())
            || reserved.is_some_and(|(start, entry)| overlaps(*start, entry.reservation.bytes()))
    }
}

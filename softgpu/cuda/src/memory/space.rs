//! The addresses of a GPU in this process, and the heap behind `cuMemAlloc`.
//!
//! Small blocks share 2 MiB chunks; large ones have pages of their own. A chunk goes back to the device with its last block.
//! Addresses are assigned upwards through one window and not used again until it wraps, so that a stale pointer does not soon
//! point at another block.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use sluice_cuda_frontend::managed::ATTACH_GLOBAL;
use softgpu_device::{Allocation, Lack, MemoryPolicy, Owner, PAGE_BYTES, Reservation, Use};

use super::arena::FirstFit;
use super::book::{Book, HeapChunk, Home, Peer};
use super::host;
use super::pages::{map, unmap};
use super::{ALIGNMENT, Block, BlockKind, HostFlags, Maker, MappingTable, Running};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log;

/// Blocks up to this size share chunks.
const SMALL: u64 = PAGE_BYTES / 2;

/// The addresses of one GPU.
pub(crate) struct Space {
    pub(super) owner: Arc<Owner>,
    policy: MemoryPolicy,
    lacks: Vec<Lack>,
    pub(super) book: Mutex<Book>,
    /// The GPUs that have access to memory of this one.
    pub(super) peers: Mutex<Vec<Peer>>,
    pub(crate) table: MappingTable,
    pub(crate) running: Running,
    ids: AtomicU64,
}

impl Space {
    /// Creates the space of one GPU, with a window for its heap.
    pub(crate) fn new(owner: Arc<Owner>, window: Reservation, policy: MemoryPolicy, lacks: &[Lack]) -> Space {
        Space {
            owner,
            policy,
            lacks: lacks.to_vec(),
            book: Mutex::new(Book::new(window)),
            peers: Mutex::default(),
            table: MappingTable::default(),
            running: Running::default(),
            ids: AtomicU64::new(1),
        }
    }

    pub(crate) fn lacks(&self, ability: Lack) -> bool {
        self.lacks.contains(&ability)
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// `cuMemAlloc`: the memory keeps the content of its last owner.
    pub(crate) fn allocate(&self, maker: Maker, bytes: u64, kind: BlockKind) -> Result<u64> {
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
        self.enter(&mut book, maker, Block { bytes, ..self.block(start, kind) });
        Ok(start)
    }

    /// Creates a block without an owner.
    pub(super) fn block(&self, start: u64, kind: BlockKind) -> Block {
        Block {
            start,
            bytes: 0,
            kind,
            maker: Maker::default(),
            flags: 0,
            pool: 0,
            aside: 0,
            id: self.next_id(),
        }
    }

    /// Enters a block of device memory for a context.
    pub(super) fn enter(&self, book: &mut Book, maker: Maker, block: Block) {
        if self.policy == MemoryPolicy::Strict {
            self.show(Home::of(&block), block.range());
        }
        book.blocks.insert(block.start, Block { maker, ..block });
    }

    /// `cuMemAllocAsync`: allocates in pages of a pool, which gets more if needed, up to `max_bytes` if that is not 0.
    pub(super) fn allocate_in_pool(
        &self,
        maker: Maker,
        bytes: u64,
        pool: u64,
        max_bytes: u64,
    ) -> Result<u64> {
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)?;
        let home = Home::Pool(pool);
        let mut book = lock(&self.book);
        let start = match book.carve(rounded, home) {
            Some(start) => start,
            None => {
                let more = rounded.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
                let total = book.bytes_of(home).saturating_add(more);
                if max_bytes != 0 && total > max_bytes {
                    return Err(Error::OUT_OF_MEMORY);
                }
                self.add_chunk(&mut book, more, true, home)?;
                book.carve(rounded, home).ok_or(Error::OUT_OF_MEMORY)?
            }
        };
        let block = Block { bytes, pool, ..self.block(start, BlockKind::Pool) };
        self.enter(&mut book, maker, block);
        Ok(start)
    }

    /// Reuses a block that was freed in a stream for a block of the same size.
    pub(super) fn adopt_pool_block(&self, maker: Maker, old: &Block, bytes: u64) {
        if self.policy == MemoryPolicy::Strict {
            self.hide(Home::of(old), old.start);
        }
        let block = Block { bytes, pool: old.pool, ..self.block(old.start, BlockKind::Pool) };
        self.enter(&mut lock(&self.book), maker, block);
    }

    /// Returns the bytes of the device that a pool has.
    pub(super) fn pool_bytes(&self, pool: u64) -> u64 {
        lock(&self.book).bytes_of(Home::Pool(pool))
    }

    /// Gives pages of a pool without a block back to the device, down to `keep` bytes; none while an operation executes.
    pub(super) fn trim_pool(&self, pool: u64, keep: u64) {
        let home = Home::Pool(pool);
        let mut book = lock(&self.book);
        let mut left = book.bytes_of(home);
        let unused =
            |chunk: &&HeapChunk| chunk.home == home && chunk.arena.as_ref().is_some_and(FirstFit::is_empty);
        let starts: Vec<u64> =
            book.chunks.iter().filter(|(_, chunk)| unused(chunk)).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(bytes) = book.chunks.get(&start).map(|chunk| chunk.bytes) else { continue };
            if left - bytes < keep {
                continue;
            }
            let whole = self.policy == MemoryPolicy::Mmu;
            if whole {
                self.hide(home, start);
            }
            // Operations that start later cannot find the pages; running ones may have found them.
            if !self.is_unused(home) {
                if whole {
                    self.show(home, start..start + bytes);
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
        let arena = shared.then(|| FirstFit::new(bytes));
        book.chunks.insert(start, HeapChunk { pages, bytes, arena, home });
        if self.policy == MemoryPolicy::Mmu {
            self.show(home, start..start + bytes);
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

    /// Frees a withdrawn block, once no running operation can use it.
    pub(crate) fn release(&self, block: &Block) {
        match block.kind {
            BlockKind::Device
            | BlockKind::Internal
            | BlockKind::Pool
            | BlockKind::Imported
            | BlockKind::Aside => {
                self.release_device(block);
            }
            BlockKind::Host | BlockKind::Managed | BlockKind::Variable => {
                lock(&self.book).advised.forget(&block.range());
                self.table.remove(block.start);
                self.running.wait();
                host::release(block);
                self.give_aside(block.aside);
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
            self.hide(Home::of(block), block.start);
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
            self.hide(chunk.home, start);
        }
        // An entry keeps the addresses occupied until they are unmapped, so that no new block gets them.
        let bytes = chunk.bytes;
        let ending = HeapChunk { pages: Arc::clone(&chunk.pages), bytes, arena: None, home: chunk.home };
        book.chunks.insert(start, ending);
        drop(book);
        self.wait_for_users(chunk.home);
        unmap(start, bytes);
        lock(&self.book).chunks.remove(&start);
        drop(chunk);
    }

    /// Allocates pinned host memory.
    pub(crate) fn allocate_host(&self, maker: Maker, bytes: u64, flags: HostFlags) -> Result<u64> {
        let start = host::allocate(bytes)?;
        self.add_host(maker, start, bytes, flags.0, BlockKind::Host, true);
        Ok(start)
    }

    /// Makes host memory of the program accessible for the device. The caller has checked in every GPU's book that the range is
    /// new.
    pub(crate) fn register_host(&self, maker: Maker, start: u64, bytes: u64, flags: HostFlags) -> Result {
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        if self.lacks(Lack::Registration) {
            return Err(Error::OPERATING_SYSTEM);
        }
        host::check(start, bytes)?;
        self.add_host(maker, start, bytes, flags.0, BlockKind::Registered, flags.may_write());
        Ok(())
    }

    /// Allocates managed memory: host memory that every GPU can access. As on hardware that does not migrate it, memory of the device is
    /// taken for it.
    pub(crate) fn allocate_managed(&self, maker: Maker, bytes: u64, flags: u32) -> Result<u64> {
        self.add_managed(maker, bytes, flags, BlockKind::Managed)
    }

    /// Allocates memory for a managed variable.
    pub(crate) fn allocate_variable(&self, maker: Maker, bytes: u64) -> Result<u64> {
        self.add_managed(maker, bytes, ATTACH_GLOBAL, BlockKind::Variable)
    }

    fn add_managed(&self, maker: Maker, bytes: u64, flags: u32, kind: BlockKind) -> Result<u64> {
        let aside = self.allocate(maker, bytes, BlockKind::Aside)?;
        let start = host::allocate(bytes).inspect_err(|_| self.give_aside(aside))?;
        let block = Block { bytes, maker, flags, aside, ..self.block(start, kind) };
        self.enter_host(block, true);
        Ok(start)
    }

    /// Gives device memory back that was set aside. If its context ends, it may be gone already.
    fn give_aside(&self, start: u64) {
        if let Ok(block) = self.withdraw(start, &[BlockKind::Aside]) {
            self.release_device(&block);
        }
    }

    fn add_host(&self, maker: Maker, start: u64, bytes: u64, flags: u32, kind: BlockKind, write: bool) {
        self.enter_host(Block { bytes, maker, flags, ..self.block(start, kind) }, write);
    }

    fn enter_host(&self, block: Block, write: bool) {
        let mut book = lock(&self.book);
        self.table.insert(block.range(), true, write);
        book.blocks.insert(block.start, block);
    }

    /// Returns the block that contains an address.
    pub(crate) fn block_at(&self, address: u64) -> Option<Block> {
        let book = lock(&self.book);
        let (_, block) = book.blocks.range(..=address).next_back()?;
        block.range().contains(&address).then_some(*block)
    }

    /// True if any part of a range belongs to the device, accessible or not: then it is not pageable host memory.
    pub(crate) fn is_device_range(&self, range: &Range<u64>) -> bool {
        lock(&self.book).is_device_range(range)
    }

    /// False for a range that begins in the heap of this GPU and is not a part of one allocation there.
    pub(crate) fn keeps_to_a_block(&self, range: &Range<u64>) -> bool {
        range.is_empty() || lock(&self.book).keeps_to_a_block(range)
    }

    /// The kind of the last block in a range, or partly in it.
    pub(crate) fn kind_within(&self, range: &Range<u64>) -> Option<BlockKind> {
        lock(&self.book).kind_within(range)
    }

    /// Takes every block of a context out of the book, for [`Space::release`].
    pub(crate) fn withdraw_all_of(&self, core: u64) -> Vec<Block> {
        let mut book = lock(&self.book);
        let blocks: Vec<Block> =
            book.blocks.values().filter(|block| block.maker.core == core).copied().collect();
        for block in &blocks {
            book.blocks.remove(&block.start);
            if block.kind == BlockKind::Imported {
                book.opened.remove(&block.start);
            }
        }
        blocks
    }

    /// Returns the free and total bytes of the device, after collecting the memory of dead processes.
    pub(crate) fn information(&self) -> (u64, u64) {
        let device = self.owner.device();
        device.collect();
        (self.owner.free_bytes(), self.owner.total_bytes())
    }

    /// Returns the bytes of the device.
    pub(crate) fn total(&self) -> u64 {
        self.owner.total_bytes()
    }

    /// Returns the owner of this process's memory.
    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }
}

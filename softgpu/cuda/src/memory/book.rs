//! The book of a GPU's addresses in this process: blocks, the chunks that hold them, reservations, mappings, advice, and opened
//! IPC names.
//!
//! [`Space`](super::Space) keeps it under its lock. A book allocates and finds blocks; it maps nothing and waits for nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use sluice_cuda_frontend::managed::Advised;
use softgpu_device::{Allocation, Reservation};

use super::arena::FirstFit;
use super::{Block, BlockKind, MappingTable, Name, Running};

/// Pages mapped in the window for the heap.
pub(super) struct HeapChunk {
    /// The pages; they go back with the chunk.
    pub(super) pages: Arc<Allocation>,
    pub(super) bytes: u64,
    /// The allocator of its blocks; `None` for a chunk with a single block.
    pub(super) arena: Option<FirstFit>,
    pub(super) home: Home,
}

/// The owner of the blocks in a chunk. Owners never share a chunk, so that each is accounted for and a pool has pages of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// The program.
    Heap,
    /// The driver itself.
    Driver,
    /// The pool with this handle.
    Pool(u64),
    /// Another process.
    Imported,
}

/// Memory whose access is given as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// That of all contexts, without pools.
    Contexts,
    /// That of the pool with this handle.
    Pool(u64),
    /// That of other processes.
    Opened,
}

impl Home {
    /// The owner of a block.
    pub(super) fn of(block: &Block) -> Home {
        match block.kind {
            BlockKind::Pool => Home::Pool(block.pool),
            BlockKind::Imported => Home::Imported,
            BlockKind::Internal => Home::Driver,
            _ => Home::Heap,
        }
    }

    /// The scope of the access to its memory.
    pub(super) fn scope(self) -> Scope {
        match self {
            Home::Heap | Home::Driver => Scope::Contexts,
            Home::Pool(pool) => Scope::Pool(pool),
            Home::Imported => Scope::Opened,
        }
    }
}

/// A GPU that has access to memory of another, or had it when an operation began that still runs.
#[derive(Clone, Copy)]
pub(super) struct Peer {
    pub(super) scope: Scope,
    pub(super) ordinal: i32,
    pub(super) table: &'static MappingTable,
    pub(super) running: &'static Running,
    /// 0 none, 1 read, 3 read and write. Operations that run may have more.
    pub(super) access: u32,
}

impl Peer {
    /// True for the GPU of an ordinal while it has access to memory of a scope.
    pub(super) fn has_access(&self, scope: Scope, ordinal: i32) -> bool {
        (self.scope, self.ordinal) == (scope, ordinal) && self.access != 0
    }
}

/// Reserved addresses of the program.
pub(super) struct Reserved {
    pub(super) reservation: Reservation,
}

/// Pages in a reservation.
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) allocation: Arc<Allocation>,
    pub(super) handle: u64,
    pub(super) device: i32,
    pub(super) shareable: u32,
    /// By the ordinals of devices: 1 read, 3 read and write; no entry means no access.
    pub(super) access: BTreeMap<i32, u32>,
    pub(super) id: u64,
    /// True while the mapping is unmapped and running work is waited for: no call may give it access again.
    pub(super) ending: bool,
}

impl Mapping {
    pub(super) fn access_of(&self, ordinal: i32) -> u32 {
        self.access.get(&ordinal).copied().unwrap_or(0)
    }
}

/// An IPC name that this process has opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) name: Name,
    pub(super) count: u64,
}

/// The bookkeeping of one GPU.
pub(super) struct Book {
    pub(super) blocks: BTreeMap<u64, Block>,
    pub(super) chunks: BTreeMap<u64, HeapChunk>,
    window: Reservation,
    /// Address of the next chunk, if it is free.
    next: u64,
    pub(super) reserved: BTreeMap<u64, Reserved>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// The program's advice about managed memory.
    pub(super) advised: Advised,
    /// Opened IPC names of other processes' memory, by the address of their block.
    pub(super) opened: BTreeMap<u64, Opened>,
}

impl Book {
    /// Creates an empty book, with a window for the heap.
    pub(super) fn new(window: Reservation) -> Book {
        Book {
            next: window.address(),
            blocks: BTreeMap::new(),
            chunks: BTreeMap::new(),
            window,
            reserved: BTreeMap::new(),
            mappings: BTreeMap::new(),
            advised: Advised::default(),
            opened: BTreeMap::new(),
        }
    }

    /// Returns the bytes of all pages of one owner.
    pub(super) fn bytes_of(&self, home: Home) -> u64 {
        self.chunks.values().filter(|chunk| chunk.home == home).map(|chunk| chunk.bytes).sum()
    }

    /// Returns the start and the pages that contain an address.
    pub(super) fn pages_at(&self, address: u64) -> Option<(u64, &Arc<Allocation>)> {
        let (start, chunk) = self.chunks.range(..=address).next_back()?;
        (address < start + chunk.bytes).then_some((*start, &chunk.pages))
    }

    /// True if the program's own heap has pages of that allocation.
    pub(super) fn has_own_pages(&self, name: (u32, u32)) -> bool {
        let mut own = self.chunks.values().filter(|chunk| chunk.home != Home::Imported);
        own.any(|chunk| chunk.pages.name() == name)
    }

    pub(super) fn carve(&mut self, bytes: u64, home: Home) -> Option<u64> {
        let mut chunks = self.chunks.iter_mut().filter(|(_, chunk)| chunk.home == home);
        chunks.find_map(|(start, chunk)| Some(start + chunk.arena.as_mut()?.take(bytes)?))
    }

    /// Finds free addresses in the window, upwards from the last ones.
    pub(super) fn free_window(&mut self, bytes: u64) -> Option<u64> {
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

    /// False for a range that begins in the heap and is not a part of one block there. Pages hold many blocks.
    pub(super) fn keeps_to_a_block(&self, range: &Range<u64>) -> bool {
        if self.pages_at(range.start).is_none() {
            return true;
        }
        let block = self.blocks.range(..=range.start).next_back();
        block.is_some_and(|(_, block)| range.start < block.range().end && range.end <= block.range().end)
    }

    /// The kind of the last block in a range, or partly in it.
    pub(super) fn kind_within(&self, range: &Range<u64>) -> Option<BlockKind> {
        let (_, block) = self.blocks.range(..range.end).next_back()?;
        (block.range().end > range.start).then_some(block.kind)
    }

    pub(super) fn is_device_range(&self, range: &Range<u64>) -> bool {
        let overlaps = |start: u64, bytes: u64| start < range.end && range.start < start + bytes;
        let reserved = self.reserved.range(..range.end).next_back();
        overlaps(self.window.address(), self.window.bytes())
            || reserved.is_some_and(|(start, entry)| overlaps(*start, entry.reservation.bytes()))
    }
}

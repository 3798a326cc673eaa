//! A block: a range of addresses that a program allocated, and that pointer queries may refer to.

use std::ops::Range;

/// The origin of a block, which determines how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuIpcOpenMemHandle`: memory of another process.
    Imported,
    /// `cuMemAllocManaged`.
    Managed,
    /// A managed variable of a module. Programs cannot free it.
    Variable,
    /// Device memory that is set aside for managed memory. Programs cannot free it.
    Aside,
    /// The driver's own: variables of modules, workspaces. Programs cannot free it.
    Internal,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemHostRegister`.
    Registered,
}

/// The context that made a block, by its ids.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Maker {
    /// Id of its core; 0 means none.
    pub(crate) core: u64,
    /// Handle of the context.
    pub(crate) context: u64,
}

/// A range of addresses that a program allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) start: u64,
    /// Requested size.
    pub(crate) bytes: u64,
    pub(crate) kind: BlockKind,
    pub(crate) maker: Maker,
    /// Flags of `cuMemHostAlloc` or `cuMemHostRegister`.
    pub(crate) flags: u32,
    /// Handle of the pool that the block is from.
    pub(crate) pool: u64,
    /// Address of the device memory that is set aside for managed memory.
    pub(crate) aside: u64,
    /// Unique in the process.
    pub(crate) id: u64,
}

impl Block {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes
    }
}

impl Block {
    /// True for memory of another process's pool.
    pub(crate) fn is_of_imported_pool(&self) -> bool {
        self.kind == BlockKind::Imported && self.pool != 0
    }

    pub(crate) fn is_managed(&self) -> bool {
        matches!(self.kind, BlockKind::Managed | BlockKind::Variable)
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, BlockKind::Host | BlockKind::Registered) || self.is_managed()
    }
}

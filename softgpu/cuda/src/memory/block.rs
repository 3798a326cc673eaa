//! A block: a range of addresses that a program allocated, and to which pointer queries may refer.

use std::ops::Range;

/// Where a block comes from, and so how it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuIpcOpenMemHandle`: another process's.
    Imported,
    /// `cuMemAllocManaged`.
    Managed,
    /// The driver's own: variables of modules, workspaces. Programs cannot free it.
    Internal,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemHostRegister`.
    Registered,
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) start: u64,
    /// As asked for.
    pub(crate) bytes: u64,
    pub(crate) kind: BlockKind,
    /// The core of the context that made it.
    pub(crate) core: u64,
    /// The context's handle.
    pub(crate) context: u64,
    /// Flags of `cuMemHostAlloc` or `cuMemHostRegister`.
    pub(crate) flags: u32,
    /// The pool that it is from.
    pub(crate) pool: u64,
    /// Unique in the process.
    pub(crate) id: u64,
}

impl Block {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes
    }
}

impl Block {
    /// Whether it is host memory.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, BlockKind::Host | BlockKind::Registered | BlockKind::Managed)
    }
}

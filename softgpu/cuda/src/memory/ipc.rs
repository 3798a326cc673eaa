//! Device memory that one process allocates and another opens: the name of its allocation identifies the pages.

use softgpu_device::PAGE_BYTES;

use super::book::{Home, Opened};
use super::{Block, BlockKind, Maker, Name, Space};
use crate::error::{Error, Result};
use crate::lock::lock;

impl Space {
    /// `cuIpcGetMemHandle` of a block of `cuMemAlloc`.
    pub(crate) fn name_of(&self, device: [u8; 16], block: &Block) -> Result<Name> {
        let book = lock(&self.book);
        let (start, pages) = book.pages_at(block.start).ok_or(Error::INVALID_VALUE)?;
        let (record, generation) = pages.name();
        let offset = block.start - start;
        Ok(Name { device, record, generation, offset, bytes: block.bytes, pool: 0 })
    }

    /// `cuIpcOpenMemHandle`: returns the same address for each open of one name.
    pub(crate) fn open_name(&self, maker: Maker, name: Name) -> Result<u64> {
        self.open_in_pool(maker, name, 0)
    }

    /// As [`Space::open_name`], for a pool of another process: its handle here.
    pub(crate) fn open_in_pool(&self, maker: Maker, name: Name, pool: u64) -> Result<u64> {
        let mut book = lock(&self.book);
        let known = book.opened.iter_mut().find(|(_, opened)| opened.name == name);
        if let Some((start, opened)) = known {
            opened.count += 1;
            return Ok(*start);
        }
        let identity = (name.record, name.generation);
        if book.has_own_pages(identity) {
            return Err(Error::INVALID_CONTEXT);
        }
        let pages = self.owner.open(name.record, name.generation).ok_or(Error::INVALID_VALUE)?;
        let inside = name.offset.checked_add(name.bytes).is_some_and(|end| end <= pages.bytes());
        if !inside || name.bytes == 0 || pages.bytes() < PAGE_BYTES {
            return Err(Error::INVALID_VALUE);
        }
        let start = self.place(&mut book, pages, false, Home::Imported)? + name.offset;
        let block = Block { bytes: name.bytes, pool, ..self.block(start, BlockKind::Imported) };
        self.enter(&mut book, maker, block);
        book.opened.insert(start, Opened { name, count: 1 });
        Ok(start)
    }

    /// `cuIpcCloseMemHandle`: true for the last close, after which the caller frees the block.
    pub(crate) fn close_name(&self, start: u64) -> Result<bool> {
        let mut book = lock(&self.book);
        let opened = book.opened.get_mut(&start).ok_or(Error::INVALID_VALUE)?;
        opened.count -= 1;
        let last = opened.count == 0;
        if last {
            book.opened.remove(&start);
        }
        Ok(last)
    }
}

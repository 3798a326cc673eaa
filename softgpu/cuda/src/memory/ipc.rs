//! Device memory that one process allocates and another opens: the pages are found by the name of their allocation.

use softgpu_device::PAGE_BYTES;

use super::space::Home;
use super::{Block, BlockKind, Space};
use crate::context::{Core, lock};
use crate::error::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"sgipcmem");

/// What a `CUipcMemHandle` says: a block in an allocation of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) device: [u8; 16],
    record: u32,
    generation: u32,
    offset: u64,
    bytes: u64,
}

/// A name that this process has opened.
#[derive(Debug)]
pub(super) struct Opened {
    name: Name,
    count: u64,
}

impl Name {
    /// As it is handed out.
    pub(crate) fn to_bytes(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.device);
        bytes[24..28].copy_from_slice(&self.record.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// What somebody hands in; `None` when it is no name.
    pub(crate) fn from_bytes(bytes: &[u8; 64]) -> Option<Name> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| u64::from_le_bytes(words[index]);
        let (halves, _) = bytes.as_chunks::<4>();
        let half = |index: usize| u32::from_le_bytes(halves[index]);
        let mut device = [0; 16];
        device.copy_from_slice(&bytes[8..24]);
        let name = Name { device, record: half(6), generation: half(7), offset: word(4), bytes: word(5) };
        (word(0) == MAGIC).then_some(name)
    }
}

impl Space {
    /// `cuIpcGetMemHandle` of a block of `cuMemAlloc`.
    pub(crate) fn name_of(&self, device: [u8; 16], block: &Block) -> Result<Name> {
        let book = lock(&self.book);
        let (start, pages) = book.pages_at(block.start).ok_or(Error::INVALID_VALUE)?;
        let (record, generation) = pages.name();
        Ok(Name { device, record, generation, offset: block.start - start, bytes: block.bytes })
    }

    /// `cuIpcOpenMemHandle`: the same address for each open of one name.
    pub(crate) fn open_name(&self, core: &Core, name: Name) -> Result<u64> {
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
        let block = Block { bytes: name.bytes, ..self.block(start, BlockKind::Imported) };
        self.enter(&mut book, core, block);
        book.opened.insert(start, Opened { name, count: 1 });
        Ok(start)
    }

    /// `cuIpcCloseMemHandle`: whether that was the last open, so that the block is to be freed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_its_bytes() {
        let name = Name { device: [7; 16], record: 3, generation: 9, offset: 512, bytes: 1 << 33 };
        assert_eq!(Name::from_bytes(&name.to_bytes()), Some(name));
        assert_eq!(Name::from_bytes(&[0; 64]), None);
    }
}

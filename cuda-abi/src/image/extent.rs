//! The length of an image in bytes, found from its address alone.

use super::{Fields, ImageError};

/// First word of the structure that the compiler's glue code passes instead of an image.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
pub(super) const FATBIN_MAGIC: u32 = 0xba55_ed50;
pub(super) const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

/// The structure that the compiler's glue code passes to a load call. All addresses are the program's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrapper {
    /// 1: the image is at `data`. 2: linked at run time from `data` and from each fatbin of the list.
    pub version: u32,
    /// Address of a fatbin.
    pub data: u64,
    /// Version 2: address of a list of fatbins that ends with a null pointer. Otherwise unused.
    pub fatbins: u64,
}

impl Wrapper {
    /// The size of a wrapper.
    pub const SIZE: usize = 24;

    /// Decodes a wrapper; `None` if the bytes do not begin with its magic number and must be read as an image.
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Result<Option<Self>, ImageError> {
        let [magic, version] = [0, 4].map(|at| bytes.u32_at(at).unwrap_or(0));
        let [data, fatbins] = [8, 16].map(|at| bytes.u64_at(at).unwrap_or(0));
        match (magic, version) {
            (WRAPPER_MAGIC, 1 | 2) if data == 0 => Err(ImageError::Invalid("a wrapper without an image")),
            (WRAPPER_MAGIC, 1 | 2) => Ok(Some(Self { version, data, fatbins })),
            (WRAPPER_MAGIC, _) => Err(ImageError::Invalid("unknown version of the wrapper")),
            _ => Ok(None),
        }
    }
}

/// The kind of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// Entries for several architectures.
    Fatbin,
    /// Machine code for one architecture.
    Elf,
    /// Text, up to and including a NUL byte.
    Ptx,
}

/// The kind and the length of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Kind of the image.
    pub kind: ImageKind,
    /// Length in bytes.
    pub bytes: u64,
}

/// Finds the kind and the length of the image behind `read`, which fills its buffer from an offset in the image or returns false
/// at the end of the program's memory. Reads nothing at or beyond `limit`.
pub fn size_of(read: &mut dyn FnMut(u64, &mut [u8]) -> bool, limit: u64) -> Result<Extent, ImageError> {
    let mut source = Source { read, limit };
    let magic = match source.array::<4>(0) {
        Ok(magic) => magic,
        // A text may be shorter than any magic number.
        Err(_) => return source.text(),
    };
    let (kind, bytes) = match magic {
        ELF_MAGIC => (ImageKind::Elf, source.elf()?),
        _ if u32::from_le_bytes(magic) == FATBIN_MAGIC => (ImageKind::Fatbin, source.fatbin()?),
        _ => return source.text(),
    };
    if bytes > limit {
        return Err(ImageError::TooLarge);
    }
    Ok(Extent { kind, bytes })
}

/// The length in a fatbin header, header included.
pub(super) fn fatbin_bytes(header: &[u8; 16]) -> Result<u64, ImageError> {
    let [version, length] = [4, 6].map(|at| header.u16_at(at).unwrap_or(0));
    if header.u32_at(0) != Some(FATBIN_MAGIC) || version != 1 || length != 16 {
        return Err(ImageError::Invalid("fatbin header"));
    }
    let payload = header.u64_at(8).unwrap_or(u64::MAX);
    payload.checked_add(16).ok_or(ImageError::Invalid("fatbin size"))
}

struct Source<'a> {
    read: &'a mut dyn FnMut(u64, &mut [u8]) -> bool,
    limit: u64,
}

impl Source<'_> {
    fn fill(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), ImageError> {
        let end = offset.checked_add(buffer.len() as u64).ok_or(ImageError::Invalid("offset"))?;
        if end > self.limit {
            return Err(ImageError::TooLarge);
        }
        if (self.read)(offset, buffer) { Ok(()) } else { Err(ImageError::Truncated) }
    }

    fn array<const N: usize>(&mut self, offset: u64) -> Result<[u8; N], ImageError> {
        let mut bytes = [0; N];
        self.fill(offset, &mut bytes)?;
        Ok(bytes)
    }

    fn fatbin(&mut self) -> Result<u64, ImageError> {
        fatbin_bytes(&self.array(0)?)
    }

    /// The end of the last part: one of the two header tables, or a section with contents.
    fn elf(&mut self) -> Result<u64, ImageError> {
        let header = ElfHeader::parse(&self.array(0)?)?;
        let end = |offset: u64, count: u64, size: u64| {
            let length = count.checked_mul(size).ok_or(ImageError::Invalid("ELF table"))?;
            offset.checked_add(length).ok_or(ImageError::Invalid("ELF table"))
        };
        let mut sections = header.sections;
        if header.section_table != 0 && sections == 0 {
            // If the number of sections exceeds the header's field, the first section contains it.
            sections =
                self.array::<{ Section::SIZE }>(header.section_table).map(|s| Section::parse(&s).size)?;
        }
        let tables = end(header.section_table, sections, Section::SIZE as u64)?;
        let mut last = tables.max(end(header.program_table, header.programs, ElfHeader::PROGRAM_SIZE)?);
        if last > self.limit {
            return Err(ImageError::TooLarge);
        }
        last = last.max(ElfHeader::SIZE as u64);
        // The length of the table is within the limit, so this loop ends.
        let mut offset = header.section_table;
        while offset < tables {
            let section = Section::parse(&self.array(offset)?);
            if section.kind != Section::NOBITS && section.kind != Section::NULL {
                last = last.max(end(section.offset, 1, section.size)?);
            }
            offset += Section::SIZE as u64;
        }
        Ok(last)
    }

    /// Searches for the NUL byte that ends a text.
    fn text(&mut self) -> Result<Extent, ImageError> {
        let mut buffer = [0; 4096];
        let mut offset = 0;
        loop {
            let chunk = self.some(offset, &mut buffer)?;
            if let Some(nul) = chunk.iter().position(|&byte| byte == 0) {
                if offset == 0 && nul == 0 {
                    return Err(ImageError::Invalid("an empty text"));
                }
                check_text(&chunk[..nul])?;
                return Ok(Extent { kind: ImageKind::Ptx, bytes: offset + nul as u64 + 1 });
            }
            check_text(chunk)?;
            offset += chunk.len() as u64;
        }
    }

    /// Reads as many bytes at `offset` as possible. The memory may end right after the text, in the middle of the buffer, so a
    /// read that fails is repeated with half the length.
    fn some<'b>(&mut self, offset: u64, buffer: &'b mut [u8]) -> Result<&'b [u8], ImageError> {
        let left = self.limit.saturating_sub(offset);
        let mut length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        if length == 0 {
            return Err(ImageError::TooLarge);
        }
        while !(self.read)(offset, &mut buffer[..length]) {
            length /= 2;
            if length == 0 {
                return Err(ImageError::Truncated);
            }
        }
        Ok(&buffer[..length])
    }
}

/// Refuses control characters, so that binary data is not searched for a NUL byte up to the limit.
fn check_text(bytes: &[u8]) -> Result<(), ImageError> {
    match bytes.iter().all(|&byte| byte >= b' ' || byte.is_ascii_whitespace() || byte == 0x0b) {
        true => Ok(()),
        false => Err(ImageError::Invalid("neither fatbin, ELF nor text")),
    }
}

/// The fields of an ELF header that are used here.
pub(super) struct ElfHeader {
    pub(super) program_table: u64,
    pub(super) programs: u64,
    pub(super) section_table: u64,
    pub(super) sections: u64,
    pub(super) name_section: u64,
}

impl ElfHeader {
    pub(super) const SIZE: usize = 64;
    const PROGRAM_SIZE: u64 = 56;
    /// `EM_CUDA`.
    const MACHINE: u16 = 190;

    pub(super) fn parse(bytes: &[u8; Self::SIZE]) -> Result<Self, ImageError> {
        const IDENT: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
        if bytes[..6] != IDENT || bytes.u16_at(18) != Some(Self::MACHINE) {
            return Err(ImageError::Invalid("not a 64-bit little-endian ELF for CUDA"));
        }
        let half = |at| u64::from(bytes.u16_at(at).unwrap_or(0));
        let word = |at| bytes.u64_at(at).unwrap_or(0);
        let header = Self {
            program_table: word(32),
            programs: half(56),
            section_table: word(40),
            sections: half(60),
            name_section: half(62),
        };
        let sizes_hold = (header.programs == 0 || half(54) == Self::PROGRAM_SIZE)
            && (header.section_table == 0 || half(58) == Section::SIZE as u64);
        if sizes_hold { Ok(header) } else { Err(ImageError::Invalid("ELF header")) }
    }
}

/// A section header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section {
    pub(super) name: u32,
    pub(super) kind: u32,
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) link: u32,
}

impl Section {
    pub(super) const SIZE: usize = 64;
    pub(super) const NULL: u32 = 0;
    pub(super) const NOBITS: u32 = 8;

    pub(super) fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |at| bytes.u32_at(at).unwrap_or(0);
        let long = |at| bytes.u64_at(at).unwrap_or(0);
        Self { name: word(0), kind: word(4), offset: long(24), size: long(32), link: word(40) }
    }
}

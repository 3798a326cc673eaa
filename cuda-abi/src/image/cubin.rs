//! The properties of kernels in a cubin: the layout of their parameters, and their memory beyond the bytes of the cubin.

use super::extent::{ElfHeader, Section};
use super::{Fields, ImageError, part};

/// Position of one parameter of a kernel in the parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Offset from the start of the buffer.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

/// The parameter buffer of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelParams {
    /// Size of the whole buffer.
    pub bytes: u32,
    /// Parameters in order; each lies inside the buffer.
    pub params: Vec<Param>,
}

/// Prefix of the section that describes a kernel.
const INFO_PREFIX: &[u8] = b".nv.info.";
const CODE_PREFIX: &[u8] = b".text.";
const SHARED_PREFIXES: [&[u8]; 2] = [b".nv.shared.", b".nv.reservedSmem"];

/// Attributes of the records in that section.
const ATTR_PARAM: u8 = 0x17;
const ATTR_PARAM_BYTES: u8 = 0x19;

/// Format of a record whose value is a number, and of one whose value is the length of the payload that follows.
const FORMAT_NUMBER: u8 = 3;
const FORMAT_SIZED: u8 = 4;

/// Maximum size of the parameters of a kernel on any architecture.
const MAX_PARAM_BYTES: u32 = 32 << 10;

/// Reads the parameter layout of a kernel from the cubin's own description. A kernel without parameters has an empty one.
pub fn cubin_params(elf: &[u8], kernel: &[u8]) -> Result<KernelParams, ImageError> {
    let elf = Elf::parse(elf)?;
    let Some(info) = elf.section(INFO_PREFIX, kernel)? else {
        return match elf.section(CODE_PREFIX, kernel)? {
            Some(_) => Ok(KernelParams::default()),
            None => Err(ImageError::NoKernel),
        };
    };
    let mut info = elf.contents(&info)?;
    let mut layout = KernelParams::default();
    let mut found = Vec::new();
    while let Some(&[format, attribute, low, high]) = info.first_chunk() {
        let value = u16::from_le_bytes([low, high]);
        let payload = if format == FORMAT_SIZED { usize::from(value) } else { 0 };
        let record = info.get(4..4 + payload).ok_or(ImageError::Truncated)?;
        info = &info[4 + payload..];
        match (format, attribute) {
            (FORMAT_SIZED, ATTR_PARAM) => found.push(read_param(record).ok_or(ImageError::Truncated)?),
            (FORMAT_NUMBER, ATTR_PARAM_BYTES) => layout.bytes = u32::from(value),
            _ => {}
        }
    }
    found.sort_by_key(|&(ordinal, _)| ordinal);
    for (expected, (ordinal, param)) in found.into_iter().enumerate() {
        let end = param.offset.checked_add(param.size);
        if usize::from(ordinal) != expected || end.is_none_or(|end| end > layout.bytes) {
            return Err(ImageError::Invalid("inconsistent parameters of a kernel"));
        }
        layout.params.push(param);
    }
    if layout.bytes > MAX_PARAM_BYTES {
        return Err(ImageError::Invalid("parameters of a kernel are too large"));
    }
    Ok(layout)
}

/// The device memory of a cubin beyond its bytes: variables without an initial value, which have a size but no contents. Shared
/// memory looks the same in the file, but belongs to each block and is not counted.
pub fn nobits_bytes(elf: &[u8]) -> Result<u64, ImageError> {
    let elf = Elf::parse(elf)?;
    let mut total = 0_u64;
    for section in elf.sections().filter(|section| section.kind == Section::NOBITS) {
        let name = elf.name(&section)?;
        if !SHARED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            total = total.checked_add(section.size).ok_or(ImageError::Invalid("size of an ELF section"))?;
        }
    }
    Ok(total)
}

/// Decodes one parameter record: index, ordinal, offset, flags with the size above bit 18.
fn read_param(record: &[u8]) -> Option<(u16, Param)> {
    let size = record.u32_at(8)? >> 18;
    Some((record.u16_at(4)?, Param { offset: u32::from(record.u16_at(6)?), size }))
}

/// A cubin whose section table and section names are inside it.
struct Elf<'a> {
    bytes: &'a [u8],
    table: &'a [[u8; Section::SIZE]],
    names: &'a [u8],
}

impl<'a> Elf<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let header = ElfHeader::parse(bytes.first_chunk().ok_or(ImageError::Truncated)?)?;
        if header.section_table == 0 {
            return Ok(Self { bytes, table: &[], names: &[] });
        }
        // Numbers too large for the header's fields are stored in the first section.
        let first =
            part(bytes, header.section_table, Section::SIZE as u64).and_then(|first| first.first_chunk());
        let first = Section::parse(first.ok_or(ImageError::Truncated)?);
        let sections = if header.sections == 0 { first.size } else { header.sections };
        let name_section =
            if header.name_section == EXTENDED_INDEX { u64::from(first.link) } else { header.name_section };
        let length = sections.checked_mul(Section::SIZE as u64).ok_or(ImageError::Truncated)?;
        let table = part(bytes, header.section_table, length).ok_or(ImageError::Truncated)?.as_chunks().0;
        let mut elf = Self { bytes, table, names: &[] };
        let names = elf.sections().nth(usize::try_from(name_section).unwrap_or(usize::MAX));
        elf.names = elf.contents(&names.ok_or(ImageError::Invalid("ELF section names"))?)?;
        Ok(elf)
    }

    fn sections(&self) -> impl Iterator<Item = Section> {
        self.table.iter().map(Section::parse)
    }

    /// Finds the section with the name `prefix` followed by `name`.
    fn section(&self, prefix: &[u8], name: &[u8]) -> Result<Option<Section>, ImageError> {
        for section in self.sections() {
            let rest = self.name(&section)?.strip_prefix(prefix).and_then(|rest| rest.strip_prefix(name));
            if rest.is_some_and(|rest| rest.first() == Some(&0)) {
                return Ok(Some(section));
            }
        }
        Ok(None)
    }

    /// The name of a section, with all bytes that follow it.
    fn name(&self, section: &Section) -> Result<&'a [u8], ImageError> {
        let name = usize::try_from(section.name).ok().and_then(|at| self.names.get(at..));
        name.ok_or(ImageError::Invalid("name of an ELF section"))
    }

    fn contents(&self, section: &Section) -> Result<&'a [u8], ImageError> {
        match section.kind {
            Section::NOBITS => Ok(&[]),
            _ => part(self.bytes, section.offset, section.size).ok_or(ImageError::Truncated),
        }
    }
}

/// `SHN_XINDEX`.
const EXTENDED_INDEX: u64 = 0xffff;

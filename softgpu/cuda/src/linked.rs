//! The file that a link makes, and the program that takes the place of the vendor's assembler: an ELF file like those of the
//! vendor's linker, with the PTX texts in sections of its own.

use softgpu_engine::SourceUnit;

use crate::image::ELF;

const HEADER: usize = 64;
const SECTION: usize = 64;
/// `EM_CUDA`.
const MACHINE: u16 = 190;
/// The operating system in the file's header, by which the file is recognised.
const OWN: u8 = 0x5c;
/// The types of sections: names, a text, variables without contents.
const NAMES: u32 = 3;
const TEXT: u32 = 0x7000_5054;
const VARIABLES: u32 = 8;

const SECTION_NAMES: &[u8] = b"\0.shstrtab\0.ptx\0.nv.global\0";
/// Places of the names in that text.
const NAME_OF_NAMES: u32 = 1;
const NAME_OF_TEXT: u32 = 11;
const NAME_OF_VARIABLES: u32 = 16;

/// A text and its limit on registers.
#[derive(Debug)]
pub struct LinkedText {
    /// PTX.
    pub text: Vec<u8>,
    /// Limit on the registers of kernels that state none.
    pub max_registers: Option<u32>,
}

struct SectionHeader {
    name: u32,
    kind: u32,
    offset: u64,
    bytes: u64,
    /// For a text its limit on registers, or 0.
    info: u32,
}

impl SectionHeader {
    fn encode(&self) -> [u8; SECTION] {
        let mut bytes = [0; SECTION];
        bytes[..4].copy_from_slice(&self.name.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.kind.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.info.to_le_bytes());
        bytes
    }
}

/// Makes the file. `variables` is the memory that the variables need.
#[must_use]
pub fn encode(texts: &[LinkedText], variables: u64) -> Vec<u8> {
    let names = HEADER as u64;
    let mut offset = names + SECTION_NAMES.len() as u64;
    let none = SectionHeader { name: 0, kind: 0, offset: 0, bytes: 0, info: 0 };
    let length = SECTION_NAMES.len() as u64;
    let mut sections =
        vec![none, SectionHeader { name: NAME_OF_NAMES, kind: NAMES, offset: names, bytes: length, info: 0 }];
    for LinkedText { text, max_registers } in texts {
        let (bytes, info) = (text.len() as u64, max_registers.unwrap_or(0));
        sections.push(SectionHeader { name: NAME_OF_TEXT, kind: TEXT, offset, bytes, info });
        offset += bytes;
    }
    sections.push(SectionHeader {
        name: NAME_OF_VARIABLES,
        kind: VARIABLES,
        offset,
        bytes: variables,
        info: 0,
    });
    let table = offset.next_multiple_of(8);

    let mut file = vec![0; HEADER];
    file[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, OWN]);
    let mut field = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    field(16, &2_u16.to_le_bytes()); // executable
    field(18, &MACHINE.to_le_bytes());
    field(20, &1_u32.to_le_bytes());
    field(40, &table.to_le_bytes());
    field(52, &[64, 0, 56, 0, 0, 0, 64, 0]); // sizes of headers
    // The number of inputs is limited.
    field(60, &u16::try_from(sections.len()).unwrap_or(u16::MAX).to_le_bytes());
    field(62, &1_u16.to_le_bytes());
    file.extend_from_slice(SECTION_NAMES);
    texts.iter().for_each(|text| file.extend_from_slice(&text.text));
    file.resize(file.len().next_multiple_of(8), 0);
    sections.iter().for_each(|section| file.extend_from_slice(&section.encode()));
    file
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

/// The texts in a file; `None` for bytes that are no such file.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<Vec<SourceUnit<'_>>> {
    if !bytes.starts_with(&ELF) || bytes.get(7) != Some(&OWN) {
        return None;
    }
    let table = usize::try_from(word(bytes, 40)?).ok()?;
    let count = u16::from_le_bytes(bytes.get(60..)?.first_chunk().copied()?);
    let (sections, _) = bytes.get(table..)?.as_chunks::<SECTION>();
    let mut units = Vec::new();
    for section in sections.get(..usize::from(count))? {
        let half = |at| word(section, at).map(|word| word >> 32);
        if half(0)? != u64::from(TEXT) {
            continue;
        }
        let start = usize::try_from(word(section, 24)?).ok()?;
        let end = start.checked_add(usize::try_from(word(section, 32)?).ok()?)?;
        let limit = u32::try_from(half(40)?).ok()?;
        units.push(SourceUnit {
            text: bytes.get(start..end)?,
            max_registers: Some(limit).filter(|limit| *limit > 0),
        });
    }
    Some(units)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_cuda_abi::image::{self, ImageKind};

    #[test]
    fn file_has_its_texts_and_states_its_size_and_its_variables() {
        let texts = [
            LinkedText { text: b"one".to_vec(), max_registers: None },
            LinkedText { text: b"another".to_vec(), max_registers: Some(32) },
        ];
        let file = encode(&texts, 1000);
        let units = decode(&file).unwrap();
        let read: Vec<_> = units.iter().map(|unit| (unit.text, unit.max_registers)).collect();
        assert_eq!(read, [(&b"one"[..], None), (&b"another"[..], Some(32))]);
        let mut read = |offset: u64, into: &mut [u8]| {
            let part = usize::try_from(offset).ok().and_then(|at| file.get(at..)?.get(..into.len()));
            part.map(|part| into.copy_from_slice(part)).is_some()
        };
        let extent = image::size_of(&mut read, 1 << 20).unwrap();
        assert_eq!((extent.kind, extent.bytes), (ImageKind::Elf, file.len() as u64));
        assert_eq!(image::nobits_bytes(&file), Ok(1000));
    }

    #[test]
    fn cut_or_foreign_file_has_no_texts() {
        let file = encode(&[LinkedText { text: b"one".to_vec(), max_registers: None }], 0);
        for cut in 0..file.len() {
            assert!(decode(&file[..cut]).is_none(), "{cut}");
        }
        let mut foreign = file;
        foreign[7] = 0x33;
        assert!(decode(&foreign).is_none());
    }
}

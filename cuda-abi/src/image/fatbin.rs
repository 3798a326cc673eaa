//! Fatbins: a header of 16 bytes and entries one after another.

use std::borrow::Cow;

use super::extent::fatbin_bytes;
use super::{Fields, ImageError, part};

const COMPRESSED_LZ4: u64 = 0x2000;
const COMPRESSED_ZSTD: u64 = 0x8000;

/// Length of the shortest entry header with all fields used here.
const ENTRY_HEADER: usize = 64;

/// A fatbin of known length.
#[derive(Debug, Clone, Copy)]
pub struct Fatbin<'a> {
    entries: &'a [u8],
}

impl<'a> Fatbin<'a> {
    /// Decodes the header. Bytes after the length it states are ignored.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let header = bytes.first_chunk().ok_or(ImageError::Truncated)?;
        let length = usize::try_from(fatbin_bytes(header)?).map_err(|_| ImageError::Truncated)?;
        let entries = bytes.get(header.len()..length).ok_or(ImageError::Truncated)?;
        Ok(Self { entries })
    }

    /// Returns the entries in order. The iteration ends after an error, because the next entry cannot be found.
    pub fn entries(&self) -> Entries<'a> {
        Entries { rest: self.entries }
    }
}

/// The entries of a [`Fatbin`].
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<Entry<'a>, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let rest = std::mem::take(&mut self.rest);
        Some(Entry::split(rest).map(|(entry, rest)| {
            self.rest = rest;
            entry
        }))
    }
}

/// The content of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// PTX text.
    Ptx,
    /// An ELF cubin.
    Elf,
    /// Another kind, for example intermediate code for link-time optimisation.
    Other(u16),
}

/// One entry of a fatbin, its payload as stored.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// Kind of the content.
    pub kind: EntryKind,
    /// Architecture, as in `sm_80`, without a suffix.
    pub arch: u32,
    /// Major and minor version of the instruction set of a PTX entry.
    pub isa: (u16, u16),
    /// Flag word.
    pub flags: u64,
    /// Name of the source, if given.
    pub name: &'a [u8],
    /// Header and payload as they lie in the fatbin.
    pub(super) stored: &'a [u8],
    payload: &'a [u8],
    uncompressed: u64,
}

impl<'a> Entry<'a> {
    /// Splits the first entry off.
    fn split(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), ImageError> {
        let fields = bytes.get(..ENTRY_HEADER).ok_or(ImageError::Truncated)?;
        let half = |at| fields.u16_at(at).unwrap_or(0);
        let word = |at| fields.u32_at(at).unwrap_or(0);
        let long = |at| fields.u64_at(at).unwrap_or(0);

        let (header, padded, stored) = (u64::from(word(4)), long(8), u64::from(word(16)));
        if header < ENTRY_HEADER as u64 || stored > padded {
            return Err(ImageError::Invalid("fatbin entry"));
        }
        let padded_payload = part(bytes, header, padded).ok_or(ImageError::Truncated)?;
        // Both sums fit: the payload lies there.
        let rest = part(bytes, header + padded, (bytes.len() as u64) - header - padded).unwrap_or_default();
        let flags = long(40);
        let compressed = flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD) != 0;
        let payload = if compressed { part(padded_payload, 0, stored) } else { Some(padded_payload) };
        let name = match u64::from(word(36)) {
            0 => Some(&[][..]),
            length => part(bytes, u64::from(word(32)), length),
        };
        let entry = Self {
            kind: match half(0) {
                1 => EntryKind::Ptx,
                2 => EntryKind::Elf,
                other => EntryKind::Other(other),
            },
            arch: word(28),
            isa: (half(26), half(24)),
            flags,
            name: name.ok_or(ImageError::Invalid("name of a fatbin entry"))?,
            stored: part(bytes, 0, header + padded).ok_or(ImageError::Truncated)?,
            payload: payload.ok_or(ImageError::Invalid("fatbin entry"))?,
            uncompressed: long(56),
        };
        Ok((entry, rest))
    }

    /// True for machine code that runs on a device of architecture `sm`: that of its generation, up to its number.
    pub(super) fn is_code_for(&self, sm: u32) -> bool {
        self.kind == EntryKind::Elf && self.arch / 10 == sm / 10 && self.arch <= sm
    }

    /// True if the payload is compressed.
    #[must_use]
    pub const fn is_compressed(&self) -> bool {
        self.flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD) != 0
    }

    /// The length of the payload, or its stated length after decompression.
    #[must_use]
    pub const fn unpacked_bytes(&self) -> u64 {
        if self.is_compressed() { self.uncompressed } else { self.payload.len() as u64 }
    }

    /// Returns the payload, decompressed if necessary; never more than `limit` bytes, and exactly as many as the entry states. An
    /// uncompressed payload may be padded with zeroes to a multiple of eight.
    pub fn payload(&self, limit: u64) -> Result<Cow<'a, [u8]>, ImageError> {
        let lz4 = match self.flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD) {
            0 if self.payload.len() as u64 > limit => return Err(ImageError::TooLarge),
            0 => return Ok(Cow::Borrowed(self.payload)),
            COMPRESSED_LZ4 => true,
            COMPRESSED_ZSTD => false,
            _ => return Err(ImageError::Invalid("a payload is compressed in two ways")),
        };
        if self.uncompressed > limit {
            return Err(ImageError::TooLarge);
        }
        let length = usize::try_from(self.uncompressed).map_err(|_| ImageError::TooLarge)?;
        let mut output = vec![0; length];
        let written =
            if lz4 { unpack_lz4(self.payload, &mut output) } else { unpack_zstd(self.payload, &mut output) };
        if written == Some(length) { Ok(Cow::Owned(output)) } else { Err(ImageError::Damaged) }
    }
}

fn unpack_lz4(input: &[u8], output: &mut [u8]) -> Option<usize> {
    lz4_flex::block::decompress_into(input, output).ok()
}

fn unpack_zstd(input: &[u8], output: &mut [u8]) -> Option<usize> {
    let mut decoder = ruzstd::decoding::FrameDecoder::new();
    // The decoder reserves a whole window at once, whatever the frame contains.
    decoder.set_max_window_size((output.len() as u64).max(MIN_WINDOW));
    decoder.decode_all(input, output).ok()
}

/// A frame may state a window larger than its contents; the format's specification asks decoders to accept 8 MiB.
const MIN_WINDOW: u64 = 8 << 20;

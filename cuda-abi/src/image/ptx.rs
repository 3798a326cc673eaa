//! The choice of a PTX text for a device that runs PTX only.

use super::extent::{ELF_MAGIC, FATBIN_MAGIC};
use super::{EntryKind, Fatbin, Fields, ImageError};
use std::borrow::Cow;

/// Maximum size of a compressed text that is unpacked for a separate compilation.
const COMPILE_BYTES: usize = 64 << 20;

/// The architecture of a PTX text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Number in `.target sm_80`.
    pub arch: u32,
    /// The letter of `sm_90a` and `sm_100f`, which run only on that architecture, and on its family.
    pub suffix: Option<u8>,
}

/// Finds the PTX text in a fatbin, or takes the text itself, for an architecture of at most `max_sm`. Of several texts it returns
/// the one for the highest architecture. `limit` bounds the text.
///
/// The text has no NUL byte at its end.
pub fn select_ptx(bytes: &[u8], max_sm: u32, limit: usize) -> Result<Vec<u8>, ImageError> {
    if bytes.starts_with(&ELF_MAGIC) {
        return Err(ImageError::NoBinary);
    }
    if bytes.u32_at(0) != Some(FATBIN_MAGIC) {
        let text = text(bytes);
        if text.len() > limit {
            return Err(ImageError::TooLarge);
        }
        return match target(text) {
            Some(target) if target.runs_on(max_sm) => Ok(text.to_vec()),
            Some(_) => Err(ImageError::NoBinary),
            None => Err(ImageError::Invalid("a text without a .target line")),
        };
    }
    let mut entries = Vec::new();
    for entry in Fatbin::parse(bytes)?.entries() {
        let entry = entry?;
        if entry.kind == EntryKind::Ptx && entry.arch <= max_sm {
            entries.push(entry);
        }
    }
    // The sort is stable, so that the first of two entries for one architecture is tried first.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.arch));
    for entry in entries {
        let payload = entry.payload(limit as u64)?;
        let text = text(&payload);
        // The entry does not state its whole target; the text does.
        match target(text) {
            Some(target) if target.runs_on(max_sm) => return Ok(text.to_vec()),
            Some(_) => {}
            None => return Err(ImageError::Invalid("a text without a .target line")),
        }
    }
    Err(ImageError::NoBinary)
}

/// Returns the PTX text, with the NUL at its end, that a driver compiles when it loads an image on a device of architecture `sm`.
/// `None` for an image with machine code for the device, and for an unknown image.
#[must_use]
pub fn to_compile(image: &[u8], sm: u32) -> Option<Cow<'_, [u8]>> {
    if image.starts_with(&ELF_MAGIC) {
        return None;
    }
    if image.u32_at(0) != Some(FATBIN_MAGIC) {
        let end = image.iter().position(|byte| *byte == 0)?;
        return image.get(..=end).map(Cow::Borrowed);
    }
    let compiled = Fatbin::parse(image).ok()?.entries().any(|entry| match entry {
        Ok(entry) => match entry.kind {
            EntryKind::Ptx => false,
            EntryKind::Elf => entry.is_code_for(sm),
            EntryKind::Other(_) => true,
        },
        Err(_) => true,
    });
    let mut text = select_ptx(image, sm, COMPILE_BYTES).ok().filter(|_| !compiled)?;
    text.push(0);
    Some(Cow::Owned(text))
}

impl Target {
    const fn runs_on(self, max_sm: u32) -> bool {
        match self.suffix {
            None => self.arch <= max_sm,
            Some(b'f') => self.arch <= max_sm && self.arch / 10 == max_sm / 10,
            Some(_) => self.arch == max_sm,
        }
    }
}

/// The bytes before the first NUL.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Parses the `.target` directive of a PTX text; `None` if there is none.
pub fn target(text: &[u8]) -> Option<Target> {
    let mut words = PtxWords(text);
    words.find(|&word| word == b".target")?;
    let name = words.next()?;
    let number = name.strip_prefix(b"sm_").or_else(|| name.strip_prefix(b"compute_"))?;
    let digits = number.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, suffix) = number.split_at(digits);
    let arch = std::str::from_utf8(digits).ok()?.parse().ok()?;
    match suffix {
        b"" => Some(Target { arch, suffix: None }),
        b"a" | b"f" => Some(Target { arch, suffix: suffix.first().copied() }),
        _ => None,
    }
}

/// True if a text begins as PTX must: with its version.
#[must_use]
pub fn begins_as_ptx(text: &[u8]) -> bool {
    PtxWords(text).next() == Some(b".version")
}

/// The words of a text between white space and commas, without comments.
struct PtxWords<'a>(&'a [u8]);

impl<'a> Iterator for PtxWords<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let separates = |byte: u8| byte.is_ascii_whitespace() || byte == b',' || byte == b';';
        loop {
            let start = self.0.iter().position(|&byte| !separates(byte))?;
            let text = &self.0[start..];
            if text.starts_with(b"//") {
                self.0 = &text[text.iter().position(|&byte| byte == b'\n').unwrap_or(text.len())..];
            } else if text.starts_with(b"/*") {
                let end =
                    text.windows(2).skip(2).position(|pair| pair == b"*/").map_or(text.len(), |at| at + 4);
                self.0 = &text[end..];
            } else {
                let comment = |at: usize| text[at..].starts_with(b"//") || text[at..].starts_with(b"/*");
                let ends = |&at: &usize| separates(text[at]) || comment(at);
                let end = (0..text.len()).find(ends).unwrap_or(text.len());
                let (word, rest) = text.split_at(end);
                self.0 = rest;
                return Some(word);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fatbin with entries of these kinds and architectures.
    fn fatbin(entries: &[(u16, u32, &[u8])]) -> Vec<u8> {
        let entry = |(kind, arch, payload): &(u16, u32, &[u8])| {
            let mut entry = vec![0_u8; 64];
            entry[0..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64_u32.to_le_bytes());
            entry[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
            entry[28..32].copy_from_slice(&arch.to_le_bytes());
            entry.extend_from_slice(payload);
            entry
        };
        let entries: Vec<u8> = entries.iter().flat_map(entry).collect();
        let length = entries.len() as u64;
        [&FATBIN_MAGIC.to_le_bytes()[..], &[1, 0, 16, 0], &length.to_le_bytes(), &entries].concat()
    }

    // Promise: Q30
    #[test]
    fn only_images_without_machine_code_for_the_device_are_compiled() {
        const TEXT: &[u8] = b".version 7.0 .target sm_70\0";
        let (ptx, elf, other) =
            (|arch| (1, arch, TEXT), |arch| (2, arch, &b"code"[..]), (7, 90, &b"else"[..]));
        assert_eq!(to_compile(&[TEXT, b"\0\0\0"].concat(), 80).as_deref(), Some(TEXT), "up to its first NUL");
        assert_eq!(to_compile(b".version 7.0 .target sm_70", 80), None, "a text without a NUL");
        assert_eq!(to_compile(b"\x7fELF and more\0", 80), None);
        assert_eq!(to_compile(&fatbin(&[ptx(70)]), 80).as_deref(), Some(TEXT));
        assert_eq!(to_compile(&fatbin(&[elf(80), ptx(70)]), 86), None, "machine code of the same generation");
        for foreign in [70, 89, 90, 100] {
            assert_eq!(to_compile(&fatbin(&[elf(foreign), ptx(70)]), 86).as_deref(), Some(TEXT), "{foreign}");
        }
        assert_eq!(to_compile(&fatbin(&[other, ptx(70)]), 86), None, "an unknown entry may be machine code");
        assert_eq!(to_compile(&fatbin(&[ptx(90)]), 86), None, "the driver reports the error");
        assert_eq!(to_compile(&fatbin(&[ptx(70)])[..60], 86), None, "a truncated image");
    }
}

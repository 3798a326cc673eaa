//! The choice of a PTX text for a device that runs PTX only.

use super::extent::{ELF_MAGIC, FATBIN_MAGIC};
use super::{EntryKind, Fatbin, Fields, ImageError};

/// The architecture a PTX text is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The number in `.target sm_80`.
    pub arch: u32,
    /// True for `sm_90a`, `sm_100f` and the like, which run on that architecture or its family alone.
    pub specific: bool,
}

/// Finds the PTX text in a fatbin, or takes the text itself, for an architecture of at most `max_sm`. Of several the
/// one for the highest architecture is chosen; one for a specific architecture never. `limit` bounds the text.
///
/// The text comes without the NUL byte at its end.
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
    // Stable, so that of two entries for one architecture the first is looked at first.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.arch));
    for entry in entries {
        let payload = entry.payload(limit as u64)?;
        let text = text(&payload);
        // The entry does not say everything about its target; the text does.
        match target(text) {
            Some(target) if target.runs_on(max_sm) => return Ok(text.to_vec()),
            Some(_) => {}
            None => return Err(ImageError::Invalid("a text without a .target line")),
        }
    }
    Err(ImageError::NoBinary)
}

impl Target {
    const fn runs_on(self, max_sm: u32) -> bool {
        self.arch <= max_sm && !self.specific
    }
}

/// The bytes before the first NUL.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Reads the `.target` directive of a PTX text; `None` without one.
pub fn target(text: &[u8]) -> Option<Target> {
    let mut words = Words(text);
    words.find(|&word| word == b".target")?;
    let name = words.next()?;
    let number = name.strip_prefix(b"sm_").or_else(|| name.strip_prefix(b"compute_"))?;
    let digits = number.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, suffix) = number.split_at(digits);
    let arch = std::str::from_utf8(digits).ok()?.parse().ok()?;
    match suffix {
        b"" => Some(Target { arch, specific: false }),
        b"a" | b"f" => Some(Target { arch, specific: true }),
        _ => None,
    }
}

/// The words of a text between white space and commas, without comments.
struct Words<'a>(&'a [u8]);

impl<'a> Iterator for Words<'a> {
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

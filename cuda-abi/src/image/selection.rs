//! The parts of an image that a user permits: machine code, PTX, or both.

use std::borrow::Cow;

use super::extent::{ELF_MAGIC, FATBIN_MAGIC};
use super::{EntryKind, Fatbin, Fields, ImageError};

/// The parts of images that a driver may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// Machine code may be used; otherwise PTX is compiled instead (`CUDA_FORCE_PTX_JIT`).
    pub machine_code: bool,
    /// PTX may be compiled (`CUDA_DISABLE_PTX_JIT`).
    pub ptx: bool,
}

impl Default for Selection {
    fn default() -> Self {
        Self { machine_code: true, ptx: true }
    }
}

impl Selection {
    /// True if all parts may be used.
    #[must_use]
    pub const fn is_all(self) -> bool {
        self.machine_code && self.ptx
    }

    /// The image without the parts that may not be used on a device of architecture `sm`. Entries of a fatbin that are neither PTX nor machine code stay.
    ///
    /// # Errors
    /// [`ImageError::NoBinary`] if only machine code would be left out, [`ImageError::CompilationDisabled`] if the device would have to compile
    /// PTX, and the errors of a fatbin that cannot be read.
    pub fn apply(self, image: &[u8], sm: u32) -> Result<Cow<'_, [u8]>, ImageError> {
        if self.is_all() {
            return Ok(Cow::Borrowed(image));
        }
        if image.starts_with(&ELF_MAGIC) {
            return if self.machine_code { Ok(Cow::Borrowed(image)) } else { Err(ImageError::NoBinary) };
        }
        if image.u32_at(0) != Some(FATBIN_MAGIC) {
            return if self.ptx { Ok(Cow::Borrowed(image)) } else { Err(ImageError::CompilationDisabled) };
        }
        let (mut kept, mut usable, mut compiled) = (Vec::new(), false, false);
        for entry in Fatbin::parse(image)?.entries() {
            let entry = entry?;
            let (keep, use_) = match entry.kind {
                EntryKind::Ptx => {
                    compiled |= entry.arch <= sm;
                    (self.ptx, entry.arch <= sm)
                }
                EntryKind::Elf => (self.machine_code, entry.is_code_for(sm)),
                EntryKind::Other(_) => (true, true),
            };
            if keep {
                kept.extend_from_slice(entry.stored);
                usable |= use_;
            }
        }
        if !usable {
            let disabled = compiled && !self.ptx;
            return Err(if disabled { ImageError::CompilationDisabled } else { ImageError::NoBinary });
        }
        let mut fatbin = image.get(..8).ok_or(ImageError::Truncated)?.to_vec();
        fatbin.extend_from_slice(&(kept.len() as u64).to_le_bytes());
        fatbin.append(&mut kept);
        Ok(Cow::Owned(fatbin))
    }
}

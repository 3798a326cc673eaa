//! A bounded reader for kernel images: the input of `cuModuleLoadData` and its kin.
//!
//! The guest's library, the worker and the software GPU call it. It owns no bytes, and must never read beyond those that it was given.
//!
//! An image is given as an address without a length. [`size_of`] finds the length through a callback that reads the program's
//! memory; the rest of the module works on the bytes. A *wrapper* (passed by the compiler's glue code) points to one or more
//! *fatbins*; a fatbin contains entries, each a PTX text or an ELF cubin for one architecture, plain or compressed.
//!
//! All functions are total: any bytes give a value or an [`ImageError`], every length inside an image is compared with the bytes
//! present before it is used, and no allocation exceeds the caller's limit.

mod cubin;
mod extent;
mod fatbin;
mod footprint;
mod mention;
mod ptx;
mod selection;

pub use cubin::{KernelParams, Param, cubin_params, nobits_bytes};
pub use extent::{Extent, ImageKind, Wrapper, size_of};
pub use fatbin::{Entries, Entry, EntryKind, Fatbin};
pub use footprint::device_bytes;
pub use mention::may_mention;
pub use ptx::{Target, begins_as_ptx, select_ptx, target, to_compile};
pub use selection::Selection;

use crate::sys::CUresult;

/// The reason that an image was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// A part of the image lies in memory that cannot be read, or past its end.
    #[error("the image ends before its contents do")]
    Truncated,
    /// The image, or a part of it, is larger than the caller's limit.
    #[error("the image is larger than the limit")]
    TooLarge,
    /// The bytes are not an image, or are inconsistent.
    #[error("invalid image: {0}")]
    Invalid(&'static str),
    /// A payload does not decompress to the size in its entry.
    #[error("the payload of an image is damaged")]
    Damaged,
    /// The image has no code for this device.
    #[error("the image has no code for this architecture")]
    NoBinary,
    /// The image has only PTX for this device, which may not be compiled.
    #[error("the image must be compiled, which CUDA_DISABLE_PTX_JIT forbids")]
    CompilationDisabled,
    /// The image has no kernel with that name.
    #[error("no such kernel in the image")]
    NoKernel,
}

impl ImageError {
    /// The driver's result code for this error.
    pub const fn status(self) -> CUresult {
        match self {
            Self::Truncated | Self::Invalid(_) | Self::Damaged => CUresult::CUDA_ERROR_INVALID_IMAGE,
            Self::TooLarge => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            Self::NoBinary => CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
            Self::CompilationDisabled => CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
            Self::NoKernel => CUresult::CUDA_ERROR_NOT_FOUND,
        }
    }
}

/// Little-endian fields of a byte string; `None` if it ends too early.
trait Fields {
    fn array<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    fn u16_at(&self, offset: usize) -> Option<u16> {
        self.array(offset).map(u16::from_le_bytes)
    }

    fn u32_at(&self, offset: usize) -> Option<u32> {
        self.array(offset).map(u32::from_le_bytes)
    }

    fn u64_at(&self, offset: usize) -> Option<u64> {
        self.array(offset).map(u64::from_le_bytes)
    }
}

impl Fields for [u8] {
    fn array<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk().copied()
    }
}

/// The `length` bytes at `offset`, if they lie inside `bytes`.
fn part(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    let end = usize::try_from(offset.checked_add(length)?).ok()?;
    bytes.get(start..end)
}

//! Images as a program passes them: the selection of PTX in them, the reasons for which they are refused, and their description in a log.

use sluice_cuda_abi::image::{self, ImageError};
use softgpu_engine::{Kernel, LoadError, LoadErrorKind, Module};

use crate::error::Error;
use crate::gpu;

/// Maximum size of an image, in bytes.
pub(crate) const IMAGE_LIMIT: u64 = 1 << 30;

/// The first bytes of a fatbin.
pub(crate) const FATBIN: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// The first bytes of a file of machine code, or of an object.
pub(crate) const ELF: [u8; 4] = *b"\x7fELF";

/// The reason that an image does not load: the result code, and the text for the log.
pub(crate) struct LoadRefusal {
    pub(crate) error: Error,
    pub(crate) text: String,
}

impl From<Error> for LoadRefusal {
    fn from(error: Error) -> LoadRefusal {
        LoadRefusal { error, text: String::new() }
    }
}

impl From<ImageError> for LoadRefusal {
    fn from(error: ImageError) -> LoadRefusal {
        let code = match error {
            ImageError::NoBinary => Error::NO_BINARY_FOR_GPU,
            ImageError::CompilationDisabled => Error::JIT_COMPILATION_DISABLED,
            _ => Error::INVALID_IMAGE,
        };
        LoadRefusal { error: code, text: error.to_string() }
    }
}

impl From<LoadError> for LoadRefusal {
    fn from(error: LoadError) -> LoadRefusal {
        let code = match error.kind {
            LoadErrorKind::Syntax | LoadErrorKind::Link => Error::INVALID_PTX,
            LoadErrorKind::Version => Error::UNSUPPORTED_PTX_VERSION,
            LoadErrorKind::Target => Error::NO_BINARY_FOR_GPU,
            LoadErrorKind::Unsupported => Error::NOT_SUPPORTED,
        };
        LoadRefusal { error: code, text: error.to_string() }
    }
}

/// True if the bytes are of no known kind of image.
pub(crate) fn is_unknown(bytes: &[u8]) -> bool {
    let is_file = [FATBIN, ELF].iter().any(|magic| bytes.starts_with(magic));
    !is_file && !image::begins_as_ptx(bytes)
}

/// The refusal of bytes of no known kind.
pub(crate) fn unknown() -> LoadRefusal {
    LoadRefusal { error: Error::INVALID_IMAGE, text: "neither PTX nor an image".to_owned() }
}

/// The PTX for this device in a text or a fatbin.
pub(crate) fn select_ptx(bytes: &[u8]) -> Result<Vec<u8>, LoadRefusal> {
    if is_unknown(bytes) {
        return Err(unknown());
    }
    let limit = usize::try_from(IMAGE_LIMIT).unwrap_or(usize::MAX);
    image::select_ptx(bytes, gpu::image_capability().sm(), limit).map_err(|error| match error {
        // A text without a line that it must have.
        ImageError::Invalid(_) if !bytes.starts_with(&FATBIN) => {
            LoadRefusal { error: Error::INVALID_PTX, text: error.to_string() }
        }
        other => LoadRefusal::from(other),
    })
}

/// A line about each kernel of a module.
pub(crate) fn describe(module: &Module) -> String {
    let sm = gpu::image_capability().sm();
    let line = |kernel: &Kernel| match &kernel.refusal {
        Some(refusal) => format!("warning: kernel '{}' cannot run here: {refusal}\n", kernel.name),
        None => format!(
            "info: kernel '{}' for sm_{sm}: {} registers, {} bytes of shared memory\n",
            kernel.name, kernel.registers, kernel.static_shared
        ),
    };
    module.kernels().iter().map(line).collect()
}

//! The libraries that a driver loads itself when a program needs them.

#![expect(unsafe_code, reason = "loads C libraries")]

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::path::{Path, PathBuf};

/// A library that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot load {}, which the driver needs for some programs: {error:?}", .library.display())]
pub struct LibraryError {
    /// Its file.
    pub library: PathBuf,
    /// The loader's error.
    pub error: libloading::Error,
}

/// Loads those of the libraries that exist, for as long as the process lives. If the driver then asks for one by the name in the library, as
/// NVIDIA's does, the loader has it and opens no file. Returns the libraries that cannot be loaded: the driver fails only for programs that need
/// them.
pub fn load_further(libraries: &[PathBuf]) -> Vec<LibraryError> {
    libraries.iter().filter(|library| library.exists()).filter_map(|library| load(library).err()).collect()
}

fn load(library: &Path) -> Result<(), LibraryError> {
    // SAFETY: the path comes from the operator; the library's constructors are the driver's own.
    match unsafe { Library::open(Some(library), RTLD_LAZY | RTLD_LOCAL) } {
        Ok(loaded) => {
            // The driver's own handle comes later.
            core::mem::forget(loaded);
            Ok(())
        }
        Err(error) => Err(LibraryError { library: library.to_owned(), error }),
    }
}

//! The functions of the C interface, as methods of [`Images`].
//!
//! A library has one [`Images`], which owns the arrays, textures and surfaces of the process, and forwards its exports to it. Methods are
//! named after the C functions. Each file has the functions that a library supplies for its own. A library's code is never called while a
//! lock is held.

mod arrays;
mod objects;
mod references;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sluice_cuda_abi::sys::CUresult as Code;
use sluice_cuda_frontend::handles::{HandleKind, Slab};

use crate::driver::ImageDriver;
use crate::texture::ArrayResource;

pub use arrays::ArrayDriver;
pub use objects::ObjectDriver;
pub use references::ReferenceDriver;

use arrays::{Mipmapped, Single};
use objects::{SurfaceEntry, TextureEntry};
use references::{SurfaceVariable, TextureVariable};

pub(crate) type In<T, D> = sluice_cuda_frontend::In<T, <D as ImageDriver>::Error>;
pub(crate) type Out<T, D> = sluice_cuda_frontend::Out<T, <D as ImageDriver>::Error>;
pub(crate) type Result<T, D> = std::result::Result<T, <D as ImageDriver>::Error>;

const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;
const INVALID_HANDLE: Code = Code::CUDA_ERROR_INVALID_HANDLE;

/// All arrays, texture objects, surface objects and references of a process.
pub struct Images<D: ImageDriver> {
    driver: D,
    state: Mutex<ImageState<D>>,
}

struct ImageState<D: ImageDriver> {
    arrays: Slab<Single<D>>,
    mipmapped: Slab<Mipmapped<D>>,
    /// By context and number.
    textures: BTreeMap<(u64, u64), TextureEntry>,
    surfaces: BTreeMap<(u64, u64), SurfaceEntry>,
    texture_references: Slab<TextureVariable<D>>,
    surface_references: Slab<SurfaceVariable<D>>,
}

/// Converts a code of the header to an error of the library.
fn failed<D: ImageDriver>(code: Code) -> D::Error {
    D::Error::from(code as u32)
}

impl<D: ImageDriver> Images<D> {
    /// Without objects, for a static variable.
    pub const fn new(driver: D) -> Images<D> {
        let state = ImageState {
            arrays: Slab::new(HandleKind::Array),
            mipmapped: Slab::new(HandleKind::MipmappedArray),
            textures: BTreeMap::new(),
            surfaces: BTreeMap::new(),
            texture_references: Slab::new(HandleKind::TextureReference),
            surface_references: Slab::new(HandleKind::SurfaceReference),
        };
        Images { driver, state: Mutex::new(state) }
    }

    /// The library's driver.
    pub const fn driver(&self) -> &D {
        &self.driver
    }

    fn state(&self) -> MutexGuard<'_, ImageState<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an array by its handle, for a copy.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub fn array(&self, handle: u64) -> Result<ArrayResource<D::Array>, D> {
        let found = self.state().arrays.get(handle).map(|array| array.of.clone());
        found.ok_or_else(|| failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE))
    }

    /// Forgets the objects of a context that ends. The library ends their storage itself.
    pub fn context_ended(&self, context: u64) {
        let mut state = self.state();
        state.arrays.retain(|array| array.context != context);
        state.mipmapped.retain(|array| array.context != context);
        state.textures.retain(|(of, _), _| *of != context);
        state.surfaces.retain(|(of, _), _| *of != context);
        state.texture_references.retain(|reference| reference.context != context);
        state.surface_references.retain(|reference| reference.context != context);
    }

    /// Forgets the references of a module that ends.
    pub fn module_ended(&self, module: u64) {
        let mut state = self.state();
        state.texture_references.retain(|reference| !reference.is_in(module));
        state.surface_references.retain(|reference| reference.module != module);
    }
}

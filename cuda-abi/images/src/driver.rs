//! The functions that a library supplies.

use sluice_cuda_frontend::ErrorCode;

use crate::limits::Limits;
use crate::shape::ImageShape;
use crate::texture::{ArrayResource, Texture};

/// A library that serves arrays and textures: it knows contexts, modules and memory, and it keeps what arrays contain.
///
/// The crate calls it without a lock, and only with arguments that passed the checks of the header. Objects belong to the context
/// that was current when they were made.
pub trait ImageDriver: Send + Sync + 'static {
    /// The library's errors.
    type Error: ErrorCode + From<u32>;

    /// The storage of an array, a mipmapped array, or one level of a mipmapped array. A clone names the same storage; a drop does not
    /// end it.
    type Array: Clone + Send + Sync;

    /// A texture reference or a surface reference of a module.
    type Variable: Clone + Send + Sync;

    /// The calling thread's current context.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_CONTEXT` if there is none, and an error that the context keeps.
    fn context(&self) -> Result<u64, Self::Error>;

    /// The limits of the device of the current context.
    ///
    /// # Errors
    /// The driver's code.
    fn limits(&self) -> Result<Limits, Self::Error>;

    /// Makes the storage of an array, or if `levels` is given, of a mipmapped array with so many levels. Its contents are not defined.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, or another code of the driver.
    fn create_array(&self, shape: &ImageShape, levels: Option<u32>) -> Result<Self::Array, Self::Error>;

    /// Returns one level of a mipmapped array. It is called once for each level.
    ///
    /// # Errors
    /// The driver's code.
    fn level(&self, of: &ArrayResource<Self::Array>, level: u32) -> Result<Self::Array, Self::Error>;

    /// Ends an array or a mipmapped array with its levels. Work that uses it and was submitted before still completes. A texture or
    /// surface over it must not reach the memory of a later array.
    ///
    /// # Errors
    /// The driver's code; the handle is gone in any case.
    fn destroy_array(&self, array: Self::Array, is_mipmapped: bool) -> Result<(), Self::Error>;

    /// Makes a texture object, and returns the number that kernels read.
    ///
    /// # Errors
    /// The driver's code; `CUDA_ERROR_INVALID_VALUE` for linear memory that is not the program's.
    fn create_texture(&self, texture: &Texture<Self::Array>) -> Result<u64, Self::Error>;

    /// Ends a texture object.
    ///
    /// # Errors
    /// The driver's code.
    fn destroy_texture(&self, object: u64) -> Result<(), Self::Error>;

    /// Makes a surface object, and returns the number that kernels read.
    ///
    /// # Errors
    /// The driver's code.
    fn create_surface(&self, array: &ArrayResource<Self::Array>) -> Result<u64, Self::Error>;

    /// Ends a surface object.
    ///
    /// # Errors
    /// The driver's code.
    fn destroy_surface(&self, object: u64) -> Result<(), Self::Error>;

    /// Finds a texture reference of a module.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for other modules, `CUDA_ERROR_NOT_FOUND` for other names.
    fn texture_variable(&self, module: u64, name: &[u8]) -> Result<Self::Variable, Self::Error>;

    /// Finds a surface reference of a module.
    ///
    /// # Errors
    /// The same.
    fn surface_variable(&self, module: u64, name: &[u8]) -> Result<Self::Variable, Self::Error>;

    /// Sets the texture that later launches find in a texture reference; without one, an access fails.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    fn bind_texture(
        &self,
        variable: &Self::Variable,
        texture: Option<&Texture<Self::Array>>,
    ) -> Result<(), Self::Error>;

    /// Sets the array that later launches find in a surface reference; without one, an access fails.
    ///
    /// # Errors
    /// The driver's code.
    fn bind_surface(
        &self,
        variable: &Self::Variable,
        array: Option<&ArrayResource<Self::Array>>,
    ) -> Result<(), Self::Error>;

    /// Checks the handle of a function.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`.
    fn check_function(&self, function: u64) -> Result<(), Self::Error>;
}

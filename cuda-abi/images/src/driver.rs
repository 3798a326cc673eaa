//! A library that serves arrays and textures.

use sluice_cuda_frontend::ErrorCode;

use crate::limits::Limits;

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
}

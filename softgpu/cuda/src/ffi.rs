//! Pointers of C programs with the errors of this driver.

use crate::error::Error;

/// A pointer to a result.
pub(crate) type Out<T> = sluice_cuda_frontend::Out<T, Error>;

/// An argument passed by reference.
pub(crate) type In<T> = sluice_cuda_frontend::In<T, Error>;

/// A text argument.
pub(crate) type Text<'a> = sluice_cuda_frontend::Text<'a, Error>;

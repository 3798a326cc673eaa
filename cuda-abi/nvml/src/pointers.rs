//! Pointers of C programs with the errors of this interface.

use crate::status::{Result, Status};

/// A pointer to one or more results.
pub type Out<T> = sluice_cuda_frontend::Out<T, Status>;

/// A text argument.
pub type Text<'a> = sluice_cuda_frontend::Text<'a, Status>;

/// Returns a text argument in UTF-8.
pub(crate) fn utf8(text: Text<'_>) -> Result<&str> {
    str::from_utf8(text.get()?).map_err(|_| Status::INVALID_ARGUMENT)
}

//! The refusal of a field: apart, because fields need the arena memory of [`crate::staged`], which refuses as well.

/// The reason for which bytes do not decode, or a value does not encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The record ends inside a field.
    #[error("the record ends inside a field")]
    Short,
    /// Bytes are left after the last field.
    #[error("bytes are left after the last field")]
    Trailing,
    /// A value is outside its type or limit.
    #[error("a value is outside its range")]
    Range,
    /// The writer's buffer is full.
    #[error("the record would be too long")]
    Long,
    /// An id is not of the expected kind.
    #[error("not an id of the expected kind")]
    Id,
}

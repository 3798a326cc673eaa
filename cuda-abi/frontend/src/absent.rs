//! The answers of queries about abilities that no device of these libraries has.

use crate::{ErrorCode, In, Out};

/// `CU_ATOMIC_OPERATION_MAX`.
const GREATEST_ATOMIC: u32 = 13;

/// Answers the capabilities of `count` atomic operations on memory of another processor: none is native.
///
/// # Errors
/// `invalid` for an operation that the header does not have, and if there is none; a null pointer's error.
pub fn atomics<E: ErrorCode>(
    capabilities: Out<u32, E>,
    operations: In<u32, E>,
    count: u32,
    invalid: E,
) -> Result<(), E> {
    let count = count as usize;
    capabilities.required()?;
    if count == 0 || operations.list(count)?.into_iter().any(|number| number > GREATEST_ATOMIC) {
        return Err(invalid);
    }
    (0..count).try_for_each(|index| capabilities.set_at(index, 0))
}

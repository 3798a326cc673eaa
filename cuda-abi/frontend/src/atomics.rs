//! Atomic operations of a device on memory of another processor, and the answers of queries about them.

use crate::{ErrorCode, In, Out};

/// `CU_ATOMIC_OPERATION_MAX`: the number of atomic operations.
pub const OPERATIONS: usize = 13;

/// For each operation of the header its capabilities, `CUatomicOperationCapability`.
pub type Capabilities = [u32; OPERATIONS];

/// Not one operation is native.
pub const NONE: Capabilities = [0; OPERATIONS];

/// Answers the capabilities of `count` operations, from those of all.
///
/// # Errors
/// `invalid` for an operation that the header does not have, and if there is none; a null pointer's error.
pub fn answer<E: ErrorCode>(
    known: &Capabilities,
    capabilities: Out<u32, E>,
    operations: In<u32, E>,
    count: u32,
    invalid: E,
) -> Result<(), E> {
    let count = count as usize;
    capabilities.required()?;
    let of = |number: u32| usize::try_from(number).ok().and_then(|number| known.get(number)).copied();
    let answers: Option<Vec<u32>> = operations.list(count)?.into_iter().map(of).collect();
    let answers = answers.filter(|answers| !answers.is_empty()).ok_or(invalid)?;
    answers.into_iter().enumerate().try_for_each(|(index, answer)| capabilities.set_at(index, answer))
}

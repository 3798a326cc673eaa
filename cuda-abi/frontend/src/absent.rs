//! The answers of queries about abilities that no device of these libraries has.

use crate::{ErrorCode, In, Out};

/// `CU_ATOMIC_OPERATION_MAX`.
const GREATEST_ATOMIC: u32 = 13;
/// `CU_GRAPH_MEM_ATTR_USED_MEM_HIGH` and `CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH`, the greatest of them.
const USED_HIGH: u32 = 1;
const RESERVED_HIGH: u32 = 3;

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

/// Answers an attribute of the memory that graphs keep on a device: there is none.
///
/// # Errors
/// `invalid` for an attribute that the header does not have; a null pointer's error.
pub fn graph_memory<E: ErrorCode>(attribute: u32, value: Out<u64, E>, invalid: E) -> Result<(), E> {
    if attribute > RESERVED_HIGH { Err(invalid) } else { value.set(0) }
}

/// Sets an attribute of the memory that graphs keep on a device. A program can only reset the high-water marks.
///
/// # Errors
/// `invalid` for everything else; a null pointer's error.
pub fn set_graph_memory<E: ErrorCode>(attribute: u32, value: In<u64, E>, invalid: E) -> Result<(), E> {
    match attribute {
        USED_HIGH | RESERVED_HIGH if value.get()? == 0 => Ok(()),
        _ => Err(invalid),
    }
}

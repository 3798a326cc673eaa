//! The answers of queries about abilities that no device of these libraries has, or only some of those that a query is about.

use crate::{ErrorCode, In, Out};

/// `CU_ATOMIC_OPERATION_MAX`.
const GREATEST_ATOMIC: u32 = 13;

/// The value of a `CUdevice_P2PAttribute` of a link between two devices of which one `reaches` the memory of the other or not, with a
/// relative performance of `rank`; `None` for an attribute that the header does not have. Atomic operations over the link are not native
/// (see [`atomics`]), and kernels reach no array of the other device.
#[must_use]
pub const fn link_attribute(number: u32, reaches: bool, rank: i32) -> Option<i32> {
    const PERFORMANCE_RANK: u32 = 1;
    const ACCESS_SUPPORTED: u32 = 2;
    const LAST: u32 = 5;
    match number {
        PERFORMANCE_RANK => Some(rank),
        ACCESS_SUPPORTED => Some(reaches as i32),
        3..=LAST => Some(0),
        _ => None,
    }
}

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

//! The answers of queries about links between devices.

/// The value of a `CUdevice_P2PAttribute` of a link between two devices of which one `reaches` the memory of the other or not, with a
/// relative performance of `rank`; `None` for an attribute that the header does not have. Atomic operations over the link are not
/// native ([`atomics::NONE`](crate::atomics::NONE)), and kernels reach no array of the other device.
#[must_use]
pub const fn attribute(number: u32, reaches: bool, rank: i32) -> Option<i32> {
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

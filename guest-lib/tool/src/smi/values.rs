//! Texts for numbers of the library.

/// A name for a number of the library.
pub(crate) fn named(value: Option<u32>, names: &[&'static str]) -> &'static str {
    value.and_then(|value| names.get(value as usize).copied()).unwrap_or("N/A")
}

/// Names of modes that are on or off.
pub(crate) const SWITCH: &[&str] = &["Disabled", "Enabled"];
/// Names of compute modes.
pub(crate) const COMPUTE_MODES: &[&str] = &["Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"];

/// Bytes in MiB, rounded down as the vendor's tool does.
pub(crate) const fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

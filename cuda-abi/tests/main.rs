//! The facts of the ABI, against their data and against simple models.

// Too slow for Miri.
#[cfg(not(miri))]
mod image;
mod status;
#[cfg(not(miri))]
mod symbols;

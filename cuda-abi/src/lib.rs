//! Facts of the CUDA driver ABI shared by shim, worker and software GPU.
//!
//! - [`sys`]: the types and constants of the driver's header, and nothing that loads a library;
//! - [`symbols`]: exported names and the look-up rules of `cuGetProcAddress`;
//! - [`status`]: names and texts of result codes;
//! - [`attributes`]: device attributes that a guest must not see as they are;
//! - [`tables`]: the export tables, context-local storage, and (feature `cudart-handshake`) the start-up handshake;
//! - [`managed`]: advice about managed memory, and its range attributes;
//! - [`nvml`]: the management library, its layouts and its C surface;
//! - [`image`]: a bounded reader for the kernel images a program hands to the driver.
//!
//! The crate knows nothing of transport, sessions or devices. Bytes that come from a program are never trusted: every reader
//! here ends with a value or an error, within bounds that its caller gives.

pub mod attributes;
#[cfg(feature = "cudart-handshake")]
pub mod handshake;
mod identity;
pub mod image;
pub mod managed;
pub mod nvml;
mod perfect_hash;
pub mod status;
mod storage;
pub mod symbols;
pub mod tables;

pub use cudarc::driver::sys;

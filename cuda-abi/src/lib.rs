//! Facts of the CUDA driver ABI shared by shim, worker and software GPU.
//!
//! - [`sys`]: the types and constants of the driver's header, and nothing that loads a library;
//! - [`symbols`]: exported names and the look-up rules of `cuGetProcAddress`;
//! - [`status`]: names and texts of result codes;
//! - [`attributes`]: device attributes whose true value a guest must not get;
//! - [`tables`]: the export tables, context-local storage, and (feature `cudart-handshake`) the start-up handshake;
//! - [`managed`]: advice about managed memory, and its range attributes;
//! - [`image`]: a bounded reader for the kernel images that a program passes to the driver.
//!
//! The C surface of NVML is a separate crate, `sluice-nvml-abi`, because no user of these facts needs it.
//!
//! The crate knows nothing of transport, sessions or devices. It never trusts bytes of a program: every reader here returns a
//! value or an error, within bounds that its caller sets.

pub mod attributes;
#[cfg(feature = "cudart-handshake")]
pub mod handshake;
mod identity;
pub mod image;
pub mod managed;
mod perfect_hash;
pub mod status;
mod storage;
pub mod symbols;
pub mod tables;

pub use cudarc::driver::sys;

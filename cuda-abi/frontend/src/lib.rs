//! The front end of driver libraries: the code that each library needs to take the vendor's place in a program.
//!
//! - [`tables`]: the export tables, context-local storage, and (feature `cudart-handshake`) the start-up handshake;
//! - [`managed`]: advice about managed memory, and its range attributes.
//!
//! The guest's `libcuda.so.1` and the software GPU's stand on it. The facts of the ABI, which the worker needs as well, are those
//! of `sluice-cuda-abi`.
//!
//! The crate runs in the process of a program and trusts it as C does: a program that passes a wild pointer harms only itself. It
//! knows nothing of transport, sessions or devices, and it never waits.

#[cfg(feature = "cudart-handshake")]
pub mod handshake;
mod identity;
pub mod managed;
mod storage;
pub mod tables;

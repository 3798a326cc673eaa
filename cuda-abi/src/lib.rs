//! Facts of the CUDA driver ABI shared by shim, worker and software GPU.
//!
//! - [`sys`]: the types and constants of the driver's header, and nothing that loads a library;
//! - [`symbols`]: exported names and the look-up rules of `cuGetProcAddress`;
//! - [`status`]: names and texts of result codes;
//! - [`attributes`]: device attributes whose true value a guest must not get;
//! - [`image`]: a bounded reader for the images of code that a program passes to the driver (textures are those of `cuda-abi/images`);
//! - [`descriptors`]: structures that describe arrays, textures and surfaces;
//! - [`jit`]: the options of the driver's compiler and linker;
//! - [`occupancy`]: the threads that registers suffice for;
//! - [`resources`]: the structures of resources of devices.
//!
//! The code of libraries that take the vendor's place in a program is not here, because the worker needs none of it:
//! `sluice-cuda-frontend` has it, `sluice-cuda-graphs` has graphs and captures, `sluice-cuda-images` arrays, textures and surfaces, and
//! `sluice-nvml-abi` the C surface of NVML.
//!
//! The crate knows nothing of transport, sessions or devices. It never trusts bytes of a program: every reader here returns a
//! value or an error, within bounds that its caller sets.

pub mod attributes;
pub mod descriptors;
pub mod image;
pub mod jit;
pub mod occupancy;
mod perfect_hash;
pub mod resources;
pub mod status;
pub mod symbols;

pub use cudarc::driver::sys;

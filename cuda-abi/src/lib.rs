//! Facts of the CUDA driver ABI shared by shim, worker and software GPU.
pub mod attributes;
mod perfect_hash;
pub mod status;
pub mod symbols;
pub use cudarc::driver::sys;

//! The driver: one library, loaded by absolute path, one table of optional entry points.
//!
//! Worker and arbiter call the driver only through this crate ([`Driver`]'s methods, one per call). An entry point that the
//! library does not have answers `CUDA_ERROR_NOT_SUPPORTED`; this crate never panics if a driver is older than its table.

mod abi;
mod calls;
pub mod code;
mod driver;
mod libraries;
mod range;

pub use abi::{
    BlockToShared, Callback, EdgeData, Handle, HostFunction, LaunchAttribute, Rows, StreamCallback,
};
pub use calls::{
    ArrayCopy, ArrayCopyEnd, ArrayExtent, CompilerOptions, CompilerReport, CopyBox, CopyEnd, CopyMemory,
    DriverLink, ImageMemory, LaunchArguments, LogText, NodeCall, NodeFunction, NodeWork, Pitches, Pointer,
    WrittenValue,
};
pub use code::Code;
pub use driver::{Driver, DriverError};
pub use libraries::{LibraryError, load_further};
pub use range::{DeviceRange, HostRange};

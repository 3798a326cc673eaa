//! The front end of driver libraries: the code that each library needs to take the vendor's place in a program.
//!
//! - [`In`], [`Out`] and [`Text`]: pointers that a C program passes, checked and dereferenced in one place;
//! - [`enter`] and [`ErrorCode`]: the boundary to C, which no panic crosses, and its result codes;
//! - [`tables`]: the export tables, context-local storage, and (feature `cudart-handshake`) the start-up handshake;
//! - [`environment`]: the variables that users set for the vendor's driver;
//! - [`managed`]: advice about managed memory, and its range attributes;
//! - [`batch`]: the arguments of batched copies;
//! - [`launch_parameters`]: the parameters of a launch as one block;
//! - [`old_launches`]: launches whose block and parameters are set by calls before;
//! - [`stream_attributes`]: the values of streams that a program may set;
//! - [`trace`]: the calls of a program, written to a file;
//! - [`atomics`]: atomic operations on memory of another processor;
//! - [`links`]: links between devices;
//! - [`pci`]: the places of devices on the PCI bus;
//! - [`retains`]: the retains of primary contexts;
//! - [`handles`]: numbers that name objects.
//!
//! The guest's `libcuda.so.1` and the software GPU's stand on all of it, their `libnvidia-ml.so.1` on the first two points. The
//! facts of the ABI, which the worker needs as well, are those of `sluice-cuda-abi`.
//!
//! The crate runs in the process of a program and trusts it as C does: a program that passes a wild pointer harms only itself. It
//! knows nothing of transport, sessions or devices, and it never waits.

pub mod atomics;
pub mod batch;
mod entry;
pub mod environment;
pub mod handles;
#[cfg(feature = "cudart-handshake")]
pub mod handshake;
mod identity;
pub mod launch_parameters;
pub mod links;
pub mod managed;
pub mod old_launches;
pub mod pci;
mod pointers;
pub mod retains;
mod storage;
pub mod stream_attributes;
pub mod tables;
pub mod trace;

pub use entry::{ErrorCode, enter, given};
pub use pointers::{In, Out, Text, is_open_descriptor};

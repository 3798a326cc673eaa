//! A CUDA driver in software behind the vendor's C ABI.
//!
//! Built as a shared library it is `libcuda.so.1`: programs, the CUDA runtime and Sluice's worker load it as they load the
//! vendor's driver. Kernels are PTX, executed by the engine; device memory is the soft device's shared file.
//!
//! From the outside in: [`api`] holds the C entry points, thin and free of decisions; below it `context`, `module`, `launch`,
//! `copy`, `event` and `memory` carry a call out; `schedule` orders the work of streams and `share` bounds the threads that run
//! beside other processes; `gpu` and `process` hold the state that lives as long as the process.
//!
//! To run a program on it, put the library under its name first on the path of the loader:
//!
//! ```sh
//! ln -s "$PWD/target/release/libsoftgpu_cuda.so" /tmp/softgpu/libcuda.so.1
//! LD_LIBRARY_PATH=/tmp/softgpu SLUICE_SOFTGPU_MODEL=A100-40 ./program
//! ```
//!
//! `SLUICE_SOFTGPU_CONFIG` names a TOML file with `state`, `devices`, `nodes` and, under `[device]`, `model`, `scale`,
//! `threads`, `fill`, `memory`, `mig`, `mig_uuids`, `ecc`, `context_bytes` and `booking`; each also as a variable
//! `SLUICE_SOFTGPU_…`. `SLUICE_SOFTGPU_LOG=1` explains errors on standard error: the place of a fault, the reason for a refused
//! image, the name of a call that is not served.
//!
//! A device is one for all processes: memory travels between them as descriptors of the virtual-memory API or by IPC names,
//! each finds the content that the last one left, and they share the processor. Each context takes memory for itself. Graphs,
//! arrays and textures are not supported; their calls and attributes report that.
//!
//! The driver opens its files in `cuInit` and, except to export memory or to load a module from a file, never again. Its
//! threads start when the first work arrives, with all signals blocked. Nothing is torn down at exit: the device takes back a
//! process's memory when the process is gone.

pub mod api;
mod attributes;
mod context;
mod copy;
mod error;
mod event;
mod ffi;
mod gpu;
mod handles;
mod jit;
mod launch;
mod log;
mod memory;
mod module;
mod occupancy;
mod printed;
mod process;
mod schedule;
mod share;
mod stream;
mod tables;
mod visible;

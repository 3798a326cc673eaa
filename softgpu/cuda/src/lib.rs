//! A CUDA driver in software behind the vendor's C ABI.
//!
//! Built as a shared library it is `libcuda.so.1`: programs, the CUDA runtime and Sluice's worker load it as they load the
//! vendor's driver. Kernels are PTX, executed by the engine; device memory is the soft device's shared file.
//!
//! From the outside in: [`api`] holds the C entry points, thin and free of decisions. Below it, `process` starts the driver, and
//! `primary` and `ending` begin and end contexts; `launch`, `module`, `copy`, `event` and `stream` execute a call in a `context`,
//! and `graphs` executes many of them with one call. `arrays` keeps the storage of arrays, and `textures` serves textures and
//! surfaces over it. Of a context a `gpu` knows only the `queues`; `memory` is below the GPU, `schedule` orders the work of
//! streams, and `share` limits the threads that run beside other processes. A file imports only files below it.
//!
//! Folders from top to bottom: api, memory.
//!
//! To run a program on it, put the library under its name first on the path of the loader:
//!
//! ```sh
//! ln -s "$PWD/target/release/libsoftgpu_cuda.so" /tmp/softgpu/libcuda.so.1
//! LD_LIBRARY_PATH=/tmp/softgpu SLUICE_SOFTGPU_MODEL=A100-40 ./program
//! ```
//!
//! `SLUICE_SOFTGPU_CONFIG` names a TOML file with `state`, `devices`, `nodes` and, under `[device]`, `model`, `scale`, `threads`,
//! `fill`, `memory`, `mig`, `mig_uuids`, `ecc`, `context_bytes`, `booking`, `queue_depth`, `start_delay`, `late_free`, `time_limit_seconds`,
//! `lacks` (a list of abilities that the driver is to lack) and `has` (a list of properties that the device reports without having
//! them); each is also a variable `SLUICE_SOFTGPU_…`. With `SLUICE_SOFTGPU_LOG=1` the driver explains errors on standard error: the
//! place of a fault, the reason for a refused image, the name of an unsupported call.
//!
//! All processes share a device: they exchange memory as descriptors of the virtual-memory API or by IPC names, find the content
//! that earlier owners left, and share the processor. Each context takes memory for itself.
//!
//! The driver opens its files in `cuInit`; later it opens files only to export memory or to load a module from a file. Its
//! threads start when the first work arrives, with all signals blocked. It releases nothing at exit: the device takes back a
//! process's memory when the process is gone.

pub mod api;
mod arrays;
mod attributes;
mod capability;
mod conditions;
mod context;
mod copy;
mod ending;
mod error;
mod event;
mod ffi;
mod gpu;
mod graphs;
mod green;
mod green_contexts;
mod handles;
mod health;
mod image;
mod images;
mod jit;
mod launch;
mod lifetime;
pub mod linked;
mod linker;
mod lock;
mod log;
mod memory;
mod module;
mod multiprocessors;
mod occupancy;
mod peers;
mod primary;
mod printed;
mod process;
mod queues;
mod schedule;
mod share;
mod shared_event;
mod stream;
mod stream_values;
mod tables;
mod textures;
mod threads;
mod visible;

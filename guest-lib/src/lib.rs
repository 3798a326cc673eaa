//! The guest's `libcuda.so.1`: a drop-in for the vendor's, which sends the calls of one process to its worker.
//!
//! A call enters in [`exports`]; [`api`] answers it from the [`state`] that the process already has or by a wire call of
//! [`session`], which reaches the host over a [`transport`]. Each of these depends only on those named after it; [`process`]
//! composes them for [`api`], and for [`graphs`], which captures work of [`api`] instead of posting it. The library is a guest in a foreign process:
//! it starts no thread until one has to sleep, to run a function of the program or, over a virtual socket, to receive, blocks signals there,
//! allocates nothing on the launch path, holds its descriptors at high numbers, survives `fork` (the child gets
//! the error that it has no driver) and exit in any order, and never takes the process down: a bug of its own is an error code.
//!
//! Folders from top to bottom: api, graphs, state, session, transport.

mod api;
mod arguments;
mod checks;
mod error;
mod exports;
mod graphs;
mod host_memory;
mod images;
mod lifetime;
mod log;
mod process;
mod session;
mod spawn;
mod state;
pub mod transport;
mod turns;

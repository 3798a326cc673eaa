//! A real worker, mostly on the null driver; the test plays the device and the shim.

mod arbiter;
mod code;
mod custody;
mod faults;
mod figures;
mod gathered;
mod growth;
mod guest;
mod linker;
mod memory;
mod modules;
mod objects;
mod scrub;
mod softgpu;
mod streams;

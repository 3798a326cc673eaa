//! A real worker, mostly on the null driver; the test plays the device and the shim.

mod arbiter;
mod arrays;
mod code;
mod custody;
mod driver_libraries;
mod faults;
mod figures;
mod full_streams;
mod gathered;
mod graphs;
mod green;
mod growth;

mod guest;
mod host_calls;
mod linker;
mod memory;
mod modules;
mod peers;
mod scrub;
mod softgpu;
mod stream_values;
mod streams;

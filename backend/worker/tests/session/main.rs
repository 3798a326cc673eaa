//! A real worker, mostly on the null driver; device and shim are played by the test.

mod custody;
mod faults;
mod figures;
mod gathered;
mod growth;
mod guest;
mod lender;
mod memory;
mod modules;
mod scrub;
mod softgpu;
mod streams;

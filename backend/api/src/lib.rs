//! The management API of `sluiced`, as both of its ends know it.
//!
//! `sluiced` serves it; the command line, tests and tools ask. Here is everything that both must agree on: requests and answers ([`v1`]),
//! errors ([`Error`]), the words and numbers that the configuration and command lines share with them ([`ByteSize`], [`VmSpec`]), and
//! the one client ([`client`]). Nothing is decided here, and nothing of it needs an asynchronous runtime.

#![forbid(unsafe_code)]

mod byte_size;
pub mod client;
mod error;
pub mod http;
pub mod json;
pub mod v1;
mod vm_spec;

pub use self::{
    byte_size::{ByteSize, ByteSizeError},
    error::{Code, Error},
    vm_spec::{VmSpec, VmSpecError},
};

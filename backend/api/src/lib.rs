//! The management API of `sluiced`: the types that server and clients share.
//!
//! `sluiced` serves it; the command line, tests and tools are clients. This crate holds requests and answers ([`v1`]), errors ([`Error`]),
//! the types that the configuration and command lines share with them ([`ByteSize`], [`VmSpec`]), and the one client ([`client`]). It
//! makes no decisions and needs no asynchronous runtime.

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

//! The management API of `sluiced`: the types that server and clients share.
//!
//! `sluiced` serves it; the command line, tests and tools are clients. This crate holds requests and answers ([`v1`]), errors ([`Error`]),
//! the type that the configuration and command lines share with them ([`ByteSize`]), the one client ([`client`]), and the word of a
//! daemon to its supervisor ([`supervision`]). It makes no decisions and needs no asynchronous runtime.

#![forbid(unsafe_code)]

mod byte_size;
pub mod client;
mod error;
pub mod http;
pub mod json;
pub mod supervision;
pub mod v1;

pub use self::{
    byte_size::{ByteSize, ByteSizeError},
    error::{Code, Error},
};

//! The contract between guest and host.
//!
//! Everything that crosses from a guest into the backend is defined here and only here: the call table ([`calls`]) with its kinds of
//! parameters ([`field`], [`handle`], [`image`] for textures and surfaces, [`resources`] for green contexts), the records
//! that carry calls ([`record`]), the ring they travel in ([`ring`]), the answers ([`reply`]), the session page around both
//! ([`session`]), the view of shared memory that all of these use ([`shared`]), sleep without a lost wake-up ([`park`]), the virtio-gpu commands ([`gpu`]), the doorbell payloads inside them ([`doorbell`]), the frames for
//! guests that share no memory ([`stream`], and the memory that they carry: [`staged`]), the plans of graphs ([`graph`]), the report of a
//! compilation ([`jit`]) and every bound on a guest's requests ([`limits`]).
//!
//! This crate decodes hostile bytes. It contains no unsafe code, never indexes without a check, and allocates nothing whose
//! size a guest chooses.

#![forbid(unsafe_code)]
#![warn(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

pub mod calls;
pub mod doorbell;
pub mod field;
mod field_error;
pub mod gpu;
pub mod graph;
pub mod handle;
pub mod image;
pub mod jit;
pub mod limits;
pub mod park;
pub mod record;
pub mod reply;
pub mod resources;
pub mod ring;
pub mod session;
pub mod shared;
pub mod staged;
pub mod stream;

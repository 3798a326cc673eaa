//! Memory that another party changes at any time, and the descriptors through which it comes.
//!
//! The only code of shim and backend that touches shared pages: word accesses with an ordering and raw copies, never a
//! Rust reference to a byte of it ([`mapping`]), also where pages cannot be laid side by side ([`gathered`]); which pages of a
//! memory file another process may map ([`run`]) and which parts of it are free ([`ranges`]); what happens where a page is not there ([`bus`]); and SEQPACKET sockets that carry descriptors ([`socket`]).

pub mod bus;
pub mod gathered;
pub mod mapping;
pub mod ranges;
pub mod run;
pub mod socket;

pub use gathered::Gathered;
pub use mapping::{Mapping, Reservation};
pub use run::Run;

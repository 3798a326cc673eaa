//! Memory that another process can change at any time, and the descriptors through which it comes.
//!
//! It is the only code of shim and backend that touches shared pages: word accesses with an ordering and raw copies, never a
//! Rust reference to a byte of it ([`mapping`]), also for pages that cannot be mapped contiguously ([`gathered`]). In addition it
//! has the lists of pages of a memory file that another process may map ([`run`]), the free parts of a memory file
//! ([`ranges`]) and its existing pages ([`residency`]), the handling of missing pages ([`bus`]), SEQPACKET sockets that carry descriptors ([`socket`]),
//! and memory of a program whose pages are replaced by shared ones ([`takeover`]), with the thread's signals blocked ([`signals`]).

pub mod bus;
pub mod gathered;
pub mod mapping;
pub mod ranges;
pub mod residency;
pub mod run;
pub mod signals;
pub mod socket;
pub mod takeover;

pub use gathered::Gathered;
pub use mapping::{Mapping, Reservation};
pub use run::Run;

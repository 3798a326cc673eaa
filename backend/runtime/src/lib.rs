//! The common parts of all backend processes: the log ([`log`]), lines that a guest can cause ([`mod@limited`]), the logs
//! of children ([`child_log`]), token buckets ([`rate`]), processes by descriptor ([`process`]) and their ends ([`endable`]), the close of
//! descriptors that others have sent ([`closer`]), the time that a peer takes ([`peer_time`]), and the clock ([`clock`]).
//!
//! Every program of the backend links it, so it depends on no event loop and defines no message.

pub mod child_log;
pub mod clock;
pub mod closer;
pub mod endable;
pub mod limited;
pub mod log;
pub mod peer_time;
pub mod process;
pub mod rate;

#[doc(hidden)]
pub use tracing;

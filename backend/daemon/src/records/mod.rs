//! Records: everything that outlives a request, on disk and for those who watch.
//!
//! The registry and the units write here. Owns the checkpoint, the audit log, the events, the usage and the figures of `/metrics`. It
//! decides nothing, and nothing waits for its disk unless it asked for that.

pub(crate) mod journal;
pub(crate) mod metrics;
pub(crate) mod notice;
pub(crate) mod state;
pub(crate) mod trail;
pub(crate) mod usage;

//! Records: all data that outlives a request, on disk and for monitoring.
//!
//! The registry and the units write here. It owns the checkpoint, the audit log, the events, the usage and the figures of
//! `/metrics`. It decides nothing, and no caller waits for its disk without asking for that.

pub(crate) mod journal;
pub(crate) mod metrics;
pub(crate) mod notice;
pub(crate) mod state;
pub(crate) mod trail;
pub(crate) mod usage;

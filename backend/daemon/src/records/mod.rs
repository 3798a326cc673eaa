//! Records: all data that outlives a request.
//!
//! The registry and the units write here. It owns the checkpoint, the audit log, the events and the usage. It makes no
//! decisions, and a caller waits for its disk only on request.

pub(crate) mod audit_log;
pub(crate) mod event_counter;
pub(crate) mod journal;
pub(crate) mod state;
pub(crate) mod unit_event;
pub(crate) mod usage;

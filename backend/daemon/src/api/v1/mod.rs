//! Version 1 of the API: what clients send and get.
//!
//! Fields are added, never taken away or given another meaning; whatever else changes is another version.

pub(crate) mod capacity;
pub(crate) mod events;
pub(crate) mod health;
pub(crate) mod host;
pub(crate) mod sizes;
pub(crate) mod suggestions;
pub(crate) mod tree;
pub(crate) mod units;
pub(crate) mod usage;
pub(crate) mod vms;

use std::time::Duration;

use axum::http::StatusCode;

use crate::registry::Put;

/// How long units and VMs may take to say what they have.
const LOOK: Duration = Duration::from_secs(1);

/// 201 for what was not there, 200 for what was.
const fn status(put: Put) -> StatusCode {
    match put {
        Put::Made => StatusCode::CREATED,
        Put::Kept => StatusCode::OK,
    }
}

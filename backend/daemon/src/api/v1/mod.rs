//! Version 1 of the API: its routes, one function for each.
//!
//! A route parses a request, calls the registry, and converts between the types of the API (`sluice_api::v1`) and those of the
//! daemon. It decides nothing.

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

/// Time limit for units and VMs to report their memory.
const LOOK: Duration = Duration::from_secs(1);

/// 201 for a created object, 200 for an existing one.
const fn status(put: Put) -> StatusCode {
    match put {
        Put::Made => StatusCode::CREATED,
        Put::Kept => StatusCode::OK,
    }
}

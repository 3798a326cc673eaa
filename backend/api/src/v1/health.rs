//! `/healthz`, `/readyz`, `/metrics`: health, readiness and metrics.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon is healthy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Healthy {
    /// Always true.
    pub ok: bool,
}

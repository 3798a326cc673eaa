//! `/healthz`, `/readyz`, `/metrics`: health, readiness and metrics.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A good state of health.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Well {
    /// Always true.
    pub ok: bool,
}

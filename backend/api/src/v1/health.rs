//! `/healthz`, `/readyz`, `/metrics`: for those who watch over the daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// That it is well.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Well {
    /// Always true.
    pub ok: bool,
}

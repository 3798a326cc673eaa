//! `/v1/events`: what happens, as it happens.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Where to begin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// The token of the last event that was seen; events follow it. Without it, events from now on.
    #[param(max_length = 64)]
    pub after: Option<String>,
    /// Whether the answer goes on with what happens next; it does if not given. Else it ends when there is no more, and without
    /// `after` begins with the oldest event there is.
    pub follow: Option<bool>,
}

/// Something that has happened: one line of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts without a hole, through restarts of the daemon. A tenant, who does not see all events, is told none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// To go on behind this event. It tells nothing else.
    pub token: String,
    /// When, in milliseconds since 1970.
    pub time: u64,
    /// What. `gap`: events were lost, or the token is of before the machine was started. `alive`: nothing happened for a while.
    pub kind: String,
    /// The VM it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// More, for people.
    pub detail: String,
}

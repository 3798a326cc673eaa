//! `/v1/events`: the event stream.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Start and end of an event stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Token of the last event seen. The stream begins with the event after it. Default: the stream begins with the next event.
    #[param(max_length = 64)]
    pub after: Option<String>,
    /// True to wait for new events. False to end the stream after the last event so far; without `after` it then begins with the oldest
    /// event kept. Default: true.
    pub follow: Option<bool>,
}

/// An event: one line of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event, without gaps, also across restarts of the daemon. Absent for tenants, because they do not see all events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// Opaque token. Pass it as `after` to continue after this event.
    pub token: String,
    /// Time of the event, in milliseconds since 1970.
    pub time: u64,
    /// Kind of the event. `gap`: events were lost, or the token is older than the last boot of the machine. `alive`: no event happened for
    /// a while.
    pub kind: String,
    /// Name of the VM that the event is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Details for people.
    pub detail: String,
}

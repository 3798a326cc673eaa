//! The management API, asked as a program would.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;
use sluice_api::client::Client;

/// One request, on a connection of its own: the status, and the answer, which is null where it is empty.
///
/// # Errors
/// When nothing answers, or what is answered is no HTTP.
pub fn ask(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
    Client::at(socket).exchange(method, path, body).context("asking the management API")
}

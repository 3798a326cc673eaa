//! Requests to the management API, as a program would send them.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;
use sluice_api::{client::Client, v1::VmRequest};

/// One request, on a connection of its own: the status, and the answer, which is null if it is empty.
///
/// # Errors
/// When there is no answer, or the answer is not HTTP.
pub fn ask(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
    Client::at(socket).exchange(method, path, body).context("asking the management API")
}

/// Makes VMs by their numbers.
///
/// # Errors
/// When one is refused.
pub fn make_vms(socket: &Path, vms: &[(u32, VmRequest)]) -> Result<()> {
    let client = Client::at(socket);
    for (number, wanted) in vms {
        client.put_vm(&number.to_string(), wanted).with_context(|| format!("making VM {number}"))?;
    }
    Ok(())
}

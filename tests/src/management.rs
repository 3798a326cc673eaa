//! The management API, asked as a program would.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::direct::PATIENCE;

/// One request, on a connection of its own: the status, and the answer, which is null where it is empty.
///
/// # Errors
/// When nobody answers, or what is answered is no HTTP.
pub fn ask(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
    let mut stream = UnixStream::connect(socket).context("connecting to the management API")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: sluice\r\nConnection: close\r\n{kind}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer")?;
    let status = head.get(9..12).context("a status")?.parse()?;
    Ok((status, serde_json::from_str(body).unwrap_or_default()))
}

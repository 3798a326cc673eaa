//! The management API, as every command asks it.

use std::{env, fmt, io, path::PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::http::{self, Answer};

/// Where a system's sluiced answers.
const SOCKET: &str = "/run/sluice/api.sock";
/// Bytes of an answer: some ten thousand VMs.
const ANSWER: u64 = 64 << 20;

/// Which sluiced is asked, and how its answer is shown.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Api {
    /// The socket of the management API [default: SLUICE_API, or /run/sluice/api.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    socket: Option<PathBuf>,
    /// The directory of a `sluice host`, instead of a socket
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the API's answer as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Api {
    /// The one at a socket.
    pub(crate) const fn at(socket: PathBuf) -> Self {
        Self { socket: Some(socket), dir: None, json: false }
    }
}

/// What the API says when something cannot be done.
#[derive(Debug)]
pub(crate) struct Refusal {
    code: String,
    message: String,
    cause: Vec<String>,
}

/// Nobody answers.
#[derive(Debug)]
pub(crate) struct NoAnswer {
    socket: PathBuf,
    error: io::Error,
}

impl Refusal {
    fn of(answer: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(plain);
        let cause = answer["cause"].as_array().into_iter().flatten().filter_map(text).collect();
        Some(Self { code: text(&answer["code"])?, message: text(&answer["message"])?, cause })
    }

    /// Why, step by step.
    pub(crate) fn causes(&self) -> &[String] {
        &self.cause
    }

    /// Whether there is no such thing.
    pub(crate) fn is_absence(&self) -> bool {
        self.code == "not-found"
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} [{}]", self.message, self.code)?;
        self.cause.iter().try_for_each(|cause| write!(formatter, "\n  because: {cause}"))
    }
}

impl std::error::Error for Refusal {}

impl fmt::Display for NoAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "no sluiced answers at {}: {}", self.socket.display(), self.error)?;
        match self.error.kind() {
            io::ErrorKind::NotFound => {
                write!(formatter, "\n  is it running? --socket or SLUICE_API names another socket")
            }
            io::ErrorKind::PermissionDenied => {
                write!(
                    formatter,
                    "\n  only root, the user of sluiced and those whom its configuration gives a role may ask"
                )
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for NoAnswer {}

impl Api {
    pub(crate) fn socket(&self) -> PathBuf {
        match (&self.socket, &self.dir) {
            (Some(socket), _) => socket.clone(),
            (None, Some(directory)) => directory.join("api.sock"),
            (None, None) => env::var_os("SLUICE_API").map_or_else(|| SOCKET.into(), PathBuf::from),
        }
    }

    /// Asks; the answer's body is still to be read. What the API refuses is an error.
    pub(crate) fn open(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let socket = self.socket();
        let body = body.map(serde_json::to_vec).transpose()?;
        let answer = http::request(&socket, method, path, body.as_deref());
        let answer = answer.map_err(|error| NoAnswer { socket, error })?;
        if (200..300).contains(&answer.status) {
            return Ok(answer);
        }
        let status = answer.status;
        let text = answer.read(ANSWER).context("the API's error cannot be read")?;
        let refusal = serde_json::from_slice(&text).ok().and_then(|answer| Refusal::of(&answer));
        Err(refusal.map_or_else(|| anyhow::anyhow!("the API answers with status {status}"), Into::into))
    }

    /// Asks; null where the answer is empty. With it, whether something was made.
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(Value, bool)> {
        let answer = self.open(method, path, body)?;
        let made = answer.status == 201;
        let text = answer.read(ANSWER).context("the API's answer cannot be read")?;
        if text.is_empty() {
            return Ok((Value::Null, made));
        }
        Ok((serde_json::from_slice(&text).context("the API's answer is not JSON")?, made))
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        self.ask("GET", path, None).map(|(answer, _)| answer)
    }

    /// Shows an answer: as it is, or what `show` makes of it.
    pub(crate) fn print(&self, answer: &Value, show: impl FnOnce(&Value) -> String) -> Result<()> {
        let mut text = if self.json { serde_json::to_string_pretty(answer)? } else { show(answer) };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        print(&text)
    }
}

/// Writes to standard output. Who reads it may have had enough: that is no error.
pub(crate) fn print(text: &str) -> Result<()> {
    use std::io::Write as _;
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.context("cannot print"),
    }
}

/// Text without what a terminal would obey.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A name as a part of a path: what is no name of the API's is sent so that the API says so.
pub(crate) fn part(name: &str) -> String {
    let mut part = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            part.push(char::from(byte));
        } else {
            part.push_str(&format!("%{byte:02X}"));
        }
    }
    part
}

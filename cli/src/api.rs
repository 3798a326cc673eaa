//! The client of the management API, as every command uses it.

use std::{env, fmt, io, path::PathBuf, str::FromStr};

use anyhow::{Context as _, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use sluice_api::{
    Code, Error,
    client::{CallError, Client},
};

/// Socket of a system's sluiced.
const SOCKET: &str = "/run/sluice/api.sock";

/// Socket of sluiced, and form of the answer.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Api {
    /// Socket of the management API [default: SLUICE_API, or /run/sluice/api.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    socket: Option<PathBuf>,
    /// Directory of a `sluice host`, instead of a socket
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the API's answer as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// An error of the API.
#[derive(Debug)]
pub(crate) struct ApiRefusal(Error);

#[derive(Debug)]
pub(crate) struct NoAnswer {
    socket: PathBuf,
    error: io::Error,
}

impl ApiRefusal {
    /// Causes of the error, step by step.
    pub(crate) fn causes(&self) -> impl Iterator<Item = String> {
        self.0.cause.iter().map(|cause| plain(cause))
    }

    /// True if the object does not exist.
    pub(crate) fn is_absence(&self) -> bool {
        self.0.code == Code::NotFound
    }
}

impl fmt::Display for ApiRefusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} [{}]", plain(&self.0.message), self.0.code)?;
        self.causes().try_for_each(|cause| write!(formatter, "\n  because: {cause}"))
    }
}

impl std::error::Error for ApiRefusal {}

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
                    "\n  only root, the user of sluiced, and users with a role in its configuration may connect"
                )
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for NoAnswer {}

impl Api {
    /// The API of the sluiced at a socket.
    pub(crate) const fn at(socket: PathBuf) -> Self {
        Self { socket: Some(socket), dir: None, json: false }
    }

    fn socket(&self) -> PathBuf {
        match (&self.socket, &self.dir) {
            (Some(socket), _) => socket.clone(),
            (None, Some(directory)) => directory.join("api.sock"),
            (None, None) => env::var_os("SLUICE_API").map_or_else(|| SOCKET.into(), PathBuf::from),
        }
    }

    /// Sends a request; a refusal and a missing answer become errors that a person can read.
    pub(crate) fn ask<T>(&self, ask: impl FnOnce(&Client) -> Result<T, CallError>) -> Result<T> {
        ask(&Client::at(self.socket())).map_err(explained)
    }

    /// Prints an answer: as JSON, or as the text that `show` makes of it.
    pub(crate) fn print<T: Serialize>(&self, answer: &T, show: impl FnOnce(&T) -> String) -> Result<()> {
        let mut text = if self.json {
            // Converting to a value first sorts the fields by name.
            serde_json::to_string_pretty(&serde_json::to_value(answer)?)?
        } else {
            show(answer)
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        print(&text)
    }

    /// Prints the result of a request that has no answer.
    pub(crate) fn say(&self, done: impl FnOnce() -> String) -> Result<()> {
        self.print(&serde_json::Map::new(), |_| done())
    }
}

/// An error as the command line reports it.
pub(crate) fn explained(error: CallError) -> anyhow::Error {
    match error {
        CallError::NoAnswer { socket, error } => NoAnswer { socket, error }.into(),
        CallError::Refused(error) => ApiRefusal(error).into(),
        error => error.into(),
    }
}

/// Parses the words of an enumeration of the API, and lists them in the help.
pub(crate) fn words<T>(words: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: fmt::Debug> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).map(|word| word.parse().expect("a word of the API"))
}

/// Writes to standard output. A closed pipe is no error.
pub(crate) fn print(text: &str) -> Result<()> {
    use std::io::Write as _;
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.context("cannot print"),
    }
}

/// Text without the control characters that a terminal would execute.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

//! The log of the backend processes: `tracing` to standard error (see [`move_log`]), which is the journal if a service manager
//! started the process.
//!
//! Logging never panics, never fails and never waits: see [`output`].

pub mod output;

use std::{
    env::{self, VarError},
    fmt::Display,
    os::fd::BorrowedFd,
};

use tracing_subscriber::{EnvFilter, filter::ParseError};

/// Which events are said, by default warnings and errors: `info`, `debug`, `warn,sluice_daemon=trace`…
const VARIABLE: &str = "SLUICE_LOG";
const DEFAULT: &str = "warn";

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The variable is no list of levels.
    #[error("{VARIABLE} is {0:?}: {1}")]
    Filter(String, ParseError),
    /// The variable is no text.
    #[error("{VARIABLE}: {0}")]
    Text(VarError),
    /// It was started before.
    #[error(transparent)]
    Twice(#[from] tracing::subscriber::SetGlobalDefaultError),
}

/// Sends this process's events to standard error, from now on, one line each, and panics too.
///
/// # Errors
/// When `SLUICE_LOG` cannot be understood, or this is not the first time.
pub fn start() -> Result<(), LogError> {
    let filter = match env::var(VARIABLE) {
        Err(VarError::NotPresent) => filter("")?,
        text => filter(&text.map_err(LogError::Text)?)?,
    };
    // No colours, which a journal shows as binary data.
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(|| output::Event)
        // Else an event that cannot be formatted is told of by a macro that panics where standard error is gone.
        .log_internal_errors(false)
        .finish();
    // Not `init`, which would also collect what libraries log: some of that a guest can provoke at will.
    tracing::subscriber::set_global_default(subscriber)?;
    // Without a backtrace, which reads files and so cannot be made under a filter.
    std::panic::set_hook(Box::new(|panic| say(panic)));
    Ok(())
}

/// Moves the log from standard error to a descriptor of its own, which leads to the same place. Standard error is then free for a
/// library that writes there for another reader.
///
/// # Errors
/// When there are no descriptors left.
pub fn move_log() -> std::io::Result<BorrowedFd<'static>> {
    output::move_away()
}

/// Says something on standard error, whatever the levels are; for the last words of a program, and those before its log starts.
pub fn say(text: impl Display) {
    for line in text.to_string().lines() {
        output::put(line.as_bytes());
    }
}

fn filter(text: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::try_new(if text.is_empty() { DEFAULT } else { text })
        .map_err(|why| LogError::Filter(text.to_owned(), why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_word_warnings_are_said_and_what_is_no_level_is_refused() {
        assert_eq!(filter("").unwrap().to_string(), "warn");
        assert_eq!(filter("debug").unwrap().to_string(), "debug");
        assert!(matches!(filter("warn,=?"), Err(LogError::Filter(text, _)) if text == "warn,=?"));
    }
}

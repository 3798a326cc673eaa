//! The log of the backend processes: `tracing` to standard error (see [`move_log`]), which is the journal if a service manager
//! started the process.
//!
//! Every process of the backend calls [`start`] first. It owns the filter and the format of lines. It must never end or delay the
//! process that logs.
//!
//! Logging never panics, never fails and never waits: see [`output`].

pub mod output;

use std::{
    env::{self, VarError},
    fmt::Display,
    os::fd::BorrowedFd,
};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    filter::{ParseError, Targets},
    layer::SubscriberExt as _,
};

/// The variable with the levels to log, by default warnings and errors: `info`, `debug`, `warn,sluice_daemon=trace`…
const VARIABLE: &str = "SLUICE_LOG";
const DEFAULT: &str = "warn";

/// The reason why the log cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The variable is not a valid list of levels.
    #[error("{VARIABLE} is {0:?}: {1}")]
    Filter(String, ParseError),
    /// The variable is not valid text.
    #[error("{VARIABLE}: {0}")]
    Text(VarError),
    /// The log was started before.
    #[error(transparent)]
    Twice(#[from] tracing::subscriber::SetGlobalDefaultError),
}

/// Sends this process's events and panics to standard error, from now on, one line each.
///
/// # Errors
/// [`LogError`] if `SLUICE_LOG` is invalid, or the log was started before.
pub fn start() -> Result<(), LogError> {
    let filter = match env::var(VARIABLE) {
        Err(VarError::NotPresent) => filter("")?,
        text => filter(&text.map_err(LogError::Text)?)?,
    };
    // Without colours, which a journal shows as binary data.
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(|| output::EventWriter)
        // Otherwise a macro that panics without standard error reports events that cannot be formatted.
        .log_internal_errors(false)
        .finish()
        .with(filter);
    // Not `init`, which would also collect the logs of libraries: a guest can cause some of them at will.
    tracing::subscriber::set_global_default(subscriber)?;
    // Without a backtrace, which reads files and is impossible under a filter.
    std::panic::set_hook(Box::new(|panic| say(panic)));
    Ok(())
}

/// Moves the log from standard error to a descriptor of its own with the same destination. Standard error is then free for a
/// library that writes there for another reader.
///
/// # Errors
/// The kernel's error if there are no descriptors left.
pub fn move_log() -> std::io::Result<BorrowedFd<'static>> {
    output::move_away()
}

/// Writes a line to standard error at any level; for the last lines of a program, and those before its log starts.
pub fn say(text: impl Display) {
    for line in text.to_string().lines() {
        output::put(line.as_bytes());
    }
}

/// Levels by module; errors of modules that the text does not name are logged. Spans and fields are no part of it: their filter would
/// link a matcher of regular expressions, whose tables each process relocates at its start.
fn filter(text: &str) -> Result<Targets, LogError> {
    // An empty item would stand for the lowest level.
    let items: Vec<&str> = text.split(',').filter(|item| !item.trim().is_empty()).collect();
    let items = if items.is_empty() { DEFAULT.to_owned() } else { items.join(",") };
    let levels: Targets = items.parse().map_err(|why| LogError::Filter(text.to_owned(), why))?;
    Ok(if levels.default_level().is_none() { levels.with_default(LevelFilter::ERROR) } else { levels })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn log_filter_defaults_to_warn_and_a_bad_filter_is_refused() {
        assert_eq!(filter("").unwrap().to_string(), "warn");
        assert_eq!(filter("debug").unwrap().to_string(), "debug");
        assert_eq!(filter("debug,").unwrap().to_string(), "debug");
        let one = filter("sluice_daemon=trace").unwrap();
        assert!(one.would_enable("sluice_daemon::units", &Level::TRACE));
        assert!(one.would_enable("sluice_messages", &Level::ERROR));
        assert!(!one.would_enable("sluice_messages", &Level::WARN));
        assert!(matches!(filter("warn,=?"), Err(LogError::Filter(text, _)) if text == "warn,=?"));
    }
}

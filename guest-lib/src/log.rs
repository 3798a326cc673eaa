//! Messages of the shim on stderr, which a user can act on. `SLUICE_LOG` sets the level (`off`, `error`, `warn`, `info`, `debug`).
//!
//! The library lives in foreign programs whose output may be parsed, so by default it writes errors and warnings only, each
//! warning once, and nothing twice in a row within a minute: programs repeat requests that fail again and again.

use std::{
    fmt::Arguments,
    os::fd::AsFd as _,
    sync::{Mutex, OnceLock},
    time::{Duration, Instant},
};

/// Time for which a line is not repeated.
const QUIET: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("SLUICE_LOG").as_deref() {
        Ok("off") => Level::Off,
        Ok("error") => Level::Error,
        Ok("info") => Level::Info,
        Ok("debug" | "trace") => Level::Debug,
        _ => Level::Warn,
    })
}

fn say(at: Level, message: Arguments<'_>) {
    static LAST: Mutex<Option<(Instant, String)>> = Mutex::new(None);
    if level() < at {
        return;
    }
    let line = format!("sluice: {message}\n");
    // Another thread that holds the lock is writing, or does not exist in this forked child: do not wait for it.
    if let Ok(mut last) = LAST.try_lock() {
        if last.as_ref().is_some_and(|(said, last)| *last == line && said.elapsed() < QUIET) {
            return;
        }
        *last = Some((Instant::now(), line.clone()));
    }
    // Without the standard library's lock, for the same reason. An error is ignored: the program may have closed stderr.
    let _ = rustix::io::write(std::io::stderr().as_fd(), line.as_bytes());
}

pub(crate) fn error(message: Arguments<'_>) {
    say(Level::Error, message);
}

pub(crate) fn warn(message: Arguments<'_>) {
    say(Level::Warn, message);
}

pub(crate) fn info(message: Arguments<'_>) {
    say(Level::Info, message);
}

pub(crate) fn debug(message: Arguments<'_>) {
    say(Level::Debug, message);
}

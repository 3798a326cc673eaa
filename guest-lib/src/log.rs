//! Messages of the shim: on stderr, only what a user can act on, level by `SLUICE_LOG` (`off`, `error`, `warn`, `info`).
//!
//! The library lives in foreign programs whose output may be parsed, so by default it says errors and warnings only, and
//! each warning once.

use std::{fmt::Arguments, io::Write as _, sync::OnceLock};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Off,
    Error,
    Warn,
    Info,
}

fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("SLUICE_LOG").as_deref() {
        Ok("off") => Level::Off,
        Ok("error") => Level::Error,
        Ok("info" | "debug" | "trace") => Level::Info,
        _ => Level::Warn,
    })
}

fn say(at: Level, message: Arguments<'_>) {
    if level() >= at {
        // The program may have closed its stderr; there is nobody else to tell.
        let _ = writeln!(std::io::stderr(), "sluice: {message}");
    }
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

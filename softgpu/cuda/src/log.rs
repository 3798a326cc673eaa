//! Messages on standard error, only if `SLUICE_SOFTGPU_LOG` is set.

use std::io::Write as _;
use std::sync::OnceLock;

static ENABLED: OnceLock<bool> = OnceLock::new();

/// True if messages are enabled; the variable is read once.
pub(crate) fn enabled() -> bool {
    *ENABLED.get_or_init(|| std::env::var_os("SLUICE_SOFTGPU_LOG").is_some_and(|value| !value.is_empty()))
}

/// Writes one line; errors of standard error are ignored.
pub(crate) fn line(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "softgpu: {text}");
}

/// Logs one line if messages are enabled.
macro_rules! log {
    ($($argument:tt)*) => {
        if $crate::log::enabled() {
            $crate::log::line(format_args!($($argument)*));
        }
    };
}
pub(crate) use log;

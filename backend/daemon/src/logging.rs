//! Diagnostics: `tracing` to standard error, level from `SLUICE_LOG`.

use tracing_subscriber::EnvFilter;

/// What is said when `SLUICE_LOG` is not set.
pub const DEFAULT: &str = "warn";

/// Sends this process's events to standard error. `SLUICE_LOG` says which (`info`, `debug`, `sluice_daemon=trace`…); without
/// it, warnings and errors.
///
/// # Errors
/// When `SLUICE_LOG` cannot be understood.
pub fn start() -> anyhow::Result<()> {
    use anyhow::Context as _;
    let filter = match std::env::var("SLUICE_LOG") {
        Ok(text) => EnvFilter::try_new(&text).with_context(|| format!("SLUICE_LOG is {text:?}"))?,
        Err(_) => EnvFilter::new(DEFAULT),
    };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    Ok(())
}

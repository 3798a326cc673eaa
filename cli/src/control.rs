//! `sluice status`.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

/// Where a system's sluiced answers.
const CONTROL: &str = "/run/sluice/control.sock";
/// Bytes of an answer.
const ANSWER: u64 = 1 << 20;
/// How long sluiced may take.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Arguments {
    /// The directory of a `sluice host`
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The control socket of a sluiced [default: /run/sluice/control.sock]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Prints what a sluiced says it has.
pub(crate) fn status(arguments: &Arguments) -> Result<()> {
    let path = match (&arguments.dir, &arguments.control) {
        (Some(directory), _) => directory.join("control.sock"),
        (None, Some(path)) => path.clone(),
        (None, None) => CONTROL.into(),
    };
    let line = ask(&path).with_context(|| format!("no sluiced answers at {}", path.display()))?;
    let status: serde_json::Value = serde_json::from_str(&line).context("sluiced's answer is not JSON")?;
    let text = serde_json::to_string_pretty(&status)?;
    writeln!(std::io::stdout(), "{text}").context("cannot print")
}

fn ask(path: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(b"status\n")?;
    let mut line = String::new();
    BufReader::new(stream.take(ANSWER)).read_line(&mut line)?;
    ensure!(line.ends_with('\n'), "its answer was cut short");
    Ok(line)
}

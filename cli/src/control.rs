//! `sluice status`, `sluice fence`, `sluice readmit`: questions to a running sluiced.

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
const PATIENCE: Duration = Duration::from_secs(45);

/// Which sluiced.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
struct Which {
    /// The directory of a `sluice host`
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The control socket of a sluiced [default: /run/sluice/control.sock]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Status {
    #[command(flatten)]
    which: Which,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Fence {
    #[command(flatten)]
    which: Which,
    /// The VM
    vm: u32,
    /// Why, for the log
    #[arg(long, value_name = "TEXT", default_value = "operator")]
    reason: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Readmit {
    #[command(flatten)]
    which: Which,
    /// The VM
    #[arg(required_unless_present = "unit")]
    vm: Option<u32>,
    /// A quarantined unit instead
    #[arg(long, value_name = "N", conflicts_with = "vm")]
    unit: Option<u32>,
}

/// Prints what a sluiced says it has.
pub(crate) fn status(arguments: &Status) -> Result<()> {
    print(&arguments.which.ask("status")?)
}

/// Fences a VM; prints where it stands.
pub(crate) fn fence(arguments: &Fence) -> Result<()> {
    let reason: String = arguments.reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    print(&arguments.which.ask(&format!("fence {} {reason}", arguments.vm))?)
}

/// Admits a VM or a unit again; prints where it stands.
pub(crate) fn readmit(arguments: &Readmit) -> Result<()> {
    let question = match (arguments.vm, arguments.unit) {
        (Some(vm), _) => format!("readmit {vm}"),
        (None, Some(unit)) => format!("readmit-unit {unit}"),
        (None, None) => anyhow::bail!("neither a VM nor a unit"),
    };
    print(&arguments.which.ask(&question)?)
}

fn print(answer: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(answer)?;
    writeln!(std::io::stdout(), "{text}").context("cannot print")
}

impl Which {
    fn ask(&self, question: &str) -> Result<serde_json::Value> {
        let path = match (&self.dir, &self.control) {
            (Some(directory), _) => directory.join("control.sock"),
            (None, Some(path)) => path.clone(),
            (None, None) => CONTROL.into(),
        };
        let line =
            ask(&path, question).with_context(|| format!("no sluiced answers at {}", path.display()))?;
        let answer: serde_json::Value =
            serde_json::from_str(&line).context("sluiced's answer is not JSON")?;
        if let Some(error) = answer["error"].as_str() {
            anyhow::bail!("{error}");
        }
        Ok(answer)
    }
}

fn ask(path: &Path, question: &str) -> Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{question}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(ANSWER)).read_line(&mut line)?;
    ensure!(line.ends_with('\n'), "its answer was cut short");
    Ok(line)
}

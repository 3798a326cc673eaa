//! Asks a GPU the open questions of the design, and writes each answer down as soon as it is known.
//!
//! `run` starts one child process per step (this program again, with a hidden subcommand), each with a limit of its own, and
//! kills it with everything that it started when it hangs. So a step that hangs or crashes costs only itself.
//!
//! The phase `questions` needs the driver's libraries and nothing else; the others need the bundle beside the program.
//! It owns the files of its output folder; it never changes a setting of the GPU, and it leaves no process behind.
//!
//! Folders from top to bottom: custody, programs, frameworks, questions, worker.

mod bench;
mod bundle;
mod child;
mod custody;
mod driver;
mod frameworks;
mod host;
mod kernels;
mod libraries;
mod link;
mod measure;
mod nvml;
mod phases;
mod programs;
mod questions;
mod results;
mod rows;
mod runner;
mod running;
mod signals;
mod step;
mod stop;
mod system;
mod time;
mod worker;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};

/// Asks a GPU the open questions of Sluice's design, and compares CUDA programs natively and through Sluice.
#[derive(Debug, Parser)]
#[command(name = "sluice-hardware", version)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Run the phases and write the results to the folder OUT.
    Run {
        /// Folder for results; it is created if it does not exist.
        out: PathBuf,
        /// Run only this phase; can be repeated. Default: all, in order of worth.
        #[arg(long = "phase", value_name = "NAME")]
        phases: Vec<String>,
        /// Run only this step; can be repeated. Default: all steps of the phases.
        #[arg(long = "step", value_name = "NAME")]
        steps: Vec<String>,
        /// End after this many minutes; each phase also has a limit of its own. Steps that did not start by then are reported.
        #[arg(long, default_value_t = 45.0)]
        minutes: f64,
        /// Run fewer steps and rounds of each kind, as a rehearsal in CI does.
        #[arg(long)]
        short: bool,
        #[command(flatten)]
        libraries: Libraries,
    },
    /// List the phases, their steps and their limits.
    List {
        /// Print the questions as Markdown tables.
        #[arg(long)]
        table: bool,
    },
    /// Run one step in this process.
    #[command(hide = true)]
    Step {
        name: String,
        #[arg(long)]
        short: bool,
        #[command(flatten)]
        libraries: Libraries,
    },
    /// Run a CUDA program as a part of a step; it ends with its parent.
    #[command(hide = true)]
    Program {
        /// File for the program's end and its time; without it, this process becomes the program.
        #[arg(long)]
        report: Option<PathBuf>,
        #[arg(required = true, last = true)]
        words: Vec<OsString>,
    },
    /// Serve the commands of a step; the socket is standard input.
    #[command(hide = true)]
    Worker {
        /// Become this user first.
        #[arg(long)]
        user: Option<u32>,
        #[command(flatten)]
        libraries: Libraries,
    },
}

/// The driver's libraries.
#[derive(Clone, Debug, Args)]
struct Libraries {
    /// Path of the CUDA driver. Default: libcuda.so.1 in the loader's folders.
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
    /// Path of NVML. Default: libnvidia-ml.so.1 in the loader's folders.
    #[arg(long, value_name = "PATH")]
    nvml: Option<PathBuf>,
}

impl Libraries {
    fn find(self) -> Result<libraries::Libraries> {
        libraries::Libraries::find(self.driver, self.nvml)
    }
}

fn main() -> ExitCode {
    match act(Cli::parse().command) {
        Ok(code) => code,
        Err(failed) => {
            // The terminal may be gone, and `eprintln` would panic.
            let _ = writeln!(std::io::stderr(), "sluice-hardware: {failed:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(action: Action) -> Result<ExitCode> {
    match action {
        Action::Run { out, phases, steps, minutes, short, libraries } => {
            let run = runner::Run::new(&out, &phases, &steps, minutes, short, libraries.find()?)?;
            Ok(if run.all()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Action::List { table } => {
            phases::list(table);
            Ok(ExitCode::SUCCESS)
        }
        Action::Step { name, short, libraries } => {
            let question = phases::find(&name).with_context(|| format!("no step is named {name}"))?;
            step::run(question, libraries.find()?, short)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Program { report, words } => {
            Ok(ExitCode::from(programs::start::serve(report.as_deref(), &words)?))
        }
        Action::Worker { user, libraries } => {
            worker::serve(user, libraries.find()?)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

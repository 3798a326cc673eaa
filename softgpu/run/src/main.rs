//! `softgpu-run`, which runs a program on the software GPU and changes nothing else on the machine.

mod device;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use softgpu_device::{MODELS, SETTINGS};
use softgpu_run::{InstalledFile, ProgramEnd, Signals, StartError};

use device::{DeviceOptions, RunFolder};

/// The program that takes the place of the vendor's assembler.
const ASSEMBLER: InstalledFile = InstalledFile { file: "softgpu-ptxas", folder: "/usr/bin" };
/// Variables by which Triton finds its assembler, for GPUs before Blackwell and for Blackwell.
const ASSEMBLER_VARIABLES: [&str; 2] = ["TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"];

/// Run a program on a GPU in software.
///
/// The program finds a CUDA driver and an NVML that run on the CPU, before any that are installed, and devices of its own, which end
/// with it. Nothing else on the machine changes. Standard input, output, signals and the exit status are those of the program.
#[derive(Debug, Parser)]
#[command(name = "softgpu-run", version, arg_required_else_help = true)]
struct Arguments {
    #[command(flatten)]
    device: DeviceOptions,
    /// Explain errors on standard error: the place of a fault, the reason for a refused image, the name of a missing call
    #[arg(long)]
    log: bool,
    /// Write the manual page into a directory and exit; for packages
    #[arg(long, hide = true, value_name = "DIR", exclusive = true)]
    manual: Option<PathBuf>,
    /// Program and its arguments
    #[arg(
        required_unless_present = "manual",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

/// The end of the help: models and variables from their tables.
fn notes() -> String {
    let mut text = "Examples:
  softgpu-run ./vectorAdd                     run a CUDA program
  softgpu-run --model H100-80 ./deviceQuery   imitate another GPU
  softgpu-run --memory 4GiB python train.py   give each device 4 GiB

Models:
"
    .to_owned();
    // Writing to a String cannot fail.
    for model in MODELS {
        let (sm, gib) = (model.capability.sm(), model.memory_mib.div_ceil(1024));
        let _ = writeln!(text, "  {:<12} capability {}.{}, {gib} GiB", model.key, sm / 10, sm % 10);
    }
    text.push_str("\nVariables, which an option overrides:\n");
    for setting in SETTINGS {
        let _ = writeln!(text, "  {}={}", setting.variable, setting.values.replace('`', ""));
        let _ = writeln!(text, "      {} Default: {}.", setting.meaning, setting.default.replace('`', ""));
    }
    text.push_str(
        "
Exit status:
  that of the program, or
  125  softgpu-run itself failed; 126: the program cannot be run; 127: the program does not exist
  A signal that ends the program ends softgpu-run, too.",
    );
    text
}

fn main() -> ExitCode {
    let command = Arguments::command().after_long_help(notes());
    let arguments = command.clone().get_matches();
    let result = Arguments::from_arg_matches(&arguments).map_err(anyhow::Error::from).and_then(|arguments| {
        match &arguments.manual {
            Some(folder) => {
                ensure!(folder.is_dir(), "there is no directory {}", folder.display());
                clap_mangen::generate_to(command, folder).context("writing the manual page")?;
                Ok(ProgramEnd::Exited(0))
            }
            None => run(&arguments),
        }
    });
    match result {
        Ok(end) => end.pass_on(),
        Err(error) => {
            eprintln!("softgpu-run: {error:#}");
            // As with env and timeout: 125 is a failure of the tool itself.
            ExitCode::from(error.downcast_ref::<StartError>().map_or(125, StartError::code))
        }
    }
}

/// Runs the program; returns how it ended, after everything is cleaned up.
fn run(arguments: &Arguments) -> Result<ProgramEnd> {
    let (driver, management) = (InstalledFile::SOFTGPU.find()?, InstalledFile::SOFTGPU_NVML.find()?);
    // From here on no signal ends this process before it has cleaned up.
    let signals = Signals::take().context("cannot block signals")?;
    let folder = RunFolder::make(&arguments.device)?;
    let libraries = folder.path().join("lib");
    softgpu_run::offer_driver(&libraries, &driver, Some(&management))?;

    let (program, words) = arguments.program.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.args(words).env("LD_LIBRARY_PATH", softgpu_run::search_first(&libraries));
    command.envs(folder.variables());
    if arguments.log {
        command.env("SLUICE_SOFTGPU_LOG", "1");
    }
    // A Triton that finds the vendor's assembler makes code that this driver cannot run.
    if let Ok(assembler) = ASSEMBLER.find() {
        let unset = ASSEMBLER_VARIABLES.into_iter().filter(|name| std::env::var_os(name).is_none());
        command.envs(unset.map(|name| (name, &assembler)));
    }
    softgpu_run::run(command, &signals, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_each_model_and_each_variable() {
        let help = Arguments::command().after_long_help(notes()).render_long_help().to_string();
        for model in MODELS {
            assert!(help.contains(model.key), "{}", model.key);
        }
        for setting in SETTINGS {
            assert!(help.contains(setting.variable), "{}", setting.variable);
        }
        Arguments::command().debug_assert();
    }
}

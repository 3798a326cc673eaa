//! `sluice run`: runs a program of this host through Sluice.

use std::{
    env, ffi::OsString, fs::Permissions, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command,
};

use anyhow::{Context as _, Result};
use sluice_api::v1::VmRequest;
use softgpu_run::{Companion, ProgramEnd, Signals};

use crate::{
    backend::{Backend, BackendParameters, Start},
    backend_options::BackendOptions,
    files,
    softgpu::SoftDevice,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: BackendOptions,
    /// Run the program directly on the driver, without Sluice
    #[arg(long)]
    native: bool,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Directory for temporary files: the user's choice, or else memory if the system offers that. Removing a directory from a disk
/// takes as long as everything else here.
fn temporary() -> PathBuf {
    match (env::var_os("TMPDIR"), env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)) {
        (None, Some(directory)) if directory.is_dir() => directory,
        _ => env::temp_dir(),
    }
}

/// Runs a program; returns how it ended, after everything is cleaned up.
pub(crate) fn run(arguments: Arguments) -> Result<ProgramEnd> {
    let options = &arguments.options;
    let driver = files::driver(options.driver.as_deref(), options.nvml.as_deref())?;
    let shim = (!arguments.native).then(|| files::SHIM.find()).transpose()?;
    let management = match arguments.native {
        false => Some(files::SHIM_NVML.find()?),
        // If no NVML is given beside a driver, the program finds the system's.
        true => driver.nvml.clone(),
    };
    // From here on no signal ends this process before it has cleaned up.
    let signals = Signals::take().context("cannot block signals")?;
    let directory = tempfile::Builder::new()
        .prefix("sluice-run-")
        // A user who can reach the sockets has the session.
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(temporary())
        .context("cannot make a temporary directory")?;
    let libraries = directory.path().join("lib");
    softgpu_run::offer_driver(&libraries, shim.as_ref().unwrap_or(&driver.library), management.as_deref())?;

    let mut words = arguments.program.into_iter();
    let mut command = Command::new(words.next().context("no program")?);
    command.args(words).env("LD_LIBRARY_PATH", softgpu_run::search_first(&libraries));
    if let Some(log) = &options.log {
        command.env("SLUICE_LOG", log);
    }
    if arguments.native {
        return softgpu_run::run(command, &signals, None);
    }

    let device = driver.embedded.then(|| SoftDevice::make(options.memory)).transpose()?;
    let wanted = BackendParameters {
        directory: directory.path(),
        driver: &driver,
        device: device.as_ref(),
        vm: VmRequest { direct: true, ..options.vm() },
        ephemeral: true,
        // The program's shim applies them; a worker with the variables would apply them twice.
        without: &[
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_ORDER",
            "CUDA_LAUNCH_BLOCKING",
            "CUDA_MODULE_LOADING",
            "CUDA_FORCE_PTX_JIT",
            "CUDA_DISABLE_PTX_JIT",
        ],
        mapped_runs: arguments.options.mapped_runs,
        trust_vmm_memory: false,
        log: options.log.as_deref(),
    };
    let backend = match Backend::start(&wanted, &signals)? {
        Start::Ready(backend) => backend,
        Start::Interrupted(signal) => return Ok(ProgramEnd::Killed(signal.number())),
    };
    if let Some(signal) = backend.wait_lending(directory.path(), &signals)? {
        return Ok(ProgramEnd::Killed(signal.number()));
    }
    command.env("SLUICE_TRANSPORT", "direct");
    command.env("SLUICE_SOCKET", wanted.socket());
    // Running sessions go on without sluiced, and only the program can tell if it needs more.
    let ended = "sluice: sluiced has ended; running sessions go on, new ones cannot start";
    let companion = Companion { process: backend.process(), ended };
    let ended = softgpu_run::run(command, &signals, Some(companion));
    drop(backend);
    ended
}

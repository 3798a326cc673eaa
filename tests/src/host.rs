//! The host side of Sluice for one VM, as its own processes: started by the command line tool, as by a user.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use sluice_kit::wait::TIMEOUT;
use tempfile::TempDir;

use crate::debian::Series;
use crate::paths::Binaries;
use crate::process::{Background, Finished, run};

/// `sluiced` and a device that waits for its VM. Dropping it ends them.
pub struct Host {
    process: Background,
    socket: PathBuf,
    folder: TempDir,
}

impl Host {
    /// Starts the host side for a guest of `series`, on the software GPU or on the driver at `driver`.
    ///
    /// # Errors
    /// When it does not become ready; the message holds its output.
    pub fn start(binaries: &Binaries, series: Series, driver: Option<&Path>) -> Result<Self> {
        let driver = driver.map(|driver| driver.display().to_string());
        let options: Vec<&str> = driver.iter().flat_map(|driver| ["--driver", driver]).collect();
        Self::start_with(binaries, series, &options, &[])
    }

    /// The same on the software GPU, with further options of `sluice host` and variables of its environment.
    ///
    /// # Errors
    /// As [`Host::start`].
    pub fn start_with(
        binaries: &Binaries,
        series: Series,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("sluice-host-").tempdir().context("creating a folder")?;
        let mut command = Command::new(binaries.get("sluice")?);
        command.arg("host").arg("--dir").arg(folder.path());
        command.arg("--scanouts").arg(series.max_outputs().to_string());
        command.args(options).envs(environment.iter().copied());
        let mut process = Background::start("sluice host", &mut command, &folder.path().join("test.log"))?;
        let socket = process.wait_for_line("vhost-user socket:", TIMEOUT)?.into();
        Ok(Self { process, socket, folder })
    }

    /// The socket for the VM's graphics device.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The folder of sockets, logs and state.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Process id of `sluice host`.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.id()
    }

    /// The output so far.
    #[must_use]
    pub fn printed(&self) -> String {
        self.process.printed()
    }

    /// Ends it as an operator would, and waits.
    ///
    /// # Errors
    /// When it does not end by itself, or not with status 0.
    pub fn stop(mut self) -> Result<ExitStatus> {
        let status = self.process.terminate(TIMEOUT)?;
        if !status.success() {
            bail!("sluice host ended with {status}:\n{}", self.process.printed());
        }
        Ok(status)
    }
}

/// A folder for the device of a program that runs straight on the driver. Dropped, it takes the device along.
///
/// # Errors
/// When it cannot be created.
pub fn own_device() -> Result<TempDir> {
    tempfile::Builder::new().prefix("sluice-native-").tempdir_in("/dev/shm").context("a folder for a device")
}

/// Runs a program of this host straight on a software GPU of its own, for comparison.
///
/// # Errors
/// When it does not end within `limit`.
pub fn run_native(
    binaries: &Binaries,
    program: &Path,
    arguments: &[&str],
    limit: Duration,
) -> Result<Finished> {
    run_native_with(binaries, program, arguments, &[], limit)
}

/// As [`run_native`], with variables of its environment.
///
/// # Errors
/// As [`run_native`].
pub fn run_native_with(
    binaries: &Binaries,
    program: &Path,
    arguments: &[&str],
    environment: &[(&str, &Path)],
    limit: Duration,
) -> Result<Finished> {
    let device = own_device()?;
    let mut command = sluice_run(binaries, &["--native"])?;
    command.env("SLUICE_SOFTGPU_STATE", device.path()).envs(environment.iter().copied());
    run(command.arg(program).args(arguments), limit)
}

/// Runs a program of this host through device and worker, without a VM.
///
/// # Errors
/// When it does not end within `limit`.
pub fn run_direct(
    binaries: &Binaries,
    program: &Path,
    arguments: &[&str],
    limit: Duration,
) -> Result<Finished> {
    run(sluice_run(binaries, &[])?.arg(program).args(arguments), limit)
}

fn sluice_run(binaries: &Binaries, options: &[&str]) -> Result<Command> {
    let mut command = Command::new(binaries.get("sluice")?);
    command.arg("run").args(options).arg("--");
    Ok(command)
}

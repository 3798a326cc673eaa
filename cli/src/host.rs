//! `sluice host`: serves a VM until a signal ends it.

use std::{io::Write as _, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use sluice_api::v1::VmRequest;
use softgpu_run::Signals;

use crate::{
    backend::{Backend, BackendParameters, Start},
    backend_options::BackendOptions,
    files,
    softgpu::SoftDevice,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directory for the sockets; created if it does not exist
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    options: BackendOptions,
    /// Displays of the graphics device, 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    scanouts: u8,
    /// Accept memory that the VMM can shrink, if it cannot seal it, as Cloud Hypervisor cannot
    #[arg(long)]
    trust_vmm_memory: bool,
}

/// Serves a VM until a signal requests the end.
pub(crate) fn host(arguments: Arguments) -> Result<()> {
    let options = &arguments.options;
    let driver = files::driver(options.driver.as_deref(), options.nvml.as_deref())?;
    let device = driver.embedded.then(|| SoftDevice::make(options.memory)).transpose()?;
    let directory = std::path::absolute(&arguments.dir).context("--dir")?;
    let made = !directory.exists();
    let signals = Signals::take().context("cannot block signals")?;
    let wanted = BackendParameters {
        directory: &directory,
        driver: &driver,
        device: device.as_ref(),
        vm: VmRequest { scanouts: arguments.scanouts, ..options.vm() },
        ephemeral: false,
        without: &[],
        mapped_runs: arguments.options.mapped_runs,
        trust_vmm_memory: arguments.trust_vmm_memory,
        log: options.log.as_deref(),
    };
    let Start::Ready(backend) = Backend::start(&wanted, &signals)? else { return Ok(()) };
    let mut output = std::io::stdout().lock();
    writeln!(output, "vhost-user socket: {}", wanted.socket().display())
        .and_then(|()| output.flush())
        .context("cannot print the path of the socket")?;
    let result = wait(&backend, &signals);
    drop(backend);
    if made {
        // Remove the directory unless it holds files to keep: receipts of scrubbing, a checkpoint of fences.
        match std::fs::remove_dir(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::DirectoryNotEmpty => {
                eprintln!("sluice: cannot remove {}: {error}", directory.display());
            }
            _ => {}
        }
    }
    result
}

fn wait(backend: &Backend, signals: &Signals) -> Result<()> {
    loop {
        let mut polled =
            [PollFd::new(signals, PollFlags::IN), PollFd::from_borrowed_fd(backend.process(), PollFlags::IN)];
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for events"),
        }
        let [signalled, ended] = polled.map(|polled| !polled.revents().is_empty());
        if signalled && signals.ending().context("cannot read signals")?.is_some() {
            return Ok(());
        }
        if ended {
            bail!("sluiced has ended");
        }
    }
}

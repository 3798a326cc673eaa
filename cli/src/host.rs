//! `sluice host`: serves a VM until a signal ends it.

use std::{io::Write as _, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use sluice_api::VmSpec;

use crate::{
    BackendOptions,
    backend::{Backend, Start, Wanted},
    files,
    signals::Signals,
    softgpu::Device,
};

/// The number of the only VM.
const VM: u32 = 1;

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
    /// Another VM on the same device, in the form of `sluiced --vm`, for instance `2,direct`; repeatable
    #[arg(long = "vm", value_name = "ID[,direct][,scanouts=0|1][,memory=SIZE]…")]
    vms: Vec<VmSpec>,
}

/// Serves a VM until a signal asks to end.
pub(crate) fn host(arguments: Arguments) -> Result<()> {
    let options = &arguments.options;
    let driver = files::driver(options.driver.as_deref(), options.nvml.as_deref())?;
    let device = driver.embedded.then(|| Device::make(options.memory)).transpose()?;
    let directory = std::path::absolute(&arguments.dir).context("--dir")?;
    let made = !directory.exists();
    let signals = Signals::take().context("cannot take signals over")?;
    let mut vms = vec![format!("{VM},scanouts={},memory={}", arguments.scanouts, options.memory)];
    vms.extend(arguments.vms.iter().map(VmSpec::to_string));
    let wanted = Wanted {
        directory: &directory,
        driver: &driver,
        device: device.as_ref(),
        vms: &vms,
        ephemeral: false,
        without: &[],
        mapped_runs: arguments.options.mapped_runs,
        trust_vmm_memory: arguments.trust_vmm_memory,
        log: options.log.as_deref(),
    };
    let Start::Ready(backend) = Backend::start(&wanted, &signals)? else { return Ok(()) };
    let socket = directory.join(format!("vm-{VM}.sock"));
    let mut output = std::io::stdout().lock();
    writeln!(output, "vhost-user socket: {}", socket.display())
        .and_then(|()| output.flush())
        .context("cannot say where the socket is")?;
    let result = wait(&backend, &signals);
    drop(backend);
    if made {
        // Ours unless something is there to be read: receipts of scrubbing, a checkpoint of who is fenced.
        match std::fs::remove_dir(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::DirectoryNotEmpty => {
                eprintln!("sluice: {} stays behind: {error}", directory.display());
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

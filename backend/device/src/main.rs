//! `sluice-device`: the vhost-user back-end program.
//!
//! It stays in the foreground, ends quickly on SIGTERM (there is nothing to save), and fails early with a non-zero
//! status. After set-up it enters its filter: from then on it cannot open a file, make a socket or start a program.

#![expect(unsafe_code, reason = "adopting inherited descriptors")]

use anyhow::{Context, bail};
use clap::{ArgGroup, Parser, ValueEnum as _};
use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use sluice_device::{
    endpoint::Mode,
    link::{self, Link},
    memory::Policy,
    relay,
    serve::{self, Options},
    stream,
    users::Users,
};
use sluice_sandbox::Role;
use sluice_shared_memory::bus;
use std::{os::unix::net::UnixListener, path::PathBuf, sync::Arc};

/// The vhost-user virtio-gpu device of one virtual machine.
#[derive(Debug, Parser)]
#[command(version, group = ArgGroup::new("listener").required(true))]
struct Arguments {
    /// Listen on this path for the VMM. An old socket there is replaced.
    #[arg(long, group = "listener")]
    socket_path: Option<PathBuf>,
    /// Use this inherited socket, listening or connected.
    #[arg(long, group = "listener")]
    fd: Option<RawFd>,
    /// Serve guests that share no memory, too, on this inherited listening socket.
    #[arg(long)]
    stream_fd: Option<RawFd>,
    /// Print what this program can do, as JSON, and exit.
    #[arg(long, group = "listener")]
    print_capabilities: bool,
    /// Inherited SEQPACKET socket to sluiced. Without it every session is refused.
    #[arg(long)]
    control_fd: Option<RawFd>,
    /// Version of the messages that sluiced speaks; another than this program's own is refused.
    #[arg(long, value_parser = sluice_messages::control::version_of_option)]
    messages: Option<u32>,
    /// Scanouts to report, always disabled. Guest kernels before 6.12 need one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    scanouts: u32,
    /// Serve processes instead of a VMM: any number of connections, memory sealed by each.
    #[arg(long)]
    direct: bool,
    /// What to offer, if not all there is or what SLUICE_DEVICE_MODE says. With less, a VMM that passes everything serves
    /// like one that does not.
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Accept guest memory that the VMM could shrink, and with that crash this process. For VMMs that cannot seal.
    #[arg(long, conflicts_with = "direct")]
    trust_memory: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.print_capabilities {
        println!("{{\n  \"type\": \"gpu\",\n  \"features\": []\n}}");
        return Ok(());
    }
    sluice_runtime::log::start()?;
    bus::catch("sluice-device", rustix::stdio::stderr()).context("a handler for SIGBUS")?;
    let mode = arguments.mode.map_or_else(mode_of_environment, Ok)?;
    let control = arguments.control_fd.map(inherited).transpose().context("--control-fd")?;
    let listener = match (&arguments.socket_path, arguments.fd) {
        (Some(path), _) => {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                bail!("{} cannot be replaced: {error}", path.display());
            }
            UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()))?
        }
        (None, Some(fd)) => relay::listener(inherited(fd).context("--fd")?).context("--fd")?,
        (None, None) => bail!("--socket-path or --fd is required"),
    };
    let streams = arguments.stream_fd.map(inherited).transpose().context("--stream-fd")?;
    let options = Options {
        direct: arguments.direct,
        mode,
        scanouts: arguments.scanouts,
        policy: match (arguments.direct, arguments.trust_memory) {
            (true, _) => Policy::Sealed,
            (false, false) => Policy::Vmm,
            (false, true) => Policy::Any,
        },
    };
    let link = Arc::new(Link::new(control.is_some())?);

    // Before the filter, which holds for all threads: making its first thread the C library installs a signal handler.
    let broker = Arc::clone(&link);
    std::thread::Builder::new().name("link".into()).spawn(move || link::serve(&broker, control))?;
    let role = if options.direct { Role::DirectDevice } else { Role::Device };
    sluice_sandbox::enter(role)?;
    let users = Arc::new(Users::default());
    if let Some(listener) = streams {
        // Streams of a VM are all its VMM's.
        let users = arguments.direct.then(|| Arc::clone(&users));
        stream::start(listener.into(), Arc::clone(&link), users)?;
    }
    tracing::info!("ready");
    serve::serve(&listener, options, &link, &users)?;
    Ok(())
}

/// What `SLUICE_DEVICE_MODE` says, for whoever does not write this program's command line.
fn mode_of_environment() -> anyhow::Result<Mode> {
    match std::env::var("SLUICE_DEVICE_MODE").as_deref() {
        Err(std::env::VarError::NotPresent) => Ok(Mode::Full),
        Ok(value) => {
            Mode::from_str(value, false).map_err(|error| anyhow::anyhow!("SLUICE_DEVICE_MODE: {error}"))
        }
        Err(error) => bail!("SLUICE_DEVICE_MODE: {error}"),
    }
}

/// Takes over a descriptor that the parent passed on by number.
fn inherited(fd: RawFd) -> anyhow::Result<OwnedFd> {
    if fd <= 2 {
        bail!("descriptor {fd} is a standard stream");
    }
    // SAFETY: borrowed for one call, which fails cleanly when the descriptor is not open.
    let probe = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(probe, rustix::io::FdFlags::CLOEXEC)
        .with_context(|| format!("descriptor {fd}"))?;
    // SAFETY: it is open, and by the command line ours: nothing else in this process uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

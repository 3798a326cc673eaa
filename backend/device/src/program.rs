#![expect(unsafe_code, reason = "adopting inherited descriptors")]

//! The program `sluice-device`: the vhost-user back-end.
//!
//! It stays in the foreground, ends quickly on SIGTERM (there is nothing to save), and fails early with a non-zero
//! status. After set-up it enters its filter: from then on it cannot open a file, make a socket or start a program.

use crate::{
    endpoint::DeviceMode,
    link::{self, Link},
    memory::MemoryPolicy,
    relay,
    serve::{self, ServeOptions},
    stream,
    users::Users,
};
use anyhow::{Context, bail};
use clap::{ArgGroup, Parser, ValueEnum as _};
use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use sluice_protocol::limits;
use sluice_sandbox::Role;
use sluice_shared_memory::bus;
use std::{os::unix::net::UnixListener, path::PathBuf, sync::Arc};

/// The vhost-user virtio-gpu device of one virtual machine.
#[derive(Debug, Parser)]
#[command(name = "sluice-device", version, group = ArgGroup::new("listener").required(true))]
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
    /// Print this program's capabilities, as JSON, and exit.
    #[arg(long, group = "listener")]
    print_capabilities: bool,
    /// Inherited SEQPACKET socket to sluiced. Without it every session is refused.
    #[arg(long)]
    control_fd: Option<RawFd>,
    /// Version of the messages that sluiced speaks; any version but this program's own is refused.
    #[arg(long, value_parser = sluice_messages::control::version_of_option)]
    messages: Option<u32>,
    /// Scanouts to report, always disabled. Guest kernels before 6.12 need one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    scanouts: u32,
    /// Serve processes instead of a VMM: any number of connections, memory sealed by each.
    #[arg(long)]
    direct: bool,
    /// Features to offer, instead of all of them or the value of SLUICE_DEVICE_MODE. With fewer, a VMM that passes all features
    /// behaves like one that does not.
    #[arg(long, value_enum)]
    mode: Option<DeviceMode>,
    /// Accept guest memory that the VMM could shrink, which would crash this process. For VMMs that cannot seal.
    #[arg(long, conflicts_with = "direct")]
    trust_memory: bool,
    /// Give each session that shares guest memory one arena of this many bytes, before its worker receives a byte of the guest, and
    /// never another one. Without this option arenas grow. Sessions of streams share no guest memory.
    #[arg(long, value_name = "BYTES", value_parser = fixed_arena)]
    fixed_arena: Option<u64>,
}

fn fixed_arena(text: &str) -> Result<u64, String> {
    let (least, most, unit) =
        (limits::FIXED_ARENAS.start(), limits::FIXED_ARENAS.end(), limits::FIXED_ARENA_UNIT);
    let bytes = text.parse().ok().filter(|bytes| limits::is_fixed_arena(*bytes));
    bytes.ok_or_else(|| format!("{text:?} is not a multiple of {unit} from {least} to {most}"))
}

/// Runs the program.
///
/// # Errors
/// If it cannot begin to serve; the text is for an operator.
///
/// # Safety
/// The numbers on the command line name descriptors that no other code of the process uses.
pub unsafe fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.print_capabilities {
        println!("{{\n  \"type\": \"gpu\",\n  \"features\": []\n}}");
        return Ok(());
    }
    sluice_runtime::log::start()?;
    bus::catch("sluice-device", rustix::stdio::stderr()).context("installing a handler for SIGBUS")?;
    let mode = arguments.mode.map_or_else(mode_of_environment, Ok)?;
    let control = arguments.control_fd.map(inherited).transpose().context("--control-fd")?;
    let listener = match (&arguments.socket_path, arguments.fd) {
        (Some(path), _) => {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                bail!("cannot replace {}: {error}", path.display());
            }
            UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()))?
        }
        (None, Some(fd)) => relay::listener(inherited(fd).context("--fd")?).context("--fd")?,
        (None, None) => bail!("--socket-path or --fd is required"),
    };
    let streams = arguments.stream_fd.map(inherited).transpose().context("--stream-fd")?;
    let options = ServeOptions {
        direct: arguments.direct,
        mode,
        scanouts: arguments.scanouts,
        policy: match (arguments.direct, arguments.trust_memory) {
            (true, _) => MemoryPolicy::Sealed,
            (false, false) => MemoryPolicy::Vmm,
            (false, true) => MemoryPolicy::Any,
        },
        fixed_arena: arguments.fixed_arena,
    };
    let link = Arc::new(Link::new(control.is_some())?);

    // Before the filter, which holds for all threads: the C library installs a signal handler with its first thread.
    let broker = Arc::clone(&link);
    std::thread::Builder::new().name("link".into()).spawn(move || link::serve(&broker, control))?;
    let role = if options.direct { Role::DirectDevice } else { Role::Device };
    sluice_sandbox::enter(role)?;
    let users = Arc::new(Users::default());
    if let Some(listener) = streams {
        // All streams of a VM belong to its VMM.
        let users = arguments.direct.then(|| Arc::clone(&users));
        stream::start(listener.into(), Arc::clone(&link), users)?;
    }
    tracing::info!("the device is ready");
    serve::serve(&listener, options, &link, &users)?;
    Ok(())
}

/// The mode in `SLUICE_DEVICE_MODE`, for users who do not write this program's command line.
fn mode_of_environment() -> anyhow::Result<DeviceMode> {
    match std::env::var("SLUICE_DEVICE_MODE").as_deref() {
        Err(std::env::VarError::NotPresent) => Ok(DeviceMode::Full),
        Ok(value) => {
            DeviceMode::from_str(value, false).map_err(|error| anyhow::anyhow!("SLUICE_DEVICE_MODE: {error}"))
        }
        Err(error) => bail!("SLUICE_DEVICE_MODE: {error}"),
    }
}

/// Takes over a descriptor that the parent passed by number.
fn inherited(fd: RawFd) -> anyhow::Result<OwnedFd> {
    if fd <= 2 {
        bail!("descriptor {fd} is a standard stream");
    }
    // SAFETY: borrowed for one call, which fails cleanly if the descriptor is not open.
    let probe = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(probe, rustix::io::FdFlags::CLOEXEC)
        .with_context(|| format!("descriptor {fd}"))?;
    // SAFETY: it is open, and the command line makes it ours: no other code in this process uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

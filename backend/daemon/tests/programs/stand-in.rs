//! Plays `sluice-device` or `sluice-worker`, by the name it is started under, where a test is about the processes around
//! them.
//!
//! **As a device** it listens on the socket it is given and takes commands from tests, a line each: `open N` asks for a
//! worker for session N and is answered `worker N PID` or `refused N ERROR`; `close N` ends a session; `garbage` sends
//! the daemon a message that is none; `exit CODE` ends the process. **As a worker** it answers on its control socket
//! with what it finds of itself, and ends when that socket closes.

use std::{
    collections::HashMap,
    io::{self, BufRead as _, BufReader, Write as _},
    os::{
        fd::{AsFd as _, FromRawFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
};

use anyhow::{Context as _, Result, bail, ensure};
use sluice_protocol::control::{self, FromDevice, ToDevice, WorkerSetup, codec};
use sluice_shared_memory::socket;

fn main() -> Result<()> {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    match name.rsplit('/').next() {
        Some("sluice-worker") => worker(&arguments),
        Some("sluice-device") => device(&arguments),
        other => bail!("this is a stand-in for sluice-device and sluice-worker, started as {other:?}"),
    }
}

/// Takes a descriptor that was inherited under a number of the command line.
fn inherited(arguments: &[String], flag: &str) -> Result<OwnedFd> {
    let at = arguments.iter().position(|argument| argument == flag).with_context(|| format!("no {flag}"))?;
    let number: i32 = arguments.get(at + 1).context("no number")?.parse()?;
    #[expect(
        unsafe_code,
        reason = "the number is an inherited descriptor, which nothing else in this process owns"
    )]
    // SAFETY: the launcher passes it open, and this is called once per flag.
    let owned = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_getfd(&owned).context("the descriptor is not open")?;
    Ok(owned)
}

fn worker(arguments: &[String]) -> Result<()> {
    let control = inherited(arguments, "--control-fd")?;
    let mut buffer = vec![0; sluice_protocol::limits::CONTROL_BYTES];
    let Some((bytes, descriptors)) = socket::receive(&control, &mut buffer)? else { return Ok(()) };
    ensure!(descriptors.is_empty(), "descriptors with the set-up");
    let setup: WorkerSetup = codec::decode(bytes)?;
    let found = format!(
        "{{\"pid\":{},\"vm\":{},\"session\":{},\"driver\":{:?},{}}}",
        std::process::id(),
        setup.vm,
        setup.session,
        setup.driver,
        what_it_has()?
    );
    socket::send(&control, found.as_bytes(), &[])?;
    while socket::receive(&control, &mut buffer)?.is_some() {}
    Ok(())
}

/// What a process was given, as members of a JSON object.
fn what_it_has() -> Result<String> {
    let mut descriptors = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The directory being read is itself open.
        if std::fs::read_link(entry.path()).is_ok_and(|target| !target.starts_with("/proc")) {
            descriptors.push(entry.file_name().to_string_lossy().parse::<u32>()?);
        }
    }
    descriptors.sort_unstable();
    let mut names: Vec<String> = std::env::vars().map(|(name, _)| name).collect();
    names.sort_unstable();
    let group = rustix::process::getpgrp().as_raw_nonzero();
    let core = rustix::process::getrlimit(rustix::process::Resource::Core);
    let silent = std::fs::read_link("/proc/self/fd/1")? == std::path::Path::new("/dev/null");
    let capabilities = rustix::thread::capabilities(None)?;
    Ok(format!(
        "\"silent\":{silent},\"capabilities\":{},\"fds\":{descriptors:?},\"environment\":{names:?},\"group\":{group},\"core\":{},\"privileges\":{},\"uid\":{}",
        capabilities.permitted.union(capabilities.inheritable).bits(),
        core.maximum.map_or(-1, |maximum| i64::try_from(maximum).unwrap_or(i64::MAX)),
        !rustix::thread::no_new_privs()?,
        rustix::process::getuid().as_raw()
    ))
}

/// What happens next to a device.
enum Next {
    Front(UnixStream),
    Command(UnixStream, String),
    Daemon([u8; control::BYTES], Vec<OwnedFd>),
    DaemonGone,
}

fn device(arguments: &[String]) -> Result<()> {
    let daemon = inherited(arguments, "--control-fd")?;
    let listener = UnixListener::from(inherited(arguments, "--fd")?);
    let (sender, next) = std::sync::mpsc::channel();
    std::thread::spawn({
        let sender = sender.clone();
        move || listener.incoming().flatten().try_for_each(|front| sender.send(Next::Front(front)))
    });
    std::thread::spawn({
        let (sender, daemon) = (sender.clone(), daemon.as_fd().try_clone_to_owned()?);
        move || {
            let mut bytes = [0; control::BYTES];
            while let Ok(Some((_, descriptors))) = socket::receive(&daemon, &mut bytes) {
                if sender.send(Next::Daemon(bytes, descriptors)).is_err() {
                    return;
                }
            }
            drop(sender.send(Next::DaemonGone));
        }
    });
    let mut workers: HashMap<u32, (OwnedFd, OwnedFd)> = HashMap::new();
    let mut askers: HashMap<u32, UnixStream> = HashMap::new();
    for next in next {
        match next {
            Next::Front(front) => {
                let sender = sender.clone();
                std::thread::spawn(move || read_commands(&front, &sender));
            }
            Next::Command(mut front, line) => {
                let mut words = line.split(' ');
                let verb = words.next().unwrap_or_default();
                let number = words.next().and_then(|word| word.parse::<u32>().ok());
                match (verb, number) {
                    ("open", Some(session)) => {
                        askers.insert(session, front);
                        if socket::send(&daemon, &FromDevice::WorkerWanted { session }.encode(), &[]).is_err()
                        {
                            let mut asker = askers.remove(&session).context("just inserted")?;
                            writeln!(asker, "refused {session} no daemon")?;
                        }
                    }
                    ("close", Some(session)) => {
                        let Some((socket, pidfd)) = workers.remove(&session) else {
                            writeln!(front, "no session {session}")?;
                            continue;
                        };
                        drop(socket);
                        let mut polled = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
                        rustix::event::poll(&mut polled, None)?;
                        match socket::send(&daemon, &FromDevice::SessionEnded { session }.encode(), &[]) {
                            Ok(()) | Err(rustix::io::Errno::PIPE) => {}
                            Err(error) => bail!("cannot tell the daemon: {error}"),
                        }
                        writeln!(front, "closed {session}")?;
                    }
                    ("garbage", None) => socket::send(&daemon, &[0xff; control::BYTES], &[])?,
                    ("describe", None) => writeln!(front, "{{{}}}", what_it_has()?)?,
                    ("exit", Some(code)) => std::process::exit(code.cast_signed()),
                    _ => writeln!(front, "unknown command {line:?}")?,
                }
            }
            Next::Daemon(bytes, mut descriptors) => match ToDevice::decode(&bytes)? {
                ToDevice::Worker { session } => {
                    let (Some(pidfd), Some(socket)) = (descriptors.pop(), descriptors.pop()) else {
                        bail!("a worker without its descriptors");
                    };
                    let mut found = vec![0; 4096];
                    let line = match socket::receive(&socket, &mut found)? {
                        Some((found, _)) => String::from_utf8_lossy(found).into_owned(),
                        None => "dead".to_owned(),
                    };
                    workers.insert(session, (socket, pidfd));
                    if let Some(mut asker) = askers.remove(&session) {
                        writeln!(asker, "worker {session} {line}")?;
                    }
                }
                ToDevice::NoWorker { session, error } => {
                    if let Some(mut asker) = askers.remove(&session) {
                        writeln!(asker, "refused {session} {error}")?;
                    }
                }
            },
            // As the real one: sessions go on.
            Next::DaemonGone => {}
        }
    }
    Ok(())
}

fn read_commands(front: &UnixStream, sender: &std::sync::mpsc::Sender<Next>) -> io::Result<()> {
    for line in BufReader::new(front).lines() {
        if sender.send(Next::Command(front.try_clone()?, line?)).is_err() {
            break;
        }
    }
    Ok(())
}

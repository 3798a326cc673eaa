//! Plays `sluice-device`, `sluice-worker`, `sluice-arbiter` or `sluice-inventory`, selected by the name of the program, in tests
//! of the processes around them.
//!
//! **As a device** it listens on the given socket and takes commands from tests, one per line: `open N` requests a worker for
//! session N and is answered `worker N PID` or `refused N ERROR`; `close N` ends a session; `leave N` reports the end of a session
//! while its worker lives; `garbage` sends the daemon invalid messages until it refuses them; `exit CODE` ends the process. **As a worker** it answers
//! on its control socket with a description of itself, and ends when that socket closes. While the file `hostile` beside the
//! program contains its VM, it first attacks its descriptors like a compromised worker, and writes to standard error. **As an
//! arbiter** it lends nothing, records the messages it receives, and takes commands on `unit-N.sock` beside the program: `told`
//! lists the messages, `has VM LENT DIRTY` sets the figures of a VM once the VM is known, `driver VM BYTES` its driver's share, `event` and `want` send a report, `hang`
//! and `exit CODE` stop its service. While a file `slow` is beside the program, it does not become ready. **As an inventory** it
//! reports the number of devices in the file `devices` beside the program and no process, reports an error on `xid UNIT XID
//! PROCESS` at `inventory.sock`, and does not answer while a file `mute` exists. **As a client** it connects to the given socket;
//! with a request, it sends it and prints the answer; with `--hold N` it holds N connections; with `--flood REQUEST` it sends the
//! request without end. **As a tracer** it keeps a process from ending, even a killed one, until its own input closes;
//! with `--after-end` the process ends, and its parent cannot wait for it until then.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead as _, BufReader, Write as _},
    os::{
        fd::{AsFd as _, FromRawFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use sluice_messages::control::{
    self, ArbiterSetup, Figures, FromArbiter, FromDevice, FromInventory, HostAccess, SETUP_BYTES, ToArbiter,
    ToDevice, ToInventory, ToWorker, WorkerSetup, codec,
};
use sluice_messages::{
    figures::{UnitBytes, Upkeep},
    inventory::WHOLE,
};
use sluice_protocol::field::{Field, Reader};
use sluice_shared_memory::socket;

/// Bytes of a unit: enough for 500 VMs.
const BYTES: u64 = 2 << 30;

fn main() -> Result<()> {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    match name.rsplit('/').next() {
        Some("sluice-worker") => worker(&arguments, Path::new(&name)),
        Some("sluice-device") => device(&arguments),
        Some("sluice-arbiter") => arbiter(&arguments, Path::new(&name)),
        Some("sluice-inventory") => inventory(&arguments, Path::new(&name)),
        Some("client") => client(&arguments),
        Some("tracer") => trace(&arguments),
        other => bail!("this stand-in cannot play {other:?}"),
    }
}

fn client(arguments: &[String]) -> Result<()> {
    let socket = arguments.first().context("no socket")?;
    match arguments.get(1).map(String::as_str) {
        Some("--hold") => return hold(socket, arguments.get(2).context("no number")?.parse()?),
        Some("--flood") => return flood(socket, arguments.get(2).context("no request")?),
        _ => {}
    }
    let mut stream = UnixStream::connect(socket)?;
    if let Some(request) = arguments.get(1) {
        stream.write_all(request.as_bytes())?;
        io::copy(&mut stream, &mut io::stdout())?;
    }
    Ok(())
}

/// Keeps a process in its exit, or its status after it, until standard input closes.
fn trace(arguments: &[String]) -> Result<()> {
    let process: libc::pid_t = arguments.first().context("no process")?.parse()?;
    let after_end = arguments.get(1).is_some_and(|argument| argument == "--after-end");
    let options = if after_end { 0 } else { usize::try_from(libc::PTRACE_O_TRACEEXIT)? };
    #[expect(unsafe_code, reason = "rustix has no ptrace")]
    // SAFETY: this request takes numbers only, and touches no memory of ours.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, 0_usize, options) };
    ensure!(seized == 0, "process {process} cannot be traced: {}", io::Error::last_os_error());
    println!("traced");
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

/// Holds connections, and replaces closed ones.
fn hold(socket: &str, count: usize) -> Result<()> {
    let connect = || -> Result<UnixStream> {
        let stream = UnixStream::connect(socket)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    let mut held: Vec<UnixStream> = (0..count).map(|_| connect()).collect::<Result<_>>()?;
    loop {
        for stream in &mut held {
            let open = match io::Read::read(stream, &mut [0; 4096]) {
                Ok(count) => count > 0,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            };
            if !open {
                *stream = connect()?;
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a request without end, and waits for no answer.
fn flood(socket: &str, request: &str) -> Result<()> {
    loop {
        // Fails if there are too many connections.
        _ = UnixStream::connect(socket)?.write_all(request.as_bytes());
    }
}

/// Takes an inherited descriptor with a number of the command line.
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

/// The attacks of a compromised worker on each of its descriptors and on the log.
fn attack() -> Result<()> {
    for number in what_is_open()? {
        #[expect(unsafe_code, reason = "any number is tried, as an attacker would")]
        // SAFETY: borrowed for calls that fail cleanly where it is not open.
        let descriptor = unsafe { rustix::fd::BorrowedFd::borrow_raw(number.cast_signed()) };
        // The test learns the end of the attack through the control socket.
        if number != 3 {
            _ = rustix::net::shutdown(descriptor, rustix::net::Shutdown::Both);
        }
        if number < 3 {
            let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::APPEND;
            _ = rustix::fs::fcntl_setfl(descriptor, flags);
        }
        _ = rustix::fs::ftruncate(descriptor, 0);
        _ = rustix::fs::seek(descriptor, rustix::fs::SeekFrom::Start(0));
    }
    for line in 0..100_000 {
        _ = writeln!(io::stderr(), "\r2026-01-01T00:00:00Z ERROR sluice_daemon: forged {line}\x1b[2K");
    }
    Ok(())
}

fn worker(arguments: &[String], program: &Path) -> Result<()> {
    if program.with_file_name("renames").exists() {
        rustix::thread::set_name(c"kworker/0:1")?;
    }
    let control = inherited(arguments, "--control-fd")?;
    let mut buffer = vec![0; SETUP_BYTES];
    let Some((bytes, descriptors)) = socket::receive(&control, &mut buffer)? else { return Ok(()) };
    ensure!(descriptors.is_empty(), "the set-up has descriptors");
    let setup: WorkerSetup = codec::decode(bytes)?;
    // Shows that the launcher has reported this process to the daemon.
    rustix::thread::set_name(c"is-set-up")?;
    let hostile = std::fs::read_to_string(program.with_file_name("hostile")).unwrap_or_default();
    if hostile.trim().parse() == Ok(setup.vm) {
        attack()?;
    }
    let probe = arguments.iter().any(|argument| argument == "--probe");
    let found = format!("\"probe\":{probe},{}", what_it_has()?);
    // The sockets are held, as the real worker does: their end is the end of the worker.
    let mut custody = Vec::new();
    for device in 0..setup.devices {
        let Some((bytes, mut descriptors)) = socket::receive(&control, &mut buffer)? else { return Ok(()) };
        ensure!(
            ToWorker::decode(bytes)? == ToWorker::Custody { device },
            "custody messages must be in the order of devices"
        );
        custody.push(descriptors.pop().context("a custody socket")?);
    }
    let found = format!(
        "{{\"pid\":{},\"vm\":{},\"session\":{},\"driver\":{:?},\"custody\":{},{found}}}",
        std::process::id(),
        setup.vm,
        setup.session,
        setup.driver,
        custody.len()
    );
    socket::send(&control, found.as_bytes(), &[])?;
    while socket::receive(&control, &mut buffer)?.is_some() {}
    Ok(())
}

/// The properties of this process, as members of a JSON object.
fn what_it_has() -> Result<String> {
    let descriptors = what_is_open()?;
    let mut names: Vec<String> = std::env::vars().map(|(name, _)| name).collect();
    names.sort_unstable();
    let group = rustix::process::getpgrp().as_raw_nonzero();
    let core = rustix::process::getrlimit(rustix::process::Resource::Core);
    let silent = std::fs::read_link("/proc/self/fd/1")? == Path::new("/dev/null");
    let log = std::fs::read_link("/proc/self/fd/2")?;
    let capabilities = rustix::thread::capabilities(None)?;
    Ok(format!(
        "\"log\":{log:?},\"silent\":{silent},\"visible\":{:?},\"capabilities\":{},\"fds\":{descriptors:?},\"environment\":{names:?},\"group\":{group},\"core\":{},\"privileges\":{},\"uid\":{}",
        std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default(),
        capabilities.permitted.union(capabilities.inheritable).bits(),
        core.maximum.map_or(-1, |maximum| i64::try_from(maximum).unwrap_or(i64::MAX)),
        !rustix::thread::no_new_privs()?,
        rustix::process::getuid().as_raw()
    ))
}

fn what_is_open() -> Result<Vec<u32>> {
    let mut descriptors = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The directory being read is itself open.
        if std::fs::read_link(entry.path()).is_ok_and(|target| !target.starts_with("/proc")) {
            descriptors.push(entry.file_name().to_string_lossy().parse::<u32>()?);
        }
    }
    descriptors.sort_unstable();
    Ok(descriptors)
}

/// The state of an arbiter.
#[derive(Default)]
struct Unit {
    told: Vec<String>,
    /// By VM: epoch, bytes lent, bytes dirty.
    vms: BTreeMap<u32, (u64, u64, u64)>,
    /// Bytes of the driver, by VM.
    driver: BTreeMap<u32, u64>,
    /// Workers: the VM, the custody socket, the pidfd.
    workers: Vec<(u32, OwnedFd, OwnedFd)>,
    /// Bytes that cannot be lent for now.
    suspect: u64,
}

impl Unit {
    fn holders(&self, vm: u32) -> u32 {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let lives = |(of, _, pidfd): &&(u32, OwnedFd, OwnedFd)| {
            let mut polled = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
            *of == vm && matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(0))
        };
        u32::try_from(self.workers.iter().filter(lives).count()).unwrap_or(u32::MAX)
    }
}

fn arbiter(arguments: &[String], program: &Path) -> Result<()> {
    let daemon = std::sync::Arc::new(inherited(arguments, "--control-fd")?);
    let mut buffer = vec![0; SETUP_BYTES];
    let Some((bytes, descriptors)) = socket::receive(&*daemon, &mut buffer)? else { return Ok(()) };
    let setup: ArbiterSetup = codec::decode(bytes)?;
    let log = descriptors.into_iter().next().context("a file for receipts")?;
    writeln!(std::fs::File::from(log), "{{\"stand-in\":{}}}", std::process::id())?;
    let unit = std::sync::Arc::new(std::sync::Mutex::new(Unit::default()));
    unit.lock().expect("unpoisoned").told.push(format!("{setup:?}"));
    let (listening, beside) =
        (program.with_file_name(format!("unit-{}.sock", setup.unit)), program.to_owned());
    std::thread::spawn({
        let (unit, daemon) = (unit.clone(), daemon.clone());
        move || obey(&listening, |line| arbiter_command(&unit, &daemon, line))
    });
    let host_access = match std::env::var("SLUICE_SOFTGPU_HAS").as_deref() {
        Ok("pageable-memory-access") => HostAccess::Pageable,
        Ok("host-page-tables") => HostAccess::HostPageTables,
        _ => HostAccess::None,
    };
    std::thread::spawn({
        let daemon = daemon.clone();
        move || {
            while beside.with_file_name("slow").exists() {
                std::thread::sleep(Duration::from_millis(2));
            }
            socket::send(
                &*daemon,
                &FromArbiter::Ready { bytes: BYTES, context: 3 << 20, margin: 0, host_access }.encode(),
                &[],
            )
        }
    });
    while let Some((bytes, descriptors)) = socket::receive(&*daemon, &mut buffer)? {
        let message = ToArbiter::decode(bytes)?;
        ensure!(descriptors.len() == message.descriptors(), "the number of descriptors is wrong");
        let mut unit = unit.lock().expect("unpoisoned");
        let answer = match message {
            ToArbiter::DescribeVm { serial, vm } => unit.vms.get(&vm).map(|&(epoch, lent, dirty)| {
                let headroom = unit.driver.get(&vm).copied().unwrap_or(0);
                FromArbiter::Vm { serial, vm, epoch, lent, headroom, dirty, holders: unit.holders(vm) }
            }),
            ToArbiter::DescribeUnit { serial } => {
                let (total, suspect) = (BYTES, unit.suspect);
                let lent = unit.vms.values().map(|(_, lent, _)| lent).sum();
                let memory = UnitBytes { total, lent, suspect, ..UnitBytes::default() };
                Some(FromArbiter::Unit { serial, memory })
            }
            _ => {
                unit.told.push(format!("{message:?}"));
                None
            }
        };
        let mut descriptors = descriptors.into_iter();
        match (message, descriptors.next().zip(descriptors.next())) {
            // A known VM keeps its figures.
            (ToArbiter::Vm { vm, epoch, .. }, _)
                if unit.vms.get(&vm).is_some_and(|known| known.0 == epoch) => {}
            (ToArbiter::Vm { vm, epoch, .. }, _) => _ = unit.vms.insert(vm, (epoch, 0, 0)),
            (ToArbiter::Worker { vm, .. }, Some((custody, pidfd))) => unit.workers.push((vm, custody, pidfd)),
            _ => {}
        }
        if let Some(answer) = answer {
            socket::send(&*daemon, &answer.encode(), &[])?;
        }
    }
    // Like the real arbiter, this one outlives sluiced.
    loop {
        std::thread::park();
    }
}

/// The figures whose numbers a command names in order.
fn figures<T: for<'a> Field<'a>>(numbers: &[u32]) -> Result<T> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| u64::from(*number).to_le_bytes()).collect();
    Ok(T::get(&mut Reader::new(&bytes))?)
}

fn arbiter_command(unit: &std::sync::Mutex<Unit>, daemon: &OwnedFd, line: &str) -> Result<String> {
    let mut words = line.split(' ');
    let verb = words.next().unwrap_or_default();
    let numbers = words.map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let books = unit;
    let mut unit = books.lock().expect("unpoisoned");
    // The daemon's message about a VM may not have arrived yet.
    while verb == "has" && numbers.first().is_some_and(|vm| !unit.vms.contains_key(vm)) {
        drop(unit);
        std::thread::sleep(Duration::from_millis(2));
        unit = books.lock().expect("unpoisoned");
    }
    let message = match (verb, numbers.as_slice()) {
        ("told", []) => return Ok(format!("{:?}", unit.told)),
        ("hang", []) => loop {
            std::thread::park();
        },
        ("exit", &[code]) => std::process::exit(code.cast_signed()),
        ("has", &[vm, lent, dirty]) => {
            let known = unit.vms.get_mut(&vm).context("a VM")?;
            (known.1, known.2) = (lent.into(), dirty.into());
            return Ok("yes".to_owned());
        }
        ("driver", &[vm, bytes]) => {
            unit.driver.insert(vm, bytes.into());
            return Ok("yes".to_owned());
        }
        ("suspect", &[bytes]) => {
            unit.suspect = bytes.into();
            return Ok("yes".to_owned());
        }
        ("event", &[kind, vm, process, bytes]) => {
            FromArbiter::Event { kind, vm, process, bytes: bytes.into() }
        }
        ("stale", &[vm]) => {
            FromArbiter::Vm { serial: 0, vm, epoch: 0, lent: 1, headroom: 0, dirty: 0, holders: 0 }
        }
        ("work", &[vm, ref counts @ ..]) => FromArbiter::Work { vm, epoch: 1, work: figures(counts)? },
        ("pinned", &[vm, bytes]) => FromArbiter::Pinned { vm, epoch: 1, bytes: bytes.into() },
        ("upkeep", numbers) => FromArbiter::Upkeep { upkeep: figures(numbers)?, figures: Figures::Unknown },
        ("figures", &[used]) => FromArbiter::Upkeep {
            upkeep: Upkeep::default(),
            figures: match used {
                0 => Figures::Unused,
                1 => Figures::Used,
                _ => Figures::Unknown,
            },
        },
        ("want", &[ancestor, bytes]) => FromArbiter::WantEscrow { ancestor, bytes: bytes.into() },
        _ => return Ok(format!("unknown command {line:?}")),
    };
    socket::send(daemon, &message.encode(), &[])?;
    Ok("said".to_owned())
}

/// Answers commands, one per line, on every connection.
fn obey(path: &Path, command: impl Fn(&str) -> Result<String>) -> Result<()> {
    drop(std::fs::remove_file(path));
    for stream in UnixListener::bind(path)?.incoming() {
        let mut stream = stream?;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let answer = command(&line?).unwrap_or_else(|error| format!("{error:#}"));
            writeln!(stream, "{answer}")?;
        }
    }
    Ok(())
}

fn inventory(arguments: &[String], program: &Path) -> Result<()> {
    let daemon = std::sync::Arc::new(inherited(arguments, "--control-fd")?);
    let listening = program.with_file_name("inventory.sock");
    std::thread::spawn({
        let daemon = daemon.clone();
        move || {
            obey(&listening, |line| {
                let numbers = line.split(' ').skip(1).map(str::parse).collect::<Result<Vec<u32>, _>>()?;
                let &[unit, xid, process] = numbers.as_slice() else { bail!("xid needs three numbers") };
                socket::send(
                    &*daemon,
                    &FromInventory::Xid { unit, xid, process, instance: WHOLE }.encode(),
                    &[],
                )?;
                Ok("said".to_owned())
            })
        }
    });
    answer_questions(&daemon, program.to_owned())
}

fn answer_questions(client: &OwnedFd, program: PathBuf) -> Result<()> {
    let mut bytes = [0; control::BYTES];
    while let Some((message, mut descriptors)) = socket::receive(client, &mut bytes)? {
        if program.with_file_name("mute").exists() {
            continue;
        }
        let answer = match ToInventory::decode(message)? {
            ToInventory::Units { serial } => {
                let count = std::fs::read_to_string(program.with_file_name("devices")).unwrap_or_default();
                FromInventory::Units { serial, count: count.trim().parse().unwrap_or(1) }
            }
            ToInventory::Process { serial, process, .. } => {
                FromInventory::Process { serial, process, present: false, bytes: 0, busy: u32::MAX }
            }
            ToInventory::Nth { serial, .. } => {
                FromInventory::Process { serial, process: 0, present: false, bytes: 0, busy: u32::MAX }
            }
            ToInventory::Memory { serial, .. } => {
                FromInventory::Memory { serial, total: BYTES, used: 0, free: BYTES }
            }
            ToInventory::Device { serial, .. }
            | ToInventory::DeviceName { serial, .. }
            | ToInventory::Health { serial, .. }
            | ToInventory::Utilization { serial, .. }
            | ToInventory::Profile { serial, .. }
            | ToInventory::ProfileName { serial, .. }
            | ToInventory::Places { serial, .. }
            | ToInventory::Capacity { serial, .. }
            | ToInventory::Instance { serial, .. }
            | ToInventory::Create { serial, .. }
            | ToInventory::Destroy { serial, .. }
            | ToInventory::SetMig { serial, .. } => {
                const NOT_SUPPORTED: u32 = 3;
                FromInventory::Failed { serial, error: NOT_SUPPORTED }
            }
            ToInventory::Client {} => {
                let (client, program) = (descriptors.pop().context("a socket")?, program.clone());
                std::thread::spawn(move || answer_questions(&client, program));
                continue;
            }
        };
        socket::send(client, &answer.encode(), &[])?;
    }
    Ok(())
}

/// The next event of a device.
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
                        if socket::send(
                            &daemon,
                            &FromDevice::WorkerWanted { session, user: control::NO_USER }.encode(),
                            &[],
                        )
                        .is_err()
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
                    ("leave", Some(session)) => {
                        socket::send(&daemon, &FromDevice::SessionEnded { session }.encode(), &[])?;
                        writeln!(front, "left {session}")?;
                    }
                    ("garbage", None) => {
                        while socket::send(&daemon, &[0xff; control::BYTES], &[]).is_ok() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        writeln!(front, "refused")?;
                    }
                    ("describe", None) => writeln!(front, "{{{}}}", what_it_has()?)?,
                    ("exit", Some(code)) => std::process::exit(code.cast_signed()),
                    _ => writeln!(front, "unknown command {line:?}")?,
                }
            }
            Next::Daemon(bytes, descriptors) => match ToDevice::decode(&bytes)? {
                ToDevice::Worker { session, grouped: _ } => {
                    let mut descriptors = descriptors.into_iter();
                    let (Some(socket), Some(pidfd)) = (descriptors.next(), descriptors.next()) else {
                        bail!("a worker came without its descriptors");
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
                ToDevice::Resume {} => {
                    for session in askers.keys() {
                        socket::send(
                            &daemon,
                            &FromDevice::WorkerWanted { session: *session, user: control::NO_USER }.encode(),
                            &[],
                        )?;
                    }
                }
                ToDevice::NoWorker { session, error } => {
                    if let Some(mut asker) = askers.remove(&session) {
                        writeln!(asker, "refused {session} {error}")?;
                    }
                }
            },
            // Like the real device, this one keeps its sessions.
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

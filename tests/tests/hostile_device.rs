//! A device that was taken over attacks its host: `sluiced`, launcher, arbiter and inventory go on, a neighbour computes and begins
//! sessions, an operator gets answers, and nothing is left of the attack.

use std::collections::BTreeMap;
use std::fs;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sluice_api::client::Client;
use sluice_api::v1::VmRequest;
use sluice_kit::processes::MADE_AHEAD;
use sluice_tests::direct::{TIMEOUT, made_ahead};
use sluice_tests::hostile_device::{ENDED, Order, Report};
use sluice_tests::management;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, output_of, signal, tail};
use sluice_tests::programs;
use sluice_tests::reach::{self, Targets};
use sluice_tests::tenants::{Options, Tenants};

const HOSTILE: u32 = 1;
/// The kind of the event of a device that was ended for its crowd.
const CROWD: &str = "device-crowd";
const NEIGHBOUR: u32 = 2;
/// Time limit of nineteen of twenty answers to an operator, on a busy machine.
const ANSWER: Duration = Duration::from_secs(1);
/// Kinds of processes that the launcher makes ahead here: a device of programs, one of a VM, and a worker.
const KINDS: usize = 3;
/// Sockets that linger, in an order.
const LINGERING: usize = 32;
/// Time for which the close of such a socket waits, if its peer does not read.
const LINGER: Duration = Duration::from_secs(30);

/// The processes that serve all VMs, by name.
fn serving(tenants: &Tenants) -> Result<BTreeMap<&'static str, Vec<u32>>> {
    let mut all = BTreeMap::from([("sluiced", vec![tenants.daemon()])]);
    // The kernel keeps 15 characters of a name.
    for name in ["sluice-launcher", "sluice-arbiter", "sluice-inventor"] {
        all.insert(name, tenants.processes(name)?);
    }
    Ok(all)
}

/// Open descriptors of the processes that serve all VMs.
fn descriptors(serving: &BTreeMap<&'static str, Vec<u32>>) -> Result<BTreeMap<&'static str, usize>> {
    let count = |process: &u32| Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count());
    let of = |(name, processes): (&&'static str, &Vec<u32>)| {
        Ok((*name, processes.iter().map(count).sum::<Result<usize>>()?))
    };
    serving.iter().map(of).collect()
}

/// Waits until a state is as wanted.
fn wait<T: std::fmt::Debug>(
    what: &str,
    state: impl Fn() -> Result<T>,
    wanted: impl Fn(&T) -> bool,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let now = state()?;
        if wanted(&now) {
            return Ok(now);
        }
        ensure!(start.elapsed() < TIMEOUT, "{what}: {now:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sockets whose last close waits for a peer that does not read, and these peers.
fn lingering() -> Result<Vec<(TcpStream, TcpStream)>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let make = |_| {
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER))?;
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 64 << 10]).is_ok() {}
        Ok((socket, peer))
    };
    (0..LINGERING).map(make).collect()
}

/// Gives the hostile device an order, as its guest, and waits for its report. Returns the outcome.
fn attack(tenants: &Tenants, order: &Order) -> Result<String> {
    let mut guest = UnixStream::connect(tenants.folder().join(format!("run/vm-{HOSTILE}.sock")))?;
    guest.set_read_timeout(Some(3 * TIMEOUT))?;
    // The peers stay until the report has come.
    let sockets = if order.attempt.contains("linger") { lingering()? } else { Vec::new() };
    let (sockets, _peers): (Vec<_>, Vec<_>) = sockets.into_iter().unzip();
    let borrowed: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LINGERING))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(borrowed.is_empty() || control.push(SendAncillaryMessage::ScmRights(&borrowed)), "too many");
    let text = serde_json::to_vec(order)?;
    let sent = sendmsg(&guest, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?;
    ensure!(sent == text.len(), "the order was cut");
    drop(sockets);
    let mut report = Vec::new();
    guest.read_to_end(&mut report).context("the report")?;
    if report.is_empty() {
        return Ok(ENDED.to_owned());
    }
    let report: Report =
        serde_json::from_slice(&report).with_context(|| format!("{:?}", String::from_utf8_lossy(&report)))?;
    Ok(report.outcome)
}

/// Asks as an operator until `over`; returns the waits for answers.
fn operate(tenants: &Tenants, over: &AtomicBool) -> Result<Vec<Duration>> {
    let mut waits = Vec::new();
    loop {
        let last = over.load(Ordering::Relaxed);
        let asked = Instant::now();
        tenants.operate("list", &[])?;
        waits.push(asked.elapsed());
        if last {
            return Ok(waits);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A host with a neighbour that computes.
struct Stage {
    tenants: Tenants,
    vm: VmRequest,
    neighbour: Background,
    program: PathBuf,
    serving: BTreeMap<&'static str, Vec<u32>>,
    order: Order,
    /// The waits of an operator for answers to all requests, and those for the answers to fences.
    waits: [Vec<Duration>; 2],
}

impl Stage {
    fn set(binaries: &Binaries, targets: Targets) -> Result<Self> {
        let mut options = Options::with_limits(192, &[64, 64]);
        options.device = Some(binaries.get("sluice-hostile-device")?);
        let (_, vm) = options.vms.remove(0);
        // Its device enters the filter of VMs, and no program connects to it.
        let vm = VmRequest { direct: false, ..vm };
        let tenants = Tenants::start(binaries, &options)?;
        let log = tenants.folder().join("neighbour.log");
        let program = programs::program("neighbour")?;
        let mut command = tenants.command(NEIGHBOUR, &program, &["forever"]);
        let mut neighbour = Background::start_with("neighbour", &mut command, &log, Stdio::null())?;
        neighbour.wait_for_line("computing", TIMEOUT)?;
        // The launcher keeps a process for the next device like this one, which takes descriptors, too.
        let api = tenants.folder().join("run/api.sock");
        management::make_vms(&api, &[(HOSTILE, vm.clone())])?;
        Client::at(api).delete_vm(&HOSTILE.to_string())?;
        let one_of_each = |now: &BTreeMap<&str, Vec<u32>>| now.values().all(|processes| processes.len() == 1);
        let serving = wait("a process is there twice, or not", || serving(&tenants), one_of_each)?;
        let others = serving.values().flatten().copied();
        let own = tenants.workers(NEIGHBOUR)?.into_iter().chain([tenants.device(NEIGHBOUR)?]);
        let processes = others.chain(own).collect();
        let sessions = tenants.vm(NEIGHBOUR)?["sessions"].as_array().context("sessions")?.clone();
        let sessions = sessions.iter().filter_map(|session| session["session"].as_u64()?.try_into().ok());
        let order = Order {
            processes,
            sessions: sessions.collect(),
            epoch: tenants.charge(NEIGHBOUR)?.epoch,
            targets: Some(targets),
            ..Order::default()
        };
        let program = programs::program("vector_add")?;
        Ok(Self { tenants, vm, neighbour, program, serving, order, waits: Default::default() })
    }

    /// One attempt against a new device, its judgement, and its removal. Returns a line about it.
    fn attempt(&mut self, name: &str, expected: &str) -> Result<String> {
        let api = Client::at(self.tenants.folder().join("run/api.sock"));
        let before = self.descriptors_at_rest()?;
        management::make_vms(&self.tenants.folder().join("run/api.sock"), &[(HOSTILE, self.vm.clone())])?;
        let device = wait("its device", || Ok(self.tenants.device(HOSTILE).ok()), Option::is_some)?;
        let device = device.context("its device")?;
        let (order, over) =
            (Order { attempt: name.to_owned(), ..self.order.clone() }, AtomicBool::new(false));
        let tenants = &self.tenants;
        let crowds = self.tenants.counted(CROWD, HOSTILE)?;
        let (outcome, waits) = std::thread::scope(|scope| {
            let operator = scope.spawn(|| operate(tenants, &over));
            let outcome = attack(tenants, &order);
            // The neighbour begins another session beside the attacker.
            let beside = tenants.run(NEIGHBOUR, &self.program, &[]);
            over.store(true, Ordering::Relaxed);
            let waits = operator.join().map_err(|_| anyhow!("the operator panicked"))??;
            let beside = beside?;
            ensure!(beside.status.success(), "the neighbour: {}\n{}", beside.stdout, beside.stderr);
            Ok((outcome?, waits))
        })?;
        ensure!(outcome == expected, "{outcome}, not {expected}");
        let crowds = self.tenants.counted(CROWD, HOSTILE)? - crowds;
        ensure!(crowds == u64::from(expected == ENDED), "{crowds} crowds");
        ensure!(self.neighbour.is_running()?, "the neighbour ended: {}", self.neighbour.printed());
        let asked = Instant::now();
        self.tenants.fence(HOSTILE)?;
        let fenced = asked.elapsed();
        let longest = waits.iter().max().copied().unwrap_or_default();
        self.waits[0].extend(waits);
        self.waits[1].push(fenced);
        wait("workers of a fenced VM are left", || self.tenants.workers(HOSTILE), Vec::is_empty)?;
        api.delete_vm(&HOSTILE.to_string())?;
        self.nothing_is_left(device, &before)?;
        let ran = self.tenants.run(NEIGHBOUR, &self.program, &[])?;
        ensure!(ran.status.success(), "the neighbour afterwards: {}\n{}", ran.stdout, ran.stderr);
        Ok(format!("{name}: {outcome}; an operator waited {longest:.0?}, for the fence {fenced:.0?}"))
    }

    /// Descriptors of the processes that serve all VMs, once the launcher has made all processes ahead.
    fn descriptors_at_rest(&self) -> Result<BTreeMap<&'static str, usize>> {
        let workers = wait("its worker", || self.tenants.workers(NEIGHBOUR), |all| all.len() == 1)?;
        let expected = made_ahead(workers[0], KINDS)?;
        wait("processes made ahead", || self.tenants.processes(MADE_AHEAD), |all| all.len() == expected)?;
        descriptors(&self.serving)
    }

    fn nothing_is_left(&self, device: u32, before: &BTreeMap<&'static str, usize>) -> Result<()> {
        let exists = || Ok(Path::new(&format!("/proc/{device}")).exists());
        wait("the device is left", exists, |exists| !exists)?;
        // That of the neighbour stays.
        wait("workers are left", || self.tenants.processes("sluice-worker"), |all| all.len() == 1)?;
        // A process that the launcher makes ahead has its program's name for a moment.
        let replaced = format!("processes were replaced, before: {:?}", self.serving);
        let now = wait(&replaced, || serving(&self.tenants), |now| *now == self.serving)?;
        let fewer =
            |now: &BTreeMap<&'static str, usize>| now.iter().all(|(name, count)| *count <= before[name]);
        wait(&format!("descriptors are left, before: {before:?}"), || descriptors(&now), fewer)?;
        Ok(())
    }
}

// Promise: F92
// Promise: F114
#[test]
fn device_that_was_taken_over_harms_no_neighbour_and_no_operator() -> Result<()> {
    let binaries = Binaries::locate()?;
    let host = reach::Host::make()?;
    let mut stage = Stage::set(&binaries, host.targets.clone())?;
    let names = output_of(Command::new(binaries.get("sluice-hostile-device")?).arg("--attempts"), TIMEOUT)?;
    // `SLUICE_ATTEMPT` chooses the attempts whose names contain it.
    let wanted = std::env::var("SLUICE_ATTEMPT").unwrap_or_default();
    let mut failed = Vec::new();
    for line in names.lines().filter(|line| line.contains(&wanted)) {
        let (name, expected) = line.split_once('\t').context("an attempt without an expected outcome")?;
        match stage.attempt(name, expected) {
            Ok(line) => println!("{line}"),
            Err(error) => {
                println!("{name}: FAILED: {error:#}");
                failed.push(format!("{name}: {error:#}\n{}", tail(&stage.tenants.printed(), 20)));
                // The next attempts need a host without it.
                Client::at(stage.tenants.folder().join("run/api.sock")).delete_vm(&HOSTILE.to_string()).ok();
            }
        }
    }
    signal(stage.neighbour.id(), rustix::process::Signal::USR1)?;
    stage.neighbour.wait_for_line("0 wrong", TIMEOUT)?;
    let ended = stage.neighbour.wait(TIMEOUT)?.context("the neighbour does not end")?;
    let printed = stage.neighbour.printed();
    println!("the neighbour: {printed}");
    ensure!(ended.success(), "the neighbour: {ended}\n{printed}");
    for waits in &stage.waits {
        let late = waits.iter().filter(|wait| **wait >= ANSWER).count();
        ensure!(late * 20 <= waits.len(), "an operator waited too long {late} times of {}", waits.len());
    }
    ensure!(failed.is_empty(), "{} attempts failed:\n{}", failed.len(), failed.join("\n\n"));
    stage.tenants.stop()
}

//! A neighbour beside each attack of the tree: its results stay right, none of its calls fails or hangs, and an operator gets answers. In
//! one file: the list of all attacks. It makes calls of every kind: those that only its worker serves, and those for which the arbiter
//! lends or makes room. The times of the first are compared with those beside a harmless load: the attack is stopped and continued, many
//! times a second, so that other work of the machine is in both. The neighbour has a processor of its own, so an attack can slow it only
//! through parts of Sluice that VMs share.

#![allow(clippy::cast_possible_truncation, reason = "offsets in the memory of a 64-bit guest")]

use std::fs;
use std::io::{ErrorKind, PipeWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::fs::SealFlags;
use rustix::process::{Pid, Signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sluice_kit::figures::median;
use sluice_kit::front_end::{EventFd, FREE, FrontEnd, memory};
use sluice_kit::machine::has_machine_code;
use sluice_kit::processes::{wait_gone, watch};
use sluice_kit::wait::until;
use sluice_protocol::{session, shared::Shared as _};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, kill, signal, tail, with_environment};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

const DEVICE_MIB: u64 = 768;
/// Quotas in MiB: of the VM with lying workers, of the neighbour's, and of the one with hostile programs.
const QUOTAS_MIB: [u64; 3] = [400, 128, 128];
const LIAR: u32 = 1;
const NEIGHBOUR: u32 = 2;
const ATTACKER: u32 = 3;
/// Duration of a round of the neighbour, at least.
const ROUND_MILLISECONDS: u32 = 600;
/// Duration of a round after the attack.
const AFTER_MILLISECONDS: u32 = 100;
/// Duration of a slice of the comparison: some dozens of calls.
const SLICE_MILLISECONDS: u32 = 40;
/// Time between two slices, in which the attack continues or comes to rest.
const SETTLE: Duration = Duration::from_millis(10);
/// Fewest and most pairs of slices. Further pairs are measured while the median of all is beyond the bound, because other work of the
/// machine disturbs single ones.
const SLICES: std::ops::RangeInclusive<usize> = 25..=100;
/// Most slices without an attempt of the attack.
const IDLE: usize = 400;
/// The largest ratio of the time of a call beside an attack to its time beside a harmless load.
const SLOWER: f64 = 1.1;
/// Busy threads of the harmless load, on the processor of the attack.
const THREADS: usize = 2;
/// The kinds of the neighbour's calls, in the order in which it prints them, with the time limit of each call. Memory that moves
/// between VMs may wait for grants, and a grant for such moves and for a death, two or three seconds each; a session needs several
/// grants. The rest is for a busy machine.
const KINDS: [(&str, Duration); 6] = [
    ("compute", Duration::from_secs(10)),
    ("small", Duration::from_secs(10)),
    ("large", Duration::from_secs(10)),
    ("module", Duration::from_secs(10)),
    ("context", Duration::from_secs(10)),
    ("session", Duration::from_secs(20)),
];
/// Chooses the attacks whose names contain it.
const CHOICE: &str = "SLUICE_ATTACK";
/// Rounds of the neighbour, of which one must have no call beyond its limit: the machine may stop a process for longer than that.
const ROUNDS: usize = 3;
/// Time limit of nineteen of twenty answers to an operator, on a busy machine.
const ANSWER: Duration = Duration::from_secs(1);
/// Fewest answers to an operator.
const ANSWERS: usize = 20;
/// A single liar's session ends after this time and another follows.
const LIE: Duration = Duration::from_secs(2);
/// Lying workers of one VM that stay until the attack is over: one user's programs may have that many sessions.
const HERD: usize = 64;
/// The VM whose front-end cuts its memory.
const CUTTER: u32 = 1;
/// Number of cuts: a device is started so many times without a pause.
const CUTS: usize = 3;
/// The line of a device that misses a page.
const MISSING: &str = "sluice-device: a page of shared memory is not there any more (SIGBUS)";
/// Number of fences of a VM with an endless kernel.
const FENCES: usize = 3;
/// A part of the software GPU's line about a function of which it has made machine code.
const MACHINE_CODE: &str = ": machine code for ";
/// Time between two deaths of lying workers.
const DEATH: Duration = Duration::from_millis(200);

/// Performs an attack until it is over; stores `true` as soon as it is under way.
type Act = fn(&Stage, &Progress) -> Result<()>;

/// State of an attack.
#[derive(Default)]
struct Progress {
    begun: AtomicBool,
    /// True while slices of the harmless load are measured.
    paused: AtomicBool,
    over: AtomicBool,
    /// Number of attempts that the test makes itself.
    attempts: AtomicUsize,
}

impl Progress {
    fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    fn attempt(&self) {
        self.begin();
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    fn has_ended(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// True if the attack is over. Waits while it is paused.
    fn is_over(&self) -> bool {
        loop {
            if self.has_ended() {
                return true;
            }
            if !self.paused.load(Ordering::Relaxed) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Name and attack.
const ATTACKS: &[(&str, Act)] = &[
    ("flood of takes", |stage, progress| stage.lie("flood", progress)),
    ("grant that is kept", |stage, progress| stage.lie("never-grown", progress)),
    ("chained grants of no bytes", |stage, progress| stage.chain_grants(1, progress)),
    ("chained grants of 64 workers", |stage, progress| stage.chain_grants(HERD, progress)),
    ("queued growth of 64 workers, some of which die", Stage::queue_growth_and_die),
    ("shares that are guessed", |stage, progress| stage.lie("strangers", progress)),
    ("shares that are opened without end", Stage::open_shares),
    ("64 workers that never read", Stage::leave_unread),
    ("crowd that waits on its socket", |stage, progress| stage.lie("crowd", progress)),
    ("memory taken past the arbiter", |stage, progress| stage.lie("past-arbiter", progress)),
    ("flood of standard error", |stage, progress| stage.lie("standard-error", progress)),
    ("storm of growth", Stage::storm),
    ("storm of session starts", Stage::starts),
    ("kills of its own programs", Stage::kills),
    ("guest memory that is replaced", Stage::replace_memory),
    ("signals that are full", Stage::fill_signals),
    ("flood of requests to the API", Stage::ask),
    ("kernel that never ends", Stage::hang),
];

/// The processors of this machine, divided: the first for the neighbour, the others for the rest.
struct Division {
    neighbour: CpuSet,
    others: CpuSet,
}

impl Division {
    /// `None` if there is only one.
    fn divided() -> Result<Option<Self>> {
        let all = sched_getaffinity(None)?;
        let mut available = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let (mut neighbour, mut others) = (CpuSet::new(), CpuSet::new());
        available.by_ref().take(1).for_each(|cpu| neighbour.set(cpu));
        available.for_each(|cpu| others.set(cpu));
        Ok((others.count() > 0).then_some(Self { neighbour, others }))
    }

    /// Binds this thread, and all that it will start, to the other processors.
    fn keep_off(&self) -> Result<()> {
        sched_setaffinity(None, &self.others).context("keeping off the neighbour's processor")
    }

    /// Binds a process of the neighbour to its processor.
    fn give(&self, process: u32) -> Result<()> {
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            let number = thread?.file_name().to_string_lossy().parse()?;
            sched_setaffinity(Pid::from_raw(number), &self.neighbour)
                .with_context(|| format!("giving process {process} its processor"))?;
        }
        Ok(())
    }
}

/// A measured neighbour.
struct Pulse {
    process: Background,
    input: PipeWriter,
    line: u32,
}

/// The times of one kind of the neighbour's calls in a round, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Times {
    median: f64,
    p99: f64,
    most: f64,
}

impl Times {
    const NONE: Self = Self { median: 0.0, p99: 0.0, most: 0.0 };
}

/// The neighbour's figures of a round, by kind.
type Beat = [Times; KINDS.len()];

impl Pulse {
    fn start(tenants: &Tenants, program: &Path, processors: Option<&Division>) -> Result<Self> {
        let (reader, input) = std::io::pipe()?;
        let log = tenants.folder().join("pulse.log");
        let mut command = tenants.command(NEIGHBOUR, program, &[]);
        let mut process = Background::start_with("pulse", &mut command, &log, Stdio::from(reader))?;
        process.wait_for_line("computing", TIMEOUT)?;
        if let Some(processors) = processors {
            let workers = tenants.workers(NEIGHBOUR)?;
            for process in [process.id(), tenants.device(NEIGHBOUR)?].into_iter().chain(workers) {
                processors.give(process)?;
            }
        }
        Ok(Self { process, input, line: 0 })
    }

    /// Measures rounds, in which every result must be right and every call succeed, until every call of a round is in time.
    fn beat(&mut self, milliseconds: u32) -> Result<Beat> {
        let mut late = Vec::new();
        for _ in 0..ROUNDS {
            let mut beat = [Times::NONE; KINDS.len()];
            self.measure("all", milliseconds, &mut beat)?;
            let kinds = KINDS.into_iter().zip(beat);
            let late_kinds = kinds.filter(|((_, limit), times)| times.most / 1e9 >= limit.as_secs_f64());
            let before = late.len();
            late.extend(late_kinds.map(|((kind, _), times)| format!("{kind}: {:.0} ms", times.most / 1e6)));
            if late.len() == before {
                return Ok(beat);
            }
        }
        bail!("calls of the neighbour took too long in each round: {late:?}")
    }

    /// The median of the calls that its worker serves alone, in a slice of time.
    fn slice(&mut self) -> Result<f64> {
        let mut times = [Times::NONE];
        self.measure("compute", SLICE_MILLISECONDS, &mut times)?;
        Ok(times[0].median)
    }

    fn measure(&mut self, which: &str, milliseconds: u32, all: &mut [Times]) -> Result<()> {
        writeln!(self.input, "{which} {milliseconds}")?;
        let line = self.line;
        self.line += 1;
        for ((kind, _), times) in KINDS.into_iter().zip(all) {
            let figures = self.process.wait_for_line(&format!("pulse {line} {kind} "), TIMEOUT)?;
            let numbers: Vec<f64> = figures.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [median, p99, most, calls, wrong, failed] = numbers[..] else { anyhow::bail!("{figures}") };
            // A kernel that was not launched has no right results.
            ensure!(failed == 0.0, "{kind}: {failed} calls of the neighbour failed:\n{}", self.errors());
            ensure!(wrong == 0.0, "{kind}: {wrong} results of the neighbour were wrong");
            ensure!(calls > 0.0, "{kind}: the neighbour made no call");
            *times = Times { median, p99, most };
        }
        Ok(())
    }

    /// The last lines of the neighbour that are no figures.
    fn errors(&self) -> String {
        let printed = self.process.printed();
        let errors: Vec<&str> = printed.lines().filter(|line| !line.starts_with("pulse ")).collect();
        tail(&errors.join("\n"), 10)
    }

    fn end(mut self) -> Result<()> {
        drop(self.input);
        let status = self.process.wait(TIMEOUT)?.context("the neighbour ends")?;
        ensure!(status.success(), "{status}\n{}", tail(&self.process.printed(), 20));
        Ok(())
    }
}

struct Stage {
    tenants: Tenants,
    hold: PathBuf,
    storm: PathBuf,
    hang: PathBuf,
}

impl Stage {
    fn set() -> Result<Self> {
        let binaries = Binaries::locate()?;
        let mut options = Options::with_limits(DEVICE_MIB, &QUOTAS_MIB);
        options.worker = Some(binaries.get("sluice-hostile-worker")?);
        let hold = programs::compile_all()?.into_iter().find(|program| program.name == "hold");
        let hold = hold.context("hold")?.path;
        let (storm, hang) = (programs::hostile("storm")?, programs::hostile("hang")?);
        Ok(Self { tenants: Tenants::start(&binaries, &options)?, hold, storm, hang })
    }

    /// The waits of an operator for answers until the attack is over.
    fn operate(&self, progress: &Progress) -> Result<Vec<Duration>> {
        let mut waits = Vec::new();
        while !progress.has_ended() || waits.len() < ANSWERS {
            let asked = Instant::now();
            self.tenants.look("/v1/vms")?;
            waits.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(waits)
    }

    /// Measures the neighbour beside an attack, and the waits of an operator.
    fn beside(&self, pulse: &mut Pulse, act: Act, compares: bool) -> Result<(Beat, Vec<f64>, Vec<Duration>)> {
        let progress = Progress::default();
        std::thread::scope(|scope| {
            let acting = scope.spawn(|| act(self, &progress));
            let operator = scope.spawn(|| {
                let waits = self.operate(&progress);
                // A round that has failed ends the attack beside it.
                progress.end();
                waits
            });
            let deadline = Instant::now() + TIMEOUT;
            while !progress.begun.load(Ordering::Relaxed) && !acting.is_finished() {
                if Instant::now() > deadline {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let begun = progress.begun.load(Ordering::Relaxed);
            let measured = pulse.beat(ROUND_MILLISECONDS).and_then(|beat| {
                let ratios = if compares { self.compare(pulse, &progress)? } else { Vec::new() };
                Ok((beat, ratios))
            });
            progress.end();
            let acted = acting.join().map_err(|_| anyhow!("the attack panicked"))?;
            let waits = operator.join().map_err(|_| anyhow!("the operator panicked"))??;
            acted?;
            ensure!(begun, "the attack never began");
            let (beat, ratios) = measured?;
            Ok((beat, ratios, waits))
        })
    }

    /// Ratios of the neighbour's times in slices of the attack to those in slices of a harmless load, in turns.
    fn compare(&self, pulse: &mut Pulse, progress: &Progress) -> Result<Vec<f64>> {
        let (busy, done) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if busy.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        } else {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
            let ratios = self.slices(pulse, progress, &busy);
            done.store(true, Ordering::Relaxed);
            ratios
        })
    }

    fn slices(&self, pulse: &mut Pulse, progress: &Progress, busy: &AtomicBool) -> Result<Vec<f64>> {
        let (mut ratios, mut without) = (Vec::new(), 0);
        while ratios.len() < *SLICES.start() || ratios.len() < *SLICES.end() && median(&ratios) > SLOWER {
            let attempts = progress.attempts.load(Ordering::Relaxed);
            std::thread::sleep(SETTLE);
            let beside_attack = pulse.slice()?;
            progress.paused.store(true, Ordering::Relaxed);
            let stopped = self.stop_attackers()?;
            let attacked = !stopped.is_empty() || progress.attempts.load(Ordering::Relaxed) > attempts;
            busy.store(true, Ordering::Relaxed);
            std::thread::sleep(SETTLE);
            let beside_load = pulse.slice();
            busy.store(false, Ordering::Relaxed);
            // Those that have ended meanwhile need no signal.
            stopped.into_iter().for_each(|process| _ = signal(process, Signal::CONT));
            progress.paused.store(false, Ordering::Relaxed);
            let ratio = beside_attack / beside_load?;
            // A slice between two attempts shows nothing.
            if attacked {
                ratios.push(ratio);
            } else {
                without += 1;
                ensure!(without < IDLE, "{without} slices without the attack, and {} with it", ratios.len());
            }
        }
        Ok(ratios)
    }

    /// Stops the programs and workers of the VMs that attack.
    fn stop_attackers(&self) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for vm in [LIAR, ATTACKER] {
            let marker = format!("SLUICE_SOCKET={}", self.tenants.socket(vm).display());
            all.extend(with_environment(&marker).into_iter().map(|(process, _)| process));
            all.extend(self.tenants.workers(vm)?);
        }
        all.retain(|process| signal(*process, Signal::STOP).is_ok());
        Ok(all)
    }

    /// Lets a program run until the attack is over, and kills it.
    fn until_over(&self, program: &mut Background, progress: &Progress) -> Result<()> {
        progress.begin();
        while !progress.is_over() {
            std::thread::sleep(Duration::from_millis(2));
        }
        kill(program.id());
        program.wait(TIMEOUT)?.context("it ends when it is killed")?;
        self.tenants.wait_for_charge(ATTACKER, |charge| charge.lent + charge.holders == 0).map(drop)
    }

    /// Runs taken-over workers, one after the other.
    fn lie(&self, attack: &str, progress: &Progress) -> Result<()> {
        while !progress.is_over() {
            let mut client = self.liars(attack, 1)?;
            let end = Instant::now() + LIE;
            while !progress.is_over() && Instant::now() < end && any_runs(&mut client)? {
                if self.reports("begun")? == 1 {
                    progress.begin();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            self.end_liars(client)?;
        }
        Ok(())
    }

    /// Runs taken-over workers at once until the attack is over, which is under way when they have reported `sign` so often.
    fn herd(&self, attack: &str, count: usize, sign: (&str, usize), progress: &Progress) -> Result<()> {
        // The arbiter ends workers that break its rules, and their VM is fenced: another herd follows.
        while !progress.is_over() {
            let mut clients = self.liars(attack, count)?;
            self.wait_for_reports(sign)?;
            progress.begin();
            while !progress.is_over() && any_runs(&mut clients)? {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.end_liars(clients)?;
        }
        Ok(())
    }

    fn chain_grants(&self, workers: usize, progress: &Progress) -> Result<()> {
        self.herd("chained-grants", workers, ("chaining", workers), progress)
    }

    fn open_shares(&self, progress: &Progress) -> Result<()> {
        // The last of 17 shares has many chunks.
        self.herd("repeated-opens", 1, ("opening", 17), progress)
    }

    fn leave_unread(&self, progress: &Progress) -> Result<()> {
        self.herd("unread", HERD, ("begun", HERD), progress)
    }

    fn queue_growth_and_die(&self, progress: &Progress) -> Result<()> {
        let mut clients = self.liars("queued-growth", HERD)?;
        self.wait_for_reports(("begun", HERD))?;
        progress.begin();
        while !progress.is_over() {
            if let Some(mut client) = clients.pop() {
                kill(client.id());
                client.wait(TIMEOUT)?.context("a liar's program ends")?;
            }
            std::thread::sleep(DEATH);
        }
        self.end_liars(clients)
    }

    fn wait_for_reports(&self, (sign, count): (&str, usize)) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.reports(sign)? < count {
            ensure!(Instant::now() < deadline, "{sign}: {} reports of {count}", self.reports(sign)?);
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Starts programs whose workers lie.
    fn liars(&self, attack: &str, count: usize) -> Result<Vec<Background>> {
        let folder = self.tenants.liar_folder();
        fs::write(folder.join("attack"), attack)?;
        fs::remove_file(folder.join("report")).ok();
        let mut all = Vec::new();
        while all.len() < count {
            let name = format!("liar-{}", all.len());
            all.push(self.tenants.spawn(LIAR, &name, &self.hold, &["1000"])?);
            // A few start at once: the storm of session starts is another attack.
            if all.len() % 4 == 0 {
                self.wait_for_reports(("begun", all.len()))?;
            }
        }
        Ok(all)
    }

    /// Number of lines that taken-over workers have reported and that begin with this word.
    fn reports(&self, word: &str) -> Result<usize> {
        match fs::read_to_string(self.tenants.liar_folder().join("report")) {
            Ok(report) => Ok(report.lines().filter(|line| line.split(' ').next() == Some(word)).count()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    fn end_liars(&self, clients: Vec<Background>) -> Result<()> {
        clients.iter().for_each(|client| kill(client.id()));
        for mut client in clients {
            client.wait(TIMEOUT)?.context("a liar's program ends")?;
        }
        self.admit(LIAR)?;
        self.tenants.wait_for_charge(LIAR, |charge| charge.lent + charge.holders == 0).map(drop)
    }

    /// Readmits a VM that was fenced for its attack, so that the attack continues.
    fn admit(&self, vm: u32) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let fence = &self.tenants.vm(vm)?["fence"];
            match fence["step"].as_str() {
                Some("active") => return Ok(()),
                // Refused until its memory is clean.
                Some("quarantined") => _ = self.tenants.readmit(vm),
                _ => {}
            }
            ensure!(Instant::now() < deadline, "VM {vm} stays fenced: {fence}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn storm(&self, progress: &Progress) -> Result<()> {
        let mut storm = self.tenants.spawn(ATTACKER, "storm", &self.storm, &[])?;
        storm.wait_for_line("storming", TIMEOUT)?;
        self.until_over(&mut storm, progress)
    }

    fn hang(&self, progress: &Progress) -> Result<()> {
        let mut hang = self.tenants.spawn(ATTACKER, "hang", &self.hang, &[])?;
        hang.wait_for_line("holding", TIMEOUT)?;
        self.until_over(&mut hang, progress)
    }

    fn starts(&self, progress: &Progress) -> Result<()> {
        while !progress.is_over() {
            // Several at once, each of which ends as soon as it has computed.
            let mut all = (0..4)
                .map(|number| self.tenants.spawn(ATTACKER, &format!("start-{number}"), &self.hold, &["0"]))
                .collect::<Result<Vec<_>>>()?;
            progress.begin();
            for program in &mut all {
                program.wait(TIMEOUT)?.context("a short program ends")?;
            }
        }
        Ok(())
    }

    fn kills(&self, progress: &Progress) -> Result<()> {
        while !progress.is_over() {
            let mut victim = self.tenants.spawn(ATTACKER, "victim", &self.hold, &["1000"])?;
            victim.wait_for_line("holding", TIMEOUT)?;
            progress.begin();
            kill(victim.id());
            victim.wait(TIMEOUT)?.context("a victim ends")?;
        }
        Ok(())
    }

    /// Replaces a front-end's memory by memory that can shrink, and shrinks it.
    fn replace_memory(&self, progress: &Progress) -> Result<()> {
        let socket = self.tenants.folder().join(format!("run/vm-{ATTACKER}.sock"));
        while !progress.is_over() {
            progress.attempt();
            // A refusal is an answer, too: the device may still have the last guest's contexts, the starts of a VM have a rate, and
            // those that wait have places.
            let Some(mut raw) = FrontEnd::try_connect(&socket) else { continue };
            raw.try_open(1, 10, FREE);
            let loose = memory(SealFlags::empty());
            // The device refuses it, or ends the connection.
            if raw.replace(&loose).is_ok() {
                rustix::fs::ftruncate(&loose, 0)?;
            }
        }
        self.tenants.wait_for_charge(ATTACKER, |charge| charge.holders == 0).map(drop)
    }

    /// Makes workers write to an eventfd that is full, so that they wait for a reader that never comes.
    fn fill_signals(&self, progress: &Progress) -> Result<()> {
        let socket = self.tenants.folder().join(format!("run/vm-{ATTACKER}.sock"));
        let sleeps = FREE as usize + session::GUEST_PARKED;
        let mut met = 0;
        while !progress.is_over() {
            progress.attempt();
            // Refusals are answers, as above.
            let Some(mut raw) = FrontEnd::try_connect(&socket) else { continue };
            let [doorbell, wake] = [EventFd::new(0)?, EventFd::new(0)?];
            raw.signals(&doorbell, &wake)?;
            [&doorbell, &wake].into_iter().try_for_each(|full| full.write(u64::MAX - 1))?;
            raw.words.store_u32(sleeps, 1, Ordering::SeqCst);
            raw.try_open(1, 10, FREE);
            // The worker takes the word back just before it writes.
            let wakes = |raw: &FrontEnd| raw.words.load_u32(sleeps, Ordering::SeqCst) == 0;
            let opened = Instant::now();
            while !progress.is_over() && opened.elapsed() < LIE && !wakes(&raw) {
                std::thread::sleep(Duration::from_millis(5));
            }
            met += usize::from(wakes(&raw));
        }
        ensure!(met > 0, "no worker met a full eventfd");
        self.tenants.wait_for_charge(ATTACKER, |charge| charge.holders == 0).map(drop)
    }

    fn ask(&self, progress: &Progress) -> Result<()> {
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|number| {
                    scope.spawn(move || {
                        let path = ["/v1/vms", "/v1/usage", "/v1/units", "/v1/host"][number % 4];
                        while !progress.is_over() {
                            // A refusal because of too many requests is an answer, too.
                            self.tenants.look(path).ok();
                            progress.attempt();
                        }
                    })
                })
                .collect();
            clients.into_iter().try_for_each(|client| client.join()).map_err(|_| anyhow!("a client panicked"))
        })
    }
}

/// True if one of the programs has not ended.
fn any_runs(programs: &mut [Background]) -> Result<bool> {
    programs.iter_mut().try_fold(false, |any, program| Ok(any || program.is_running()?))
}

/// Measures the neighbour beside an attack, prints its figures and judges them.
fn measure((name, act): &(&str, Act), program: &Path, processors: Option<&Division>) -> Result<()> {
    // Of its own, so that no attack prepares the device for another.
    let stage = Stage::set()?;
    let mut pulse = Pulse::start(&stage.tenants, program, processors)?;
    let compares = processors.is_some();
    let (beat, ratios, waits) =
        stage.beside(&mut pulse, *act, compares).with_context(|| tail(&stage.tenants.printed(), 40))?;
    let late = waits.iter().filter(|wait| **wait >= ANSWER).count();
    let longest = waits.iter().max().copied().unwrap_or_default();
    println!("{name}; an operator waits {longest:?} at most, {late} times of {} too long", waits.len());
    for ((kind, _), Times { median, p99, .. }) in KINDS.into_iter().zip(beat) {
        println!(
            "  {kind:8} half of the calls within {:7.0} us, 99 % within {:7.0} us",
            median / 1e3,
            p99 / 1e3
        );
    }
    ensure!(
        late * 20 <= waits.len(),
        "an operator waited too long {late} times of {}: {waits:.0?}",
        waits.len()
    );
    pulse.beat(AFTER_MILLISECONDS).context("after the attack")?;
    pulse.end()?;
    stage.tenants.stop()?;
    if compares {
        let ratio = median(&ratios);
        println!(
            "  compute  takes {ratio:.3} times as long as beside a harmless load ({} pairs)",
            ratios.len()
        );
        ensure!(
            ratio <= SLOWER,
            "a call takes {ratio:.3} times as long as beside a harmless load: {ratios:.2?}"
        );
    }
    Ok(())
}

// Promise: F84, F112
#[test]
fn neighbour_that_needs_the_arbiter_is_served_beside_each_attack() -> Result<()> {
    let processors = Division::divided()?;
    if let Some(processors) = &processors {
        processors.keep_off()?;
    }
    let program = programs::hostile("pulse")?;
    let wanted = std::env::var(CHOICE).unwrap_or_default();
    let chosen: Vec<_> = ATTACKS.iter().filter(|(name, _)| name.contains(&wanted)).collect();
    ensure!(!chosen.is_empty(), "no attack is called {wanted:?}");
    let mut failed = Vec::new();
    for attack in chosen {
        if let Err(error) = measure(attack, &program, processors.as_ref()) {
            println!("{}: failed", attack.0);
            failed.push(format!("{}: {error:#}", attack.0));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n\n"));
    if processors.is_none() {
        sluice_skip::skip("the comparison with a harmless load needs two processors");
    }
    Ok(())
}

/// Opens a session of a VM with memory that can be cut, cuts it, and waits until the device and the worker are gone.
fn cut_memory(tenants: &Tenants) -> Result<()> {
    let socket = tenants.socket(CUTTER);
    let (mut guest, file) = until(
        || {
            let file = memory(SealFlags::empty());
            let same = rustix::io::fcntl_dupfd_cloexec(&file, 0).ok()?;
            Some((FrontEnd::with_memory(&socket, file).ok()?, same))
        },
        Option::is_some,
    )
    .context("the device accepts memory without seals")?;
    let device = until(|| tenants.device(CUTTER).ok(), Option::is_some).context("a device")?;
    ensure!(guest.context(1) == 0x1100, "no context");
    guest.open(1, 10, FREE);
    let state = until(|| guest.state(FREE), |state| *state == session::READY);
    ensure!(state == session::READY, "the session is in state {state}");
    let processes = [vec![device], tenants.workers(CUTTER)?].concat();
    ensure!(processes.len() == 2, "{processes:?}");
    let processes = processes.into_iter().map(|process| watch(process).context("a process"));
    let processes = processes.collect::<Result<Vec<_>>>()?;
    rustix::fs::ftruncate(&file, 0)?;
    // The device reads the ring, which is cut off; this process does not.
    ensure!(guest.start(1).is_err(), "the device has read memory that is cut off");
    processes.iter().for_each(wait_gone);
    Ok(())
}

// Promise: V30, V31
#[test]
fn neighbour_computes_beside_a_trusted_front_end_that_cuts_its_memory() -> Result<()> {
    let mut options = Options::with_limits(DEVICE_MIB, &QUOTAS_MIB[..2]);
    let (cutter, settings) = &mut options.vms[0];
    ensure!(*cutter == CUTTER, "another VM");
    settings.direct = false;
    options.arguments.push("--trust-vmm-memory".to_owned());
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let mut pulse = Pulse::start(&tenants, &programs::hostile("pulse")?, None)?;
    let neighbour = tenants.device(NEIGHBOUR)?;
    for _ in 0..CUTS {
        std::thread::scope(|scope| {
            let measured = scope.spawn(|| pulse.beat(ROUND_MILLISECONDS).map(drop));
            let cut = cut_memory(&tenants);
            measured.join().map_err(|_| anyhow!("the neighbour panicked"))?.and(cut)
        })?;
    }
    pulse.beat(AFTER_MILLISECONDS).context("after the cuts")?;
    ensure!(tenants.device(NEIGHBOUR)? == neighbour, "the neighbour has another device");
    pulse.end()?;
    let log = tenants.printed();
    ensure!(log.matches(MISSING).count() == CUTS, "{}", tail(&log, 40));
    tenants.stop()
}

/// Starts a kernel that never ends in machine code, and fences its VM.
fn fence_endless_kernel(tenants: &Tenants, pulse: &mut Pulse, hang: &Path, number: usize) -> Result<()> {
    let mut program = tenants.spawn(LIAR, &format!("hang-{number}"), hang, &[])?;
    program.wait_for_line("holding", TIMEOUT)?;
    let made = || tenants.printed().lines().filter(|line| is_machine_code_of(line, "hang")).count();
    ensure!(until(made, |made| *made == number) == number, "{}", tail(&tenants.printed(), 40));
    let workers = tenants.workers(LIAR)?;
    ensure!(workers.len() == 1, "{workers:?}");
    let worker = watch(workers[0]).context("the worker runs")?;
    std::thread::scope(|scope| {
        let measured = scope.spawn(|| pulse.beat(ROUND_MILLISECONDS).map(drop));
        let fenced = tenants.fence(LIAR);
        measured.join().map_err(|_| anyhow!("the neighbour panicked"))?.and(fenced)
    })?;
    wait_gone(&worker);
    let fence = || Ok::<_, anyhow::Error>(tenants.vm(LIAR)?["fence"].clone());
    let fence = until(fence, |fence| fence.as_ref().is_ok_and(|fence| fence["step"] == "quarantined"))?;
    // A step that took too long would have ended in quarantine before the memory was clean.
    ensure!(fence["step"] == "quarantined" && fence["clean"] == true, "{fence}");
    kill(program.id());
    program.wait(TIMEOUT)?.context("it ends when it is killed")?;
    tenants.readmit(LIAR)
}

fn is_machine_code_of(line: &str, function: &str) -> bool {
    line.split_once(MACHINE_CODE).is_some_and(|(before, _)| before.contains(function))
}

// Promise: F122
#[test]
fn fence_ends_an_endless_kernel_in_machine_code_beside_a_neighbour_that_computes() -> Result<()> {
    if !has_machine_code() {
        sluice_skip::skip("there is no machine code for this processor");
        return Ok(());
    }
    let mut options = Options::with_limits(DEVICE_MIB, &QUOTAS_MIB[..2]);
    options.environment.push(("SLUICE_SOFTGPU_LOG".to_owned(), "1".to_owned()));
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let mut pulse = Pulse::start(&tenants, &programs::hostile("pulse")?, None)?;
    let hang = programs::hostile("hang")?;
    for number in 1..=FENCES {
        fence_endless_kernel(&tenants, &mut pulse, &hang, number)?;
    }
    pulse.beat(AFTER_MILLISECONDS).context("after the fences")?;
    pulse.end()?;
    tenants.stop()
}

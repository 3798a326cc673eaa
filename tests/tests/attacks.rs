//! A neighbour beside each attack that the tree has: its results stay right, none of its calls fails, and an operator is
//! answered. How long its calls take is printed, in turns with the same beside a harmless load. The neighbour has a processor of its
//! own, as far as the machine has two: what an attack costs it beyond that comes by the parts of Sluice that VMs share.

#![allow(clippy::cast_possible_truncation, reason = "offsets in the memory of a 64-bit guest")]

/// The front-end of the device's own tests.
#[path = "../../backend/device/tests/common/raw.rs"]
#[allow(dead_code, unreachable_pub, reason = "each user has a part of it")]
mod raw;

use std::fs;
use std::io::{PipeWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use raw::Raw;
use rustix::fs::SealFlags;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sluice_tests::direct::PATIENCE;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, kill, tail};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

/// What the front-end gives a device to answer at once.
const SOON: Duration = PATIENCE;
const DEVICE_MIB: u64 = 512;
/// Bytes in MiB of the VM with lying workers, of the neighbour's, and of the one with programs that mean harm.
const QUOTAS_MIB: [u64; 3] = [64, 64, 128];
const LIAR: u32 = 1;
const NEIGHBOUR: u32 = 2;
const ATTACKER: u32 = 3;
/// For how long the neighbour is measured at a time.
const ROUND_MILLISECONDS: u32 = 400;
/// Turns of an attack and of a harmless load.
const ROUNDS: usize = 3;
/// An operator is answered within this time, on a busy machine.
const ANSWER: Duration = Duration::from_secs(1);
/// A liar's session ends after this and another follows.
const LIE: Duration = Duration::from_secs(2);

/// What an attack does until it is over; `true` is stored as soon as it is under way.
type Act = fn(&Stage, &Progress) -> Result<()>;

/// How far an attack is.
#[derive(Default)]
struct Progress {
    begun: AtomicBool,
    over: AtomicBool,
}

impl Progress {
    fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// A load that does nobody harm and keeps about as many processors busy as the attack beside which it is measured.
#[derive(Clone, Copy)]
enum Harmless {
    /// So many threads.
    Threads(usize),
    /// Kernels of the attacking VM.
    Kernels,
}
use Harmless::{Kernels, Threads};

const ATTACKS: &[(&str, Act, Harmless)] = &[
    ("a flood of takes", |stage, progress| stage.lie("flood", progress), Threads(2)),
    ("a grant that is kept", |stage, progress| stage.lie("never-grown", progress), Threads(1)),
    ("shares that are guessed", |stage, progress| stage.lie("strangers", progress), Threads(2)),
    ("memory taken past the arbiter", |stage, progress| stage.lie("past-arbiter", progress), Threads(1)),
    ("a flood of standard error", |stage, progress| stage.lie("standard-error", progress), Threads(2)),
    ("a storm of growth", Stage::storm, Threads(2)),
    ("a storm of session starts", Stage::starts, Threads(2)),
    ("kills of its own programs", Stage::kills, Threads(2)),
    ("guest memory that is replaced", Stage::replace_memory, Threads(2)),
    ("a flood of requests to the API", Stage::ask, Threads(2)),
    ("a kernel that never ends", Stage::hang, Kernels),
];

/// The processors of this machine, divided: the first for the neighbour, the others for all else.
struct Processors {
    neighbour: CpuSet,
    others: CpuSet,
}

impl Processors {
    /// `None` where there is one only.
    fn divided() -> Result<Option<Self>> {
        let all = sched_getaffinity(None)?;
        let mut available = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let (mut neighbour, mut others) = (CpuSet::new(), CpuSet::new());
        available.by_ref().take(1).for_each(|cpu| neighbour.set(cpu));
        available.for_each(|cpu| others.set(cpu));
        Ok((others.count() > 0).then_some(Self { neighbour, others }))
    }

    /// Puts this thread, and all that it will start, on the processors of the others.
    fn keep_off(&self) -> Result<()> {
        sched_setaffinity(None, &self.others).context("keeping off the neighbour's processor")
    }

    /// Gives a process of the neighbour its processor.
    fn give(&self, process: u32) -> Result<()> {
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            let number = thread?.file_name().to_string_lossy().parse()?;
            sched_setaffinity(Pid::from_raw(number), &self.neighbour)
                .with_context(|| format!("giving process {process} its processor"))?;
        }
        Ok(())
    }
}

/// A neighbour that is measured.
struct Pulse {
    process: Background,
    input: PipeWriter,
    line: u32,
}

/// What a neighbour had of a round, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Beat {
    median: f64,
    p99: f64,
}

impl Pulse {
    fn start(tenants: &Tenants, program: &Path, processors: Option<&Processors>) -> Result<Self> {
        let (reader, input) = std::io::pipe()?;
        let log = tenants.folder().join("pulse.log");
        let mut command = tenants.command(NEIGHBOUR, program, &[]);
        let mut process = Background::start_with("pulse", &mut command, &log, Stdio::from(reader))?;
        process.wait_for_line("computing", PATIENCE)?;
        if let Some(processors) = processors {
            let workers = tenants.workers(NEIGHBOUR)?;
            for process in [process.id(), tenants.device(NEIGHBOUR)?].into_iter().chain(workers) {
                processors.give(process)?;
            }
        }
        Ok(Self { process, input, line: 0 })
    }

    /// Measures one round, in which nothing may go wrong.
    fn beat(&mut self) -> Result<Beat> {
        writeln!(self.input, "{ROUND_MILLISECONDS}")?;
        let said = self.process.wait_for_line(&format!("pulse {} ", self.line), PATIENCE)?;
        self.line += 1;
        let numbers: Vec<f64> = said.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [median, p99, _most, rounds, wrong, failed] = numbers[..] else { anyhow::bail!("{said}") };
        ensure!(wrong == 0.0, "{wrong} results of the neighbour were wrong");
        ensure!(failed == 0.0, "{failed} calls of the neighbour failed");
        ensure!(rounds > 0.0, "the neighbour did nothing");
        Ok(Beat { median, p99 })
    }

    fn end(mut self) -> Result<()> {
        drop(self.input);
        let status = self.process.wait(PATIENCE)?.context("the neighbour ends")?;
        ensure!(status.success(), "{status}\n{}", tail(&self.process.printed(), 20));
        Ok(())
    }
}

struct Stage {
    tenants: Tenants,
    hold: PathBuf,
    storm: PathBuf,
    hang: PathBuf,
    busy: PathBuf,
}

impl Stage {
    fn set() -> Result<Self> {
        let binaries = Binaries::locate()?;
        let mut options = Options::with_limits(DEVICE_MIB, &QUOTAS_MIB);
        options.worker = Some(binaries.get("sluice-hostile-worker")?);
        let hold = programs::compile_all()?.into_iter().find(|program| program.name == "hold");
        let hold = hold.context("hold")?.path;
        let (storm, hang) = (programs::hostile("storm")?, programs::hostile("hang")?);
        let busy = programs::hostile("busy")?;
        Ok(Self { tenants: Tenants::start(&binaries, &options)?, hold, storm, hang, busy })
    }

    /// The longest that an operator waits for an answer until it is over.
    fn operate(&self, progress: &Progress) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        while !progress.is_over() {
            let asked = Instant::now();
            self.tenants.look("/v1/vms")?;
            longest = longest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(longest)
    }

    /// The neighbour beside something that goes on meanwhile, and the longest that an operator waits.
    fn beside(
        &self,
        pulse: &mut Pulse,
        act: impl Fn(&Progress) -> Result<()> + Sync,
    ) -> Result<(Beat, Duration)> {
        let progress = Progress::default();
        std::thread::scope(|scope| {
            let acting = scope.spawn(|| act(&progress));
            let operator = scope.spawn(|| {
                let longest = self.operate(&progress);
                // A round that has failed ends what goes on beside it.
                progress.over.store(true, Ordering::Relaxed);
                longest
            });
            let deadline = Instant::now() + PATIENCE;
            while !progress.begun.load(Ordering::Relaxed) && !acting.is_finished() {
                if Instant::now() > deadline {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let begun = progress.begun.load(Ordering::Relaxed);
            let beat = pulse.beat();
            progress.over.store(true, Ordering::Relaxed);
            let acted = acting.join().map_err(|_| anyhow!("the attack panicked"))?;
            let longest = operator.join().map_err(|_| anyhow!("the operator panicked"))??;
            acted?;
            ensure!(begun, "the attack never began");
            Ok((beat?, longest))
        })
    }

    fn harmless(&self, load: Harmless, progress: &Progress) -> Result<()> {
        match load {
            Threads(count) => std::thread::scope(|scope| {
                for _ in 0..count {
                    scope.spawn(|| {
                        while !progress.is_over() {
                            std::hint::spin_loop();
                        }
                    });
                }
                progress.begin();
                Ok(())
            }),
            Kernels => {
                let mut busy = self.tenants.spawn(ATTACKER, "busy", &self.busy, &["1000000", "2"])?;
                busy.wait_for_line("done", PATIENCE)?;
                self.until_over(&mut busy, progress)
            }
        }
    }

    /// Lets a program go on until it is over, and ends it.
    fn until_over(&self, program: &mut Background, progress: &Progress) -> Result<()> {
        progress.begin();
        while !progress.is_over() {
            std::thread::sleep(Duration::from_millis(2));
        }
        kill(program.id());
        program.wait(PATIENCE)?.context("it ends when it is killed")?;
        self.tenants.wait_for_charge(ATTACKER, |charge| charge.lent + charge.holders == 0).map(drop)
    }

    /// Workers that have been taken over, one after the other.
    fn lie(&self, attack: &str, progress: &Progress) -> Result<()> {
        let libexec = self.tenants.folder().join("libexec");
        fs::write(libexec.join("attack"), attack)?;
        while !progress.is_over() {
            fs::remove_file(libexec.join("report")).ok();
            let mut client = self.tenants.spawn(LIAR, "liar", &self.hold, &["1000"])?;
            let end = Instant::now() + LIE;
            while !progress.is_over() && Instant::now() < end && client.is_running()? {
                if !self.tenants.workers(LIAR)?.is_empty() {
                    progress.begin();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            kill(client.id());
            client.wait(PATIENCE)?.context("the liar's program ends")?;
            self.admit(LIAR)?;
        }
        self.tenants.wait_for_charge(LIAR, |charge| charge.lent + charge.holders == 0).map(drop)
    }

    /// A VM that is fenced for what it does is admitted again, so that it goes on.
    fn admit(&self, vm: u32) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let fence = &self.tenants.vm(vm)?["fence"];
            match fence["step"].as_str() {
                Some("active") => return Ok(()),
                // Refused until what it had is clean.
                Some("quarantined") => _ = self.tenants.readmit(vm),
                _ => {}
            }
            ensure!(Instant::now() < deadline, "VM {vm} stays fenced: {fence}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn storm(&self, progress: &Progress) -> Result<()> {
        let mut storm = self.tenants.spawn(ATTACKER, "storm", &self.storm, &[])?;
        storm.wait_for_line("storming", PATIENCE)?;
        self.until_over(&mut storm, progress)
    }

    fn hang(&self, progress: &Progress) -> Result<()> {
        let mut hang = self.tenants.spawn(ATTACKER, "hang", &self.hang, &[])?;
        hang.wait_for_line("holding", PATIENCE)?;
        self.until_over(&mut hang, progress)
    }

    fn starts(&self, progress: &Progress) -> Result<()> {
        while !progress.is_over() {
            // Several at once, each of which ends by itself as soon as it has computed.
            let mut all = (0..4)
                .map(|number| self.tenants.spawn(ATTACKER, &format!("start-{number}"), &self.hold, &["0"]))
                .collect::<Result<Vec<_>>>()?;
            progress.begin();
            for program in &mut all {
                program.wait(PATIENCE)?.context("a short program ends")?;
            }
        }
        Ok(())
    }

    fn kills(&self, progress: &Progress) -> Result<()> {
        while !progress.is_over() {
            let mut victim = self.tenants.spawn(ATTACKER, "victim", &self.hold, &["1000"])?;
            victim.wait_for_line("holding", PATIENCE)?;
            progress.begin();
            kill(victim.id());
            victim.wait(PATIENCE)?.context("a victim ends")?;
        }
        Ok(())
    }

    /// A front-end whose memory is replaced by what can be cut, and cut.
    fn replace_memory(&self, progress: &Progress) -> Result<()> {
        let socket = self.tenants.folder().join(format!("run/vm-{ATTACKER}.sock"));
        while !progress.is_over() {
            let mut raw = Raw::connect(&socket);
            raw.open(1, 10, raw::FREE);
            let loose = raw::memory(SealFlags::empty());
            progress.begin();
            // The device refuses it, or ends the connection.
            if raw.replace(&loose).is_ok() {
                rustix::fs::ftruncate(&loose, 0)?;
            }
        }
        self.tenants.wait_for_charge(ATTACKER, |charge| charge.holders == 0).map(drop)
    }

    fn ask(&self, progress: &Progress) -> Result<()> {
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|number| {
                    scope.spawn(move || {
                        let path = ["/v1/vms", "/v1/usage", "/v1/units", "/v1/host"][number % 4];
                        while !progress.is_over() {
                            // One that is refused because there are too many has been answered, too.
                            self.tenants.look(path).ok();
                            progress.begin();
                        }
                    })
                })
                .collect();
            clients.into_iter().try_for_each(|client| client.join()).map_err(|_| anyhow!("a client panicked"))
        })
    }
}

/// The middle one of several figures.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

// Promise: F84
#[test]
fn neighbour_beside_each_attack_computes_rightly_and_an_operator_is_answered() -> Result<()> {
    let processors = Processors::divided()?;
    if let Some(processors) = &processors {
        processors.keep_off()?;
    }
    let stage = Stage::set()?;
    let mut pulse = Pulse::start(&stage.tenants, &programs::hostile("pulse")?, processors.as_ref())?;
    for (name, act, load) in ATTACKS {
        let (mut attacked, mut calm) = (Vec::new(), Vec::new());
        let mut longest = Duration::ZERO;
        for _ in 0..ROUNDS {
            let (beat, answered) = stage
                .beside(&mut pulse, |progress| act(&stage, progress))
                .with_context(|| format!("{name}\n{}", tail(&stage.tenants.printed(), 40)))?;
            ensure!(answered < ANSWER, "{name}: an operator waited {answered:?} for an answer");
            longest = longest.max(answered);
            attacked.push(beat);
            let (beat, _) = stage
                .beside(&mut pulse, |progress| stage.harmless(*load, progress))
                .with_context(|| format!("beside no attack, after {name}"))?;
            calm.push(beat);
        }
        let of = |beats: &[Beat], figure: fn(&Beat) -> f64| median(beats.iter().map(figure).collect());
        let [own, other] = [&attacked, &calm].map(|beats| of(beats, |beat| beat.median));
        let [own_p99, other_p99] = [&attacked, &calm].map(|beats| of(beats, |beat| beat.p99));
        println!(
            "{name}: median {:.0} us, p99 {:.0} us; beside a harmless load {:.0} and {:.0} us; ratio {:.2}; \
             an operator waits {longest:?} at most",
            own / 1e3,
            own_p99 / 1e3,
            other / 1e3,
            other_p99 / 1e3,
            own / other,
        );
    }
    pulse.end()?;
    stage.tenants.stop()
}

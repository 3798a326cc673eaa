//! A machine with a Sluice GPU, and the host's side of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_kit::processes::MADE_AHEAD;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::direct::{descriptors, made_ahead, mappings};
use sluice_tests::host::{Host, run_native};
use sluice_tests::image::Image;
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::{Completed, Guest, GuestCommand, GuestProcess, Machine};
use sluice_tests::way::{Mode, Way};

/// Time limit for steps that take seconds at most on an idle machine.
pub(super) const TIMEOUT: Duration = Duration::from_secs(240);
pub(super) const HOSTILE: &str = "sluice-hostile-guest";

/// A machine with a Sluice GPU, and the host's side of it.
pub(super) struct Stage {
    // Declared before the host's side, because it must be dropped first.
    pub(super) guest: Guest,
    pub(super) host: Host,
    pub(super) binaries: Binaries,
    pub(super) programs: Vec<Program>,
    pub(super) kernel: Kernel,
    pub(super) started: Instant,
}

impl Stage {
    pub(super) fn boot(name: &str, series: Series, cpus: u32) -> Result<Self> {
        Self::boot_machine(Machine { cpus, memory_mib: 4096, ..Machine::new(name) }, series)
    }

    pub(super) fn boot_machine(machine: Machine, series: Series) -> Result<Self> {
        Self::boot_with(machine, series, (&[], &[]), |_| Ok(()))
    }

    /// Boots with options and variables of the host's side, and with additions to the image.
    pub(super) fn boot_with(
        machine: Machine,
        series: Series,
        host: (&[&str], &[(&str, &str)]),
        add: impl FnOnce(&mut Image) -> Result<()>,
    ) -> Result<Self> {
        Self::boot_way(&Way::stock(Mode::Legacy), machine, series, host, add)
    }

    /// As [`Self::boot_with`], on a given way.
    pub(super) fn boot_way(
        way: &Way,
        machine: Machine,
        series: Series,
        host: (&[&str], &[(&str, &str)]),
        add: impl FnOnce(&mut Image) -> Result<()>,
    ) -> Result<Self> {
        Self::boot_kernel(way, machine, Kernel::fetch(series)?, host, add)
    }

    /// As [`Self::boot_way`], with given modules.
    pub(super) fn boot_kernel(
        way: &Way,
        machine: Machine,
        kernel: Kernel,
        (options, environment): (&[&str], &[(&str, &str)]),
        add: impl FnOnce(&mut Image) -> Result<()>,
    ) -> Result<Self> {
        let series = kernel.series;
        let binaries = Binaries::locate()?;
        let programs = programs::compile_all()?;
        let mut image = Image::with_sluice(&kernel, &binaries, &programs)?;
        image
            .program(Path::new(env!("CARGO_BIN_EXE_sluice-hostile-guest")), &format!("usr/bin/{HOSTILE}"))?;
        add(&mut image)?;
        let started = Instant::now();
        let environment: Vec<_> = environment.iter().copied().chain(way.environment()).collect();
        let host = Host::start_with(&binaries, series, options, &environment)?;
        let machine = way.machine(machine, host.socket());
        let guest = Guest::boot(&machine, &kernel, &image)
            .with_context(|| format!("log of the host's side:\n{}", process::tail(&host.printed(), 30)))?;
        println!("booted {} in {:?} ({})", kernel.version, started.elapsed(), guest.accelerator().name());
        ensure!(guest.hello()?.render_node, "no render node:\n{}", process::tail(&guest.console(), 30));
        Ok(Self { guest, host, binaries, programs, kernel, started })
    }

    /// Makes one check; its name is part of every error.
    pub(super) fn part(&self, name: &str, check: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let started = Instant::now();
        check(self).with_context(|| {
            format!("{name}; log of the host's side:\n{}", process::tail(&self.host.printed(), 30))
        })?;
        println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
        Ok(())
    }

    pub(super) fn native(&self, name: &str, arguments: &[&str]) -> Result<process::Finished> {
        run_native(&self.binaries, &self.program(name)?, arguments, TIMEOUT)
    }

    pub(super) fn program(&self, name: &str) -> Result<PathBuf> {
        let program = self.programs.iter().find(|program| program.name == name);
        Ok(program.with_context(|| format!("no program {name}"))?.path.clone())
    }

    pub(super) fn spawn(&self, words: &[&str]) -> Result<GuestProcess<'_>> {
        self.guest.start(&GuestCommand::program(words).limit(TIMEOUT))
    }

    pub(super) fn run(&self, words: &[&str]) -> Result<Completed> {
        self.spawn(words)?.wait()
    }

    /// Checks that a new program works.
    pub(super) fn works(&self) -> Result<()> {
        passed(&self.run(&["vector_add"])?)
    }

    pub(super) fn processes(&self, name: &str) -> Result<Vec<u32>> {
        sluice_tests::direct::descendants(self.host.process(), name)
    }

    pub(super) fn device(&self) -> Result<u32> {
        self.only("sluice-device")
    }

    /// The process of a name of which one lives: one that the launcher makes ahead has the launcher's name for a moment.
    fn only(&self, name: &str) -> Result<u32> {
        self.exactly(1, name).map(|processes| processes[0])
    }

    /// Waits until exactly `count` workers live; returns them.
    pub(super) fn workers(&self, count: usize) -> Result<Vec<u32>> {
        self.exactly(count, "sluice-worker")
    }

    /// Waits until exactly `count` processes of a name live; returns them.
    fn exactly(&self, count: usize, name: &str) -> Result<Vec<u32>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let processes = self.processes(name)?;
            if processes.len() == count {
                return Ok(processes);
            }
            ensure!(Instant::now() < deadline, "{} of {name} live, {count} expected", processes.len());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Descriptors of the host's processes, then mappings of the device, once the launcher has made a process for the next device and
    /// one for the next worker. At least one worker must have been started.
    pub(super) fn holdings(&self) -> Result<Vec<usize>> {
        self.exactly(made_ahead(self.device()?, 2)?, MADE_AHEAD)?;
        let mut counts = vec![descriptors(self.host.process())?];
        for name in ["sluiced", "sluice-launcher", "sluice-device"] {
            counts.push(descriptors(self.only(name)?)?);
        }
        counts.push(mappings(self.device()?)?);
        Ok(counts)
    }

    /// Waits until no worker lives and no process holds more than before. Device and daemon close a worker's descriptors a
    /// moment after it is gone. A thread's arena or a cache may come once, hence a few mappings more.
    pub(super) fn holds_no_more_than(&self, before: &[usize]) -> Result<()> {
        self.workers(0)?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let after = self.holdings()?;
            let last = after.len() - 1;
            let grown = |at: usize| after[at] > before[at] + if at == last { 8 } else { 0 };
            if !(0..after.len()).any(grown) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "descriptors and mappings grew from {before:?} to {after:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks that a program prints the same here as natively.
    pub(super) fn same_as_natively(&self, name: &str, arguments: &[&str]) -> Result<()> {
        let native = self.native(name, arguments)?;
        let words: Vec<&str> = [name].into_iter().chain(arguments.iter().copied()).collect();
        let remoted = self.run(&words)?;
        println!("  {name}: native {:?}, in the VM {:?}", native.elapsed, remoted.elapsed);
        ensure!(
            native.stdout == remoted.stdout && native.status.code() == remoted.code,
            "{name}: natively {}, in the VM code {:?}, signal {:?}; {}\n{}",
            native.status,
            remoted.code,
            remoted.signal,
            first_lines_that_differ(&native.stdout, &remoted.stdout),
            process::tail(&remoted.stderr, 20)
        );
        passed(&remoted).with_context(|| name.to_owned())
    }

    pub(super) fn power_off(self) -> Result<()> {
        self.guest.power_off()?;
        self.host.stop().context("ending the host's side")?;
        println!("all: {:.1} s", self.started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// The first lines that differ.
fn first_lines_that_differ(native: &str, remoted: &str) -> String {
    let (mut native, mut remoted) = (native.lines(), remoted.lines());
    for line in 1.. {
        match (native.next(), remoted.next()) {
            (None, None) => break,
            (one, other) if one == other => {}
            (one, other) => {
                let shown = |text: Option<&str>| text.unwrap_or("(no more)").to_owned();
                return format!("line {line}:\nnatively  {}\nin the VM {}", shown(one), shown(other));
            }
        }
    }
    "the same lines".to_owned()
}

pub(super) fn passed(completed: &Completed) -> Result<()> {
    let Completed { code, signal, stdout, stderr, .. } = completed;
    ensure!(
        completed.success() && stdout.ends_with("PASS\n"),
        "code {code:?}, signal {signal:?}\n{stdout}\n{stderr}"
    );
    Ok(())
}

/// The QEMU whose generic device passes all features on; notes the skipped cells if there is none.
pub(super) fn newer(mode: Mode, series: Series) -> Result<Option<Way>> {
    match Way::newer(mode) {
        Ok(way) => Ok(Some(way)),
        Err(error) => {
            sluice_skip::skip(&format!("no QEMU that passes every feature on: {error:#}"));
            Way::no_newer(mode, series)?;
            Ok(None)
        }
    }
}

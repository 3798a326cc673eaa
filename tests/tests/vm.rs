//! The whole path in virtual machines: stock QEMU, stock kernels, the shim as an ordinary user's library, device and
//! workers with their filters on, the software GPU.
//!
//! Booting is what costs here, so a test does all that can be seen in one machine. Times are printed, never judged: the
//! guest's processor is emulated and the host may be busy.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::json;
use sluice_tests::clients;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::direct::{descriptors, mappings};
use sluice_tests::host::{Host, run_native};
use sluice_tests::huge_pages::HugePages;
use sluice_tests::image::Image;
use sluice_tests::packages;
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{self, signal};
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::{Completed, Guest, GuestCommand, GuestProcess, Machine};
use sluice_tests::way::{Mode, Way};

/// For anything that takes seconds at most on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);
const HOSTILE: &str = "sluice-hostile-guest";

/// A machine with a Sluice GPU, and the host's side of it.
struct Stage {
    // Before the host's side, because it goes first.
    guest: Guest,
    host: Host,
    binaries: Binaries,
    programs: Vec<Program>,
    kernel: Kernel,
    started: Instant,
}

impl Stage {
    fn boot(name: &str, series: Series, cpus: u32) -> Result<Self> {
        Self::boot_machine(Machine { cpus, memory_mib: 4096, ..Machine::new(name) }, series)
    }

    fn boot_machine(machine: Machine, series: Series) -> Result<Self> {
        Self::boot_with(machine, series, (&[], &[]), |_| Ok(()))
    }

    /// With options and variables of the host's side, and with what is not in every image.
    fn boot_with(
        machine: Machine,
        series: Series,
        host: (&[&str], &[(&str, &str)]),
        add: impl FnOnce(&mut Image) -> Result<()>,
    ) -> Result<Self> {
        Self::boot_way(&Way::stock(Mode::Legacy), machine, series, host, add)
    }

    /// On whichever way.
    fn boot_way(
        way: &Way,
        machine: Machine,
        series: Series,
        host: (&[&str], &[(&str, &str)]),
        add: impl FnOnce(&mut Image) -> Result<()>,
    ) -> Result<Self> {
        Self::boot_kernel(way, machine, Kernel::fetch(series)?, host, add)
    }

    /// With whichever modules.
    fn boot_kernel(
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
            .with_context(|| format!("the host's side said:\n{}", process::tail(&host.printed(), 30)))?;
        println!("booted {} in {:?} ({})", kernel.version, started.elapsed(), guest.accelerator().name());
        ensure!(guest.hello()?.render_node, "no render node:\n{}", process::tail(&guest.console(), 30));
        Ok(Self { guest, host, binaries, programs, kernel, started })
    }

    /// One thing to see; its name is part of every error.
    fn part(&self, name: &str, check: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let started = Instant::now();
        check(self).with_context(|| {
            format!("{name}; the host's side said:\n{}", process::tail(&self.host.printed(), 30))
        })?;
        println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
        Ok(())
    }

    fn native(&self, name: &str, arguments: &[&str]) -> Result<process::Finished> {
        run_native(&self.binaries, &self.program(name)?, arguments, PATIENCE)
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        let program = self.programs.iter().find(|program| program.name == name);
        Ok(program.with_context(|| format!("no program {name}"))?.path.clone())
    }

    fn spawn(&self, words: &[&str]) -> Result<GuestProcess<'_>> {
        self.guest.start(&GuestCommand::program(words).limit(PATIENCE))
    }

    fn run(&self, words: &[&str]) -> Result<Completed> {
        self.spawn(words)?.wait()
    }

    /// The next program, whatever happened before.
    fn works(&self) -> Result<()> {
        passed(&self.run(&["vector_add"])?)
    }

    fn processes(&self, name: &str) -> Result<Vec<u32>> {
        sluice_tests::direct::descendants(self.host.process(), name)
    }

    fn device(&self) -> Result<u32> {
        match self.processes("sluice-device")?.as_slice() {
            [device] => Ok(*device),
            other => bail!("{} device processes", other.len()),
        }
    }

    /// Waits until exactly `count` workers live; returns them.
    fn workers(&self, count: usize) -> Result<Vec<u32>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let workers = self.processes("sluice-worker")?;
            if workers.len() == count {
                return Ok(workers);
            }
            ensure!(Instant::now() < deadline, "{} workers live, {count} expected", workers.len());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What the host's side holds: descriptors of its processes, then mappings of the device.
    fn holdings(&self) -> Result<Vec<usize>> {
        let mut counts = vec![descriptors(self.host.process())?];
        for name in ["sluiced", "sluice-launcher", "sluice-device"] {
            for process in self.processes(name)? {
                counts.push(descriptors(process)?);
            }
        }
        counts.push(mappings(self.device()?)?);
        Ok(counts)
    }

    /// Waits until no worker lives and nobody holds more than before. Device and daemon close what belonged to a worker a
    /// moment after it is gone. A thread's arena or a cache may come once, hence a few mappings more.
    fn holds_no_more_than(&self, before: &[usize]) -> Result<()> {
        self.workers(0)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let after = self.holdings()?;
            let last = after.len() - 1;
            let grown = |at: usize| after[at] > before[at] + if at == last { 8 } else { 0 };
            if after.len() == before.len() && !(0..after.len()).any(grown) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "descriptors and mappings grew from {before:?} to {after:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A program with that signature natively prints the same here.
    fn same_as_natively(&self, name: &str, arguments: &[&str]) -> Result<()> {
        let native = self.native(name, arguments)?;
        let words: Vec<&str> = [name].into_iter().chain(arguments.iter().copied()).collect();
        let remoted = self.run(&words)?;
        println!("  {name}: native {:?}, in the VM {:?}", native.elapsed, remoted.elapsed);
        ensure!(
            native.stdout == remoted.stdout && native.status.code() == remoted.code,
            "{name}: natively {}\n{}\nin the VM code {:?}, signal {:?}\n{}\n{}",
            native.status,
            native.stdout,
            remoted.code,
            remoted.signal,
            remoted.stdout,
            remoted.stderr
        );
        passed(&remoted).with_context(|| name.to_owned())
    }

    fn power_off(self) -> Result<()> {
        self.guest.power_off()?;
        self.host.stop().context("ending the host's side")?;
        println!("all: {:.1} s", self.started.elapsed().as_secs_f64());
        Ok(())
    }
}

fn passed(completed: &Completed) -> Result<()> {
    let Completed { code, signal, stdout, stderr, .. } = completed;
    ensure!(
        completed.success() && stdout.ends_with("PASS\n"),
        "code {code:?}, signal {signal:?}\n{stdout}\n{stderr}"
    );
    Ok(())
}

/// Takes half of a minute and says nothing of the way on which it is done.
const LONG: &str = "lifetimes";

fn programs_print_the_same(way: &Way, series: Series, cpus: u32, all: bool) -> Result<()> {
    let name = format!("programs-{}-{series}", way.mode);
    // One of the programs pins 2.2 GiB in all, and what was pinned once stays shared.
    let machine = Machine { cpus, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, series, (&[], &[]), |_| Ok(()))?;
    ensure!(stage.guest.run("nproc")?.stdout.trim() == cpus.to_string());
    stage.part("the mode, and no other", |stage| the_mode(stage, way.mode))?;
    for program in stage.programs.iter().filter(|program| all || program.name != LONG) {
        stage.part(&program.name, |stage| stage.same_as_natively(&program.name, &[]))?;
    }
    stage.workers(0)?;
    way.ran(&stage.kernel)?;
    stage.power_off()
}

/// The library uses a mode if it is told to and the device can, and says so if the device cannot.
fn the_mode(stage: &Stage, mode: Mode) -> Result<()> {
    for wanted in Mode::ALL {
        let command = GuestCommand::program(&["vector_add"]).limit(PATIENCE);
        let ended = stage.guest.start(&command.env("SLUICE_TRANSPORT", wanted.name()))?.wait()?;
        if mode.serves(wanted) {
            passed(&ended).with_context(|| format!("forced to {wanted}"))?;
        } else {
            let said = format!(
                "SLUICE_TRANSPORT={wanted} is not possible: the virtual machine's device has no more than {mode}"
            );
            // cudaErrorNoDevice.
            ensure!(
                ended.code == Some(1) && ended.stdout.contains(": 100 "),
                "forced to {wanted}: {ended:?}"
            );
            ensure!(ended.stderr.contains(&said), "forced to {wanted}: {ended:?}");
        }
    }
    Ok(())
}

/// The QEMU whose generic device passes everything on; says which cells are not run where there is none.
fn newer(mode: Mode, series: Series) -> Result<Option<Way>> {
    match Way::newer(mode) {
        Ok(way) => Ok(Some(way)),
        Err(error) => {
            sluice_skip::skip(&format!("no QEMU that passes every feature on: {error:#}"));
            Way::no_newer(mode, series)?;
            Ok(None)
        }
    }
}

// Promise: C1, C13
#[test]
fn programs_print_the_same_natively_and_on_kernel_6_1() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Legacy), Series::V6_1, 1, true)
}

// Promise: C1, G10
#[test]
fn programs_print_the_same_natively_and_on_kernel_6_12_with_two_processors() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Legacy), Series::V6_12, 2, true)
}

// Promise: C1, V16, V17
#[test]
fn programs_print_the_same_without_contexts() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Flat), Series::V6_12, 2, false)
}

fn programs_print_the_same_on_newer(mode: Mode, series: Series) -> Result<()> {
    match newer(mode, series)? {
        Some(way) => programs_print_the_same(&way, series, 2, true),
        None => Ok(()),
    }
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_with_blobs_and_contexts_on_kernel_6_1() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Full, Series::V6_1)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_with_blobs_and_contexts_on_kernel_6_12() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Full, Series::V6_12)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_newer_qemu_that_is_offered_less() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Legacy, Series::V6_12)?;
    programs_print_the_same_on_newer(Mode::Flat, Series::V6_1)
}

/// On a kernel that not every run of the tests boots.
fn programs_print_the_same_on(series: Series) -> Result<()> {
    let way = Way::stock(Mode::Legacy);
    if let Err(error) = Kernel::fetch(series) {
        sluice_skip::skip(&format!("{error:#}"));
        return way.not_run(series, "no such kernel could be had");
    }
    programs_print_the_same(&way, series, 2, false)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_debian_11() -> Result<()> {
    programs_print_the_same_on(Series::V5_10)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_ubuntu_22_04() -> Result<()> {
    programs_print_the_same_on(Series::V5_15)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_ubuntu_24_04() -> Result<()> {
    programs_print_the_same_on(Series::V6_8)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_newest_kernel() -> Result<()> {
    programs_print_the_same_on(Series::V7)
}

// Promise: V16, V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_without_contexts_on_kernel_6_1() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Flat), Series::V6_1, 1, true)
}

// Promise: V15
#[test]
fn a_guest_on_huge_pages_computes() -> Result<()> {
    let memory_mib = 512;
    let _pages = match HugePages::take(memory_mib.into())? {
        Ok(pages) => pages,
        Err(reason) => {
            sluice_skip::skip(&reason);
            return Ok(());
        }
    };
    let machine = Machine { memory_mib, huge_pages: true, ..Machine::new("huge-pages") };
    let stage = Stage::boot_machine(machine, Series::V6_12)?;
    for name in ["vector_add", "matmul_tiled", "reduction", "histogram", "errors"] {
        stage.part(name, |stage| stage.same_as_natively(name, &[]))?;
    }
    stage.part("pinned memory is copied, not reached", |stage| {
        stage.same_as_natively("streams", &[])?;
        let Completed { stdout, stderr, .. } = stage.run(&["zero_copy"])?;
        ensure!(
            stdout.contains("zero-copy is masked: yes") && stdout.ends_with("PASS\n"),
            "{stdout}\n{stderr}"
        );
        Ok(())
    })?;
    stage.workers(0)?;
    stage.power_off()
}

/// Unmodified monitors on a stock kernel, as an ordinary user's programs, beside another process that uses the GPU. The machine
/// has two of them.
// Promise: G10, G11, Q62
#[test]
fn monitors_show_the_quota_and_the_processes_of_the_vm() -> Result<()> {
    const QUOTA_MIB: u64 = 192;
    const GPUS: usize = 2;
    let python = clients::guest_monitors()?;
    let units = programs::hostile("units")?;
    let script = fs::read(paths::workspace().join("tests/clients/monitors.py"))?;
    let machine = Machine { cpus: 2, ..Machine::new("monitors") };
    let (quota, gpus) = (format!("{QUOTA_MIB}MiB"), GPUS.to_string());
    let host: (&[&str], &[(&str, &str)]) = (&["--memory", &quota], &[("SLUICE_SOFTGPU_DEVICES", &gpus)]);
    let stage = Stage::boot_with(machine, Series::V6_12, host, |image| {
        image.python(&python)?;
        image.file("usr/local/lib/monitors.py", 0o644, script);
        image.program(&units, "usr/local/bin/units")
    })?;
    let bytes = (QUOTA_MIB << 20).to_string();
    stage.part("two thirds of the quota of each", |stage| {
        // The driver's share takes of the rest.
        let taken = [(QUOTA_MIB << 21) / 3; GPUS].map(|bytes| bytes.to_string()).join(" ");
        let held = stage.guest.run(&format!("echo | units {bytes} {taken}"))?;
        ensure!(held.stdout == "holding\nas it should be\nPASS\n", "{held:?}");
        Ok(())
    })?;
    let neighbour = stage.spawn(&["hold", "1000"])?;
    neighbour.wait_for_output("holding", PATIENCE)?;
    stage.part("monitors beside another process", |stage| {
        let neighbour = neighbour.id().to_string();
        let monitored = stage.run(&["python3", "/usr/local/lib/monitors.py", &bytes, &neighbour])?;
        println!("{}", monitored.stdout);
        ensure!(monitored.stdout.starts_with(&format!("{GPUS} device(s)")), "{monitored:?}");
        passed(&monitored)
    })?;
    neighbour.signal(Signal::KILL)?;
    neighbour.wait()?;
    stage.workers(0)?;
    stage.power_off()
}

// Promise: C4, F1, F2, F3, G3
#[test]
fn what_fails_in_a_vm_fails_alone_and_leaves_nothing_behind() -> Result<()> {
    what_fails_fails_alone(&Way::stock(Mode::Legacy))
}

// Promise: V16, V17
#[test]
#[ignore = "for the full tier"]
fn what_fails_without_contexts_fails_alone_and_leaves_nothing_behind() -> Result<()> {
    what_fails_fails_alone(&Way::stock(Mode::Flat))
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn what_fails_with_blobs_and_contexts_fails_alone_and_leaves_nothing_behind() -> Result<()> {
    newer(Mode::Full, Series::V6_12)?.map_or(Ok(()), |way| what_fails_fails_alone(&way))
}

fn what_fails_fails_alone(way: &Way) -> Result<()> {
    let name = format!("failures-{}", way.mode);
    let machine = Machine { cpus: 2, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, Series::V6_12, (&[], &[]), |_| Ok(()))?;
    stage.part("a user outside of group render has no device", a_stranger_has_no_device)?;
    stage.part("a fault stays in its process", a_fault_stays_in_its_process)?;
    stage.part("a killed program takes its worker with it", |stage| a_killed_program(stage, &[]))?;
    stage.part("so does one with a sleeping child", |stage| a_killed_program(stage, &["fork"]))?;
    stage.part("a killed worker is an error at once", a_killed_worker)?;
    stage.part("two processes at once", |stage| at_once(stage, 2))?;
    stage.part("eight processes at once", |stage| at_once(stage, 8))?;
    stage.part("twenty starts leave nothing behind", twenty_starts)?;
    stage.power_off()
}

fn a_stranger_has_no_device(stage: &Stage) -> Result<()> {
    let command = GuestCommand::program(&["vector_add"]).user("other").limit(PATIENCE);
    let refused = stage.guest.start(&command)?.wait()?;
    // cudaErrorNoDevice, and a word on standard error about why.
    ensure!(
        refused.code == Some(1)
            && refused.stdout.contains(": 100 cudaErrorNoDevice")
            && refused.stderr.contains("renderD128"),
        "{refused:?}"
    );
    stage.workers(0).map(drop)
}

fn a_fault_stays_in_its_process(stage: &Stage) -> Result<()> {
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", PATIENCE)?;
    // What is refused at once, then a child with the wild write.
    stage.same_as_natively("errors", &[])?;
    let faulty = stage.run(&["errors", "fault"])?;
    ensure!(
        faulty.success() && faulty.stdout.contains("synchronise again                  700"),
        "{faulty:?}"
    );
    stage.works()?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?)
}

fn a_killed_program(stage: &Stage, arguments: &[&str]) -> Result<()> {
    let before = stage.holdings()?;
    let words: Vec<&str> = ["hold", "1000"].into_iter().chain(arguments.iter().copied()).collect();
    let doomed = stage.spawn(&words)?;
    doomed.wait_for_output("holding", PATIENCE)?;
    stage.workers(1)?;
    let killed = Instant::now();
    doomed.signal(Signal::KILL)?;
    stage.holds_no_more_than(&before)?;
    println!("  worker gone {:?} after the program was killed (target 1 s)", killed.elapsed());
    if arguments.is_empty() {
        ensure!(doomed.wait()?.signal == Some(9));
    } else {
        // The child has the pipes, so that the agent sees no end before it is gone.
        let left = stage.guest.run("pidof hold")?.expect_success().context("the child sleeps on")?;
        stage.works()?;
        stage.guest.run(&format!("kill -9 {}", left.stdout.trim()))?.expect_success()?;
        doomed.wait()?;
    }
    stage.works()
}

fn a_killed_worker(stage: &Stage) -> Result<()> {
    let bereft = stage.spawn(&["bereft", "killed"])?;
    bereft.wait_for_output("waiting", PATIENCE)?;
    let killed = Instant::now();
    signal(stage.workers(1)?[0], Signal::KILL)?;
    let told = bereft.wait()?;
    println!("  told {:?} after the worker was killed", killed.elapsed());
    passed(&told)?;
    stage.works()
}

fn at_once(stage: &Stage, count: u32) -> Result<()> {
    let seeds: Vec<String> = (1..=count).map(|seed| seed.to_string()).collect();
    let running: Vec<_> =
        seeds.iter().map(|seed| stage.spawn(&["vector_add", "20000", seed])).collect::<Result<_>>()?;
    for (process, seed) in running.into_iter().zip(&seeds) {
        let remoted = process.wait()?;
        passed(&remoted).with_context(|| format!("process {seed}"))?;
        let native = stage.native("vector_add", &["20000", seed])?;
        ensure!(remoted.stdout == native.stdout, "{}\n{}", remoted.stdout, native.stdout);
    }
    Ok(())
}

fn twenty_starts(stage: &Stage) -> Result<()> {
    stage.workers(0)?;
    let before = stage.holdings()?;
    let script = "i=0; while [ $i -lt 20 ]; do vector_add 1000 $i > /tmp/out || exit 1; i=$((i + 1)); done";
    stage.guest.run(script)?.expect_success()?;
    stage.holds_no_more_than(&before)
}

// Promise: V13
#[test]
fn a_guest_that_reboots_starts_clean() -> Result<()> {
    let stage = Stage::boot("reboot", Series::V6_12, 2)?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    for how in ["reboot", "reset"] {
        stage.part(how, |stage| {
            let device = stage.device()?;
            let lost = [stage.spawn(&["hold", "1000"])?, stage.spawn(&["neighbour", "forever"])?];
            lost[0].wait_for_output("holding", PATIENCE)?;
            lost[1].wait_for_output("computing", PATIENCE)?;
            let workers = stage.workers(2)?;
            if how == "reboot" {
                stage.guest.reboot()?
            } else {
                stage.guest.reset()?
            }
            ensure!(stage.guest.hello()?.render_node, "no render node after {how}");
            let alive =
                workers.iter().filter(|worker| Path::new(&format!("/proc/{worker}")).exists()).count();
            println!("  {alive} of the workers of before live when the guest is back");
            stage.holds_no_more_than(&before)?;
            ensure!(stage.device()? == device, "the device is another process");
            stage.works()
        })?;
    }
    stage.power_off()
}

/// Another kernel takes over with no word to the device but that of its driver.
// Promise: V13
#[test]
#[ignore = "for the full tier"]
fn a_guest_that_starts_another_kernel_starts_clean() -> Result<()> {
    let binaries = Binaries::locate()?;
    let next = Kernel::fetch(Series::V6_12)?;
    let programs: Vec<Program> =
        programs::compile_all()?.into_iter().filter(|program| program.name == "vector_add").collect();
    let initramfs = tempfile::NamedTempFile::new()?;
    Image::with_sluice(&next, &binaries, &programs)?.write(initramfs.path())?;
    let (vmlinuz, initrd) = (fs::read(&next.image)?, fs::read(initramfs.path())?);
    let machine = Machine { cpus: 2, memory_mib: 2048, ..Machine::new("another-kernel") };
    // The older first: it is content with fewer machines.
    let stage = Stage::boot_with(machine, Series::V6_1, (&[], &[]), |image| {
        image.file("boot/vmlinuz", 0o644, vmlinuz);
        image.file("boot/initrd", 0o644, initrd);
        Ok(())
    })?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    let lost = [stage.spawn(&["hold", "1000"])?, stage.spawn(&["neighbour", "forever"])?];
    lost[0].wait_for_output("holding", PATIENCE)?;
    lost[1].wait_for_output("computing", PATIENCE)?;
    stage.workers(2)?;
    stage.part("another kernel", |stage| {
        let device = stage.device()?;
        stage.guest.into_another_kernel()?;
        let hello = stage.guest.hello()?;
        ensure!(hello.kernel == next.version && hello.render_node, "{hello:?}");
        stage.holds_no_more_than(&before)?;
        ensure!(stage.device()? == device, "the device is another process");
        stage.works()
    })?;
    stage.power_off()
}

/// The driver of stock kernels does not get over a suspension; what the package has systemd run around one sees to that.
// Promise: V19
#[test]
#[ignore = "for the full tier"]
fn a_guest_that_was_suspended_computes_again() -> Result<()> {
    for series in [Series::V6_1, Series::V6_12] {
        let tool = Binaries::locate()?.get("sluice-guest")?;
        let hook = paths::workspace().join(packages::SLEEP_HOOK);
        let machine = Machine { cpus: 1, memory_mib: 2048, ..Machine::new("suspend") };
        let stage = Stage::boot_with(machine, series, (&[], &[]), |image| {
            image.program(&tool, "usr/bin/sluice-guest")?;
            image.file("usr/lib/systemd/system-sleep/sluice-guest", 0o755, fs::read(hook)?);
            Ok(())
        })?;
        stage.works()?;
        let device = stage.device()?;
        let lost = stage.spawn(&["neighbour", "forever"])?;
        lost.wait_for_output("computing", PATIENCE)?;
        // One that sleeps until its kernel ends, which it never does.
        let waiting = stage.spawn(&["bereft", "killed"])?;
        waiting.wait_for_output("waiting", PATIENCE)?;
        // As systemd-sleep does it. The kernel stops all devices and has them go on after five seconds, as it can be asked to
        // for tests: nobody has to press a key.
        let hook = |moment: &str| {
            let script =
                format!("PATH=$PATH:/usr/bin /usr/lib/systemd/system-sleep/sluice-guest {moment} suspend");
            stage.guest.run_as_root(&script)?.expect_success().map(drop)
        };
        hook("pre")?;
        stage.workers(0)?;
        let suspend = "echo devices > /sys/power/pm_test && echo mem > /sys/power/state";
        stage.guest.run_as_root(suspend)?.expect_success()?;
        hook("post")?;
        stage.guest.run_as_root("chmod 666 /dev/dri/renderD*")?.expect_success()?;
        let told = lost.wait()?;
        ensure!(told.code == Some(1) && told.stdout.contains("cudaErrorDevicesUnavailable"), "{told:?}");
        passed(&waiting.wait()?)?;
        stage.works()?;
        stage.workers(0)?;
        ensure!(stage.device()? == device, "the device is another process");
        stage.power_off()?;
    }
    Ok(())
}

/// What a guest gives back is never what it shares, and what it gets again is as good as new.
// Promise: V18
#[test]
#[ignore = "for the full tier"]
fn a_guest_gives_memory_back_and_gets_it_again() -> Result<()> {
    const MEMORY: u64 = 1024;
    let kernel = Kernel::fetch_with(Series::V6_12, &["virtio_balloon"])?;
    let machine = Machine { cpus: 2, balloon: true, ..Machine::new("balloon") };
    let way = Way::stock(Mode::Legacy);
    let stage = Stage::boot_kernel(&way, machine, kernel, (&[], &[]), |_| Ok(()))?;
    let mut monitor = stage.guest.monitor()?;
    let mut resize = |mib: u64| -> Result<()> {
        monitor.ask("balloon", &json!({ "value": mib << 20 }))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let actual = monitor.ask("query-balloon", &json!({}))?["actual"].as_u64();
            if actual == Some(mib << 20) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the guest has {actual:?} bytes, and {mib} MiB were asked for"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", PATIENCE)?;
    for (round, mib) in [MEMORY / 2, MEMORY, MEMORY / 2, MEMORY].into_iter().enumerate() {
        stage.part(&format!("{mib} MiB, round {round}"), |stage| {
            resize(mib)?;
            stage.same_as_natively("vector_add", &["20000", "7"])?;
            stage.same_as_natively("reduction", &[])
        })?;
    }
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour, which has kept its pages")?;
    stage.workers(0)?;
    stage.power_off()
}

/// Memory that a guest is given while programs run is as good as the rest, and moves nothing of what they share.
// Promise: V18
#[test]
#[ignore = "for the full tier"]
fn a_guest_is_given_more_memory() -> Result<()> {
    const MEMORY: u32 = 1024;
    let machine = Machine { cpus: 2, memory_mib: MEMORY, growing: true, ..Machine::new("growing") };
    let stage = Stage::boot_machine(machine, Series::V6_12)?;
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", PATIENCE)?;
    let total = |stage: &Stage| -> Result<u64> {
        let text = stage.guest.run("grep MemTotal /proc/meminfo")?.expect_success()?.stdout;
        let kibibytes = text.split_whitespace().nth(1).context("a number")?.parse::<u64>()?;
        Ok(kibibytes >> 10)
    };
    let before = total(&stage)?;
    let mut monitor = stage.guest.monitor()?;
    let more = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": u64::from(MEMORY) << 20, "share": true,
    });
    monitor.ask("object-add", &more)?;
    monitor.ask("device_add", &json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }))?;
    // Who does not do so by itself takes it into use when told.
    let online = "for block in /sys/devices/system/memory/memory*/state; do
        grep -q online $block || echo online > $block; done; grep -l online /sys/devices/system/memory/memory*/state | wc -l";
    let deadline = Instant::now() + PATIENCE;
    while total(&stage)? < before + u64::from(MEMORY) / 2 {
        ensure!(Instant::now() < deadline, "the guest has {} MiB after {before}", total(&stage)?);
        stage.guest.run_as_root(online)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{before} MiB, then {} MiB", total(&stage)?);
    // Files lie in memory here: what was free before is used up, so that what comes next lies in what came.
    let fill = format!(
        "mkdir /root/full; mount -t tmpfs -o size=90% none /root/full; dd if=/dev/zero of=/root/full/file bs=1048576 count={}",
        before * 3 / 4
    );
    stage.guest.run_as_root(&fill)?.expect_success()?;
    stage.same_as_natively("memory", &[])?;
    stage.same_as_natively("vector_add", &["20000", "7"])?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour, which has kept its pages")?;
    stage.workers(0)?;
    stage.power_off()
}

/// Each program uses the first device that it may open.
// Promise: G31
#[test]
#[ignore = "for the full tier"]
fn a_machine_has_two_devices() -> Result<()> {
    let series = Series::V6_12;
    let binaries = Binaries::locate()?;
    let second = Host::start_with(&binaries, series, &[], &[])?;
    let machine = Machine { cpus: 2, another: Some(second.socket().to_path_buf()), ..Machine::new("two") };
    let stage = Stage::boot_machine(machine, series)?;
    let workers = || sluice_tests::direct::descendants(second.process(), "sluice-worker");
    let nodes = stage.guest.run("ls /dev/dri/renderD*")?.stdout;
    ensure!(nodes == "/dev/dri/renderD128\n/dev/dri/renderD129\n", "{nodes}");
    let mut seen = Vec::new();
    for node in ["renderD128", "renderD129"] {
        let closed = format!("chmod 000 /dev/dri/render*; chmod 660 /dev/dri/{node}");
        stage.guest.run_as_root(&closed)?.expect_success()?;
        let holder = stage.spawn(&["hold", "1000"])?;
        holder.wait_for_output("holding", PATIENCE)?;
        seen.push((stage.processes("sluice-worker")?.len(), workers()?.len()));
        stage.works()?;
        holder.signal(Signal::KILL)?;
        holder.wait()?;
    }
    // Which of the two has which number is the guest kernel's to say.
    seen.sort_unstable();
    ensure!(seen == [(0, 1), (1, 0)], "each device has had one of them: {seen:?}");
    stage.guest.run_as_root("chmod 660 /dev/dri/render*")?.expect_success()?;
    stage.works()?;
    stage.workers(0)?;
    stage.power_off()?;
    second.stop().map(drop)
}

// Promise: V4, V5, V11, V12
#[test]
fn a_hostile_guest_process_disturbs_nobody() -> Result<()> {
    an_attacker_disturbs_nobody(&Way::stock(Mode::Legacy))
}

// Promise: V12, V16
#[test]
#[ignore = "for the full tier"]
fn a_hostile_guest_process_without_contexts_disturbs_nobody() -> Result<()> {
    an_attacker_disturbs_nobody(&Way::stock(Mode::Flat))
}

// Promise: V11
#[test]
#[ignore = "for the full tier"]
fn a_hostile_guest_process_with_blobs_and_contexts_disturbs_nobody() -> Result<()> {
    newer(Mode::Full, Series::V6_12)?.map_or(Ok(()), |way| an_attacker_disturbs_nobody(&way))
}

fn an_attacker_disturbs_nobody(way: &Way) -> Result<()> {
    let name = format!("hostile-{}", way.mode);
    let machine = Machine { cpus: 2, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, Series::V6_12, (&[], &[]), |_| Ok(()))?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    let device = stage.device()?;
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", PATIENCE)?;
    stage.part("two attackers", |stage| {
        let attackers = ["1", "2"].map(|seed| stage.spawn(&[HOSTILE, seed, "10"]));
        stage.same_as_natively("vector_add", &["20000", "5"])?;
        for attacker in attackers {
            let ended = attacker?.wait()?;
            println!("{}", process::tail(&ended.stderr, 8));
            ensure!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
        }
        Ok(())
    })?;
    stage.part("an attacker that is killed", |stage| {
        let attacker = stage.spawn(&[HOSTILE, "3", "1000000"])?;
        std::thread::sleep(Duration::from_secs(3));
        attacker.signal(Signal::KILL)?;
        let ended = attacker.wait()?;
        ensure!(ended.signal == Some(9), "{ended:?}");
        Ok(())
    })?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour")?;
    ensure!(stage.device()? == device, "the device is another process");
    let log = fs::read_to_string(stage.host.folder().join("test.log"))?;
    ensure!(!log.contains("panicked"), "{log}");
    stage.part("nothing is left and a new program passes", |stage| {
        stage.holds_no_more_than(&before)?;
        stage.works()
    })?;
    stage.power_off()
}

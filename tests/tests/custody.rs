//! A worker that lies, beside an honest VM: real `sluiced`, arbiter, devices and drivers, and in the first VM a taken-over worker.
//! In every case the second VM gets all free memory, and neither sees nor loses a byte.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use sluice_kit::wait::until;
use sluice_tests::direct::{TIMEOUT, in_time, private_kibibytes};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, kill, signal, tail};
use sluice_tests::programs;
use sluice_tests::tenants::{Charge, Options, Tenants, Unit};

const MIB: u64 = 1 << 20;
const DEVICE_MIB: u64 = 256;
/// Quota of the liar's VM.
const QUOTA: u64 = 32 * MIB;

/// Time limit for a neighbour beside an attack to start, to take all the memory that it can get, and to end.
const DELAYED: Duration = Duration::from_secs(10);

/// A liar and its neighbour.
struct Stage {
    tenants: Tenants,
    client: Background,
    guard: PathBuf,
    read: PathBuf,
    /// The unit before the attack.
    before: Unit,
}

impl Stage {
    /// Starts all processes; returns when the liar has finished its attack, or was ended for it.
    fn set(attack: &str) -> Result<Self> {
        let stage = Self::begin(attack)?;
        stage.wait_until_over()?;
        Ok(stage)
    }

    /// Waits until the liar has finished its attack, or was ended for it, possibly before it could report.
    fn wait_until_over(&self) -> Result<()> {
        let start = Instant::now();
        while self.said("done").is_none() && !self.is_ended()? {
            ensure!(start.elapsed() < TIMEOUT, "the liar is never done:\n{}", self.report());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// True if the arbiter has ended a worker for breaking the protocol.
    fn is_ended(&self) -> Result<bool> {
        self.has_event("abuse")
    }

    /// True if the arbiter has reported the liar's VM for this kind of event.
    fn has_event(&self, kind: &str) -> Result<bool> {
        Ok(self.tenants.counted(kind, 1)? > 0)
    }

    fn wait_for_event(&self, kind: &str) -> Result<()> {
        let start = Instant::now();
        while !self.has_event(kind)? {
            ensure!(start.elapsed() < TIMEOUT, "no {kind}: {}", self.tenants.look("/v1/host")?);
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn begin(attack: &str) -> Result<Self> {
        Self::begin_with(attack, QUOTA)
    }

    fn begin_with(attack: &str, quota: u64) -> Result<Self> {
        Self::begin_on(attack, Options::with_limits(DEVICE_MIB, &[quota / MIB, 0]))
    }

    fn begin_on(attack: &str, mut options: Options) -> Result<Self> {
        let binaries = Binaries::locate()?;
        options.worker = Some(binaries.get("sluice-hostile-worker")?);
        let tenants = Tenants::start(&binaries, &options)?;
        let (before, _) = tenants.wait_settled()?;
        fs::write(tenants.liar_folder().join("attack"), attack)?;
        let hold = programs::compile_all()?.into_iter().find(|program| program.name == "hold");
        let client = tenants.spawn(1, "client", &hold.context("hold")?.path, &["1000"])?;
        let (guard, read) = (programs::hostile("guard")?, programs::hostile("canary_read")?);
        Ok(Self { tenants, client, guard, read, before })
    }

    fn report(&self) -> String {
        fs::read_to_string(self.tenants.liar_folder().join("report")).unwrap_or_default()
    }

    /// Waits until the liar reports `what`; returns the rest of the line.
    fn wait_for(&self, what: &str) -> Result<String> {
        let start = Instant::now();
        loop {
            if let Some(how) = self.said(what) {
                return Ok(how);
            }
            if start.elapsed() > TIMEOUT {
                bail!(
                    "the liar never reported {what}:\n{}\n{}",
                    self.report(),
                    tail(&self.tenants.printed(), 40)
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn said(&self, what: &str) -> Option<String> {
        let report = self.report();
        report
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n')?.split_once(' '))
            .find(|(said, _)| *said == what)
            .map(|(_, how)| how.to_owned())
    }

    /// The neighbour allocates all it can and checks it for a while; returns the bytes.
    fn guard(&self, name: &str, time: Duration) -> Result<u64> {
        let mut guard = self.tenants.spawn(2, name, &self.guard, &[])?;
        let holding: u64 = guard.wait_for_line("holding", TIMEOUT)?.parse()?;
        std::thread::sleep(time);
        signal(guard.id(), Signal::USR1)?;
        let status = guard.wait(TIMEOUT)?.context("the guard ends")?;
        ensure!(status.success(), "the neighbour saw or lost something:\n{}", guard.printed());
        Ok(holding)
    }

    /// Time in which the neighbour starts, takes all it can get, and ends.
    fn timed_guard(&self, name: &str) -> Result<Duration> {
        let start = Instant::now();
        self.guard(name, Duration::ZERO)?;
        Ok(start.elapsed())
    }

    /// Bytes in custody, and bytes that the VMs are charged for their drivers.
    fn accounted(&self) -> Result<u64> {
        let charged = || Ok(self.tenants.charge(1)?.headroom + self.tenants.charge(2)?.headroom);
        let before: Result<u64> = charged();
        let total = self.tenants.unit()?.context("the arbiter lends")?.total;
        // A charge may begin or end between the answers.
        Ok(total + before?.max(charged()?))
    }

    /// Ends the liar; checks that its VM is charged for nothing, that the unit is whole, and that no other VM finds its data.
    fn clear(mut self) -> Result<()> {
        kill(self.client.id());
        self.client.wait(TIMEOUT)?.context("the client ends")?;
        let took = self.tenants.wait_for_charge(1, |charge| charge.lent == 0 && charge.holders == 0)?;
        println!("nothing is charged {took:?} after the end (target 1 s)");
        let (after, _) = self.tenants.wait_settled()?;
        ensure!(after.is_whole(self.before.total), "before {:?}, after {after:?}", self.before);
        let found = self.tenants.run(2, &self.read, &[])?;
        ensure!(
            found.status.success() && found.stdout.ends_with("\nhits 0\n"),
            "{}{}",
            found.stdout,
            found.stderr
        );
        self.tenants.wait_settled()?;
        self.tenants.stop()
    }
}

/// Attacks for which the arbiter ends the worker.
fn ended_for(attack: &str) -> Result<()> {
    let stage = Stage::set(attack)?;
    println!("{}", stage.report());
    // The worker may see its end before `sluiced` has counted the event.
    stage.wait_for_event("abuse").with_context(|| format!("{attack}:\n{}", stage.report()))?;
    stage.guard("guard", Duration::from_millis(200))?;
    stage.clear()
}

// Promise: T35
#[test]
fn lone_vm_whose_worker_hides_its_time_is_charged_the_time_that_the_driver_measured() -> Result<()> {
    // Before its VM exists: a charge may come late, and is for time of before.
    let started = Instant::now();
    let stage = Stage::begin("hide-time")?;
    stage.wait_for_event("undercharged")?;
    // The event says that a quarter of five seconds was missing, which is charged. How much more depends on the processor time that
    // other work of the machine leaves to the kernels.
    loop {
        let (charged, passed) = (stage.tenants.gpu_seconds(1)?, started.elapsed().as_secs_f64());
        ensure!(charged <= passed, "charged {charged:.2} s of {passed:.2} s");
        if charged >= 1.25 {
            println!("charged {charged:.2} s of {passed:.2} s");
            return Ok(());
        }
        ensure!(started.elapsed() < TIMEOUT, "charged {charged:.2} s of {passed:.2} s only");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// Promise: S61
#[test]
fn memory_kept_after_a_give_reaches_no_other_vm() -> Result<()> {
    let stage = Stage::begin("keep-mapping")?;
    stage.wait_for("given")?;
    // It writes all the time: before, while and after the neighbour takes all memory.
    let holding = stage.guard("guard-beside", Duration::from_secs(2))?;
    println!("the neighbour had {holding} of {:?}", stage.before);
    let found = stage.tenants.run(2, &stage.read, &["linear", "vmm"])?;
    ensure!(found.stdout.ends_with("\nhits 0\n"), "{}", found.stdout);
    stage.clear()
}

// Promise: S61
#[test]
fn memory_given_back_by_a_live_worker_serves_other_vms() -> Result<()> {
    let stage = Stage::set("honest-return")?;
    let holding = stage.guard("guard", Duration::from_millis(500))?;
    ensure!(holding + 16 * MIB > stage.before.clean, "only {holding} of {:?} came back", stage.before);
    stage.clear()
}

// Promise: S61
#[test]
fn memory_of_a_killed_worker_is_clean_for_the_neighbour() -> Result<()> {
    let stage = Stage::begin("hold")?;
    stage.wait_for("holding")?;
    for worker in stage.tenants.workers(1)? {
        kill(worker);
    }
    stage.guard("guard", Duration::from_millis(500))?;
    stage.clear()
}

// Promise: S61
#[test]
fn memory_a_killed_worker_passed_on_reaches_no_other_vm() -> Result<()> {
    const HANDED_ON: u64 = 64 * MIB;
    let stage = Stage::begin_with("pass-on", HANDED_ON)?;
    let stranger: u32 = stage.wait_for("stranger")?.parse()?;
    // With its program, so that no other worker starts.
    kill(stage.client.id());
    for worker in stage.tenants.workers(1)? {
        kill(worker);
    }
    // The arbiter knows that the worker is reaped and gone from the driver; its memory is clean, or counts as missing.
    stage.tenants.wait_for_charge(1, |charge| charge.holders == 0 && charge.dirty == 0)?;
    let mut guard = stage.tenants.spawn(2, "guard", &stage.guard, &[])?;
    let holding: u64 = guard.wait_for_line("holding", TIMEOUT)?.parse()?;
    println!("the neighbour had {holding} of {:?}", stage.before);
    // While the neighbour has all memory, the child also writes through descriptors that it has only held so far.
    fs::write(stage.tenants.liar_folder().join("all"), "")?;
    ensure!(stage.wait_for("everywhere")? == "2", "{}", stage.report());
    signal(guard.id(), Signal::USR1)?;
    let status = guard.wait(TIMEOUT)?.context("the guard ends")?;
    ensure!(status.success(), "the neighbour saw or lost something:\n{}", guard.printed());
    ensure!(holding + HANDED_ON + 16 * MIB > stage.before.clean, "more is held back than was handed on");
    stage.tenants.wait_for_charge(1, |charge| charge.lent == HANDED_ON).context("its VM pays for it")?;
    kill(stranger);
    stage.clear()
}

// Promise: Q61
#[test]
fn custody_page_cannot_be_written() -> Result<()> {
    let stage = Stage::set("write-page")?;
    println!("{}", stage.report());
    for way in ["map-writable", "make-writable", "write", "truncate", "grow", "seal"] {
        let how = stage.said(way).with_context(|| way.to_owned())?;
        ensure!(how != "done", "{way}: {how}");
    }
    // If it cannot be opened anew, there is no further attempt.
    if stage.said("open-writable").is_none() {
        for way in ["open-and-map", "open-and-write"] {
            let how = stage.said(way).with_context(|| way.to_owned())?;
            ensure!(how != "done", "{way}: {how}");
        }
    }
    stage.clear()
}

// Promise: P60
#[test]
fn idle_memory_of_a_program_is_at_hand_for_another() -> Result<()> {
    let tenants = Tenants::start(&Binaries::locate()?, &Options::with_limits(DEVICE_MIB, &[96]))?;
    let ran = tenants.run(1, &programs::hostile("freed")?, &[])?;
    ensure!(ran.status.success(), "{}: {}\n{}", ran.status, ran.stdout, ran.stderr);
    tenants.wait_for_charge(1, |charge| charge.lent == 0)?;
    tenants.stop()
}

// Promise: P61
#[test]
fn warm_worker_has_no_memory_until_a_program_gets_it() -> Result<()> {
    let mut options = Options::with_limits(DEVICE_MIB, &[64]);
    options.arguments = vec!["--warm-workers".to_owned()];
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let waits_for = |count: usize| -> Result<Vec<u32>> {
        let start = Instant::now();
        loop {
            let found = tenants.processes("sluice-worker")?;
            if found.len() == count {
                return Ok(found);
            }
            ensure!(start.elapsed() < TIMEOUT, "{found:?}\n{}", tail(&tenants.printed(), 40));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let warm = waits_for(1)?[0];
    println!("a warm worker has {} KiB of private memory", private_kibibytes(warm)?);
    tenants.wait_for_charge(1, |charge| charge == Charge { epoch: 1, ..Charge::default() })?;

    let mut hold = tenants.spawn(1, "hold", &programs::program("hold")?, &["1000"])?;
    hold.wait_for_line("holding, 0 wrong", TIMEOUT)?;
    ensure!(tenants.workers(1)? == [warm], "{:?}", tenants.workers(1)?);
    waits_for(2)?;
    tenants.fence(1)?;
    waits_for(0)?;
    tenants.readmit(1)?;
    let ran = tenants.run(1, &programs::program("vector_add")?, &[])?;
    ensure!(ran.status.success(), "{}: {}\n{}", ran.status, ran.stdout, ran.stderr);
    waits_for(1)?;
    tenants.stop()
}

// Promise: Q61
#[test]
fn absurd_claims_of_idle_memory_gain_no_quota() -> Result<()> {
    let stage = Stage::set("absurd-idle")?;
    println!("{}", stage.report());
    match stage.said("total") {
        Some(total) => ensure!(total.parse::<u64>()? <= QUOTA, "{total} bytes of {QUOTA}"),
        None => stage.wait_for_event("abuse").with_context(|| format!("no sum:\n{}", stage.report()))?,
    }
    stage.guard("guard", Duration::from_millis(200))?;
    stage.clear()
}

// Promise: Q61
#[test]
fn worker_at_its_quota_is_refused_another_chunk() -> Result<()> {
    let stage = Stage::set("over-limit")?;
    ensure!(stage.said("taken") == Some(QUOTA.to_string()), "{}", stage.report());
    ensure!(stage.said("refused").as_deref() == Some("2"), "{}", stage.report());
    stage.clear()
}

// Promise: Q61
#[test]
fn takes_of_odd_sizes_are_refused() -> Result<()> {
    let stage = Stage::set("odd-sizes")?;
    println!("{}", stage.report());
    ensure!(stage.said("lent").is_none(), "{}", stage.report());
    if stage.said("refused").is_none() && stage.said("ended").is_none() {
        stage.wait_for_event("abuse").with_context(|| format!("no answer:\n{}", stage.report()))?;
    }
    stage.clear()
}

// Promise: Q61
#[test]
fn leases_and_shares_of_other_workers_cannot_be_opened_or_given_back() -> Result<()> {
    let mut stage = Stage::begin("nothing")?;
    // The neighbour has all memory while the liar names every lease and share it can think of.
    let mut guard = stage.tenants.spawn(2, "guard", &stage.guard, &[])?;
    guard.wait_for_line("holding", TIMEOUT)?;
    stage.wait_for("done")?;
    kill(stage.client.id());
    stage.client.wait(TIMEOUT)?;
    fs::write(stage.tenants.liar_folder().join("attack"), "strangers")?;
    fs::remove_file(stage.tenants.liar_folder().join("report")).ok();
    let hold = programs::compile_all()?.into_iter().find(|program| program.name == "hold");
    stage.client = stage.tenants.spawn(1, "client-again", &hold.context("hold")?.path, &["1000"])?;
    stage.wait_until_over()?;
    println!("{}", stage.report());
    match stage.said("opened") {
        Some(opened) => ensure!(opened == "0", "{}", stage.report()),
        None => stage.wait_for_event("abuse").with_context(|| format!("no count:\n{}", stage.report()))?,
    }
    signal(guard.id(), Signal::USR1)?;
    let status = guard.wait(TIMEOUT)?.context("the guard ends")?;
    ensure!(status.success(), "{}", guard.printed());
    stage.clear()
}

// Promise: Q61
#[test]
fn lease_given_back_twice_ends_the_worker() -> Result<()> {
    ended_for("give-twice")
}

// Promise: Q61
#[test]
fn end_of_a_grant_that_was_never_made_ends_the_worker() -> Result<()> {
    ended_for("grown-unasked")
}

// Promise: Q61
#[test]
fn malformed_custody_messages_end_the_worker() -> Result<()> {
    for attack in ["short-message", "long-message", "unknown-message", "descriptor", "empty-message"] {
        ended_for(attack).with_context(|| attack.to_owned())?;
    }
    Ok(())
}

// Promise: F60
#[test]
fn custody_flood_blocks_no_neighbour_and_grows_no_arbiter_memory() -> Result<()> {
    in_time("a neighbour that takes all it can get beside a flood", DELAYED, |_| {
        let stage = Stage::begin("flood")?;
        stage.wait_for("flooding")?;
        let arbiter = stage.tenants.processes("sluice-arbiter")?;
        let memory = || arbiter.iter().map(|arbiter| private_kibibytes(*arbiter)).sum::<Result<u64>>();
        let before = memory()?;
        let took = stage.timed_guard("guard")?;
        stage.wait_until_over()?;
        let after = memory()?;
        println!("{}; arbiter {before} KiB before, {after} KiB after", stage.report());
        ensure!(after < before + (16 << 10), "the arbiter grew from {before} to {after} KiB");
        stage.clear()?;
        Ok(took)
    })
}

// Promise: F60
#[test]
fn unfinished_grant_of_a_worker_blocks_no_other_vm() -> Result<()> {
    in_time("a neighbour that takes all it can get beside a grant that is kept", DELAYED, |_| {
        let stage = Stage::begin("never-grown")?;
        stage.wait_for("grant")?;
        let took = stage.timed_guard("guard")?;
        ensure!(!stage.has_event("abuse")?, "slow growth is no abuse");
        stage.clear()?;
        Ok(took)
    })
}

// Promise: F60
#[test]
fn memory_taken_past_the_arbiter_costs_the_neighbour_nothing() -> Result<()> {
    let stage = Stage::begin("past-arbiter")?;
    let got: u64 = stage.wait_for("got")?.parse()?;
    println!("a worker got {got} bytes of the driver itself");
    stage.wait_for_event("headroom")?;
    // A program that has lost its worker may request another one, which would lie again.
    kill(stage.client.id());
    stage.tenants.wait_for_charge(1, |charge| charge.holders == 0)?;
    stage.tenants.wait_settled()?;
    // All lendable memory can still be lent.
    let holding = stage.guard("guard", Duration::from_millis(500))?;
    println!("the neighbour had {holding} of {:?}", stage.before);
    ensure!(holding + 16 * MIB > stage.before.clean, "only {holding} of {:?} were left", stage.before);
    stage.clear()
}

/// Workers of one VM take what the driver gives them, again and again for ten seconds, while sessions of the neighbour start and
/// end: whatever leaves custody for those, a worker may get first. `booking` is the software GPU's rule for bytes per process.
fn retries_past_the_arbiter(booking: &str, has_figures: bool) -> Result<()> {
    /// Quota of the neighbour, all of which is guaranteed.
    const GUARANTEED: u64 = 128 * MIB;
    /// Bytes that are never in custody, by default.
    const RESERVE: u64 = 32 * MIB;
    /// Growth that needs no request, on a device of this size: of a lying worker, and of two of the neighbour's.
    const MARGINS: u64 = 3 * 2 * MIB;
    const TIME: Duration = Duration::from_secs(10);
    let mut options = Options::with_limits(DEVICE_MIB, &[QUOTA / MIB, GUARANTEED / MIB]);
    options.vms[1].1.share.guaranteed_bytes = Some(GUARANTEED);
    options.environment.push(("SLUICE_SOFTGPU_BOOKING".to_owned(), booking.to_owned()));
    let mut stage = Stage::begin_on("nothing", options)?;
    stage.wait_for("done")?;
    // It has its context, and none of its memory yet.
    let (reader, writer) = std::io::pipe()?;
    let mut command = stage.tenants.command(2, &stage.guard, &[&u64::MAX.to_string(), "wait"]);
    let log = stage.tenants.folder().join("guard.log");
    let mut guard = Background::start_with("guard", &mut command, &log, Stdio::from(reader))?;
    guard.wait_for_line("ready", TIMEOUT)?;
    let before = stage.accounted()?;
    fs::write(stage.tenants.liar_folder().join("attack"), "past-arbiter-again")?;
    let hold = programs::program("hold")?;
    let (mut liars, mut starts) = (0, 0);
    let start = Instant::now();
    let has_begun = |stage: &Stage| stage.report().contains("begun past-arbiter-again");
    // On a busy machine the first liar may need longer than that to begin.
    while start.elapsed() < TIME || !has_begun(&stage) {
        ensure!(start.elapsed() < TIMEOUT, "nothing was taken:\n{}", stage.report());
        if liars == 0 || !stage.client.is_running()? {
            liars += 1;
            kill(stage.client.id());
            stage.client.wait(TIMEOUT)?.context("the client ends")?;
            stage.client = stage.tenants.spawn(1, "client", &hold, &["1000"])?;
        }
        // While the reserve is used up, it may fail.
        starts += u32::from(stage.tenants.run(2, &hold, &["0"])?.status.success());
    }
    // While chunks are on their way from or to the driver, they are in no sum.
    let end = Instant::now() + TIMEOUT;
    let mut fell = before.saturating_sub(stage.accounted()?);
    while fell > RESERVE + MARGINS && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        fell = before.saturating_sub(stage.accounted()?);
    }
    println!(
        "{liars} liars, {starts} sessions beside them; {fell} of {before} bytes were neither in custody nor charged; {}",
        stage.report()
    );
    ensure!(fell <= RESERVE + MARGINS, "{fell} bytes left custody without a charge");
    let figures = || stage.tenants.look("/v1/units/0").map(|unit| unit["figures_per_process"].clone());
    let known = until(figures, |figures| matches!(figures, Ok(figures) if *figures == has_figures))?;
    ensure!(known == has_figures, "figures per process: {known}");
    if has_figures {
        stage.wait_for_event("headroom")?;
    } else {
        ensure!(!stage.has_event("headroom")?, "a worker is ended without figures");
    }
    drop(writer);
    let holding: u64 = guard.wait_for_line("holding", TIMEOUT)?.parse()?;
    println!("the neighbour had {holding} bytes of {GUARANTEED}");
    // The report on it may be late.
    let all = |charge: Charge| charge.lent + charge.headroom + 2 * MIB > GUARANTEED;
    stage.tenants.wait_for_charge(2, all).context("its guaranteed memory is not there for it")?;
    signal(guard.id(), Signal::USR1)?;
    let status = guard.wait(TIMEOUT)?.context("the guard ends")?;
    ensure!(status.success(), "the neighbour saw or lost something:\n{}", guard.printed());
    stage.clear()
}

// Promise: F60
#[test]
fn workers_that_retry_past_the_arbiter_pump_no_memory_out_of_custody() -> Result<()> {
    retries_past_the_arbiter("owner", true)
}

// Promise: F60
#[test]
fn workers_that_retry_past_an_arbiter_without_figures_pump_no_memory_out_of_custody() -> Result<()> {
    retries_past_the_arbiter("nowhere", false)
}

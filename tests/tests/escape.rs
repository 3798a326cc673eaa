//! Known ways out of a quota from other systems, and some more: a VM never gets a byte more than its limit, in any way of asking;
//! it gets the right error, and its neighbour computes on.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Error, Result, ensure};
use rustix::process::Signal;
use sluice_kit::escape::{CHUNK, judge};
use sluice_kit::wait::until;
use sluice_tests::devices::Counted;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::holder::Holder;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs;
use sluice_tests::tenants::{Charge, Options, Tenants};
use softgpu_device::Held;

const MIB: u64 = 1 << 20;
/// Quota of the VM.
const QUOTA: u64 = 64 * MIB;
/// Size of the device, roughly.
const DEVICE_MIB: u64 = 512;

/// Runs one way in one VM, beside a neighbour that computes, and observes the lent memory from outside.
fn escape(way: &str) -> Result<()> {
    escape_with(way, QUOTA, &[])
}

fn escape_with(way: &str, quota: u64, more: &[&str]) -> Result<()> {
    let binaries = Binaries::locate()?;
    let neighbour = programs::compile_all()?.into_iter().find(|program| program.name == "neighbour");
    let (neighbour, program) = (neighbour.context("the neighbour")?.path, programs::hostile("escape")?);
    let options = Options::with_limits(DEVICE_MIB, &[quota / MIB, 32]);
    let tenants = Tenants::start(&binaries, &options)?;
    let mut neighbour = tenants.spawn(2, "neighbour", &neighbour, &["forever"])?;
    neighbour.wait_for_line("computing", TIMEOUT)?;

    let text = quota.to_string();
    let arguments: Vec<&str> = [way, &text].into_iter().chain(more.iter().copied()).collect();
    let mut command = tenants.command(1, &program, &arguments);
    let (most, (printed, status)) = watched(&tenants, quota, false, |looks| {
        Holder::start(&mut command)?.run(|program, line| {
            if line.starts_with("step ") {
                looks.more()?;
                program.answer()?;
            }
            Ok(())
        })
    })?;
    println!("{way}: {most:?} of {quota} bytes\n{printed}");
    ensure!(status.success() && printed.ends_with("PASS\n"), "{status}");
    judge(way, quota, most.driver, &printed).map_err(Error::msg)?;

    signal(neighbour.id(), Signal::USR1)?;
    neighbour.wait_for_line("0 wrong", TIMEOUT)?;
    let status = neighbour.wait(TIMEOUT)?.context("the neighbour ends")?;
    ensure!(status.success(), "{}", neighbour.printed());
    let (_, took) = tenants.wait_settled()?;
    println!("nothing is lent {took:?} after the end (target 1 s)");
    tenants.stop()
}

// Promise: Q60
#[test]
fn linear_memory_ends_at_the_quota() -> Result<()> {
    escape("linear")
}

// Promise: Q60
#[test]
fn second_copy_of_the_driver_library_has_the_same_quota() -> Result<()> {
    escape("deepbind")
}

// Promise: Q60
#[test]
fn pools_end_at_the_quota() -> Result<()> {
    escape("pools")
}

// Promise: Q60
#[test]
fn memory_of_graphs_ends_at_the_quota() -> Result<()> {
    escape("graphs")
}

// Promise: Q60
#[test]
fn memory_released_but_mapped_is_still_charged() -> Result<()> {
    escape("vmm")
}

// Promise: C85, Q60
#[test]
fn arrays_and_mipmaps_stay_within_the_quota() -> Result<()> {
    escape("arrays")
}

// Promise: C124, Q60
#[test]
fn managed_memory_ends_at_the_quota() -> Result<()> {
    escape("managed")
}

// Promise: Q60
#[test]
fn memory_open_in_two_processes_is_charged_once_and_until_the_last() -> Result<()> {
    escape("ipc")
}

// Promise: Q60
#[test]
fn limits_and_contexts_stay_within_the_quota() -> Result<()> {
    escape("limits")
}

// Promise: Q60
#[test]
fn modules_with_huge_variables_stay_within_the_quota() -> Result<()> {
    escape("modules")
}

// Promise: Q60
#[test]
fn local_memory_beyond_the_limit_is_refused_and_the_stream_goes_on() -> Result<()> {
    escape("local")
}

// Promise: Q60
#[test]
fn allocations_of_one_byte_are_charged_their_real_size() -> Result<()> {
    escape_with("tiny", 8 * MIB, &["60000"])
}

// Promise: Q60
#[test]
#[ignore = "for the full tier"]
fn million_allocations_of_one_byte_are_charged_their_real_size() -> Result<()> {
    escape_with("tiny", 32 * MIB, &["1000000"])
}

// Promise: Q60
#[test]
fn frees_of_invalid_addresses_change_no_charge() -> Result<()> {
    escape("frees")
}

// Promise: Q60
#[test]
fn sixteen_threads_at_once_stay_within_the_quota() -> Result<()> {
    escape("threads")
}

// Promise: Q60
#[test]
fn eight_processes_at_once_stay_within_the_quota() -> Result<()> {
    escape("processes")
}

/// Bytes of the neighbour's quota beside a VM that uses every kind of memory.
const NEIGHBOUR: u64 = 128 * MIB;
/// Time for which its processes allocate and free, in seconds.
const CHURN: &str = "2";
/// Number of looks for each state of a program: the answer to one of them may be of before.
const LOOKS: u32 = 10;

/// The maxima of a VM's memory, by the arbiter's figures and by the device's own count.
#[derive(Debug, Default)]
struct Most {
    charged: u64,
    driver: u64,
    held: u64,
}

/// The number of looks at a VM.
#[derive(Default)]
struct Looks {
    count: AtomicU32,
    /// True if there will be no more.
    over: AtomicBool,
}

impl Looks {
    /// Waits for some more.
    fn more(&self) -> Result<()> {
        let wanted = self.count.load(Ordering::Relaxed) + LOOKS;
        let enough = || self.over.load(Ordering::Relaxed) || self.count.load(Ordering::Relaxed) >= wanted;
        ensure!(until(enough, |enough| *enough), "no look at the VM succeeds");
        Ok(())
    }
}

/// Observes a VM while it does something. `counts` is true if the device's own count is to be compared, too.
fn watched<T>(
    tenants: &Tenants,
    quota: u64,
    counts: bool,
    act: impl FnOnce(&Looks) -> Result<T>,
) -> Result<(Most, T)> {
    let looks = Looks::default();
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let most = watch(tenants, quota, counts, &looks);
            looks.over.store(true, Ordering::Relaxed);
            most
        });
        let acted = act(&looks);
        looks.over.store(true, Ordering::Relaxed);
        let most = watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((most?, acted?))
    })
}

/// Observes a VM until told to stop.
fn watch(tenants: &Tenants, quota: u64, counts: bool, looks: &Looks) -> Result<Most> {
    let files = tenants.device_files();
    let device = counts.then(|| Counted::open(&files, tenants.scale())).transpose()?;
    let mut most = Most::default();
    while !looks.over.load(Ordering::Relaxed) {
        let charge = tenants.charge(1)?;
        let charged = charge.lent + charge.headroom;
        ensure!(charged <= quota, "{charged} bytes are charged, with a quota of {quota}: {charge:?}");
        most.charged = most.charged.max(charged);
        most.driver = most.driver.max(charge.headroom);
        let held = match &device {
            Some(device) => device.held_by(&tenants.workers(1)?),
            None => Some(Held::default()),
        };
        if let Some(held) = held {
            ensure!(
                held.total() <= quota,
                "the device counts {held:?}, with a quota of {quota}; charged are {charge:?}"
            );
            most.held = most.held.max(held.total());
            looks.count.fetch_add(1, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(most)
}

/// Runs a VM with `count` processes that use all kinds of memory at once, until all of its quota is taken. Then a neighbour takes
/// all of its own quota.
fn every_kind(tenants: &Tenants, quota: u64, count: usize) -> Result<()> {
    let (program, guard) = (programs::hostile("every_kind")?, programs::hostile("guard")?);
    let folder = tenants.folder().join(format!("every-kind-{count}"));
    std::fs::create_dir(&folder)?;
    let words = (count.to_string(), folder.to_str().context("UTF-8")?.to_owned());
    let mut all = (0..count)
        .map(|number| {
            let arguments = [&number.to_string(), &words.0, &words.1, CHURN];
            tenants.spawn(1, &format!("kinds-{count}-{number}"), &program, &arguments)
        })
        .collect::<Result<Vec<Background>>>()?;
    for process in &mut all {
        process.wait_for_line("ready", TIMEOUT)?;
    }
    let (most, refused) = watched(tenants, quota, true, |looks| {
        std::fs::write(folder.join("begin"), "")?;
        let mut refused = 0;
        for process in &mut all {
            refused += process.wait_for_line("refused", TIMEOUT)?.parse::<u64>()?;
            let odd = process.wait_for_line("odd", TIMEOUT)?;
            ensure!(odd == "0 0", "a call failed otherwise than for want of memory: {odd}");
            let full = process.wait_for_line("full", TIMEOUT)?;
            ensure!(full == "2", "memory ended with {full}");
        }
        looks.more()?;
        // While this VM has all it can get, another one takes all of its own quota.
        let mut guard = tenants.spawn(2, &format!("guard-{count}"), &guard, &[])?;
        let holding: u64 = guard.wait_for_line("holding", TIMEOUT)?.parse()?;
        let has_all = |charge: Charge| holding + charge.headroom + 2 * CHUNK > NEIGHBOUR;
        tenants.wait_for_charge(2, has_all).with_context(|| format!("it has {holding} of {NEIGHBOUR}"))?;
        for process in &mut all {
            signal(process.id(), Signal::USR1)?;
            let status = process.wait(TIMEOUT)?.context("a process ends")?;
            ensure!(status.success(), "{status}\n{}", process.printed());
        }
        signal(guard.id(), Signal::USR1)?;
        let status = guard.wait(TIMEOUT)?.context("the neighbour ends")?;
        ensure!(status.success(), "{}", guard.printed());
        Ok(refused)
    })?;
    println!("{count} processes: {refused} calls refused, {most:?} of {quota} bytes");
    ensure!(most.charged + 8 * CHUNK > quota, "the quota was never used up: {most:?}");
    // Limits are charged before a driver has taken the memory that they allow, which may be much less.
    ensure!(most.held > quota / 3, "the device's count never came near the quota: {most:?}");
    tenants.wait_settled()?;
    Ok(())
}

fn every_kind_in(quota: u64) -> Result<()> {
    let options = Options::with_limits(DEVICE_MIB, &[quota / MIB, NEIGHBOUR / MIB]);
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    for count in [1, 2, 4, 8] {
        every_kind(&tenants, quota, count).with_context(|| format!("{count} processes"))?;
    }
    tenants.stop()
}

// Promise: Q65
#[test]
fn every_kind_of_memory_together_stays_within_a_quota_of_128_mib() -> Result<()> {
    every_kind_in(128 * MIB)
}

// Promise: Q65
#[test]
fn every_kind_of_memory_together_stays_within_a_quota_of_192_mib() -> Result<()> {
    every_kind_in(192 * MIB)
}

// Promise: Q65
#[test]
fn every_kind_of_memory_together_stays_within_a_quota_of_256_mib() -> Result<()> {
    every_kind_in(256 * MIB)
}

/// Loads modules that call `malloc` in kernels, in one way, in a VM that is observed. Returns the errors of loads without room for
/// the heap, and the part of the quota that a load with room took.
fn heap(way: &str) -> Result<(Vec<u32>, Option<u64>)> {
    let program = programs::hostile("heap")?;
    let tenants = Tenants::start(&Binaries::locate()?, &Options::with_limits(DEVICE_MIB, &[QUOTA / MIB]))?;
    let mut command = tenants.command(1, &program, &[way]);
    let (most, (printed, status)) = watched(&tenants, QUOTA, true, |looks| {
        Holder::start(&mut command)?.run(|program, line| {
            if line == "look" {
                looks.more()?;
                program.answer()?;
            }
            Ok(())
        })
    })?;
    println!("{way}: {most:?} of {QUOTA} bytes\n{printed}");
    ensure!(status.success(), "{status}");
    ensure!(most.charged + 8 * CHUNK > QUOTA, "the quota was never used up: {most:?}");
    tenants.stop()?;
    let lines = |name: &'static str| printed.lines().filter_map(move |line| line.strip_prefix(name));
    let held = lines("held ").map(str::parse).collect::<Result<_, _>>()?;
    let Some((before, after)) = lines("free ").find_map(|line| line.split_once(' ')) else {
        return Ok((held, None));
    };
    Ok((held, Some(before.parse::<u64>()?.saturating_sub(after.parse()?))))
}

/// True if a load took `bytes` for a heap, and little besides.
fn is_one_heap(taken: Option<u64>, bytes: u64) -> bool {
    taken.is_some_and(|taken| (bytes..=bytes + 4 * CHUNK).contains(&taken))
}

/// The driver's default heap size.
const HEAP: u64 = 8 * MIB;
/// `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED`.
const NO_HEAP: u32 = 303;

// Promise: Q65
#[test]
fn device_heap_is_charged_once_when_a_module_is_loaded() -> Result<()> {
    let (held, taken) = heap("module")?;
    ensure!(held == [NO_HEAP], "a load without room for the heap: {held:?}");
    ensure!(is_one_heap(taken, HEAP), "a load took {taken:?} bytes of the quota");
    Ok(())
}

// Promise: Q65
#[test]
fn device_heap_is_charged_when_a_library_is_first_used() -> Result<()> {
    let (_, taken) = heap("library")?;
    ensure!(is_one_heap(taken, HEAP), "a first launch took {taken:?} bytes of the quota");
    let (held, _) = heap("refused")?;
    ensure!(held == [NO_HEAP], "a launch without room for the heap: {held:?}");
    Ok(())
}

// Promise: Q65
#[test]
fn device_heap_is_charged_once_if_its_limit_was_set_before() -> Result<()> {
    let (_, taken) = heap("limit")?;
    ensure!(is_one_heap(taken, 28 * MIB), "a limit and a load took {taken:?} bytes of the quota");
    Ok(())
}

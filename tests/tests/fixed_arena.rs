//! VMs with fixed arenas: programs compute with one small arena, and a worker that is taken over after its start gets no more of its
//! guest's memory.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_api::v1::ArenaPolicy;
use sluice_kit::front_end::{FREE, FrontEnd};
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::shared::Shared as _;
use sluice_protocol::{limits, session};
use sluice_tests::direct::{Backend, TIMEOUT};
use sluice_tests::paths::Binaries;
use sluice_tests::process::tail;
use sluice_tests::programs::{passed, program};
use sluice_tests::tenants::{Options, Tenants};

const MIB: u64 = 1 << 20;
/// The smallest fixed arena.
const ARENA: u64 = *limits::FIXED_ARENAS.start();
/// The answer to a command that succeeds.
const OK: u32 = 0x1100;
/// A word at the start of the guest's memory, which the guest never shares.
const SECRET: u64 = 0x5ec2_e7f0_0d5e_c2e7;

fn with_fixed_arenas(options: &[&str]) -> Result<Backend> {
    let size = format!("{}MiB", ARENA / MIB);
    let fixed = ["--arena", "fixed", "--arena-size", &size];
    Backend::start_with(&Binaries::locate()?, None, &[&fixed, options].concat())
}

// Promise: C53
#[test]
fn programs_print_the_same_natively_and_with_a_small_fixed_arena() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = with_fixed_arenas(&[])?;
    let names = [
        "staging",
        "streams",
        "threads",
        "memory",
        "zero_copy",
        "managed",
        "errors",
        "driver_api",
        "symbols",
    ];
    for name in names {
        backend.agrees(&binaries, &program(name)?, &[])?;
    }
    backend.stop()
}

// Promise: C53
#[test]
fn pinned_memory_beyond_a_fixed_arena_is_refused_and_copies_go_on() -> Result<()> {
    let backend = with_fixed_arenas(&[])?;
    let size = (ARENA / MIB).to_string();
    let finished = backend.run(&program("staging")?, &[&size])?;
    println!("{}", finished.stdout);
    passed(&finished)?;
    ensure!(finished.stdout.contains("12 MiB of 16 could be pinned"), "{}", finished.stdout);
    backend.stop()
}

// Promise: C53
#[test]
fn fixed_arena_without_pages_mapped_in_place_serves_copies() -> Result<()> {
    let binaries = Binaries::locate()?;
    // Neither page nor arena, and the page alone: a program knows from the start that devices reach none of its memory.
    for runs in ["0", "1"] {
        let backend = with_fixed_arenas(&["--mapped-runs", runs])?;
        for name in ["vector_add", "staging", "streams"] {
            backend.agrees(&binaries, &program(name)?, &[])?;
        }
        let zero_copy = backend.run(&program("zero_copy")?, &[])?;
        passed(&zero_copy)?;
        ensure!(zero_copy.stdout.contains("zero-copy is masked: yes"), "{}", zero_copy.stdout);
        backend.stop()?;
    }
    Ok(())
}

// Promise: C53
#[test]
fn setting_for_fixed_arenas_has_no_effect_without_shared_memory() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = with_fixed_arenas(&[])?.over_stream()?;
    backend.agrees(&binaries, &program("staging")?, &[])?;
    backend.stop()
}

/// A guest on a device with a worker that is honest until it has the session's page and then keeps every descriptor. Returns the
/// worker's report after the guest has tried to give it more memory.
fn report_of_taken_over_worker(arena: ArenaPolicy) -> Result<String> {
    let binaries = Binaries::locate()?;
    let mut options = Options::with_limits(256, &[32]);
    options.worker = Some(binaries.get("sluice-hostile-worker")?);
    for (_, vm) in &mut options.vms {
        vm.arena = arena;
        vm.arena_bytes = (arena == ArenaPolicy::Fixed).then_some(ARENA);
    }
    let tenants = Tenants::start(&binaries, &options)?;
    tenants.wait_settled()?;
    fs::write(tenants.liar_folder().join("attack"), "guest-memory")?;
    let mut guest = FrontEnd::connect(&tenants.socket(1));
    guest.words.store_u64(0, SECRET, std::sync::atomic::Ordering::SeqCst);
    let bytes = u32::try_from(ARENA).context("an entry")?;
    let (first, second) = (FREE + 2 * MIB, FREE + 2 * MIB + ARENA);
    guest.open(1, 10, FREE);
    ensure!(guest.resource(1, 20, &[(first, bytes)]) == OK && guest.resource(1, 21, &[(second, 4096)]) == OK);
    let base = limits::WINDOW_BOUNDS.start;
    let attach = |guest: &mut FrontEnd, resource, slot, address| {
        guest.doorbell(1, Doorbell::Attach { resource, slot, address })
    };
    if arena == ArenaPolicy::Fixed {
        ensure!(attach(&mut guest, 20, session::FIXED_ARENA_SLOT, base) == OK, "the arena itself");
    }
    let report = || fs::read_to_string(tenants.liar_folder().join("report")).unwrap_or_default();
    let wait_for = |line: &str| -> Result<()> {
        let start = Instant::now();
        while !report().lines().any(|said| said.starts_with(line)) {
            ensure!(
                start.elapsed() < TIMEOUT,
                "the worker never reported {line}:\n{}\n{}",
                report(),
                tail(&tenants.printed(), 40)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    // From here on the worker is the guest process's.
    wait_for("has-page")?;
    for (resource, slot) in [(20, 2), (21, 3), (21, session::FIXED_ARENA_SLOT), (21, limits::ATTACHMENTS - 1)]
    {
        attach(&mut guest, resource, slot, base + ARENA * u64::from(slot));
    }
    // The device sends in order: what it sends for these requests is there before the doorbell.
    ensure!(guest.doorbell(1, Doorbell::Ring) == OK);
    wait_for("received")?;
    let report = report();
    drop(guest);
    tenants.stop()?;
    Ok(report)
}

// Promise: F96
#[test]
fn worker_taken_over_after_its_start_reads_no_other_memory_of_a_guest_with_fixed_arenas() -> Result<()> {
    let report = report_of_taken_over_worker(ArenaPolicy::Fixed)?;
    ensure!(report.contains("received 0 descriptors\n") && !report.contains("read "), "{report}");
    // The test can detect it: if arenas grow, the same worker reads the first page of its guest.
    let report = report_of_taken_over_worker(ArenaPolicy::Growing)?;
    ensure!(report.contains(&format!("read {SECRET:#x}\n")), "{report}");
    Ok(())
}

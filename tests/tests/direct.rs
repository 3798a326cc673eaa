//! The whole path without a VM: real `sluiced`, device and worker processes with their filters on, programs compiled by
//! the vendor's compiler, the software GPU.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_protocol::calls;
use sluice_tests::direct::{self, Backend, TIMEOUT, in_time};
use sluice_tests::host;
use sluice_tests::matrix::{self, Place};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, Finished, run, signal};
use sluice_tests::programs::{self, passed, program};

fn started(driver: Option<&str>) -> Result<Backend> {
    let binaries = Binaries::locate()?;
    let driver = driver.map(|file| binaries.get(file)).transpose()?;
    Backend::start(&binaries, driver.as_deref())
}

// Promise: C1, C13, C50, C54, C55, C56, C71, C73, C75, C76, C80, C89, C90, C92, C93, C94, C95, C102, C105, C107, C109, C110, C126, C129, C134, C137, C139, C140, G10
#[test]
fn programs_print_the_same_natively_and_remoted() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = started(None)?;
    let (mut differences, mut calls) = (Vec::new(), 0);
    for program in programs::compile_all()? {
        match backend.agrees_call_by_call(&binaries, &program.path) {
            Ok(compared) => calls += compared,
            Err(difference) => differences.push(format!("{difference:#}")),
        }
    }
    ensure!(differences.is_empty(), "{}", differences.join("\n\n"));
    // Without calls nothing would be compared.
    ensure!(calls > 10_000, "only {calls} calls were traced");
    // The kernel is the host's.
    matrix::ran(Place::new("DIRECT", "none: a process", "the host's"), "", "")?;
    backend.stop()
}

// Promise: C50, C93
#[test]
fn every_served_call_is_refused_by_a_row_of_refusals() -> Result<()> {
    let finished = host::run_native(&Binaries::locate()?, &program("refusals")?, &[], TIMEOUT)?;
    passed(&finished)?;
    let refused: BTreeSet<&str> = finished
        .stdout
        .lines()
        .filter(|line| !line.ends_with(" 0"))
        .filter_map(|line| line.split(' ').next())
        .collect();
    let served = calls::C.iter().filter(|row| row.class != "driver").map(|row| row.name);
    let without: BTreeSet<&str> = served.filter(|name| !refused.contains(name)).collect();
    ensure!(without.is_empty(), "without a row: {without:?}");
    Ok(())
}

// Promise: C73, V15, V22
#[test]
fn programs_compute_without_guest_pages_mapped_in_place() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = Backend::start_with(&binaries, None, &["--mapped-runs", "0"])?;
    let names = [
        "vector_add",
        "matmul_tiled",
        "reduction",
        "histogram",
        "driver_api",
        "threads",
        "errors",
        "streams",
        "host_functions",
        "graph_host",
    ];
    for name in names {
        backend.agrees(&binaries, &program(name)?, &[])?;
    }
    // Memory that the device would have to reach by itself is not offered.
    let Finished { stdout, .. } = backend.run(&program("zero_copy")?, &[])?;
    ensure!(stdout.contains("zero-copy is masked: yes") && stdout.ends_with("PASS\n"), "{stdout}");
    backend.stop()?;
    // If only some of the memory is like that, which the program may have learnt too late, it is refused as by a driver that cannot
    // lock pages, and that is reported once.
    let backend = Backend::start_with(&binaries, None, &["--mapped-runs", "1"])?;
    let Finished { stdout, stderr, .. } = backend.run(&program("streams")?, &[])?;
    ensure!(stdout.contains("2 cudaErrorMemoryAllocation"), "{stdout}\n{stderr}");
    ensure!(stderr.matches("no pinned host memory").count() == 1, "{stderr}");
    backend.stop()
}

// Promise: C4
#[test]
fn device_fault_of_a_program_leaves_its_neighbour_running() -> Result<()> {
    let backend = started(None)?;
    let mut neighbour = backend.spawn("neighbour", &program("neighbour")?, &["forever"])?;
    neighbour.wait_for_line("computing", TIMEOUT)?;
    let faulty = backend.run(&program("errors")?, &["fault"])?;
    ensure!(
        faulty.stdout.contains("synchronise again                  700"),
        "{}\n{}",
        faulty.stdout,
        faulty.stderr
    );
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    signal(neighbour.id(), Signal::USR1).context("the neighbour goes on")?;
    let status = neighbour.wait(TIMEOUT)?.context("the neighbour ends")?;
    ensure!(status.success(), "{}", neighbour.printed());
    backend.stop()
}

// Promise: S20
#[test]
fn exported_memory_is_opened_only_by_programs_of_the_same_user() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        sluice_skip::skip("only root can be two users");
        return Ok(());
    }
    let backend = started(None)?;
    let socket = backend.socket()?;
    for (path, mode) in [(socket.parent().context("a folder")?, 0o711), (&*socket, 0o777)] {
        fs::set_permissions(path, Permissions::from_mode(mode))?;
    }
    let Finished { status, stdout, stderr, .. } = backend.run(&programs::hostile("other_user")?, &[])?;
    ensure!(status.success() && stdout == "same user: 0\nother user: 1\n", "{status}\n{stdout}\n{stderr}");
    backend.stop()
}

/// As NCCL registers the files of its transport in shared memory: the pages of one process cannot become a resource without those of the
/// others.
// Promise: C118
#[test]
fn mapping_that_processes_share_is_not_registered_and_stays_shared() -> Result<()> {
    let backend = started(None)?;
    let folder = tempfile::tempdir()?;
    let folders = ["/dev/shm", folder.path().to_str().context("UTF-8")?];
    let Finished { status, stdout, stderr, .. } =
        backend.run(&programs::hostile("shared_mapping")?, &folders)?;
    let refused = "register: 801\naddress: 1\nunregister: 713\nshared: yes, copied: yes\n";
    ensure!(status.success() && stdout == refused.repeat(2), "{status}\n{stdout}\n{stderr}");
    ensure!(stderr.contains("cannot register 3145728 bytes"), "{stderr}");
    backend.stop()
}

/// Time limit for noticing an end, on a machine with other work.
const ENDS: Duration = Duration::from_secs(10);

// Promise: F1
#[test]
fn killed_program_ends_its_worker() -> Result<()> {
    killed_program(&["1000"])
}

// Promise: F1
#[test]
fn killed_program_with_a_sleeping_child_ends_its_worker() -> Result<()> {
    killed_program(&["1000", "fork"])
}

fn killed_program(arguments: &[&str]) -> Result<()> {
    let backend = Backend::start_with(&Binaries::locate()?, None, &["--memory", "256MiB"])?;
    let hold = program("hold")?;
    // The kernel keeps fifteen characters of a program's name.
    let name: String = hold.file_name().context("a name")?.to_string_lossy().chars().take(15).collect();
    in_time("a worker after the kill of its program (target 1 s)", ENDS, |attempt| {
        let mut doomed = backend.spawn(&format!("doomed-{attempt}"), &hold, arguments)?;
        doomed.wait_for_line("holding", TIMEOUT)?;
        backend.wait_for_workers(1)?;
        let children = direct::descendants(doomed.id(), &name)?;
        signal(doomed.id(), Signal::KILL)?;
        let (_, took) = backend.wait_for_workers(0)?;
        for child in children {
            signal(child, Signal::KILL).context("the child sleeps on")?;
        }
        Ok(took)
    })?;
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    // All of the VM's memory is available to the next program, to the byte.
    let next = backend.run(&program("quota")?, &["256"])?;
    ensure!(
        next.status.success() && next.stdout.contains("to the byte: yes"),
        "{}\n{}",
        next.stdout,
        next.stderr
    );
    backend.stop()
}

// Promise: Q51
#[test]
fn memory_of_an_exited_process_is_free_for_the_next_start() -> Result<()> {
    const STARTS: u32 = 30;
    let binaries = Binaries::locate()?;
    let backend = Backend::start_with(&binaries, None, &["--memory", "256MiB"])?;
    let quota = program("quota")?.to_string_lossy().into_owned();
    // A shell starts the next one as soon as the last one is reaped; each takes all memory.
    let script = "for i in $(seq $1); do \"$0\" 256 || { echo at start $i; exit 1; }; done";
    let starts = STARTS.to_string();
    let mut shell = backend.command(Path::new("/bin/sh"), &["-c", script, &quota, &starts]);
    let finished = run(&mut shell, 5 * TIMEOUT)?;
    println!("{STARTS} processes that took everything, one after the other: {:?}", finished.elapsed);
    let said = finished.stdout.matches("to the byte: yes").count();
    ensure!(finished.status.success() && said == STARTS as usize, "{}\n{}", finished.stdout, finished.stderr);
    // The end of the previous process does not matter either.
    for number in 0..5 {
        let mut hold = backend.spawn(&format!("doomed-{number}"), &program("hold")?, &["1000"])?;
        hold.wait_for_line("holding", TIMEOUT)?;
        signal(hold.id(), Signal::KILL)?;
        hold.wait(TIMEOUT)?.context("it is killed")?;
        passed(&backend.run(Path::new(&quota), &["256"])?).with_context(|| format!("after kill {number}"))?;
    }
    backend.stop()
}

// Promise: F2
#[test]
fn killed_worker_gives_an_error_at_once_and_the_next_program_works() -> Result<()> {
    let backend = started(None)?;
    in_time("a program's error after the kill of its worker (target 1 s)", ENDS, |attempt| {
        let mut bereft = backend.spawn(&format!("bereft-{attempt}"), &program("bereft")?, &["killed"])?;
        bereft.wait_for_line("waiting", TIMEOUT)?;
        let (workers, _) = backend.wait_for_workers(1)?;
        let start = Instant::now();
        signal(workers[0], Signal::KILL)?;
        let status = bereft.wait(TIMEOUT)?.context("the program ends with an error")?;
        ensure!(status.success(), "{}", bereft.printed());
        Ok(start.elapsed())
    })?;
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    backend.stop()
}

// Promise: C7
#[test]
fn late_failure_is_reported_once_by_the_next_wait() -> Result<()> {
    let backend = started(Some("libsluice_null_driver.so"))?;
    let bench = Binaries::locate()?.get("sluice-bench")?;
    // The driver has no room for the event behind it.
    let finished = backend.run(&bench, &["failing", "unmarked_p1"])?;
    ensure!(
        finished.stdout == "done\ncuCtxSynchronize returned 2\ndone\ndone\ndone\ndone\n",
        "{}\n{}",
        finished.stdout,
        finished.stderr
    );
    // It breaks its context.
    let finished = backend.run(&bench, &["failing", "fault"])?;
    let waits = "cuCtxSynchronize returned 700\n".repeat(2);
    ensure!(
        finished.stdout == format!("done\n{waits}cuLaunchKernel returned 700\n{waits}"),
        "{}\n{}",
        finished.stdout,
        finished.stderr
    );
    backend.stop()
}

// Promise: F3
#[test]
fn thousand_starts_leak_no_descriptors_or_mappings() -> Result<()> {
    let backend = started(Some("libsluice_null_driver.so"))?;
    let bench = Binaries::locate()?.get("sluice-bench")?;
    let start = |count: usize| -> Result<()> {
        for _ in 0..count {
            let finished = backend.run(&bench, &["start"])?;
            ensure!(finished.status.success(), "{}", finished.stderr);
        }
        backend.wait_for_workers(0).map(drop)
    };
    start(20)?;
    let (device, arbiter) = (backend.device()?, backend.processes("sluice-arbiter")?);
    // No inventory reports here that the driver has forgotten a dead worker; even so the arbiter keeps no descriptor open.
    let all = ["sluiced", "sluice-launcher", "sluice-device", "sluice-arbiter"];
    for name in all {
        ensure!(!backend.processes(name)?.is_empty(), "there is no {name} to count");
    }
    let count = |what: fn(u32) -> Result<usize>| -> Result<Vec<usize>> {
        all.iter().map(|name| backend.processes(name)?.into_iter().map(what).sum::<Result<usize>>()).collect()
    };
    let mapped = || -> Result<Vec<usize>> {
        [device].iter().chain(&arbiter).map(|process| direct::mappings(*process)).collect()
    };
    let before = (count(direct::descriptors)?, mapped()?);
    let began = Instant::now();
    start(1000)?;
    println!("1,000 starts in {:?}", began.elapsed());
    // The device closes a connection a moment after its worker has ended.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let after = (count(direct::descriptors)?, mapped()?);
        // A process that the launcher makes ahead, a thread's arena or a cache may come and stay; a leak of each start would be there a
        // thousand times.
        let grown = after.0.iter().zip(&before.0).any(|(after, before)| *after > before + 8)
            || after.1.iter().zip(&before.1).any(|(after, before)| *after > before + 50);
        if !grown {
            break;
        }
        ensure!(Instant::now() < deadline, "descriptors and mappings grew from {before:?} to {after:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    backend.stop()
}

/// Ticks of CPU that each group of processes uses in five seconds at rest: polling and starts take longer on a busy machine, so it
/// measures until no group uses more than `most`, or until the time limit.
fn ticks_at_rest<const GROUPS: usize>(groups: [&[u32]; GROUPS], most: u64) -> Result<[u64; GROUPS]> {
    let ticks = || -> Result<Vec<u64>> {
        groups.iter().map(|group| group.iter().map(|process| direct::cpu_ticks(*process)).sum()).collect()
    };
    let start = Instant::now();
    loop {
        let before = ticks()?;
        std::thread::sleep(Duration::from_secs(5));
        let after = ticks()?;
        let used = std::array::from_fn(|group| after[group] - before[group]);
        if used.iter().all(|used| *used <= most) || start.elapsed() > TIMEOUT {
            return Ok(used);
        }
    }
}

// Promise: V7
#[test]
fn parked_session_uses_no_cpu_and_its_device_little_memory() -> Result<()> {
    let backend = started(None)?;
    let mut parked = backend.spawn("parked", &program("hold")?, &["1000"])?;
    parked.wait_for_line("holding", TIMEOUT)?;
    let (workers, _) = backend.wait_for_workers(1)?;
    let device = backend.device()?;
    let [used] = ticks_at_rest([&[workers[0], device, parked.id()]], 2)?;
    println!("{used} ticks of CPU in 5 s of a parked session");
    ensure!(used <= 2, "a parked session used {used} ticks (10 ms each) in 5 s");
    let memory = direct::private_kibibytes(device)?;
    println!("sluice-device: {memory} KiB private resident memory");
    ensure!(memory < 10 << 10, "sluice-device has {memory} KiB of private resident memory");
    backend.stop()
}

// Promise: C126
#[test]
fn wide_reservations_take_no_memory_of_program_or_worker() -> Result<()> {
    /// Far less than a byte for each page of the addresses.
    const MOST_KIB: u64 = 64 << 10;
    let backend = started(None)?;
    let mut program = backend.spawn("wide", &program("virtual_memory")?, &["wait"])?;
    program.wait_for_line("begun", TIMEOUT)?;
    let (workers, _) = backend.wait_for_workers(1)?;
    let processes = [("program", program.id()), ("worker", workers[0])];
    let memory = || -> Result<Vec<u64>> {
        processes.iter().map(|(_, process)| direct::private_kibibytes(*process)).collect()
    };
    let before = memory()?;
    signal(program.id(), Signal::USR1)?;
    program.wait_for_line("reserved", TIMEOUT)?;
    let after = memory()?;
    for ((name, _), (before, after)) in processes.iter().zip(before.into_iter().zip(after)) {
        println!("{name}: {before} KiB before, {after} KiB with 1.7 TiB of addresses reserved");
        ensure!(after < before + MOST_KIB, "{name}: {before} KiB before, {after} KiB afterwards");
    }
    signal(program.id(), Signal::USR1)?;
    let status = program.wait(TIMEOUT)?.context("the program ends")?;
    ensure!(status.success(), "{}", program.printed());
    backend.stop()
}

// Promise: V8
#[test]
fn sleeping_threads_of_fifty_processes_use_little_cpu() -> Result<()> {
    let backend = started(None)?;
    let sleepers = program("sleepers")?;
    let mut processes = Vec::new();
    for number in 0..50 {
        processes.push(backend.spawn(&format!("sleepers-{number}"), &sleepers, &["8"])?);
    }
    for process in &mut processes {
        process.wait_for_line("sleeping", TIMEOUT)?;
    }
    let programs: Vec<u32> = processes.iter().map(Background::id).collect();
    let [used, by_programs] = ticks_at_rest([&[backend.device()?], &programs], 50)?;
    println!("device: {used}, programs: {by_programs} ticks of CPU in 5 s of 400 sleeping threads");
    ensure!(by_programs <= 50, "sleepers used {by_programs} ticks (10 ms each) in 5 s themselves");
    ensure!(used <= 50, "the device used {used} ticks (10 ms each) in 5 s for sleepers");
    for process in &processes {
        signal(process.id(), Signal::USR1)?;
    }
    for process in &mut processes {
        let status = process.wait(TIMEOUT)?.context("a sleeper wakes")?;
        ensure!(status.success(), "{}", process.printed());
    }
    backend.stop()
}

// Promise: C2
#[test]
#[expect(unsafe_code, reason = "looks functions up in the shim and calls one")]
fn shim_exports_every_name_and_refuses_those_it_does_not_serve() -> Result<()> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    let shim = Binaries::locate()?.get("libsluice_guest.so")?;
    // SAFETY: our own library; loading it has no effect.
    let library = unsafe { Library::open(Some(&shim), RTLD_NOW | RTLD_LOCAL) }?;
    let mut refused = 0;
    let served: Vec<&str> = calls::C
        .iter()
        .filter(|row| row.class != "driver")
        .flat_map(|row| std::iter::once(row.name).chain(row.per_thread.iter().copied()))
        .collect();
    for name in sluice_cuda_abi::symbols::EXPORTS {
        // SAFETY: a function of the driver API; those called below read no argument.
        let function = unsafe { library.get::<unsafe extern "C" fn() -> u32>(name.as_bytes()) }
            .with_context(|| format!("{name} is not exported"))?;
        if !served.contains(name) {
            // SAFETY: an unserved export returns its code for any arguments.
            let code = unsafe { function() };
            ensure!(code == 801, "{name} returned {code}");
            refused += 1;
        }
    }
    println!(
        "{} names, {refused} of them refused with CUDA_ERROR_NOT_SUPPORTED",
        sluice_cuda_abi::symbols::EXPORTS.len()
    );
    let dynamic = std::process::Command::new("readelf").arg("-d").arg(&shim).output()?;
    ensure!(
        String::from_utf8_lossy(&dynamic.stdout).contains("soname: [libcuda.so.1]"),
        "SONAME is libcuda.so.1"
    );
    Ok(())
}

//! What custody of device memory comes to: a quota that holds, memory without remnants, a fence.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_tests::host::Host;
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::Program;
use sluice_tests::vm::{Completed, Guest, GuestCommand};

/// The guest's quota in MiB.
pub(crate) const QUOTA: &str = "256";
/// The VM that the guest is.
const GUEST: &str = "1";
/// The VM beside it, whose programs run on the host.
const NEIGHBOUR: u32 = 2;
const PROGRAM: Duration = Duration::from_secs(120);
/// How long a program of a fenced VM may wait for its error.
const ERROR: Duration = Duration::from_secs(1);

/// What `sluice host` is told, so that all this can be shown.
pub(crate) fn options() -> [String; 4] {
    ["--memory".into(), format!("{QUOTA}MiB"), "--vm".into(), format!("{NEIGHBOUR},direct")]
}

/// Shows it; true when all of it held.
pub(crate) fn show(guest: &Guest, host: &Host, binaries: &Binaries, programs: &[Program]) -> Result<bool> {
    println!("\n5. Device memory never leaves the host's hands");
    let program = |name: &str| {
        let program = programs.iter().find(|program| program.name == name);
        program.map(|program| program.path.as_path()).with_context(|| format!("{name}.cu has been removed"))
    };
    let run = |words: &[&str]| guest.start(&GuestCommand::program(words).limit(PROGRAM))?.wait();

    println!("   a quota of {QUOTA} MiB: a program in the guest takes memory until it is refused");
    let quota = run(&["quota", QUOTA])?;
    let mut good = said(&quota.stdout, quota.success());

    settle(host, binaries)?;
    println!("   remnants: a program in the guest leaves a tag in all it can get, and is killed");
    let left = run(&["remnant", "leave"])?;
    good &= said(&left.stdout, left.signal.is_some() || left.code == Some(137));
    settle(host, binaries)?;
    println!("   another VM then reads all the memory it can get");
    let found = process::run(host.beside(binaries, NEIGHBOUR, program("remnant")?)?.arg("find"), PROGRAM)?;
    good &= said(&found.stdout, found.status.success());

    settle(host, binaries)?;
    println!("   a fence: everything is taken from the guest while a program waits for the GPU");
    good &= fence(guest, host, binaries)?;
    let refused = run(&["vector_add"])?;
    good &= said(&refused.stdout, !refused.success());
    println!("   and it is admitted again");
    ensure_done(&host.operate(binaries, "readmit", &[GUEST])?)?;
    let works = run(&["vector_add"])?;
    good &= said(&works.stdout, works.success());
    Ok(good)
}

/// Waits until what the last program had is no VM's any more: a program that has ended is a little ahead of its worker.
fn settle(host: &Host, binaries: &Binaries) -> Result<()> {
    let deadline = Instant::now() + PROGRAM;
    loop {
        let mut shown = String::new();
        for vm in [GUEST.to_owned(), NEIGHBOUR.to_string()] {
            let vm = host.operate(binaries, "show", &[&vm, "--json"])?;
            ensure_done(&vm)?;
            shown.push_str(&vm.stdout);
        }
        let busy = |line: &&str| {
            let line = line.trim().trim_end_matches(',');
            let number = |name: &str| line.strip_prefix(name).and_then(|number| number.parse::<u64>().ok());
            number("\"lent_bytes\": ").or_else(|| number("\"holders\": ")).is_some_and(|number| number > 0)
        };
        if !shown.lines().any(|line| busy(&line)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "what a program had does not come back:\n{shown}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn fence(guest: &Guest, host: &Host, binaries: &Binaries) -> Result<bool> {
    let waiting = guest.start(&GuestCommand::program(&["bereft", "killed"]).limit(PROGRAM))?;
    waiting.wait_for_output("waiting", PROGRAM)?;
    let started = Instant::now();
    let (fenced, ended): (_, Result<(Completed, Duration)>) = std::thread::scope(|scope| {
        let fencing =
            scope.spawn(|| host.operate(binaries, "fence", &[GUEST, "--json", "--reason", "the demo"]));
        let ended = waiting.wait().map(|ended| (ended, started.elapsed()));
        (fencing.join(), ended)
    });
    let fenced = fenced.map_err(|_| anyhow::anyhow!("the operator panicked"))??;
    ensure_done(&fenced)?;
    let (ended, elapsed) = ended?;
    let good = said(&ended.stdout, ended.success()) && elapsed < ERROR;
    let step = fenced.stdout.lines().find(|line| line.contains("\"step\"")).unwrap_or_default();
    let step = step.trim().trim_end_matches(',');
    let clean = fenced.stdout.contains("\"clean\": true");
    println!("     | its program had an error after {} ms; {step}, clean: {clean}", elapsed.as_millis());
    Ok(good && clean)
}

fn ensure_done(operator: &process::Finished) -> Result<()> {
    ensure!(operator.status.success(), "the operator was refused: {}", operator.stderr.trim());
    Ok(())
}

/// Prints what a program said, and whether that was as it should be.
fn said(text: &str, good: bool) -> bool {
    for line in text.lines() {
        println!("     | {line}");
    }
    if !good {
        println!("     ! THIS IS NOT AS IT SHOULD BE");
    }
    good
}

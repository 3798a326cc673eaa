//! `cargo xtask demo`: CUDA programs in a Debian guest, remoted through Sluice, beside the same programs on the host.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::host::{Host, run_native};
use sluice_tests::image::Image;
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::Program;
use sluice_tests::progress::step;
use sluice_tests::vm::{Completed, Gpu, Guest, GuestCommand, Machine};

use crate::cargo::{cargo, run_visibly, target_folder};
use crate::custody;
use crate::setup;

const PROGRAM: Duration = Duration::from_secs(120);

/// What a demo needs of the workspace. With `SLUICE_BINARIES` set, what lies there is used as it is.
const PACKAGES: &[&str] = &[
    "sluice-cli",
    "sluice-daemon",
    "sluice-device",
    "sluice-worker",
    "sluice-arbiter",
    "sluice-inventory",
    "sluice-guest",
    "sluice-guest-nvml",
    "softgpu-cuda",
    "softgpu-nvml",
    "sluice-tests",
];

/// In the order in which they are shown.
const PROGRAMS: &[(&str, &str)] = &[
    ("device_query", "what a program learns about its device"),
    ("management", "what a monitor learns about it"),
    ("vector_add", "c = a + b"),
    ("matmul_tiled", "matrix product with tiles in shared memory"),
    ("reduction", "sum and maximum with shuffles, shared memory, atomics"),
    ("histogram", "atomics and compare-and-swap"),
    ("symbols", "constant and global variables"),
    ("memory", "allocations, fills, copies of every shape"),
    ("streams", "streams, events, pinned memory"),
    ("threads", "several host threads"),
    ("driver_api", "the driver interface without the runtime"),
    ("errors", "what is refused, and a fault that stays"),
    ("mandelbrot", "a picture"),
];

#[derive(Debug, Clone, Copy, ValueEnum)]
enum KernelSeries {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
}

/// Boot a Debian guest with a Sluice GPU and run CUDA programs in it.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Series of the guest's kernel.
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: KernelSeries,
}

/// One program, here and there.
struct Row {
    name: &'static str,
    native: Finished,
    remote: Finished,
}

/// How a program ended, wherever it ran.
struct Finished {
    stdout: String,
    stderr: String,
    succeeded: bool,
    elapsed: Duration,
}

impl From<process::Finished> for Finished {
    fn from(finished: process::Finished) -> Self {
        let process::Finished { status, stdout, stderr, elapsed } = finished;
        Self { stdout, stderr, succeeded: status.success(), elapsed }
    }
}

impl From<Completed> for Finished {
    fn from(completed: Completed) -> Self {
        let succeeded = completed.success();
        let Completed { stdout, stderr, elapsed, .. } = completed;
        Self { stdout, stderr, succeeded, elapsed }
    }
}

impl Finished {
    /// The program's own word, backed by its exit status.
    fn check(&self) -> &'static str {
        match self.stdout.lines().last() {
            Some("PASS") if self.succeeded => "PASS",
            _ => "FAIL",
        }
    }
}

impl Row {
    fn same_output(&self) -> bool {
        self.native.stdout == self.remote.stdout
    }

    fn is_good(&self) -> bool {
        self.native.check() == "PASS" && self.remote.check() == "PASS" && self.same_output()
    }
}

/// Runs the demo; true when every program's check held on both sides and both said the same.
pub(crate) fn run(options: &Options) -> Result<bool> {
    println!("Sluice demo: a Debian guest computes on a GPU it does not have\n\n1. Setting up");
    let result = prepare(options).and_then(|stage| {
        let started = Instant::now();
        show(&stage).map(|good| (good, started.elapsed()))
    });
    match result {
        Ok((true, elapsed)) => {
            println!(
                "\ndemo: PASS ({} programs, same output natively and in the VM; quota, scrub and fence hold; {:.0} s)",
                PROGRAMS.len(),
                elapsed.as_secs_f64()
            );
            Ok(true)
        }
        Ok((false, elapsed)) => {
            println!("\ndemo: FAIL (see above, {:.0} s)", elapsed.as_secs_f64());
            Ok(false)
        }
        Err(error) => {
            println!("\n{error:#}\n\ndemo: FAIL (the error is above)");
            Ok(false)
        }
    }
}

/// Everything that is needed before the clock runs.
struct Stage {
    binaries: Binaries,
    kernel: Kernel,
    programs: Vec<Program>,
}

fn prepare(options: &Options) -> Result<Stage> {
    let programs = setup::prepare()?;
    let binaries = match std::env::var_os("SLUICE_BINARIES") {
        Some(folder) => Binaries::at(folder.into()),
        None => build()?,
    };
    let series = match options.kernel {
        KernelSeries::V6_1 => Series::V6_1,
        KernelSeries::V6_12 => Series::V6_12,
    };
    Ok(Stage { binaries, kernel: Kernel::fetch(series)?, programs })
}

fn build() -> Result<Binaries> {
    step("building Sluice for release");
    let mut build = cargo();
    build.args(["build", "--release"]);
    for package in PACKAGES {
        build.args(["--package", package]);
    }
    run_visibly(&mut build)?;
    Ok(Binaries::at(target_folder()?.join("release")))
}

fn show(stage: &Stage) -> Result<bool> {
    println!("\n2. The same programs on this host, straight on the software GPU");
    let mut natives = Vec::new();
    for &(name, what) in PROGRAMS {
        let program = find(&stage.programs, name)?;
        let finished: Finished = run_native(&stage.binaries, &program.path, &[], PROGRAM)?.into();
        println!("     {name:<14} {:>7.2} s  {}  {what}", finished.elapsed.as_secs_f64(), finished.check());
        natives.push((name, finished));
    }

    println!("\n3. Booting Debian's kernel {} with a vhost-user GPU", stage.kernel.version);
    let options = custody::options();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let host = Host::start_with(&stage.binaries, stage.kernel.series, &options, &[])?;
    step(format!("host side is ready, socket {}", host.socket().display()));
    let good = in_guest(stage, &host, natives)
        .with_context(|| format!("the host side said:\n{}\n", process::tail(&host.printed(), 30)))?;
    host.stop().context("ending the host side")?;
    step("guest and host side have ended in good order");
    Ok(good)
}

fn in_guest(stage: &Stage, host: &Host, natives: Vec<(&'static str, Finished)>) -> Result<bool> {
    let image = Image::with_sluice(&stage.kernel, &stage.binaries, &stage.programs)?;
    let machine = Machine { gpu: Gpu::VhostUser(host.socket().to_path_buf()), ..Machine::new("demo") };
    let booting = Instant::now();
    let guest = Guest::boot(&machine, &stage.kernel, &image)?;
    step(format!("booted in {:.1} s ({})", booting.elapsed().as_secs_f64(), guest.accelerator().name()));
    ensure!(
        guest.hello()?.render_node,
        "the guest has no render node:\n{}",
        process::tail(&guest.console(), 30)
    );
    let identity = guest.run("id -un; id -Gn; ls -l /dev/dri/renderD128")?.expect_success()?;
    step(format!("programs run as: {}", identity.stdout.trim().replace('\n', "; ")));

    println!("\n4. The programs in the guest, every CUDA call remoted");
    let mut rows = Vec::new();
    for (name, native) in natives {
        let remote: Finished = guest.start(&GuestCommand::program(&[name]).limit(PROGRAM))?.wait()?.into();
        let row = Row { name, native, remote };
        print_row(&row);
        rows.push(row);
    }
    let together = two_at_once(&guest, &stage.binaries, find(&stage.programs, "vector_add")?)?;
    summarise(&rows);
    let custody = custody::show(&guest, host, &stage.binaries, &stage.programs)?;
    guest.power_off().context("powering the guest off")?;
    Ok(together && custody && rows.iter().all(Row::is_good))
}

fn find<'a>(programs: &'a [Program], name: &str) -> Result<&'a Program> {
    programs
        .iter()
        .find(|program| program.name == name)
        .with_context(|| format!("{name}.cu has been removed"))
}

fn print_row(row: &Row) {
    println!("   {}", row.name);
    let lines: Vec<&str> = row.remote.stdout.lines().collect();
    for line in &lines {
        println!("     | {line}");
    }
    if !row.is_good() {
        println!("     natively it said:");
        for line in row.native.stdout.lines().chain(row.native.stderr.lines()) {
            println!("     < {line}");
        }
        for line in row.remote.stderr.lines() {
            println!("     ! {line}");
        }
    }
}

/// Two processes with different data share the GPU; neither may see the other.
fn two_at_once(guest: &Guest, binaries: &Binaries, program: &Program) -> Result<bool> {
    println!("   two processes at once");
    let arguments = [["200000", "11"], ["200000", "12"]];
    let mut expected = Vec::new();
    for [elements, seed] in arguments {
        expected.push(run_native(binaries, &program.path, &[elements, seed], PROGRAM)?.stdout);
    }
    let start = |[elements, seed]: [&str; 2]| {
        guest.start(&GuestCommand::program(&["vector_add", elements, seed]).limit(PROGRAM))
    };
    let running = [start(arguments[0])?, start(arguments[1])?];
    let mut good = true;
    for (process, expected) in running.into_iter().zip(expected) {
        let finished: Finished = process.wait()?.into();
        let same = finished.stdout == expected;
        good &= same && finished.check() == "PASS";
        let word = if same { "same as natively" } else { "NOT THE SAME as natively" };
        println!(
            "     | {} — {word}, {:.2} s",
            finished.stdout.trim().replace('\n', " — "),
            finished.elapsed.as_secs_f64()
        );
        for line in finished.stderr.lines().filter(|_| !same) {
            println!("     ! {line}");
        }
    }
    Ok(good)
}

fn summarise(rows: &[Row]) {
    println!(
        "\n   {:<14} {:>8} {:>9}   {:>8} {:>9}   same output",
        "program", "native", "check", "in VM", "check"
    );
    for row in rows {
        println!(
            "   {:<14} {:>6.2} s {:>9}   {:>6.2} s {:>9}   {}",
            row.name,
            row.native.elapsed.as_secs_f64(),
            row.native.check(),
            row.remote.elapsed.as_secs_f64(),
            row.remote.check(),
            if row.same_output() { "yes" } else { "NO" }
        );
    }
}

//! CUDA programs, on this host without Sluice and in VMs, and the comparison of their output.

use std::time::Duration;

use anyhow::{Context as _, Result};
use sluice_tests::host::run_native;
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::Program;
use sluice_tests::vm::{Completed, GuestCommand, GuestProcess};

use super::checks::Checks;
use super::operator::indented;
use super::tenant::DemoTenant;

/// Time limit of a program: software emulates the guest's processor, and the GPU as well.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// Programs in the order of the output, with their descriptions.
const PROGRAMS: &[(&str, &str)] = &[
    ("device_query", "properties of the device"),
    ("management", "NVML, as a monitor uses it"),
    ("vector_add", "c = a + b"),
    ("matmul_tiled", "matrix product with tiles in shared memory"),
    ("reduction", "sum and maximum with shuffles, shared memory, atomics"),
    ("histogram", "atomics and compare-and-swap"),
    ("symbols", "constant and global variables"),
    ("memory", "allocations, fills, copies of every shape"),
    ("streams", "streams, events, pinned memory"),
    ("threads", "several host threads"),
    ("driver_api", "the driver interface without the runtime"),
    ("errors", "refused calls, and a sticky fault"),
    ("mandelbrot", "a picture"),
];
/// The program whose output is shown.
const PICTURE: &str = "mandelbrot";

/// The result of a program, in a VM or on this host.
pub(super) struct Finished {
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) succeeded: bool,
    pub(super) elapsed: Duration,
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
    /// True if the program printed PASS and exited with 0.
    pub(super) fn passed(&self) -> bool {
        self.succeeded && self.stdout.lines().last() == Some("PASS")
    }

    /// True if both passed with the same output.
    fn equals(&self, other: &Self) -> bool {
        self.passed() && other.passed() && self.stdout == other.stdout
    }

    /// The last lines of its output, for the message of a failure.
    fn complaint(&self) -> String {
        indented(&process::tail(&format!("{}{}", self.stdout, self.stderr), 20))
    }
}

/// Starts a program in a VM.
pub(super) fn start<'tenant>(tenant: &'tenant DemoTenant, words: &[&str]) -> Result<GuestProcess<'tenant>> {
    tenant.guest.start(&GuestCommand::program(words).limit(LIMIT))
}

/// Runs a program in a VM to its end, and prints its output.
pub(super) fn show(tenant: &DemoTenant, words: &[&str]) -> Result<Finished> {
    println!("   {}$ {}", tenant.name, words.join(" "));
    let finished = Finished::from(start(tenant, words)?.wait()?);
    print!("{}", indented(&finished.stdout));
    Ok(finished)
}

/// Programs with their output on this host, straight on the software GPU.
pub(super) struct Programs<'stage> {
    binaries: &'stage Binaries,
    compiled: &'stage [Program],
    native: Vec<(&'static str, &'static str, Finished)>,
}

impl<'stage> Programs<'stage> {
    /// Runs all programs on this host.
    pub(super) fn run_natively(binaries: &'stage Binaries, compiled: &'stage [Program]) -> Result<Self> {
        let mut programs = Self { binaries, compiled, native: Vec::new() };
        for &(name, what) in PROGRAMS {
            let finished = programs.natively(name, &[])?;
            let word = if finished.passed() { "PASS" } else { "FAIL" };
            println!("     {name:<14} {:>6.2} s  {word}  {what}", finished.elapsed.as_secs_f64());
            programs.native.push((name, what, finished));
        }
        Ok(programs)
    }

    fn natively(&self, name: &str, arguments: &[&str]) -> Result<Finished> {
        let program = self.compiled.iter().find(|program| program.name == name);
        let program = program.with_context(|| format!("{name}.cu has been removed"))?;
        Ok(run_native(self.binaries, &program.path, arguments, LIMIT)?.into())
    }

    /// Runs all programs in both VMs, each in both at the same time.
    pub(super) fn run_in(&self, tenants: [&DemoTenant; 2], checks: &mut Checks) -> Result<()> {
        let [one, two] = tenants.map(|tenant| tenant.name);
        println!("     {:<14} {:>9} {one:>12} {two:>12}   same output", "", "this host");
        let mut same = [0, 0];
        for (name, _, native) in &self.native {
            let running = [start(tenants[0], &[name])?, start(tenants[1], &[name])?];
            let finished = running.map(|process| process.wait().map(Finished::from));
            let [first, second] = finished;
            let finished = [first?, second?];
            let seconds = |finished: &Finished| format!("{:.2} s", finished.elapsed.as_secs_f64());
            let [in_one, in_two] = finished.each_ref().map(seconds);
            let good = finished.each_ref().map(|finished| finished.equals(native));
            let word = if good == [true; 2] { "yes" } else { "NO" };
            println!("     {name:<14} {:>9} {in_one:>12} {in_two:>12}   {word}", seconds(native));
            for ((tenant, finished), good) in tenants.iter().zip(&finished).zip(good) {
                if !good {
                    print!("     output in {}\n{}", tenant.name, finished.complaint());
                    print!("     output on this host\n{}", native.complaint());
                }
            }
            if *name == PICTURE {
                println!("     as drawn in {}:", tenants[0].name);
                print!("{}", indented(&finished[0].stdout));
            }
            same.iter_mut().zip(good).for_each(|(same, good)| *same += usize::from(good));
        }
        for (tenant, same) in tenants.iter().zip(same) {
            let all = self.native.len();
            let what = format!(
                "{same} of {all} programs print the same in {} (kernel {}) as on this host",
                tenant.name, tenant.kernel
            );
            checks.expect(what, same == all);
        }
        Ok(())
    }

    /// Processes with different data share the GPU; no process may see the data of another.
    pub(super) fn run_together(&self, tenants: [&DemoTenant; 2], checks: &mut Checks) -> Result<()> {
        println!("   two processes in each VM at once, each with numbers of its own");
        let seeds = [(tenants[0], "11"), (tenants[0], "12"), (tenants[1], "13"), (tenants[1], "14")];
        let words = |seed| ["vector_add", "200000", seed];
        let running = seeds.map(|(tenant, seed)| start(tenant, &words(seed)));
        let mut good = 0;
        for ((tenant, seed), process) in seeds.into_iter().zip(running) {
            let finished = Finished::from(process?.wait()?);
            let native = self.natively("vector_add", &words(seed)[1..])?;
            let same = finished.equals(&native);
            good += usize::from(same);
            println!("     {:<9}| {}", tenant.name, finished.stdout.trim().replace('\n', " — "));
            if !same {
                print!("     output on this host\n{}", native.complaint());
            }
        }
        checks
            .expect(format!("{good} of 4 at once print the same as each does alone on this host"), good == 4);
        Ok(())
    }
}

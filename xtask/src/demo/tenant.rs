//! A VM of the demo: made through the management API, booted with the arguments that the API has for QEMU.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sluice_tests::debian::Kernel;
use sluice_tests::image::Image;
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::Program;
use sluice_tests::progress::step;
use sluice_tests::vm::{Gpu, Guest, Machine};

use super::operator::{Operator, indented};

/// Requested properties of a VM.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    /// MiB of device memory.
    pub(super) quota: &'static str,
    /// Its share of GPU time in relation to others.
    pub(super) weight: u64,
}

/// A VM that exists in the API, and QEMU's arguments to connect it.
pub(super) struct DemoVm {
    name: &'static str,
    qemu: Vec<String>,
}

pub(super) struct DemoTenant {
    pub(super) name: &'static str,
    /// Version of its guest's kernel.
    pub(super) kernel: String,
    pub(super) guest: Guest,
}

/// Makes a VM through the API.
pub(super) fn create(operator: &Operator, wanted: &Wanted, kernel: &Kernel) -> Result<DemoVm> {
    let (memory, weight) = (format!("{}MiB", wanted.quota), wanted.weight.to_string());
    let scanouts = kernel.series.max_outputs().to_string();
    let mut words = vec!["create", wanted.name, "--organisation", "acme", "--memory", &memory];
    words.extend(["--weight", &weight, "--guest-memory", "1GiB"]);
    if scanouts != "0" {
        words.extend(["--scanouts", &scanouts]);
    }
    let vm = operator.tell(&words)?;
    let qemu = vm["connect"]["qemu"].as_array().context("the API has no arguments for QEMU")?;
    let qemu: Vec<String> = qemu.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    print!("{}", indented(&format!("qemu {}", qemu.join(" "))));
    Ok(DemoVm { name: wanted.name, qemu })
}

impl DemoTenant {
    /// Boots the VM, with Sluice's guest library and the programs in it.
    pub(super) fn boot(
        made: &DemoVm,
        kernel: &Kernel,
        binaries: &Binaries,
        programs: &[Program],
    ) -> Result<Self> {
        let image = Image::with_sluice(kernel, binaries, programs)?;
        let machine = Machine {
            gpu: Gpu::Arguments(made.qemu.clone()),
            ..Machine::new(&format!("demo-{}", made.name))
        };
        let booting = Instant::now();
        let guest = Guest::boot(&machine, kernel, &image)?;
        let (seconds, by) = (booting.elapsed().as_secs_f64(), guest.accelerator().name());
        step(format!("{} has booted kernel {} in {seconds:.1} s ({by})", made.name, kernel.version));
        ensure!(
            guest.hello()?.render_node,
            "{} has no render node:\n{}",
            made.name,
            process::tail(&guest.console(), 30)
        );
        Ok(Self { name: made.name, kernel: kernel.series.to_string(), guest })
    }
}

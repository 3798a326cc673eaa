//! Programs in a virtual machine of Cloud Hypervisor, which needs KVM: so it runs, with the host's side of Sluice, in a
//! virtual machine of QEMU whose processor can do what KVM wants, emulated like everything else.
//!
//! `SLUICE_CLOUD_HYPERVISOR` names the program; without one nothing is run, and that is said.

use std::env;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::host::run_native;
use sluice_tests::image::Image;
use sluice_tests::matrix::{self, Place};
use sluice_tests::paths::Binaries;
use sluice_tests::process;
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::{Accelerator, Guest, GuestCommand, Machine};
use sluice_tests::way::Mode;

/// Everything is emulated twice.
const PATIENCE: Duration = Duration::from_secs(600);
const SERIES: Series = Series::V6_12;
/// What the inner guest runs: calls, copies, streams, errors.
const PROGRAMS: [&str; 6] = ["vector_add", "memory", "streams", "reduction", "errors", "matmul_tiled"];
/// The host's side of Sluice, all in one folder.
const HOST: [&str; 9] = [
    "sluice",
    "sluiced",
    "sluice-launcher",
    "sluice-device",
    "sluice-worker",
    "sluice-arbiter",
    "sluice-inventory",
    "libsoftgpu_cuda.so",
    "libsoftgpu_nvml.so",
];

fn place(mode: Mode) -> Place {
    let transport = mode.name().to_uppercase();
    let kernel = format!("{SERIES}, {}", SERIES.distribution());
    Place::new(&transport, "Cloud Hypervisor, `--generic-vhost-user`", &kernel)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_cloud_hypervisor() -> Result<()> {
    let Some(vmm) = env::var_os("SLUICE_CLOUD_HYPERVISOR") else {
        println!("SKIP: not run: no binary (SLUICE_CLOUD_HYPERVISOR names one)");
        return matrix::not_run(place(Mode::Flat), "no binary");
    };
    let binaries = Binaries::locate()?;
    let programs: Vec<Program> = programs::compile_all()?
        .into_iter()
        .filter(|program| PROGRAMS.contains(&program.name.as_str()))
        .collect();
    ensure!(programs.len() == PROGRAMS.len(), "not all of {PROGRAMS:?} are programs");

    let inner = Kernel::fetch(SERIES)?;
    let outer = Kernel::fetch_with(SERIES, &["kvm_amd"])?;
    let image = outer_image(&outer, &inner, &binaries, &programs, Path::new(&vmm))?;
    let machine = Machine {
        memory_mib: 3072,
        cpus: 2,
        nested: true,
        accelerator: Some(Accelerator::Tcg),
        ..Machine::new("cloud-hypervisor")
    };
    let guest = Guest::boot(&machine, &outer, &image)?;
    let root = |script: &str| GuestCommand::script(script).user("root").limit(PATIENCE);
    let host = guest.start(&root("exec /usr/libexec/sluice/sluice host --dir /run/vm --trust-vmm-memory"))?;
    host.wait_for_output("vhost-user socket:", PATIENCE)?;
    let version = guest.start(&root("cloud-hypervisor --version"))?.wait()?.expect_success()?;
    let vmm = guest.start(&root(
        "cloud-hypervisor --cpus boot=1 --memory size=1024M,shared=on --kernel /boot/vmlinuz --initramfs /boot/initrd \
         --cmdline 'console=ttyS0 panic=-1 quiet' --serial file=/run/inner --console off --seccomp false \
         --generic-vhost-user socket=/run/vm/vm-1.sock,device_type=16,queue_sizes=[1024,16]; \
         echo \"ended with $?\"; cat /run/inner",
    ))?;
    let ended = vmm.wait()?;
    let said = || process::tail(&ended.stdout, 60);
    let console = ended.stdout.replace('\r', "");
    let mode = Mode::ALL.into_iter().find(|mode| console.contains(&format!("== mode {mode}\n")));
    let mode =
        mode.with_context(|| format!("the inner guest has no device:\n{}\n{}", said(), ended.stderr))?;
    for program in &programs {
        let native = run_native(&binaries, &program.path, &[], PATIENCE)?;
        let printed = between(&console, &program.name)
            .with_context(|| format!("{} did not end in the inner guest:\n{}", program.name, said()))?;
        ensure!(printed == native.stdout, "{}: natively\n{}\nthere\n{printed}", program.name, native.stdout);
    }
    matrix::ran(place(mode), version.stdout.trim(), &inner.version)?;
    guest.power_off()
}

/// What a program printed, if it ended well.
fn between<'a>(console: &'a str, program: &str) -> Option<&'a str> {
    let (_, after) = console.split_once(&format!("== {program} begins\n"))?;
    Some(after.split_once(&format!("== {program} ended with 0\n"))?.0)
}

/// The guest of QEMU: it has the host's side, the VMM, and what that boots.
fn outer_image(
    outer: &Kernel,
    inner: &Kernel,
    binaries: &Binaries,
    programs: &[Program],
    vmm: &Path,
) -> Result<Image> {
    let mut image = Image::new(outer, binaries)?;
    for file in HOST {
        image.program(&binaries.get(file)?, &format!("usr/libexec/sluice/{file}"))?;
    }
    image.program(vmm, "usr/local/bin/cloud-hypervisor")?;
    image.file("boot/vmlinuz", 0o644, fs::read(&inner.image).context("reading the inner kernel")?);
    let initramfs = tempfile::NamedTempFile::new().context("a file for the inner image")?;
    inner_image(inner, binaries, programs)?.write(initramfs.path())?;
    image.file("boot/initrd", 0o644, fs::read(initramfs.path()).context("reading the inner image")?);
    Ok(image)
}

/// The guest of the VMM. It has a console only, so it runs the programs by itself, prints what they print, and ends.
fn inner_image(kernel: &Kernel, binaries: &Binaries, programs: &[Program]) -> Result<Image> {
    let mut image = Image::with_sluice(kernel, binaries, programs)?;
    let mut script = String::from("#!/bin/sh\nexport PATH=/usr/local/bin:/usr/bin\n");
    for mode in Mode::ALL {
        script.push_str(&format!(
            "su cuda -c 'SLUICE_TRANSPORT={mode} vector_add' > /dev/null 2>&1 && echo '== mode {mode}'\n"
        ));
    }
    for program in programs {
        let name = &program.name;
        script.push_str(&format!(
            "echo '== {name} begins'; su cuda -c '{name} 2> /dev/null'; echo \"== {name} ended with $?\"\n"
        ));
    }
    image.file("etc/alone", 0o755, script.into_bytes());
    Ok(image)
}

#[test]
fn what_a_program_printed_is_found_on_a_console() {
    let console = "boot\n== a begins\none\ntwo\n== a ended with 0\n== b begins\n== b ended with 1\n";
    assert_eq!(between(console, "a"), Some("one\ntwo\n"));
    assert_eq!(between(console, "b"), None);
    assert_eq!(between(console, "c"), None);
}

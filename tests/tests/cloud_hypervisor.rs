//! Programs in a virtual machine of Cloud Hypervisor, nested in one of QEMU.
//!
//! `SLUICE_CLOUD_HYPERVISOR` names the program; without one the test is skipped with a reason.

use std::env;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use sluice_tests::debian::Kernel;
use sluice_tests::matrix::{self, Place};
use sluice_tests::nested::{self, SERIES, Vmm};
use sluice_tests::way::Mode;

/// Version 52 has another option name for the kind of device.
const SCRIPT: &str = "kind=device_type; cloud-hypervisor --help | grep -q virtio_id= && kind=virtio_id; \
     cloud-hypervisor --cpus boot=1 --memory size=1024M,shared=on --kernel /boot/vmlinuz --initramfs /boot/initrd \
     --cmdline 'console=ttyS0 panic=-1 quiet' --serial file=/run/inner --console off --seccomp false \
     --generic-vhost-user socket=/run/vm/vm-1.sock,$kind=16,queue_sizes=[1024,16]; \
     echo \"ended with $?\"; cat /run/inner";

fn place(transport: &str) -> Place {
    let kernel = format!("{SERIES}, {}", SERIES.distribution());
    Place::new(&transport.to_uppercase(), "Cloud Hypervisor, `--generic-vhost-user`", &kernel)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_cloud_hypervisor() -> Result<()> {
    let Some(program) = env::var_os("SLUICE_CLOUD_HYPERVISOR") else {
        sluice_skip::skip("not run: no binary (SLUICE_CLOUD_HYPERVISOR names one)");
        return matrix::not_run(place(Mode::Flat.name()), "no binary");
    };
    let kernel = Kernel::fetch(SERIES)?;
    let vmm = Vmm {
        name: "cloud-hypervisor",
        program: Path::new(&program),
        helpers: &[],
        script: SCRIPT,
        kernel: fs::read(&kernel.image).context("reading the inner kernel")?,
        files: &[],
        ways: &Mode::ALL.map(Mode::name),
        end: "poweroff -f",
    };
    let ran = nested::run(&vmm, &kernel)?;
    matrix::ran(place(&ran.way), &ran.version, &kernel.version)
}

//! Programs in a virtual machine of Firecracker, nested in one of QEMU. It has no vhost-user, so they reach their device by its virtual
//! socket.
//!
//! `SLUICE_FIRECRACKER` names the program, of version 1.8 or newer, which describes its devices by ACPI: Debian's kernel takes no
//! other word for them. Without one nothing is run, and that is said.

use std::env;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_tests::debian::Kernel;
use sluice_tests::matrix::{self, Place};
use sluice_tests::nested::{self, SERIES, Vmm};
use sluice_tests::paths;

/// Its console is its standard output.
const SCRIPT: &str =
    "firecracker --no-api --no-seccomp --config-file /etc/firecracker.json; echo \"ended with $?\"";
/// What its machine has of virtio is on no PCI bus.
const MODULES: [&str; 2] = ["virtio_mmio", "vmw_vsock_virtio_transport"];

fn place() -> Place {
    Place::new("VSOCK", "Firecracker", &format!("{SERIES}, {}", SERIES.distribution()))
}

/// The machine, with the body of `PUT /vsock` that is shipped, for the VM of `sluice host`.
fn machine() -> Result<Value> {
    let shipped = paths::workspace().join("vmm-configs/firecracker-vsock.json");
    let mut vsock: Value =
        serde_json::from_str(&fs::read_to_string(&shipped).context("reading the file for Firecracker")?)?;
    vsock["uds_path"] = json!("/run/vm/vm-1.vsock");
    Ok(json!({
        "boot-source": {
            "kernel_image_path": "/boot/vmlinuz",
            "initrd_path": "/boot/initrd",
            // It has no power button, and ends when the guest resets its keyboard's controller.
            "boot_args": "console=ttyS0 reboot=k panic=1 quiet",
        },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 1024 },
        "vsock": vsock,
    }))
}

// Promise: V21
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_firecracker() -> Result<()> {
    let Some(program) = env::var_os("SLUICE_FIRECRACKER") else {
        println!("SKIP: not run: no binary (SLUICE_FIRECRACKER names one)");
        return matrix::not_run(place(), "no binary");
    };
    let kernel = Kernel::fetch_with(SERIES, &MODULES)?;
    let vmm = Vmm {
        name: "firecracker",
        program: Path::new(&program),
        script: SCRIPT,
        kernel: kernel.elf()?,
        files: &[("etc/firecracker.json", machine()?.to_string().into_bytes())],
        ways: &["vsock"],
        end: "reboot -f",
    };
    let ran = nested::run(&vmm, &kernel)?;
    matrix::ran(place(), &ran.version, &kernel.version)
}

#[test]
fn what_firecracker_is_given_is_a_kernel_and_a_machine() -> Result<()> {
    let machine = machine()?;
    ensure!(machine["vsock"] == json!({ "guest_cid": 3, "uds_path": "/run/vm/vm-1.vsock" }), "{machine}");
    let kernel = Kernel::fetch(SERIES)?.elf()?;
    // An executable for x86-64, whole: its section table is the last of it.
    let word = |at: usize| u64::from_le_bytes(kernel[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| u64::from(u16::from_le_bytes(kernel[at..at + 2].try_into().expect("2 bytes")));
    ensure!(kernel.starts_with(b"\x7fELF\x02\x01") && (half(16), half(18)) == (2, 62), "not an executable");
    let end = word(40) + half(58) * half(60);
    ensure!(end <= kernel.len() as u64, "{end} bytes, and there are {}", kernel.len());
    Ok(())
}

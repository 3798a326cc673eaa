//! Programs in a virtual machine of Cloud Hypervisor, nested in one of QEMU.
//!
//! `SLUICE_CLOUD_HYPERVISOR` names the program; its `ch-remote` is beside it, as after a build. Without one the tests are skipped with
//! a reason.

use std::fs;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sluice_tests::debian::Kernel;
use sluice_tests::matrix::{self, Place};
use sluice_tests::nested::{self, SERIES, Vmm};
use sluice_tests::paths;
use sluice_tests::way::Mode;

/// Version 52 has another option name for the kind of device.
const BY_OPTIONS: &str = "kind=device_type; cloud-hypervisor --help | grep -q virtio_id= && kind=virtio_id; \
     cloud-hypervisor --cpus boot=1 --memory size=1024M,shared=on --kernel /boot/vmlinuz --initramfs /boot/initrd \
     --cmdline 'console=ttyS0 panic=-1 quiet' --serial file=/run/inner --console off --seccomp false \
     --generic-vhost-user socket=/run/vm/vm-1.sock,$kind=16,queue_sizes=[1024,16]; \
     echo \"ended with $?\"; cat /run/inner";
/// `ch-remote` sends the body as it is to `PUT /api/v1/vm.create`.
const BY_API: &str = "cloud-hypervisor --api-socket path=/run/api.sock --seccomp false & \
     until [ -S /run/api.sock ]; do sleep 0.1; done; \
     for request in 'create /etc/machine.json' boot; do ch-remote --api-socket /run/api.sock $request || kill $!; done; \
     wait $!; echo \"ended with $?\"; cat /run/inner";

fn place(transport: &str, device: &str) -> Place {
    let kernel = format!("{SERIES}, {}", SERIES.distribution());
    Place::new(&transport.to_uppercase(), &format!("Cloud Hypervisor, {device}"), &kernel)
}

/// The body that creates a machine, with the shipped members for its device.
fn machine() -> Result<Value> {
    let shipped = paths::workspace().join("vmm-configs/cloud-hypervisor.json");
    let mut body: Value = serde_json::from_str(
        &fs::read_to_string(&shipped).context("reading the file for Cloud Hypervisor")?,
    )?;
    body["memory"]["size"] = json!(1 << 30);
    body["generic_vhost_user"][0]["socket"] = json!("/run/vm/vm-1.sock");
    body["cpus"] = json!({ "boot_vcpus": 1, "max_vcpus": 1 });
    body["payload"] = json!({
        "kernel": "/boot/vmlinuz",
        "initramfs": "/boot/initrd",
        "cmdline": "console=ttyS0 panic=-1 quiet",
    });
    body["serial"] = json!({ "mode": "File", "file": "/run/inner" });
    body["console"] = json!({ "mode": "Off" });
    Ok(body)
}

/// Runs programs in a machine that a script starts, if the program is available.
fn programs_print_the_same(device: &str, helpers: &[&str], script: &str, machine: &Value) -> Result<()> {
    let usual = place(Mode::Flat.name(), device);
    let Some(programs) = nested::find(&usual, "SLUICE_CLOUD_HYPERVISOR", "cloud-hypervisor", helpers)? else {
        return Ok(());
    };
    let kernel = Kernel::fetch(SERIES)?;
    let vmm = Vmm {
        name: "cloud-hypervisor",
        programs: &programs,
        script,
        kernel: fs::read(&kernel.image).context("reading the inner kernel")?,
        files: &[("etc/machine.json", serde_json::to_vec(machine)?)],
        ways: &Mode::ALL.map(Mode::name),
        end: "poweroff -f",
    };
    let ran = nested::run(&vmm, &kernel)?;
    matrix::ran(place(&ran.way, device), &ran.version, &kernel.version)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_cloud_hypervisor() -> Result<()> {
    programs_print_the_same("`--generic-vhost-user`", &[], BY_OPTIONS, &Value::Null)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_cloud_hypervisor_with_the_shipped_body_of_its_api() -> Result<()> {
    programs_print_the_same("`PUT /vm.create`", &["ch-remote"], BY_API, &machine()?)
}

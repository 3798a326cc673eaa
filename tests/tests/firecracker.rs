//! Programs in a virtual machine of Firecracker, nested in one of QEMU. It has no vhost-user, so they reach their device by its virtual
//! socket.
//!
//! `SLUICE_FIRECRACKER` names the program, of version 1.8 or newer, which describes its devices by ACPI: Debian's kernel accepts no
//! other description. Its jailer is beside it, as in the archive of a release. Without one the test is skipped with a reason.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_tests::debian::Kernel;
use sluice_tests::matrix::{self, Place};
use sluice_tests::nested::{self, SERIES, Vmm};
use sluice_tests::paths;

/// The machine's console is the program's standard output.
const SCRIPT: &str = "firecracker --no-api --config-file /etc/firecracker.json; echo \"ended with $?\"";
/// Firecracker as in production: as a user of its own, in a root of its own, where the socket of its VM's device is mounted. The
/// jailer needs a root that is mounted on another, unlike a machine's first. `vm-socket-gid` would give the socket to the group.
const JAILED: &str = "set -e; jail=/host/srv/jailer/firecracker/web-1/root; socket=vm-1.vsock_29548
mkdir /host; mount -t tmpfs host /host; mkdir -p /host/proc /host/bin $jail/run
mount -t proc proc /host/proc
cp /usr/local/bin/jailer /usr/local/bin/firecracker /host/bin
cp /boot/vmlinuz /boot/initrd /etc/firecracker.json $jail
chown -R cuda:cuda $jail
chgrp cuda /run/vm/$socket; chmod 660 /run/vm/$socket
touch $jail/run/$socket; mount -o bind /run/vm/$socket $jail/run/$socket
exec chroot /host /bin/jailer --id web-1 --exec-file /bin/firecracker --uid 1000 --gid 1000 --chroot-base-dir /srv/jailer -- \
    --no-api --config-file /firecracker.json";
const TRIES: u32 = 3;
/// Modules for the machine's virtio devices, which are on no PCI bus.
const MODULES: [&str; 2] = ["virtio_mmio", "vmw_vsock_virtio_transport"];

/// True if a processor faulted while it handled a fault. The emulated one does so now and then (once in nine runs), with any
/// guest; over a stream, no part of Sluice reaches the guest's memory or its processor. An ending guest may also end so.
fn is_lost(said: &str) -> bool {
    let ended = ["reboot: Restarting", "Kernel panic"].iter().any(|end| said.contains(end));
    said.contains("KVM_EXIT_SHUTDOWN") && !ended
}

fn place(how: &str) -> Place {
    Place::new("VSOCK", how, &format!("{SERIES}, {}", SERIES.distribution()))
}

/// The machine, with the shipped body of `PUT /vsock`, for a VM whose sockets have this name in its own view.
fn machine(kernel: &str, initrd: &str, socket: &str) -> Result<Value> {
    let shipped = paths::workspace().join("vmm-configs/firecracker-vsock.json");
    let mut vsock: Value =
        serde_json::from_str(&fs::read_to_string(&shipped).context("reading the file for Firecracker")?)?;
    vsock["uds_path"] = json!(socket);
    Ok(json!({
        "boot-source": {
            "kernel_image_path": kernel,
            "initrd_path": initrd,
            // It has no power button, and ends when the guest resets its keyboard's controller.
            "boot_args": "console=ttyS0 reboot=k panic=1 quiet",
        },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 1024 },
        "vsock": vsock,
    }))
}

/// Runs programs in a machine that a script starts, if the program is available.
fn programs_print_the_same(place: Place, helpers: &[&str], script: &str, machine: &Value) -> Result<()> {
    let Some(programs) = nested::find(&place, "SLUICE_FIRECRACKER", "firecracker", helpers)? else {
        return Ok(());
    };
    let kernel = Kernel::fetch_with(SERIES, &MODULES)?;
    let vmm = Vmm {
        name: "firecracker",
        programs: &programs,
        script,
        kernel: kernel.elf()?,
        files: &[("etc/firecracker.json", machine.to_string().into_bytes())],
        ways: &["vsock"],
        end: "reboot -f",
    };
    let mut left = TRIES;
    let ran = loop {
        left -= 1;
        match nested::run(&vmm, &kernel) {
            Err(error) if left > 0 && is_lost(&format!("{error:#}")) => {
                println!("  once more: {error:#}")
            }
            ran => break ran?,
        }
    };
    matrix::ran(place, &ran.version, &kernel.version)
}

// Promise: V21
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_under_firecracker() -> Result<()> {
    let machine = machine("/boot/vmlinuz", "/boot/initrd", "/run/vm/vm-1.vsock")?;
    programs_print_the_same(place("Firecracker"), &[], SCRIPT, &machine)
}

// Promise: V21
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_in_a_jail_of_firecracker() -> Result<()> {
    let machine = machine("/vmlinuz", "/initrd", "/run/vm-1.vsock")?;
    programs_print_the_same(place("Firecracker, in its jail"), &["jailer"], JAILED, &machine)
}

#[test]
fn firecracker_gets_an_elf_kernel_and_a_machine_with_vsock() -> Result<()> {
    let machine = machine("/boot/vmlinuz", "/boot/initrd", "/run/vm/vm-1.vsock")?;
    ensure!(machine["vsock"] == json!({ "guest_cid": 3, "uds_path": "/run/vm/vm-1.vsock" }), "{machine}");
    let kernel = Kernel::fetch(SERIES)?.elf()?;
    // A whole executable for x86-64: its section table comes last.
    let word = |at: usize| u64::from_le_bytes(kernel[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| u64::from(u16::from_le_bytes(kernel[at..at + 2].try_into().expect("2 bytes")));
    ensure!(kernel.starts_with(b"\x7fELF\x02\x01") && (half(16), half(18)) == (2, 62), "not an executable");
    let end = word(40) + half(58) * half(60);
    ensure!(end <= kernel.len() as u64, "{end} bytes, and there are {}", kernel.len());
    Ok(())
}

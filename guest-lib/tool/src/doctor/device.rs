//! The carrier of the calls out of this system: a virtio GPU, a socket, or none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sluice_guest_node::{DeviceKind, Mode};
use sluice_protocol::calls;

use super::{Finding, Verdict};
use crate::node::{self, GPU, VSOCK};

const TRANSPORT: &str = "transport";
const DEVICE: &str = "device";
const PERMISSION: &str = "permission";

/// The places to check; tests use another root.
#[derive(Debug)]
pub(super) struct System {
    root: PathBuf,
    release: String,
    /// `SLUICE_SOCKET`.
    socket: Option<PathBuf>,
    /// `SLUICE_TRANSPORT`.
    forced: Option<String>,
    /// Describes a render node.
    look: fn(&Path) -> anyhow::Result<DeviceKind>,
}

impl System {
    pub(super) fn this() -> Self {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            root: "/".into(),
            release: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            socket: text("SLUICE_SOCKET").map(Into::into),
            forced: text("SLUICE_TRANSPORT"),
            look: node::look,
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Devices of one kind on the virtio bus.
    fn virtio(&self, kind: &str) -> Vec<PathBuf> {
        node::virtio(&self.root, kind)
    }

    /// True if this kernel has a module, loaded or not, or has it built in.
    fn has_module(&self, name: &str) -> bool {
        self.path("sys/module").join(name).exists()
            || ["usr/lib/modules", "lib/modules"].iter().any(|folder| {
                let folder = self.path(folder).join(&self.release);
                ["modules.builtin", "modules.dep"].iter().any(|list| {
                    fs::read_to_string(folder.join(list)).is_ok_and(|text| {
                        text.lines().any(|line| {
                            let path = line.split(':').next().unwrap_or_default();
                            let file = path.rsplit('/').next().unwrap_or_default();
                            file.split('.').next().unwrap_or_default().replace('-', "_") == name
                        })
                    })
                })
            })
    }
}

/// Checks the transport and every device on it.
pub(super) fn look(system: &System) -> Vec<Finding> {
    let forced = system.forced.as_deref().filter(|name| *name != "auto");
    let mut findings = Vec::new();
    if let Some(name) = forced {
        let found = format!("SLUICE_TRANSPORT is {name}: programs that inherit it try no other transport");
        findings.push(Finding::new("environment", Verdict::Poor, found, "unset it, unless it is intended"));
    }
    match (forced, system.socket.as_deref()) {
        (None | Some("direct"), Some(socket)) => {
            findings.push(connected("DIRECT", socket));
            return findings;
        }
        (Some("vsock"), Some(socket)) => {
            findings.push(connected("VSOCK", socket));
            return findings;
        }
        (Some("direct"), None) => {
            let advice = "SLUICE_SOCKET has to name the device's socket";
            findings.push(Finding::new(TRANSPORT, Verdict::Bad, "SLUICE_SOCKET is not set", advice));
            return findings;
        }
        (Some("vsock"), None) => {
            let advice = "plug a virtual socket device in, and load vmw_vsock_virtio_transport";
            let none = || Finding::new(TRANSPORT, Verdict::Bad, "no virtual socket is plugged in", advice);
            findings.push(vsock(system).unwrap_or_else(none));
            return findings;
        }
        _ => {}
    }
    let gpus = system.virtio(GPU);
    if gpus.is_empty() {
        findings.push(no_gpu(system, forced.is_none()));
        return findings;
    }
    for gpu in &gpus {
        findings.extend(virtio_gpu(system, gpu));
    }
    let is_way = |finding: &Finding| finding.name == TRANSPORT;
    if forced.is_none() && !findings.iter().any(is_way) {
        // Programs try the socket next, even if there is a device that they may not open.
        findings.extend(vsock(system));
        if findings.iter().any(is_way) {
            let closed = findings.iter_mut().filter(|finding| finding.name == PERMISSION);
            closed.for_each(|finding| finding.verdict = Verdict::Poor);
        }
    }
    if findings.iter().any(is_way) {
        // One device is enough; other GPUs beside it are not Sluice's.
        findings.retain(|finding| !(finding.name == DEVICE && finding.verdict == Verdict::Bad));
    }
    findings
}

/// A socket of a device, for containers and programs of the host.
fn connected(way: &str, socket: &Path) -> Finding {
    let shown = socket.display();
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => {
            Finding::good(TRANSPORT, format!("{way}: SLUICE_SOCKET is {shown}, and accepts connections"))
        }
        Err(error) => {
            let advice = match error.kind() {
                io::ErrorKind::NotFound => "is the socket mounted into this container?",
                io::ErrorKind::PermissionDenied => {
                    "only its owner and its group may connect: see vm-socket-gid on the host"
                }
                _ => "is the host's sluiced running, and the VM made with --direct?",
            };
            Finding::new(TRANSPORT, Verdict::Bad, format!("SLUICE_SOCKET is {shown}: {error}"), advice)
        }
    }
}

/// There is no graphics device on the virtio bus.
fn no_gpu(system: &System, may_go_on: bool) -> Finding {
    let (release, driver) = (&system.release, system.has_module("virtio_gpu"));
    if may_go_on && let Some(finding) = vsock(system) {
        return finding;
    }
    let advice = if driver {
        "on the host: `sluice create NAME` prints what to add to the VMM's command line; the VM has to be started anew"
    } else {
        "on the host: `sluice create NAME` prints what to add to the VMM's command line; and this kernel has no virtio_gpu, so \
         install one that has (Debian: linux-image-amd64 instead of the cloud kernel; Ubuntu: linux-modules-extra)"
    };
    Finding::new(TRANSPORT, Verdict::Bad, format!("no virtio GPU is plugged in (kernel {release})"), advice)
}

/// A virtual socket, if there is no device that could share memory.
fn vsock(system: &System) -> Option<Finding> {
    let there = system.path("dev/vsock").exists() && !system.virtio(VSOCK).is_empty();
    there.then(|| {
        let release = &system.release;
        let found = format!("VSOCK: a virtual socket is plugged in, and no virtio GPU of Sluice (kernel {release})");
        let advice = "it works without shared memory, hence slower, if the host serves it (see start); plug in Sluice's virtio GPU where \
                      the VMM and the kernel can";
        Finding::new(TRANSPORT, Verdict::Poor, found, advice)
    })
}

/// One graphics device on the virtio bus.
fn virtio_gpu(system: &System, gpu: &Path) -> Vec<Finding> {
    let name = gpu.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let release = &system.release;
    if !gpu.join("driver").exists() {
        let finding = if system.has_module("virtio_gpu") {
            let advice = "`sluice-guest suspension post` after a suspension, else `modprobe virtio_gpu`, then the kernel's log (dmesg). \
                          A probe that fails, or answers that time out, mean that the host's device has ended or that the VM's memory is not shared with it (QEMU: \
                          memory-backend-memfd,share=on; Cloud Hypervisor: --memory shared=on); -22 before Linux 6.12 means that it \
                          wants one output (max_outputs=1)";
            Finding::new(
                DEVICE,
                Verdict::Bad,
                format!("{name} is a virtio GPU, and no driver drives it"),
                advice,
            )
        } else {
            let advice = "install a kernel that has it (Debian: linux-image-amd64 instead of the cloud kernel; Ubuntu: linux-modules-extra)";
            Finding::new(
                DEVICE,
                Verdict::Bad,
                format!("{name} is a virtio GPU, and kernel {release} has no virtio_gpu"),
                advice,
            )
        };
        return vec![finding];
    }
    let nodes = node::render_nodes(&system.root, gpu);
    if nodes.is_empty() {
        let advice =
            "look for virtio_gpu in the kernel's log (dmesg): the driver has it and offers no render node";
        return vec![Finding::new(DEVICE, Verdict::Bad, format!("{name} has no render node"), advice)];
    }
    nodes.iter().flat_map(|node| render_node(system, node)).collect()
}

fn render_node(system: &System, name: &str) -> Vec<Finding> {
    let path = system.path("dev/dri").join(name);
    let shown = format!("/dev/dri/{name}");
    if !path.exists() {
        let advice = "the kernel has it and /dev does not: is this a container? Give it the device (--device=/dev/dri)";
        return vec![Finding::new(DEVICE, Verdict::Bad, format!("there is no {shown}"), advice)];
    }
    let kind = match (system.look)(&path) {
        Ok(kind) => kind,
        Err(error) => {
            let denied = error
                .downcast_ref::<rustix::io::Errno>()
                .is_some_and(|error| matches!(*error, rustix::io::Errno::ACCESS | rustix::io::Errno::PERM));
            let advice = if denied {
                "this user may not: the udev rule of the package sluice-guest opens it to everybody (`udevadm trigger`), or add the \
                 user to the group that owns it (`usermod -a -G render USER`, then log in anew)"
            } else {
                "look for virtio_gpu in the kernel's log (dmesg)"
            };
            let why = error.root_cause();
            return vec![Finding::new(
                PERMISSION,
                Verdict::Bad,
                format!("{shown} cannot be opened: {why}"),
                advice,
            )];
        }
    };
    match kind {
        DeviceKind::Other | DeviceKind::OtherVirtio => {
            let advice = "Sluice's device answers to capset 27; this one is QEMU's own display, or another's. On the host: `sluice \
                          create NAME` prints what to add to the VMM's command line";
            vec![Finding::new(DEVICE, Verdict::Bad, format!("{shown} is {}", node::whose(kind)), advice)]
        }
        DeviceKind::Sluice { version, abilities } => {
            let ours = calls::VERSION;
            let mut findings = vec![Finding::good(DEVICE, format!("{shown} is a Sluice device"))];
            findings.push(if version == ours {
                Finding::good("version", format!("host and guest speak version {ours}"))
            } else {
                let older =
                    if version < ours { "the host's Sluice is older" } else { "this package is older" };
                let advice = "install the guest's package of the host's version";
                let found = format!("the host speaks version {version}, this guest {ours}: {older}");
                Finding::new("version", Verdict::Bad, found, advice)
            });
            let best = Mode::of(abilities).first();
            findings.extend(best.map(|mode| Finding::good(TRANSPORT, node::way(*mode))));
            findings
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use sluice_guest_node::Abilities;

    use super::*;

    const RELEASE: &str = "6.1.0-44-amd64";

    /// A Sluice device with this version of the calls.
    const fn device(version: u32, three_d: bool) -> DeviceKind {
        DeviceKind::Sluice { version, abilities: Abilities { three_d, blobs: false, contexts: false } }
    }

    struct Fake {
        folder: tempfile::TempDir,
        system: System,
    }

    impl Fake {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let system = System {
                root: folder.path().to_owned(),
                release: RELEASE.to_owned(),
                socket: None,
                forced: None,
                look: |_| Ok(device(calls::VERSION, true)),
            };
            Self { folder, system }
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn module(&self) {
            let list = "kernel/drivers/gpu/drm/virtio/virtio-gpu.ko.xz: kernel/drivers/gpu/drm/drm.ko.xz\n";
            self.file(&format!("lib/modules/{RELEASE}/modules.dep"), list);
        }

        fn gpu(&self, driven: bool, node: bool) {
            // Linux's layout on a PCI bus: the node is below the slot.
            self.file("sys/devices/pci/slot/virtio3/device", "0x0010\n");
            self.link("sys/bus/virtio/devices/virtio3", "sys/devices/pci/slot/virtio3");
            if driven {
                self.link("sys/devices/pci/slot/virtio3/driver", "sys");
            }
            if node {
                self.node();
                self.file("dev/dri/renderD128", "");
            }
        }

        fn node(&self) {
            self.link("sys/class/drm/renderD128/device", "sys/devices/pci/slot");
        }

        fn link(&self, path: &str, target: &str) {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(self.folder.path().join(target), path).unwrap();
        }

        fn says(&self, name: &str, verdict: Verdict, found: &str, advice: &str) {
            let findings = look(&self.system);
            let finding = findings.iter().find(|finding| finding.name == name);
            let finding = finding.unwrap_or_else(|| panic!("nothing about {name}: {findings:?}"));
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(finding.found.contains(found) && finding.advice.contains(advice), "{finding:?}");
        }
    }

    // Promise: G21
    #[test]
    fn missing_device_is_reported_with_advice_to_plug_one_in() {
        let fake = Fake::new();
        fake.says(TRANSPORT, Verdict::Bad, "no virtio GPU", "no virtio_gpu, so install");
        fake.module();
        fake.says(TRANSPORT, Verdict::Bad, "no virtio GPU", "`sluice create NAME`");
        fake.file("sys/bus/virtio/devices/virtio1/device", "0x0013\n");
        fake.file("dev/vsock", "");
        fake.says(TRANSPORT, Verdict::Poor, "VSOCK", "slower");
    }

    // Promise: G21
    #[test]
    fn undriven_device_is_distinguished_from_a_kernel_without_the_driver() {
        let fake = Fake::new();
        fake.gpu(false, false);
        fake.says(DEVICE, Verdict::Bad, "has no virtio_gpu", "linux-modules-extra");
        fake.module();
        fake.says(DEVICE, Verdict::Bad, "no driver drives it", "memory is not shared");
    }

    // Promise: G21
    #[test]
    fn missing_closed_and_foreign_nodes_are_distinguished() {
        let mut fake = Fake::new();
        fake.gpu(true, false);
        fake.says(DEVICE, Verdict::Bad, "no render node", "dmesg");
        fake.node();
        fake.says(DEVICE, Verdict::Bad, "there is no /dev/dri/renderD128", "container");
        fake.file("dev/dri/renderD128", "");
        fake.says(TRANSPORT, Verdict::Good, "LEGACY", "");
        fake.system.look = |_| Err(rustix::io::Errno::ACCESS.into());
        fake.says("permission", Verdict::Bad, "Permission denied", "usermod -a -G render");
        fake.system.look = |_| Ok(DeviceKind::OtherVirtio);
        fake.says(DEVICE, Verdict::Bad, "not Sluice's", "capset 27");
        fake.file("sys/bus/virtio/devices/virtio1/device", "0x0013\n");
        fake.file("dev/vsock", "");
        fake.says(TRANSPORT, Verdict::Poor, "VSOCK", "slower");
    }

    // Promise: G21
    #[test]
    fn older_host_and_older_package_are_distinguished() {
        let mut fake = Fake::new();
        fake.gpu(true, true);
        fake.says("version", Verdict::Good, "host and guest", "");
        fake.system.look = |_| Ok(device(calls::VERSION - 1, true));
        fake.says("version", Verdict::Bad, "the host's Sluice is older", "of the host's version");
        fake.system.look = |_| Ok(device(calls::VERSION + 1, false));
        fake.says("version", Verdict::Bad, "this package is older", "of the host's version");
        fake.says(TRANSPORT, Verdict::Good, "2D", "");
    }

    // Promise: G21
    #[test]
    fn socket_in_the_environment_precedes_other_transports() {
        let mut fake = Fake::new();
        fake.gpu(true, true);
        let socket = fake.folder.path().join("vm.sock");
        fake.system.socket = Some(socket.clone());
        fake.says(TRANSPORT, Verdict::Bad, "SLUICE_SOCKET is", "mounted into this container");
        let _listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
        fake.says(TRANSPORT, Verdict::Good, "DIRECT", "");
        fake.system.forced = Some("vsock".to_owned());
        fake.says(TRANSPORT, Verdict::Good, "VSOCK", "");
        fake.system.forced = Some("drm".to_owned());
        fake.says("environment", Verdict::Poor, "SLUICE_TRANSPORT is drm", "unset");
        fake.says(TRANSPORT, Verdict::Good, "LEGACY", "");
        fake.system.socket = None;
        for (forced, found) in [("direct", "SLUICE_SOCKET is not set"), ("vsock", "no virtual socket")] {
            fake.system.forced = Some(forced.to_owned());
            fake.says(TRANSPORT, Verdict::Bad, found, "");
        }
    }
}

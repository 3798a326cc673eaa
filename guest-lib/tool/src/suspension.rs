//! Takes Sluice's devices from the kernel's driver before the system is suspended, and gives them back after it.
//!
//! The virtio_gpu driver of stock kernels cannot be suspended: its device comes back without queues, the driver does not detect that,
//! and its callers wait for ever. Taken from the driver in time and given back, the device is as new. Programs with a session
//! get an error; those that start afterwards find the same as before.
//!
//! The host gets no message when a driver is unbound, but one when a driver is bound, and ends all sessions then. So the driver gets
//! each device once more before the system is suspended: then no worker has pages that the guest has freed.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use sluice_guest_node::DeviceKind;

use crate::node::{self, GPU};

const DRIVER: &str = "sys/bus/virtio/drivers/virtio_gpu";
/// Names of the taken devices, a line each. In `/run`, since the driver has all devices after a boot.
const TAKEN: &str = "run/sluice-guest.suspended";

/// Moment at which `systemd-sleep` calls.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Moment {
    /// Before the suspension
    Pre,
    /// After the suspension
    Post,
}

/// Takes the devices or gives them back.
///
/// # Errors
/// When a device cannot be taken or given back; the other devices still are.
pub(crate) fn at(moment: Moment) -> Result<()> {
    match moment {
        Moment::Pre => take(Path::new("/"), node::look),
        Moment::Post => give_back(Path::new("/")),
    }
}

fn taken(root: &Path) -> Result<String> {
    match fs::read_to_string(root.join(TAKEN)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        found => found.with_context(|| format!("/{TAKEN} cannot be read")),
    }
}

fn take(root: &Path, look: fn(&Path) -> Result<DeviceKind>) -> Result<()> {
    let mut failed = Vec::new();
    let mut taken = taken(root).unwrap_or_else(|error| {
        failed.push(format!("{error:#}"));
        String::new()
    });
    for gpu in node::virtio(root, GPU) {
        let nodes = node::render_nodes(root, &gpu);
        let is_ours =
            |node: &String| matches!(look(&root.join("dev/dri").join(node)), Ok(DeviceKind::Sluice { .. }));
        let Some(name) = gpu.file_name().and_then(|name| name.to_str()).filter(|_| nodes.iter().any(is_ours))
        else {
            continue;
        };
        // Recorded first: the device is given back even if a later step fails.
        taken = format!("{taken}{name}\n");
        let noted = fs::write(root.join(TAKEN), &taken)
            .with_context(|| format!("/{TAKEN} cannot be written (root can)"));
        failed.extend(noted.err().map(|error| format!("{error:#}")));
        let taken = ["unbind", "bind", "unbind"].into_iter().try_for_each(|what| tell(root, what, name));
        failed.extend(taken.err());
    }
    said("taken from the driver", &failed)
}

fn give_back(root: &Path) -> Result<()> {
    let taken = taken(root)?;
    let is_bound = |name: &str| root.join(DRIVER).join(name).exists();
    let (mut left, mut failed) = (String::new(), Vec::new());
    for name in taken.lines().filter(|name| !is_bound(name)) {
        if let Err(error) = tell(root, "bind", name) {
            left = format!("{left}{name}\n");
            failed.push(error);
        }
    }
    // A later attempt may give back the devices that are left.
    match (taken.is_empty(), left.is_empty()) {
        (true, _) => Ok(()),
        (false, true) => fs::remove_file(root.join(TAKEN)),
        (false, false) => fs::write(root.join(TAKEN), left),
    }
    .with_context(|| format!("/{TAKEN} cannot be changed"))?;
    said("given back to the driver", &failed)
}

/// Binds a device to the driver, or unbinds it.
fn tell(root: &Path, what: &str, name: &str) -> Result<(), String> {
    fs::write(root.join(DRIVER).join(what), name).map_err(|error| format!("{what} {name}: {error}"))
}

fn said(what: &str, failed: &[String]) -> Result<()> {
    if !failed.is_empty() {
        bail!("not every device could be {what}: {}", failed.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use sluice_guest_node::Abilities;

    const SLUICE: DeviceKind = DeviceKind::Sluice {
        version: 1,
        abilities: Abilities { three_d: true, blobs: false, contexts: false },
    };

    /// A system with two virtio GPUs, of which the second has a node that is Sluice's.
    fn system() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for (number, folder) in [(128, "sys/devices/a"), (129, "sys/devices/b")] {
            let gpu = format!("{folder}/virtio{number}");
            fs::create_dir_all(at(&gpu)).unwrap();
            fs::write(at(&format!("{gpu}/device")), "0x0010\n").unwrap();
            let class = format!("sys/class/drm/renderD{number}");
            fs::create_dir_all(at(&class)).unwrap();
            symlink(at(folder), at(&format!("{class}/device"))).unwrap();
            fs::create_dir_all(at("sys/bus/virtio/devices")).unwrap();
            symlink(at(&gpu), at(&format!("sys/bus/virtio/devices/virtio{number}"))).unwrap();
        }
        fs::create_dir_all(at(DRIVER)).unwrap();
        fs::create_dir_all(at("run")).unwrap();
        root
    }

    /// A file of the driver.
    fn driver(root: &tempfile::TempDir, name: &str) -> PathBuf {
        root.path().join(DRIVER).join(name)
    }

    fn look(path: &Path) -> Result<DeviceKind> {
        Ok(if path.ends_with("renderD129") { SLUICE } else { DeviceKind::OtherVirtio })
    }

    // Promise: V19
    #[test]
    fn devices_of_sluice_are_taken_and_given_back() {
        let root = system();
        take(root.path(), look).unwrap();
        assert_eq!(fs::read_to_string(driver(&root, "unbind")).unwrap(), "virtio129", "another's stays");
        fs::remove_file(driver(&root, "bind")).unwrap();
        give_back(root.path()).unwrap();
        assert_eq!(fs::read_to_string(driver(&root, "bind")).unwrap(), "virtio129");
        fs::remove_file(driver(&root, "bind")).unwrap();
        give_back(root.path()).unwrap();
        assert!(!driver(&root, "bind").exists(), "a device that was not taken is not given back");
    }

    // Promise: V19
    #[test]
    fn device_that_cannot_be_taken_is_reported_and_left_alone() {
        let root = system();
        fs::create_dir(driver(&root, "unbind")).unwrap();
        assert!(take(root.path(), look).unwrap_err().to_string().contains("virtio129"));
        fs::create_dir(driver(&root, "virtio129")).unwrap();
        give_back(root.path()).unwrap();
        assert!(!driver(&root, "bind").exists(), "the driver still has it");
    }

    // Promise: V19
    #[test]
    fn device_that_cannot_be_given_back_is_given_back_by_a_second_attempt() {
        let root = system();
        take(root.path(), look).unwrap();
        fs::remove_file(driver(&root, "bind")).unwrap();
        fs::create_dir(driver(&root, "bind")).unwrap();
        assert!(give_back(root.path()).unwrap_err().to_string().contains("virtio129"));
        fs::remove_dir(driver(&root, "bind")).unwrap();
        give_back(root.path()).unwrap();
        assert_eq!(fs::read_to_string(driver(&root, "bind")).unwrap(), "virtio129");
    }
}

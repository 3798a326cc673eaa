//! Takes Sluice's devices from the kernel's driver before the system is suspended, and gives them back after it.
//!
//! The virtio_gpu driver of stock kernels cannot be suspended: its device comes back without queues, the driver does not know,
//! and its callers wait for ever. Taken from the driver in time and given back, the device is as new. Programs with a session
//! get an error; those that start afterwards find the same as before.
//!
//! The host gets no message when a driver goes, but one when a driver comes, and ends all sessions then. So the driver gets
//! each device once more before the system is suspended: no worker has pages then that the guest has forgotten.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use sluice_guest_node::Kind;

use crate::node::{self, GPU};

const DRIVER: &str = "sys/bus/virtio/drivers/virtio_gpu";
/// Names of the devices that were taken, a line each. In `/run`, for after a boot the driver has them all.
const TAKEN: &str = "run/sluice-guest.suspended";

/// Moment at which `systemd-sleep` calls.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Moment {
    /// Before the suspension
    Pre,
    /// After the suspension
    Post,
}

/// Does what is to be done then.
///
/// # Errors
/// When a device cannot be taken or given back; the others are, all the same.
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

fn take(root: &Path, look: fn(&Path) -> Result<Kind>) -> Result<()> {
    let mut failed = Vec::new();
    let mut taken = taken(root).unwrap_or_else(|error| {
        failed.push(format!("{error:#}"));
        String::new()
    });
    for gpu in node::virtio(root, GPU) {
        let nodes = node::render_nodes(root, &gpu);
        let is_ours =
            |node: &String| matches!(look(&root.join("dev/dri").join(node)), Ok(Kind::Sluice { .. }));
        let Some(name) = gpu.file_name().and_then(|name| name.to_str()).filter(|_| nodes.iter().any(is_ours))
        else {
            continue;
        };
        // Noted first: whatever happens here, it is given back.
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
    // What could not be given back can be, when it is tried again.
    match (taken.is_empty(), left.is_empty()) {
        (true, _) => Ok(()),
        (false, true) => fs::remove_file(root.join(TAKEN)),
        (false, false) => fs::write(root.join(TAKEN), left),
    }
    .with_context(|| format!("/{TAKEN} cannot be changed"))?;
    said("given back to the driver", &failed)
}

/// Has the driver take a device, or let go of it.
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

    const SLUICE: Kind =
        Kind::Sluice { version: 1, abilities: Abilities { three_d: true, blobs: false, contexts: false } };

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

    /// A file of the driver's.
    fn driver(root: &tempfile::TempDir, name: &str) -> PathBuf {
        root.path().join(DRIVER).join(name)
    }

    fn look(path: &Path) -> Result<Kind> {
        Ok(if path.ends_with("renderD129") { SLUICE } else { Kind::OtherVirtio })
    }

    // Promise: V19
    #[test]
    fn what_is_ours_is_taken_and_given_back() {
        let root = system();
        take(root.path(), look).unwrap();
        assert_eq!(fs::read_to_string(driver(&root, "unbind")).unwrap(), "virtio129", "another's stays");
        fs::remove_file(driver(&root, "bind")).unwrap();
        give_back(root.path()).unwrap();
        assert_eq!(fs::read_to_string(driver(&root, "bind")).unwrap(), "virtio129");
        fs::remove_file(driver(&root, "bind")).unwrap();
        give_back(root.path()).unwrap();
        assert!(!driver(&root, "bind").exists(), "what was not taken is not given back");
    }

    // Promise: V19
    #[test]
    fn what_could_not_be_taken_is_said_and_left_alone() {
        let root = system();
        fs::create_dir(driver(&root, "unbind")).unwrap();
        assert!(take(root.path(), look).unwrap_err().to_string().contains("virtio129"));
        fs::create_dir(driver(&root, "virtio129")).unwrap();
        give_back(root.path()).unwrap();
        assert!(!driver(&root, "bind").exists(), "the driver has it still");
    }

    // Promise: V19
    #[test]
    fn what_could_not_be_given_back_is_when_it_is_tried_again() {
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

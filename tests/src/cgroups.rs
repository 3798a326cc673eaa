//! A cgroup v2 directory as an operator delegates it, if this host lets a test have one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

/// A directory of its own. Dropping it kills all processes in it and removes it.
#[derive(Debug)]
pub struct Delegated {
    directory: PathBuf,
}

impl Delegated {
    /// Makes one below the cgroup of this process. `None` if it cannot; the runner then gets the reason.
    ///
    /// # Errors
    /// When the kernel does not report the cgroup of this process.
    pub fn or_skip() -> Result<Option<Self>> {
        Ok(Self::make()?.inspect_err(sluice_skip::skip).ok())
    }

    /// Makes one below the cgroup of this process, or returns the reason why it cannot.
    fn make() -> Result<Result<Self, String>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
        let mount = mounts.lines().find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4))?
        });
        let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let (Some(mount), Some(own)) = (mount, own) else {
            return Ok(Err("cgroup v2 is not mounted".to_owned()));
        };
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory =
            Path::new(mount).join(own).join(format!("sluice-test-{}-{number}", std::process::id()));
        Ok(match fs::create_dir(&directory) {
            Ok(()) if directory.join("cgroup.kill").exists() => Ok(Self { directory }),
            Ok(()) => {
                fs::remove_dir(&directory)?;
                Err("this kernel has no cgroup.kill".to_owned())
            }
            Err(error) => Err(format!("cannot make a cgroup in {}: {error}", directory.display())),
        })
    }

    /// Path of the directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Paths in it of the cgroups at every depth, each after the one that contains it. Groups may be removed meanwhile.
    #[must_use]
    pub fn groups(&self) -> Vec<String> {
        let (mut groups, mut unread) = (Vec::new(), vec![self.directory.clone()]);
        while let Some(directory) = unread.pop() {
            for path in fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()) {
                if path.is_dir() {
                    groups.extend(path.strip_prefix(&self.directory).map(|path| path.display().to_string()));
                    unread.push(path);
                }
            }
        }
        groups
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        // A failed test may have left cgroups with processes.
        let killed = fs::write(self.directory.join("cgroup.kill"), "1");
        for group in self.groups().into_iter().rev() {
            let _ = fs::remove_dir(self.directory.join(group));
        }
        if let Err(error) = killed.and_then(|()| fs::remove_dir(&self.directory)) {
            eprintln!("cannot remove {}: {error}", self.directory.display());
        }
    }
}

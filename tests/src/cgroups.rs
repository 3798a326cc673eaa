//! A cgroup v2 directory as an operator delegates it, where this host lets a test have one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

/// A directory of its own. Whatever is in it is killed and removed when it is dropped.
#[derive(Debug)]
pub struct Delegated {
    directory: PathBuf,
}

impl Delegated {
    /// Makes one below the group of this process, or says why none can be.
    ///
    /// # Errors
    /// When the kernel does not say where groups are.
    pub fn make() -> Result<Result<Self, String>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
        let mount = mounts.lines().find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4))?
        });
        let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let (Some(mount), Some(own)) = (mount, own) else {
            return Ok(Err("no cgroup v2 is mounted".to_owned()));
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
            Err(error) => Err(format!("no group can be made at {}: {error}", directory.display())),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The groups in it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn groups(&self) -> Result<Vec<String>> {
        let mut groups = Vec::new();
        for entry in fs::read_dir(&self.directory).context("reading a cgroup")? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                groups.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        Ok(groups)
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        // After a test that failed there may be groups, and processes in them.
        let killed = fs::write(self.directory.join("cgroup.kill"), "1");
        for group in self.groups().unwrap_or_default() {
            let _ = fs::remove_dir(self.directory.join(group));
        }
        if let Err(error) = killed.and_then(|()| fs::remove_dir(&self.directory)) {
            eprintln!("{} stays behind: {error}", self.directory.display());
        }
    }
}

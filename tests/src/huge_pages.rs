//! Huge pages of this host, reserved for the duration of a test.

use std::fs;

use anyhow::{Context as _, Result};

const COUNT: &str = "/proc/sys/vm/nr_hugepages";
const MEBIBYTES: u64 = 2;

/// Reserved pages of 2 MiB. Dropping it restores the previous number.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
}

impl HugePages {
    /// Makes `mebibytes` MiB of huge pages free, or returns the reason why it cannot.
    ///
    /// # Errors
    /// When the kernel does not report its huge pages.
    pub fn take(mebibytes: u64) -> Result<Result<Self, String>> {
        let wanted = mebibytes.div_ceil(MEBIBYTES);
        let Ok(before) = number(COUNT) else { return Ok(Err("this kernel has no huge pages".to_owned())) };
        let pages = Self { before };
        if free()? >= wanted {
            return Ok(Ok(pages));
        }
        if let Err(error) = fs::write(COUNT, (before + wanted).to_string()) {
            return Ok(Err(format!("too few huge pages are free, and {COUNT} cannot be written: {error}")));
        }
        Ok(match free()? {
            enough if enough >= wanted => Ok(pages),
            few => {
                Err(format!("the host has no {mebibytes} MiB in one piece for huge pages, but {few} pages"))
            }
        })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if number(COUNT).is_ok_and(|now| now != self.before)
            && let Err(error) = fs::write(COUNT, self.before.to_string())
        {
            eprintln!("{COUNT} stays changed: {error}");
        }
    }
}

fn number(path: &str) -> Result<u64> {
    fs::read_to_string(path)?.trim().parse().with_context(|| path.to_owned())
}

fn free() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let free = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    let size = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
    // On a host with another default size, the count is not of pages of 2 MiB.
    if size.is_none_or(|size| size.trim() != "2048 kB") {
        return Ok(0);
    }
    free.context("HugePages_Free in /proc/meminfo")?.trim().parse().context("HugePages_Free")
}

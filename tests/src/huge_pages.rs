//! Huge pages of this host, as many as a test needs, for as long as it needs them.

use std::fs;

use anyhow::{Context as _, Result};

const COUNT: &str = "/proc/sys/vm/nr_hugepages";
const MEBIBYTES: u64 = 2;

/// Pages of 2 MiB. What was there before is there again when it is dropped.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
}

impl HugePages {
    /// Sees to it that so much memory is free in huge pages, or says why it cannot be.
    ///
    /// # Errors
    /// When the kernel does not say what it has.
    pub fn take(mebibytes: u64) -> Result<Result<Self, String>> {
        let wanted = mebibytes.div_ceil(MEBIBYTES);
        let Ok(before) = number(COUNT) else { return Ok(Err("this kernel has no huge pages".to_owned())) };
        let pages = Self { before };
        if free()? >= wanted {
            return Ok(Ok(pages));
        }
        if let Err(error) = fs::write(COUNT, (before + wanted).to_string()) {
            return Ok(Err(format!("no huge pages are free, and {COUNT} cannot be written: {error}")));
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
    // A host whose huge pages are of another size by default has none for this.
    if size.is_none_or(|size| size.trim() != "2048 kB") {
        return Ok(0);
    }
    free.context("HugePages_Free in /proc/meminfo")?.trim().parse().context("HugePages_Free")
}

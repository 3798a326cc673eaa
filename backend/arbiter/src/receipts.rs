//! The receipts of scrubs: a line for each chunk, in a ring of files of bounded length.
//!
//! The arbiter receives the files already open, so this module needs no path and no name. When one is full, the oldest is
//! emptied and written next, so the last receipts always exist. A line that cannot be written is counted, and causes no
//! delay.

use core::cmp::Reverse;

use rustix::{
    fd::OwnedFd,
    fs::{fstat, ftruncate},
    io::{Errno, write},
};

/// The ring.
#[derive(Debug)]
pub struct Receipts {
    /// Files opened for appending.
    files: Vec<OwnedFd>,
    /// Largest size of each file, in bytes.
    size: u64,
    /// The file that is written now, and its length.
    current: usize,
    length: u64,
    /// True if the last line was cut short.
    torn: bool,
    /// Lines that could not be written since the last call of [`Receipts::take_lost`].
    lost: u64,
    failing: bool,
}

impl Receipts {
    /// Continues where an earlier arbiter ended: in the file that was written last.
    ///
    /// # Errors
    /// EINVAL if there is no file; the kernel's error if it does not report a file's length.
    pub fn new(files: Vec<OwnedFd>, size: u64) -> Result<Self, Errno> {
        let mut found = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let about = fstat(file)?;
            let length = u64::try_from(about.st_size).unwrap_or(0);
            // Of two that were written in one tick of the file system's clock, the shorter one is not full.
            found.push((length > 0, about.st_mtime, about.st_mtime_nsec, Reverse(length), Reverse(number)));
        }
        let (.., Reverse(length), Reverse(current)) = found.into_iter().max().ok_or(Errno::INVAL)?;
        // An arbiter that was killed may have left half a line.
        Ok(Self { files, size, current, length, torn: length > 0, lost: 0, failing: false })
    }

    /// Writes whole lines.
    pub fn write(&mut self, mut lines: &[u8]) {
        while !lines.is_empty() {
            match self.append(lines) {
                Ok(written) => lines = lines.get(written..).unwrap_or_default(),
                Err(error) => {
                    // The memory is clean in any case; only the record of it is missing.
                    let lost = lines.iter().filter(|byte| **byte == b'\n').count();
                    self.lost = self.lost.saturating_add(lost as u64);
                    if !core::mem::replace(&mut self.failing, true) {
                        tracing::error!(%error, "cannot write receipts of scrubs");
                    }
                    return;
                }
            }
        }
        if core::mem::take(&mut self.failing) {
            tracing::info!("receipts of scrubs are written again");
        }
    }

    /// The number of lines that could not be written since the last call.
    pub fn take_lost(&mut self) -> u64 {
        core::mem::take(&mut self.lost)
    }

    /// Writes lines to one file. Returns the bytes of complete lines; a line that was cut short counts as not written.
    fn append(&mut self, lines: &[u8]) -> Result<usize, Errno> {
        let first = lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |end| end + 1);
        if self.length > 0 && first as u64 > self.room() {
            let next = (self.current + 1) % self.files.len();
            ftruncate(self.file(next)?, 0)?;
            (self.current, self.length, self.torn) = (next, 0, false);
        }
        if self.torn {
            self.put(b"\n")?;
        }
        let room = usize::try_from(self.room()).unwrap_or(usize::MAX);
        let fit = lines.get(..room.min(lines.len())).unwrap_or_default();
        let end = fit.iter().rposition(|byte| *byte == b'\n').map_or(first, |end| end + 1);
        let mut written = 0;
        while written < end {
            written += self.put(lines.get(written..end).unwrap_or_default())?;
        }
        Ok(end)
    }

    fn room(&self) -> u64 {
        self.size.saturating_sub(self.length).saturating_sub(u64::from(self.torn))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        let written = loop {
            match write(self.file(self.current)?, bytes) {
                Ok(0) => return Err(Errno::NOSPC),
                Err(Errno::INTR) => {}
                written => break written?,
            }
        };
        self.length = self.length.saturating_add(written as u64);
        self.torn = bytes.get(written - 1) != Some(&b'\n');
        Ok(written)
    }

    fn file(&self, number: usize) -> Result<&OwnedFd, Errno> {
        self.files.get(number).ok_or(Errno::INVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::{File, OpenOptions},
        path::{Path, PathBuf},
    };

    const FILES: usize = 4;

    fn path(directory: &Path, number: usize) -> PathBuf {
        directory.join(format!("{number}.log"))
    }

    fn open(directory: &Path, size: u64) -> Receipts {
        let file = |number| -> File {
            OpenOptions::new().append(true).create(true).open(path(directory, number)).expect("a file")
        };
        Receipts::new((0..FILES).map(|number| file(number).into()).collect(), size).expect("a ring")
    }

    fn numbers(directory: &Path, file: usize) -> Vec<u64> {
        let text = std::fs::read_to_string(path(directory, file)).expect("it is there");
        text.lines().filter_map(|line| line.strip_prefix("receipt ")?.parse().ok()).collect()
    }

    // Promise: A54
    #[test]
    fn million_receipts_stay_within_the_size_limit_and_the_last_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let (size, all) = (64 << 10, 1_000_000_u64);
        let mut receipts = open(directory.path(), size);
        for batch in 0..all / 100 {
            let lines: String =
                (batch * 100..(batch + 1) * 100).map(|number| format!("receipt {number}\n")).collect();
            receipts.write(lines.as_bytes());
            if batch % 1000 == 0 {
                // An arbiter that is restarted continues.
                receipts = open(directory.path(), size);
            }
        }
        assert_eq!(receipts.take_lost(), 0);
        let lengths: Vec<_> =
            (0..FILES).map(|file| path(directory.path(), file).metadata().expect("there").len()).collect();
        assert!(lengths.iter().all(|length| *length <= size), "{lengths:?}");
        let mut kept: Vec<_> = (0..FILES).flat_map(|file| numbers(directory.path(), file)).collect();
        kept.sort_unstable();
        let count = u64::try_from(kept.len()).expect("small");
        assert_eq!(kept, (all - count..all).collect::<Vec<_>>(), "the last receipts have a hole");
        assert!(count * 15 > 3 * size - 15, "only {count} receipts are kept");
    }

    // Promise: A54
    #[test]
    fn unwritable_receipts_are_counted_and_the_next_ones_are_whole() {
        let full = || OwnedFd::from(OpenOptions::new().append(true).open("/dev/full").expect("a device"));
        let mut receipts = Receipts::new(vec![full(), full()], 1 << 20).expect("a ring");
        receipts.write(b"one\ntwo\n");
        receipts.write(b"three\n");
        assert_eq!((receipts.take_lost(), receipts.take_lost()), (3, 0));
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(path(directory.path(), 2), "receipt 1\nrecei").expect("written");
        let mut receipts = open(directory.path(), 1 << 20);
        receipts.write(b"receipt 3\n");
        assert_eq!(numbers(directory.path(), 2), [1, 3], "a line that was cut short spoils the next");
        assert!(Receipts::new(Vec::new(), 1).is_err());
    }
}

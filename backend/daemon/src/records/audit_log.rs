//! The audit log: every change that was requested, its caller, and the values before and after it.
//!
//! A line is on the disk before the change is made; a change that fails afterwards gets a second line that reports it. If a
//! line cannot be written the change is not made. The log is a row of files of bounded length: when the first is full the
//! others move back by one, and the oldest is dropped. A refusal for lack of a role or by a limit is recorded too, at a bounded
//! rate per user.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::PoisonError,
    time::Instant,
};

use serde::Serialize;
use sluice_api::Error;

use sluice_runtime::rate::TokenBucket;

use crate::{
    caller::Caller, priority::PriorityLock, records::journal::now, records::state::file::off_thread,
};

/// Number of files of the log.
const FILES: u64 = 8;

/// The audit log.
#[derive(Debug)]
pub(crate) struct AuditLog {
    /// Held while a line is written: lines are in the order of their requests.
    log: PriorityLock<AuditFiles>,
}

/// The files of the log.
#[derive(Debug)]
struct AuditFiles {
    path: PathBuf,
    /// Limit of each file, in bytes.
    size: u64,
    file: File,
    length: u64,
}

impl AuditFiles {
    fn open(path: PathBuf, size: u64) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path)?;
        let length = file.metadata()?.len();
        if let Some(last) = length.checked_sub(1) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, last)?;
            // A line that was cut short does not spoil the next.
            if byte != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        Ok(Self { path, size, file, length })
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let length = line.len() as u64;
        if self.length > 0 && self.length.saturating_add(length) > self.size {
            self.rotate()?;
        }
        if let Err(error) = self.file.write_all(line) {
            // Ends the part that was written.
            _ = self.file.write_all(b"\n");
            return Err(error);
        }
        self.length += length;
        self.file.sync_data()
    }

    fn rotate(&mut self) -> io::Result<()> {
        let file = |number: u64| match number {
            0 => self.path.clone(),
            number => self.path.with_extension(format!("log.{number}")),
        };
        // If the first file could not be created the last time, the others have moved already.
        if file(0).exists() {
            for number in (0..FILES - 1).rev() {
                match fs::rename(file(number), file(number + 1)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        *self = Self::open(self.path.clone(), self.size)?;
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

/// One line.
#[derive(Debug, Serialize)]
struct Line<'a, T> {
    /// Milliseconds since 1970.
    time: u64,
    uid: u32,
    gid: u32,
    pid: i32,
    /// The action, for instance `vm.update`.
    action: &'a str,
    /// The object, for instance `vms/web-1`.
    object: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<&'a str>,
}

impl AuditLog {
    /// Opens the log of a directory, with a limit of `bytes` in total.
    pub(crate) fn open(directory: &Path, bytes: u64) -> io::Result<Self> {
        let log = AuditFiles::open(directory.join("audit.log"), bytes / FILES)?;
        Ok(Self { log: PriorityLock::new(log) })
    }

    /// Removes the log, if nothing was ever changed.
    pub(crate) async fn forget(&self) -> io::Result<()> {
        let log = self.log.lock().await;
        if log.file.metadata()?.len() > 0 {
            return Ok(());
        }
        fs::remove_file(&log.path)
    }

    /// The entry for an action of a caller on an object, for instance `vm.update` on `vms/web-1`. This alone writes no line.
    pub(crate) fn entry<'a>(&'a self, caller: &'a Caller, action: &'a str, object: String) -> AuditEntry<'a> {
        AuditEntry { audit_log: self, caller, action, object }
    }
}

/// Burst of recorded refusals of a user, and refusals per second in the long run.
const REFUSALS: u32 = 10;
const REFUSALS_PER_SECOND: f64 = 0.1;
/// Users whose refusals are counted separately; further users share one count.
const REFUSED_USERS: usize = 1024;

/// Limits the rate of recorded refusals of each user.
#[derive(Debug, Default)]
pub(crate) struct RefusalRate(std::sync::Mutex<BTreeMap<Option<u32>, Refused>>);

/// A user that was refused.
#[derive(Debug)]
struct Refused {
    bucket: TokenBucket,
    /// Refusals since the last recorded one.
    left_out: u64,
}

impl RefusalRate {
    /// The number of refusals left out before this one, if this one is to be recorded; otherwise `None`.
    pub(crate) fn take(&self, uid: u32, now: Instant) -> Option<u64> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = users.contains_key(&Some(uid)) || users.len() < REFUSED_USERS;
        let refused = users.entry(known.then_some(uid)).or_insert_with(|| Refused {
            bucket: TokenBucket::new(REFUSALS_PER_SECOND, REFUSALS, now),
            left_out: 0,
        });
        match refused.bucket.take(now) {
            Ok(()) => Some(std::mem::take(&mut refused.left_out)),
            Err(_) => {
                refused.left_out = refused.left_out.saturating_add(1);
                None
            }
        }
    }
}

/// An action of a caller on an object, for lines about it.
#[derive(Debug)]
pub(crate) struct AuditEntry<'a> {
    audit_log: &'a AuditLog,
    caller: &'a Caller,
    action: &'a str,
    object: String,
}

impl AuditEntry<'_> {
    /// Records that the action is about to be executed.
    pub(crate) async fn note<T: Serialize>(&self, before: Option<T>, after: Option<T>) -> Result<(), Error> {
        self.write(before, after, None).await.map_err(Error::storage)
    }

    /// Records that the action failed after all.
    pub(crate) async fn note_failure(&self, why: &str) {
        if let Err(error) = self.write(None::<()>, None, Some(why)).await {
            tracing::error!(%error, "cannot write the audit log");
        }
    }

    /// Records the failure of an action that could only fail to be written; returns its result.
    pub(crate) async fn made<T>(&self, made: io::Result<T>) -> Result<T, Error> {
        if let Err(error) = &made {
            self.note_failure(&error.to_string()).await;
        }
        made.map_err(Error::storage)
    }

    async fn write<T: Serialize>(
        &self,
        before: Option<T>,
        after: Option<T>,
        failed: Option<&str>,
    ) -> io::Result<()> {
        let Self { audit_log, caller, action, object } = self;
        let Caller { uid, gid, pid, .. } = **caller;
        let mut line =
            serde_json::to_vec(&Line { time: now(), uid, gid, pid, action, object, before, after, failed })?;
        line.push(b'\n');
        let mut log = audit_log.log.lock_for(caller).await;
        off_thread(move || log.append(&line)).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::caller::tests::tenant;

    // Promise: A53
    #[tokio::test]
    async fn audit_log_that_a_caller_fills_stays_bounded_and_keeps_the_last_lines() {
        let directory = tempfile::tempdir().expect("a directory");
        let bytes = 64 << 10;
        let caller = tenant();
        for daemon in 0..2_u32 {
            let audit_log = AuditLog::open(directory.path(), bytes).expect("a log");
            for number in 0..1000_u32 {
                let entry = audit_log.entry(&caller, "vm.update", format!("vms/{daemon}-{number}"));
                entry.note(None, Some("x".repeat(100))).await.expect("written");
            }
        }
        let mut lines = Vec::new();
        let mut sum = 0;
        for number in (0..FILES).rev() {
            let name = if number == 0 { "audit.log".to_owned() } else { format!("audit.log.{number}") };
            let text = fs::read_to_string(directory.path().join(name)).expect("a file");
            sum += text.len() as u64;
            for line in text.lines() {
                let line: serde_json::Value = serde_json::from_str(line).expect("a whole line");
                lines.push(line["object"].as_str().expect("an object").to_owned());
            }
        }
        assert!(sum <= bytes, "{sum} bytes");
        let first = 1000 - lines.len();
        assert!(first < 800, "only {} lines are kept", lines.len());
        assert_eq!(lines, (first..1000).map(|number| format!("vms/1-{number}")).collect::<Vec<_>>());
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count() as u64, FILES);
    }

    // Promise: A43
    #[test]
    fn refusals_of_one_user_are_bounded_and_hide_no_other_user() {
        let (rate, now) = (RefusalRate::default(), Instant::now());
        let noted = (0..1000).filter(|_| rate.take(7, now).is_some()).count();
        assert_eq!(noted, 10);
        assert_eq!(rate.take(8, now), Some(0), "another user has its own count");
        assert_eq!(
            rate.take(7, now + Duration::from_secs(11)),
            Some(990),
            "the next recorded refusal has the number left out"
        );
        for uid in 0..2000 {
            rate.take(uid, now);
        }
        assert!(rate.0.lock().expect("a lock").len() <= REFUSED_USERS + 1);
    }
}

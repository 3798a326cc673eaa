//! The audit log: every change that was asked for, by whom, with what was there before and what is to be there after.
//!
//! A line is on the disk before the change is made; one that fails afterwards gets a second line that says so. Where a line
//! cannot be written the change is not made.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;
use tokio::sync::Mutex;

use crate::{
    api::{error::Error, peer::Caller},
    journal::now,
    state::file::off_thread,
};

/// The audit log.
#[derive(Debug)]
pub(crate) struct Trail {
    path: PathBuf,
    /// Held by who has a line written: lines are in the order in which they were noted.
    file: Mutex<Arc<File>>,
}

/// One line.
#[derive(Debug, Serialize)]
struct Line<'a, T> {
    /// Milliseconds since 1970.
    time: u64,
    uid: u32,
    gid: u32,
    pid: i32,
    /// What is done, for instance `vm.update`.
    action: &'a str,
    /// To what, for instance `vms/web-1`.
    object: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<&'a str>,
}

impl Trail {
    /// Opens the log of a directory.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join("audit.log");
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
        Ok(Self { path, file: Mutex::new(Arc::new(file)) })
    }

    /// Takes the log away, if nothing was ever changed.
    pub(crate) async fn forget(&self) -> io::Result<()> {
        if self.file.lock().await.metadata()?.len() > 0 {
            return Ok(());
        }
        std::fs::remove_file(&self.path)
    }

    /// What a caller does to an object, for instance `vm.update` to `vms/web-1`. Nothing is written by this alone.
    pub(crate) fn entry<'a>(&'a self, caller: &'a Caller, action: &'a str, object: String) -> Entry<'a> {
        Entry { trail: self, caller, action, object }
    }
}

/// What a caller does to an object, of which lines are written.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    trail: &'a Trail,
    caller: &'a Caller,
    action: &'a str,
    object: String,
}

impl Entry<'_> {
    /// Notes that it is about to be done.
    pub(crate) async fn note<T: Serialize>(&self, before: Option<T>, after: Option<T>) -> Result<(), Error> {
        self.write(before, after, None).await.map_err(Error::storage)
    }

    /// Notes that it was not done after all.
    pub(crate) async fn note_failure(&self, why: &str) {
        if let Err(error) = self.write(None::<()>, None, Some(why)).await {
            tracing::error!("the audit log cannot be written: {error}");
        }
    }

    /// What became of it, where all that could fail was that it is written down.
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
        let Self { trail, caller, action, object } = self;
        let Caller { uid, gid, pid, .. } = **caller;
        let mut line =
            serde_json::to_vec(&Line { time: now(), uid, gid, pid, action, object, before, after, failed })?;
        line.push(b'\n');
        let file = trail.file.lock().await;
        let mut log = Arc::clone(&file);
        let write = move || {
            if let Err(error) = log.write_all(&line) {
                // What there was room for ends here.
                _ = log.write_all(b"\n");
                return Err(error);
            }
            log.sync_data()
        };
        off_thread(write).await
    }
}

//! The order in which the host ends processes when memory is short.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
};

/// The file with the adjustment of this process, which its children inherit.
const FILE: &str = "/proc/self/oom_score_adj";
/// The adjustment of a worker: half of the memory of the host, or of its VM's limit. A worker ends before the device of its
/// VM, before the VMM of a neighbour, and before all processes that serve several VMs.
const WORKER: i32 = 500;

/// The adjustment of this process.
#[derive(Debug)]
pub(crate) struct OomOrder(Option<File>);

impl OomOrder {
    /// Opens the file: a process of an ordinary user that has made itself undumpable cannot any more.
    pub(crate) fn open() -> Self {
        let file = OpenOptions::new().write(true).open(FILE);
        if let Err(error) = &file {
            tracing::warn!(%error, "cannot set the order in which processes end when memory is short");
        }
        Self(file.ok())
    }

    /// Runs `start`, whose new process ends before others when memory is short.
    pub(crate) fn ended_first<T>(&self, start: impl FnOnce() -> T) -> T {
        let Some(file) = &self.0 else { return start() };
        let own = fs::read_to_string(FILE).ok().and_then(|text| text.trim().parse::<i32>().ok());
        let Some(own) = own.filter(|own| *own < WORKER) else { return start() };
        write(file, WORKER);
        let started = start();
        // The kernel permits this without a privilege: the value was that of this process before.
        write(file, own);
        started
    }
}

fn write(file: &File, adjustment: i32) {
    let written: io::Result<()> = file.write_all_at(adjustment.to_string().as_bytes(), 0);
    if let Err(error) = written {
        tracing::warn!(adjustment, %error, "cannot set the order in which processes end when memory is short");
    }
}

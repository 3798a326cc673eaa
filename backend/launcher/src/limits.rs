//! The kernel's resource limits of each process: the table, as data. They bound the use of things that a cgroup does not count, and of
//! memory and threads also on a host without cgroups.

use std::io;

use rustix::process::{Resource, Rlimit};
use sluice_protocol::limits;

/// The program of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    Device,
    Worker,
    Arbiter,
    Inventory,
}

/// A limit that stays as it is.
const AS_INHERITED: u64 = u64::MAX;
/// Descriptors of a device: six per session, and memory regions, resources and queues.
const DEVICE_DESCRIPTORS: u64 = 8192;
/// Descriptors of an arbiter: four per worker of its unit, enough for 32 VMs with all their sessions; chunks take none.
const ARBITER_DESCRIPTORS: u64 = 4 * limits::SESSIONS as u64 * 32;
/// The usual stack, in bytes. Without a limit the kernel would lay out the address space in its old, more predictable way.
const STACK: u64 = 8 << 20;
/// Queued signals of the process's user: no code queues any.
const SIGNALS: u64 = 64;
/// Bytes of private memory that a process may map and never touch, beside those that it may use: a worker maps its memory for copies
/// whole, and a driver more than it uses.
const UNTOUCHED: u64 = (1 << 30) + limits::BOUNCE_BYTES;

/// Limits by program: device, worker, arbiter, inventory. A driver writes files in memory of unknown size, and pins memory of guests.
#[rustfmt::skip]
const TABLE: [(Resource, [u64; 4]); 9] = [
    (Resource::Nofile,     [DEVICE_DESCRIPTORS,   4096,         ARBITER_DESCRIPTORS, 1024]),
    // The memory that stands for that of a guest without shared memory is the longest file.
    (Resource::Fsize,      [limits::STREAM_BYTES, AS_INHERITED, AS_INHERITED,        AS_INHERITED]),
    (Resource::Memlock,    [0,                    AS_INHERITED, AS_INHERITED,        AS_INHERITED]),
    (Resource::Stack,      [STACK; 4]),
    (Resource::Sigpending, [SIGNALS; 4]),
    (Resource::Core,       [0; 4]),
    (Resource::Msgqueue,   [0; 4]),
    (Resource::Nice,       [0; 4]),
    (Resource::Rtprio,     [0; 4]),
];

/// The resource limits of the processes of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResourceLimits {
    kind: ProgramKind,
    memory: Option<u64>,
    threads: u64,
}

impl ResourceLimits {
    /// Limits of a program, on a host on which a VM gets so many bytes of memory and a worker so many threads.
    pub(crate) fn new(kind: ProgramKind, memory: Option<u64>, worker_threads: u32) -> Self {
        let threads = match kind {
            // A few for each connection of a program.
            ProgramKind::Device => 2048,
            ProgramKind::Worker => worker_threads.into(),
            ProgramKind::Arbiter => 1024,
            ProgramKind::Inventory => 256,
        };
        Self { kind, memory, threads }
    }

    /// Sets the limits of the calling process. The kernel counts threads by user: `alone` is true if it counts only those of this process.
    /// Async-signal-safe.
    pub(crate) fn set(&self, alone: bool) -> io::Result<()> {
        TABLE.iter().try_for_each(|(resource, limits)| lower(*resource, limits[self.kind as usize]))?;
        if let Some(memory) = self.memory {
            lower(Resource::Data, memory.saturating_add(UNTOUCHED))?;
        }
        if alone { lower(Resource::Nproc, self.threads) } else { Ok(()) }
    }
}

/// Lowers a limit of the calling process to this value, if it is above.
fn lower(resource: Resource, limit: u64) -> io::Result<()> {
    if limit == AS_INHERITED {
        return Ok(());
    }
    let hard = rustix::process::getrlimit(resource).maximum.map_or(limit, |hard| hard.min(limit));
    Ok(rustix::process::setrlimit(resource, Rlimit { current: Some(hard), maximum: Some(hard) })?)
}

#[cfg(test)]
mod tests {
    use super::{
        ProgramKind::{Arbiter, Device, Inventory, Worker},
        *,
    };

    const PAGE: &str = include_str!("../../../docs/threat-model.md");

    /// A limit as the page shows it.
    fn shown(limit: u64) -> String {
        match limit {
            AS_INHERITED => "–".to_owned(),
            limit if limit >= 1 << 30 && limit.is_multiple_of(1 << 30) => format!("{} GiB", limit >> 30),
            limit if limit >= 1 << 20 && limit.is_multiple_of(1 << 20) => format!("{} MiB", limit >> 20),
            limit if limit >= 10_000 => format!("{},{:03}", limit / 1000, limit % 1000),
            limit => limit.to_string(),
        }
    }

    /// The four cells of the page's row with this limit.
    fn cells(name: &str) -> [&'static str; 4] {
        let is_named = |row: &&str| row.split('|').nth(1).is_some_and(|first| first.contains(name));
        let table = PAGE.lines().filter(|line| line.starts_with("| ") && line.matches('|').count() == 7);
        let mut rows = table.filter(is_named);
        let row = rows.next().unwrap_or_else(|| panic!("no row has {name}"));
        assert_eq!(rows.next(), None, "{name} has one row");
        let cells: Vec<&str> = row.split('|').skip(2).map(str::trim).collect();
        cells[..4].try_into().expect("a cell for each process")
    }

    // Promise: F100
    #[test]
    fn table_of_the_threat_model_has_the_limits_that_are_set() {
        for (resource, limits) in TABLE {
            let name = format!("{resource:?}").to_uppercase();
            assert_eq!(cells(&name).map(str::to_owned), limits.map(shown), "{name}");
        }
        let threads =
            [Device, Worker, Arbiter, Inventory].map(|kind| ResourceLimits::new(kind, None, 7).threads);
        let threads =
            threads.map(|threads| if threads == 7 { "`worker-tasks`".to_owned() } else { shown(threads) });
        assert_eq!(cells("NPROC").map(str::to_owned), threads);
        let data = PAGE.lines().find(|line| line.contains("`DATA`")).expect("a row");
        assert!(data.contains(&format!("and {} that may stay untouched", shown(UNTOUCHED))), "{data}");
    }
}

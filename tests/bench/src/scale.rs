//! The cost of many VMs for their host: time of processors and context switches of all processes, at work and idle.

use crate::{
    measure::{Rounds, Samples, single},
    turns::Client,
};
use anyhow::{Context as _, Result, anyhow, ensure};
use sluice_tests::performance::Measured;
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Numbers of VMs, as in names of rows.
pub(crate) const VMS: [usize; 4] = [1, 4, 16, 64];
/// The rows' names, without the number.
pub(crate) const NAMES: [&str; 5] = [
    "scale/call/",
    "scale/cpu-per-call/",
    "scale/switches-per-call/",
    "scale/idle-cpu/",
    "scale/idle-switches/",
];
/// Calls of each VM in a measurement, and their distance.
const CALLS: usize = 300;
const PERIOD: Duration = Duration::from_millis(10);
/// Time for which idle sessions are observed.
const IDLE: Duration = Duration::from_secs(4);
/// Time after which the workers of a measurement sleep.
const REST: Duration = Duration::from_millis(200);

/// Rows of the VMs that exist, each with one session.
pub(crate) fn measure(daemon: u32, clients: &mut [Client]) -> Result<Vec<Measured>> {
    let roots: Vec<u32> = clients.iter().map(Client::id).chain([daemon]).collect();
    thread::sleep(REST);
    let (idle, start) = (Use::of(&roots)?, Instant::now());
    thread::sleep(IDLE);
    let idle = growth(&idle, &Use::of(&roots)?);
    let seconds = start.elapsed().as_secs_f64();

    let request = format!("paced {CALLS} {}", PERIOD.as_micros());
    let before = Use::of(&roots)?;
    let mut samples = Samples::default();
    thread::scope(|scope| -> Result<()> {
        let asked: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                let request = &request;
                scope.spawn(move || client.ask(request))
            })
            .collect();
        for client in asked {
            let lists = client.join().map_err(|_| anyhow!("a client's thread panicked"))??;
            lists.into_iter().for_each(|list| samples.extend(list));
        }
        Ok(())
    })?;
    let work = growth(&before, &Use::of(&roots)?);
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let calls = (CALLS * clients.len()) as f64;
    let mut rounds = Rounds::default();
    rounds.push(samples, Samples::default());
    let [call, cpu, switches, idle_cpu, idle_switches] = NAMES.map(|name| format!("{name}{}", clients.len()));
    Ok(vec![
        rounds.row(&call)?,
        single(&cpu, work.milliseconds * 1e3 / calls)?,
        single(&switches, work.switches / calls)?,
        single(&idle_cpu, idle.milliseconds / seconds / 10.0)?,
        single(&idle_switches, idle.switches / seconds)?,
    ])
}

/// Use of processors.
#[derive(Clone, Copy, Default)]
struct Use {
    milliseconds: f64,
    switches: f64,
}

impl Use {
    /// The use of all threads of these processes and of their descendants.
    fn of(roots: &[u32]) -> Result<BTreeMap<u32, Use>> {
        let mut parents = BTreeMap::new();
        for process in numbers(Path::new("/proc"))? {
            // A process may be gone between the listing and the reading.
            let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else { continue };
            let parent =
                stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            parents.insert(process, parent.unwrap_or(0));
        }
        let is_ours = |mut process: u32| loop {
            if roots.contains(&process) {
                return true;
            }
            match parents.get(&process) {
                Some(parent) => process = *parent,
                None => return false,
            }
        };
        let mut threads = BTreeMap::new();
        for process in parents.keys().copied().filter(|process| is_ours(*process)) {
            let tasks = format!("/proc/{process}/task");
            for thread in numbers(Path::new(&tasks)).unwrap_or_default() {
                // A thread may be gone, too.
                let Ok(text) = fs::read_to_string(format!("{tasks}/{thread}/sched")) else { continue };
                threads.insert(thread, Use::parsed(&text).context("the kernel tells no figures of threads")?);
            }
        }
        ensure!(!threads.is_empty(), "the kernel has no /proc/PID/sched");
        Ok(threads)
    }

    fn parsed(text: &str) -> Option<Use> {
        let figure = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.rsplit_once(':')?.1.trim().parse().ok()
        };
        Some(Use { milliseconds: figure("se.sum_exec_runtime")?, switches: figure("nr_switches")? })
    }
}

/// The names in a folder that are numbers.
fn numbers(folder: &Path) -> Result<Vec<u32>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The growth of the threads' counts. A thread that has ended is left out.
fn growth(before: &BTreeMap<u32, Use>, after: &BTreeMap<u32, Use>) -> Use {
    let mut grown = Use::default();
    for (thread, now) in after {
        let before = before.get(thread).copied().unwrap_or_default();
        grown.milliseconds += now.milliseconds - before.milliseconds;
        grown.switches += now.switches - before.switches;
    }
    grown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_of_a_thread_is_read_from_the_kernels_text() {
        let text = "a (1, #threads: 1)\n---\nse.sum_exec_runtime       :   12.5\nnr_switches     :    7\n";
        let read = Use::parsed(text).unwrap();
        assert_eq!((read.milliseconds, read.switches), (12.5, 7.0));
        assert!(Use::parsed("nr_switches : 7").is_none());
    }

    #[test]
    fn this_process_uses_processors() {
        let own = [std::process::id()];
        let before = Use::of(&own).unwrap();
        let begun = Instant::now();
        while growth(&before, &Use::of(&own).unwrap()).milliseconds == 0.0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    }
}

//! Looks for what should not be there: workers without a session, sessions without a worker.
//!
//! A worker belongs to a session from the moment the launcher says that it runs. One of which the launcher has told nobody,
//! for longer than it takes to tell, serves nobody and is ended; a session that neither gets a worker nor is refused is told of.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::fd::AsFd as _;
use tokio::time::interval;

use crate::{
    custodian::Custodian,
    launching::Launching,
    process::{Identity, kill},
    roster::Roster,
};

/// How often.
const EVERY: Duration = Duration::from_secs(1);
/// How long a worker may be known to nobody: longer than the launcher may take for an answer.
const UNKNOWN: Duration = Duration::from_secs(10);
/// What a worker is called.
const WORKER: &str = "sluice-worker";

/// Looks again and again, for ever.
pub(crate) async fn serve(launching: Rc<Launching>, roster: Rc<Roster>, custodian: Rc<Custodian>) {
    let mut suspects = Suspects::default();
    let mut turn = interval(EVERY);
    loop {
        turn.tick().await;
        // Asked before those who know: what the launcher starts meanwhile is not looked at.
        let children = launching.process().map(workers_of).unwrap_or_default();
        let vms = roster.all();
        let known = vms.iter().flat_map(|vm| vm.worker_numbers()).collect();
        for orphan in suspects.look(&children, &known, Instant::now()) {
            custodian.event("worker-without-session", 0, || format!("process {} is ended", orphan.process));
            if let Some(pidfd) = orphan.open() {
                kill(pidfd.as_fd());
            }
        }
        for vm in &vms {
            for session in vm.lost_sessions() {
                custodian.event("session-without-worker", vm.id(), || format!("session {session}"));
            }
        }
    }
}

/// The workers among the children of a launcher.
fn workers_of(launcher: u32) -> Vec<Identity> {
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let children = children.unwrap_or_default();
    let numbers = children.split_whitespace().filter_map(|number| number.parse().ok());
    numbers.filter(|number| name(*number).as_deref() == Some(WORKER)).filter_map(Identity::of).collect()
}

fn name(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    Some(stat.split_once('(')?.1.rsplit_once(')')?.0.to_owned())
}

/// Workers that nobody knew: since when, and whether that was told.
#[derive(Debug, Default)]
struct Suspects(BTreeMap<Identity, (Instant, bool)>);

impl Suspects {
    /// Those that nobody has known for too long; each is returned once.
    fn look(&mut self, workers: &[Identity], known: &BTreeSet<u32>, now: Instant) -> Vec<Identity> {
        let unknown: BTreeSet<Identity> =
            workers.iter().filter(|worker| !known.contains(&worker.process)).copied().collect();
        self.0.retain(|worker, _| unknown.contains(worker));
        unknown
            .into_iter()
            .filter(|worker| {
                let (since, told) = self.0.entry(*worker).or_insert((now, false));
                let late = now.saturating_duration_since(*since) >= UNKNOWN;
                late && !std::mem::replace(told, late)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: F44
    #[test]
    fn a_worker_that_nobody_knows_for_long_is_an_orphan_once() {
        let worker = |process| Identity { process, started: 1 };
        let workers = [worker(1), worker(2)];
        let mut suspects = Suspects::default();
        let start = Instant::now();
        let mut found = Vec::new();
        for second in 0..30 {
            // The second is made known in time; then its number is another's.
            let known = if second >= 5 { BTreeSet::from([2]) } else { BTreeSet::new() };
            found.extend(suspects.look(&workers, &known, start + Duration::from_secs(second)));
        }
        assert_eq!(found, [worker(1)]);
        let later = start + Duration::from_secs(40);
        assert_eq!(suspects.look(&[Identity { process: 1, started: 9 }], &BTreeSet::new(), later), []);
    }

    #[test]
    fn a_process_has_its_name_whatever_is_in_it() {
        assert!(name(std::process::id()).is_some_and(|name| !name.is_empty()));
        assert_eq!(name(u32::MAX), None);
    }
}

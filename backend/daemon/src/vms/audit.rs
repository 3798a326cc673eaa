//! Finds orphans: workers without a session, and sessions without a worker.
//!
//! A worker belongs to a session from the moment the launcher reports that it runs. A worker that belongs to no session for
//! longer than that message takes is ended; a session that neither gets a worker nor is refused raises an event. The launcher,
//! which started the workers, names the processes: the audit uses nothing that a process could change itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::time::interval;

use sluice_runtime::process::Identity;

use crate::{handover::launching::Launching, units::custodian::Custodian, vms::roster::Roster};

/// How often.
const EVERY: Duration = Duration::from_secs(1);
/// How long a worker may be known to nobody: longer than the launcher may take for an answer.
const UNKNOWN: Duration = Duration::from_secs(10);

/// Looks again and again, for ever.
pub(crate) async fn serve(launching: Rc<Launching>, roster: Rc<Roster>, custodian: Rc<Custodian>) {
    let mut suspects = Suspects::default();
    let mut turn = interval(EVERY);
    loop {
        turn.tick().await;
        // Asked before those who know: what the launcher starts meanwhile is not looked at.
        let perhaps = launching.perhaps_workers();
        let vms = roster.all();
        let known: BTreeSet<u32> = vms.iter().flat_map(|vm| vm.worker_numbers()).collect();
        // Most are devices, of which nothing has to be asked.
        let devices: BTreeSet<u32> = vms.iter().filter_map(|vm| vm.device()).collect();
        let unknown = perhaps.into_iter().filter(|child| !known.contains(child) && !devices.contains(child));
        for orphan in suspects.look(&unknown.filter_map(Identity::of).collect(), Instant::now()) {
            if launching.end_worker(orphan).await {
                custodian
                    .event("worker-without-session", 0, || format!("process {} is ended", orphan.process));
            }
        }
        for vm in &vms {
            for session in vm.lost_sessions() {
                custodian.event("session-without-worker", vm.id(), || format!("session {session}"));
            }
        }
    }
}

/// Processes that belong to no session: since when, and whether that was told.
#[derive(Debug, Default)]
struct Suspects(BTreeMap<Identity, (Instant, bool)>);

impl Suspects {
    /// Those that nobody has known for too long; each is returned once.
    fn look(&mut self, unknown: &BTreeSet<Identity>, now: Instant) -> Vec<Identity> {
        self.0.retain(|worker, _| unknown.contains(worker));
        unknown
            .iter()
            .copied()
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
        let mut suspects = Suspects::default();
        let start = Instant::now();
        let mut found = Vec::new();
        for second in 0..30 {
            // The second is made known in time; then its number is another's.
            let unknown = if second >= 5 { vec![worker(1)] } else { vec![worker(1), worker(2)] };
            found.extend(suspects.look(&unknown.into_iter().collect(), start + Duration::from_secs(second)));
        }
        assert_eq!(found, [worker(1)]);
        let later = start + Duration::from_secs(40);
        let another = BTreeSet::from([Identity { process: 1, started: 9 }]);
        assert_eq!(suspects.look(&another, later), []);
    }
}

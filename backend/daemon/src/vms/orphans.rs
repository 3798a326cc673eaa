//! Finds orphans: workers without a session, and sessions without a worker.
//!
//! A worker belongs to a session from the moment the launcher reports that it runs. A worker that belongs to no session for
//! longer than that message takes is ended; a session that neither gets a worker nor is refused raises an event. The launcher,
//! which started the workers, names the processes: the check uses nothing that a process could change itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::time::interval;

use sluice_runtime::process::Identity;

use crate::{handover::launching::Launching, vms::set::VmSet, vms::unit_events::UnitEvents};

/// Period of the checks.
const EVERY: Duration = Duration::from_secs(1);
/// Time for which a worker may be without a session: longer than the launcher's time limit for an answer.
const UNKNOWN: Duration = Duration::from_secs(10);

/// Checks for orphans, for ever.
pub(crate) async fn serve(launching: Rc<Launching>, vm_set: Rc<VmSet>, unit_events: Rc<UnitEvents>) {
    let mut suspects = Suspects::default();
    let mut turn = interval(EVERY);
    loop {
        turn.tick().await;
        // Read before the sessions: workers that the launcher starts in between are not checked.
        let perhaps = launching.perhaps_workers();
        let vms = vm_set.all();
        let known: BTreeSet<u32> = vms.iter().flat_map(|vm| vm.worker_numbers()).collect();
        // Most are devices, which need no check.
        let devices: BTreeSet<u32> = vms.iter().filter_map(|vm| vm.device()).collect();
        let unknown = perhaps.into_iter().filter(|child| !known.contains(child) && !devices.contains(child));
        for orphan in suspects.look(&unknown.filter_map(Identity::of).collect(), Instant::now()) {
            if launching.end_worker(orphan).await {
                unit_events
                    .event("worker-without-session", 0, || format!("process {} is ended", orphan.process));
            }
        }
        for vm in &vms {
            for session in vm.lost_sessions() {
                unit_events.event("session-without-worker", vm.id(), || format!("session {session}"));
            }
        }
    }
}

/// Workers without a session: the time since when, and a flag that it was reported.
#[derive(Debug, Default)]
struct Suspects(BTreeMap<Identity, (Instant, bool)>);

impl Suspects {
    /// Returns workers that had no session for too long, each once.
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
    fn worker_unknown_for_long_is_an_orphan_once() {
        let worker = |process| Identity { process, started: 1 };
        let mut suspects = Suspects::default();
        let start = Instant::now();
        let mut found = Vec::new();
        for second in 0..30 {
            // The second worker gets a session in time; later its number belongs to another process.
            let unknown = if second >= 5 { vec![worker(1)] } else { vec![worker(1), worker(2)] };
            found.extend(suspects.look(&unknown.into_iter().collect(), start + Duration::from_secs(second)));
        }
        assert_eq!(found, [worker(1)]);
        let later = start + Duration::from_secs(40);
        let another = BTreeSet::from([Identity { process: 1, started: 9 }]);
        assert_eq!(suspects.look(&another, later), []);
    }
}

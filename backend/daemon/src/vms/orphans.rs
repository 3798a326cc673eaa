//! Finds orphans: workers without a session, and sessions without a worker.
//!
//! A worker belongs to a session from the moment the launcher reports that it runs. A worker that belongs to no session for
//! longer than that message takes is ended; a session that neither gets a worker nor is refused raises an event. The launcher,
//! which started the workers, finds the processes: the check uses nothing that a process could change itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::time::interval;

use crate::{
    handover::{launching::Launching, process::LaunchedProcess},
    vms::{set::VmSet, unit_events::UnitEvents},
};

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
        let of_sessions = vms.iter().flat_map(|vm| vm.worker_numbers());
        let known: BTreeSet<u32> = of_sessions.chain(vms.iter().filter_map(|vm| vm.warm_worker())).collect();
        // Most are devices, which need no check.
        let devices: BTreeSet<u32> = vms.iter().filter_map(|vm| vm.device()).collect();
        let unknown = perhaps.into_iter().filter(|child| !known.contains(child) && !devices.contains(child));
        let unknown: BTreeSet<u32> = unknown.collect();
        for process in suspects.new_among(&unknown, Instant::now()) {
            match launching.find(process).await {
                Ok(found) => {
                    // Others are looked up again, so that none of their descriptors stays open.
                    let worker = found.filter(|found| found.worker).map(|found| found.process);
                    suspects.add(process, worker, Instant::now());
                }
                Err(error) => tracing::debug!(process, %error, "cannot find a process; trying again"),
            }
        }
        for orphan in suspects.late(Instant::now()) {
            orphan.kill();
            let number = orphan.number();
            unit_events.event("worker-without-session", 0, || format!("process {number} is ended"));
        }
        for vm in &vms {
            for session in vm.lost_sessions() {
                unit_events.event("session-without-worker", vm.id(), || format!("session {session}"));
            }
        }
    }
}

/// Processes that may be workers without a session, by number.
#[derive(Debug, Default)]
struct Suspects(BTreeMap<u32, Suspect>);

/// A process that belongs to no session.
#[derive(Debug)]
struct Suspect {
    /// `None` if it is no worker that the launcher has found.
    worker: Option<Rc<LaunchedProcess>>,
    since: Instant,
    /// True if it was reported.
    told: bool,
}

impl Suspect {
    /// True if its number may belong to another process by now.
    fn is_stale(&self, now: Instant) -> bool {
        match &self.worker {
            Some(worker) => worker.is_gone(),
            None => now.saturating_duration_since(self.since) >= UNKNOWN,
        }
    }
}

impl Suspects {
    /// Forgets all but these processes. Returns those that must be looked up.
    fn new_among(&mut self, unknown: &BTreeSet<u32>, now: Instant) -> Vec<u32> {
        self.0.retain(|process, suspect| unknown.contains(process) && !suspect.is_stale(now));
        unknown.iter().copied().filter(|process| !self.0.contains_key(process)).collect()
    }

    fn add(&mut self, process: u32, worker: Option<Rc<LaunchedProcess>>, since: Instant) {
        self.0.insert(process, Suspect { worker, since, told: false });
    }

    /// Returns workers that had no session for too long, each once.
    fn late(&mut self, now: Instant) -> Vec<Rc<LaunchedProcess>> {
        let late = self.0.values_mut().filter_map(|suspect| {
            let worker = suspect.worker.as_ref()?;
            let late = now.saturating_duration_since(suspect.since) >= UNKNOWN;
            let first = late && !std::mem::replace(&mut suspect.told, late);
            first.then(|| Rc::clone(worker))
        });
        late.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use sluice_runtime::process::Identity;

    use super::*;

    // Promise: F44
    #[tokio::test]
    async fn worker_unknown_for_long_is_an_orphan_once() {
        let mut children: Vec<_> =
            (0..3).map(|_| Command::new("sleep").arg("600").spawn().expect("a process")).collect();
        let numbers: Vec<u32> = children.iter().map(std::process::Child::id).collect();
        let find = |process: u32| {
            let identity = Identity::of(process).expect("a process");
            let pidfd = identity.open().expect("a process");
            Some(Rc::new(LaunchedProcess::new(identity, pidfd, None).expect("an event loop")))
        };
        let [orphan, late, arbiter] = numbers[..] else { panic!("three processes") };
        let mut suspects = Suspects::default();
        let start = Instant::now();
        let (mut found, mut looked_up) = (Vec::new(), BTreeMap::new());
        for second in 0..30 {
            let now = start + Duration::from_secs(second);
            // The second worker gets a session in time.
            let unknown = if second >= 5 { vec![orphan, arbiter] } else { vec![orphan, late, arbiter] };
            for process in suspects.new_among(&unknown.into_iter().collect(), now) {
                *looked_up.entry(process).or_insert(0) += 1;
                suspects.add(process, if process == arbiter { None } else { find(process) }, now);
            }
            found.extend(suspects.late(now).iter().map(|process| process.number()));
        }
        assert_eq!(found, [orphan]);
        // A number that belongs to no worker may belong to one later.
        assert_eq!(looked_up, BTreeMap::from([(orphan, 1), (late, 1), (arbiter, 3)]));

        // The number of a process that has ended may belong to another one.
        for child in &mut children {
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
        let now = start + Duration::from_secs(40);
        assert_eq!(suspects.new_among(&BTreeSet::from([orphan]), now), [orphan]);
        suspects.add(orphan, None, now);
        assert!(suspects.new_among(&BTreeSet::from([orphan]), now + Duration::from_secs(9)).is_empty());
        assert_eq!(suspects.new_among(&BTreeSet::from([orphan]), now + UNKNOWN), [orphan]);
    }
}

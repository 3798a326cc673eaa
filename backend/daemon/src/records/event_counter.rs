//! The counts of unit events, and the choice of those that are recorded in the event log.
//!
//! Every event is counted. The workers of a tenant can cause many, so each VM may fill only a part of the event log, each
//! organisation only a part, too, however many VMs it has, and the daemon's own log gets a bounded number in total.

use std::{collections::BTreeMap, time::Instant};

use sluice_runtime::rate::TokenBucket;

/// Burst of events of one kind and VM that are recorded, and events per second in the long run.
const OF_VM: (u32, f64) = (20, 0.5);
/// The same of an organisation: a burst is a sixteenth of the events that are kept.
const OF_OWNER: (u32, f64) = (256, 0.5);
/// The same for the log, of all VMs together.
const LOGGED: (u32, f64) = (20, 0.5);

/// The counts since the start, and the rates at which events are recorded.
#[derive(Debug)]
pub(crate) struct EventCounter {
    counts: BTreeMap<(&'static str, u32), (u64, TokenBucket)>,
    owners: BTreeMap<String, TokenBucket>,
    logged: TokenBucket,
}

/// The places in which an event is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordedIn {
    /// The number of events of the kind and VM so far, if the event belongs in the event log.
    pub(crate) journal: Option<u64>,
    /// True if the event belongs in the daemon's log.
    pub(crate) log: bool,
}

impl EventCounter {
    pub(crate) fn new(now: Instant) -> Self {
        let (counts, owners) = (BTreeMap::new(), BTreeMap::new());
        Self { counts, owners, logged: bucket(LOGGED, now) }
    }

    /// Counts an event of a VM, or 0, that belongs to an organisation or project.
    pub(crate) fn count(
        &mut self,
        kind: &'static str,
        vm: u32,
        owner: Option<&str>,
        now: Instant,
    ) -> RecordedIn {
        let (count, of_vm) = self.counts.entry((kind, vm)).or_insert_with(|| (0, bucket(OF_VM, now)));
        *count += 1;
        let mut recorded = of_vm.take(now).is_ok();
        if let Some(owner) = owner.filter(|_| recorded) {
            let of_owner = self.owners.entry(owner.to_owned()).or_insert_with(|| bucket(OF_OWNER, now));
            recorded = of_owner.take(now).is_ok();
        }
        RecordedIn { journal: recorded.then_some(*count), log: self.logged.take(now).is_ok() }
    }

    /// Events since the start: kind, VM, count.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u32, u64)> {
        self.counts.iter().map(|((kind, vm), (count, _))| (*kind, *vm, *count)).collect()
    }
}

fn bucket((burst, per_second): (u32, f64), now: Instant) -> TokenBucket {
    TokenBucket::new(per_second, burst, now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::journal::KEPT;

    // Promise: A56
    #[test]
    fn organisation_with_many_vms_fills_a_sixteenth_of_the_event_log() {
        let now = Instant::now();
        let mut counter = EventCounter::new(now);
        let mut recorded = 0;
        for _ in 0..30 {
            for vm in 1..=64 {
                for kind in ["abuse", "drift", "leak", "growing", "hung"] {
                    recorded += usize::from(counter.count(kind, vm, Some("acme"), now).journal.is_some());
                }
            }
        }
        assert_eq!(recorded, KEPT / 16);
        let all: u64 = counter.counts().iter().map(|(_, _, count)| count).sum();
        assert_eq!(all, 30 * 64 * 5, "an event is not counted");
        let other = |counter: &mut EventCounter, owner| counter.count("abuse", 100, owner, now).journal;
        assert_eq!(other(&mut counter, Some("evil")), Some(1));
        assert_eq!(other(&mut counter, None), Some(2));
    }

    #[test]
    fn vm_records_a_burst_of_each_kind_and_the_log_gets_one_burst_in_total() {
        let now = Instant::now();
        let mut counter = EventCounter::new(now);
        let mut noted = |kind, vm| (0..100).map(|_| counter.count(kind, vm, None, now)).collect::<Vec<_>>();
        let (first, second) = (noted("abuse", 1), noted("leak", 1));
        for events in [&first, &second] {
            let journal: Vec<_> = events.iter().filter_map(|recorded| recorded.journal).collect();
            assert_eq!(journal, (1..=20).collect::<Vec<_>>());
        }
        let logged = first.iter().chain(&second).filter(|recorded| recorded.log).count();
        assert_eq!(logged, 20);
    }
}

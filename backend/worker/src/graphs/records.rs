//! The dispatcher's records of executable graphs: their descriptions, and the objects that they use.

use crate::{
    graphs::{
        executables::{GraphEnd, GraphSerial},
        plan::{EventKey, GraphUses},
    },
    session::objects::ContextRef,
};
use core::ops::Bound;
use sluice_driver::{Code, code};
use sluice_protocol::{
    handle::{Array, Function, GraphExecutable, Id, Module},
    limits,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The description of an executable, as the guest gave it.
#[derive(Debug, Default)]
pub(crate) struct GraphDescription {
    /// The plan.
    pub(crate) plan: Vec<u8>,
    /// Changes of single nodes since, by the way to them.
    pub(crate) changes: BTreeMap<Vec<u32>, Vec<u8>>,
    /// Bytes of the changes.
    change_bytes: usize,
}

impl GraphDescription {
    fn new(plan: Vec<u8>) -> GraphDescription {
        GraphDescription { plan, ..GraphDescription::default() }
    }

    const fn bytes(&self) -> u64 {
        (self.plan.len() + self.change_bytes) as u64
    }

    /// Adds a change of one node. A whole graph comes in the place of another: changes inside that are part of the past.
    fn change(&mut self, path: Vec<u32>, change: Vec<u8>) {
        let behind = (Bound::Included(path.as_slice()), Bound::Unbounded);
        let replaced = self.changes.range::<[u32], _>(behind).take_while(|(at, _)| at.starts_with(&path));
        let replaced: Vec<Vec<u32>> = replaced.map(|(at, _)| at.clone()).collect();
        for at in replaced {
            let bytes = self.changes.remove(&at).map_or(0, |change| bytes_of(&at, &change));
            self.change_bytes = self.change_bytes.saturating_sub(bytes);
        }
        self.change_bytes += bytes_of(&path, &change);
        self.changes.insert(path, change);
    }
}

/// Bytes of a change of one node.
const fn bytes_of(path: &[u32], change: &[u8]) -> usize {
    size_of_val(path) + change.len()
}

/// A change of an executable that the module helper is making.
#[derive(Debug)]
enum Pending {
    /// The executable itself.
    Made,
    /// The work of one node.
    Work { path: Vec<u32>, change: Vec<u8> },
    /// The work of all nodes.
    Plan(Vec<u8>),
}

impl Pending {
    const fn bytes(&self) -> usize {
        match self {
            Pending::Made => 0,
            Pending::Work { path, change } => bytes_of(path.as_slice(), change.as_slice()),
            Pending::Plan(plan) => plan.len(),
        }
    }
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct GraphRecord {
    pub(crate) serial: GraphSerial,
    pub(crate) description: GraphDescription,
    pub(crate) uses: GraphUses,
    pending: Option<Pending>,
    /// True if the driver's executable may have a part of a change that the description does not have.
    broken: bool,
    /// The count of losses at which everything that it uses was last seen to exist.
    seen: u64,
    /// Ids that it used and whose objects are gone since. A guest may give such an id to a later object, which the driver's
    /// executable does not have.
    lost: (HashSet<Id<Function>>, HashSet<Id<Array>>),
    /// True if it ever used such an object: the driver's graph from which it was made may name the object still.
    has_lost_any: bool,
}

impl GraphRecord {
    /// True if an object of those uses has ended since the executable was last seen to be complete.
    pub(crate) fn has_lost(&self, uses: &GraphUses) -> bool {
        let (functions, arrays) = &self.lost;
        functions.iter().any(|function| uses.functions.contains_key(function))
            || !arrays.is_disjoint(&uses.arrays)
    }

    /// True if a function or an array that it ever used is gone.
    pub(crate) const fn has_lost_any(&self) -> bool {
        self.has_lost_any
    }

    /// Bytes of its description, and of the change that is under way.
    fn bytes(&self) -> u64 {
        self.description.bytes() + self.pending.as_ref().map_or(0, Pending::bytes) as u64
    }

    /// True while the module helper makes or changes it.
    pub(crate) const fn is_changing(&self) -> bool {
        self.pending.is_some()
    }

    /// True if its description says nothing about it, from a change that the driver refused until one of all nodes.
    pub(crate) const fn is_broken(&self) -> bool {
        self.broken
    }
}

/// All executable graphs of a session.
#[derive(Debug, Default)]
pub(crate) struct GraphRecords {
    live: HashMap<Id<GraphExecutable>, GraphRecord>,
    /// Events of executables that the module helper has not destroyed yet.
    dying: HashMap<GraphSerial, BTreeSet<EventKey>>,
    /// The number of executables that use each event.
    events: BTreeMap<EventKey, u32>,
    /// Events that the guest has destroyed and that executables use. They are destroyed with the last of those.
    parked: BTreeSet<EventKey>,
    serial: GraphSerial,
    nodes: u32,
    bytes: u64,
    /// Counts what executables may have lost: arenas that were detached, modules that were unloaded.
    losses: u64,
}

impl GraphRecords {
    /// True if there is room for more nodes, bytes and uses of events.
    fn has_room(&self, nodes: u32, bytes: usize, uses: &GraphUses) -> bool {
        let of_dying: usize = self.dying.values().map(BTreeSet::len).sum();
        let of_live: usize = self.live.values().map(|record| record.uses.events.len()).sum();
        self.nodes.saturating_add(nodes) <= limits::SESSION_GRAPH_NODES
            && self.bytes.saturating_add(bytes as u64) <= limits::SESSION_GRAPH_BYTES
            && of_dying + of_live + uses.events.len() <= limits::EVENTS as usize
    }

    /// Records an executable in the making, and returns its serial.
    pub(crate) fn make(
        &mut self,
        id: Id<GraphExecutable>,
        plan: Vec<u8>,
        uses: GraphUses,
    ) -> Result<GraphSerial, Code> {
        if !self.has_room(uses.nodes, plan.len(), &uses) {
            return Err(code::OUT_OF_MEMORY);
        }
        self.serial += 1;
        let serial = self.serial;
        self.use_events(&uses.events);
        self.nodes += uses.nodes;
        let description = GraphDescription::new(plan);
        self.bytes += description.bytes();
        let (pending, seen) = (Some(Pending::Made), self.losses);
        let (broken, lost, has_lost_any) = (false, Default::default(), false);
        let record = GraphRecord { serial, description, uses, pending, broken, seen, lost, has_lost_any };
        self.live.insert(id, record);
        Ok(serial)
    }

    pub(crate) fn get(&self, id: Id<GraphExecutable>) -> Option<&GraphRecord> {
        self.live.get(&id)
    }

    /// The executable that a call may change, if no other change is under way.
    fn changeable(&self, id: Id<GraphExecutable>) -> Result<&GraphRecord, Code> {
        let record = self.live.get(&id).ok_or(code::INVALID_HANDLE)?;
        if record.is_changing() { Err(code::ILLEGAL_STATE) } else { Ok(record) }
    }

    /// Begins a change of one node, and returns the serial.
    pub(crate) fn change(
        &mut self,
        id: Id<GraphExecutable>,
        path: &[u32],
        change: Vec<u8>,
        uses: GraphUses,
    ) -> Result<GraphSerial, Code> {
        self.changeable(id)?;
        if !self.has_room(0, bytes_of(path, &change), &uses) {
            return Err(code::OUT_OF_MEMORY);
        }
        self.begin(id, Pending::Work { path: path.to_vec(), change }, uses)
    }

    /// Begins a change of all nodes, and returns the serial.
    pub(crate) fn update(
        &mut self,
        id: Id<GraphExecutable>,
        plan: Vec<u8>,
        uses: GraphUses,
    ) -> Result<GraphSerial, Code> {
        self.changeable(id)?;
        if !self.has_room(0, plan.len(), &uses) {
            return Err(code::OUT_OF_MEMORY);
        }
        self.begin(id, Pending::Plan(plan), uses)
    }

    /// The events count as used from now on, even if the change then fails: the driver may have a part of it.
    fn begin(
        &mut self,
        id: Id<GraphExecutable>,
        pending: Pending,
        uses: GraphUses,
    ) -> Result<GraphSerial, Code> {
        let record = self.live.get_mut(&id).ok_or(code::INVALID_HANDLE)?;
        let new: BTreeSet<EventKey> = uses.events.difference(&record.uses.events).copied().collect();
        record.uses.add(uses);
        self.bytes += pending.bytes() as u64;
        record.pending = Some(pending);
        let serial = record.serial;
        self.use_events(&new);
        Ok(serial)
    }

    /// Ends the change that is under way. `false` if the executable is gone, or was not made.
    pub(crate) fn ended(&mut self, id: Id<GraphExecutable>, serial: GraphSerial, end: GraphEnd) -> bool {
        let Some(record) = self.live.get_mut(&id).filter(|record| record.serial == serial) else {
            return false;
        };
        let before = record.bytes();
        match (end, record.pending.take()) {
            (GraphEnd::NotMade, _) => {
                self.remove(id);
                return false;
            }
            (GraphEnd::Changed, Some(Pending::Work { path, change })) => {
                record.description.change(path, change);
            }
            (GraphEnd::Changed, Some(Pending::Plan(plan))) => {
                record.description = GraphDescription::new(plan);
                record.broken = false;
            }
            (GraphEnd::Broken, _) => record.broken = true,
            (GraphEnd::Made(_) | GraphEnd::Refused | GraphEnd::Changed, _) => {}
        }
        self.bytes = self.bytes.saturating_add(record.bytes()).saturating_sub(before);
        true
    }

    /// Removes an executable, which the module helper then destroys.
    pub(crate) fn remove(&mut self, id: Id<GraphExecutable>) -> Option<GraphSerial> {
        let record = self.live.remove(&id)?;
        self.nodes = self.nodes.saturating_sub(record.uses.nodes);
        self.bytes = self.bytes.saturating_sub(record.bytes());
        self.dying.insert(record.serial, record.uses.events);
        Some(record.serial)
    }

    /// Removes the executables that use a context which is being destroyed, and its events.
    pub(crate) fn context_gone(&mut self, context: ContextRef) -> Vec<Id<GraphExecutable>> {
        let of_context =
            |record: &GraphRecord| record.uses.contexts.iter().any(|used| used.context == context);
        let ids: Vec<_> =
            self.live.iter().filter(|(_, record)| of_context(record)).map(|(id, _)| *id).collect();
        ids.iter().for_each(|id| _ = self.remove(*id));
        // The driver destroys events with their context.
        self.parked.retain(|event| event.context != context.serial);
        ids
    }

    /// Records that the driver has destroyed an executable. Returns the events that can be destroyed now.
    pub(crate) fn gone(&mut self, serial: GraphSerial) -> Vec<EventKey> {
        let mut free = Vec::new();
        for event in self.dying.remove(&serial).unwrap_or_default() {
            let Some(users) = self.events.get_mut(&event) else { continue };
            *users -= 1;
            if *users == 0 {
                self.events.remove(&event);
                free.extend(self.parked.take(&event));
            }
        }
        free
    }

    fn use_events(&mut self, events: &BTreeSet<EventKey>) {
        events.iter().for_each(|event| *self.events.entry(*event).or_default() += 1);
    }

    /// True if executables use an event that the guest destroys: then it is destroyed with the last of them.
    pub(crate) fn keeps(&mut self, event: EventKey) -> bool {
        self.events.contains_key(&event) && self.parked.insert(event)
    }

    /// Records that an arena was detached.
    pub(crate) const fn arena_gone(&mut self) {
        self.losses += 1;
    }

    /// Records that a module was unloaded.
    pub(crate) fn module_gone(&mut self, module: Id<Module>) {
        for record in self.live.values_mut() {
            let gone = record.uses.functions.extract_if(|_, of| *of == module).map(|(function, _)| function);
            let gone: Vec<Id<Function>> = gone.collect();
            self.losses += u64::from(!gone.is_empty());
            record.has_lost_any |= !gone.is_empty();
            record.lost.0.extend(gone);
        }
    }

    /// Records that arrays were destroyed.
    pub(crate) fn arrays_gone(&mut self, arrays: &HashSet<Id<Array>>) {
        for record in self.live.values_mut() {
            // Goes through the smaller of the two sets.
            let gone: Vec<Id<Array>> = record.uses.arrays.intersection(arrays).copied().collect();
            self.losses += u64::from(!gone.is_empty());
            record.has_lost_any |= !gone.is_empty();
            record.lost.1.extend(gone);
        }
    }

    /// True if an executable may have lost something since it was last seen to be complete.
    pub(crate) const fn may_lack(&self, record: &GraphRecord) -> bool {
        record.seen != self.losses
    }

    /// Records that an executable lacks nothing.
    pub(crate) fn complete(&mut self, id: Id<GraphExecutable>) {
        if let Some(record) = self.live.get_mut(&id) {
            record.seen = self.losses;
            record.lost = Default::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Id<GraphExecutable> = Id::<GraphExecutable>::new(0, 1);
    const TWO: Id<GraphExecutable> = Id::<GraphExecutable>::new(1, 1);
    const MADE: GraphEnd = GraphEnd::Made(1);

    fn event(handle: u64) -> EventKey {
        EventKey { context: 1, handle }
    }

    fn uses(events: &[u64]) -> GraphUses {
        GraphUses {
            nodes: 2,
            events: events.iter().map(|handle| event(*handle)).collect(),
            ..GraphUses::default()
        }
    }

    // Promise: C72
    #[test]
    fn event_is_kept_until_the_last_executable_that_uses_it_is_gone() {
        let mut records = GraphRecords::default();
        let one = records.make(ONE, vec![0; 8], uses(&[5])).unwrap();
        let two = records.make(TWO, vec![0; 8], uses(&[5, 6])).unwrap();
        assert!(records.ended(ONE, one, MADE) && records.ended(TWO, two, MADE));
        assert!(!records.keeps(event(7)), "none uses it");
        assert!(records.keeps(event(5)));
        assert_eq!(records.remove(ONE), Some(one));
        assert!(records.gone(one).is_empty(), "the other one uses it");
        records.remove(TWO);
        assert!(records.keeps(event(6)), "the driver still has the executable");
        assert_eq!(records.gone(two), [event(5), event(6)]);
        assert!(!records.keeps(event(5)));
    }

    #[test]
    fn executable_that_was_not_made_counts_for_nothing() {
        let mut records = GraphRecords::default();
        let serial = records.make(ONE, vec![0; 8], uses(&[5])).unwrap();
        assert_eq!(records.change(ONE, &[0], vec![], uses(&[])), Err(code::ILLEGAL_STATE), "in the making");
        assert!(!records.ended(ONE, serial, GraphEnd::NotMade));
        assert_eq!((records.nodes, records.bytes), (0, 0));
        assert!(records.gone(serial).is_empty());
        assert!(!records.keeps(event(5)) && records.get(ONE).is_none());
    }

    #[test]
    fn description_takes_the_bytes_of_its_latest_changes_only() {
        let mut records = GraphRecords::default();
        let serial = records.make(ONE, vec![0; 100], uses(&[])).unwrap();
        records.ended(ONE, serial, MADE);
        for bytes in [10, 30, 20] {
            records.change(ONE, &[4, 1], vec![0; bytes], uses(&[])).unwrap();
            assert_eq!(records.update(ONE, vec![], uses(&[])), Err(code::ILLEGAL_STATE), "one at a time");
            assert!(records.ended(ONE, serial, GraphEnd::Changed));
        }
        assert_eq!(records.bytes, 128);
        records.change(ONE, &[4], vec![0; 50], uses(&[])).unwrap();
        records.ended(ONE, serial, GraphEnd::Refused);
        assert_eq!(records.bytes, 128, "a change that failed");
        records.change(ONE, &[4], vec![0; 50], uses(&[])).unwrap();
        records.ended(ONE, serial, GraphEnd::Changed);
        assert_eq!(records.bytes, 154, "the child graph is replaced with the change inside it");
        for (path, bytes) in [(&[3][..], 158), (&[4, 1], 166), (&[4, 2, 7], 178), (&[5], 182), (&[4, 2], 178)]
        {
            records.change(ONE, path, vec![], uses(&[])).unwrap();
            records.ended(ONE, serial, GraphEnd::Changed);
            assert_eq!(records.bytes, bytes, "{path:?}");
        }
        records.update(ONE, vec![0; 60], uses(&[])).unwrap();
        records.ended(ONE, serial, GraphEnd::Changed);
        assert_eq!(records.bytes, 60);
        records.remove(ONE);
        assert_eq!((records.nodes, records.bytes), (0, 0));
    }

    // Promise: C70
    #[test]
    fn descriptions_beyond_the_limits_of_a_session_are_refused() {
        let mut records = GraphRecords::default();
        let large = |nodes| GraphUses { nodes, ..GraphUses::default() };
        records.make(ONE, vec![], large(limits::SESSION_GRAPH_NODES)).unwrap();
        assert_eq!(records.make(TWO, vec![], large(1)), Err(code::OUT_OF_MEMORY));
        let mut records = GraphRecords::default();
        let half = vec![0; usize::try_from(limits::SESSION_GRAPH_BYTES / 2 + 1).unwrap()];
        records.make(ONE, half.clone(), large(1)).unwrap();
        assert_eq!(records.make(TWO, half, large(1)), Err(code::OUT_OF_MEMORY));
        let mut records = GraphRecords::default();
        let events: Vec<u64> = (0..u64::from(limits::EVENTS)).collect();
        records.make(ONE, vec![], uses(&events)).unwrap();
        assert_eq!(records.make(TWO, vec![], uses(&[1])).err(), Some(code::OUT_OF_MEMORY));
    }

    #[test]
    fn executables_end_with_a_context_that_they_use() {
        use crate::session::objects::GuestContext;
        let context =
            |serial| GuestContext { context: ContextRef { handle: 9, serial }, device: 0, primary: false };
        let mut records = GraphRecords::default();
        let of = |serial| GraphUses { contexts: vec![context(serial)], ..uses(&[serial]) };
        let one = records.make(ONE, vec![], of(1)).unwrap();
        records.make(TWO, vec![], of(2)).unwrap();
        assert!(records.keeps(event(1)));
        assert_eq!(records.context_gone(context(1).context), [ONE]);
        assert!(records.get(ONE).is_none() && records.get(TWO).is_some());
        assert!(records.gone(one).is_empty(), "the driver destroys the event with the context");
    }
}

//! Requests that wait, in one line per VM and kind: in each line the oldest goes first, and lines take turns. So the cost of a turn
//! grows with the number of VMs, and not with the requests of one of them.

use crate::ids::{VmKey, WorkerId};
use std::collections::{BTreeMap, VecDeque};

/// A waiting request.
pub(super) trait Waits {
    /// The worker that made it.
    fn worker(&self) -> WorkerId;
}

/// A VM, and a kind of its requests.
pub(super) type Line<K> = (VmKey, K);

/// The lines of all VMs; none is empty.
#[derive(Debug)]
pub(super) struct Lines<K, T> {
    lines: BTreeMap<Line<K>, VecDeque<T>>,
    /// The line whose turn was the last one.
    last: Option<Line<K>>,
}

impl<K, T> Default for Lines<K, T> {
    fn default() -> Lines<K, T> {
        Lines { lines: BTreeMap::new(), last: None }
    }
}

impl<K: Ord + Copy, T: Waits> Lines<K, T> {
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Adds a request behind the others of its line.
    pub(super) fn push(&mut self, line: Line<K>, request: T) {
        self.lines.entry(line).or_default().push_back(request);
    }

    /// True if requests of this line wait.
    pub(super) fn waits(&self, line: Line<K>) -> bool {
        self.lines.contains_key(&line)
    }

    pub(super) fn get(&self, line: Line<K>, index: usize) -> Option<&T> {
        self.lines.get(&line)?.get(index)
    }

    pub(super) fn front_mut(&mut self, line: Line<K>) -> Option<&mut T> {
        self.lines.get_mut(&line)?.front_mut()
    }

    pub(super) fn remove(&mut self, line: Line<K>, index: usize) -> Option<T> {
        let requests = self.lines.get_mut(&line)?;
        let removed = requests.remove(index);
        if requests.is_empty() {
            self.lines.remove(&line);
        }
        removed
    }

    /// The first request of every line.
    pub(super) fn fronts(&self) -> impl Iterator<Item = (Line<K>, &T)> {
        self.lines.iter().filter_map(|(line, requests)| Some((*line, requests.front()?)))
    }

    /// The first requests of every line, up to a number.
    pub(super) fn heads(&self, most: usize) -> impl Iterator<Item = (Line<K>, usize, &T)> {
        let heads = self.lines.iter().map(move |(line, requests)| (line, requests.iter().take(most)));
        heads.flat_map(|(line, head)| (0..).zip(head).map(|(index, request)| (*line, index, request)))
    }

    /// All lines, beginning behind the one whose turn was the last.
    pub(super) fn turns(&self) -> VecDeque<Line<K>> {
        let mut lines: VecDeque<Line<K>> = self.lines.keys().copied().collect();
        let done = self.last.map_or(0, |last| lines.iter().take_while(|line| **line <= last).count());
        lines.rotate_left(done);
        lines
    }

    /// Records a line's turn.
    pub(super) const fn had_turn(&mut self, line: Line<K>) {
        self.last = Some(line);
    }

    /// Removes the requests of a worker.
    pub(super) fn remove_worker(&mut self, vm: VmKey, worker: WorkerId) {
        for (_, requests) in self.lines.iter_mut().filter(|((of, _), _)| *of == vm) {
            requests.retain(|request| request.worker() != worker);
        }
        self.lines.retain(|_, requests| !requests.is_empty());
    }

    /// Removes and returns the requests of a VM.
    pub(super) fn remove_vm(&mut self, vm: VmKey) -> Vec<T> {
        let lines: Vec<Line<K>> = self.lines.keys().filter(|(of, _)| *of == vm).copied().collect();
        lines.into_iter().filter_map(|line| self.lines.remove(&line)).flatten().collect()
    }
}

//! What a program has said of managed memory: where it would like to have it and who will use it.
//!
//! Managed memory is memory of the host that every device reaches, so it never moves and advice changes nothing; it is
//! kept because programs may ask for it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{BlockKind, Space};
use crate::context::lock;
use crate::error::{Error, Result};

/// `CUmemLocation`: a kind and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// What was said of a range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Advice {
    pub(crate) read_mostly: bool,
    pub(crate) preferred: Option<Location>,
    pub(crate) accessed_by: BTreeSet<Location>,
    pub(crate) prefetched: Option<Location>,
}

/// Ranges of which something was said, by their starts; they do not overlap.
#[derive(Debug, Default)]
pub(super) struct Advised(BTreeMap<u64, (u64, Advice)>);

impl Advised {
    /// Makes an address a border.
    fn cut(&mut self, at: u64) {
        let Some((start, (end, advice))) = self.0.range_mut(..at).next_back() else { return };
        if at < *end {
            let (start, rest) = (*start, (*end, advice.clone()));
            self.0.insert(at, rest);
            if let Some(before) = self.0.get_mut(&start) {
                before.0 = at;
            }
        }
    }

    /// Says something of a range.
    fn change(&mut self, range: Range<u64>, change: impl Fn(&mut Advice)) {
        self.cut(range.start);
        self.cut(range.end);
        let mut at = range.start;
        while at < range.end {
            let next = self.0.range(at..).next().map_or(range.end, |(start, _)| (*start).min(range.end));
            if next > at {
                self.0.insert(at, (next, Advice::default()));
            }
            let Some((end, advice)) = self.0.get_mut(&at) else { return };
            change(advice);
            at = *end;
        }
    }

    /// What was said of a range: each different thing, with nothing for parts of which nothing was.
    fn over(&self, range: &Range<u64>) -> Vec<Advice> {
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let before = self.0.range(..=at).next_back().filter(|(_, (end, _))| *end > at);
            let (end, advice) = match before {
                Some((_, (end, advice))) => (*end, advice.clone()),
                None => {
                    let next = self.0.range(at..).next().map_or(range.end, |(start, _)| *start);
                    (next, Advice::default())
                }
            };
            if !found.contains(&advice) {
                found.push(advice);
            }
            at = end;
        }
        found
    }

    /// Forgets a range that is gone.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.cut(range.start);
        self.cut(range.end);
        self.0.retain(|start, _| !range.contains(start));
    }
}

impl Space {
    /// Whether all of a range is one managed block.
    pub(crate) fn is_managed(&self, range: &Range<u64>) -> bool {
        let block = self.block_at(range.start).filter(|block| block.kind == BlockKind::Managed);
        block.is_some_and(|block| !range.is_empty() && range.end <= block.range().end)
    }

    /// Notes what was said of managed memory.
    pub(crate) fn advise(&self, range: Range<u64>, change: impl Fn(&mut Advice)) -> Result {
        if !self.is_managed(&range) {
            return Err(Error::INVALID_VALUE);
        }
        lock(&self.book).advised.change(range, change);
        Ok(())
    }

    /// Each different thing that was said of parts of a range.
    pub(crate) fn advice(&self, range: &Range<u64>) -> Result<Vec<Advice>> {
        if !self.is_managed(range) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(lock(&self.book).advised.over(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_for_the_range_it_was_given_for() {
        let mut advised = Advised::default();
        advised.change(100..200, |advice| advice.read_mostly = true);
        advised.change(150..300, |advice| advice.prefetched = Some(Location { kind: 1, id: 0 }));
        let told = |advised: &Advised, range: Range<u64>| -> Vec<(bool, bool)> {
            let told = advised.over(&range);
            told.iter().map(|advice| (advice.read_mostly, advice.prefetched.is_some())).collect()
        };
        assert_eq!(told(&advised, 0..50), [(false, false)]);
        assert_eq!(told(&advised, 100..150), [(true, false)]);
        assert_eq!(told(&advised, 150..200), [(true, true)]);
        assert_eq!(told(&advised, 200..300), [(false, true)]);
        assert_eq!(told(&advised, 90..310).len(), 4);
        advised.forget(&(120..180));
        assert_eq!(told(&advised, 120..180), [(false, false)]);
        assert_eq!(told(&advised, 100..120), [(true, false)]);
        assert_eq!(told(&advised, 180..200), [(true, true)]);
    }
}

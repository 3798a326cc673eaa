//! Escrows: the shares of projects and organisations in each unit.
//!
//! A limit of a project spans units, and each arbiter decides alone: so each is granted an *escrow*, a part of the limit of its
//! own, and the parts never add up to more than the whole. To move a part, the daemon first tells the unit that has it of the
//! lower part; the memory it still lends can then only fall, and only the amount beyond both is given to another unit.

use std::collections::BTreeMap;

use sluice_messages::custody::UNIT;

/// The escrows of all projects and organisations.
#[derive(Debug)]
pub(crate) struct Escrows {
    books: BTreeMap<u32, Book>,
}

/// One project's or organisation's.
#[derive(Debug)]
struct Book {
    limit: u64,
    /// By unit; one that is not named has nothing. Their sum never exceeds the limit.
    shares: BTreeMap<u32, u64>,
}

impl Escrows {
    /// Even parts for these units; others get theirs when they ask.
    pub(crate) fn new(limits: impl IntoIterator<Item = (u32, u64)>, units: &[u32]) -> Self {
        let book = |limit: u64| {
            let count = u64::try_from(units.len()).ok();
            let part = count.and_then(|count| limit.checked_div(count)).unwrap_or(0);
            // What a quota is counted in; the rest is free to be asked for.
            Book { limit, shares: units.iter().map(|unit| (*unit, part - part % UNIT)).collect() }
        };
        Self { books: limits.into_iter().map(|(ancestor, limit)| (ancestor, book(limit))).collect() }
    }

    /// Says what an ancestor may have from now on. A new one has even parts; one that may have less keeps its parts until
    /// they are taken.
    pub(crate) fn limit(&mut self, ancestor: u32, limit: u64, units: &[u32]) {
        match self.books.get_mut(&ancestor) {
            Some(book) => book.limit = limit,
            None => {
                let new = Self::new([(ancestor, limit)], units);
                self.books.extend(new.books);
            }
        }
    }

    /// Whether an ancestor has a limit.
    pub(crate) fn knows(&self, ancestor: u32) -> bool {
        self.books.contains_key(&ancestor)
    }

    /// Parts that are known already.
    pub(crate) fn restore(&mut self, ancestor: u32, limit: u64, shares: BTreeMap<u32, u64>) {
        self.books.insert(ancestor, Book { limit, shares });
    }

    /// An ancestor is gone.
    pub(crate) fn remove(&mut self, ancestor: u32) {
        self.books.remove(&ancestor);
    }

    /// Ancestors whose parts add up to more than they may have now, and by how much.
    pub(crate) fn excess(&self) -> Vec<(u32, u64)> {
        let over = |(ancestor, book): (&u32, &Book)| {
            let excess = book.shares.values().sum::<u64>().checked_sub(book.limit)?;
            (excess > 0).then_some((*ancestor, excess))
        };
        self.books.iter().filter_map(over).collect()
    }

    /// A unit is gone: nobody has a part of it.
    pub(crate) fn forget_unit(&mut self, unit: u32) {
        for book in self.books.values_mut() {
            book.shares.remove(&unit);
        }
    }

    /// All of them: ancestor, unit, bytes.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        self.books
            .iter()
            .flat_map(|(ancestor, book)| book.shares.iter().map(|(unit, share)| (*ancestor, *unit, *share)))
    }

    /// What a unit has.
    pub(crate) fn share(&self, ancestor: u32, unit: u32) -> u64 {
        self.books.get(&ancestor).and_then(|book| book.shares.get(&unit)).copied().unwrap_or(0)
    }

    /// Gives a unit of what no other has, up to `bytes` in all. Returns what is missing then, never more than the limit
    /// allows at all.
    pub(crate) fn grow(&mut self, ancestor: u32, unit: u32, bytes: u64) -> u64 {
        let Some(book) = self.books.get_mut(&ancestor) else { return 0 };
        let free = book.limit.saturating_sub(book.shares.values().sum());
        let share = book.shares.entry(unit).or_default();
        let need = bytes.min(book.limit).saturating_sub(*share);
        let grant = need.min(free);
        *share += grant;
        need - grant
    }

    /// Takes from a unit what is above `bytes`.
    pub(crate) fn shrink(&mut self, ancestor: u32, unit: u32, bytes: u64) {
        let share = self.books.get_mut(&ancestor).and_then(|book| book.shares.get_mut(&unit));
        if let Some(share) = share {
            *share = (*share).min(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_unit_gets_what_others_do_not_use() {
        let mut escrows = Escrows::new([(7, 100 * UNIT)], &[0, 1, 2, 3]);
        assert_eq!(escrows.all().map(|(_, _, bytes)| bytes).collect::<Vec<_>>(), [25 * UNIT; 4]);
        assert_eq!(escrows.grow(7, 0, 40 * UNIT), 15 * UNIT, "all of it is with others");
        escrows.shrink(7, 3, 5 * UNIT);
        assert_eq!(escrows.grow(7, 0, 40 * UNIT), 0);
        assert_eq!(escrows.share(7, 0), 40 * UNIT);
        assert_eq!(escrows.grow(7, 0, u64::MAX), 55 * UNIT, "never more than the limit");
        assert_eq!(escrows.grow(8, 0, 1), 0, "an unknown ancestor has nothing");
        escrows.forget_unit(0);
        assert_eq!(
            escrows.grow(7, 9, u64::MAX),
            55 * UNIT,
            "a unit that is new takes what one that is gone had"
        );
    }

    // Promise: Q40
    #[test]
    fn a_limit_that_falls_leaves_what_has_to_be_taken() {
        let mut escrows = Escrows::new([], &[]);
        escrows.limit(7, 100 * UNIT, &[0, 1]);
        assert_eq!((escrows.share(7, 0), escrows.excess()), (50 * UNIT, Vec::new()));
        escrows.limit(7, 60 * UNIT, &[0, 1]);
        assert_eq!(escrows.excess(), [(7, 40 * UNIT)]);
        assert_eq!(escrows.grow(7, 1, 55 * UNIT), 5 * UNIT, "nobody gets more meanwhile");
        escrows.shrink(7, 0, 10 * UNIT);
        assert_eq!(escrows.excess(), []);
        escrows.limit(7, 200 * UNIT, &[0, 1]);
        assert_eq!(escrows.grow(7, 1, 150 * UNIT), 0);
        escrows.remove(7);
        assert_eq!((escrows.share(7, 1), escrows.grow(7, 1, 1)), (0, 0));
    }

    proptest! {
        // Promise: Q40
        #[test]
        fn parts_never_exceed_the_whole(
            limit in 0..1_000_u64,
            units in 0..5_u32,
            moves in proptest::collection::vec((any::<bool>(), 0..6_u32, 0..2_000_u64), 0..50)
        ) {
            let mut escrows = Escrows::new([(1, limit * UNIT)], &(0..units).collect::<Vec<_>>());
            for (grow, unit, bytes) in moves {
                if grow {
                    escrows.grow(1, unit, bytes * UNIT);
                } else {
                    escrows.shrink(1, unit, bytes * UNIT);
                }
                let sum: u64 = escrows.all().map(|(_, _, bytes)| bytes).sum();
                prop_assert!(sum <= limit * UNIT);
            }
        }
    }
}

//! Escrows: the shares of projects and organisations in each unit.
//!
//! A limit of a project spans units, and each arbiter decides alone: so each is granted an *escrow*, a part of the limit, and
//! the parts never add up to more than the whole. To move a part, the daemon first sends its unit the lower part; the bytes
//! that the unit charges (lent memory and the driver's share) can then only fall, and only the amount beyond both is given to
//! another unit.

use std::collections::BTreeMap;

use sluice_messages::custody::UNIT;

/// The escrows of all projects and organisations.
#[derive(Debug)]
pub(crate) struct Escrows {
    books: BTreeMap<u32, AncestorEscrows>,
}

/// The escrows of one project or organisation.
#[derive(Debug)]
struct AncestorEscrows {
    limit: u64,
    /// By unit; a unit without an entry has nothing. Their sum never exceeds the limit.
    shares: BTreeMap<u32, u64>,
}

impl Escrows {
    /// Even parts for these units; other units get theirs on request.
    pub(crate) fn new(limits: impl IntoIterator<Item = (u32, u64)>, units: &[u32]) -> Self {
        let book = |limit: u64| {
            let count = u64::try_from(units.len()).ok();
            let part = count.and_then(|count| limit.checked_div(count)).unwrap_or(0);
            // Parts are multiples of the unit of quotas; the rest is free for requests.
            AncestorEscrows { limit, shares: units.iter().map(|unit| (*unit, part - part % UNIT)).collect() }
        };
        Self { books: limits.into_iter().map(|(ancestor, limit)| (ancestor, book(limit))).collect() }
    }

    /// Sets the limit of an ancestor. A new one gets even parts; one with a lower limit keeps its parts until they are taken.
    pub(crate) fn limit(&mut self, ancestor: u32, limit: u64, units: &[u32]) {
        match self.books.get_mut(&ancestor) {
            Some(book) => book.limit = limit,
            None => {
                let new = Self::new([(ancestor, limit)], units);
                self.books.extend(new.books);
            }
        }
    }

    /// True if an ancestor has a limit.
    pub(crate) fn knows(&self, ancestor: u32) -> bool {
        self.books.contains_key(&ancestor)
    }

    /// Sets known parts.
    pub(crate) fn restore(&mut self, ancestor: u32, limit: u64, shares: BTreeMap<u32, u64>) {
        self.books.insert(ancestor, AncestorEscrows { limit, shares });
    }

    /// Removes an ancestor.
    pub(crate) fn remove(&mut self, ancestor: u32) {
        self.books.remove(&ancestor);
    }

    /// Ancestors whose parts exceed their present limit, with the excess.
    pub(crate) fn excess(&self) -> Vec<(u32, u64)> {
        let over = |(ancestor, book): (&u32, &AncestorEscrows)| {
            let excess = book.shares.values().sum::<u64>().checked_sub(book.limit)?;
            (excess > 0).then_some((*ancestor, excess))
        };
        self.books.iter().filter_map(over).collect()
    }

    /// Removes the parts of a unit that is gone.
    pub(crate) fn forget_unit(&mut self, unit: u32) {
        for book in self.books.values_mut() {
            book.shares.remove(&unit);
        }
    }

    /// All escrows: ancestor, unit, bytes.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        self.books
            .iter()
            .flat_map(|(ancestor, book)| book.shares.iter().map(|(unit, share)| (*ancestor, *unit, *share)))
    }

    /// The part of a unit.
    pub(crate) fn share(&self, ancestor: u32, unit: u32) -> u64 {
        self.books.get(&ancestor).and_then(|book| book.shares.get(&unit)).copied().unwrap_or(0)
    }

    /// Gives a unit the free rest of the limit, up to `bytes` in total. Returns the missing bytes, never more than the limit
    /// allows.
    pub(crate) fn grow(&mut self, ancestor: u32, unit: u32, bytes: u64) -> u64 {
        let Some(book) = self.books.get_mut(&ancestor) else { return 0 };
        let free = book.limit.saturating_sub(book.shares.values().sum());
        let share = book.shares.entry(unit).or_default();
        let need = bytes.min(book.limit).saturating_sub(*share);
        let grant = need.min(free);
        *share += grant;
        need - grant
    }

    /// Takes the part of a unit above `bytes`.
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
    fn unit_grows_by_the_parts_that_others_give_up() {
        let mut escrows = Escrows::new([(7, 100 * UNIT)], &[0, 1, 2, 3]);
        assert_eq!(escrows.all().map(|(_, _, bytes)| bytes).collect::<Vec<_>>(), [25 * UNIT; 4]);
        assert_eq!(escrows.grow(7, 0, 40 * UNIT), 15 * UNIT, "other units have all parts");
        escrows.shrink(7, 3, 5 * UNIT);
        assert_eq!(escrows.grow(7, 0, 40 * UNIT), 0);
        assert_eq!(escrows.share(7, 0), 40 * UNIT);
        assert_eq!(escrows.grow(7, 0, u64::MAX), 55 * UNIT, "never more than the limit");
        assert_eq!(escrows.grow(8, 0, 1), 0, "an unknown ancestor has nothing");
        escrows.forget_unit(0);
        assert_eq!(
            escrows.grow(7, 9, u64::MAX),
            55 * UNIT,
            "a new unit takes the part of a unit that is gone"
        );
    }

    // Promise: Q40
    #[test]
    fn lowered_limit_leaves_an_excess_to_take() {
        let mut escrows = Escrows::new([], &[]);
        escrows.limit(7, 100 * UNIT, &[0, 1]);
        assert_eq!((escrows.share(7, 0), escrows.excess()), (50 * UNIT, Vec::new()));
        escrows.limit(7, 60 * UNIT, &[0, 1]);
        assert_eq!(escrows.excess(), [(7, 40 * UNIT)]);
        assert_eq!(escrows.grow(7, 1, 55 * UNIT), 5 * UNIT, "no unit gets more before the excess is taken");
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
        fn parts_never_exceed_the_limit(
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

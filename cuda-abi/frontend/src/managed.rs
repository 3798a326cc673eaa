//! A program's advice about managed memory (`cuMemAdvise`, `cuMemPrefetchAsync`), and the range attributes that return it
//! (`cuMemRangeGetAttribute`).
//!
//! In shim and software GPU managed memory is host memory that every device can access. So nothing ever moves, and advice has no
//! effect; it is only stored. The numbers are those of the driver's header.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// `CU_MEM_ATTACH_GLOBAL`.
pub const ATTACH_GLOBAL: u32 = 1;
/// `CU_MEM_ATTACH_HOST`.
pub const ATTACH_HOST: u32 = 2;
/// `CU_MEM_ATTACH_SINGLE`.
pub const ATTACH_SINGLE: u32 = 4;

/// Granularity of stored advice in bytes: the header rounds ranges outwards to pages of the CPU.
const PAGE: u64 = 4096;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
const CPU: i32 = -1;
const NOWHERE: i32 = -2;

/// A location for memory: a `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub struct Location {
    /// [`Location::ON_DEVICE`], [`Location::HOST`], or another kind that a program passed.
    pub kind: u32,
    /// Index within the kind.
    pub id: i32,
}

const _: () = assert!(size_of::<Location>() == size_of::<sluice_cuda_abi::sys::CUmemLocation>());

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub const ON_DEVICE: u32 = 1;
    /// `CU_MEM_LOCATION_TYPE_HOST`.
    pub const HOST: u32 = 2;

    /// The location for a device number of the older calls.
    #[must_use]
    pub const fn numbered(device: i32) -> Self {
        if device == CPU {
            Self { kind: Self::HOST, id: 0 }
        } else {
            Self { kind: Self::ON_DEVICE, id: device }
        }
    }

    /// Returns the location if memory can be there: an existing device, or the host. All NUMA nodes of the host are equal here.
    pub fn checked<E>(self, device: impl FnOnce(i32) -> Result<(), E>, invalid: E) -> Result<Self, E> {
        match self.kind {
            Self::ON_DEVICE => device(self.id).map(|()| self),
            2..=4 => Ok(Self { kind: Self::HOST, id: 0 }),
            _ => Err(invalid),
        }
    }

    /// A location in the form of the older attributes.
    fn number(place: Option<Self>) -> i32 {
        match place {
            Some(Self { kind: Self::ON_DEVICE, id }) => id,
            Some(_) => CPU,
            None => NOWHERE,
        }
    }
}

/// The advice for a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    read_mostly: bool,
    preferred: Option<Location>,
    prefetched: Option<Location>,
    accessed_by: BTreeSet<Location>,
}

/// A `CUmem_advise`, or a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saying {
    /// True if the range is read far more often than written.
    ReadMostly(bool),
    /// The preferred location.
    Preferred(Option<Location>),
    /// A location, and true if it will access the range.
    AccessedBy(Location, bool),
    /// The location of a prefetch.
    Prefetched(Location),
}

impl Saying {
    /// Decodes an advice of the header. `place` is only called if the location matters.
    ///
    /// # Errors
    /// The errors of `place`, and `invalid` for numbers that the header does not have.
    pub fn of<E>(advice: u32, place: impl FnOnce() -> Result<Location, E>, invalid: E) -> Result<Self, E> {
        Ok(match advice {
            1 | 2 => Self::ReadMostly(advice == 1),
            3 => Self::Preferred(Some(place()?)),
            4 => Self::Preferred(None),
            5 | 6 => Self::AccessedBy(place()?, advice == 5),
            _ => return Err(invalid),
        })
    }

    fn apply(self, advice: &mut Advice) {
        match self {
            Self::ReadMostly(mostly) => advice.read_mostly = mostly,
            Self::Preferred(place) => advice.preferred = place,
            Self::AccessedBy(place, true) => _ = advice.accessed_by.insert(place),
            Self::AccessedBy(place, false) => _ = advice.accessed_by.remove(&place),
            Self::Prefetched(place) => advice.prefetched = Some(place),
        }
    }
}

/// Advice by the starts of its ranges, which do not overlap.
#[derive(Debug, Default)]
pub struct Advised(BTreeMap<u64, (u64, Advice)>);

impl Advised {
    /// Splits the range that contains an address, at that address.
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

    /// Stores advice for a range.
    pub fn say(&mut self, range: &Range<u64>, saying: Saying) {
        let range = pages(range);
        self.cut(range.start);
        self.cut(range.end);
        let mut at = range.start;
        while at < range.end {
            let next = self.0.range(at..).next().map_or(range.end, |(start, _)| (*start).min(range.end));
            if next > at {
                self.0.insert(at, (next, Advice::default()));
            }
            let Some((end, advice)) = self.0.get_mut(&at) else { return };
            saying.apply(advice);
            at = *end;
        }
    }

    /// Returns each distinct advice for a range; parts without advice count as the default advice.
    #[must_use]
    pub fn said(&self, range: &Range<u64>) -> Vec<Advice> {
        let range = pages(range);
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

    /// Removes a range that was freed.
    pub fn forget(&mut self, range: &Range<u64>) {
        let range = pages(range);
        self.cut(range.start);
        self.cut(range.end);
        self.0.retain(|start, _| !range.contains(start));
    }
}

fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE * PAGE..range.end.div_ceil(PAGE).saturating_mul(PAGE)
}

/// The value that all parts of a range have in common, if there is one.
fn common<T: PartialEq + Copy>(said: &[Advice], tell: impl Fn(&Advice) -> Option<T>) -> Option<T> {
    let first = tell(said.first()?);
    if said.iter().all(|advice| tell(advice) == first) { first } else { None }
}

/// Computes a `CUmem_range_attribute` of a range with the advice `said`, and passes it to `put` as numbered words, `size` bytes
/// in all.
///
/// # Errors
/// The errors of `put`, and `invalid` for an attribute that the header does not have or a size that does not match it.
pub fn range_attribute<E>(
    said: &[Advice],
    attribute: u32,
    size: usize,
    invalid: E,
    mut put: impl FnMut(usize, i32) -> Result<(), E>,
) -> Result<(), E> {
    const ACCESSED_BY: u32 = 3;
    if attribute == ACCESSED_BY {
        if size == 0 || !size.is_multiple_of(size_of::<i32>()) {
            return Err(invalid);
        }
        let everywhere = said.first().into_iter().flat_map(|first| first.accessed_by.iter());
        let everywhere = everywhere.filter(|place| said.iter().all(|one| one.accessed_by.contains(place)));
        let devices = everywhere.map(|place| Location::number(Some(*place)));
        let rest = std::iter::repeat(NOWHERE);
        return devices
            .chain(rest)
            .take(size / size_of::<i32>())
            .enumerate()
            .try_for_each(|(at, word)| put(at, word));
    }
    let preferred = || common(said, |advice| advice.preferred);
    let prefetched = || common(said, |advice| advice.prefetched);
    let kind = |place: Option<Location>| place.map_or(0, |place| place.kind.cast_signed());
    let id = |place: Option<Location>| place.map_or(0, |place| place.id);
    let word = match attribute {
        1 => i32::from(said.iter().all(|advice| advice.read_mostly)),
        2 => Location::number(preferred()),
        4 => Location::number(prefetched()),
        5 => kind(preferred()),
        6 => id(preferred()),
        7 => kind(prefetched()),
        8 => id(prefetched()),
        _ => return Err(invalid),
    };
    if size == size_of::<i32>() { put(0, word) } else { Err(invalid) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Location = Location { kind: Location::ON_DEVICE, id: 0 };

    fn told(advised: &Advised, range: Range<u64>) -> Vec<(bool, bool)> {
        let said = advised.said(&(range.start * PAGE..range.end * PAGE));
        said.iter().map(|advice| (advice.read_mostly, advice.prefetched.is_some())).collect()
    }

    #[test]
    fn advice_applies_only_to_the_pages_of_its_range() {
        let mut advised = Advised::default();
        advised.say(&(100 * PAGE..200 * PAGE), Saying::ReadMostly(true));
        advised.say(&(150 * PAGE..300 * PAGE), Saying::Prefetched(HERE));
        assert_eq!(told(&advised, 0..50), [(false, false)]);
        assert_eq!(told(&advised, 100..150), [(true, false)]);
        assert_eq!(told(&advised, 150..200), [(true, true)]);
        assert_eq!(told(&advised, 200..300), [(false, true)]);
        assert_eq!(told(&advised, 90..310).len(), 4);
        advised.forget(&(120 * PAGE..180 * PAGE));
        assert_eq!(told(&advised, 120..180), [(false, false)]);
        assert_eq!(told(&advised, 180..200), [(true, true)]);
        advised.say(&(PAGE + 1..PAGE + 2), Saying::ReadMostly(true));
        assert_eq!(told(&advised, 1..2), [(true, false)], "rounded outwards to pages");
    }

    #[test]
    fn range_attribute_is_returned_only_if_all_pages_agree() {
        let mut advised = Advised::default();
        let one = |advised: &Advised, range: Range<u64>, attribute| {
            let mut word = None;
            let said = advised.said(&range);
            range_attribute(&said, attribute, 4, (), |_, value| {
                word = Some(value);
                Ok(())
            })
            .map(|()| word)
        };
        advised.say(&(0..PAGE), Saying::AccessedBy(HERE, true));
        advised.say(&(0..2 * PAGE), Saying::Preferred(Some(Location::numbered(CPU))));
        assert_eq!(one(&advised, 0..PAGE, 3), Ok(Some(0)));
        assert_eq!(one(&advised, 0..2 * PAGE, 3), Ok(Some(NOWHERE)), "the second page differs");
        assert_eq!(one(&advised, 0..2 * PAGE, 2), Ok(Some(CPU)));
        assert_eq!(one(&advised, 0..3 * PAGE, 2), Ok(Some(NOWHERE)), "the third page differs");
        assert_eq!(one(&advised, 0..PAGE, 5), Ok(Some(2)));
        assert_eq!(one(&advised, 0..PAGE, 9), Err(()));
        let mut words = Vec::new();
        let said = advised.said(&(0..PAGE));
        range_attribute(&said, 3, 12, (), |at, word| {
            words.push((at, word));
            Ok(())
        })
        .unwrap();
        assert_eq!(words, [(0, 0), (1, NOWHERE), (2, NOWHERE)]);
        assert_eq!(range_attribute(&said, 3, 6, (), |_, _| Ok(())), Err(()));
        assert_eq!(range_attribute(&said, 1, 8, (), |_, _| Ok(())), Err(()));
    }
}

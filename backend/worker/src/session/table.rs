//! A table of the session's objects of one kind: it maps ids of the guest to the worker's objects.
//!
//! An id is taken when its call is dispatched ([`Table::reserve`]) and filled when the object exists, so two calls in flight
//! cannot create the same one. The generation must match: a stale id never reaches an object that came later.

use sluice_driver::{Code, code};
use sluice_protocol::handle::{Id, Kind};

#[derive(Debug)]
enum TableEntry<T> {
    Free,
    Reserved(u32),
    Live(u32, T),
}

/// A table of objects of kind `K`. Its length is bounded by `K::LIMIT`, since decoding bounds the index of an id.
#[derive(Debug)]
pub(crate) struct Table<K: Kind, T> {
    entries: Vec<TableEntry<T>>,
    kind: core::marker::PhantomData<K>,
}

impl<K: Kind, T> Default for Table<K, T> {
    fn default() -> Table<K, T> {
        Table::new()
    }
}

impl<K: Kind, T> Table<K, T> {
    pub(crate) const fn new() -> Table<K, T> {
        Table { entries: Vec::new(), kind: core::marker::PhantomData }
    }

    fn entry(&mut self, id: Id<K>) -> &mut TableEntry<T> {
        let index = id.index();
        if index >= self.entries.len() {
            self.grow(index);
        }
        &mut self.entries[index]
    }

    #[cold]
    fn grow(&mut self, index: usize) {
        let length = (index + 1).next_power_of_two().clamp(64, K::LIMIT.max(64) as usize);
        self.entries.resize_with(length, || TableEntry::Free);
    }

    /// Takes a free id for an object in the making.
    pub(crate) fn reserve(&mut self, id: Id<K>) -> Result<(), Code> {
        match self.entry(id) {
            free @ TableEntry::Free => {
                *free = TableEntry::Reserved(id.generation());
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Gives a reserved id its object. If the id is no longer reserved (its context was destroyed), the object is dropped.
    pub(crate) fn fill(&mut self, id: Id<K>, object: T) {
        let entry = self.entry(id);
        if matches!(entry, TableEntry::Reserved(generation) if *generation == id.generation()) {
            *entry = TableEntry::Live(id.generation(), object);
        }
    }

    /// Frees a reserved id whose object was not created.
    pub(crate) fn release(&mut self, id: Id<K>) {
        let entry = self.entry(id);
        if matches!(entry, TableEntry::Reserved(generation) if *generation == id.generation()) {
            *entry = TableEntry::Free;
        }
    }

    /// Takes a free id for an object that exists.
    pub(crate) fn insert(&mut self, id: Id<K>, object: T) -> Result<(), Code> {
        self.reserve(id)?;
        self.fill(id, object);
        Ok(())
    }

    pub(crate) fn is_free(&self, id: Id<K>) -> bool {
        matches!(self.entries.get(id.index()), None | Some(TableEntry::Free))
    }

    pub(crate) fn get(&self, id: Id<K>) -> Option<&T> {
        match self.entries.get(id.index())? {
            TableEntry::Live(generation, object) if *generation == id.generation() => Some(object),
            _ => None,
        }
    }

    pub(crate) fn get_mut(&mut self, id: Id<K>) -> Option<&mut T> {
        match self.entries.get_mut(id.index())? {
            TableEntry::Live(generation, object) if *generation == id.generation() => Some(object),
            _ => None,
        }
    }

    pub(crate) fn remove(&mut self, id: Id<K>) -> Option<T> {
        self.get(id)?;
        match core::mem::replace(self.entry(id), TableEntry::Free) {
            TableEntry::Live(_, object) => Some(object),
            TableEntry::Free | TableEntry::Reserved(_) => None,
        }
    }

    /// Ids of the live objects.
    #[cfg(fuzzing)]
    pub(crate) fn live(&self) -> impl Iterator<Item = Id<K>> + '_ {
        (0_u32..).zip(&self.entries).filter_map(|(index, entry)| match entry {
            TableEntry::Live(generation, _) => Some(Id::new(index, *generation)),
            _ => None,
        })
    }

    /// The first object that `is` accepts.
    pub(crate) fn find(&self, mut is: impl FnMut(&T) -> bool) -> Option<&T> {
        self.entries.iter().find_map(|entry| match entry {
            TableEntry::Live(_, object) if is(object) => Some(object),
            _ => None,
        })
    }

    /// True if `is` accepts an object.
    pub(crate) fn any(&self, mut is: impl FnMut(&T) -> bool) -> bool {
        self.entries.iter().any(|entry| matches!(entry, TableEntry::Live(_, object) if is(object)))
    }

    /// Removes the objects that `gone` accepts.
    pub(crate) fn forget(&mut self, mut gone: impl FnMut(&T) -> bool) {
        for entry in &mut self.entries {
            if matches!(entry, TableEntry::Live(_, object) if gone(object)) {
                *entry = TableEntry::Free;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sluice_protocol::{handle::Stream, limits};
    use std::collections::HashMap;

    #[test]
    fn stale_or_foreign_id_finds_no_object() {
        let mut table = Table::<Stream, u32>::new();
        let (old, new) = (Id::new(3, 1), Id::new(3, 2));
        table.insert(old, 7).unwrap();
        assert_eq!(table.insert(new, 8), Err(code::INVALID_VALUE), "taken");
        assert_eq!(table.get(old), Some(&7));
        assert_eq!(table.get(new), None);
        assert_eq!(table.remove(new), None);
        assert_eq!(table.remove(old), Some(7));
        assert_eq!(table.remove(old), None);
        table.insert(new, 9).unwrap();
        assert_eq!(table.get(old), None);
        assert_eq!(table.get(Id::new(limits::STREAMS - 1, 1)), None);
    }

    #[test]
    fn reserved_id_is_neither_free_nor_usable() {
        let mut table = Table::<Stream, u32>::new();
        let id = Id::new(0, 1);
        table.reserve(id).unwrap();
        assert!(!table.is_free(id));
        assert_eq!(table.get(id), None);
        assert_eq!(table.reserve(id), Err(code::INVALID_VALUE));
        table.release(Id::new(0, 2));
        assert!(!table.is_free(id), "the generation differs");
        table.release(id);
        assert!(table.is_free(id));
        table.fill(id, 1);
        assert_eq!(table.get(id), None, "the id was released");
    }

    proptest! {
        #[test]
        fn table_behaves_as_a_map(operations in prop::collection::vec((0_u32..40, 1_u32..4, 0_u8..3), 0..200)) {
            let mut table = Table::<Stream, u32>::new();
            let mut model = HashMap::<u32, (u32, u32)>::new();
            for (step, (index, generation, operation)) in operations.into_iter().enumerate() {
                let (id, value) = (Id::new(index, generation), u32::try_from(step).unwrap());
                let live = model.get(&index).filter(|(g, _)| *g == generation).map(|(_, v)| *v);
                match operation {
                    0 => {
                        let free = !model.contains_key(&index);
                        prop_assert_eq!(table.insert(id, value).is_ok(), free);
                        if free { model.insert(index, (generation, value)); }
                    }
                    1 => {
                        prop_assert_eq!(table.remove(id), live);
                        if live.is_some() { model.remove(&index); }
                    }
                    _ => prop_assert_eq!(table.get(id).copied(), live),
                }
            }
        }
    }
}

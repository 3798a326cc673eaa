//! Handles: numbers that look like pointers to the caller. They are looked up, never dereferenced.
//!
//! A handle contains its kind and a generation, so that a stale handle, or one of another kind, is detected.

use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Error, Result};

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Library,
    Kernel,
    Memory,
    Pool,
    Link,
    Texture,
    Surface,
    /// A texture or surface reference in a launch.
    Reference,
    Green,
    /// A descriptor of resources.
    Descriptor,
    /// The value of a conditional node.
    Condition,
}

// Bits of a handle: kind 8, generation 24, index 24, zeroes 4. No handle equals a small constant of the program (1 and 2 name
// default streams).
const INDEX_BITS: u32 = 24;
const FIELD: u64 = (1 << INDEX_BITS) - 1;

/// Returns the kind field of a handle.
pub(crate) fn kind_of(handle: u64) -> u64 {
    handle >> 52
}

struct Slot<T> {
    generation: u64,
    value: Option<Arc<T>>,
}

struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

/// All living objects of one kind.
pub(crate) struct Registry<T> {
    kind: Kind,
    missing: Error,
    slots: RwLock<Slots<T>>,
}

impl<T> Registry<T> {
    /// Creates an empty registry; `missing` is the error for an unknown handle.
    pub(crate) const fn new(kind: Kind, missing: Error) -> Self {
        Registry { kind, missing, slots: RwLock::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    /// Adds an object. `make` receives its handle.
    pub(crate) fn insert_with(&self, make: impl FnOnce(u64) -> T) -> Result<(u64, Arc<T>)> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                if slots.slots.len() as u64 > FIELD {
                    return Err(Error::OUT_OF_MEMORY);
                }
                slots.slots.push(Slot { generation: 0, value: None });
                slots.slots.len() - 1
            }
        };
        let slot = &mut slots.slots[index];
        slot.generation = (slot.generation + 1) & FIELD;
        let handle = (self.kind as u64) << 52 | slot.generation << 28 | (index as u64) << 4;
        let value = Arc::new(make(handle));
        slot.value = Some(Arc::clone(&value));
        Ok((handle, value))
    }

    fn locate(&self, handle: u64) -> Result<(usize, u64)> {
        if kind_of(handle) != self.kind as u64 || handle & 15 != 0 {
            return Err(self.missing);
        }
        let index = usize::try_from(handle >> 4 & FIELD).map_err(|_| self.missing)?;
        Ok((index, handle >> 28 & FIELD))
    }

    /// Returns the object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let (index, generation) = self.locate(handle)?;
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.slots.get(index).filter(|slot| slot.generation == generation);
        slot.and_then(|slot| slot.value.clone()).ok_or(self.missing)
    }

    /// Removes the object; its handle is then stale.
    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>> {
        let (index, generation) = self.locate(handle)?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.slots.get_mut(index).filter(|slot| slot.generation == generation);
        let value = slot.and_then(|slot| slot.value.take()).ok_or(self.missing)?;
        slots.free.push(index);
        Ok(value)
    }

    /// Removes the objects that `keep` does not keep.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let Slots { slots, free } = &mut *slots;
        for (index, slot) in slots.iter_mut().enumerate() {
            if slot.value.as_ref().is_some_and(|value| !keep(value)) {
                slot.value = None;
                free.push(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_handle_is_refused_after_its_slot_is_reused() {
        let registry = Registry::new(Kind::Stream, Error::INVALID_HANDLE);
        let (first, _) = registry.insert_with(|_| 1).unwrap();
        registry.remove(first).unwrap();
        let (second, _) = registry.insert_with(|_| 2).unwrap();
        assert_ne!(first, second);
        assert_eq!(registry.get(first).unwrap_err(), Error::INVALID_HANDLE);
        assert_eq!(registry.remove(first).unwrap_err(), Error::INVALID_HANDLE);
        assert_eq!(*registry.get(second).unwrap(), 2);
        let (third, _) = registry.insert_with(|_| 3).unwrap();
        registry.retain(|value| *value == 3);
        assert_eq!(registry.get(second).unwrap_err(), Error::INVALID_HANDLE);
        assert_eq!(*registry.get(third).unwrap(), 3);
    }

    #[test]
    fn handles_of_another_kind_and_small_numbers_are_refused() {
        let streams = Registry::new(Kind::Stream, Error::INVALID_HANDLE);
        let events: Registry<()> = Registry::new(Kind::Event, Error::INVALID_HANDLE);
        let (stream, _) = streams.insert_with(|_| ()).unwrap();
        assert!(events.get(stream).is_err());
        for number in 0..64 {
            assert!(streams.get(number).is_err());
        }
        assert!(streams.get(stream | 1).is_err());
    }
}

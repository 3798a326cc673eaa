//! Handles: numbers that look like pointers to the program. They are looked up, never dereferenced.
//!
//! A handle contains its kind and a generation, so that a stale handle, or one of another kind, is refused.

/// The kind of object that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HandleKind {
    Graph = 0x41,
    Node,
    Executable,
    UserObject,
}

// Bits of a handle: kind 8, generation 24, index 24, zeroes 4.
const FIELD: u64 = (1 << 24) - 1;

struct HandleSlot<T> {
    generation: u64,
    value: Option<T>,
}

/// All living objects of one kind.
pub(crate) struct Slab<T> {
    kind: HandleKind,
    slots: Vec<HandleSlot<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(crate) const fn new(kind: HandleKind) -> Slab<T> {
        Slab { kind, slots: Vec::new(), free: Vec::new() }
    }

    /// Adds an object and returns its handle; `None` if there are too many.
    pub(crate) fn insert(&mut self, value: T) -> Option<u64> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() as u64 > FIELD => return None,
            None => {
                self.slots.push(HandleSlot { generation: 0, value: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        slot.generation = (slot.generation + 1) & FIELD;
        slot.value = Some(value);
        Some((self.kind as u64) << 52 | slot.generation << 28 | (index as u64) << 4)
    }

    fn locate(&self, handle: u64) -> Option<usize> {
        let index = usize::try_from(handle >> 4 & FIELD).ok()?;
        let own = handle >> 52 == self.kind as u64 && handle & 15 == 0;
        let slot = self.slots.get(index)?;
        (own && slot.generation == handle >> 28 & FIELD).then_some(index)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<&T> {
        self.slots[self.locate(handle)?].value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let index = self.locate(handle)?;
        self.slots[index].value.as_mut()
    }

    /// Removes the object; its handle is then stale.
    pub(crate) fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.locate(handle)?;
        let value = self.slots[index].value.take()?;
        self.free.push(index);
        Some(value)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.iter().filter(|slot| slot.value.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_foreign_and_invented_handles_are_refused() {
        let mut graphs = Slab::new(HandleKind::Graph);
        let mut nodes = Slab::new(HandleKind::Node);
        let first = graphs.insert(1).unwrap();
        assert_eq!(graphs.remove(first), Some(1));
        let second = graphs.insert(2).unwrap();
        assert_ne!(first, second);
        assert_eq!((graphs.get(first), graphs.get(second)), (None, Some(&2)));
        assert_eq!(graphs.remove(first), None);
        let node = nodes.insert(3).unwrap();
        assert_eq!((graphs.get(node), nodes.get(second)), (None, None));
        for invented in (0..64).chain([second | 1, second + 16, u64::MAX, second ^ 1 << 63]) {
            assert_eq!(graphs.get(invented), None);
        }
    }
}

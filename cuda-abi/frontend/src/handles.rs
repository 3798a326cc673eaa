//! Handles: numbers that look like pointers to the program. They are looked up, never dereferenced.
//!
//! A handle contains its kind and a generation, so that a stale handle, or one of another kind, is refused.

/// `CU_STREAM_LEGACY`, the default stream of the current context.
pub const LEGACY_STREAM: u64 = 1;
/// `CU_STREAM_PER_THREAD`, the calling thread's default stream in the current context. Handles of created streams are greater.
pub const PER_THREAD_STREAM: u64 = 2;

/// The kind of object that a handle names. Kinds below 0x40 belong to the software GPU's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HandleKind {
    /// `CUgraph`.
    Graph = 0x41,
    /// `CUgraphNode`.
    Node,
    /// `CUgraphExec`.
    Executable,
    /// `CUuserObject`.
    UserObject,
    /// `CUarray`.
    Array,
    /// `CUmipmappedArray`.
    MipmappedArray,
    /// `CUtexref`.
    TextureReference,
    /// `CUsurfref`.
    SurfaceReference,
}

// Bits of a handle: kind 8, generation 24, index 24, zeroes 4.
const FIELD: u64 = (1 << 24) - 1;

struct HandleSlot<T> {
    generation: u64,
    value: Option<T>,
}

/// All living objects of one kind.
pub struct Slab<T> {
    kind: HandleKind,
    slots: Vec<HandleSlot<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    /// Without objects, for a static variable.
    pub const fn new(kind: HandleKind) -> Slab<T> {
        Slab { kind, slots: Vec::new(), free: Vec::new() }
    }

    /// Adds an object and returns its handle; `None` if there are too many.
    pub fn insert(&mut self, value: T) -> Option<u64> {
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
        let generation = slot.generation;
        Some(self.handle(index, generation))
    }

    fn locate(&self, handle: u64) -> Option<usize> {
        let index = usize::try_from(handle >> 4 & FIELD).ok()?;
        let own = handle >> 52 == self.kind as u64 && handle & 15 == 0;
        let slot = self.slots.get(index)?;
        (own && slot.generation == handle >> 28 & FIELD).then_some(index)
    }

    /// Returns the object of a handle.
    pub fn get(&self, handle: u64) -> Option<&T> {
        self.slots[self.locate(handle)?].value.as_ref()
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let index = self.locate(handle)?;
        self.slots[index].value.as_mut()
    }

    /// Removes the object; its handle is then stale.
    pub fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.locate(handle)?;
        let value = self.slots[index].value.take()?;
        self.free.push(index);
        Some(value)
    }

    /// Removes the objects that `keep` does not keep.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if slot.value.as_ref().is_some_and(|value| !keep(value)) {
                slot.value = None;
                self.free.push(index);
            }
        }
    }

    /// The handles and objects.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((self.handle(index, slot.generation), slot.value.as_ref()?)))
    }

    /// The objects, to change them.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    fn handle(&self, index: usize, generation: u64) -> u64 {
        (self.kind as u64) << 52 | generation << 28 | (index as u64) << 4
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
        let third = graphs.insert(4).unwrap();
        graphs.retain(|value| *value == 4);
        assert_eq!((graphs.get(second), graphs.get(third)), (None, Some(&4)));
        assert_eq!(graphs.iter().collect::<Vec<_>>(), [(third, &4)]);
        let second = graphs.insert(2).unwrap();
        for invented in (0..64).chain([second | 1, second + 16, u64::MAX, second ^ 1 << 63]) {
            assert_eq!(graphs.get(invented), None);
        }
    }
}

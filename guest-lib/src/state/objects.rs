//! Objects of the plain kinds: a handle of the program names one object of the driver, and the shim keeps nothing else about it.

use crate::error::{Error, Result};
use core::marker::PhantomData;
use sluice_protocol::handle::{self, Id, Kind};
use std::sync::{Mutex, MutexGuard};

macro_rules! plain {
    ($($(#[$doc:meta])* $kind:ident = $tag:literal, $limit:expr;)*) => {
        /// The objects of all plain kinds.
        #[derive(Default)]
        #[allow(non_snake_case, reason = "the names of the kinds")]
        pub(crate) struct PlainObjects {
            $($kind: Objects<handle::$kind>,)*
        }

        $(impl Plain for handle::$kind {
            fn of(objects: &PlainObjects) -> &Objects<handle::$kind> {
                &objects.$kind
            }
        })*

        impl PlainObjects {
            /// Forgets the objects of a context that is gone.
            pub(crate) fn forget_context(&self, context: u64) {
                $(self.$kind.forget_context(context);)*
            }
        }
    };
}
sluice_protocol::for_each_plain_kind!(plain);

/// The arrays of all kinds, and the references to images. Each ends with its owner: a context, a module, or the array of which it is a level.
#[derive(Default)]
pub(crate) struct ImageObjects {
    arrays: Objects<handle::Array>,
    mipmapped: Objects<handle::MipmappedArray>,
    texture_references: Objects<handle::TextureReference>,
    surface_references: Objects<handle::SurfaceReference>,
}

impl ImageObjects {
    /// Forgets the objects of an owner that is gone.
    pub(crate) fn forget_owner(&self, owner: u64) {
        for whole in self.mipmapped.of(owner) {
            self.arrays.forget_context(whole.raw());
        }
        self.arrays.forget_context(owner);
        self.mipmapped.forget_context(owner);
        self.texture_references.forget_context(owner);
        self.surface_references.forget_context(owner);
    }
}

/// A kind of [`ImageObjects`].
pub(crate) trait ImageKind: Kind {
    /// The objects of this kind.
    fn of(objects: &ImageObjects) -> &Objects<Self>;
}

macro_rules! image_kinds {
    ($($kind:ident: $field:ident,)*) => {
        $(impl ImageKind for handle::$kind {
            fn of(objects: &ImageObjects) -> &Objects<handle::$kind> {
                &objects.$field
            }
        })*
    };
}
image_kinds! {
    Array: arrays,
    MipmappedArray: mipmapped,
    TextureReference: texture_references,
    SurfaceReference: surface_references,
}

/// A plain kind.
pub(crate) trait Plain: Kind {
    /// The objects of this kind.
    fn of(objects: &PlainObjects) -> &Objects<Self>;
}

/// The objects of one kind.
pub(crate) struct Objects<K> {
    table: Mutex<ObjectTable>,
    kind: PhantomData<K>,
}

#[derive(Default)]
struct ObjectTable {
    slots: Vec<ObjectSlot>,
    free: Vec<u32>,
}

struct ObjectSlot {
    generation: u32,
    /// Raw id of the context or of another owner, 0 for none.
    context: u64,
    state: ObjectState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ObjectState {
    Free,
    /// A call that makes or ends the object is under way.
    InCall,
    Live,
}

impl<K> Default for Objects<K> {
    fn default() -> Objects<K> {
        Objects { table: Mutex::default(), kind: PhantomData }
    }
}

impl ObjectTable {
    fn slot<K: Kind>(&mut self, id: Id<K>) -> Option<&mut ObjectSlot> {
        let slot = self.slots.get_mut(id.index())?;
        (slot.generation == id.generation()).then_some(slot)
    }
}

impl<K: Kind> Objects<K> {
    fn lock(&self) -> MutexGuard<'_, ObjectTable> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// An id for an object that a call is about to make in a context, 0 for none. [`Objects::made`] or [`Objects::release`]
    /// concludes the call.
    pub(crate) fn mint(&self, context: u64) -> Result<Id<K>> {
        let mut table = self.lock();
        let index = match table.free.pop() {
            Some(index) => index,
            None => {
                let fresh = u32::try_from(table.slots.len()).map_err(|_| Error::OUT_OF_MEMORY)?;
                if fresh >= K::LIMIT {
                    return Err(Error::OUT_OF_MEMORY);
                }
                table.slots.push(ObjectSlot { generation: 0, context: 0, state: ObjectState::Free });
                fresh
            }
        };
        let slot = &mut table.slots[index as usize];
        let id = Id::new(index, slot.generation.wrapping_add(1));
        *slot = ObjectSlot { generation: id.generation(), context, state: ObjectState::InCall };
        Ok(id)
    }

    /// The call has made the object.
    pub(crate) fn made(&self, id: Id<K>) {
        if let Some(slot) = self.lock().slot(id).filter(|slot| slot.state == ObjectState::InCall) {
            slot.state = ObjectState::Live;
        }
    }

    /// The object of a handle.
    pub(crate) fn resolve(&self, handle: u64) -> Result<Id<K>> {
        let id = Id::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
        let mut table = self.lock();
        table.slot(id).filter(|slot| slot.state == ObjectState::Live).ok_or(Error::INVALID_HANDLE)?;
        Ok(id)
    }

    /// The object of a handle, which a call is about to end; [`Objects::release`] concludes the call.
    pub(crate) fn take(&self, handle: u64) -> Result<Id<K>> {
        let id = Id::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
        let mut table = self.lock();
        let slot = table.slot(id).filter(|slot| slot.state == ObjectState::Live);
        slot.ok_or(Error::INVALID_HANDLE)?.state = ObjectState::InCall;
        Ok(id)
    }

    /// Frees the id of an object that a call has ended, or has not made.
    pub(crate) fn release(&self, id: Id<K>) {
        let mut table = self.lock();
        let Some(slot) = table.slot(id).filter(|slot| slot.state == ObjectState::InCall) else { return };
        slot.state = ObjectState::Free;
        if let Ok(index) = u32::try_from(id.index()) {
            table.free.push(index);
        }
    }

    /// The objects of an owner.
    fn of(&self, owner: u64) -> Vec<Id<K>> {
        let table = self.lock();
        let slots = (0..).zip(&table.slots);
        let of_owner = slots.filter(|(_, slot)| slot.state != ObjectState::Free && slot.context == owner);
        of_owner.map(|(index, slot)| Id::new(index, slot.generation)).collect()
    }

    fn forget_context(&self, context: u64) {
        let mut table = self.lock();
        let ObjectTable { slots, free } = &mut *table;
        for (index, slot) in (0..).zip(slots) {
            if slot.state != ObjectState::Free && slot.context == context {
                slot.state = ObjectState::Free;
                free.push(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_protocol::handle::Event;

    #[test]
    fn object_is_usable_from_the_end_of_the_call_that_makes_it_to_the_start_of_the_call_that_ends_it() {
        let objects = Objects::<Event>::default();
        let id = objects.mint(0).unwrap();
        assert_eq!(objects.resolve(id.raw()), Err(Error::INVALID_HANDLE));
        objects.made(id);
        assert_eq!(objects.resolve(id.raw()), Ok(id));
        assert_eq!(objects.take(id.raw()), Ok(id));
        assert_eq!(objects.take(id.raw()), Err(Error::INVALID_HANDLE), "another thread ends it");
        assert_eq!(objects.resolve(id.raw()), Err(Error::INVALID_HANDLE));
        objects.release(id);
        let next = objects.mint(0).unwrap();
        assert_eq!((next.index(), next == id), (id.index(), false), "the slot has a new generation");
        objects.release(id);
        objects.made(next);
        assert_eq!(objects.resolve(next.raw()), Ok(next), "a stale id releases nothing");
        assert_eq!(objects.resolve(id.raw()), Err(Error::INVALID_HANDLE));
    }

    #[test]
    fn objects_end_with_their_context_only() {
        let objects = Objects::<Event>::default();
        let [here, there, nowhere] = [5, 6, 0].map(|context| objects.mint(context).unwrap());
        [here, there, nowhere].into_iter().for_each(|id| objects.made(id));
        let late = objects.mint(5).unwrap();
        objects.forget_context(5);
        objects.made(late);
        for gone in [here, late] {
            assert_eq!(objects.resolve(gone.raw()), Err(Error::INVALID_HANDLE));
        }
        for left in [there, nowhere] {
            assert_eq!(objects.resolve(left.raw()), Ok(left));
        }
    }

    #[test]
    fn object_beyond_the_limit_is_refused_and_a_released_id_is_free() {
        let objects = Objects::<Event>::default();
        let ids: Vec<_> = (0..Event::LIMIT).map(|_| objects.mint(0).unwrap()).collect();
        assert_eq!(objects.mint(0), Err(Error::OUT_OF_MEMORY));
        objects.release(ids[7]);
        assert_eq!(objects.mint(0).map(|id| id.index()), Ok(7));
    }
}

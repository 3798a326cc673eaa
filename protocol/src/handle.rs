//! Typed, generational ids of one session.
//!
//! An id names an object of the guest process in both directions; the worker maps it to the driver's handle. It fits a
//! pointer, so the shim hands it out as the opaque `CUstream`, `CUevent` … of the C API: kind in the top byte, then 24
//! bits of generation, then the index. Generations start at 1, so no id is 0 or one of CUDA's special stream values.

use crate::limits;
use core::marker::PhantomData;

/// A kind of object.
pub trait Kind: Copy + core::fmt::Debug {
    /// The kind's tag in the top byte of an id.
    const TAG: u8;
    /// Objects of this kind that a session may have at once.
    const LIMIT: u32;
    /// The kind's name in messages.
    const NAME: &'static str;
}

/// Calls `$callback!` with a row for each plain kind: its name, its tag, and the number of its objects that a session may have.
/// An object of a plain kind is a handle of the driver and nothing else. Guest and worker make its table from the row.
#[macro_export]
macro_rules! for_each_plain_kind {
    ($callback:ident) => {
        $callback! {
            /// An executable graph.
            GraphExecutable = 0x59, limits::GRAPH_EXECUTABLES;
            /// A link of the driver's linker (`CUlinkState`).
            Link = 0x5a, limits::LINKS;
            /// A green context: a part of a device's multiprocessors, in its primary context.
            GreenContext = 0x5f, limits::GREEN_CONTEXTS;
            /// A graph in which handles for conditional nodes live.
            ConditionalGraph = 0x62, limits::CONDITIONAL_GRAPHS;
        }
    };
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $tag:literal, $limit:expr;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {}
        impl Kind for $name {
            const TAG: u8 = $tag;
            const LIMIT: u32 = $limit;
            const NAME: &'static str = stringify!($name);
        })*
    };
}

kinds! {
    /// A CUDA context.
    Context = 0x51, limits::CONTEXTS;
    /// A CUDA stream.
    Stream = 0x52, limits::STREAMS;
    /// A CUDA event.
    Event = 0x53, limits::EVENTS;
    /// A module or a library.
    Module = 0x54, limits::MODULES;
    /// A function or a kernel.
    Function = 0x55, limits::FUNCTIONS;
    /// An array, or a level of a mipmapped array.
    Array = 0x5b, limits::ARRAYS;
    /// An array with mipmap levels.
    MipmappedArray = 0x5c, limits::MIPMAPPED_ARRAYS;
    /// A texture reference of a module.
    TextureReference = 0x5d, limits::IMAGE_REFERENCES;
    /// A surface reference of a module.
    SurfaceReference = 0x5e, limits::IMAGE_REFERENCES;
}
for_each_plain_kind!(kinds);

/// The tag of handles of physical memory, which the shim makes by itself.
pub const PHYSICAL_MEMORY: u8 = 0x56;
/// The tag of handles of memory pools, which the shim makes by itself.
pub const POOL: u8 = 0x58;
/// The tag of a green context's handle as a context, which the shim makes of its id.
pub const GREEN_VIEW: u8 = 0x60;
/// The tag of descriptors of resources, which the shim makes of the worker's numbers.
pub const RESOURCE_DESCRIPTOR: u8 = 0x61;
// 0x57 was the tag of graphs, which the shim keeps for itself.

macro_rules! plain_tags {
    ($($(#[$doc:meta])* $name:ident = $tag:literal, $limit:expr;)*) => {
        &[$($name::TAG),*]
    };
}

/// Every tag, those of the plain kinds apart.
pub const TAGS: [&[u8]; 2] = [
    &[
        Context::TAG,
        Stream::TAG,
        Event::TAG,
        Module::TAG,
        Function::TAG,
        PHYSICAL_MEMORY,
        POOL,
        GREEN_VIEW,
        RESOURCE_DESCRIPTOR,
        Array::TAG,
        MipmappedArray::TAG,
        TextureReference::TAG,
        SurfaceReference::TAG,
    ],
    for_each_plain_kind!(plain_tags),
];

/// The id of an object of kind `K`.
pub struct Id<K: Kind> {
    raw: u64,
    kind: PhantomData<K>,
}

impl<K: Kind> Id<K> {
    /// The id of index `index` in its `generation`-th use (only the low 24 bits count; 0 is taken as 1).
    #[must_use]
    pub const fn new(index: u32, generation: u32) -> Id<K> {
        let generation = if generation & 0xff_ffff == 0 { 1 } else { generation & 0xff_ffff };
        Id { raw: (K::TAG as u64) << 56 | (generation as u64) << 32 | index as u64, kind: PhantomData }
    }

    /// Checks tag, generation and index of a raw id.
    #[must_use]
    pub fn from_raw(raw: u64) -> Option<Id<K>> {
        let id = Id { raw, kind: PhantomData };
        (raw >> 56 == u64::from(K::TAG) && id.generation() != 0 && id.index() < K::LIMIT as usize)
            .then_some(id)
    }

    /// The raw value.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.raw
    }

    /// The index, below the kind's limit.
    #[must_use]
    pub const fn index(self) -> usize {
        (self.raw & 0xffff_ffff) as usize
    }

    /// The generation, never 0.
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.raw >> 32 & 0xff_ffff) as u32
    }
}

impl<K: Kind> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K: Kind> Copy for Id<K> {}
impl<K: Kind> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}
impl<K: Kind> Eq for Id<K> {}
impl<K: Kind> core::hash::Hash for Id<K> {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.raw.hash(state);
    }
}
impl<K: Kind> core::fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}#{}.{}", K::NAME, self.index(), self.generation())
    }
}

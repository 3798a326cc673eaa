//! The identifiers of VMs, workers, chunks and chunk classes in the arbiter.

/// A VM in one of its epochs: an account, and a trust domain. A re-admitted VM is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmKey {
    /// The VM's number.
    pub vm: u32,
    /// The VM's epoch.
    pub epoch: u64,
}

/// A worker's number; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// An index of the chunk table; used again once its chunk is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u32);

/// Index of a size in [`sluice_messages::custody::CLASSES`]: 0 is the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// Every class, largest first.
    pub const ALL: [Class; 3] = [Class(0), Class(1), Class(2)];

    /// The class of chunks of exactly `bytes`.
    #[must_use]
    pub fn of(bytes: u64) -> Option<Class> {
        Class::ALL.into_iter().find(|class| class.bytes() == bytes)
    }

    /// Bytes of a chunk.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        sluice_messages::custody::CLASSES[self.0 as usize]
    }

    /// The next smaller class.
    #[must_use]
    pub fn smaller(self) -> Option<Class> {
        Class::ALL.get(self.index() + 1).copied()
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

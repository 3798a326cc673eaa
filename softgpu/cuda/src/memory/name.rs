//! The name by which another process opens a block.

/// The object that a name is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    Memory,
    /// The words of an event.
    Event,
    /// A pool's block, with the identity of the pool.
    PoolBlock,
    /// A pool, by its identity alone.
    Pool,
}

impl Named {
    const fn magic(self) -> u64 {
        u64::from_le_bytes(match self {
            Named::Memory => *b"sgipcmem",
            Named::Event => *b"sgipcevt",
            Named::PoolBlock => *b"sgipcptr",
            Named::Pool => *b"sgipcpol",
        })
    }
}

/// The content of a `CUipcMemHandle` or `CUipcEventHandle`: a block in an allocation of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) device: [u8; 16],
    pub(super) record: u32,
    pub(super) generation: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The identity of the pool; 0 for other memory.
    pub(crate) pool: u64,
}

impl Name {
    /// The name of a pool.
    pub(crate) fn of_pool(device: [u8; 16], identity: u64) -> Name {
        Name { device, record: 0, generation: 0, offset: 0, bytes: 0, pool: identity }
    }

    /// The same name, of a block of a pool.
    pub(crate) fn in_pool(self, pool: u64) -> Name {
        Name { pool, ..self }
    }

    pub(crate) fn to_bytes(self, named: Named) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&named.magic().to_le_bytes());
        bytes[8..24].copy_from_slice(&self.device);
        bytes[24..28].copy_from_slice(&self.record.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.pool.to_le_bytes());
        bytes
    }

    /// Decodes a name from another process; `None` if it is invalid.
    pub(crate) fn from_bytes(named: Named, bytes: &[u8; 64]) -> Option<Name> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| u64::from_le_bytes(words[index]);
        let (halves, _) = bytes.as_chunks::<4>();
        let half = |index: usize| u32::from_le_bytes(halves[index]);
        let mut device = [0; 16];
        device.copy_from_slice(&bytes[8..24]);
        let name = Name {
            device,
            record: half(6),
            generation: half(7),
            offset: word(4),
            bytes: word(5),
            pool: word(6),
        };
        (word(0) == named.magic()).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_round_trips_through_its_bytes() {
        let name = Name { device: [7; 16], record: 3, generation: 9, offset: 512, bytes: 1 << 33, pool: 5 };
        for (named, other) in [(Named::Memory, Named::Event), (Named::Event, Named::Memory)] {
            assert_eq!(Name::from_bytes(named, &name.to_bytes(named)), Some(name));
            assert_eq!(Name::from_bytes(named, &name.to_bytes(other)), None);
            assert_eq!(Name::from_bytes(named, &[0; 64]), None);
        }
    }
}

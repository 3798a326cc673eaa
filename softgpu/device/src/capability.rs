//! The compute capabilities that a model can have: the limits of a multiprocessor that belong to each.

/// A compute capability. Every value is that of the vendor's table of capabilities; the engine itself has no such limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// Generation and revision.
    pub version: (u32, u32),
    /// Resident threads of a multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Resident blocks of a multiprocessor.
    pub blocks_per_multiprocessor: u32,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub shared_per_multiprocessor: u32,
    /// Shared memory that a block can have if its function opts in.
    pub shared_per_block_optin: u32,
    /// Shared memory that the system reserves in each block.
    pub shared_reserved: u32,
    /// Unit in which blocks get shared memory.
    pub shared_unit: u32,
    /// Rate of operations in single precision divided by that in double precision.
    pub single_to_double: u32,
}

const KIB: u32 = 1 << 10;

impl Capability {
    /// Turing.
    pub const V7_5: Capability = Capability {
        version: (7, 5),
        threads_per_multiprocessor: 1024,
        blocks_per_multiprocessor: 16,
        registers_per_multiprocessor: 64 * KIB,
        shared_per_multiprocessor: 64 * KIB,
        shared_per_block_optin: 64 * KIB,
        shared_reserved: 0,
        shared_unit: 256,
        single_to_double: 32,
    };
    /// Ampere of data centres.
    pub const V8_0: Capability = Capability {
        version: (8, 0),
        threads_per_multiprocessor: 2048,
        blocks_per_multiprocessor: 32,
        shared_per_multiprocessor: 164 * KIB,
        shared_per_block_optin: 163 * KIB,
        shared_reserved: KIB,
        shared_unit: 128,
        single_to_double: 2,
        ..Capability::V7_5
    };
    /// Ampere.
    pub const V8_6: Capability = Capability {
        version: (8, 6),
        threads_per_multiprocessor: 1536,
        blocks_per_multiprocessor: 16,
        shared_per_multiprocessor: 100 * KIB,
        shared_per_block_optin: 99 * KIB,
        single_to_double: 64,
        ..Capability::V8_0
    };
    /// Ada.
    pub const V8_9: Capability =
        Capability { version: (8, 9), blocks_per_multiprocessor: 24, ..Capability::V8_6 };
    /// Hopper.
    pub const V9_0: Capability = Capability {
        version: (9, 0),
        shared_per_multiprocessor: 228 * KIB,
        shared_per_block_optin: 227 * KIB,
        ..Capability::V8_0
    };
    /// Blackwell of workstations and games.
    pub const V12_0: Capability = Capability { version: (12, 0), ..Capability::V8_9 };

    /// The number in the name of a target: 80 for `sm_80`.
    #[must_use]
    pub const fn sm(&self) -> u32 {
        self.version.0 * 10 + self.version.1
    }
}

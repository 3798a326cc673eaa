//! The hash of the symbol table, used by the build script that searches the seeds and by the library that looks up.
//!
//! A name belongs to a bucket; the bucket's seed sends each of its names to a slot of its own. The hash is fixed and unkeyed: the
//! table is public and read-only, so a collision gains an attacker nothing.

#![expect(
    clippy::cast_possible_truncation,
    reason = "a hash value is cut to the width of the table on purpose"
)]

/// The 64-bit hash of a name (FNV-1a).
pub(crate) const fn hash(name: &[u8]) -> u64 {
    let mut value = 0xcbf2_9ce4_8422_2325_u64;
    let mut i = 0;
    while i < name.len() {
        value = (value ^ name[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    value
}

/// The bucket of a hash value among `buckets` (a power of two).
pub(crate) const fn bucket(hash: u64, buckets: usize) -> usize {
    mix(hash, 0) as usize & (buckets - 1)
}

/// The slot of a hash value among `slots` (a power of two), given the seed of its bucket.
pub(crate) const fn slot(hash: u64, seed: u16, slots: usize) -> usize {
    mix(hash, seed as u64 + 1) as usize & (slots - 1)
}

/// Spreads every bit of the hash and of the seed over the whole word (the finaliser of MurmurHash3).
const fn mix(hash: u64, seed: u64) -> u64 {
    let mut value = hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}

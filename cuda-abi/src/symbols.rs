//! The names of the driver library and the rules of `cuGetProcAddress`.
//!
//! A *base name* is the name that a program looks up (`cuMemcpyHtoD`); an *export* is one ABI version of it (`cuMemcpyHtoD_v2`,
//! `cuMemcpyHtoD_v2_ptds`). `_vN` counts the ABI versions of one name and says nothing about a driver version; `_ptds` and
//! `_ptsz` mark the forms whose default stream is the per-thread one.
//!
//! The tables are generated at build time and looked up without allocation or lock: one process may hold several runtimes, each
//! of which looks up about 480 names at start.

use crate::perfect_hash;

/// The version of the CUDA headers that the tables describe, in the form of `cuDriverGetVersion`: 13.5.
pub const CUDA_VERSION: u32 = 13050;

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`: plain forms, the same as no flag.
pub const FLAG_LEGACY_STREAM: u64 = 1;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`: prefer the per-thread forms.
pub const FLAG_PER_THREAD_STREAM: u64 = 2;

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));

/// The properties of one export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// The exported name.
    pub name: &'static str,
    /// Base name that it is a form of.
    pub base: &'static str,
    /// Driver version that introduced this form.
    pub version: u32,
    /// True for the `_ptds` and `_ptsz` forms: stream 0 means the stream of the calling thread.
    pub per_thread: bool,
}

/// The result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup {
    /// Index in [`EXPORTS`] of the newest form that is old enough.
    Found(usize),
    /// There is no such base name.
    NotFound,
    /// The base name exists, but only in driver versions newer than the requested one.
    VersionTooLow,
}

/// One ABI version of a base name.
struct Form {
    version: u32,
    export: u16,
}

/// The forms of one base name, newest first.
struct Base {
    plain: &'static [Form],
    per_thread: &'static [Form],
}

struct PerfectHash<const BUCKETS: usize, const SLOTS: usize> {
    seeds: [u16; BUCKETS],
    slots: [u16; SLOTS],
}

impl<const BUCKETS: usize, const SLOTS: usize> PerfectHash<BUCKETS, SLOTS> {
    /// The only possible index of `name`; the caller compares it with the name at that index.
    fn candidate(&self, name: &[u8]) -> usize {
        let hash = perfect_hash::hash(name);
        let seed = self.seeds[perfect_hash::bucket(hash, BUCKETS)];
        usize::from(self.slots[perfect_hash::slot(hash, seed, SLOTS)])
    }
}

/// Returns the index of an exported name in [`EXPORTS`].
pub fn export_index(name: &str) -> Option<usize> {
    let index = EXPORT_HASH.candidate(name.as_bytes());
    (EXPORTS.get(index) == Some(&name)).then_some(index)
}

/// Returns the export at an index of [`EXPORTS`].
pub fn export(index: usize) -> Option<&'static Export> {
    EXPORT_INFO.get(index)
}

/// Finds the form that `cuGetProcAddress(name, version, flags)` returns.
///
/// `name` is matched exactly against the base names, so `""` and the name of a later form (`cuMemAlloc_v2`) are not found. With
/// [`FLAG_PER_THREAD_STREAM`] a per-thread form that is old enough precedes every plain one.
///
/// The caller must check that `version` is not newer than the driver reports, and that `flags` is [valid](valid_flags): both
/// errors are `CUDA_ERROR_INVALID_VALUE`, and the version reported may be lower than [`CUDA_VERSION`].
pub fn lookup(name: &[u8], version: u32, flags: u64) -> Lookup {
    let index = BASE_HASH.candidate(name);
    let (Some(found), Some(base)) = (BASE_NAMES.get(index), BASES.get(index)) else {
        return Lookup::NotFound;
    };
    if found.as_bytes() != name {
        return Lookup::NotFound;
    }
    let newest = |forms: &'static [Form]| forms.iter().find(|form| form.version <= version);
    let per_thread = if flags & FLAG_PER_THREAD_STREAM != 0 { newest(base.per_thread) } else { None };
    match per_thread.or_else(|| newest(base.plain)) {
        Some(form) => Lookup::Found(usize::from(form.export)),
        None => Lookup::VersionTooLow,
    }
}

/// True if `flags` is one of the three values that `cuGetProcAddress` accepts.
pub const fn valid_flags(flags: u64) -> bool {
    flags <= FLAG_PER_THREAD_STREAM
}

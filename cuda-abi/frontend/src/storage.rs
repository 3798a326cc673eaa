//! Context-local storage: data that a runtime stores for a context, looked up by (context, key).
//!
//! A runtime reads it before nearly every call, so a read takes no lock and allocates nothing. Writes are rare (one for each
//! runtime and context) and serialised. Entries are in chunks that are never freed or moved, and each one has a sequence number
//! by which a reader detects that a writer changed it meanwhile. A freed entry is used again, so the memory is bounded by the
//! greatest number of entries that were alive at once.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

const CHUNK: usize = 32;

/// A store whose entries have a destructor of type `D`.
pub(crate) struct Storage<D> {
    first: StorageChunk,
    /// The destructors, by number of the entry. Only the holder of this lock may change entries.
    writer: Mutex<Vec<Option<D>>>,
}

struct StorageChunk {
    entries: [StorageCell; CHUNK],
    next: OnceLock<Box<StorageChunk>>,
}

/// One cell of the store; free while `context` is 0.
struct StorageCell {
    /// Odd while a writer changes the entry.
    sequence: AtomicUsize,
    context: AtomicUsize,
    key: AtomicPtr<c_void>,
    value: AtomicPtr<c_void>,
}

/// The content of one entry at one moment.
#[derive(Clone, Copy)]
struct Snapshot {
    context: usize,
    key: *mut c_void,
    value: *mut c_void,
}

/// The rest of an entry whose context ends.
pub(crate) struct Orphan<D> {
    pub(crate) key: *mut c_void,
    pub(crate) value: *mut c_void,
    pub(crate) destructor: Option<D>,
}

impl<D> Storage<D> {
    pub(crate) const fn new() -> Self {
        Self { first: StorageChunk::new(), writer: Mutex::new(Vec::new()) }
    }

    /// Returns the value of `key` in `context` (not 0).
    pub(crate) fn get(&self, context: usize, key: *mut c_void) -> Option<*mut c_void> {
        self.entries().map(StorageCell::read).find(|e| e.context == context && e.key == key).map(|e| e.value)
    }

    /// Inserts or replaces the value of `key` in `context` (not 0). The destructor of a replaced value does not run: the caller
    /// that replaces the value owns it.
    pub(crate) fn put(&self, context: usize, key: *mut c_void, value: *mut c_void, destructor: Option<D>) {
        let mut destructors = self.lock();
        let full = Snapshot { context, key, value };
        let number = self.position(|e| e.context == context && e.key == key);
        let number = number.or_else(|| self.position(|e| e.context == 0)).unwrap_or_else(|| self.grow());
        if destructors.len() <= number {
            destructors.resize_with(number + 1, || None);
        }
        destructors[number] = destructor;
        if let Some(entry) = self.entries().nth(number) {
            entry.write(full);
        }
    }

    /// Removes the value of `key` in `context`, without its destructor; false if there is none.
    pub(crate) fn delete(&self, context: usize, key: *mut c_void) -> bool {
        let mut destructors = self.lock();
        let Some(number) = self.position(|e| e.context == context && e.key == key) else { return false };
        self.clear(&mut destructors, number);
        true
    }

    /// Removes all entries of `context`. The caller runs the destructors after the lock is released: a destructor may use the
    /// store.
    pub(crate) fn take_context(&self, context: usize) -> Vec<Orphan<D>> {
        let mut destructors = self.lock();
        let mut orphans = Vec::new();
        for (number, entry) in self.entries().enumerate() {
            let Snapshot { context: owner, key, value } = entry.read();
            if owner == context {
                orphans.push(Orphan { key, value, destructor: self.clear(&mut destructors, number) });
            }
        }
        orphans
    }

    /// No code under the lock can panic in the middle of a change, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Vec<Option<D>>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> impl Iterator<Item = &StorageCell> {
        let chunks = std::iter::successors(Some(&self.first), |chunk| chunk.next.get().map(Box::as_ref));
        chunks.flat_map(|chunk| &chunk.entries)
    }

    fn position(&self, matches: impl Fn(Snapshot) -> bool) -> Option<usize> {
        self.entries().position(|entry| matches(entry.read()))
    }

    /// Adds a chunk and returns the number of its first entry.
    fn grow(&self) -> usize {
        let mut last = &self.first;
        let mut number = CHUNK;
        while let Some(next) = last.next.get() {
            last = next;
            number += CHUNK;
        }
        last.next.get_or_init(|| Box::new(StorageChunk::new()));
        number
    }

    fn clear(&self, destructors: &mut [Option<D>], number: usize) -> Option<D> {
        if let Some(entry) = self.entries().nth(number) {
            entry.write(Snapshot { context: 0, key: ptr::null_mut(), value: ptr::null_mut() });
        }
        destructors.get_mut(number).and_then(Option::take)
    }
}

impl StorageChunk {
    const fn new() -> Self {
        Self { entries: [const { StorageCell::new() }; CHUNK], next: OnceLock::new() }
    }
}

impl StorageCell {
    const fn new() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            context: AtomicUsize::new(0),
            key: AtomicPtr::new(ptr::null_mut()),
            value: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Reads all fields of one moment.
    fn read(&self) -> Snapshot {
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let snapshot = Snapshot {
                context: self.context.load(Ordering::Relaxed),
                key: self.key.load(Ordering::Relaxed),
                value: self.value.load(Ordering::Relaxed),
            };
            // The fields must be read before the sequence is read again.
            fence(Ordering::Acquire);
            if before & 1 == 0 && self.sequence.load(Ordering::Relaxed) == before {
                return snapshot;
            }
            // The writer has four stores left; if it was descheduled, let it run.
            std::thread::yield_now();
        }
    }

    /// Changes all fields; only with the writer's lock held.
    fn write(&self, new: Snapshot) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        // The odd number must be visible before any new field.
        fence(Ordering::Release);
        self.context.store(new.context, Ordering::Relaxed);
        self.key.store(new.key, Ordering::Relaxed);
        self.value.store(new.value, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(number: usize) -> *mut c_void {
        ptr::without_provenance_mut(number)
    }

    #[test]
    fn storage_finds_only_entries_that_were_put() {
        let store = Storage::<u32>::new();
        assert_eq!(store.get(1, pointer(8)), None);
        store.put(1, pointer(8), pointer(80), None);
        store.put(2, pointer(8), pointer(81), Some(7));
        store.put(1, pointer(9), ptr::null_mut(), None);
        assert_eq!(store.get(1, pointer(8)), Some(pointer(80)));
        assert_eq!(store.get(2, pointer(8)), Some(pointer(81)));
        assert_eq!(store.get(1, pointer(9)), Some(ptr::null_mut()), "a null value is a value");
        assert_eq!(store.get(2, pointer(9)), None);
        store.put(1, pointer(8), pointer(82), None);
        assert_eq!(store.get(1, pointer(8)), Some(pointer(82)));
        assert!(store.delete(1, pointer(8)));
        assert!(!store.delete(1, pointer(8)));
        assert_eq!(store.get(1, pointer(8)), None);
    }

    #[test]
    fn take_context_removes_only_the_entries_of_that_context() {
        let store = Storage::<usize>::new();
        for key in 1..=100 {
            store.put(1 + key % 2, pointer(key), pointer(key + 1000), (key % 3 == 0).then_some(key));
        }
        let mut orphans: Vec<_> =
            store.take_context(1).iter().map(|o| (o.key.addr(), o.value.addr(), o.destructor)).collect();
        orphans.sort_unstable();
        let even = (2..=100).step_by(2).map(|key| (key, key + 1000, (key % 3 == 0).then_some(key)));
        assert!(orphans.into_iter().eq(even));
        assert!(store.take_context(1).is_empty());
        assert_eq!(store.get(2, pointer(99)), Some(pointer(1099)));
    }

    #[test]
    fn storage_reuses_freed_entries() {
        let store = Storage::<()>::new();
        for round in 1..10_000 {
            store.put(round, pointer(1), pointer(round), Some(()));
            store.put(round, pointer(2), pointer(round), Some(()));
            assert_eq!(store.take_context(round).len(), 2);
        }
        assert_eq!(store.entries().count(), CHUNK);
    }

    #[test]
    fn concurrent_reader_never_sees_a_torn_entry() {
        let store = Storage::<()>::new();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        for entry in store.entries() {
                            let seen = entry.read();
                            assert_eq!(seen.key.addr(), seen.context * 3);
                            assert_eq!(seen.value.addr(), seen.context * 5);
                        }
                    }
                });
            }
            for round in 1..20_000 {
                store.put(round, pointer(round * 3), pointer(round * 5), None);
                if round % 3 == 0 {
                    for old in round - 2..=round {
                        assert!(store.delete(old, pointer(old * 3)));
                    }
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}

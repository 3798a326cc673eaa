//! User objects: data of a program that graphs and executable graphs keep alive.
//!
//! The last release calls the program's destructor, on the thread that releases and without a lock. A destructor must not call
//! CUDA.
#![expect(unsafe_code, reason = "calls the destructors of a program")]

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sluice_cuda_abi::sys::CUresult as Code;

use crate::graph::Owner;
use sluice_cuda_frontend::handles::{HandleKind, Slab};

/// A function of the program.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Maximum number of references in one call.
const MOST: u32 = i32::MAX.unsigned_abs();

/// The argument of a destructor.
struct Data(*mut c_void);

// SAFETY: never dereferenced here; the header lets a destructor run on another thread.
unsafe impl Send for Data {}

struct UserObject {
    data: Data,
    destroy: HostFunction,
    references: u64,
}

/// The user objects of a process.
pub(crate) struct UserObjects(Mutex<Slab<UserObject>>);

impl UserObjects {
    pub(crate) const fn new() -> UserObjects {
        UserObjects(Mutex::new(Slab::new(HandleKind::UserObject)))
    }

    fn lock(&self) -> MutexGuard<'_, Slab<UserObject>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a user object with references that the program owns.
    pub(crate) fn create(
        &self,
        data: *mut c_void,
        destroy: HostFunction,
        references: u32,
    ) -> Result<u64, Code> {
        counted(references)?;
        let object = UserObject { data: Data(data), destroy, references: u64::from(references) };
        self.lock().insert(object).ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Adds references.
    pub(crate) fn retain(&self, object: u64, count: u32) -> Result<(), Code> {
        counted(count)?;
        let mut objects = self.lock();
        let object = objects.get_mut(object).ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
        object.references += u64::from(count);
        Ok(())
    }

    /// Removes references, and destroys the object with its last one.
    pub(crate) fn release(&self, handle: u64, count: u32) -> Result<(), Code> {
        counted(count)?;
        let ended = {
            let mut objects = self.lock();
            let object = objects.get_mut(handle).ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
            let left = object.references.checked_sub(u64::from(count));
            object.references = left.ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
            if object.references == 0 { objects.remove(handle) } else { None }
        };
        if let Some(UserObject { data, destroy, .. }) = ended {
            // SAFETY: the program asked for this call when it made the object, and it is the only one.
            unsafe { destroy(data.0) };
        }
        Ok(())
    }

    /// Adds references for an owner that returns them when it is dropped. The caller's own references prove that the objects exist.
    pub(crate) fn keep(&'static self, references: &[(u64, u32)]) -> Kept {
        let retained =
            references.iter().copied().filter(|(object, count)| self.retain(*object, *count).is_ok());
        Kept { references: retained.collect(), objects: Some(self), owners: Vec::new(), keeper: None }
    }
}

fn counted(count: u32) -> Result<(), Code> {
    if (1..=MOST).contains(&count) { Ok(()) } else { Err(Code::CUDA_ERROR_INVALID_VALUE) }
}

/// Frees the memory of graphs.
pub(crate) trait MemoryKeeper: Send + Sync {
    /// Ends a hold of each owner.
    fn release_memory(&self, owners: &[Owner]);
}

/// References to user objects and to memory of graphs, which are released when this value is dropped.
#[derive(Default)]
pub struct Kept {
    references: Vec<(u64, u32)>,
    objects: Option<&'static UserObjects>,
    owners: Vec<Owner>,
    keeper: Option<&'static dyn MemoryKeeper>,
}

impl Kept {
    /// True if it keeps nothing, so that the moment of its drop makes no difference.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.references.is_empty() && self.owners.is_empty()
    }

    /// Takes over holds of memory.
    pub(crate) fn hold(&mut self, keeper: &'static dyn MemoryKeeper, owners: Vec<Owner>) {
        (self.keeper, self.owners) = (Some(keeper), owners);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        for (object, count) in self.references.drain(..) {
            if let Some(objects) = self.objects {
                // It fails only if the program released more references than it owned.
                let _ = objects.release(object, count);
            }
        }
        if let Some(keeper) = self.keeper
            && !self.owners.is_empty()
        {
            keeper.release_memory(&self.owners);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the tests pass a counter that lives as long as the process.
        unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    }

    fn counter() -> &'static AtomicU32 {
        Box::leak(Box::default())
    }

    fn data(counter: &'static AtomicU32) -> *mut c_void {
        std::ptr::from_ref(counter).cast_mut().cast()
    }

    #[test]
    fn destructor_runs_once_with_the_last_reference() {
        let objects: &'static UserObjects = Box::leak(Box::new(UserObjects::new()));
        let ended = counter();
        let object = objects.create(data(ended), count, 2).unwrap();
        objects.retain(object, 3).unwrap();
        let kept = objects.keep(&[(object, 1)]);
        assert!(!kept.is_empty());
        objects.release(object, 5).unwrap();
        assert_eq!(ended.load(Ordering::Relaxed), 0);
        drop(kept);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        assert_eq!(objects.release(object, 1), Err(Code::CUDA_ERROR_INVALID_VALUE));
        assert_eq!(objects.retain(object, 1), Err(Code::CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn counts_out_of_range_are_refused() {
        let objects = UserObjects::new();
        let ended = counter();
        for wrong in [0, MOST + 1, u32::MAX] {
            assert_eq!(objects.create(data(ended), count, wrong), Err(Code::CUDA_ERROR_INVALID_VALUE));
        }
        let object = objects.create(data(ended), count, 1).unwrap();
        for wrong in [0, 2, MOST + 1] {
            assert_eq!(objects.release(object, wrong), Err(Code::CUDA_ERROR_INVALID_VALUE));
        }
        assert_eq!(ended.load(Ordering::Relaxed), 0);
    }
}

//! Launches of the oldest form: block, shared memory and parameters are set for a function, one call each, before the grid is launched.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of parameters that a kernel can have.
const MOST_BYTES: usize = 32_764;

/// A launch in the making.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldLaunch {
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The parameters.
    pub parameters: Vec<u8>,
}

impl Default for OldLaunch {
    /// One thread, and no parameters. NVIDIA's driver launches it, too.
    fn default() -> Self {
        OldLaunch { block: [1; 3], shared: 0, parameters: Vec::new() }
    }
}

/// The launches in the making, by function. The library has looked the function up before it calls.
#[derive(Debug, Default)]
pub struct OldLaunches(Mutex<BTreeMap<u64, OldLaunch>>);

impl OldLaunches {
    /// No launches.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, OldLaunch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `cuFuncSetBlockShape`.
    ///
    /// # Errors
    /// `invalid` for a size that is not positive.
    pub fn set_block<E>(&self, function: u64, block: [i32; 3], invalid: E) -> Result<(), E> {
        if block.iter().any(|size| *size < 1) {
            return Err(invalid);
        }
        self.lock().entry(function).or_default().block = block.map(i32::cast_unsigned);
        Ok(())
    }

    /// `cuFuncSetSharedSize`.
    pub fn set_shared(&self, function: u64, bytes: u32) {
        self.lock().entry(function).or_default().shared = bytes;
    }

    /// `cuParamSetSize`.
    ///
    /// # Errors
    /// `invalid` for more than a kernel can have.
    pub fn set_size<E>(&self, function: u64, bytes: u32, invalid: E) -> Result<(), E> {
        let bytes = bytes as usize;
        if bytes > MOST_BYTES {
            return Err(invalid);
        }
        self.lock().entry(function).or_default().parameters.resize(bytes, 0);
        Ok(())
    }

    /// `cuParamSetv` and its forms for one number.
    ///
    /// # Errors
    /// `invalid` for bytes outside of the parameters that a kernel can have.
    pub fn set_parameter<E>(&self, function: u64, offset: i32, bytes: &[u8], invalid: E) -> Result<(), E> {
        let range =
            usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(bytes.len())?));
        let Some(range) = range.filter(|range| range.end <= MOST_BYTES) else { return Err(invalid) };
        let mut launches = self.lock();
        let parameters = &mut launches.entry(function).or_default().parameters;
        if parameters.len() < range.end {
            parameters.resize(range.end, 0);
        }
        if let Some(place) = parameters.get_mut(range) {
            place.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The launch as it was set up to now, with all `bytes` of the function's parameters: those that were not set are 0.
    #[must_use]
    pub fn get(&self, function: u64, bytes: usize) -> OldLaunch {
        let mut launch = self.lock().get(&function).cloned().unwrap_or_default();
        if launch.parameters.len() < bytes {
            launch.parameters.resize(bytes, 0);
        }
        launch
    }
}

/// The grid of `cuLaunchGrid`.
///
/// # Errors
/// `invalid` for a size that is not positive.
pub fn grid<E>(width: i32, height: i32, invalid: E) -> Result<[u32; 3], E> {
    match (u32::try_from(width), u32::try_from(height)) {
        (Ok(width @ 1..), Ok(height @ 1..)) => Ok([width, height, 1]),
        _ => Err(invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_a_function_are_put_together_and_bounded() {
        let launches = OldLaunches::default();
        launches.set_parameter(1, 8, &7_u32.to_le_bytes(), ()).unwrap();
        launches.set_parameter(1, 0, &9_u64.to_le_bytes(), ()).unwrap();
        launches.set_block(1, [32, 2, 1], ()).unwrap();
        let made = launches.get(1, 0);
        assert_eq!(made.block, [32, 2, 1]);
        assert_eq!(made.parameters, [9, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(launches.get(2, 0), OldLaunch::default(), "another function");
        for offset in [-1, 32_761, i32::MAX] {
            assert_eq!(launches.set_parameter(1, offset, &[0; 4], "no"), Err("no"), "{offset}");
        }
        assert_eq!(launches.set_size(1, 32_765, "no"), Err("no"));
        launches.set_size(1, 8, ()).unwrap();
        assert_eq!(launches.get(1, 0).parameters.len(), 8);
        assert_eq!(launches.set_block(1, [0, 1, 1], "no"), Err("no"));
        assert_eq!(grid(0, 1, "no"), Err("no"));
        assert_eq!(grid(3, 2, "no"), Ok([3, 2, 1]));
    }

    // Promise: C134
    #[test]
    fn launch_that_was_not_set_up_has_one_thread_and_parameters_of_zeroes() {
        let launches = OldLaunches::default();
        assert_eq!(launches.get(1, 4), OldLaunch { block: [1; 3], shared: 0, parameters: vec![0; 4] });
        launches.set_parameter(1, 0, &[7, 8], ()).unwrap();
        assert_eq!(launches.get(1, 4).parameters, [7, 8, 0, 0]);
        assert_eq!(launches.get(1, 1).parameters, [7, 8], "a launch has more than its function takes");
    }
}

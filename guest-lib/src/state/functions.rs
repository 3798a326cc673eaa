//! Functions and kernels: all data that a launch needs, cached when the handle was made, and the check of a launch against it.

use crate::{
    error::{Error, Result},
    session::Session,
    state::devices::{DeviceInfo, attribute as device_attribute},
};
use core::sync::atomic::{AtomicU64, Ordering};
use sluice_cuda_abi::occupancy::resident_threads;
use sluice_protocol::{
    calls::{FunctionAttributes, wire},
    field::{Mint, Name},
    handle::{Context, Function as Kind, Id, Module},
    limits,
};
use std::{
    ffi::CString,
    sync::{Mutex, OnceLock, RwLock, RwLockReadGuard},
};

const CHUNK: usize = 1024;

/// The `CUfunction_attribute`s that the shim uses.
pub(crate) mod attribute {
    pub(crate) const MAX_THREADS_PER_BLOCK: usize = 0;
    pub(crate) const SHARED_SIZE_BYTES: usize = 1;
    pub(crate) const NUM_REGS: usize = 4;
    pub(crate) const MAX_DYNAMIC_SHARED_SIZE_BYTES: usize = 8;
    /// Attributes that the worker tells of.
    pub(crate) const COUNT: u32 = 16;
    /// Nodes of graphs are not updated by devices here.
    pub(crate) const DEVICE_NODE_UPDATE_SUPPORTED: u32 = 16;
    /// It has its default value here, 0, and is not set.
    pub(crate) const SHARED_MEMORY_MODE: u32 = 17;
}

/// The data that the shim keeps about a function.
pub(crate) struct LoadedFunction {
    pub(crate) id: Id<Kind>,
    pub(crate) module: Id<Module>,
    /// Raw id of its module's context; 0 for a kernel of a library, which any context may launch.
    pub(crate) context: u64,
    /// Interned: handed out by pointer for the life of the process.
    pub(crate) name: &'static CString,
    pub(crate) attributes: FunctionAttributes,
    /// Offset and size of each parameter.
    pub(crate) parameters: Box<[(u16, u16)]>,
    /// The contexts, a bit each, in which the driver has accepted a launch; from then on its immediate errors depend on the launch
    /// alone.
    launched: AtomicU64,
}

const _: () = assert!(limits::CONTEXTS <= u64::BITS);

fn bit(context: u64) -> u64 {
    Id::<Context>::from_raw(context).map_or(0, |id| 1 << id.index())
}

impl LoadedFunction {
    /// True if the function belongs to no context.
    pub(crate) const fn is_kernel(&self) -> bool {
        self.context == 0
    }

    /// True if it was launched in a context before.
    pub(crate) fn was_launched(&self, context: u64) -> bool {
        self.launched.load(Ordering::Relaxed) & bit(context) != 0
    }

    /// Records a launch in a context.
    pub(crate) fn set_launched(&self, context: u64) {
        self.launched.fetch_or(bit(context), Ordering::Relaxed);
    }

    pub(crate) fn attribute(&self, index: usize) -> i32 {
        self.attributes.0.get(index).copied().unwrap_or(0)
    }

    /// A size attribute, never negative.
    pub(crate) fn bytes(&self, index: usize) -> u32 {
        u32::try_from(self.attribute(index)).unwrap_or(0)
    }

    pub(crate) fn parameter_bytes(&self) -> usize {
        usize::try_from(self.attribute(attribute::COUNT as usize)).unwrap_or(0)
    }
}

/// The sizes of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
}

impl LaunchShape {
    /// The checks that need only the launch, the function and the device.
    pub(crate) fn check(&self, device: &DeviceInfo, function: &LoadedFunction) -> Result {
        for (axis, (grid, block)) in (0u32..).zip(self.grid.iter().zip(&self.block)) {
            let most_blocks = device.bound(device_attribute::MAX_GRID_DIM_X + axis);
            let most_threads = device.bound(device_attribute::MAX_BLOCK_DIM_X + axis);
            if *grid == 0 || *grid > most_blocks || *block == 0 || *block > most_threads {
                return Err(Error::INVALID_VALUE);
            }
        }
        // Each factor is bounded by the device, so the product fits.
        let threads = self.block.iter().map(|size| u64::from(*size)).product::<u64>();
        if threads > u64::from(device.bound(device_attribute::MAX_THREADS_PER_BLOCK)) {
            return Err(Error::INVALID_VALUE);
        }
        if threads > u64::from(function.bytes(attribute::MAX_THREADS_PER_BLOCK)) {
            // The driver tells a function with too many registers from one that is bounded.
            let resident = resident_threads(
                device.bound(device_attribute::MAX_REGISTERS_PER_BLOCK),
                function.bytes(attribute::NUM_REGS),
            );
            let has_registers = threads <= u64::from(resident);
            return Err(if has_registers { Error::INVALID_VALUE } else { Error::LAUNCH_OUT_OF_RESOURCES });
        }
        let most_shared = function
            .bytes(attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES)
            .min(device.bound(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
        let static_shared = function.bytes(attribute::SHARED_SIZE_BYTES);
        let room = device
            .bound(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK)
            .saturating_sub(static_shared)
            .max(most_shared);
        if self.shared > room { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }
}

#[derive(Default)]
struct FunctionSlot {
    function: RwLock<Option<LoadedFunction>>,
}

/// The functions of the session.
pub(crate) struct Functions {
    chunks: [OnceLock<Box<[FunctionSlot]>>; limits::FUNCTIONS as usize / CHUNK],
    free: Mutex<FreeFunctions>,
    names: Mutex<std::collections::HashMap<CString, &'static CString>>,
}

#[derive(Default)]
struct FreeFunctions {
    /// Index and last generation of a free slot.
    returned: Vec<(u32, u32)>,
    fresh: u32,
}

/// A function in use: it stays, and its attributes do not change, while this is held. The holder must not wait, or a thread that
/// sets an attribute would delay all others that launch the function.
pub(crate) struct HeldFunction<'a>(RwLockReadGuard<'a, Option<LoadedFunction>>);

impl core::ops::Deref for HeldFunction<'_> {
    type Target = LoadedFunction;
    fn deref(&self) -> &LoadedFunction {
        // `resolve` makes no `HeldFunction` of an empty slot.
        self.0.as_ref().unwrap_or_else(|| unreachable!("checked when it was made"))
    }
}

impl Functions {
    pub(crate) fn new() -> Functions {
        Functions {
            chunks: [const { OnceLock::new() }; limits::FUNCTIONS as usize / CHUNK],
            free: Mutex::default(),
            names: Mutex::default(),
        }
    }

    fn slot(&self, index: usize) -> Result<&FunctionSlot> {
        let chunk = self.chunks.get(index / CHUNK).ok_or(Error::INVALID_HANDLE)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| FunctionSlot::default()).collect());
        chunk.get(index % CHUNK).ok_or(Error::INVALID_HANDLE)
    }

    fn intern(&self, name: &[u8]) -> Result<&'static CString> {
        let name = CString::new(name).map_err(|_| Error::INVALID_VALUE)?;
        let mut names = self.names.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Names live as long as the process: programs keep the pointers they got.
        Ok(names.entry(name.clone()).or_insert_with(|| Box::leak(Box::new(name))))
    }

    /// Finds a function of a module, or a kernel of a library, on the host. `of` is the module's context, `caller` the
    /// calling thread's.
    pub(crate) fn find(
        &self,
        session: &Session,
        caller: u64,
        module: Id<Module>,
        of: u64,
        name: &[u8],
    ) -> Result<Id<Kind>> {
        let (index, generation) = {
            let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match free.returned.pop() {
                Some((index, generation)) => (index, generation.wrapping_add(1)),
                None if free.fresh < limits::FUNCTIONS => {
                    free.fresh += 1;
                    (free.fresh - 1, 1)
                }
                None => return Err(Error::OUT_OF_MEMORY),
            }
        };
        let id = Id::new(index, generation);
        let found = session
            .sync(caller, &wire::module_function::Args { module, function: Mint(id), name: Name(name) });
        let found = found.and_then(|found| Ok((found, self.intern(name)?)));
        match found {
            Err(error) => {
                self.return_index(id);
                Err(error)
            }
            Ok((found, name)) => {
                let function = LoadedFunction {
                    id,
                    module,
                    context: of,
                    name,
                    attributes: found.attributes,
                    parameters: found.parameters.entries().into(),
                    launched: AtomicU64::new(0),
                };
                *self.slot(id.index())?.function.write().unwrap_or_else(|poisoned| poisoned.into_inner()) =
                    Some(function);
                Ok(id)
            }
        }
    }

    fn return_index(&self, id: Id<Kind>) {
        if let Ok(index) = u32::try_from(id.index()) {
            let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            free.returned.push((index, id.generation()));
        }
    }

    /// The function of a handle.
    pub(crate) fn resolve(&self, handle: u64) -> Result<HeldFunction<'_>> {
        let id = Id::<Kind>::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
        let chunk =
            self.chunks.get(id.index() / CHUNK).and_then(OnceLock::get).ok_or(Error::INVALID_HANDLE)?;
        let slot = chunk.get(id.index() % CHUNK).ok_or(Error::INVALID_HANDLE)?;
        let held = HeldFunction(slot.function.read().unwrap_or_else(|poisoned| poisoned.into_inner()));
        match &*held.0 {
            Some(function) if function.id == id => Ok(held),
            _ => Err(Error::INVALID_HANDLE),
        }
    }

    /// Replaces the cached attributes after one was set.
    pub(crate) fn update(&self, id: Id<Kind>, attributes: FunctionAttributes) -> Result {
        let mut slot =
            self.slot(id.index())?.function.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(function) = slot.as_mut().filter(|function| function.id == id) {
            function.attributes = attributes;
            function.launched.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Forgets the launches in a context, by index, that is gone.
    pub(crate) fn forget_launches(&self, context: usize) {
        for slot in self.chunks.iter().filter_map(OnceLock::get).flatten() {
            if let Some(function) = &*slot.function.read().unwrap_or_else(|poisoned| poisoned.into_inner()) {
                function.launched.fetch_and(!(1 << context), Ordering::Relaxed);
            }
        }
    }

    /// Drops a function whose module is gone.
    pub(crate) fn forget(&self, id: Id<Kind>) {
        if let Ok(slot) = self.slot(id.index()) {
            let mut slot = slot.function.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            if slot.take_if(|function| function.id == id).is_some() {
                drop(slot);
                self.return_index(id);
            }
        }
    }
}

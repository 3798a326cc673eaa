//! Modules and libraries: the existing ones, their contexts, and the symbols looked up in them.

use crate::{
    error::{Error, Result},
    host_memory,
    session::Session,
    state::{
        functions::Functions,
        jit::JitOptions,
        memory::{arena::Arena, device_map::DeviceMap, managed::Managed, variables::ManagedVariable},
        streams::Streams,
    },
};
use sluice_cuda_abi::image::{self, Selection, Wrapper};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, Mint, Name, Take},
    handle::{Context, Function, Id, Module as Kind},
    limits,
};
use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

/// A module of a context, or a library.
struct LoadedModule {
    id: Id<Kind>,
    /// Raw id of the context; 0 for a library.
    context: u64,
    functions: HashMap<Vec<u8>, Id<Function>>,
    /// Duplicates of functions that two threads looked up at once: unused, but alive on the host as long as the module.
    spare: Vec<Id<Function>>,
    /// Address and size by name, and by the context of the look-up: a library has its variables in each context.
    globals: HashMap<Vec<u8>, Vec<Global>>,
}

/// A variable, in the context of a look-up.
#[derive(Clone, Copy)]
pub(crate) struct Global {
    context: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) managed: bool,
}

/// The books of the memory of variables.
#[derive(Clone, Copy)]
pub(crate) struct VariableMemory<'a> {
    pub(crate) device_map: &'a DeviceMap,
    pub(crate) managed: &'a Managed,
}

impl VariableMemory<'_> {
    /// Records a variable of a module or of a library. All contexts share a managed variable of a library, so it belongs to none.
    fn add(self, found: Global, library: bool) -> Result {
        let Global { context, address, bytes, managed } = found;
        if !managed {
            return self.device_map.add_global(address, bytes, context);
        }
        let owner = if library { 0 } else { context };
        if self.managed.at(address).is_none() {
            self.device_map.add_global(address, bytes, owner)?;
        }
        let of = (!library).then_some(context);
        let variable = ManagedVariable { start: address, bytes, context: of, on_device: true };
        self.managed.variables.add(self.device_map, variable)?;
        self.managed.add_variable(address, bytes);
        Ok(())
    }

    fn forget(self, gone: Global) {
        if gone.managed {
            self.managed.forget_variable(gone.address);
            let variables = &self.managed.variables;
            variables.close(self.device_map, &variables.take(|variable| variable.start == gone.address));
            self.device_map.remove(gone.address, 0);
        }
        self.device_map.remove(gone.address, gone.context);
    }
}

/// The modules and libraries of the session.
pub(crate) struct Modules {
    pub(crate) functions: Functions,
    state: Mutex<ModulesState>,
}

#[derive(Default)]
struct ModulesState {
    modules: Vec<Option<LoadedModule>>,
    generations: Vec<u32>,
}

impl Modules {
    pub(crate) fn new() -> Modules {
        Modules { functions: Functions::new(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, ModulesState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Loads an image of the program: a module of `context`, or a library. The options' places get the
    /// compiler's logs and numbers, also when loading fails.
    pub(crate) fn load(
        &self,
        session: &Session,
        arena: &Arena,
        context: u64,
        library: bool,
        image: &ModuleImage,
        options: &JitOptions,
    ) -> Result<Id<Kind>> {
        let id = {
            let mut state = self.lock();
            let index = match state.modules.iter().position(Option::is_none) {
                Some(index) if state.generations[index] != 0 => index,
                _ if state.modules.len() < limits::MODULES as usize => {
                    state.modules.push(None);
                    state.generations.push(0);
                    state.modules.len() - 1
                }
                _ => return Err(Error::OUT_OF_MEMORY),
            };
            state.generations[index] = state.generations[index].wrapping_add(1);
            let id = Id::new(u32::try_from(index).map_err(|_| Error::UNKNOWN)?, state.generations[index]);
            // Taken from here on, so that no other thread mints it.
            let context = if library { 0 } else { context };
            state.modules[index] = Some(LoadedModule {
                id,
                context,
                functions: HashMap::new(),
                spare: Vec::new(),
                globals: HashMap::new(),
            });
            id
        };
        let loaded = ship(session, arena, context, library, id, image, options);
        if loaded.is_err() {
            self.lock().modules[id.index()] = None;
        }
        loaded.map(|()| id)
    }

    /// Checks a handle; true for a library.
    pub(crate) fn resolve(&self, handle: u64) -> Result<(Id<Kind>, bool)> {
        self.of(handle).map(|(id, context)| (id, context == 0))
    }

    /// Checks a handle and returns the context of its module.
    fn of(&self, handle: u64) -> Result<(Id<Kind>, u64)> {
        let id = Id::<Kind>::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
        let state = self.lock();
        let module = state.modules.get(id.index()).and_then(Option::as_ref).filter(|module| module.id == id);
        module.map(|module| (id, module.context)).ok_or(Error::INVALID_HANDLE)
    }

    /// Runs `look` on a module, if it still exists.
    fn with<R>(&self, id: Id<Kind>, look: impl FnOnce(&mut LoadedModule) -> R) -> Option<R> {
        self.lock().modules.get_mut(id.index())?.as_mut().filter(|module| module.id == id).map(look)
    }

    /// A function of a module or a kernel of a library, looked up once.
    pub(crate) fn function(
        &self,
        session: &Session,
        caller: u64,
        handle: u64,
        name: &[u8],
    ) -> Result<Id<Function>> {
        let (id, context) = self.of(handle)?;
        if let Some(Some(function)) = self.with(id, |module| module.functions.get(name).copied()) {
            return Ok(function);
        }
        let function = self.functions.find(session, caller, id, context, name)?;
        let kept = self.with(id, |module| {
            let kept = *module.functions.entry(name.to_vec()).or_insert(function);
            if kept != function {
                module.spare.push(function);
            }
            kept
        });
        if kept.is_none() {
            // The module was unloaded meanwhile, and on the host the function with it.
            self.functions.forget(function);
        }
        kept.ok_or(Error::INVALID_HANDLE)
    }

    /// A variable, looked up once per context. `allow` decides about one that is managed.
    pub(crate) fn global(
        &self,
        session: &Session,
        memory: VariableMemory<'_>,
        context: u64,
        handle: u64,
        name: &[u8],
        allow: impl FnOnce() -> Result,
    ) -> Result<Global> {
        let (id, of) = self.of(handle)?;
        let context = if of == 0 { context } else { of };
        let known = self.with(id, |module| {
            module.globals.get(name)?.iter().find(|global| global.context == context).copied()
        });
        if let Some(Some(known)) = known {
            return Ok(known);
        }
        let found = session.sync(context, &wire::module_global::Args { module: id, name: Name(name) })?;
        let wire::module_global::Reply { address, bytes, managed } = found;
        if managed {
            allow()?;
        }
        let found = Global { context, address, bytes, managed };
        memory.add(found, of == 0)?;
        self.with(id, |module| module.globals.entry(name.to_vec()).or_default().push(found));
        Ok(found)
    }

    /// Number of functions of a module.
    pub(crate) fn function_count(&self, session: &Session, context: u64, handle: u64) -> Result<u32> {
        let (id, _) = self.resolve(handle)?;
        let counted = session.sync(context, &wire::module_function_count::Args { module: id })?;
        Ok(counted.count)
    }

    /// Function number `index` of a module.
    pub(crate) fn function_at(
        &self,
        session: &Session,
        arena: &Arena,
        context: u64,
        handle: u64,
        index: u32,
    ) -> Result<Id<Function>> {
        let (id, _) = self.resolve(handle)?;
        let bytes = limits::NAME_BYTES as u64;
        let name = arena.with_room(
            session,
            bytes,
            || Ok(()),
            |address| {
                let into = ArenaOut { address, bytes };
                let call = wire::module_function_name::Args { module: id, index, into };
                let named = session.sync(context, &call)?;
                let mut name = vec![0; usize::try_from(named.length).unwrap_or(0).min(limits::NAME_BYTES)];
                host_memory::read(address, &mut name);
                Ok(name)
            },
        )?;
        self.function(session, context, handle, &name)
    }

    /// Unloads a module or library once its work is done.
    pub(crate) fn unload(
        &self,
        session: &Session,
        streams: &Streams,
        memory: VariableMemory<'_>,
        context: u64,
        handle: u64,
    ) -> Result {
        let (id, _) = self.resolve(handle)?;
        streams.wait_all(session)?;
        let its = |module: &mut LoadedModule| {
            let globals = module.globals.values().flatten().filter(|global| global.managed);
            globals.map(|global| global.address).collect::<Vec<_>>()
        };
        let its = self.with(id, its).unwrap_or_default();
        // Before another thread's call carries the contents of a variable that has ended.
        let taken = memory.managed.variables.take(|variable| its.contains(&variable.start));
        if let Err(error) = session.sync(context, &wire::module_unload::Args { module: Take(id) }) {
            memory.managed.variables.put_back(taken);
            return Err(error);
        }
        memory.managed.variables.close(memory.device_map, &taken);
        let module = self.lock().modules.get_mut(id.index()).and_then(Option::take);
        self.forget(memory, module);
        Ok(())
    }

    fn forget(&self, memory: VariableMemory<'_>, module: Option<LoadedModule>) {
        let Some(module) = module else { return };
        let functions = module.functions.values().chain(&module.spare);
        functions.for_each(|function| self.functions.forget(*function));
        module.globals.into_values().flatten().for_each(|global| memory.forget(global));
    }

    /// The handles of a context's modules.
    pub(crate) fn of_context(&self, context: u64) -> Vec<u64> {
        let state = self.lock();
        let of_context = state.modules.iter().flatten().filter(|module| module.context == context);
        of_context.map(|module| module.id.raw()).collect()
    }

    /// Forgets the modules of a context that is gone, and the addresses of libraries' variables in it.
    pub(crate) fn forget_context(&self, memory: VariableMemory<'_>, id: Id<Context>) {
        let context = id.raw();
        let gone: Vec<LoadedModule> = {
            let mut state = self.lock();
            for globals in state.modules.iter_mut().flatten().flat_map(|module| module.globals.values_mut()) {
                // Managed variables of a library end with it.
                globals.retain(|global| global.context != context || global.managed);
            }
            let of_context = |module: &mut LoadedModule| module.context == context;
            state.modules.iter_mut().filter_map(|module| module.take_if(of_context)).collect()
        };
        gone.into_iter().for_each(|module| self.forget(memory, Some(module)));
        self.functions.forget_launches(id.index());
    }
}

/// Copies an image into the arena and loads it.
fn ship(
    session: &Session,
    arena: &Arena,
    context: u64,
    library: bool,
    id: Id<Kind>,
    image: &ModuleImage,
    options: &JitOptions,
) -> Result {
    let bytes = usize::try_from(image.bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
    let carried = options.carried()?;
    let (info, error) = options.places.rooms();
    options.places.with_report(session, arena, image.bytes, |address, report| {
        host_memory::stage(address, image.address, bytes);
        let call = wire::module_load::Args {
            module: Mint(id),
            library,
            image: ArenaIn { address, bytes: image.bytes },
            options: carried,
            info,
            error,
            report,
        };
        session.sync(context, &call).map(drop)
    })
}

/// The wrapper at an address of the program, if there is one.
fn wrapper_at(address: u64) -> Result<Option<Wrapper>> {
    let mut wrapper = [0; Wrapper::SIZE];
    let mut magic = [0; 4];
    host_memory::read(address, &mut magic);
    // Only an image that begins like a wrapper is long enough to be read as one: a text may end after a few bytes.
    if u32::from_le_bytes(magic) != 0x4662_43b1 {
        return Ok(None);
    }
    host_memory::read(address, &mut wrapper);
    Wrapper::parse(&wrapper).map_err(|error| Error(error.status() as u32))
}

/// The parts, address and length, of which an image of relocatable code is linked; none for another image.
pub(crate) fn relocatable_parts(address: u64) -> Result<Vec<(u64, u64)>> {
    let mut parts = Vec::new();
    let Some(Wrapper { version: 2, fatbins, .. }) = wrapper_at(address)? else { return Ok(parts) };
    if fatbins == 0 {
        return Ok(parts);
    }
    for index in 0..limits::LINK_INPUTS as usize {
        match host_memory::word(fatbins, index)? {
            0 => return Ok(parts),
            fatbin => {
                let ModuleImage { address, bytes, .. } = ModuleImage::find(fatbin)?;
                parts.push((address, bytes));
            }
        }
    }
    Err(Error::OUT_OF_MEMORY)
}

/// An image in the program's memory.
pub(crate) struct ModuleImage {
    address: u64,
    bytes: u64,
    /// The memory at `address`, if it is not the program's.
    _copy: Option<Vec<u8>>,
}

impl ModuleImage {
    /// Follows a wrapper and finds the image's length.
    pub(crate) fn find(address: u64) -> Result<ModuleImage> {
        if address == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let address = match wrapper_at(address)? {
            Some(wrapper) => wrapper.data,
            None => address,
        };
        // A text does not state its length, and the page behind its end may not be mapped: look for the end page by page.
        // The other kinds state their size, which cannot be checked.
        let mut magic = [0; 4];
        host_memory::read(address, &mut magic);
        let sized = magic == *b"\x7fELF" || u32::from_le_bytes(magic) == 0xba55_ed50;
        let mut read = |offset: u64, into: &mut [u8]| {
            let at = address.wrapping_add(offset);
            let in_page = at % 4096 + into.len() as u64 <= 4096;
            if sized || in_page {
                host_memory::read(at, into);
            }
            sized || in_page
        };
        let extent =
            image::size_of(&mut read, limits::IMAGE_BYTES).map_err(|error| Error(error.status() as u32))?;
        Ok(ModuleImage { address, bytes: extent.bytes, _copy: None })
    }

    /// The image without the parts that the user forbids on a device of architecture `sm`.
    pub(crate) fn selected(self, selection: Selection, sm: u32) -> Result<ModuleImage> {
        if selection.is_all() {
            return Ok(self);
        }
        let mut bytes = vec![0; usize::try_from(self.bytes).map_err(|_| Error::OUT_OF_MEMORY)?];
        host_memory::read(self.address, &mut bytes);
        let refused = |error: image::ImageError| Error(error.status() as u32);
        let copy = match selection.apply(&bytes, sm).map_err(refused)? {
            Cow::Borrowed(_) => return Ok(self),
            Cow::Owned(copy) => copy,
        };
        let address = copy.as_ptr().expose_provenance() as u64;
        Ok(ModuleImage { address, bytes: copy.len() as u64, _copy: Some(copy) })
    }
}

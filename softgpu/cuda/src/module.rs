//! Images, modules, libraries, kernels and functions. In one file: they share their tables of names.
//!
//! An [`Image`] is parsed PTX. A [`Module`] is an image in one context: its variables have memory. A [`Library`] is an image
//! without a context, which becomes a module in each context that uses it; its kernels have handles of their own, which are valid
//! wherever a function is.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicI32, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock};

use sluice_cuda_abi::image::{self, Wrapper};
use sluice_cuda_abi::jit::input;
use sluice_cuda_frontend::environment::{Environment, LoadingMode};
use softgpu_device::Capability;
use softgpu_engine::{Kernel as Entry, Linked, ReferenceKind, SourceUnit};

use crate::arrays::BoundReference;
use crate::capability::SHARED_PER_BLOCK;
use crate::context::{Core, current_core};
use crate::copy;
use crate::error::{Error, Result};
use crate::ffi::In;
use crate::gpu::{self, VisibleGpu};
use crate::handles::{Kind, Registry, kind_of};
use crate::image::{IMAGE_LIMIT, LoadRefusal, describe, select_ptx};
use crate::jit::JitOptions;
use crate::linked;
use crate::linker::{self, PendingLink};
use crate::lock::lock;
use crate::log::log;
use crate::memory::{BlockKind, Maker};

static MODULES: Registry<Module> = Registry::new(Kind::Module, Error::INVALID_HANDLE);
static FUNCTIONS: Registry<Function> = Registry::new(Kind::Function, Error::INVALID_HANDLE);
pub(crate) static LIBRARIES: Registry<Library> = Registry::new(Kind::Library, Error::INVALID_HANDLE);
static KERNELS: Registry<Kernel> = Registry::new(Kind::Kernel, Error::INVALID_HANDLE);

/// Parsed PTX.
pub(crate) struct Image {
    /// The text, or the file of a link, which is stored in device memory of each context, like the code of a module.
    text: Vec<u8>,
    parsed: Arc<softgpu_engine::Module>,
    /// Names of kernels as C strings, valid as long as the process lives.
    names: Vec<OnceLock<&'static CStr>>,
}

/// The settings of a function, in one module or, for a kernel of a library, in all contexts.
#[derive(Debug)]
pub(crate) struct FunctionSettings {
    pub(crate) dynamic_shared: AtomicU32,
    pub(crate) carveout: AtomicI32,
}

impl FunctionSettings {
    fn of(entry: &Entry) -> FunctionSettings {
        FunctionSettings {
            dynamic_shared: AtomicU32::new(SHARED_PER_BLOCK.saturating_sub(entry.static_shared)),
            carveout: AtomicI32::new(-1),
        }
    }
}

/// An image in one context.
pub(crate) struct Module {
    pub(crate) core: Arc<Core>,
    pub(crate) image: Arc<Image>,
    pub(crate) linked: Linked,
    /// Device address of its code.
    code: Option<u64>,
    /// One for each kernel; the modules of a library share theirs.
    settings: Vec<Arc<FunctionSettings>>,
    /// Handles of functions that the program has looked up, by kernel.
    functions: Mutex<HashMap<usize, u64>>,
    /// The objects of its texture and surface references, in their order.
    references: Mutex<Vec<Option<BoundReference>>>,
    /// The library that the module belongs to.
    library: Option<Arc<LibraryBody>>,
}

/// A kernel in a module.
pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    pub(crate) module_handle: u64,
    pub(crate) index: usize,
}

/// The part that a library and its kernels share.
pub(crate) struct LibraryBody {
    image: Arc<Image>,
    settings: Vec<Arc<FunctionSettings>>,
    /// The library as a module, by core.
    instances: Mutex<HashMap<u64, (u64, Arc<Module>)>>,
    /// Its managed variables, which all contexts share, once it is in one of them.
    managed: Mutex<Option<SharedVariables>>,
}

/// The managed variables of a library.
struct SharedVariables {
    gpu: &'static VisibleGpu,
    /// By number of the variable.
    addresses: HashMap<usize, u64>,
}

/// An image without a context.
pub(crate) struct Library {
    /// An image of no known kind has an error instead, which every use of the library returns.
    body: Result<Arc<LibraryBody>>,
    kernels: Vec<u64>,
}

impl Library {
    fn body(&self) -> Result<&Arc<LibraryBody>> {
        self.body.as_ref().map_err(|error| *error)
    }
}

/// A kernel of a library.
pub(crate) struct Kernel {
    pub(crate) library: u64,
    body: Arc<LibraryBody>,
    index: usize,
}

/// The kernel that a `CUfunction` argument refers to.
pub(crate) struct Callable {
    pub(crate) module: Arc<Module>,
    pub(crate) index: usize,
}

impl Callable {
    pub(crate) fn parsed(&self) -> &softgpu_engine::Module {
        &self.module.image.parsed
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.module.image.parsed.kernels()[self.index]
    }

    pub(crate) fn settings(&self) -> &FunctionSettings {
        &self.module.settings[self.index]
    }

    pub(crate) fn capability(&self) -> &'static Capability {
        self.module.core.gpu.capability()
    }
}

/// Reads and parses an image: a wrapper, a fatbin or a PTX text.
pub(crate) fn parse(
    mut address: In<u8>,
    max_registers: Option<u32>,
) -> std::result::Result<Arc<Image>, LoadRefusal> {
    // A text may be shorter than a wrapper, so the magic number decides whether to read more.
    let mut head = [0; Wrapper::SIZE];
    let mut magic = [0; 4];
    address.read(&mut magic[..1])?;
    if magic[0] == WRAPPER_FIRST_BYTE {
        address.read(&mut head)?;
        if let Some(wrapper) = Wrapper::parse(&head)? {
            let WrapperPointers { data, fatbins, .. } = address.cast::<WrapperPointers>().get()?;
            if wrapper.version != 1 && fatbins.is_given() {
                return parse_linked(data, fatbins, max_registers);
            }
            address = data;
        }
    }
    parse_bytes(&read_image(address)?, max_registers)
}

/// Reads an image of several parts: one that is linked already, or else those of which it is linked now.
fn parse_linked(
    data: In<u8>,
    parts: In<In<u8>>,
    max_registers: Option<u32>,
) -> std::result::Result<Arc<Image>, LoadRefusal> {
    match parse_bytes(&read_image(data)?, max_registers) {
        Err(LoadRefusal { error: Error::NO_BINARY_FOR_GPU, .. }) => {}
        done => return done,
    }
    let mut link = PendingLink::default();
    for index in 0..linker::INPUTS {
        let part = parts.get_at(index)?;
        if !part.is_given() {
            break;
        }
        link.add(input::FATBINARY, &read_image(part)?, &format!("part {index}"), max_registers)?;
    }
    parse_selected(&link.complete()?.0, None)
}

/// Reads a fatbin, a file or a text of the program.
fn read_image(address: In<u8>) -> std::result::Result<Vec<u8>, LoadRefusal> {
    // A text does not state its length, and the memory after its end may be unmapped: it is read up to the end of a page at a
    // time. Only the first bytes, which determine the kind of image, may cross a page.
    let mut first = [0; 2];
    address.read(&mut first[..1])?;
    if first[0] != 0 {
        address.at(1)?.read(&mut first[1..])?;
    }
    let is_text = !matches!(first, [0x50, 0xed] | [0x7f, b'E']);
    let mut read = |offset: u64, buffer: &mut [u8]| {
        let (kind, count) = (offset == 0 && buffer.len() <= 4, buffer.len() as u64);
        if is_text && !kind && crosses_page(address.address().wrapping_add(offset), count) {
            return false;
        }
        let from = usize::try_from(offset).ok().and_then(|offset| address.at(offset).ok());
        from.is_some_and(|from| from.read(buffer).is_ok())
    };
    let extent = image::size_of(&mut read, IMAGE_LIMIT)?;
    Ok(address.bytes(usize::try_from(extent.bytes).map_err(|_| Error::INVALID_IMAGE)?)?)
}

/// True if an image that was refused is of no known kind.
pub(crate) fn is_unknown(address: In<u8>) -> bool {
    let mut first = [0];
    address.read(&mut first).is_ok()
        && first[0] != WRAPPER_FIRST_BYTE
        && read_image(address).is_ok_and(|bytes| crate::image::is_unknown(&bytes))
}

/// The pointers of a [`Wrapper`].
#[derive(Clone, Copy)]
#[repr(C)]
struct WrapperPointers {
    _magic_and_version: [u32; 2],
    data: In<u8>,
    /// A list that ends with a null pointer.
    fatbins: In<In<u8>>,
}

const _: () = assert!(size_of::<WrapperPointers>() == Wrapper::SIZE);

/// True if `count` bytes lie in more than one page of the host.
fn crosses_page(start: u64, count: u64) -> bool {
    const PAGE: u64 = 4096;
    count > PAGE - start % PAGE
}

/// The first byte of a wrapper's magic number; no PTX text begins with it.
const WRAPPER_FIRST_BYTE: u8 = 0xb1;

/// Parses the bytes of an image, as far as the user permits their parts.
pub(crate) fn parse_bytes(
    bytes: &[u8],
    max_registers: Option<u32>,
) -> std::result::Result<Arc<Image>, LoadRefusal> {
    parse_selected(&Environment::get().images.apply(bytes, gpu::image_capability().sm())?, max_registers)
}

/// Parses the bytes of an image. `max_registers` holds for kernels of a text that states no limit.
fn parse_selected(bytes: &[u8], max_registers: Option<u32>) -> std::result::Result<Arc<Image>, LoadRefusal> {
    let sm = gpu::image_capability().sm();
    if let Some(units) = linked::decode(bytes) {
        let parsed = softgpu_engine::Module::load_units(&units, sm).map_err(|(_, error)| error)?;
        return Ok(Image::new(bytes.to_vec(), parsed));
    }
    let text = select_ptx(bytes)?;
    let unit = SourceUnit { text: &text, max_registers };
    let parsed = softgpu_engine::Module::load_units(&[unit], sm).map_err(|(_, error)| error)?;
    Ok(Image::new(text, parsed))
}

impl Image {
    fn new(text: Vec<u8>, parsed: softgpu_engine::Module) -> Arc<Image> {
        let names = parsed.kernels().iter().map(|_| OnceLock::new()).collect();
        Arc::new(Image { text, parsed: Arc::new(parsed), names })
    }

    /// A line about each kernel, for the information log.
    pub(crate) fn describe(&self) -> String {
        describe(&self.parsed)
    }

    fn kernel(&self, name: &[u8]) -> Result<usize> {
        let mut kernels = self.parsed.kernels().iter();
        let index = kernels.position(|kernel| kernel.name.as_bytes() == name).ok_or(Error::NOT_FOUND)?;
        self.runnable(index)?;
        Ok(index)
    }

    /// Checks that the engine executes every instruction of a kernel, and of the functions that it calls.
    fn runnable(&self, index: usize) -> Result {
        let kernel = self.parsed.kernels().get(index).ok_or(Error::NOT_FOUND)?;
        let Some(refusal) = &kernel.refusal else { return Ok(()) };
        log!("kernel {} refused: {refusal}", kernel.name);
        Err(Error::NOT_SUPPORTED)
    }

    /// The host can look up every variable of a module: the compiler writes those of one file without `.visible`.
    fn global(&self, name: &[u8]) -> Result<usize> {
        let mut globals = self.parsed.globals().iter();
        globals.position(|global| global.name.as_bytes() == name).ok_or(Error::NOT_FOUND)
    }

    fn name(&self, index: usize) -> Result<&'static CStr> {
        let kernel = &self.parsed.kernels()[index];
        let name = CString::new(kernel.name.as_bytes()).map_err(|_| Error::UNKNOWN)?;
        // The API does not define how long the text must live.
        Ok(self.names[index].get_or_init(|| Box::leak(name.into_boxed_c_str())))
    }
}

/// Allocates and fills the managed variables of an image; returns their addresses by number.
fn place_managed(image: &Image, gpu: &'static VisibleGpu, maker: Maker) -> Result<HashMap<usize, u64>> {
    let globals = image.parsed.globals();
    let mut addresses = HashMap::new();
    let mut managed = globals.iter().enumerate().filter(|(_, global)| global.managed);
    let placed = managed.try_for_each(|(index, global)| {
        let bytes = global.size.max(1);
        let address = gpu.space.allocate_variable(maker, bytes)?;
        addresses.insert(index, address);
        gpu.share_host(address, bytes, true)
    });
    let filled = placed.and_then(|()| {
        addresses.iter().filter(|(index, _)| globals[**index].initialised).try_for_each(|(index, address)| {
            // The other variables have an address in each context.
            let known = Cell::new(true);
            let bytes = image.parsed.initial_bytes(*index, &|other| {
                let address = addresses.get(&other);
                known.set(known.get() && address.is_some());
                address.copied().unwrap_or(0)
            });
            if !known.get() {
                log!("managed variable {} refused: it begins as an address", globals[*index].name);
                return Err(Error::NOT_SUPPORTED);
            }
            copy::write_bytes(gpu, *address, &bytes)
        })
    });
    if let Err(error) = filled {
        release_blocks(gpu, addresses.into_values(), &[BlockKind::Variable]);
        return Err(error);
    }
    Ok(addresses)
}

/// Allocates memory for an image in a context: its variables and its code, and a heap if the context has none and the image calls
/// `malloc`. A variable without an initial value is zero, as PTX defines.
fn instantiate(
    image: &Arc<Image>,
    core: &Arc<Core>,
    settings: Vec<Arc<FunctionSettings>>,
    library: Option<Arc<LibraryBody>>,
) -> Result<(u64, Arc<Module>)> {
    let managed = match &library {
        Some(library) => library.managed(core.gpu)?,
        None => place_managed(image, core.gpu, core.maker())?,
    };
    let globals = image.parsed.globals();
    let mut addresses: Vec<u64> = Vec::new();
    let mut place = |bytes: u64, managed: Option<&u64>| {
        let internal = || core.gpu.space.allocate(core.maker(), bytes.max(1), BlockKind::Internal);
        addresses.push(managed.copied().map_or_else(internal, Ok)?);
        Ok(())
    };
    let mut variables = globals.iter().enumerate();
    let placed = variables.try_for_each(|(index, global)| place(global.size, managed.get(&index)));
    let placed = placed.and_then(|()| place(image.text.len() as u64, None));
    let filled = placed.and_then(|()| {
        for (index, global) in globals.iter().enumerate().filter(|(_, global)| !global.managed) {
            if global.initialised {
                let bytes = image.parsed.initial_bytes(index, &|other| addresses[other]);
                copy::write_bytes(core.gpu, addresses[index], &bytes)?;
            } else {
                copy::clear(core.gpu, addresses[index], global.size)?;
            }
        }
        // The code follows the variables.
        copy::write_bytes(core.gpu, addresses[globals.len()], &image.text)
    });
    let filled = filled.and_then(|()| if image.parsed.calls_malloc() { core.take_heap() } else { Ok(()) });
    if let Err(error) = filled {
        release_blocks(core.gpu, addresses, &[BlockKind::Internal]);
        if library.is_none() {
            release_blocks(core.gpu, managed.into_values(), &[BlockKind::Variable]);
        }
        return Err(error);
    }
    let code = addresses.pop();
    let linked = image.parsed.link(addresses);
    let functions = Mutex::default();
    let references = Mutex::new(image.parsed.references().iter().map(|_| None).collect());
    let (core, image) = (Arc::clone(core), Arc::clone(image));
    let module = Module { core, image, linked, code, settings, functions, references, library };
    let (handle, module) = MODULES.insert_with(|_| module)?;
    lock(&module.core.modules).push(handle);
    Ok((handle, module))
}

fn release_blocks(gpu: &VisibleGpu, addresses: impl IntoIterator<Item = u64>, kinds: &[BlockKind]) {
    for address in addresses {
        if let Ok(block) = gpu.space.withdraw(address, kinds) {
            // Fails only when the process exits: then no memory needs to be given back.
            let _ = gpu.release(&block);
        }
    }
}

fn own_settings(image: &Image) -> Vec<Arc<FunctionSettings>> {
    image.parsed.kernels().iter().map(|entry| Arc::new(FunctionSettings::of(entry))).collect()
}

/// Loads an image into the current context.
pub(crate) fn load(image: &Arc<Image>) -> Result<u64> {
    let core = current_core()?;
    Ok(instantiate(image, &core, own_settings(image), None)?.0)
}

/// Loads an image of the program into the current context, without options.
pub(crate) fn load_plain(image: In<u8>) -> Result<u64> {
    current_core()?;
    load(&finish(&JitOptions::none(), parse(image, None))?)
}

/// `cuModuleUnload`: waits for work that may run in the module.
pub(crate) fn unload(handle: u64) -> Result {
    let module = MODULES.get(handle)?;
    if module.library.is_some() {
        return Err(Error::NOT_PERMITTED);
    }
    end(handle)
}

fn end(handle: u64) -> Result {
    let module = MODULES.remove(handle)?;
    if module.image.parsed.globals().iter().any(|global| global.managed) {
        gpu::drain_all()?;
    } else {
        module.core.gpu.drain();
    }
    lock(&module.core.modules).retain(|other| *other != handle);
    for (_, function) in lock(&module.functions).drain() {
        // Only this code removes functions.
        let _ = FUNCTIONS.remove(function);
    }
    // Managed variables of a library end with it.
    let own = [BlockKind::Internal, BlockKind::Variable];
    let kinds = if module.library.is_some() { &own[..1] } else { &own[..] };
    let addresses = module.linked.addresses().iter().chain(&module.code);
    release_blocks(module.core.gpu, addresses.copied(), kinds);
    Ok(())
}

/// Drops a module of an ended context, which releases the module's memory.
pub(crate) fn forget(handle: u64) {
    let Ok(module) = MODULES.remove(handle) else { return };
    for (_, function) in lock(&module.functions).drain() {
        // Only this code removes functions.
        let _ = FUNCTIONS.remove(function);
    }
    if let Some(library) = &module.library {
        lock(&library.instances).remove(&module.core.id);
    }
}

/// Returns the handle of a kernel in a module, the same for each call.
fn function_of(module: &Arc<Module>, module_handle: u64, index: usize) -> Result<u64> {
    let mut functions = lock(&module.functions);
    if let Some(handle) = functions.get(&index) {
        return Ok(*handle);
    }
    let function = Function { module: Arc::clone(module), module_handle, index };
    let (handle, _) = FUNCTIONS.insert_with(|_| function)?;
    functions.insert(index, handle);
    Ok(handle)
}

/// `cuModuleGetFunction`.
pub(crate) fn function(handle: u64, name: &[u8]) -> Result<u64> {
    let module = MODULES.get(handle)?;
    function_of(&module, handle, module.image.kernel(name)?)
}

/// `cuModuleEnumerateFunctions`.
pub(crate) fn functions(handle: u64) -> Result<Vec<u64>> {
    let module = MODULES.get(handle)?;
    (0..module.image.parsed.kernels().len()).map(|index| function_of(&module, handle, index)).collect()
}

/// `cuModuleGetGlobal`: address and size.
pub(crate) fn global(handle: u64, name: &[u8]) -> Result<(u64, u64)> {
    let module = MODULES.get(handle)?;
    module_global(&module, name)
}

fn module_global(module: &Module, name: &[u8]) -> Result<(u64, u64)> {
    let index = module.image.global(name)?;
    Ok((module.linked.addresses()[index], module.image.parsed.globals()[index].size))
}

/// Finds a texture or surface reference of a module: `cuModuleGetTexRef` and `cuModuleGetSurfRef`.
pub(crate) fn reference(handle: u64, name: &[u8], kind: ReferenceKind) -> Result<(Arc<Module>, usize)> {
    let module = MODULES.get(handle)?;
    let mut references = module.image.parsed.references().iter();
    let found = references.position(|reference| reference.name.as_bytes() == name && reference.kind == kind);
    let index = found.ok_or(Error::NOT_FOUND)?;
    Ok((module, index))
}

impl Module {
    /// Sets the object that later launches find in a reference.
    pub(crate) fn bind(&self, index: usize, target: Option<BoundReference>) {
        if let Some(place) = lock(&self.references).get_mut(index) {
            *place = target;
        }
    }

    /// The objects of all references.
    pub(crate) fn bound_references(&self) -> Vec<Option<BoundReference>> {
        lock(&self.references).clone()
    }
}

/// `cuLibraryLoadData`.
pub(crate) fn load_library(image: Arc<Image>) -> Result<u64> {
    let settings = own_settings(&image);
    let count = settings.len();
    let (instances, managed) = (Mutex::default(), Mutex::default());
    let body = Arc::new(LibraryBody { image, settings, instances, managed });
    // Kernels refer to their library and the library to its kernels, so both are created before either is visible.
    let mut kernels = Vec::new();
    let (handle, _) = LIBRARIES.insert_with(|library| {
        for index in 0..count {
            let kernel = Kernel { library, body: Arc::clone(&body), index };
            kernels.push(KERNELS.insert_with(|_| kernel).map(|(handle, _)| handle));
        }
        Library {
            body: Ok(Arc::clone(&body)),
            kernels: kernels.iter().filter_map(|kernel| kernel.ok()).collect(),
        }
    })?;
    let eager = || match current_core() {
        Ok(core) if Environment::get().loading == LoadingMode::Eager => {
            LIBRARIES.get(handle)?.body()?.module(&core).map(drop)
        }
        _ => Ok(()),
    };
    let loaded = if kernels.iter().any(Result::is_err) { Err(Error::OUT_OF_MEMORY) } else { eager() };
    if let Err(error) = loaded {
        unload_library(handle)?;
        return Err(error);
    }
    Ok(handle)
}

/// Makes a library of an image that is of no known kind: NVIDIA's driver reads the image when the library is used. `error` is the
/// answer of every use.
pub(crate) fn load_unread(error: Error) -> Result<u64> {
    if Environment::get().loading == LoadingMode::Eager && current_core().is_ok() {
        return Err(error);
    }
    Ok(LIBRARIES.insert_with(|_| Library { body: Err(error), kernels: Vec::new() })?.0)
}

/// `cuLibraryUnload`. Returns the modules that ended.
pub(crate) fn unload_library(handle: u64) -> Result<Vec<u64>> {
    let library = LIBRARIES.remove(handle)?;
    for kernel in &library.kernels {
        // Only this code removes kernels.
        let _ = KERNELS.remove(*kernel);
    }
    let Ok(body) = library.body() else { return Ok(Vec::new()) };
    let instances: Vec<_> = lock(&body.instances).drain().collect();
    let mut ended = Vec::new();
    for (_, (module, _)) in instances {
        end(module)?;
        ended.push(module);
    }
    if let Some(SharedVariables { gpu, addresses }) = lock(&body.managed).take() {
        gpu::drain_all()?;
        release_blocks(gpu, addresses.into_values(), &[BlockKind::Variable]);
    }
    Ok(ended)
}

/// `cuLibraryGetKernel`.
pub(crate) fn library_kernel(handle: u64, name: &[u8]) -> Result<u64> {
    let library = LIBRARIES.get(handle)?;
    let index = library.body()?.image.kernel(name)?;
    library.kernels.get(index).copied().ok_or(Error::NOT_FOUND)
}

/// `cuLibraryEnumerateKernels`.
pub(crate) fn library_kernels(handle: u64) -> Result<Vec<u64>> {
    let library = LIBRARIES.get(handle)?;
    library.body()?;
    Ok(library.kernels.clone())
}

impl LibraryBody {
    /// The managed variables, which all contexts share and which need none. A GPU takes memory for them the first time.
    fn managed(&self, gpu: &'static VisibleGpu) -> Result<HashMap<usize, u64>> {
        let mut managed = lock(&self.managed);
        if let Some(shared) = &*managed {
            return Ok(shared.addresses.clone());
        }
        let addresses = place_managed(&self.image, gpu, Maker::default())?;
        *managed = Some(SharedVariables { gpu, addresses: addresses.clone() });
        Ok(addresses)
    }

    /// Returns the library as a module of a context.
    fn module(self: &Arc<Self>, core: &Arc<Core>) -> Result<(u64, Arc<Module>)> {
        let mut instances = lock(&self.instances);
        if let Some((handle, module)) = instances.get(&core.id) {
            return Ok((*handle, Arc::clone(module)));
        }
        let made = instantiate(&self.image, core, self.settings.clone(), Some(Arc::clone(self)))?;
        instances.insert(core.id, made.clone());
        Ok(made)
    }
}

/// `cuLibraryGetModule` in the current context.
pub(crate) fn library_module(handle: u64) -> Result<u64> {
    let library = LIBRARIES.get(handle)?;
    Ok(library.body()?.module(&current_core()?)?.0)
}

/// `cuLibraryGetGlobal` in the current context.
pub(crate) fn library_global(handle: u64, name: &[u8]) -> Result<(u64, u64)> {
    let library = LIBRARIES.get(handle)?;
    // An unknown name must not allocate memory.
    let body = library.body()?;
    body.image.global(name)?;
    let (_, module) = body.module(&current_core()?)?;
    module_global(&module, name)
}

/// `cuLibraryGetManaged`, which needs no context.
pub(crate) fn library_managed(handle: u64, name: &[u8]) -> Result<(u64, u64)> {
    let library = LIBRARIES.get(handle)?;
    let body = library.body()?;
    let index = body.image.global(name)?;
    let global = &body.image.parsed.globals()[index];
    if !global.managed {
        return Err(Error::NOT_FOUND);
    }
    let gpu = current_core().map_or_else(|_| gpu::at(0), |core| Ok(core.gpu))?;
    let address = body.managed(gpu)?.get(&index).copied().ok_or(Error::NOT_FOUND)?;
    Ok((address, global.size))
}

/// Returns a kernel of a library.
pub(crate) fn kernel(handle: u64) -> Result<Arc<Kernel>> {
    KERNELS.get(handle)
}

impl Kernel {
    pub(crate) fn parsed(&self) -> &softgpu_engine::Module {
        &self.body.image.parsed
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.body.image.parsed.kernels()[self.index]
    }

    pub(crate) fn settings(&self) -> &FunctionSettings {
        &self.body.settings[self.index]
    }

    pub(crate) fn name(&self) -> Result<&'static CStr> {
        self.body.image.name(self.index)
    }

    /// `cuKernelGetFunction` in the current context.
    pub(crate) fn function(&self) -> Result<u64> {
        self.body.image.runnable(self.index)?;
        let (handle, module) = self.body.module(&current_core()?)?;
        function_of(&module, handle, self.index)
    }
}

/// Returns a function by its handle.
pub(crate) fn function_at(handle: u64) -> Result<Arc<Function>> {
    FUNCTIONS.get(handle)
}

impl Function {
    pub(crate) fn name(&self) -> Result<&'static CStr> {
        self.module.image.name(self.index)
    }
}

/// Resolves a function argument: a function, or a kernel in the given context.
pub(crate) fn callable(handle: u64, core: &Arc<Core>) -> Result<Callable> {
    if kind_of(handle) == Kind::Kernel as u64 {
        let kernel = KERNELS.get(handle)?;
        kernel.body.image.runnable(kernel.index)?;
        let (_, module) = kernel.body.module(core)?;
        return Ok(Callable { module, index: kernel.index });
    }
    let function = FUNCTIONS.get(handle)?;
    if function.module.core.id != core.id {
        return Err(Error::INVALID_HANDLE);
    }
    function.module.image.runnable(function.index)?;
    Ok(Callable { module: Arc::clone(&function.module), index: function.index })
}

/// Like [`callable`], for queries: a function of any context, or a kernel in the current context.
pub(crate) fn described(handle: u64) -> Result<Callable> {
    if kind_of(handle) == Kind::Kernel as u64 {
        return callable(handle, &current_core()?);
    }
    let function = FUNCTIONS.get(handle)?;
    Ok(Callable { module: Arc::clone(&function.module), index: function.index })
}

/// Writes the results of a load to the places of its options and returns the image.
pub(crate) fn finish(
    options: &JitOptions,
    outcome: std::result::Result<Arc<Image>, LoadRefusal>,
) -> Result<Arc<Image>> {
    let time = options.start.elapsed();
    match outcome {
        Ok(image) => {
            let info = if options.verbose { image.describe() } else { String::new() };
            options.write(time, &info, "")?;
            Ok(image)
        }
        Err(refusal) => {
            log!("image refused: {}", refusal.text);
            options.write(time, "", &refusal.text)?;
            Err(refusal.error)
        }
    }
}

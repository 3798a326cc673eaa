//! The module helper: images, functions and queries about them.
//!
//! A thread of its own, to which the dispatcher hands jobs. It owns the state of images and of the heaps of contexts
//! ([`heaps`]); it never touches the guest's memory and never submits a kernel of the guest.

pub(crate) mod heaps;

use self::heaps::Heaps;
use crate::{
    helper::{
        Helper, Tools,
        jobs::{MemoryJob, ModuleJob, Question},
        notice::{Notice, Notices},
        respond,
    },
    memory::{address::HeldRange, custody, provision::Provision},
    session::{
        Session,
        objects::{self, Function, Image, Module},
    },
    submit::{completion::Current, lanes::ContextRef},
};
use sluice_cuda_abi::image;
use sluice_driver::{Code, Driver, Handle, Linked, code};
use sluice_messages::custody::{Growth, UNIT};
use sluice_protocol::{
    calls::{FunctionAttributes, Parameters, wire},
    limits,
};
use sluice_runtime::limited;
use std::{
    collections::BTreeMap,
    ffi::CString,
    sync::{Arc, mpsc::Receiver},
};

/// The thread's state.
pub(crate) struct ModuleHelper {
    driver: Arc<Driver>,
    session: Arc<Session>,
    notices: Arc<Notices>,
    helper: Helper,
    provision: Provision,
    heaps: Arc<Heaps>,
    current: Current,
    libraries: BTreeMap<Handle, Library>,
    /// Devices of modules, and bytes that they take there.
    modules: BTreeMap<Handle, (i32, u64)>,
}

/// What the driver takes of a device's memory with an image.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    /// Bytes of code and variables.
    bytes: u64,
    /// Whether its kernels may call `malloc`: then their context gets a heap with it, if it has none.
    allocates: bool,
}

/// How much memory a library takes in a context, and in which it has it, the latest last.
#[derive(Debug)]
struct Library {
    footprint: Footprint,
    contexts: Vec<(ContextRef, i32)>,
}

impl ModuleHelper {
    pub(crate) fn new(tools: Tools) -> ModuleHelper {
        let Tools { driver, session, notices, helper, provision, heaps } = tools;
        let (current, libraries, modules) = (Current::default(), BTreeMap::new(), BTreeMap::new());
        ModuleHelper { driver, session, notices, helper, provision, heaps, current, libraries, modules }
    }

    pub(crate) fn run(mut self, inbox: &Receiver<ModuleJob>) {
        while let Ok(job) = inbox.recv() {
            let ready = match job.context {
                Some((context, _)) => self.current.set(&self.driver, context),
                None => Ok(()),
            };
            match ready {
                Ok(()) => self.answer(job),
                Err(failed) => self.fail(job, failed),
            }
        }
    }

    /// A job that cannot even begin.
    fn fail(&self, job: ModuleJob, failed: Code) {
        match job.question {
            Question::Load { id, .. } => self.notices.push(Notice::Module { id, module: None }),
            Question::Function { module, id, .. } => {
                self.notices.push(Notice::Function { id, module, function: None });
            }
            _ => {}
        }
        self.session.answer(job.to, failed, &[]);
    }

    fn answer(&mut self, job: ModuleJob) {
        let device = job.context.map_or(0, |(_, device)| device);
        // Loading has needs of its own.
        let placed = match &job.question {
            Question::Function { image: Image::Library(library), .. }
            | Question::Global { image: Image::Library(library), .. } => self.place(*library, job.context),
            _ => Ok(()),
        };
        if let Err(failed) = placed {
            return self.fail(job, failed);
        }
        let (to, session, driver) = (job.to, &*self.session, &*self.driver);
        match job.question {
            Question::Load { id, library, image, log } => {
                let (loaded, log_length) = self.load(library, job.context, &image, &log);
                match loaded {
                    Ok((Image::Library(library), footprint)) => {
                        self.libraries.insert(library, Library { footprint, contexts: Vec::new() });
                    }
                    Ok((Image::Module(module), footprint)) => {
                        self.modules.insert(module, (device, footprint.bytes));
                    }
                    Err(_) => {}
                }
                let loaded = loaded.map(|(image, _)| image);
                // The arenas are let go before the guest may have them back.
                drop((image, log));
                let context = if library { None } else { job.context.map(|(context, _)| context) };
                let module = loaded.ok().map(|image| Module { image, context, functions: Vec::new() });
                self.notices.push(Notice::Module { id, module });
                // The length is answered also when loading failed: the log says why.
                session.answer(to, loaded.err().unwrap_or(0), &log_length.to_le_bytes());
            }
            Question::Unload { image } => {
                let unloaded = match image {
                    Image::Module(module) => driver.module_unload(module),
                    Image::Library(library) => driver.library_unload(library),
                };
                let gone = unloaded.is_ok();
                respond(session, to, unloaded, |(), writer| wire::module_unload::Reply {}.put(writer));
                self.gave_back(image, gone);
            }
            Question::Function { module, image, id, name } => {
                let found = self.function(image, &name, device);
                let context = job.context.map(|(context, _)| context);
                let function = found.as_ref().ok().map(|(code, reply)| Function {
                    code: *code,
                    parameters: usize::try_from(reply.attributes.0[16]).unwrap_or(0),
                    local: u32::try_from(reply.attributes.0[LOCAL_BYTES]).unwrap_or(0),
                    context: if matches!(image, Image::Module(_)) { context } else { None },
                });
                self.notices.push(Notice::Function { id, module, function });
                respond(session, to, found, |(_, reply), writer| reply.put(writer));
            }
            Question::Global { module, image, name } => {
                let found = match image {
                    Image::Module(module) => driver.module_global(module, &name),
                    Image::Library(library) => driver.library_global(library, &name),
                };
                let found = found.and_then(|variable| {
                    let context = job.context.map(|(context, _)| context).ok_or(code::INVALID_CONTEXT)?;
                    check_variable(driver, context, variable).map(|()| variable)
                });
                if let Ok((address, bytes)) = found {
                    self.notices.push(Notice::Global { module, address, bytes });
                }
                respond(session, to, found, |(address, bytes), writer| {
                    wire::module_global::Reply { address: *address, bytes: *bytes }.put(writer)
                });
            }
            Question::FunctionCount { image } => {
                respond(session, to, self.count(image), |count, writer| {
                    wire::module_function_count::Reply { count: *count }.put(writer)
                });
            }
            Question::FunctionName { image, index, into } => {
                let name = self.name(image, index).and_then(|name| {
                    let bytes = name.as_bytes_with_nul();
                    let fits = bytes.len() as u64 <= into.bytes();
                    if fits {
                        into.write(bytes)
                    };
                    if fits { Ok(name.as_bytes().len() as u64) } else { Err(code::INVALID_VALUE) }
                });
                drop(into);
                respond(session, to, name, |length, writer| {
                    wire::module_function_name::Reply { length: *length }.put(writer)
                });
            }
            Question::SetAttribute { code: target, attribute, value } => {
                let set = match target {
                    objects::Code::Function(function) => {
                        driver.set_function_attribute(attribute, value, function)
                    }
                    objects::Code::Kernel(kernel) => {
                        driver.set_kernel_attribute(attribute, value, kernel, device)
                    }
                };
                let described = set.and_then(|()| self.describe(target, device));
                respond(session, to, described, |(attributes, _), writer| {
                    wire::function_set_attribute::Reply { attributes: *attributes }.put(writer)
                });
            }
            Question::Blocks { function, block, shared, flags } => {
                let blocks = driver.occupancy_blocks(function, block, shared, flags);
                respond(session, to, blocks, |blocks, writer| {
                    wire::occupancy_blocks::Reply { blocks: *blocks }.put(writer)
                });
            }
            Question::BlockSize { function, shared, limit, flags } => {
                let sizes = driver.occupancy_block_size(function, shared, limit, flags);
                respond(session, to, sizes, |(grid, block), writer| {
                    wire::occupancy_block_size::Reply { grid: *grid, block: *block }.put(writer)
                });
            }
            Question::Shared { function, blocks, block } => {
                let bytes = driver.occupancy_shared(function, blocks, block);
                respond(session, to, bytes, |bytes, writer| {
                    wire::occupancy_shared::Reply { bytes: *bytes }.put(writer)
                });
            }
            Question::Clusters { potential, launch, attributes } => {
                let value = driver.occupancy_clusters(potential, &launch, &attributes);
                respond(session, to, value, |value, writer| {
                    wire::occupancy_clusters::Reply { value: *value }.put(writer)
                });
            }
            Question::ContextDestroy { context, allocations } => {
                let left = self.current.leave(driver, context.context);
                if let Err(failed) = left {
                    limited!(warn, code = failed, "the module helper cannot leave a context that ends");
                }
                self.helper.announced_memory(MemoryJob::ContextDestroy { to, context, allocations });
            }
            Question::Detach { arena } => self.helper.memory(MemoryJob::Detach { arena }),
        }
    }

    /// Copies the image out of the arena, once, checks that it is whole, and loads it. Returns the log's length, too.
    fn load(
        &self,
        library: bool,
        context: Option<(ContextRef, i32)>,
        from: &HeldRange,
        log: &HeldRange,
    ) -> (Result<(Image, Footprint), Code>, u64) {
        let image = match private_copy(from) {
            Ok(image) => image,
            Err(failed) => return (Err(failed), 0),
        };
        let [prints, asserts, allocates] =
            image::may_mention(&image, [b"vprintf", b"__assertfail", b"malloc"]);
        if prints || asserts {
            self.expect_text();
        }
        let footprint =
            |image: &[u8]| Footprint { bytes: custody::in_blocks(image::device_bytes(image)), allocates };
        if library {
            // It takes the device's memory where it is used first, which is when leave for that is asked for.
            let nothing = Footprint { bytes: 0, allocates: false };
            let loaded = self.growing(context, nothing, || self.driver.library_load(&image));
            return (loaded.map(|library| (Image::Library(library), footprint(&image))), 0);
        }
        // Both halves of the driver's log are as long as the guest's; what the guest gets is one of them.
        let length = usize::try_from(log.bytes()).unwrap_or(0);
        let mut text = vec![0; 2 * length];
        let mut used = 0;
        let mut load = |image: &[u8]| {
            let footprint = footprint(image);
            let loaded = self.growing(context, footprint, || {
                let (loaded, now_used) = self.driver.module_load(image, &mut text);
                used = now_used.min(length);
                loaded
            });
            loaded.map(|module| (Image::Module(module), footprint))
        };
        let device = context.map_or(0, |(_, device)| device);
        let loaded = match self.compile(&image, device).map(|cubin| load(cubin.image())) {
            Some(done @ Ok(_)) => done,
            Some(Err(failed)) if lacks_memory(failed) => Err(failed),
            // The driver's answer to the image itself is the one that the guest expects, and so is its log.
            Some(Err(_)) | None => load(&image),
        };
        log.write(text.get(..used).unwrap_or_default());
        (loaded, used as u64)
    }

    /// Compiles an image that is PTX: before leave to grow is asked for, because it may take long and needs none of the device's
    /// memory. `None` where the image holds machine code or the driver cannot compile it apart.
    fn compile(&self, image: &[u8], device: i32) -> Option<Linked<'_>> {
        let attribute =
            |id| self.driver.device_attribute(id, device).ok().and_then(|value| u32::try_from(value).ok());
        let sm = attribute(CAPABILITY_MAJOR)?.checked_mul(10)?.checked_add(attribute(CAPABILITY_MINOR)?)?;
        self.driver.link(&image::to_compile(image, sm)?).ok()
    }

    /// Has the driver make a library's code and variables in a context, with leave, before anything does so by the way.
    fn place(&mut self, library: Handle, context: Option<(ContextRef, i32)>) -> Result<(), Code> {
        let (Some(known), Some((current, device))) = (self.libraries.get(&library), context) else {
            return Ok(());
        };
        if known.contexts.iter().any(|(known, _)| *known == current) {
            return Ok(());
        }
        self.growing(context, known.footprint, || self.driver.library_module(library))?;
        if let Some(known) = self.libraries.get_mut(&library) {
            // Contexts that ended are not told of here.
            if known.contexts.len() >= limits::CONTEXTS as usize {
                known.contexts.remove(0);
            }
            known.contexts.push((current, device));
        }
        Ok(())
    }

    /// An image is gone, and so is what the driver took for it.
    fn gave_back(&mut self, image: Image, unloaded: bool) {
        let taken = match image {
            Image::Module(module) => self.modules.remove(&module).into_iter().collect(),
            Image::Library(library) => self.libraries.remove(&library).map_or_else(Vec::new, |known| {
                known.contexts.iter().map(|(_, device)| (*device, known.footprint.bytes)).collect()
            }),
        };
        for (device, bytes) in taken.into_iter().filter(|_| unloaded) {
            self.provision.shrunk(device, Growth::Module, bytes);
        }
    }

    /// Does what makes the driver take memory for an image, with leave for as much as the image says, and for the heap that the
    /// driver takes with the first image of a context that calls `malloc`.
    fn growing<R>(
        &self,
        context: Option<(ContextRef, i32)>,
        footprint: Footprint,
        work: impl FnMut() -> Result<R, Code>,
    ) -> Result<R, Code> {
        let (context, device) = context.unzip();
        let device = device.unwrap_or(0);
        let without_heap = context.filter(|context| footprint.allocates && !self.heaps.has(*context));
        let Some(context) = without_heap else {
            return self.granted(device, footprint.bytes, code::OUT_OF_MEMORY, work);
        };
        let heap = custody::in_blocks(self.driver.limit(heaps::LIMIT)?);
        let bytes = footprint.bytes.saturating_add(heap);
        // As a driver answers that has no memory for the heap.
        let done = self.granted(device, bytes, code::SHARED_OBJECT_INIT_FAILED, work);
        done.inspect(|_| self.heaps.taken(context))
    }

    /// Does something with leave for so many bytes, or answers `refused`. If they were too few, for what an image says is not all a
    /// driver needs, asks for more until there is none.
    fn granted<R>(
        &self,
        device: i32,
        mut bytes: u64,
        refused: Code,
        mut work: impl FnMut() -> Result<R, Code>,
    ) -> Result<R, Code> {
        let mut grant =
            self.provision.grow(device, Growth::Module, bytes).map_err(|failed| match failed {
                code::OUT_OF_MEMORY => refused,
                other => other,
            })?;
        for _ in 1..GROWTH_ROUNDS {
            let result = work();
            drop(grant);
            if !result.as_ref().is_err_and(|failed| lacks_memory(*failed)) {
                return result;
            }
            bytes = bytes.max(UNIT).saturating_mul(2);
            grant = match self.provision.ask_growth(device, Growth::Module, bytes) {
                Err(code::OUT_OF_MEMORY) => return result,
                asked => asked?,
            };
        }
        work()
    }

    /// Sees to it that what kernels print reaches the guest.
    fn expect_text(&self) {
        if self.session.console().is_open() {
            return;
        }
        match self.session.console().open() {
            Ok(true) => {
                let session = Arc::clone(&self.session);
                let watch = move || loop {
                    match session.console().watch() {
                        Ok(some) => session.offer_text(some),
                        Err(error) => {
                            tracing::warn!(%error, "what kernels print is no longer read");
                            return;
                        }
                    }
                };
                if let Err(error) = std::thread::Builder::new().name("console".to_owned()).spawn(watch) {
                    limited!(warn, %error, "what kernels print reaches the guest late");
                }
            }
            Ok(false) => {}
            Err(error) => limited!(warn, %error, "what kernels print is lost"),
        }
    }

    fn function(
        &self,
        image: Image,
        name: &CString,
        device: i32,
    ) -> Result<(objects::Code, wire::module_function::Reply), Code> {
        let target = match image {
            Image::Module(module) => objects::Code::Function(self.driver.module_function(module, name)?),
            Image::Library(library) => objects::Code::Kernel(self.driver.library_kernel(library, name)?),
        };
        let (attributes, parameters) = self.describe(target, device)?;
        Ok((target, wire::module_function::Reply { attributes, parameters }))
    }

    /// Everything the guest keeps about a function.
    fn describe(&self, target: objects::Code, device: i32) -> Result<(FunctionAttributes, Parameters), Code> {
        let driver = &*self.driver;
        let mut attributes = [0; 17];
        for (attribute, value) in (0..).zip(&mut attributes[..16]) {
            let answer = match target {
                objects::Code::Function(function) => driver.function_attribute(attribute, function),
                objects::Code::Kernel(kernel) => driver.kernel_attribute(attribute, kernel, device),
            };
            // An attribute that this driver does not know is 0, as for a driver that knows it and has no such thing.
            *value = match answer {
                Ok(value) => value,
                Err(code::INVALID_VALUE) => 0,
                Err(failed) => return Err(failed),
            };
        }
        let mut parameters = Parameters::NONE;
        let mut total = 0;
        for index in 0.. {
            let answer = match target {
                objects::Code::Function(function) => driver.function_parameter(function, index),
                objects::Code::Kernel(kernel) => driver.kernel_parameter(kernel, index),
            };
            match answer {
                Ok((offset, bytes)) => {
                    parameters.push(offset, bytes).map_err(|_| code::NOT_SUPPORTED)?;
                    total = total.max(offset.saturating_add(bytes));
                }
                Err(code::INVALID_VALUE) => break,
                Err(failed) => return Err(failed),
            }
        }
        attributes[16] = i32::try_from(total).map_err(|_| code::NOT_SUPPORTED)?;
        Ok((FunctionAttributes(attributes), parameters))
    }

    fn count(&self, image: Image) -> Result<u32, Code> {
        match image {
            Image::Module(module) => self.driver.module_function_count(module),
            Image::Library(library) => self.driver.library_kernel_count(library),
        }
    }

    fn name(&self, image: Image, index: u32) -> Result<CString, Code> {
        let count = self.count(image)?.min(limits::FUNCTIONS);
        let mut handles = vec![0; count as usize];
        match image {
            Image::Module(module) => self.driver.module_functions(module, &mut handles)?,
            Image::Library(library) => self.driver.library_kernels(library, &mut handles)?,
        }
        let handle = *handles.get(index as usize).ok_or(code::INVALID_VALUE)?;
        match image {
            Image::Module(_) => self.driver.function_name(handle),
            Image::Library(_) => self.driver.kernel_name(handle),
        }
    }
}

/// Whether the driver says that a variable is device memory of a context. Its address and size come out of the image, so a guest
/// chooses them, and with unified addressing they could name memory of this process.
fn check_variable(driver: &Driver, context: ContextRef, (address, bytes): (u64, u64)) -> Result<(), Code> {
    let pointer = driver.pointer(address)?;
    if pointer.managed {
        return Err(code::NOT_SUPPORTED);
    }
    let end = address.checked_add(bytes);
    let last = pointer.start.checked_add(pointer.bytes);
    let around = pointer.start <= address && end.zip(last).is_some_and(|(end, last)| end <= last);
    if pointer.on_device && pointer.context == context.handle && around {
        return Ok(());
    }
    limited!(
        warn,
        address,
        bytes,
        "the driver says that a variable of an image is no device memory of its context"
    );
    Err(code::INVALID_IMAGE)
}

/// Whether a load failed for want of memory: of its own, or for the heap that came with it.
const fn lacks_memory(failed: Code) -> bool {
    matches!(failed, code::OUT_OF_MEMORY | code::SHARED_OBJECT_INIT_FAILED)
}

/// How often leave is asked for until an image fits, each time for twice as much.
const GROWTH_ROUNDS: usize = 8;

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const LOCAL_BYTES: usize = 3;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
const CAPABILITY_MAJOR: u32 = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
const CAPABILITY_MINOR: u32 = 76;

/// The first word of the compiler's wrapper around fatbins.
const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();

/// A private copy of an image that is whole: the driver reads as far as the image says, so what it says is compared with
/// what is there. A zero word follows the copy, in case the text of a PTX image is not terminated.
fn private_copy(from: &HeldRange) -> Result<Vec<u8>, Code> {
    const PADDING: usize = 8;
    let bytes = usize::try_from(from.bytes()).map_err(|_| code::INVALID_VALUE)?;
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes + PADDING).map_err(|_| code::OUT_OF_MEMORY)?;
    copy.resize(bytes + PADDING, 0);
    from.read(&mut copy[..bytes]);
    // The compiler's wrapper holds pointers, which the driver would follow into this process.
    if copy.starts_with(&WRAPPER_MAGIC) {
        return Err(code::INVALID_IMAGE);
    }
    let mut read = |offset: u64, into: &mut [u8]| {
        let part = usize::try_from(offset).ok().and_then(|offset| copy.get(offset..)?.get(..into.len()));
        part.map(|part| into.copy_from_slice(part)).is_some()
    };
    match image::size_of(&mut read, copy.len() as u64) {
        Ok(extent) if extent.bytes <= copy.len() as u64 => Ok(copy),
        Ok(_) => Err(code::INVALID_IMAGE),
        Err(error) => Err(error.status() as Code),
    }
}

//! The module helper, in one file for the state of images: images, functions, queries about them, links, executable graphs, green contexts,
//! and arrays with their textures.
//!
//! One thread, to which the dispatcher passes jobs. It owns the state of images; it never touches the guest's memory and never
//! submits a kernel of the guest.

mod arrays;
mod graphs;
mod green;
mod images;
mod links;

use crate::{
    arenas::HeldRange,
    current::Current,
    graphs::executables::{ConditionalGraphs, Executables},
    helper::{
        Helper,
        jobs::{MemoryJob, ModuleCaller, ModuleJob, ModuleThread, ServeModules, module},
        notice::{Notice, Notices},
    },
    memory::{
        custody,
        heaps::{self, Heaps},
        memory_source::{MemorySource, taken},
        tools::Tools,
    },
    session::{
        Session,
        objects::{self, ContextRef, GuestFunction, GuestImage, GuestModule},
    },
    submit::completion::Completion,
};
use arrays::SessionImages;
use green::GreenContexts;
use images::{Report, private_copy};
use links::Links;
use sluice_cuda_abi::{image, jit};
use sluice_driver::{Code, CompilerOptions, Driver, DriverLink, Handle, LaunchArguments, code};
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
    memory_source: MemorySource,
    heaps: Arc<Heaps>,
    completion: Arc<Completion>,
    current: Current,
    libraries: BTreeMap<Handle, LoadedLibrary>,
    modules: BTreeMap<Handle, LoadedImage>,
    graphs: Executables,
    conditional: ConditionalGraphs,
    links: Links,
    greens: GreenContexts,
    images: SessionImages,
}

/// Device memory that the driver takes with an image.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    /// Bytes of code and variables.
    bytes: u64,
    /// True if its kernels may call `malloc`: then the driver allocates a heap in a context that has none.
    allocates: bool,
}

/// Device memory that the driver took for an image.
#[derive(Clone, Copy, Debug)]
struct LoadedImage {
    /// `None` for what a library takes outside contexts.
    context: Option<ContextRef>,
    device: i32,
    /// The bytes that were granted for it.
    bytes: u64,
}

/// The arguments of a load.
struct LoadArguments<'a> {
    image: &'a HeldRange,
    /// Options of the compiler.
    numbers: &'a [(u32, u32)],
    /// Bytes of the compiler's logs.
    info: u64,
    error: u64,
    report: &'a Report,
}

impl LoadArguments<'_> {
    fn options(&self) -> Result<CompilerOptions, Code> {
        CompilerOptions::new(self.numbers, self.info, self.error)
    }
}

/// The memory that a library takes in a context, and the memory that it has taken.
#[derive(Debug)]
struct LoadedLibrary {
    footprint: Footprint,
    loaded: LoadedImage,
    contexts: Vec<LoadedImage>,
}

impl ModuleHelper {
    pub(crate) fn new(tools: Tools, completion: Arc<Completion>) -> ModuleHelper {
        let Tools { driver, session, notices, helper, memory_source, heaps } = tools;
        ModuleHelper {
            driver,
            session,
            notices,
            helper,
            memory_source,
            heaps,
            completion,
            current: Current::default(),
            libraries: BTreeMap::new(),
            modules: BTreeMap::new(),
            links: Links::default(),
            greens: GreenContexts::default(),
            graphs: Executables::default(),
            conditional: ConditionalGraphs::default(),
            images: SessionImages::default(),
        }
    }

    pub(crate) fn run(mut self, inbox: &Receiver<Box<ModuleJob>>) {
        let session = Arc::clone(&self.session);
        while let Ok(job) = inbox.recv() {
            match *job {
                ModuleJob::Call { to, caller, call } => {
                    let ready = caller.map_or(Ok(()), |(context, _)| self.current.set(&self.driver, context));
                    match ready {
                        Ok(()) => self.serve(&session, to, caller, call),
                        Err(failed) => {
                            // Ids and arenas that the call holds become free before it is answered.
                            drop(call);
                            session.answer(to, failed, &[]);
                        }
                    }
                }
                ModuleJob::Graph(job) => self.graph(*job),
                ModuleJob::ContextDestroy { to, context, allocations } => {
                    self.end_graphs_of(context.context);
                    self.end_greens_of(context.context);
                    if let Err(failed) = self.current.leave(&self.driver, context.context) {
                        limited!(
                            warn,
                            code = failed,
                            "the module helper cannot leave a context that is being destroyed"
                        );
                    }
                    self.forget(context.context);
                    let job = MemoryJob::ContextDestroy { to, context, allocations };
                    self.helper.announced_memory(job, || {});
                }
                ModuleJob::Detach { arena } => self.helper.memory(MemoryJob::Detach { arena }),
            }
        }
    }

    /// Copies the image out of the arena, once, checks that it is complete, and loads it.
    fn load(
        &self,
        library: bool,
        context: ModuleCaller,
        args: &LoadArguments<'_>,
    ) -> Result<(GuestImage, Footprint, LoadedImage), Code> {
        let image = private_copy(args.image)?;
        let [prints, asserts, allocates] =
            image::may_mention(&image, [b"vprintf", b"__assertfail", b"malloc"]);
        if prints || asserts {
            self.expect_text();
        }
        let footprint =
            |image: &[u8]| Footprint { bytes: custody::in_blocks(image::device_bytes(image)), allocates };
        if library {
            // The library takes the device's memory at its first use in a context, which is when the grant is requested.
            let nothing = Footprint { bytes: 0, allocates: false };
            let mut options = args.options()?;
            let loaded =
                self.growing(context, None, nothing, || self.driver.library_load(&image, &mut options));
            args.report.write(&options.report());
            let (library, loaded) = loaded?;
            return Ok((GuestImage::Library(library), footprint(&image), loaded));
        }
        let owner = context.map(|(context, _)| context);
        let load = |image: &[u8], options: &mut CompilerOptions| {
            let footprint = footprint(image);
            let loaded = self.growing(context, owner, footprint, || self.driver.module_load(image, options));
            loaded.map(|(module, loaded)| (GuestImage::Module(module), footprint, loaded))
        };
        let device = context.map_or(0, |(_, device)| device);
        if let Some(link) = self.compile(&image, device, args)? {
            match load(link.image(), &mut CompilerOptions::default()) {
                Err(failed) if !lacks_memory(failed) => {}
                done => {
                    args.report.write(&link.report());
                    return done;
                }
            }
        }
        // The guest expects the driver's result for the image itself, and its log.
        let mut options = args.options()?;
        let loaded = load(&image, &mut options);
        args.report.write(&options.report());
        loaded
    }

    /// Compiles an image that is PTX, before the grant is requested: compilation may take long and needs none of the device's
    /// memory. `None` if the image holds machine code or the driver cannot compile it separately.
    fn compile(
        &self,
        image: &[u8],
        device: i32,
        args: &LoadArguments<'_>,
    ) -> Result<Option<DriverLink>, Code> {
        let attribute =
            |id| self.driver.device_attribute(id, device).ok().and_then(|value| u32::try_from(value).ok());
        let capability = attribute(CAPABILITY_MAJOR).zip(attribute(CAPABILITY_MINOR));
        let sm = capability.and_then(|(major, minor)| major.checked_mul(10)?.checked_add(minor));
        let Some(text) = sm.and_then(|sm| image::to_compile(image, sm)) else { return Ok(None) };
        // A link refuses a strategy for images without code for the device, which this one has.
        let numbers: Vec<(u32, u32)> =
            args.numbers.iter().copied().filter(|(option, _)| *option != jit::FALLBACK_STRATEGY).collect();
        let options = CompilerOptions::new(&numbers, args.info, args.error)?;
        let (created, mut link) = DriverLink::create(&self.driver, options);
        let compiled = created
            .and_then(|()| link.add(jit::input::PTX, &text, text.len(), c"", &mut CompilerOptions::default()))
            .and_then(|()| link.complete());
        Ok(compiled.is_ok().then_some(link))
    }

    /// Makes the driver place the code and variables of a library in a context, with a grant, before another call does so
    /// implicitly.
    fn place(&mut self, image: GuestImage, context: ModuleCaller) -> Result<(), Code> {
        let GuestImage::Library(library) = image else { return Ok(()) };
        let (Some(known), Some((current, _))) = (self.libraries.get(&library), context) else {
            return Ok(());
        };
        if known.contexts.iter().any(|known| known.context == Some(current)) {
            return Ok(());
        }
        let (_, placed) = self
            .growing(context, Some(current), known.footprint, || self.driver.cuLibraryGetModule(library))?;
        if let Some(known) = self.libraries.get_mut(&library) {
            known.contexts.push(placed);
        }
        Ok(())
    }

    /// Records that an image is gone, and the memory that the driver took for it.
    fn gave_back(&mut self, image: GuestImage, unloaded: bool) {
        let taken = match image {
            GuestImage::Module(module) => self.modules.remove(&module).into_iter().collect(),
            GuestImage::Library(library) => self
                .libraries
                .remove(&library)
                .map_or_else(Vec::new, |known| [vec![known.loaded], known.contexts].concat()),
        };
        for LoadedImage { context, device, bytes } in taken.into_iter().filter(|_| unloaded) {
            self.memory_source.driver_shrank(device, context, bytes);
        }
    }

    /// Forgets the images of a context that is being destroyed. Their memory is counted with the context.
    fn forget(&mut self, context: ContextRef) {
        self.modules.retain(|_, image| image.context != Some(context));
        self.images.forget(context);
        for library in self.libraries.values_mut() {
            library.contexts.retain(|image| image.context != Some(context));
        }
    }

    /// Runs a call that makes the driver take memory for an image, with a grant for the size that the image declares, and for
    /// the heap that the driver takes with the first image of a context that calls `malloc`. The image ends with `owner`, at the
    /// latest.
    fn growing<R>(
        &self,
        caller: ModuleCaller,
        owner: Option<ContextRef>,
        footprint: Footprint,
        work: impl FnMut() -> Result<R, Code>,
    ) -> Result<(R, LoadedImage), Code> {
        let (context, device) = caller.unzip();
        let device = device.unwrap_or(0);
        let without_heap = context.filter(|context| footprint.allocates && !self.heaps.has(*context));
        let image = |(result, bytes)| (result, LoadedImage { context: owner, device, bytes });
        let Some(context) = without_heap else {
            let reason = (Growth::Module, device);
            return self.granted(reason, owner, footprint.bytes, code::OUT_OF_MEMORY, work).map(image);
        };
        let heap = custody::in_blocks(self.driver.cuCtxGetLimit(heaps::LIMIT)? as u64);
        let bytes = footprint.bytes.saturating_add(heap);
        // The code of a driver without memory for the heap.
        let reason = (Growth::Module, device);
        let (result, bytes) = self.granted(reason, owner, bytes, code::SHARED_OBJECT_INIT_FAILED, work)?;
        self.heaps.taken(context);
        // The heap remains when the image is unloaded.
        Ok(image((result, bytes.saturating_sub(heap))))
    }

    /// Runs a call with a grant of `bytes` for a reason on a device, or returns `refused`. If they were too few (a driver may need more than an image
    /// declares), requests more until the arbiter has no more: twice as much each time, and once all that is free. Returns the bytes of the
    /// last grant, too.
    fn granted<R>(
        &self,
        (reason, device): (Growth, i32),
        owner: Option<ContextRef>,
        mut bytes: u64,
        refused: Code,
        mut work: impl FnMut() -> Result<R, Code>,
    ) -> Result<(R, u64), Code> {
        let granted = self.memory_source.grow(device, reason, bytes).or_else(|failed| match failed {
            // Memory that the guest freed before may still wait for the memory helper.
            code::OUT_OF_MEMORY => {
                self.helper.settle_memory();
                self.memory_source.ask_growth(device, reason, bytes)
            }
            other => Err(other),
        });
        let mut grant = granted.map_err(|failed| match failed {
            code::OUT_OF_MEMORY => refused,
            other => other,
        })?;
        for _ in 1..GROWTH_ROUNDS {
            match work() {
                Ok(result) => return Ok((result, taken(grant, owner))),
                Err(failed) if lacks_memory(failed) => {
                    drop(grant);
                    let ask = |bytes| self.memory_source.ask_growth(device, reason, bytes);
                    let (before, twice) = (bytes, bytes.max(UNIT).saturating_mul(2));
                    bytes = twice;
                    let asked = ask(twice).or_else(|refused| {
                        let free = self.free_for_growth(device);
                        if refused != code::OUT_OF_MEMORY || free <= before || free >= twice {
                            return Err(refused);
                        }
                        bytes = free;
                        ask(free)
                    });
                    grant = match asked {
                        Err(code::OUT_OF_MEMORY) => return Err(failed),
                        asked => asked?,
                    };
                }
                Err(failed) => return Err(failed),
            }
        }
        work().map(|result| (result, taken(grant, owner)))
    }

    /// The bytes of the largest grant that may be possible.
    fn free_for_growth(&self, device: i32) -> u64 {
        let stats = self.memory_source.stats();
        stats.settle(device);
        // A grant has some bytes more than were requested.
        stats.info(device).0.saturating_sub(custody::GROWTH_BYTES) / UNIT * UNIT
    }

    /// Opens the console, so that the guest receives the text that kernels print.
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
                            tracing::warn!(%error, "cannot read the output of kernels; later output is lost");
                            return;
                        }
                    }
                };
                if let Err(error) = std::thread::Builder::new().name("console".to_owned()).spawn(watch) {
                    limited!(warn, %error, "cannot start the console thread; the output of kernels reaches the guest late");
                }
            }
            Ok(false) => {}
            Err(error) => limited!(warn, %error, "cannot open the console; the output of kernels is lost"),
        }
    }

    fn function(
        &self,
        image: GuestImage,
        name: &CString,
        device: i32,
    ) -> Result<(objects::FunctionCode, wire::module_function::Reply), Code> {
        let target = match image {
            GuestImage::Module(module) => {
                objects::FunctionCode::Function(self.driver.module_function(module, name)?)
            }
            GuestImage::Library(library) => {
                objects::FunctionCode::Kernel(self.driver.library_kernel(library, name)?)
            }
        };
        let (attributes, parameters) = self.describe(target, device)?;
        Ok((target, wire::module_function::Reply { attributes, parameters }))
    }

    /// All facts that the guest keeps about a function.
    fn describe(
        &self,
        target: objects::FunctionCode,
        device: i32,
    ) -> Result<(FunctionAttributes, Parameters), Code> {
        let driver = &*self.driver;
        let mut attributes = [0; 17];
        for (attribute, value) in (0..).zip(&mut attributes[..16]) {
            let answer = match target {
                objects::FunctionCode::Function(function) => driver.cuFuncGetAttribute(attribute, function),
                objects::FunctionCode::Kernel(kernel) => {
                    driver.cuKernelGetAttribute(attribute, kernel, device)
                }
            };
            // An attribute unknown to this driver is 0, as with a driver that knows it for a function without it.
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
                objects::FunctionCode::Function(function) => driver.cuFuncGetParamInfo(function, index),
                objects::FunctionCode::Kernel(kernel) => driver.cuKernelGetParamInfo(kernel, index),
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

    fn count(&self, image: GuestImage) -> Result<u32, Code> {
        match image {
            GuestImage::Module(module) => self.driver.cuModuleGetFunctionCount(module),
            GuestImage::Library(library) => self.driver.cuLibraryGetKernelCount(library),
        }
    }

    fn name(&self, image: GuestImage, index: u32) -> Result<CString, Code> {
        let count = self.count(image)?.min(limits::FUNCTIONS);
        let mut handles = vec![0; count as usize];
        match image {
            GuestImage::Module(module) => self.driver.module_functions(module, &mut handles)?,
            GuestImage::Library(library) => self.driver.library_kernels(library, &mut handles)?,
        }
        let handle = *handles.get(index as usize).ok_or(code::INVALID_VALUE)?;
        match image {
            GuestImage::Module(_) => self.driver.function_name(handle),
            GuestImage::Library(_) => self.driver.kernel_name(handle),
        }
    }
}

fn device_of(caller: ModuleCaller) -> i32 {
    caller.map_or(0, |(_, device)| device)
}

impl ModuleThread for ModuleHelper {}

impl ServeModules for ModuleHelper {
    fn module_load(
        &mut self,
        caller: ModuleCaller,
        args: module::module_load,
    ) -> Result<wire::module_load::Reply, Code> {
        let module::module_load { module, library, image, options, info, error, report } = args;
        let report = Report::new(report, info, error)?;
        let context = match library {
            true => None,
            false => Some(caller.ok_or(code::INVALID_CONTEXT)?.0),
        };
        let (image, footprint, loaded) = self.load(
            library,
            caller,
            &LoadArguments { image: &image, numbers: &options, info, error, report: &report },
        )?;
        match image {
            GuestImage::Library(library) => {
                self.libraries.insert(library, LoadedLibrary { footprint, loaded, contexts: Vec::new() });
            }
            GuestImage::Module(module) => {
                self.modules.insert(module, loaded);
            }
        }
        module.fill(GuestModule { image, context, functions: Vec::new() });
        Ok(wire::module_load::Reply {})
    }

    fn module_unload(
        &mut self,
        _: ModuleCaller,
        args: module::module_unload,
    ) -> Result<wire::module_unload::Reply, Code> {
        let image = args.module.image;
        let unloaded = match image {
            GuestImage::Module(module) => self.driver.cuModuleUnload(module),
            GuestImage::Library(library) => self.driver.cuLibraryUnload(library),
        };
        self.gave_back(image, unloaded.is_ok());
        unloaded.map(|()| wire::module_unload::Reply {})
    }

    fn module_function(
        &mut self,
        caller: ModuleCaller,
        args: module::module_function,
    ) -> Result<wire::module_function::Reply, Code> {
        let image = args.module.image;
        self.place(image, caller)?;
        let (code, reply) = self.function(image, &args.name, device_of(caller))?;
        let function = GuestFunction {
            code,
            module: args.module.id,
            parameters: usize::try_from(reply.attributes.0[16]).unwrap_or(0),
            local: u32::try_from(reply.attributes.0[LOCAL_BYTES]).unwrap_or(0),
            context: args.module.context.and(caller.map(|(context, _)| context)),
        };
        args.function.fill((args.module.id, function));
        Ok(reply)
    }

    fn module_global(
        &mut self,
        caller: ModuleCaller,
        args: module::module_global,
    ) -> Result<wire::module_global::Reply, Code> {
        let image = args.module.image;
        self.place(image, caller)?;
        let (address, bytes) = match image {
            GuestImage::Module(module) => self.driver.module_global(module, &args.name)?,
            GuestImage::Library(library) => match self.driver.library_global(library, &args.name) {
                Err(code::NOT_FOUND) => self.driver.library_managed(library, &args.name)?,
                found => found?,
            },
        };
        let (context, _) = caller.ok_or(code::INVALID_CONTEXT)?;
        let managed = check_variable(&self.driver, context, (address, bytes))?;
        let is_shared = managed && matches!(image, GuestImage::Library(_));
        let context = (!is_shared).then_some(context);
        self.notices.push(Notice::Global { module: args.module.id, context, address, bytes });
        Ok(wire::module_global::Reply { address, bytes, managed })
    }

    fn module_function_count(
        &mut self,
        _: ModuleCaller,
        args: module::module_function_count,
    ) -> Result<wire::module_function_count::Reply, Code> {
        Ok(wire::module_function_count::Reply { count: self.count(args.module.image)? })
    }

    fn module_function_name(
        &mut self,
        _: ModuleCaller,
        args: module::module_function_name,
    ) -> Result<wire::module_function_name::Reply, Code> {
        let name = self.name(args.module.image, args.index)?;
        let bytes = name.as_bytes_with_nul();
        if bytes.len() as u64 > args.into.bytes() {
            return Err(code::INVALID_VALUE);
        }
        args.into.write(bytes);
        Ok(wire::module_function_name::Reply { length: name.as_bytes().len() as u64 })
    }

    fn function_set_attribute(
        &mut self,
        caller: ModuleCaller,
        args: module::function_set_attribute,
    ) -> Result<wire::function_set_attribute::Reply, Code> {
        let (target, device) = (args.function.code, device_of(caller));
        match target {
            objects::FunctionCode::Function(function) => {
                self.driver.cuFuncSetAttribute(function, args.attribute, args.value)?;
            }
            objects::FunctionCode::Kernel(kernel) => {
                self.driver.cuKernelSetAttribute(args.attribute, args.value, kernel, device)?;
            }
        }
        let (attributes, _) = self.describe(target, device)?;
        Ok(wire::function_set_attribute::Reply { attributes })
    }

    fn occupancy_blocks(
        &mut self,
        _: ModuleCaller,
        args: module::occupancy_blocks,
    ) -> Result<wire::occupancy_blocks::Reply, Code> {
        let function = args.function.code.handle();
        let blocks = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
            function,
            args.block,
            args.shared,
            args.flags,
        )?;
        Ok(wire::occupancy_blocks::Reply { blocks })
    }

    fn occupancy_block_size(
        &mut self,
        _: ModuleCaller,
        args: module::occupancy_block_size,
    ) -> Result<wire::occupancy_block_size::Reply, Code> {
        let function = args.function.code.handle();
        let (grid, block) =
            self.driver.occupancy_block_size(function, args.shared, args.limit, args.flags)?;
        Ok(wire::occupancy_block_size::Reply { grid, block })
    }

    fn occupancy_shared(
        &mut self,
        _: ModuleCaller,
        args: module::occupancy_shared,
    ) -> Result<wire::occupancy_shared::Reply, Code> {
        let function = args.function.code.handle();
        let bytes = self.driver.cuOccupancyAvailableDynamicSMemPerBlock(function, args.blocks, args.block)?;
        Ok(wire::occupancy_shared::Reply { bytes: bytes as u64 })
    }

    fn link_create(
        &mut self,
        caller: ModuleCaller,
        args: module::link_create,
    ) -> Result<wire::link_create::Reply, Code> {
        caller.ok_or(code::INVALID_CONTEXT)?;
        self.links.create(&self.driver, args)?;
        Ok(wire::link_create::Reply {})
    }

    fn link_add(&mut self, _: ModuleCaller, args: module::link_add) -> Result<wire::link_add::Reply, Code> {
        self.links.add(&args)?;
        Ok(wire::link_add::Reply {})
    }

    fn link_complete(
        &mut self,
        _: ModuleCaller,
        args: module::link_complete,
    ) -> Result<wire::link_complete::Reply, Code> {
        Ok(wire::link_complete::Reply { bytes: self.links.complete(args)? })
    }

    fn link_image(
        &mut self,
        _: ModuleCaller,
        args: module::link_image,
    ) -> Result<wire::link_image::Reply, Code> {
        self.links.copy(args.link, args.offset, &args.into)?;
        Ok(wire::link_image::Reply {})
    }

    fn link_destroy(
        &mut self,
        _: ModuleCaller,
        args: module::link_destroy,
    ) -> Result<wire::link_destroy::Reply, Code> {
        self.links.destroy(args.link)?;
        Ok(wire::link_destroy::Reply {})
    }

    fn conditional_graph_create(
        &mut self,
        _: ModuleCaller,
        args: module::conditional_graph_create,
    ) -> Result<wire::conditional_graph_create::Reply, Code> {
        args.graph.fill(self.conditional.create(&self.driver)?);
        Ok(wire::conditional_graph_create::Reply {})
    }

    fn conditional_handle_create(
        &mut self,
        caller: ModuleCaller,
        args: module::conditional_handle_create,
    ) -> Result<wire::conditional_handle_create::Reply, Code> {
        let (context, _) = caller.ok_or(code::INVALID_CONTEXT)?;
        let module::conditional_handle_create { graph, value, flags } = args;
        let handle = self.conditional.create_handle(&self.driver, graph, context, (value, flags))?;
        Ok(wire::conditional_handle_create::Reply { handle })
    }

    fn conditional_graph_destroy(
        &mut self,
        _: ModuleCaller,
        args: module::conditional_graph_destroy,
    ) -> Result<wire::conditional_graph_destroy::Reply, Code> {
        self.conditional.end(args.graph);
        Ok(wire::conditional_graph_destroy::Reply {})
    }

    fn occupancy_clusters(
        &mut self,
        _: ModuleCaller,
        args: module::occupancy_clusters,
    ) -> Result<wire::occupancy_clusters::Reply, Code> {
        let module::occupancy_clusters { potential, function, grid, block, shared, attributes } = args;
        let launch = LaunchArguments { function: function.code.handle(), grid, block, shared };
        Ok(wire::occupancy_clusters::Reply {
            value: self.driver.occupancy_clusters(potential, &launch, &attributes)?,
        })
    }

    fn resource_descriptor(
        &mut self,
        _: ModuleCaller,
        args: module::resource_descriptor,
    ) -> Result<wire::resource_descriptor::Reply, Code> {
        Ok(wire::resource_descriptor::Reply { descriptor: self.describe_resources(args)? })
    }

    fn green_create(
        &mut self,
        caller: ModuleCaller,
        args: module::green_create,
    ) -> Result<wire::green_create::Reply, Code> {
        self.create_green(caller, args)?;
        Ok(wire::green_create::Reply {})
    }

    fn green_destroy(
        &mut self,
        _: ModuleCaller,
        args: module::green_destroy,
    ) -> Result<wire::green_destroy::Reply, Code> {
        self.destroy_green(args.green.handle)?;
        Ok(wire::green_destroy::Reply {})
    }
}

/// Checks that the driver reports a variable as device memory of a context, or as managed memory; true for the latter. Its address
/// and size come out of the image, so a guest chooses them, and with unified addressing they could name memory of this process. This
/// process has no managed memory but such variables.
fn check_variable(driver: &Driver, context: ContextRef, (address, bytes): (u64, u64)) -> Result<bool, Code> {
    let pointer = driver.pointer(address)?;
    let end = address.checked_add(bytes);
    let last = pointer.start.checked_add(pointer.bytes);
    let around = pointer.start <= address && end.zip(last).is_some_and(|(end, last)| end <= last);
    if around && (pointer.managed || pointer.on_device && pointer.context == context.handle) {
        return Ok(pointer.managed);
    }
    limited!(
        warn,
        address,
        bytes,
        "the driver reports that a variable of an image is neither device memory of its context nor managed memory"
    );
    Err(code::INVALID_IMAGE)
}

/// True if a load failed for lack of memory: its own, or that of the heap that came with it.
const fn lacks_memory(failed: Code) -> bool {
    matches!(failed, code::OUT_OF_MEMORY | code::SHARED_OBJECT_INIT_FAILED)
}

/// Limit on requests for a grant until an image fits, each for twice the bytes.
const GROWTH_ROUNDS: usize = 8;

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const LOCAL_BYTES: usize = 3;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
const CAPABILITY_MAJOR: u32 = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
const CAPABILITY_MINOR: u32 = 76;

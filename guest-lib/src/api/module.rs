//! The functions of the C API for modules, libraries, functions and kernels. In one file: each handle stands for one of the others.

use super::{jit, managed};
use crate::{
    api::launch::LaunchConfiguration,
    arguments::{Call, In, Out, SharedSize},
    error::{Error, Result},
    images, log,
    process::{self, ProcessState},
    state::{
        devices::attribute as device_attribute,
        functions::{HeldFunction, attribute},
        jit::JitOptions,
        links::LinkInput,
        modules::{self, Global, ModuleImage},
    },
    turns,
};
use core::ffi::{c_char, c_int, c_uint, c_void};
use sluice_cuda_abi::jit::input;
use sluice_cuda_frontend::{
    environment::{Environment, LoadingMode},
    given,
};
use sluice_protocol::{
    calls::wire,
    field::LaunchAttributes,
    handle::{Function, Id},
    limits,
};
use std::{ffi::CStr, io::Read as _, os::unix::ffi::OsStrExt as _};

/// Loads an image, with all its functions if the user asks for that.
fn load(
    process: &ProcessState,
    context: u64,
    library: bool,
    image: u64,
    options: &JitOptions,
) -> Result<u64> {
    let handle = load_image(process, context, library, image, options)?;
    if Environment::get().loading == LoadingMode::Eager {
        let loaded =
            context_for(process, handle).and_then(|context| load_functions(process, context, handle));
        if let Err(error) = loaded {
            process.unload(context, handle)?;
            return Err(error);
        }
    }
    Ok(handle)
}

/// Loads the functions of a module. The worker's driver loads a function when its attributes are read, which this does.
fn load_functions(process: &ProcessState, context: u64, handle: u64) -> Result {
    let ProcessState { session, arena, modules, .. } = process;
    for index in 0..modules.function_count(session, context, handle)? {
        modules.function_at(session, arena, context, handle, index)?;
    }
    Ok(())
}

/// The architecture of the device of the current context, or else of the first device: libraries need no context.
fn architecture(process: &ProcessState) -> Result<u32> {
    let device = process.current().map_or(0, |context| context.device);
    let device = process.devices.get(device)?;
    Ok(device.bound(device_attribute::COMPUTE_CAPABILITY_MAJOR) * 10
        + device.bound(device_attribute::COMPUTE_CAPABILITY_MINOR))
}

/// Loads an image. Relocatable code that is not linked for this device yet is linked now.
fn load_image(
    process: &ProcessState,
    context: u64,
    library: bool,
    image: u64,
    options: &JitOptions,
) -> Result<u64> {
    let ProcessState { session, arena, modules, links, objects, .. } = process;
    let selected = ModuleImage::find(image)?.selected(Environment::get().images, architecture(process)?);
    match selected.and_then(|image| modules.load(session, arena, context, library, &image, options)) {
        Err(Error::NO_BINARY_FOR_GPU) => {}
        loaded => return loaded.map(Id::raw),
    }
    let parts = modules::relocatable_parts(image)?;
    if parts.is_empty() {
        return Err(Error::NO_BINARY_FOR_GPU);
    }
    let link = links.create(session, arena, objects, context, options)?;
    let linked = || {
        let id = links.find(objects, link)?;
        for (address, bytes) in parts {
            let input = LinkInput { kind: input::FATBINARY, address, bytes, name: b"" };
            links.add(session, arena, context, id, &input, &JitOptions::default())?;
        }
        let (image, _) = links.complete(session, arena, context, id)?;
        modules.load(
            session,
            arena,
            context,
            library,
            &ModuleImage::find(image as u64)?,
            &JitOptions::default(),
        )
    };
    let loaded = linked();
    links.destroy(session, objects, context, link)?;
    loaded.map(Id::raw)
}

/// Loads an image without options into the current context; returns the module.
pub(super) fn load_plain(image: u64) -> Result<u64> {
    let process = process::get()?;
    load(process, process.current()?.raw, false, image, &JitOptions::default())
}

fn load_module(place: Out<u64>, image: u64, options: &JitOptions) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    let context = process.current()?;
    place.set(load(process, context.raw, false, image, options)?)
}

/// Reads a file of at most `limit` bytes, and adds a NUL: a text ends with one, which a file need not have.
pub(super) fn read_file(name: In<c_char>, limit: u64) -> Result<Vec<u8>> {
    let path = std::ffi::OsStr::from_bytes(name.text().get_within(4096)?);
    let read = || {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let mut bytes = read().map_err(|error| {
        log::info(format_args!("cannot read {}: {error}", path.display()));
        Error::FILE_NOT_FOUND
    })?;
    if bytes.len() as u64 > limit {
        log::warn(format_args!("{} has more than {limit} bytes", path.display()));
        return Err(Error::OUT_OF_MEMORY);
    }
    bytes.push(0);
    Ok(bytes)
}

fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

pub(crate) fn cuModuleLoad(_: Call, module: Out<u64>, name: In<c_char>) -> Result {
    process::get()?;
    let image = read_file(name, limits::IMAGE_BYTES)?;
    load_module(module, address(&image), &JitOptions::default())
}

pub(crate) fn cuModuleLoadData(_: Call, module: Out<u64>, image: In<c_void>) -> Result {
    load_module(module, image.address(), &JitOptions::default())
}

pub(crate) fn cuModuleLoadDataEx(
    _: Call,
    module: Out<u64>,
    image: In<c_void>,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result {
    let process = process::get()?;
    module.required()?;
    process.current()?;
    load_module(module, image.address(), &jit::read(count, options, values)?)
}

pub(crate) fn cuModuleLoadFatBinary(_: Call, module: Out<u64>, image: In<c_void>) -> Result {
    load_module(module, image.address(), &JitOptions::default())
}

fn unload(handle: u64, library: bool) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    if process.modules.resolve(handle)?.1 != library {
        return Err(Error::INVALID_HANDLE);
    }
    process.unload(process.contexts.current_on_host(), handle)?;
    images::module_ended(process, handle);
    Ok(())
}

pub(crate) fn cuModuleUnload(_: Call, module: u64) -> Result {
    unload(module, false)
}

/// The context of a look-up.
fn context_for(process: &ProcessState, handle: u64) -> Result<u64> {
    process.session.healthy()?;
    match process.modules.resolve(handle)? {
        (_, true) => process.look_up_context(),
        (_, false) => Ok(process.current()?.raw),
    }
}

pub(crate) fn cuModuleGetFunction(_: Call, function: Out<u64>, module: u64, name: In<c_char>) -> Result {
    let process = process::get()?;
    let place = function.required()?;
    let context = context_for(process, module)?;
    let name = name.text().get_within(limits::NAME_BYTES)?;
    place.set(process.modules.function(&process.session, context, module, name)?.raw())
}

pub(crate) fn cuModuleGetFunctionCount(_: Call, count: Out<c_uint>, module: u64) -> Result {
    let process = process::get()?;
    let place = count.required()?;
    place.set(process.modules.function_count(&process.session, context_for(process, module)?, module)?)
}

pub(crate) fn cuModuleEnumerateFunctions(_: Call, functions: Out<u64>, room: c_uint, module: u64) -> Result {
    let process = process::get()?;
    functions.required()?;
    let context = context_for(process, module)?;
    let count = process.modules.function_count(&process.session, context, module)?.min(room);
    for index in 0..count {
        functions.set_at(
            index as usize,
            process.modules.function_at(&process.session, &process.arena, context, module, index)?.raw(),
        )?;
    }
    Ok(())
}

/// All functions of a module.
pub(super) fn functions(module: u64) -> Result<Vec<u64>> {
    let process = process::get()?;
    let context = context_for(process, module)?;
    let ProcessState { session, arena, modules, .. } = process;
    let count = modules.function_count(session, context, module)?;
    (0..count).map(|index| Ok(modules.function_at(session, arena, context, module, index)?.raw())).collect()
}

pub(crate) fn cuModuleGetGlobal_v2(
    _: Call,
    address: Out<u64>,
    bytes: Out<usize>,
    module: u64,
    name: In<c_char>,
) -> Result {
    let process = process::get()?;
    let found = variable(process, context_for(process, module)?, module, name)?;
    set_variable(found, address, bytes)
}

/// Finds a variable of a module or a library.
fn variable(process: &ProcessState, context: u64, module: u64, name: In<c_char>) -> Result<Global> {
    let name = name.text().get_within(limits::NAME_BYTES)?;
    let memory = process.variable_memory();
    let allow = || managed::variables_are_served(process);
    let found = process.modules.global(&process.session, memory, context, module, name, allow)?;
    if found.managed {
        turns::of_program(process)?;
    }
    Ok(found)
}

fn set_variable(found: Global, address: Out<u64>, bytes: Out<usize>) -> Result {
    address.set_if_given(found.address);
    bytes.set_if_given(usize::try_from(found.bytes).map_err(|_| Error::UNKNOWN)?);
    Ok(())
}

pub(crate) fn cuModuleGetLoadingMode(_: Call, mode: Out<c_uint>) -> Result {
    process::get()?;
    mode.set(Environment::get().loading as c_uint)
}

/// Loads a library. The options of the library itself only promise that the caller's image stays, and the worker has a copy of its
/// own.
fn load_library(
    library: Out<u64>,
    image: u64,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
    count: c_uint,
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let place = library.required()?;
    let context = process.contexts.current_on_host();
    let options = jit::read(count, options, values)?;
    place.set(load(process, context, true, image, &options)?)
}

pub(crate) fn cuLibraryLoadData(
    _: Call,
    library: Out<u64>,
    code: In<c_void>,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
    count: c_uint,
    _: Out<c_uint>,
    _: Out<*mut c_void>,
    _: c_uint,
) -> Result {
    load_library(library, code.address(), options, values, count)
}

pub(crate) fn cuLibraryLoadFromFile(
    _: Call,
    library: Out<u64>,
    name: In<c_char>,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
    count: c_uint,
    _: Out<c_uint>,
    _: Out<*mut c_void>,
    _: c_uint,
) -> Result {
    process::get()?;
    library.required()?;
    let image = read_file(name, limits::IMAGE_BYTES)?;
    load_library(library, address(&image), options, values, count)
}

pub(crate) fn cuLibraryUnload(_: Call, library: u64) -> Result {
    unload(library, true)
}

fn library(handle: u64) -> Result<&'static ProcessState> {
    let process = process::get()?;
    process.session.healthy()?;
    if process.modules.resolve(handle)?.1 { Ok(process) } else { Err(Error::INVALID_HANDLE) }
}

pub(crate) fn cuLibraryGetKernel(call: Call, kernel: Out<u64>, handle: u64, name: In<c_char>) -> Result {
    library(handle)?;
    cuModuleGetFunction(call, kernel, handle, name)
}

pub(crate) fn cuLibraryGetKernelCount(call: Call, count: Out<c_uint>, handle: u64) -> Result {
    library(handle)?;
    cuModuleGetFunctionCount(call, count, handle)
}

pub(crate) fn cuLibraryEnumerateKernels(call: Call, kernels: Out<u64>, room: c_uint, handle: u64) -> Result {
    library(handle)?;
    cuModuleEnumerateFunctions(call, kernels, room, handle)
}

/// A library's module in the current context answers the same look-ups, so it has the same id.
pub(crate) fn cuLibraryGetModule(_: Call, module: Out<u64>, handle: u64) -> Result {
    let process = library(handle)?;
    process.current()?;
    module.set(handle)
}

pub(crate) fn cuLibraryGetGlobal(
    call: Call,
    address: Out<u64>,
    bytes: Out<usize>,
    handle: u64,
    name: In<c_char>,
) -> Result {
    let process = library(handle)?;
    // Variables live in a context's copy of the library.
    process.current()?;
    cuModuleGetGlobal_v2(call, address, bytes, handle, name)
}

pub(crate) fn cuLibraryGetManaged(
    _: Call,
    address: Out<u64>,
    bytes: Out<usize>,
    handle: u64,
    name: In<c_char>,
) -> Result {
    let process = library(handle)?;
    if process.contexts.current_on_host() == 0 {
        managed::variables_are_served(process)?;
    }
    let found = variable(process, process.look_up_context()?, handle, name)?;
    if found.managed { set_variable(found, address, bytes) } else { Err(Error::NOT_FOUND) }
}

/// Attribute 129 reports that functions have no address that is the same on all devices.
pub(crate) fn cuLibraryGetUnifiedFunction(
    _: Call,
    _: Out<*mut c_void>,
    handle: u64,
    name: In<c_char>,
) -> Result {
    library(handle)?;
    name.text().get()?;
    Err(Error::INVALID_VALUE)
}

fn function(handle: u64) -> Result<(&'static ProcessState, HeldFunction<'static>)> {
    let process = process::get()?;
    process.session.healthy()?;
    Ok((process, process.modules.functions.resolve(handle)?))
}

/// A kernel is launched in any context, so as a function it has the same id.
pub(crate) fn cuKernelGetFunction(_: Call, place: Out<u64>, kernel: u64) -> Result {
    let (process, _) = function(kernel)?;
    process.current()?;
    place.set(kernel)
}

pub(crate) fn cuKernelGetLibrary(_: Call, place: Out<u64>, kernel: u64) -> Result {
    let (_, held) = function(kernel)?;
    if !held.is_kernel() {
        return Err(Error::INVALID_HANDLE);
    }
    place.set(held.module.raw())
}

fn get_attribute(value: Out<c_int>, id: c_uint, handle: u64) -> Result {
    let (_, held) = function(handle)?;
    match id {
        attribute::DEVICE_NODE_UPDATE_SUPPORTED | attribute::SHARED_MEMORY_MODE => value.set(0),
        attribute::COUNT.. => Err(Error::INVALID_VALUE),
        _ => value.set(held.attribute(id as usize)),
    }
}

fn set_attribute(id: c_uint, value: c_int, handle: u64) -> Result {
    let (process, function) = function_id(handle)?;
    if id >= attribute::COUNT {
        return Err(Error::INVALID_VALUE);
    }
    let answer = process.session.sync(
        process.look_up_context()?,
        &wire::function_set_attribute::Args { function, attribute: id, value },
    )?;
    process.modules.functions.update(function, answer.attributes)
}

pub(crate) fn cuKernelGetAttribute(
    _: Call,
    value: Out<c_int>,
    id: c_uint,
    kernel: u64,
    dev: c_int,
) -> Result {
    process::get()?.devices.get(dev)?;
    get_attribute(value, id, kernel)
}

pub(crate) fn cuKernelSetAttribute(_: Call, id: c_uint, value: c_int, kernel: u64, dev: c_int) -> Result {
    process::get()?.devices.get(dev)?;
    set_attribute(id, value, kernel)
}

pub(crate) fn cuFuncGetAttribute(_: Call, value: Out<c_int>, id: c_uint, handle: u64) -> Result {
    get_attribute(value, id, handle)
}

pub(crate) fn cuFuncSetAttribute(_: Call, handle: u64, id: c_uint, value: c_int) -> Result {
    let process = process::get()?;
    process.current()?;
    set_attribute(id, value, handle)
}

// Preferences between cache and shared memory: hints.

pub(crate) fn cuKernelSetCacheConfig(call: Call, kernel: u64, config: c_uint, dev: c_int) -> Result {
    process::get()?.devices.get(dev)?;
    cuFuncSetCacheConfig(call, kernel, config)
}

pub(crate) fn cuFuncSetCacheConfig(_: Call, handle: u64, config: c_uint) -> Result {
    function(handle)?;
    if config <= 3 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

pub(crate) fn cuFuncSetSharedMemConfig(_: Call, handle: u64, config: c_uint) -> Result {
    function(handle)?;
    if config <= 2 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

pub(crate) fn cuKernelGetName(_: Call, name: Out<*const c_char>, handle: u64) -> Result {
    let (_, held) = function(given::<Error>(handle)?)?;
    name.set(CStr::as_ptr(held.name))
}

pub(crate) fn cuFuncGetName(call: Call, name: Out<*const c_char>, handle: u64) -> Result {
    cuKernelGetName(call, name, handle)
}

pub(crate) fn cuFuncGetModule(_: Call, module: Out<u64>, handle: u64) -> Result {
    let (_, held) = function(given::<Error>(handle)?)?;
    module.set(held.module.raw())
}

pub(crate) fn cuKernelGetParamInfo(
    _: Call,
    handle: u64,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> Result {
    let (_, held) = function(given::<Error>(handle)?)?;
    let (at, bytes) = held.parameters.get(index).copied().ok_or(Error::INVALID_VALUE)?;
    offset.set(usize::from(at))?;
    size.set_if_given(usize::from(bytes));
    Ok(())
}

pub(crate) fn cuFuncGetParamInfo(
    call: Call,
    handle: u64,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> Result {
    cuKernelGetParamInfo(call, handle, index, offset, size)
}

pub(crate) fn cuKernelGetParamCount(_: Call, handle: u64, count: Out<usize>) -> Result {
    let (_, held) = function(handle)?;
    count.set(held.parameters.len())
}

pub(crate) fn cuFuncGetParamCount(call: Call, handle: u64, count: Out<usize>) -> Result {
    cuKernelGetParamCount(call, handle, count)
}

pub(crate) fn cuFuncIsLoaded(_: Call, state: Out<c_uint>, handle: u64) -> Result {
    function(handle)?;
    // CU_FUNCTION_LOADING_STATE_LOADED: every function with a handle here was loaded to get its attributes.
    state.set(1)
}

pub(crate) fn cuFuncLoad(_: Call, handle: u64) -> Result {
    function(handle).map(|_| ())
}

/// The function, for a request to the host. No lock is held, since the answer may take a while.
fn function_id(handle: u64) -> Result<(&'static ProcessState, Id<Function>)> {
    function(handle).map(|(process, held)| (process, held.id))
}

fn active_blocks(handle: u64, block: c_int, shared: usize, flags: u32) -> Result<c_int> {
    let (process, function) = function_id(handle)?;
    let answer = process.session.sync(
        process.current()?.raw,
        &wire::occupancy_blocks::Args { function, block, shared: shared as u64, flags },
    )?;
    Ok(answer.blocks)
}

pub(crate) fn cuOccupancyMaxPotentialBlockSize(
    call: Call,
    grid: Out<c_int>,
    block: Out<c_int>,
    handle: u64,
    shared_of: Option<SharedSize>,
    shared: usize,
    limit: c_int,
) -> Result {
    cuOccupancyMaxPotentialBlockSizeWithFlags(call, grid, block, handle, shared_of, shared, limit, 0)
}

pub(crate) fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    _: Call,
    grid: Out<c_int>,
    block: Out<c_int>,
    handle: u64,
    shared_of: Option<SharedSize>,
    shared: usize,
    limit: c_int,
    flags: c_uint,
) -> Result {
    let (process, held) = function(handle)?;
    let (function, largest) = (held.id, held.attribute(attribute::MAX_THREADS_PER_BLOCK));
    drop(held);
    let context = process.current()?;
    let (grid, block) = (grid.required()?, block.required()?);
    let Some(shared_of) = shared_of else {
        let answer = process.session.sync(
            context.raw,
            &wire::occupancy_block_size::Args { function, shared: shared as u64, limit, flags },
        )?;
        grid.set(answer.grid)?;
        return block.set(answer.block);
    };
    // Shared memory depends on the block size by a function of the program's, so the search runs here, as documented:
    // whole warps from the largest block down, the most resident threads win.
    let device = process.devices.get(context.device)?;
    let warp =
        c_int::try_from(device.bound(device_attribute::WARP_SIZE).max(1)).map_err(|_| Error::UNKNOWN)?;
    let largest = if limit > 0 { largest.min(limit) } else { largest };
    let (mut best, mut best_threads) = ((0, 0), 0);
    let mut size = largest;
    while size > 0 {
        let blocks = active_blocks(handle, size, shared_of.of(size), flags)?;
        let threads = blocks.saturating_mul(size);
        if threads > best_threads {
            (best, best_threads) = ((blocks, size), threads);
        }
        size = if size % warp == 0 { size - warp } else { size - size % warp };
    }
    // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    let multiprocessors = c_int::try_from(device.bound(16)).map_err(|_| Error::UNKNOWN)?;
    grid.set(best.0.saturating_mul(multiprocessors))?;
    block.set(best.1)
}

fn clusters(value: Out<c_int>, potential: bool, handle: u64, config: In<c_void>) -> Result {
    let (process, function) = function_id(handle)?;
    let context = process.current()?;
    let config = LaunchConfiguration::read(config)?;
    let answer = process.session.sync(
        context.raw,
        &wire::occupancy_clusters::Args {
            potential,
            function,
            grid: config.grid,
            block: config.block,
            shared: config.shared,
            attributes: LaunchAttributes(&config.attributes),
        },
    )?;
    value.set(answer.value)
}

pub(crate) fn cuOccupancyMaxPotentialClusterSize(
    _: Call,
    size: Out<c_int>,
    handle: u64,
    config: In<c_void>,
) -> Result {
    clusters(size, true, handle, config)
}

pub(crate) fn cuOccupancyMaxActiveClusters(
    _: Call,
    count: Out<c_int>,
    handle: u64,
    config: In<c_void>,
) -> Result {
    clusters(count, false, handle, config)
}

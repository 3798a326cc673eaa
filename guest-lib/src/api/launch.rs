//! Launches: checked here against cached data, so that the driver's immediate errors are immediate, then posted.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    host_memory,
    process::{self, ProcessState},
    state::{
        events::INTERPROCESS,
        functions::{HeldFunction, LaunchShape, LoadedFunction},
        streams::StreamRef,
    },
    turns,
};
use core::ffi::{c_uint, c_void};
use sluice_cuda_frontend::launch_parameters;
use sluice_cuda_graphs::{KernelWork, Work};
use sluice_protocol::{
    calls::wire,
    field::{Bytes, LaunchAttributes},
    limits,
};

/// A launch by any function of the API.
struct LaunchCall<'a> {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    cooperative: bool,
    attributes: &'a [u8],
    /// The events that the launch records.
    events: &'a [u64],
    /// True if the launch asks for more than the checks here cover.
    unusual: bool,
    parameters: u64,
    extra: u64,
}

/// `CUlaunchAttributeID`s with a meaning here.
mod id {
    pub(super) const IGNORE: u32 = 0;
    pub(super) const COOPERATIVE: u32 = 2;
    /// Of streams alone.
    pub(super) const SYNCHRONIZATION_POLICY: u32 = 3;
    pub(super) const PROGRAMMATIC_SERIALIZATION: u32 = 6;
    pub(super) const PROGRAMMATIC_EVENT: u32 = 7;
    pub(super) const LAUNCH_COMPLETION_EVENT: u32 = 12;
    pub(super) const DEVICE_UPDATABLE_NODE: u32 = 13;
    /// A number that the header leaves out, and the first one after its last.
    pub(super) const UNUSED: u32 = 15;
    pub(super) const BEYOND: u32 = 19;
}

/// A `CUlaunchConfig`, read.
pub(super) struct LaunchConfiguration {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
    stream: u64,
    cooperative: bool,
    /// The other attributes, 72 bytes each: id as a word, value.
    pub(super) attributes: Vec<u8>,
    /// The events in them.
    events: Vec<u64>,
}

impl LaunchConfiguration {
    /// Reads the structure and its attributes. An attribute that returns a node, which a device may update, is refused.
    pub(super) fn read(config: In<c_void>) -> Result<LaunchConfiguration> {
        let bytes = config.cast::<[u8; 56]>().get()?;
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let (list, count) = (long(40), word(48) as usize);
        if count > limits::LAUNCH_ATTRIBUTES || (count > 0 && list == 0) {
            return Err(Error::INVALID_VALUE);
        }
        let mut read = LaunchConfiguration {
            grid: [word(0), word(4), word(8)],
            block: [word(12), word(16), word(20)],
            shared: word(24),
            stream: long(32),
            cooperative: false,
            attributes: Vec::new(),
            events: Vec::new(),
        };
        for index in 0..count {
            let mut attribute = [0; 72];
            host_memory::read(list + index as u64 * 72, &mut attribute);
            let id = u32::from_ne_bytes([attribute[0], attribute[1], attribute[2], attribute[3]]);
            match id {
                id::IGNORE => {}
                id::COOPERATIVE => read.cooperative = attribute[8..12] != [0; 4],
                id::DEVICE_UPDATABLE_NODE => return Err(Error::NOT_SUPPORTED),
                id::SYNCHRONIZATION_POLICY | id::UNUSED | id::BEYOND.. => return Err(Error::INVALID_VALUE),
                _ => {
                    if matches!(id, id::PROGRAMMATIC_EVENT | id::LAUNCH_COMPLETION_EVENT) {
                        let event = attribute.as_chunks().0.get(1);
                        read.events.extend(event.map(|word| u64::from_ne_bytes(*word)));
                    }
                    read.attributes.extend_from_slice(&u64::from(id).to_le_bytes());
                    read.attributes.extend_from_slice(&attribute[8..]);
                }
            }
        }
        Ok(read)
    }
}

pub(crate) fn cuLaunchKernel(
    call: Call,
    function: u64,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: u64,
    parameters: Out<*mut c_void>,
    extra: Out<*mut c_void>,
) -> Result {
    launch(
        call,
        &LaunchCall {
            function,
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared,
            stream,
            cooperative: false,
            attributes: &[],
            events: &[],
            unusual: false,
            parameters: parameters.address(),
            extra: extra.address(),
        },
    )
}

pub(crate) fn cuLaunchKernelEx(
    call: Call,
    config: In<c_void>,
    function: u64,
    parameters: Out<*mut c_void>,
    extra: Out<*mut c_void>,
) -> Result {
    process::get()?;
    let config = LaunchConfiguration::read(config)?;
    launch(
        call,
        &LaunchCall {
            function,
            grid: config.grid,
            block: config.block,
            shared: config.shared,
            stream: config.stream,
            cooperative: config.cooperative,
            unusual: config.cooperative || !config.attributes.is_empty(),
            attributes: &config.attributes,
            events: &config.events,
            parameters: parameters.address(),
            extra: extra.address(),
        },
    )
}

pub(crate) fn cuLaunchCooperativeKernel(
    call: Call,
    function: u64,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: u64,
    parameters: Out<*mut c_void>,
) -> Result {
    launch(
        call,
        &LaunchCall {
            function,
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared,
            stream,
            cooperative: true,
            attributes: &[],
            events: &[],
            unusual: true,
            parameters: parameters.address(),
            extra: 0,
        },
    )
}

/// Launches a function whose parameters are packed by its layout.
pub(super) fn launch_packed(
    call: Call,
    function: u64,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    parameters: &[u8],
    stream: u64,
) -> Result {
    let size = parameters.len() as u64;
    let extra = launch_parameters::list(parameters, &size);
    launch(
        call,
        &LaunchCall {
            function,
            grid,
            block,
            shared,
            stream,
            cooperative: false,
            attributes: &[],
            events: &[],
            unusual: false,
            parameters: 0,
            extra: extra.as_ptr().expose_provenance() as u64,
        },
    )
}

/// Bytes of parameters for which there is room on the stack without clearing much of it: most kernels have no more than the first, and
/// few more than the second.
const FEW: usize = 64;
const SOME: usize = 512;

fn launch(call: Call, launch: &LaunchCall<'_>) -> Result {
    let process = process::get()?;
    let stream = process.stream_or_default(call, launch.stream)?;
    let mut function = process.modules.functions.resolve(launch.function)?;
    let context = process.contexts.get(stream.context)?;
    if !function.is_kernel() && function.context != context.raw {
        return Err(Error::INVALID_HANDLE);
    }
    let LaunchCall { grid, block, shared, .. } = *launch;
    LaunchShape { grid, block, shared }.check(process.devices.get(context.device)?, &function)?;
    for event in launch.events {
        let event = process.events.resolve(*event)?;
        if event.context != stream.context {
            return Err(Error::INVALID_HANDLE);
        }
        // The driver of the worker does not know that the event is for several processes; see `events`.
        if event.flags() & INTERPROCESS != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
    }
    if GRAPHS.is_capturing() {
        match capture(process, stream, function, launch)? {
            Some(held) => function = held,
            None => return Ok(()),
        }
    }
    let bytes = function.parameter_bytes();
    if bytes <= FEW {
        post::<FEW>(process, stream, function, launch)
    } else if bytes <= SOME {
        post::<SOME>(process, stream, function, launch)
    } else {
        post::<{ limits::PARAMETER_BYTES }>(process, stream, function, launch)
    }
}

/// Adds the launch to the capture of its stream. Returns the function if the stream does not capture.
#[cold]
fn capture<'a>(
    process: &'a ProcessState,
    stream: StreamRef<'_>,
    function: HeldFunction<'a>,
    launch: &LaunchCall<'_>,
) -> Result<Option<HeldFunction<'a>>> {
    if !launch.events.is_empty() {
        // No node records events of a launch.
        graphs::refuse(process, stream)?;
    }
    let mut parameters = vec![0; function.parameter_bytes()];
    pack(&function, launch, &mut parameters)?;
    // Nothing is held while the node is checked, because that resolves the function again.
    drop(function);
    let LaunchCall { function, grid, block, shared, .. } = *launch;
    let (context, attributes) = (stream.context, Vec::new());
    let parameters = parameters.into();
    let mut kernel = KernelWork { function, context, grid, block, shared, parameters, attributes };
    for attribute in launch.attributes.chunks_exact(LaunchAttributes::EACH) {
        let (Some(id), Some(value)) = (attribute.first_chunk(), attribute.last_chunk()) else { continue };
        let id = u32::from_le_bytes(*id);
        // A node has edges instead, which decide on the order of launches.
        if id != id::PROGRAMMATIC_SERIALIZATION {
            kernel.set_attribute(id, *value);
        }
    }
    if launch.cooperative {
        let mut value = [0; 64];
        value[0] = 1;
        kernel.set_attribute(id::COOPERATIVE, value);
    }
    if graphs::captured(process, stream, || Ok(Work::Kernel(kernel)))? {
        return Ok(None);
    }
    process.modules.functions.resolve(launch.function).map(Some)
}

/// Packs the parameters, at most `BYTES` of them, and posts a launch that was checked.
#[inline(never)]
fn post<const BYTES: usize>(
    process: &ProcessState,
    stream: StreamRef<'_>,
    function: HeldFunction<'_>,
    launch: &LaunchCall<'_>,
) -> Result {
    let mut packed = [0; BYTES];
    let packed = packed.get_mut(..function.parameter_bytes()).ok_or(Error::INVALID_VALUE)?;
    pack(&function, launch, packed)?;
    let (id, usual) = (function.id, !launch.unusual && function.was_launched(stream.context));
    // The lock is released while the launch waits for room on the stream.
    drop(function);

    let (attributes, parameters) = (LaunchAttributes(launch.attributes), Bytes(packed));
    let LaunchCall { grid, block, shared, cooperative, .. } = *launch;
    let call = wire::launch::Args { function: id, grid, block, shared, cooperative, attributes, parameters };
    let target = Some(stream.target());
    let turn = turns::of_device(process)?;
    if usual {
        process.session.post(stream.context, target, &call)?;
    } else {
        // The driver checks once the part that needs more than the cached data.
        let sequence = process.session.post_checked(stream.context, target, &call)?;
        for event in launch.events {
            process.events.resolve(*event)?.recorded_at(stream, sequence);
        }
        if let Ok(function) = process.modules.functions.resolve(launch.function) {
            function.set_launched(stream.context);
        }
    }
    turns::end(process, stream, turn, false)
}

/// Fills the parameter block from `kernelParams` by the cached layout, or from the buffer `extra` describes.
fn pack(function: &LoadedFunction, launch: &LaunchCall<'_>, into: &mut [u8]) -> Result {
    if launch.parameters != 0 {
        if launch.extra != 0 {
            return Err(Error::INVALID_VALUE);
        }
        for (index, (offset, size)) in function.parameters.iter().enumerate() {
            let from = host_memory::word(launch.parameters, index)?;
            if from == 0 {
                return Err(Error::INVALID_VALUE);
            }
            let (start, bytes) = (usize::from(*offset), usize::from(*size));
            host_memory::read(from, into.get_mut(start..start + bytes).ok_or(Error::INVALID_VALUE)?);
        }
        return Ok(());
    }
    if launch.extra == 0 {
        return if into.is_empty() { Ok(()) } else { Err(Error::INVALID_VALUE) };
    }
    let (mut buffer, mut size) = (0, 0);
    for pair in 0..2 {
        match host_memory::word(launch.extra, pair * 2)? {
            launch_parameters::END => break,
            launch_parameters::BUFFER_POINTER => buffer = host_memory::word(launch.extra, pair * 2 + 1)?,
            launch_parameters::BUFFER_SIZE => {
                let mut word = [0; 8];
                host_memory::read(host_memory::word(launch.extra, pair * 2 + 1)?, &mut word);
                size = u64::from_ne_bytes(word);
            }
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    // A buffer may be padded beyond the last parameter, never be shorter.
    if (into.len() as u64) > size || (buffer == 0 && size > 0) {
        return Err(Error::INVALID_VALUE);
    }
    host_memory::read(buffer, into);
    Ok(())
}

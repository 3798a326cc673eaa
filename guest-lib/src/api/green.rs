//! The functions of the C API for resources of devices, and for green contexts.

use super::{
    context_end::end_context,
    shared_events::{self, is_complete, wait_in},
};
use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    process::{self, ProcessState},
    state::{
        gates::Whole,
        green::{Green, KnownPath, QueueWish, of_device, queue_config},
        objects::Plain,
        streams::{NON_BLOCKING, StreamRef},
        thread,
    },
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_abi::resources::{DEFAULT_STREAM, DevResource, GroupParameters, LAST_SCOPE, SmFields, kind};
use sluice_cuda_frontend::retains::Retainer;
use sluice_protocol::{
    calls::wire,
    field::{Bytes, Mint, Ordinal},
    handle::{GreenContext, Id},
    limits,
    resources::{Origin, Pick, QueueChoice, ResourceDescription, SmGroup, SmPath, SmResults, SmSplit},
};
use std::sync::Arc;

/// The multiprocessors at the end of a path.
fn ask(process: &ProcessState, path: SmPath) -> Result<SmResults> {
    let bytes = ResourceDescription::from(path).encode().ok_or(Error::INVALID_RESOURCE_CONFIGURATION)?;
    let call = wire::sm_resources::Args { path: Bytes(&bytes) };
    Ok(process.session.sync(0, &call)?.results)
}

fn whole(process: &ProcessState, origin: Origin, device: c_int) -> Result<DevResource> {
    let results = ask(process, SmPath { origin, splits: Vec::new() })?;
    let fields = results.groups().first().ok_or(Error::UNKNOWN)?;
    process.resources.whole(origin, device, SmFields::from_words(*fields))
}

/// The queues that a device has for a context without a wish.
fn default_queues(process: &ProcessState, device: c_int) -> Result<QueueWish> {
    let device = Ordinal(process.devices.get(device)?.ordinal);
    let limit = process.session.sync(0, &wire::workqueue_limit::Args { device })?.limit;
    Ok(QueueWish { limit, scope: 0 })
}

fn device_resource(process: &ProcessState, device: c_int, kind: c_uint) -> Result<DevResource> {
    match kind {
        kind::SM => whole(process, of_device(process.devices.get(device)?.ordinal), device),
        kind::WORKQUEUE_CONFIG => Ok(queue_config(device, default_queues(process, device)?)),
        _ => Err(Error::INVALID_RESOURCE_TYPE),
    }
}

fn green_resource(process: &ProcessState, green: &Green, kind: c_uint) -> Result<DevResource> {
    let origin = Origin::Green(green.id);
    match kind {
        kind::SM => whole(process, origin, green.device),
        kind::WORKQUEUE_CONFIG => Ok(queue_config(green.device, green.queues)),
        kind::WORKQUEUE => process.resources.queues(origin, green.device, green.queues),
        _ => Err(Error::INVALID_RESOURCE_TYPE),
    }
}

fn context_resource(process: &ProcessState, context: u64, kind: c_uint) -> Result<DevResource> {
    let context = process.contexts.get(context)?;
    match (context.green, kind) {
        (0, kind::WORKQUEUE) => {
            let origin = of_device(process.devices.get(context.device)?.ordinal);
            process.resources.queues(origin, context.device, default_queues(process, context.device)?)
        }
        (0, _) => device_resource(process, context.device, kind),
        (green, _) => green_resource(process, &*process.contexts.greens.get(green)?, kind),
    }
}

pub(crate) fn cuDeviceGetDevResource(_: Call, device: c_int, resource: Out<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    process.devices.get(device)?;
    let place = resource.cast::<DevResource>().required()?;
    place.set(device_resource(process, device, kind)?)
}

pub(crate) fn cuCtxGetDevResource(_: Call, context: u64, resource: Out<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    process.contexts.get(context)?;
    let place = resource.cast::<DevResource>().required()?;
    place.set(context_resource(process, context, kind)?)
}

pub(crate) fn cuGreenCtxGetDevResource(_: Call, green: u64, resource: Out<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    let green = process.contexts.greens.get(green)?;
    let place = resource.cast::<DevResource>().required()?;
    place.set(green_resource(process, &green, kind)?)
}

pub(crate) fn cuStreamGetDevResource(call: Call, stream: u64, resource: Out<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    let stream = process.stream_or_default(call, stream)?;
    let place = resource.cast::<DevResource>().required()?;
    if kind != kind::SM {
        return Err(Error::INVALID_RESOURCE_TYPE);
    }
    place.set(match stream.green() {
        0 => device_resource(process, process.contexts.device(stream.context)?, kind)?,
        green => green_resource(process, &*process.contexts.greens.get(green)?, kind)?,
    })
}

/// Splits multiprocessors, and stores the results unless `result` is null.
fn split(
    process: &ProcessState,
    of: &KnownPath,
    how: &SmSplit,
    result: Out<DevResource>,
    remainder: Out<DevResource>,
) -> Result<SmResults> {
    let mut path = of.path.clone();
    path.splits.push((how.clone(), Pick::Remainder));
    let results = ask(process, path)?;
    let discovers = matches!(how, SmSplit::Discovery(_));
    // The rest after a discovery is no resource that could be found again.
    let left = if discovers { [0; 5] } else { results.remainder };
    let (groups, left) = process.resources.parts(of, how, results.groups(), left)?;
    if result.is_given() {
        groups.into_iter().enumerate().try_for_each(|(index, group)| result.set_at(index, group))?;
    }
    remainder.set_if_given(left);
    Ok(results)
}

pub(crate) fn cuDevSmResourceSplitByCount(
    _: Call,
    result: Out<c_void>,
    count: Out<c_uint>,
    input: In<c_void>,
    remainder: Out<c_void>,
    flags: c_uint,
    minimum: c_uint,
) -> Result {
    let process = process::get()?;
    let (result, remainder) = (result.cast::<DevResource>(), remainder.cast::<DevResource>());
    let of = process.resources.path(&input.cast().get()?)?;
    let most = u32::try_from(limits::SM_GROUPS).map_err(|_| Error::UNKNOWN)?;
    let groups = if result.is_given() { count.get()?.min(most) } else { count.required().map(|_| most)? };
    let how = SmSplit::ByCount { groups, minimum, flags };
    let results = split(process, &of, &how, result, remainder)?;
    count.set(c_uint::try_from(results.groups().len()).map_err(|_| Error::UNKNOWN)?)
}

pub(crate) fn cuDevSmResourceSplit(
    _: Call,
    result: Out<c_void>,
    count: c_uint,
    input: In<c_void>,
    remainder: Out<c_void>,
    flags: c_uint,
    parameters: Out<c_void>,
) -> Result {
    let process = process::get()?;
    let (result, remainder) = (result.cast::<DevResource>(), remainder.cast::<DevResource>());
    let of = process.resources.path(&input.cast().get()?)?;
    if flags != 0 || count == 0 || count as usize > limits::SM_GROUPS {
        return Err(Error::INVALID_VALUE);
    }
    let place = parameters.cast::<GroupParameters>().required()?;
    let mut given = place.input().list(count as usize)?;
    let group = |group: &GroupParameters| {
        let GroupParameters { count, coscheduled, preferred, flags, domain, reserved } = *group;
        let group = SmGroup { count, coscheduled, preferred, flags, domain };
        if reserved == [0; 11] { Ok(group) } else { Err(Error::INVALID_VALUE) }
    };
    let groups = given.iter().map(group).collect::<Result<Vec<_>>>()?;
    let how = if result.is_given() { SmSplit::Groups(groups) } else { SmSplit::Discovery(groups) };
    let results = split(process, &of, &how, result, remainder)?;
    // The driver fills in the counts that it has found.
    for ((index, group), [count, ..]) in given.iter_mut().enumerate().zip(results.groups()) {
        group.count = *count;
        place.set_at(index, *group)?;
    }
    Ok(())
}

/// Resources of a program, one after the other.
#[derive(Default)]
struct GatheredResources {
    device: Option<c_int>,
    paths: Vec<SmPath>,
    queues: QueueChoice,
    wish: Option<QueueWish>,
}

impl GatheredResources {
    fn of_device(&mut self, device: c_int) -> Result {
        if *self.device.get_or_insert(device) == device {
            Ok(())
        } else {
            Err(Error::INVALID_RESOURCE_CONFIGURATION)
        }
    }

    fn add(&mut self, process: &ProcessState, resource: &DevResource) -> Result {
        let (queues, device, wish) = match resource.kind {
            kind::SM => {
                let KnownPath { device, path } = process.resources.path(resource)?;
                self.paths.push(path);
                return self.of_device(device);
            }
            kind::WORKQUEUE_CONFIG => {
                let (device, limit, scope) = resource.queues();
                if limit == 0 || scope > LAST_SCOPE || process.devices.get(device).is_err() {
                    return Err(Error::INVALID_VALUE);
                }
                (QueueChoice::Config { limit, scope }, device, QueueWish { limit, scope })
            }
            kind::WORKQUEUE => {
                let (origin, device, wish) = process.resources.queues_of(resource)?;
                (QueueChoice::Of(origin), device, wish)
            }
            _ => return Err(Error::INVALID_RESOURCE_TYPE),
        };
        self.of_device(device)?;
        self.queues = queues;
        match self.wish.replace(wish) {
            None => Ok(()),
            Some(_) => Err(Error::INVALID_RESOURCE_CONFIGURATION),
        }
    }

    /// The description of the whole, for the worker.
    fn description(self, origin: Origin) -> Result<ResourceDescription> {
        let mut paths = self.paths.into_iter();
        let path = paths.next().unwrap_or(SmPath { origin, splits: Vec::new() });
        let mut more = Vec::new();
        for other in paths {
            // Groups of one split: the paths differ in the last choice only.
            let (Some(((last, pick), before)), Some(((other_last, other_pick), other_before))) =
                (path.splits.split_last(), other.splits.split_last())
            else {
                return Err(Error::INVALID_RESOURCE_CONFIGURATION);
            };
            let is_other = |chosen: &Pick| chosen != other_pick;
            let is_same = other.origin == path.origin && (last, before) == (other_last, other_before);
            if !is_same || !is_other(pick) || !more.iter().all(is_other) {
                return Err(Error::INVALID_RESOURCE_CONFIGURATION);
            }
            more.push(*other_pick);
        }
        Ok(ResourceDescription { path, more, queues: self.queues })
    }
}

pub(crate) fn cuDevResourceGenerateDesc(
    _: Call,
    place: Out<u64>,
    resources: Out<c_void>,
    count: c_uint,
) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    // A split has no more results, and there is one resource of queues.
    if count as usize > limits::SM_GROUPS + 2 {
        return Err(Error::INVALID_VALUE);
    }
    let resources = resources.cast::<DevResource>();
    let mut gathered = GatheredResources::default();
    for index in 0..count as usize {
        gathered.add(process, &resources.get_at(index)?)?;
    }
    let device = gathered.device.ok_or(Error::INVALID_VALUE)?;
    place.set(describe(process, gathered, device)?)
}

/// The descriptor of the resources of a device.
fn describe(process: &ProcessState, gathered: GatheredResources, device: c_int) -> Result<u64> {
    let wish = gathered.wish;
    let ordinal = process.devices.get(device)?.ordinal;
    let description = gathered.description(of_device(ordinal))?;
    let bytes = description.encode().ok_or(Error::INVALID_RESOURCE_CONFIGURATION)?;
    let primary = process.contexts.primary(device)?;
    let context = if process.contexts.get(primary).is_ok() { primary } else { 0 };
    let call = wire::resource_descriptor::Args { device: Ordinal(ordinal), resources: Bytes(&bytes) };
    let number = process.session.sync(context, &call)?.descriptor;
    let wish = wish.map_or_else(|| default_queues(process, device), Ok)?;
    Ok(process.resources.described(number, device, wish))
}

pub(crate) fn cuGreenCtxCreate(
    _: Call,
    place: Out<u64>,
    descriptor: u64,
    device: c_int,
    flags: c_uint,
) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    process.devices.get(device)?;
    // No descriptor is that of the whole device.
    let descriptor = match descriptor {
        0 => describe(process, GatheredResources::default(), device)?,
        given => given,
    };
    let descriptor = process.resources.descriptor(descriptor)?;
    if flags & !DEFAULT_STREAM != 0 || descriptor.device != device {
        return Err(Error::INVALID_VALUE);
    }
    process.session.healthy()?;
    let ProcessState { contexts, session, streams, devices, .. } = process;
    let primary = contexts.retain_primary(session, streams, devices, device, Retainer::GreenContext)?;
    let ids = GreenContext::of(&process.objects);
    let made = ids.mint(primary).and_then(|id| {
        let of = Id::from_raw(primary).ok_or(Error::INVALID_CONTEXT)?;
        let call = wire::green_create::Args { primary: of, descriptor: descriptor.number(), green: Mint(id) };
        let created = session.sync(primary, &call);
        created.map(|_| id).inspect_err(|_| ids.release(id))
    });
    let id = match made {
        Ok(id) => id,
        Err(error) => {
            release_primary(process, device)?;
            return Err(error);
        }
    };
    ids.made(id);
    let has_default_stream = flags & DEFAULT_STREAM != 0;
    let default = has_default_stream.then(|| streams.create_green(session, primary, id, 0)).transpose();
    let slot = default.as_ref().ok().and_then(|stream| stream.map(|stream| stream.slot));
    contexts.greens.insert(Green::new(id, primary, &descriptor, slot));
    match default.and_then(|stream| stream.map_or(Ok(()), |stream| process.gates.enter(session, stream))) {
        Ok(()) => place.set(id.raw()),
        Err(error) => {
            cuGreenCtxDestroy(Call { per_thread: false }, id.raw())?;
            Err(error)
        }
    }
}

fn release_primary(process: &ProcessState, device: c_int) -> Result {
    process.contexts.release_primary(device, Retainer::GreenContext, |id| end_context(process, id)).map(drop)
}

/// Applies a rule of captures to each stream of a green context.
fn refuse_captures(process: &ProcessState, green: &Green) -> Result {
    if !GRAPHS.is_capturing() {
        return Ok(());
    }
    // Also after an error: the captures of all of them become invalid.
    let mut refused = Ok(());
    for stream in process.streams.of_green(green.id.raw()) {
        refused = refused.and(graphs::refuse(process, stream));
    }
    refused
}

pub(crate) fn cuGreenCtxDestroy(_: Call, green: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let green = process.contexts.greens.get(green)?;
    // This makes their captures invalid; that it found some is no error of this call.
    let _ = refuse_captures(process, &green);
    if !green.end() {
        return Err(Error::INVALID_CONTEXT);
    }
    process.end_green(&green)?;
    release_primary(process, green.device)
}

pub(crate) fn cuCtxFromGreenCtx(_: Call, place: Out<u64>, green: u64) -> Result {
    let process = process::get()?;
    place.set(process.contexts.greens.get(green)?.view())
}

pub(crate) fn cuGreenCtxStreamCreate(
    _: Call,
    place: Out<u64>,
    green: u64,
    flags: c_uint,
    priority: c_int,
) -> Result {
    let process = process::get()?;
    let green = process.contexts.greens.get(green)?;
    let place = place.required()?;
    if flags != NON_BLOCKING {
        return Err(Error::INVALID_VALUE);
    }
    place.set(create_stream(process, &green, priority)?)
}

/// Creates a stream of a green context.
pub(super) fn create_stream(process: &ProcessState, green: &Green, priority: c_int) -> Result<u64> {
    let priority = process.devices.get(green.device)?.clamped_priority(priority);
    let stream = process.streams.create_green(&process.session, green.primary, green.id, priority)?;
    process.gates.enter(&process.session, stream)?;
    Ok(stream.id().raw())
}

/// Records an event behind all work of a green context.
pub(super) fn record(process: &ProcessState, green: &Arc<Green>, event: u64) -> Result {
    process.session.healthy()?;
    let found = process.events.resolve(event)?;
    if found.context != green.primary {
        return Err(Error::INVALID_HANDLE);
    }
    refuse_captures(process, green)?;
    let whole = Whole::of_green(green);
    process.gates.record(&process.session, &process.streams, &process.events, whole, |stream| {
        match shared_events::of(process, &found) {
            Some(shared) => shared_events::record(process, &shared, stream),
            None => found.record(&process.session, stream),
        }
    })
}

/// Makes all later work of a green context wait for an event.
pub(super) fn wait(process: &ProcessState, green: &Arc<Green>, event: u64) -> Result {
    process.session.healthy()?;
    let found = process.events.resolve(event)?;
    GRAPHS.check_event(event)?;
    refuse_captures(process, green)?;
    if is_complete(process, event)? {
        return Ok(());
    }
    let wait = |stream: StreamRef<'_>| wait_in(process, &found, stream);
    process.gates.wait(&process.session, &process.streams, &process.events, Whole::of_green(green), wait)
}

pub(crate) fn cuGreenCtxRecordEvent(_: Call, green: u64, event: u64) -> Result {
    let process = process::get()?;
    record(process, &process.contexts.greens.get(green)?, event)
}

pub(crate) fn cuGreenCtxWaitEvent(_: Call, green: u64, event: u64) -> Result {
    let process = process::get()?;
    wait(process, &process.contexts.greens.get(green)?, event)
}

/// Waits for all work of a green context.
pub(super) fn synchronize(process: &ProcessState, green: &Green) -> Result {
    refuse_captures(process, green)?;
    GRAPHS.potentially_unsafe()?;
    process.session.wait_all(process.streams.posted_of_green(green.id.raw()))?;
    graphs::sweep(process);
    process.session.healthy()?;
    process.session.report(green.primary)
}

pub(crate) fn cuStreamGetGreenCtx(call: Call, stream: u64, place: Out<u64>) -> Result {
    let process = process::get()?;
    place.required()?;
    place.set(process.stream_or_default(call, stream)?.green())
}

pub(crate) fn cuGreenCtxGetId(_: Call, green: u64, id: Out<u64>) -> Result {
    let process = process::get()?;
    let green = match green {
        0 => match process.contexts.get(thread::current_context())?.green {
            0 => return Err(Error::INVALID_CONTEXT),
            green => process.contexts.greens.get(green)?,
        },
        green => process.contexts.greens.get(green)?,
    };
    id.set(u64::from(green.id.generation()) << 32 | (green.id.index() as u64 + 1))
}

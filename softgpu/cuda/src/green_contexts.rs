//! Making and ending green contexts, from the resources that a program gives.

use std::sync::Arc;

use sluice_cuda_abi::resources::{DEFAULT_STREAM, DevResource, LAST_SCOPE, kind};
use sluice_cuda_frontend::retains::Retainer;

use crate::context::{CONTEXTS, Context, Core};
use crate::error::{Error, Result};
use crate::gpu::{self, VisibleGpu};
use crate::graphs::GRAPHS;
use crate::green::{DEFAULT_QUEUES, GREENS, Green, MARK, QueueWish, whole};
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::multiprocessors::Multiprocessors;
use crate::process;
use crate::queues::Joint;
use crate::stream::{STREAMS, StreamTarget};

/// The descriptors that programs made, which stay.
static DESCRIPTORS: Registry<Descriptor> = Registry::new(Kind::Descriptor, Error::INVALID_VALUE);

/// The resources of a green context.
#[derive(Debug)]
struct Descriptor {
    device: i32,
    multiprocessors: Option<Multiprocessors>,
    queues: QueueWish,
}

/// Resources of a program, one after the other.
#[derive(Default)]
struct GatheredResources {
    device: Option<i32>,
    sets: Vec<Multiprocessors>,
    queues: Option<QueueWish>,
}

impl GatheredResources {
    fn of_device(&mut self, device: i32) -> Result {
        if *self.device.get_or_insert(device) == device {
            Ok(())
        } else {
            Err(Error::INVALID_RESOURCE_CONFIGURATION)
        }
    }

    fn add(&mut self, resource: &DevResource) -> Result {
        let (device, wish) = match resource.kind {
            kind::SM => {
                let set = Multiprocessors::read(resource, gpu::at)?;
                self.of_device(set.device())?;
                self.sets.push(set);
                return Ok(());
            }
            kind::WORKQUEUE_CONFIG => {
                let (device, limit, scope) = resource.queues();
                (device, QueueWish { limit, scope })
            }
            kind::WORKQUEUE => {
                let [mark, device, limit, scope, ..] = resource.private;
                if mark != MARK {
                    return Err(Error::INVALID_VALUE);
                }
                (device.cast_signed(), QueueWish { limit, scope })
            }
            _ => return Err(Error::INVALID_RESOURCE_TYPE),
        };
        if wish.limit == 0 || wish.scope > LAST_SCOPE || gpu::at(device).is_err() {
            return Err(Error::INVALID_VALUE);
        }
        self.of_device(device)?;
        match self.queues.replace(wish) {
            None => Ok(()),
            Some(_) => Err(Error::INVALID_RESOURCE_CONFIGURATION),
        }
    }
}

/// `cuDevResourceGenerateDesc`.
pub(crate) fn describe(resources: impl Iterator<Item = Result<DevResource>>) -> Result<u64> {
    let mut gathered = GatheredResources::default();
    for resource in resources {
        gathered.add(&resource?)?;
    }
    let GatheredResources { device, sets, queues } = gathered;
    let descriptor = Descriptor {
        device: device.ok_or(Error::INVALID_VALUE)?,
        multiprocessors: if sets.is_empty() { None } else { Some(Multiprocessors::join(&sets)?) },
        queues: queues.unwrap_or(DEFAULT_QUEUES),
    };
    Ok(DESCRIPTORS.insert_with(|_| descriptor)?.0)
}

/// Applies a rule of captures to each stream of a green context.
pub(crate) fn refuse_captures(green: &Green) -> Result {
    if !GRAPHS.is_capturing() {
        return Ok(());
    }
    let streams = lock(&green.streams).clone();
    // Also after an error: the captures of all of them become invalid.
    let mut refused = Ok(());
    for stream in streams.into_iter().filter_map(|handle| STREAMS.get(handle).ok()) {
        refused = refused.and(GRAPHS.refuse(StreamTarget::of(&stream).facts()));
    }
    refused
}

/// `cuGreenCtxCreate`.
pub(crate) fn create(descriptor: u64, gpu: &'static VisibleGpu, flags: u32) -> Result<u64> {
    // No descriptor is that of the whole device.
    let descriptor = match descriptor {
        0 => Arc::new(Descriptor { device: gpu.ordinal, multiprocessors: None, queues: DEFAULT_QUEUES }),
        given => DESCRIPTORS.get(given)?,
    };
    if flags & !DEFAULT_STREAM != 0 || descriptor.device != gpu.ordinal {
        return Err(Error::INVALID_VALUE);
    }
    let primary = process::driver()?.primary(gpu.ordinal)?;
    let context = primary.retain(Retainer::GreenContext)?;
    let made = context.core().and_then(|core| make(&descriptor, &core, flags));
    if made.is_err() {
        primary.release(Retainer::GreenContext, Error::UNKNOWN)?;
    }
    made
}

fn make(descriptor: &Descriptor, core: &Arc<Core>, flags: u32) -> Result<u64> {
    core.health.check()?;
    let set = descriptor.multiprocessors.as_ref().map(Multiprocessors::in_context);
    let set = set.unwrap_or_else(|| whole(core.gpu));
    let has_default_stream = flags & DEFAULT_STREAM != 0;
    let of = (&core.queues, &core.health);
    let green = Green::register(core.gpu, of, set, descriptor.queues, has_default_stream)?;
    green.seen_as(Context::register_green(core, &green)?.handle);
    lock(&core.greens).push(green.handle);
    Ok(green.handle)
}

/// `cuGreenCtxDestroy`: waits for its work, and releases the primary context. Its streams are detached.
pub(crate) fn destroy(handle: u64) -> Result {
    let green = GREENS.get(handle)?;
    // This makes their captures invalid; that it found some is no error of this call.
    let _ = refuse_captures(&green);
    if !green.end() {
        return Err(Error::INVALID_CONTEXT);
    }
    green.queues.drain();
    if let Some(default) = green.default {
        green.queues.let_go(default);
    }
    green.queues.retire_records();
    let core = CONTEXTS.remove(green.view())?.take_core().ok_or(Error::INVALID_CONTEXT)?;
    lock(&core.greens).retain(|other| *other != handle);
    process::driver()?.primary(green.gpu.ordinal)?.release(Retainer::GreenContext, Error::INVALID_CONTEXT)
}

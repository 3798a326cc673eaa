//! Green contexts: a part of a device's multiprocessors, and the queues whose launches have it.
//!
//! The object behind a handle. It has no memory, modules or events of its own: all of these are the primary context's. As a context it is
//! a second `Context` with the primary context's core. All its streams are non-blocking.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use sluice_cuda_abi::resources::{DevResource, kind};

use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::handles::{Kind, Registry};
use crate::health::Health;
use crate::multiprocessors::{Granularity, Multiprocessors};
use crate::queues::{PartQueues, Queues};
use crate::schedule::Key;

/// All green contexts of the process.
pub(crate) static GREENS: Registry<Green> = Registry::new(Kind::Green, Error::INVALID_CONTEXT);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// The first private word of work queues.
pub(crate) const MARK: u32 = 0x7175_6575;
/// Workloads at a time, as many as a driver has connections by default.
const CONNECTIONS: u32 = 8;

/// Work queues as a program wants them. They change nothing on this device, which has one queue for each stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueWish {
    pub(crate) limit: u32,
    pub(crate) scope: u32,
}

pub(crate) const DEFAULT_QUEUES: QueueWish = QueueWish { limit: CONNECTIONS, scope: 0 };

/// A green context.
pub(crate) struct Green {
    pub(crate) handle: u64,
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) gpu: &'static VisibleGpu,
    pub(crate) health: Arc<Health>,
    pub(crate) multiprocessors: Multiprocessors,
    queue_wish: QueueWish,
    /// Its handle as a context.
    view: AtomicU64,
    pub(crate) queues: PartQueues,
    /// The queue of its default stream, if it has one.
    pub(crate) default: Option<Key>,
    /// Streams that the program created.
    pub(crate) streams: Mutex<Vec<u64>>,
    gone: AtomicBool,
}

impl Green {
    /// An error if the green context was destroyed; then its streams are detached.
    pub(crate) fn attached(&self) -> Result {
        if self.gone.load(Acquire) { Err(Error::STREAM_DETACHED) } else { Ok(()) }
    }

    /// Its handle as a context.
    pub(crate) fn view(&self) -> u64 {
        self.view.load(Acquire)
    }

    /// Sets its handle as a context.
    pub(crate) fn seen_as(&self, view: u64) {
        self.view.store(view, Release);
    }

    /// Takes it out of use; `false` if another thread did so.
    pub(crate) fn end(&self) -> bool {
        // Only the thread that ends it finds its handle.
        !self.gone.swap(true, AcqRel) && GREENS.remove(self.handle).is_ok()
    }

    /// Registers a green context on some multiprocessors.
    pub(crate) fn register(
        gpu: &'static VisibleGpu,
        (queues, health): (&Arc<Queues>, &Arc<Health>),
        multiprocessors: Multiprocessors,
        queue_wish: QueueWish,
        has_default_stream: bool,
    ) -> Result<Arc<Green>> {
        let queues = PartQueues::new(Arc::clone(queues));
        let default = has_default_stream.then(|| queues.open(0));
        let make = |handle| Green {
            handle,
            id: NEXT_ID.fetch_add(1, AcqRel),
            gpu,
            health: Arc::clone(health),
            multiprocessors,
            queue_wish,
            view: AtomicU64::new(0),
            queues,
            default,
            streams: Mutex::default(),
            gone: AtomicBool::new(false),
        };
        Ok(GREENS.insert_with(make)?.1)
    }
}

/// The granularity of groups of a GPU.
pub(crate) fn granularity(gpu: &VisibleGpu) -> Granularity {
    Granularity::of(gpu.capability().sm())
}

/// All multiprocessors of a GPU.
pub(crate) fn whole(gpu: &VisibleGpu) -> Multiprocessors {
    Multiprocessors::of(gpu, granularity(gpu))
}

fn queues(device: i32, wish: QueueWish) -> DevResource {
    DevResource::new(kind::WORKQUEUE_CONFIG, &[], &[device.cast_unsigned(), wish.limit, wish.scope])
}

fn existing_queues(device: i32, wish: QueueWish) -> DevResource {
    DevResource::new(kind::WORKQUEUE, &[MARK, device.cast_unsigned(), wish.limit, wish.scope], &[])
}

/// `cuDeviceGetDevResource`.
pub(crate) fn of_device(gpu: &VisibleGpu, kind: u32) -> Result<DevResource> {
    match kind {
        kind::SM => Ok(whole(gpu).resource()),
        kind::WORKQUEUE_CONFIG => Ok(queues(gpu.ordinal, DEFAULT_QUEUES)),
        _ => Err(Error::INVALID_RESOURCE_TYPE),
    }
}

/// The resources of a context, green or not.
pub(crate) fn of_context(gpu: &VisibleGpu, green: Option<&Green>, kind: u32) -> Result<DevResource> {
    let wish = green.map_or(DEFAULT_QUEUES, |green| green.queue_wish);
    match (kind, green) {
        (kind::SM, Some(green)) => Ok(green.multiprocessors.resource()),
        (kind::WORKQUEUE_CONFIG, _) => Ok(queues(gpu.ordinal, wish)),
        (kind::WORKQUEUE, _) => Ok(existing_queues(gpu.ordinal, wish)),
        _ => of_device(gpu, kind),
    }
}

//! The entry points for resources of devices, and for green contexts.

use std::sync::Arc;

use sluice_cuda_abi::resources::{DevResource, GroupParameters, kind};

use crate::context::{self, CONTEXTS, Core};
use crate::error::{Error, Result};
use crate::event::{self, EVENTS};
use crate::ffi::{In, Out};
use crate::gpu;
use crate::graphs::GRAPHS;
use crate::green::{self, GREENS, Green};
use crate::green_contexts::{create, describe, destroy, refuse_captures};
use crate::multiprocessors::{Multiprocessors, Parts};
use crate::stream::{self, Implicit, target};

/// Groups of one call, at most: more than any device has.
const MOST_GROUPS: u32 = 256;

/// The core of a green context's primary context.
fn core_of(green: &Green) -> Result<Arc<Core>> {
    CONTEXTS.get(green.view())?.core()
}

fn store(parts: &Parts, result: Out<DevResource>, remainder: Out<DevResource>) -> Result {
    if result.is_given() {
        for (index, group) in parts.groups.iter().enumerate() {
            result.set_at(index, group.resource())?;
        }
    }
    remainder.set_if_given(parts.remainder.as_ref().map_or(DevResource::INVALID, Multiprocessors::resource));
    Ok(())
}

calls! {
    fn cuDeviceGetDevResource(device: i32, resource: Out<DevResource>, kind: u32) {
        let gpu = gpu::at(device)?;
        resource.required()?;
        resource.set(green::of_device(gpu, kind)?)
    }

    fn cuCtxGetDevResource(context: u64, resource: Out<DevResource>, kind: u32) {
        let context = CONTEXTS.get(context)?;
        context.core()?.health.check()?;
        resource.required()?;
        resource.set(green::of_context(context.gpu, context.green().as_deref(), kind)?)
    }

    fn cuGreenCtxGetDevResource(handle: u64, resource: Out<DevResource>, kind: u32) {
        let green = GREENS.get(handle)?;
        resource.required()?;
        resource.set(green::of_context(green.gpu, Some(&*green), kind)?)
    }

    fn cuDevSmResourceSplitByCount(
        result: Out<DevResource>, count: Out<u32>, input: In<DevResource>, remainder: Out<DevResource>, flags: u32,
        minimum: u32,
    ) {
        let set = Multiprocessors::read(&input.get()?, gpu::at)?;
        let most = if result.is_given() { count.get()? } else { count.required().map(|_| u32::MAX)? };
        let parts = set.by_count(most, minimum, flags, green::granularity(gpu::at(set.device())?))?;
        store(&parts, result, remainder)?;
        count.set(u32::try_from(parts.groups.len()).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuDevSmResourceSplit(
        result: Out<DevResource>, count: u32, input: In<DevResource>, remainder: Out<DevResource>, flags: u32,
        parameters: Out<GroupParameters>,
    ) {
        let set = Multiprocessors::read(&input.get()?, gpu::at)?;
        if flags != 0 || !(1..=MOST_GROUPS).contains(&count) {
            return Err(Error::INVALID_VALUE);
        }
        let mut groups = parameters.required()?.input().list(count as usize)?;
        let parts = set.groups(&mut groups, !result.is_given(), green::granularity(gpu::at(set.device())?))?;
        store(&parts, result, remainder)?;
        groups.into_iter().enumerate().try_for_each(|(index, group)| parameters.set_at(index, group))
    }

    fn cuDevResourceGenerateDesc(place: Out<u64>, resources: In<DevResource>, count: u32) {
        place.required()?;
        if count > MOST_GROUPS {
            return Err(Error::INVALID_VALUE);
        }
        place.set(describe((0..count as usize).map(|index| resources.get_at(index)))?)
    }

    fn cuGreenCtxCreate(place: Out<u64>, descriptor: u64, device: i32, flags: u32) {
        place.required()?;
        place.set(create(descriptor, gpu::at(device)?, flags)?)
    }

    fn cuGreenCtxDestroy(handle: u64) { destroy(handle) }

    fn cuCtxFromGreenCtx(place: Out<u64>, handle: u64) {
        let green = GREENS.get(handle)?;
        place.set(green.view())
    }

    fn cuGreenCtxStreamCreate(place: Out<u64>, handle: u64, flags: u32, priority: i32) {
        let green = GREENS.get(handle)?;
        place.required()?;
        if flags != stream::NON_BLOCKING {
            return Err(Error::INVALID_VALUE);
        }
        green.health.check()?;
        place.set(stream::create_green(&green, &core_of(&green)?, priority)?)
    }

    fn cuGreenCtxRecordEvent(handle: u64, event: u64) {
        let green = GREENS.get(handle)?;
        green.health.check()?;
        let event = event::of_context(event, &*core_of(&green)?)?;
        refuse_captures(&green)?;
        event.record_behind(&green.queues);
        Ok(())
    }

    fn cuGreenCtxWaitEvent(handle: u64, event: u64) {
        let green = GREENS.get(handle)?;
        green.health.check()?;
        let found = EVENTS.get(event)?;
        GRAPHS.check_event(event)?;
        refuse_captures(&green)?;
        found.hold(&green.queues);
        Ok(())
    }

    fn cuStreamGetGreenCtx(stream: u64, place: Out<u64>) {
        place.required()?;
        let target = target(stream, Implicit::Legacy)?;
        place.set(target.green.map_or(0, |green| green.handle))
    }

    fn cuGreenCtxGetId(handle: u64, id: Out<u64>) {
        let green = match handle {
            0 => {
                let context = context::current()?.ok_or(Error::INVALID_CONTEXT)?;
                let green = context.green().ok_or(Error::INVALID_CONTEXT)?;
                context.core().map(|_| green)?
            }
            handle => GREENS.get(handle)?,
        };
        id.set(green.id)
    }
}

twins! {
    fn cuStreamGetDevResource, cuStreamGetDevResource_ptsz(
        implicit; stream: u64, resource: Out<DevResource>, kind: u32,
    ) {
        let target = target(stream, implicit)?;
        resource.required()?;
        if kind != kind::SM {
            return Err(Error::INVALID_RESOURCE_TYPE);
        }
        resource.set(green::of_context(target.core.gpu, target.green.as_deref(), kind)?)
    }
}

//! The module helper's part of green contexts.
//!
//! A green context shares the memory, code and modules of a primary context, so its grant is only one for the queues that the driver makes.
//! The driver keeps every descriptor of resources until the process ends, so the same resources make one descriptor. A descriptor with the
//! queues of a context is refused after the end of that context.

use super::ModuleHelper;
use crate::{
    helper::jobs::{ModuleCaller, module},
    resources::{ResolvedOrigin, ResolvedQueues, ResolvedResources},
    session::objects::ContextRef,
};
use sluice_cuda_abi::resources::DEFAULT_STREAM;
use sluice_driver::{Code, Handle, code};
use sluice_messages::custody::{Growth, UNIT};
use sluice_protocol::{
    limits,
    resources::{Pick, SmSplit},
};
use sluice_runtime::limited;
use std::{collections::BTreeMap, sync::Arc};

/// Device memory that a driver takes for the queues of a green context.
const BYTES: u64 = UNIT;

/// The origin of a [`SmName`].
#[derive(Debug, PartialEq, Eq)]
enum SmBase {
    Device,
    /// A green context that was made with these multiprocessors.
    Green(Arc<SmName>),
}

/// The multiprocessors of a descriptor, in terms that outlive green contexts: otherwise a program that describes the resources of each
/// new green context would make a descriptor in each round.
#[derive(Debug, PartialEq, Eq)]
struct SmName {
    splits: Vec<(SmSplit, Pick)>,
    more: Vec<Pick>,
    base: SmBase,
}

/// A green context of the driver.
#[derive(Debug)]
struct LiveGreen {
    context: ContextRef,
    device: i32,
    multiprocessors: Arc<SmName>,
    /// The bytes that were granted for it.
    bytes: u64,
}

/// A descriptor of the driver.
#[derive(Debug)]
struct LiveDescriptor {
    handle: Handle,
    device: i32,
    multiprocessors: Arc<SmName>,
    queues: ResolvedQueues,
    /// True once the context whose queues it has may be gone. It still counts, because the driver keeps it.
    ended: bool,
}

/// The green contexts of a session.
#[derive(Debug, Default)]
pub(super) struct GreenContexts {
    live: BTreeMap<Handle, LiveGreen>,
    /// The guest names a descriptor by its place.
    descriptors: Vec<LiveDescriptor>,
}

fn of_same_device(device: i32, other: i32) -> Result<(), Code> {
    if device == other { Ok(()) } else { Err(code::INVALID_RESOURCE_CONFIGURATION) }
}

impl GreenContexts {
    /// A green context of `device`.
    fn of_device(&self, green: Handle, device: i32) -> Result<&LiveGreen, Code> {
        let green = self.live.get(&green).ok_or(code::INVALID_VALUE)?;
        of_same_device(green.device, device)?;
        Ok(green)
    }

    /// Checks that these resources are of `device`, and names their multiprocessors.
    fn name(&self, resources: &ResolvedResources, device: i32) -> Result<Arc<SmName>, Code> {
        match resources.queues {
            ResolvedQueues::Any | ResolvedQueues::Config { .. } => {}
            ResolvedQueues::OfPrimary { device: other, .. } => of_same_device(other, device)?,
            ResolvedQueues::OfGreen(green) => drop(self.of_device(green, device)?),
        }
        let ResolvedResources { splits, more, .. } = resources;
        let base = match resources.origin {
            ResolvedOrigin::Device(other) => {
                of_same_device(other, device)?;
                SmBase::Device
            }
            ResolvedOrigin::Green(green) => {
                let whole = Arc::clone(&self.of_device(green, device)?.multiprocessors);
                if splits.is_empty() && more.is_empty() {
                    return Ok(whole);
                }
                SmBase::Green(whole)
            }
        };
        Ok(Arc::new(SmName { splits: splits.clone(), more: more.clone(), base }))
    }

    /// Refuses the descriptors with these queues from now on.
    fn end_descriptors(&mut self, with: impl Fn(ResolvedQueues) -> bool) {
        for descriptor in self.descriptors.iter_mut().filter(|descriptor| with(descriptor.queues)) {
            descriptor.ended = true;
        }
    }
}

impl ModuleHelper {
    pub(super) fn describe_resources(&mut self, args: module::resource_descriptor) -> Result<u32, Code> {
        let module::resource_descriptor { device, resources } = args;
        let multiprocessors = self.greens.name(&resources, device)?;
        let queues = resources.queues;
        let known = |known: &LiveDescriptor| {
            !known.ended
                && (known.device, known.queues) == (device, queues)
                && known.multiprocessors == multiprocessors
        };
        let place = match self.greens.descriptors.iter().position(known) {
            Some(place) => place,
            None if self.greens.descriptors.len() >= limits::RESOURCE_DESCRIPTORS => {
                return Err(code::OUT_OF_MEMORY);
            }
            None => {
                let mut found = resources.all(&self.driver, device)?;
                let handle = self.driver.resource_descriptor(&mut found)?;
                let descriptor = LiveDescriptor { handle, device, multiprocessors, queues, ended: false };
                self.greens.descriptors.push(descriptor);
                self.greens.descriptors.len() - 1
            }
        };
        u32::try_from(place).map_err(|_| code::OUT_OF_MEMORY)
    }

    pub(super) fn create_green(
        &mut self,
        caller: ModuleCaller,
        args: module::green_create,
    ) -> Result<(), Code> {
        // The caller is the primary context, as the call names it.
        let (_, device) = caller.ok_or(code::INVALID_CONTEXT)?;
        let context = Some(args.primary).filter(|context| context.primary).ok_or(code::INVALID_CONTEXT)?;
        let context = context.context;
        let known = self.greens.descriptors.get(args.descriptor as usize);
        let known =
            known.filter(|known| known.device == device && !known.ended).ok_or(code::INVALID_VALUE)?;
        let (descriptor, multiprocessors) = (known.handle, Arc::clone(&known.multiprocessors));
        // Drivers before CUDA 13 make no green context without a default stream.
        let create = || self.driver.cuGreenCtxCreate(descriptor, device, DEFAULT_STREAM);
        let reason = (Growth::Queues, device);
        let (handle, bytes) = self.granted(reason, Some(context), BYTES, code::OUT_OF_MEMORY, create)?;
        self.greens.live.insert(handle, LiveGreen { context, device, multiprocessors, bytes });
        args.green.fill((handle, context));
        Ok(())
    }

    pub(super) fn destroy_green(&mut self, handle: Handle) -> Result<(), Code> {
        let &LiveGreen { context, device, bytes, .. } =
            self.greens.live.get(&handle).ok_or(code::INVALID_HANDLE)?;
        self.greens.end_descriptors(|queues| queues == ResolvedQueues::OfGreen(handle));
        self.driver.cuGreenCtxDestroy(handle)?;
        // One that the driver did not destroy stays here until the end of its context.
        self.greens.live.remove(&handle);
        self.memory_source.driver_shrank(device, Some(context), bytes);
        Ok(())
    }

    /// Destroys the green contexts of a context that is being destroyed: each holds the primary context.
    pub(super) fn end_greens_of(&mut self, ending: ContextRef) {
        self.greens.end_descriptors(
            |queues| matches!(queues, ResolvedQueues::OfPrimary { context, .. } if context == ending),
        );
        let of_context = self.greens.live.extract_if(.., |_, green| green.context == ending);
        let handles: Vec<_> = of_context.map(|(handle, _)| handle).collect();
        for handle in handles {
            self.greens.end_descriptors(|queues| queues == ResolvedQueues::OfGreen(handle));
            if let Err(failed) = self.driver.cuGreenCtxDestroy(handle) {
                limited!(
                    warn,
                    code = failed,
                    "the driver did not destroy a green context; its primary context stays"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C106
    #[test]
    fn resources_of_another_device_are_refused() {
        let context = ContextRef { handle: 1, serial: 1 };
        let multiprocessors = Arc::new(SmName { splits: Vec::new(), more: Vec::new(), base: SmBase::Device });
        let green = LiveGreen { context, device: 1, multiprocessors, bytes: 0 };
        let known = GreenContexts { live: BTreeMap::from([(7, green)]), ..GreenContexts::default() };
        let (any, of_primary) = (ResolvedQueues::Any, ResolvedQueues::OfPrimary { context, device: 1 });
        let wrong = [
            (ResolvedOrigin::Device(1), any),
            (ResolvedOrigin::Green(7), any),
            (ResolvedOrigin::Device(0), of_primary),
            (ResolvedOrigin::Device(0), ResolvedQueues::OfGreen(7)),
        ];
        for (origin, queues) in wrong {
            let resources = ResolvedResources { origin, splits: Vec::new(), more: Vec::new(), queues };
            assert_eq!(known.name(&resources, 0), Err(code::INVALID_RESOURCE_CONFIGURATION), "{resources:?}");
        }
        for (origin, queues) in wrong.map(|(_, queues)| (ResolvedOrigin::Green(7), queues)) {
            let resources = ResolvedResources { origin, splits: Vec::new(), more: Vec::new(), queues };
            assert!(known.name(&resources, 1).is_ok(), "{resources:?}");
        }
    }
}

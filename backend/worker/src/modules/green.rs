//! The module helper's part of green contexts.
//!
//! A green context shares the memory, code and modules of a primary context, so its grant is only one for the queues that the driver makes.
//! The driver keeps every descriptor of resources until the process ends, so the same description makes one descriptor.

use super::{ModuleCaller, ModuleHelper};
use crate::{helper::jobs::module, session::objects::ContextRef};
use sluice_driver::{Code, Handle, code};
use sluice_messages::custody::{Growth, UNIT};
use sluice_protocol::limits;
use sluice_runtime::limited;
use std::collections::BTreeMap;

/// Device memory that a driver takes for the queues of a green context.
const BYTES: u64 = UNIT;

/// A green context of the driver.
#[derive(Clone, Copy, Debug)]
struct LiveGreen {
    context: ContextRef,
    device: i32,
    /// The bytes that were granted for it.
    bytes: u64,
}

/// A descriptor of the driver.
#[derive(Debug)]
struct LiveDescriptor {
    handle: Handle,
    device: i32,
    /// The description from which it was made.
    name: Vec<u8>,
}

/// The green contexts of a session.
#[derive(Debug, Default)]
pub(super) struct GreenContexts {
    live: BTreeMap<Handle, LiveGreen>,
    /// The guest names a descriptor by its place.
    descriptors: Vec<LiveDescriptor>,
}

impl ModuleHelper {
    pub(super) fn describe_resources(
        &mut self,
        caller: ModuleCaller,
        args: module::resource_descriptor,
    ) -> Result<u32, Code> {
        let module::resource_descriptor { device, resources } = args;
        let known = |known: &LiveDescriptor| known.device == device && known.name == resources.name;
        let place = match self.greens.descriptors.iter().position(known) {
            Some(place) => place,
            None if self.greens.descriptors.len() >= limits::RESOURCE_DESCRIPTORS => {
                return Err(code::OUT_OF_MEMORY);
            }
            None => {
                let context = caller.map(|(context, _)| context.handle);
                let mut found = resources.all(&self.driver, context, device)?;
                let handle = self.driver.resource_descriptor(&mut found)?;
                let descriptor = LiveDescriptor { handle, device, name: resources.name };
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
        let context = args.primary;
        let known = self.greens.descriptors.get(args.descriptor as usize);
        let descriptor = known.filter(|known| known.device == device).ok_or(code::INVALID_VALUE)?.handle;
        let create = || self.driver.green_create(descriptor, device);
        let reason = (Growth::Queues, device);
        let (handle, bytes) = self.granted(reason, Some(context), BYTES, code::OUT_OF_MEMORY, create)?;
        self.greens.live.insert(handle, LiveGreen { context, device, bytes });
        args.green.fill((handle, context));
        Ok(())
    }

    pub(super) fn destroy_green(&mut self, handle: Handle) -> Result<(), Code> {
        let LiveGreen { context, device, bytes } =
            self.greens.live.remove(&handle).ok_or(code::INVALID_HANDLE)?;
        self.driver.green_destroy(handle)?;
        self.memory_source.driver_shrank(device, Some(context), bytes);
        Ok(())
    }

    /// Destroys the green contexts of a context that is being destroyed: each holds the primary context.
    pub(super) fn end_greens_of(&mut self, context: ContextRef) {
        let ending: Vec<_> = self
            .greens
            .live
            .extract_if(.., |_, green| green.context == context)
            .map(|(handle, _)| handle)
            .collect();
        for handle in ending {
            if let Err(failed) = self.driver.green_destroy(handle) {
                limited!(
                    warn,
                    code = failed,
                    "the driver did not destroy a green context; its primary context stays"
                );
            }
        }
    }
}

//! Launches: checks of parameters against the layout, and of attributes against those a guest may request.

use super::{Dispatcher, Submitted};
use crate::{
    helper::jobs::Question,
    memory::helper::resident_threads,
    session::objects,
    submit::{Operation, Payload, local::Local},
};
use sluice_driver::{Code, Launch, LaunchAttribute, code};
use sluice_protocol::{
    calls::wire,
    handle::{Event, Function, Id},
    limits,
    record::Header,
};

/// `CUlaunchAttributeID`s by name.
mod id {
    pub(super) const IGNORE: u32 = 0;
    pub(super) const ACCESS_POLICY_WINDOW: u32 = 1;
    pub(super) const COOPERATIVE: u32 = 2;
    pub(super) const CLUSTER_DIMENSION: u32 = 4;
    pub(super) const CLUSTER_SCHEDULING: u32 = 5;
    pub(super) const PROGRAMMATIC_SERIALIZATION: u32 = 6;
    pub(super) const PROGRAMMATIC_EVENT: u32 = 7;
    pub(super) const PRIORITY: u32 = 8;
    pub(super) const MEM_SYNC_DOMAIN_MAP: u32 = 9;
    pub(super) const MEM_SYNC_DOMAIN: u32 = 10;
    pub(super) const PREFERRED_CLUSTER_DIMENSION: u32 = 11;
    pub(super) const LAUNCH_COMPLETION_EVENT: u32 = 12;
    pub(super) const SHARED_MEMORY_CARVEOUT: u32 = 14;
}

/// Bytes of an attribute on the wire: its id as a word, then its value.
const BYTES: usize = 72;

/// The attributes of one launch, in place.
struct AttributeList {
    list: [LaunchAttribute; limits::LAUNCH_ATTRIBUTES + 1],
    count: usize,
}

impl AttributeList {
    const fn new() -> AttributeList {
        AttributeList { list: [LaunchAttribute::NONE; limits::LAUNCH_ATTRIBUTES + 1], count: 0 }
    }

    fn push(&mut self, attribute: LaunchAttribute) -> Result<(), Code> {
        *self.list.get_mut(self.count).ok_or(code::INVALID_VALUE)? = attribute;
        self.count += 1;
        Ok(())
    }

    fn as_slice(&self) -> &[LaunchAttribute] {
        self.list.get(..self.count).unwrap_or_default()
    }
}

impl Dispatcher {
    pub(super) fn launch_kernel(
        &mut self,
        header: &Header,
        args: &wire::launch::Args<'_>,
    ) -> Result<Submitted, Code> {
        let operation = self.checked_launch(header, args);
        let local = if operation.is_ok() { self.local(header, args.function) } else { None };
        let parameters = args.parameters.0;
        if args.attributes.0.is_empty() && !args.cooperative {
            return self.growing_work(header, operation, Payload { attributes: &[], parameters }, local);
        }
        let mut list = AttributeList::new();
        let read = self.read_attributes(args.attributes.0, &mut list).and_then(|()| {
            if args.cooperative {
                list.push(LaunchAttribute { id: id::COOPERATIVE, pad: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] })?;
            }
            Ok(())
        });
        let operation = read.and(operation);
        let local = local.filter(|_| operation.is_ok());
        self.growing_work(header, operation, Payload { attributes: list.as_slice(), parameters }, local)
    }

    /// The local memory for which the driver has no room yet, if the function needs some.
    fn local(&mut self, header: &Header, function: Id<Function>) -> Option<Local> {
        let each = self.function(function).ok()?.local;
        let context = self.target(header)?.context;
        if each == 0 || self.shared.gate.local.covers(context, each) {
            return None;
        }
        let device = self.context(header).ok()?.device;
        let bytes = u64::from(each).saturating_mul(resident_threads(&self.shared.driver, device));
        Some(Local { device, each, bytes })
    }

    fn checked_launch(&self, header: &Header, args: &wire::launch::Args<'_>) -> Result<Operation, Code> {
        let function = self.function(args.function)?;
        let elsewhere = function.context.is_some()
            && function.context != self.target(header).map(|target| target.context);
        if elsewhere {
            return Err(code::INVALID_HANDLE);
        }
        if args.parameters.0.len() != function.parameters {
            return Err(code::INVALID_VALUE);
        }
        Ok(Operation::Launch(Launch {
            function: function.code.handle(),
            grid: args.grid,
            block: args.block,
            shared: args.shared,
        }))
    }

    /// Reads the attributes of a record. Events are translated, ranges checked; what hands out something that a guest
    /// cannot have (handles for updates from the device) is refused.
    fn read_attributes(&self, bytes: &[u8], list: &mut AttributeList) -> Result<(), Code> {
        if !bytes.len().is_multiple_of(BYTES) {
            return Err(code::INVALID_VALUE);
        }
        for attribute in bytes.chunks_exact(BYTES) {
            let mut words = [0_u64; 9];
            for (word, chunk) in words.iter_mut().zip(attribute.chunks_exact(8)) {
                *word = chunk.try_into().map_or(0, u64::from_le_bytes);
            }
            let [id, mut value @ ..] = words;
            let id = u32::try_from(id).map_err(|_| code::INVALID_VALUE)?;
            match id {
                id::IGNORE => continue,
                id::COOPERATIVE
                | id::CLUSTER_DIMENSION
                | id::CLUSTER_SCHEDULING
                | id::PROGRAMMATIC_SERIALIZATION
                | id::PRIORITY
                | id::MEM_SYNC_DOMAIN_MAP
                | id::MEM_SYNC_DOMAIN
                | id::PREFERRED_CLUSTER_DIMENSION
                | id::SHARED_MEMORY_CARVEOUT => {}
                id::PROGRAMMATIC_EVENT | id::LAUNCH_COMPLETION_EVENT => {
                    let event = Id::<Event>::from_raw(value[0]).ok_or(code::INVALID_HANDLE)?;
                    value[0] = self.events.get(event).ok_or(code::INVALID_HANDLE)?.handle;
                }
                // Base and number of bytes come first.
                id::ACCESS_POLICY_WINDOW if value[1] > 0 => {
                    self.map.device(value[0], value[1])?;
                }
                id::ACCESS_POLICY_WINDOW => {}
                _ => return Err(code::NOT_SUPPORTED),
            }
            list.push(LaunchAttribute { id, pad: 0, value })?;
        }
        Ok(())
    }

    pub(super) fn clusters(
        &self,
        function: &objects::Function,
        args: &wire::occupancy_clusters::Args<'_>,
    ) -> Result<Question, Code> {
        let mut list = AttributeList::new();
        self.read_attributes(args.attributes.0, &mut list)?;
        Ok(Question::Clusters {
            potential: args.potential,
            launch: Launch {
                function: function.code.handle(),
                grid: args.grid,
                block: args.block,
                shared: args.shared,
            },
            attributes: list.as_slice().to_vec(),
        })
    }
}

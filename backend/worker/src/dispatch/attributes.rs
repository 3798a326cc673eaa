//! The attributes of launches, checked against those that a guest may request.

use super::Dispatcher;
use sluice_driver::{Code, LaunchAttribute, code};
use sluice_protocol::{
    field::LaunchAttributes,
    handle::{Event, Id},
    limits,
};

/// `CUlaunchAttributeID`s by name.
mod id {
    pub(super) const IGNORE: u32 = 0;
    pub(super) const ACCESS_POLICY_WINDOW: u32 = 1;
    pub(super) const COOPERATIVE: u32 = 2;
    pub(super) const CLUSTER_DIMENSION: u32 = 4;
    pub(super) const CLUSTER_SCHEDULING: u32 = 5;
    pub(super) const PROGRAMMATIC_SERIALIZATION: u32 = 6;
    pub(super) const PRIORITY: u32 = 8;
    pub(super) const MEM_SYNC_DOMAIN_MAP: u32 = 9;
    pub(super) const MEM_SYNC_DOMAIN: u32 = 10;
    pub(super) const PREFERRED_CLUSTER_DIMENSION: u32 = 11;
    pub(super) const SHARED_MEMORY_CARVEOUT: u32 = 14;
    pub(super) const NVLINK_SCHEDULING: u32 = 16;
    pub(super) const PORTABLE_CLUSTERS: u32 = 17;
    pub(super) const SHARED_MEMORY_MODE: u32 = 18;
}

/// The attributes of one launch, stored in place.
pub(super) struct AttributeList {
    list: [LaunchAttribute; limits::LAUNCH_ATTRIBUTES + 1],
    count: usize,
}

impl AttributeList {
    pub(super) const fn new() -> AttributeList {
        AttributeList { list: [LaunchAttribute::NONE; limits::LAUNCH_ATTRIBUTES + 1], count: 0 }
    }

    pub(super) fn push_cooperative(&mut self) -> Result<(), Code> {
        self.push(LaunchAttribute { id: id::COOPERATIVE, pad: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] })
    }

    fn push(&mut self, attribute: LaunchAttribute) -> Result<(), Code> {
        *self.list.get_mut(self.count).ok_or(code::INVALID_VALUE)? = attribute;
        self.count += 1;
        Ok(())
    }

    pub(super) fn as_slice(&self) -> &[LaunchAttribute] {
        self.list.get(..self.count).unwrap_or_default()
    }
}

impl Dispatcher {
    /// Reads the attributes of a record. Events are translated, ranges checked; an attribute that returns an object which a
    /// guest cannot have (a handle for updates from the device) is refused.
    pub(super) fn read_attributes(
        &self,
        attributes: LaunchAttributes<'_>,
        list: &mut AttributeList,
    ) -> Result<(), Code> {
        if !attributes.0.len().is_multiple_of(LaunchAttributes::EACH) {
            return Err(code::INVALID_VALUE);
        }
        for attribute in attributes.0.chunks_exact(LaunchAttributes::EACH) {
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
                | id::SHARED_MEMORY_CARVEOUT
                | id::NVLINK_SCHEDULING
                | id::PORTABLE_CLUSTERS
                | id::SHARED_MEMORY_MODE => {}
                _ if (LaunchAttribute { id, pad: 0, value }).records_event() => {
                    let event = Id::<Event>::from_raw(value[0]).ok_or(code::INVALID_HANDLE)?;
                    value[0] = self.events.get(event).ok_or(code::INVALID_HANDLE)?.handle;
                }
                id::ACCESS_POLICY_WINDOW => self.check_window(&value)?,
                _ => return Err(code::NOT_SUPPORTED),
            }
            list.push(LaunchAttribute { id, pad: 0, value })?;
        }
        Ok(())
    }

    /// Checks an attribute of a stream, whose value is eight words.
    pub(super) fn check_stream_attribute(&self, attribute: u32, value: &[u64; 8]) -> Result<(), Code> {
        match attribute {
            id::PRIORITY | id::MEM_SYNC_DOMAIN_MAP | id::MEM_SYNC_DOMAIN => Ok(()),
            id::ACCESS_POLICY_WINDOW => self.check_window(value),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Base and bytes are the first words of a window.
    fn check_window(&self, value: &[u64; 8]) -> Result<(), Code> {
        if value[1] > 0 { self.map.device(value[0], value[1]).map(drop) } else { Ok(()) }
    }
}

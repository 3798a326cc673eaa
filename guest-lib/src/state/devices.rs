//! The devices as the program sees them: read once, filtered and ordered by the environment, then answered from this table.

use crate::{
    error::{Error, Result},
    log,
    session::Session,
};
use sluice_cuda_abi::attributes::{
    correct_dependent, guest_mask, reaches_host_memory, registers_host_memory,
};
use sluice_cuda_frontend::{
    atomics::{self, Capabilities},
    environment::{DeviceNames, Environment},
    tables::DeviceIdentity,
};
use sluice_protocol::{calls::wire, field::Ordinal, limits};

/// The attribute ids (`CUdevice_attribute`) that the shim uses.
pub(crate) mod attribute {
    pub(crate) const MAX_THREADS_PER_BLOCK: u32 = 1;
    pub(crate) const MAX_BLOCK_DIM_X: u32 = 2;
    pub(crate) const MAX_GRID_DIM_X: u32 = 5;
    pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK: u32 = 8;
    pub(crate) const TOTAL_CONSTANT_MEMORY: u32 = 9;
    pub(crate) const WARP_SIZE: u32 = 10;
    pub(crate) const MAX_PITCH: u32 = 11;
    pub(crate) const MAX_REGISTERS_PER_BLOCK: u32 = 12;
    pub(crate) const CLOCK_RATE: u32 = 13;
    pub(crate) const TEXTURE_ALIGNMENT: u32 = 14;
    pub(crate) const MULTIPROCESSOR_COUNT: u32 = 16;
    pub(crate) const PCI_BUS_ID: u32 = 33;
    pub(crate) const PCI_DEVICE_ID: u32 = 34;
    pub(crate) const PCI_DOMAIN_ID: u32 = 50;
    pub(crate) const MAX_TEXTURE1D_LINEAR_WIDTH: u32 = 69;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub(crate) const CONCURRENT_MANAGED_ACCESS: u32 = 89;
    pub(crate) const CAN_USE_STREAM_MEM_OPS_V1: u32 = 92;
    pub(crate) const CAN_USE_64_BIT_STREAM_MEM_OPS_V1: u32 = 93;
    pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: u32 = 97;
    pub(crate) const CAN_USE_64_BIT_STREAM_MEM_OPS: u32 = 122;
    pub(crate) const CAN_USE_STREAM_WAIT_VALUE_NOR: u32 = 123;
}

#[derive(Clone)]
pub(crate) struct DeviceInfo {
    /// Its number on the host.
    pub(crate) ordinal: u32,
    /// Its name, without NUL.
    pub(crate) name: Vec<u8>,
    pub(crate) uuid: [u8; 16],
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Range of stream priorities: least, greatest.
    pub(crate) priorities: (i32, i32),
    /// The capabilities of atomic operations on host memory.
    pub(crate) host_atomics: Capabilities,
    attributes: [i32; limits::DEVICE_ATTRIBUTES],
}

impl DeviceInfo {
    /// Value of an attribute, masked to the features that a guest has.
    pub(crate) fn attribute(&self, id: u32) -> Result<i32> {
        // Ids begin at 1 and end, in the newest header, below the table's length.
        if id == 0 {
            return Err(Error::INVALID_VALUE);
        }
        self.attributes.get(id as usize).copied().ok_or(Error::INVALID_VALUE)
    }

    /// The nearest priority of streams that the device has.
    pub(crate) fn clamped_priority(&self, priority: i32) -> i32 {
        let (least, greatest) = self.priorities;
        priority.clamp(greatest.min(least), greatest.max(least))
    }

    /// An attribute that is a limit, never negative.
    pub(crate) fn bound(&self, id: u32) -> u32 {
        self.attribute(id).ok().and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
    }
}

/// The visible devices.
pub(crate) struct Devices {
    list: Vec<DeviceInfo>,
    /// All devices in the host's order, those that are not visible to the program included.
    all: Vec<DeviceInfo>,
    identities: Vec<DeviceIdentity>,
}

impl Devices {
    /// Asks the worker for every device and keeps those that the environment makes visible, in its order.
    pub(crate) fn read(session: &Session, can_register: bool) -> Result<Devices> {
        let mut all = Vec::new();
        for ordinal in 0..session.device_count {
            all.push(read_one(session, ordinal, can_register)?);
        }
        let names: Vec<DeviceNames> = all.iter().map(names).collect();
        let list: Vec<DeviceInfo> = Environment::get()
            .visible(&names)
            .into_iter()
            .filter_map(|index| all.get(index).cloned())
            .collect();
        if list.is_empty() {
            log::info(format_args!("no device is visible"));
        }
        let identity = |device: &DeviceInfo| DeviceIdentity {
            uuid: device.uuid,
            pci_domain: device.attribute(attribute::PCI_DOMAIN_ID).unwrap_or(0),
            pci_bus: device.attribute(attribute::PCI_BUS_ID).unwrap_or(0),
            pci_device: device.attribute(attribute::PCI_DEVICE_ID).unwrap_or(0),
        };
        Ok(Devices { identities: list.iter().map(identity).collect(), list, all })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn count(&self) -> usize {
        self.list.len()
    }

    /// The device of a `CUdevice`.
    pub(crate) fn get(&self, device: i32) -> Result<&DeviceInfo> {
        usize::try_from(device).ok().and_then(|index| self.list.get(index)).ok_or(Error::INVALID_DEVICE)
    }

    /// Any device by its number on the host, visible to the program or not.
    pub(crate) fn any(&self, ordinal: u32) -> Result<&DeviceInfo> {
        self.all.get(ordinal as usize).ok_or(Error::INVALID_DEVICE)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &DeviceInfo> {
        self.list.iter()
    }

    /// The devices that the start-up handshake covers.
    pub(crate) fn identities(&self) -> &[DeviceIdentity] {
        &self.identities
    }
}

fn read_one(session: &Session, ordinal: u32, can_register: bool) -> Result<DeviceInfo> {
    let info = session.sync(0, &wire::device_info::Args { device: Ordinal(ordinal) })?;
    let mut attributes = info.attributes.0;
    // The worker has masked the features that it does not serve; a shim of an older release may serve fewer.
    for (id, value) in (0i32..).zip(attributes.iter_mut()) {
        if let Some(masked) = guest_mask(id) {
            *value = masked;
        }
        if (session.gathers() && reaches_host_memory(id)) || (!can_register && registers_host_memory(id)) {
            *value = 0;
        }
    }
    correct_dependent(&mut attributes);
    Ok(DeviceInfo {
        ordinal,
        name: info.name.iter().copied().take_while(|byte| *byte != 0).collect(),
        uuid: info.uuid,
        memory: info.memory,
        priorities: (info.least_priority, info.greatest_priority),
        host_atomics: if session.gathers() { atomics::NONE } else { info.host_atomics },
        attributes,
    })
}

/// A device as the variables of the driver name it. A management library in a guest calls every device a GPU, the driver calls an instance
/// of a divided GPU an instance: both names are valid.
fn names(device: &DeviceInfo) -> DeviceNames {
    let uuid = uuid_text(&device.uuid);
    let number = |id| device.attribute(id).unwrap_or(0);
    let speed = u64::from(device.bound(attribute::MULTIPROCESSOR_COUNT))
        * u64::from(device.bound(attribute::CLOCK_RATE));
    DeviceNames {
        prefixes: ["GPU", "MIG"].map(|kind| format!("{kind}-{uuid}")).into(),
        whole: None,
        speed,
        bus: (
            number(attribute::PCI_DOMAIN_ID),
            number(attribute::PCI_BUS_ID),
            number(attribute::PCI_DEVICE_ID),
        ),
    }
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    use core::fmt::Write as _;
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u8) -> DeviceInfo {
        DeviceInfo {
            ordinal: u32::from(number),
            name: Vec::new(),
            uuid: [number; 16],
            memory: 0,
            priorities: (0, 0),
            host_atomics: atomics::NONE,
            attributes: [0; limits::DEVICE_ATTRIBUTES],
        }
    }

    // Promise: C100
    #[test]
    fn device_is_named_by_its_uuid_bus_and_speed() {
        let mut device = device(0x2a);
        device.attributes[attribute::MULTIPROCESSOR_COUNT as usize] = 60;
        device.attributes[attribute::CLOCK_RATE as usize] = 1000;
        device.attributes[attribute::PCI_BUS_ID as usize] = 7;
        let names = names(&device);
        let uuid = "2a2a2a2a-2a2a-2a2a-2a2a-2a2a2a2a2a2a";
        assert_eq!(names.prefixes, [format!("GPU-{uuid}"), format!("MIG-{uuid}")]);
        assert_eq!((names.speed, names.bus), (60_000, (0, 7, 0)));
    }
}

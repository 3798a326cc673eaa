//! The devices as the program sees them: read once, filtered by `CUDA_VISIBLE_DEVICES`, then answered from this table.

use crate::{
    error::{Error, Result},
    log,
    session::Session,
};
use sluice_cuda_abi::attributes::{guest_mask, reaches_host_memory, registers_host_memory};
use sluice_cuda_frontend::tables::DeviceIdentity;
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
    pub(crate) const PCI_BUS_ID: u32 = 33;
    pub(crate) const PCI_DEVICE_ID: u32 = 34;
    pub(crate) const PCI_DOMAIN_ID: u32 = 50;
    pub(crate) const MAX_TEXTURE1D_LINEAR_WIDTH: u32 = 69;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
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
    /// Asks the worker for every device and keeps those that `CUDA_VISIBLE_DEVICES` names, in its order.
    pub(crate) fn read(session: &Session, can_register: bool) -> Result<Devices> {
        let mut all = Vec::new();
        for ordinal in 0..session.device_count {
            all.push(read_one(session, ordinal, can_register)?);
        }
        let list = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(value) => visible(all.clone(), &value),
            Err(_) => all.clone(),
        };
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
    Ok(DeviceInfo {
        ordinal,
        name: info.name.iter().copied().take_while(|byte| *byte != 0).collect(),
        uuid: info.uuid,
        memory: info.memory,
        priorities: (info.least_priority, info.greatest_priority),
        attributes,
    })
}

/// The documented rules of `CUDA_VISIBLE_DEVICES`: indices or UUIDs (whole or a unique prefix), comma-separated; the list
/// ends before the first invalid entry; a device named twice leaves none.
fn visible(all: Vec<DeviceInfo>, value: &str) -> Vec<DeviceInfo> {
    let mut all: Vec<Option<DeviceInfo>> = all.into_iter().map(Some).collect();
    let uuids: Vec<String> = all.iter().flatten().map(|device| uuid_text(&device.uuid)).collect();
    let mut chosen = Vec::new();
    for entry in value.split(',') {
        let entry = entry.trim();
        let index = if let Some(prefix) = entry.strip_prefix("GPU-") {
            let prefix = prefix.to_ascii_lowercase();
            let mut matching = (0..uuids.len()).filter(|index| uuids[*index].starts_with(&prefix));
            match (matching.next(), matching.next()) {
                (Some(index), None) => Some(index),
                _ => None,
            }
        } else {
            entry.parse::<usize>().ok().filter(|index| *index < all.len())
        };
        match index {
            None => break,
            Some(index) if chosen.contains(&index) => return Vec::new(),
            Some(index) => chosen.push(index),
        }
    }
    chosen.into_iter().filter_map(|index| all[index].take()).collect()
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
            attributes: [0; limits::DEVICE_ATTRIBUTES],
        }
    }

    fn chosen(value: &str) -> Vec<u32> {
        let all = vec![device(0x10), device(0x11), device(0x22)];
        visible(all, value).iter().map(|device| device.ordinal).collect()
    }

    #[test]
    fn visible_devices_follow_the_documented_rules() {
        assert_eq!(chosen("2,0"), [0x22, 0x10]);
        assert_eq!(chosen("0, 1"), [0x10, 0x11]);
        assert_eq!(chosen("0,7,1"), [0x10], "the list ends before the first invalid entry");
        assert_eq!(chosen("-1"), [0u32; 0]);
        assert_eq!(chosen(""), [0u32; 0]);
        assert_eq!(chosen("1,1"), [0u32; 0], "a device named twice");
        assert_eq!(chosen("GPU-22"), [0x22]);
        assert_eq!(chosen("GPU-1"), [0u32; 0], "not a unique prefix");
        assert_eq!(chosen("GPU-11111111-1111-1111-1111-111111111111,0"), [0x11, 0x10]);
    }
}

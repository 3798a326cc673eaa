//! The values in the inventory's messages, which describe devices and their instances.
//!
//! A GPU is divided along an axis of memory slices into *GPU instances*, and each of those into compute instances, of which
//! Sluice makes one that is all of it. Profiles, places and names are the driver's, passed on unchanged: no code here depends on
//! the model of a GPU.

use sluice_protocol::{
    field::{Field, FieldError, Reader, Writer},
    numbered,
};

/// In place of an instance: all of the device, or no instance.
pub const WHOLE: u32 = u32::MAX;
/// Largest number of places of one profile in a message; drivers have eight at most.
pub const PLACES: usize = 16;
/// Bytes of a name in one message.
pub const NAME_PART: usize = 48;
/// Number of parts of the longest name.
pub const NAME_PARTS: u32 = 2;

/// Writes the two halves of a word.
fn put_pair(writer: &mut Writer<'_>, low: u32, high: u32) -> Result<(), FieldError> {
    writer.word(u64::from(low) | u64::from(high) << 32)
}

fn get_pair(reader: &mut Reader<'_>) -> Result<(u32, u32), FieldError> {
    let [a, b, c, d, e, f, g, h] = reader.word()?.to_le_bytes();
    Ok((u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])))
}

/// A profile: a kind of instance into which a device can be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct InstanceProfile {
    /// The profile's id on the device.
    pub id: u32,
    /// Number of compute slices.
    pub slices: u32,
    /// Largest number of instances.
    pub instances: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Further capabilities (`NVML_GPU_INSTANCE_PROFILE_CAPS_*`).
    pub capabilities: u32,
    /// Numbers of engines.
    pub engines: Engines,
}

/// Numbers of engines of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Engines {
    /// Number of copy engines.
    pub copy: u8,
    /// Number of video decoders.
    pub decoder: u8,
    /// Number of video encoders.
    pub encoder: u8,
    /// Number of image decoders.
    pub jpeg: u8,
    /// Number of optical-flow engines.
    pub ofa: u8,
}

impl<'a> Field<'a> for InstanceProfile {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        put_pair(writer, self.id, self.slices)?;
        put_pair(writer, self.instances, self.multiprocessors)?;
        writer.word(self.memory)?;
        put_pair(writer, self.capabilities, 0)?;
        let Engines { copy, decoder, encoder, jpeg, ofa } = self.engines;
        [copy, decoder, encoder, jpeg, ofa].put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let (id, slices) = get_pair(reader)?;
        let (instances, multiprocessors) = get_pair(reader)?;
        let memory = reader.word()?;
        let (capabilities, _) = get_pair(reader)?;
        let [copy, decoder, encoder, jpeg, ofa] = <[u8; 5]>::get(reader)?;
        let engines = Engines { copy, decoder, encoder, jpeg, ofa };
        Ok(InstanceProfile { id, slices, instances, multiprocessors, memory, capabilities, engines })
    }
}

/// Adjacent memory slices for one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct InstancePlace {
    /// Number of the first slice.
    pub start: u8,
    /// Number of slices.
    pub size: u8,
}

/// The possible places of instances of a profile, in the driver's order.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct InstancePlaces {
    count: u8,
    list: [InstancePlace; PLACES],
}

impl InstancePlaces {
    /// A list of places; `None` if it is longer than [`PLACES`].
    #[must_use]
    pub fn new(places: &[InstancePlace]) -> Option<InstancePlaces> {
        let mut list = [InstancePlace::default(); PLACES];
        list.get_mut(..places.len())?.copy_from_slice(places);
        Some(InstancePlaces { count: u8::try_from(places.len()).ok()?, list })
    }

    /// The places as a slice.
    #[must_use]
    pub fn as_slice(&self) -> &[InstancePlace] {
        self.list.get(..usize::from(self.count)).unwrap_or_default()
    }
}

impl core::fmt::Debug for InstancePlaces {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_list().entries(self.as_slice()).finish()
    }
}

impl<'a> Field<'a> for InstancePlaces {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.count.put(writer)?;
        let mut bytes = [0; 2 * PLACES];
        for (pair, place) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(self.as_slice()) {
            *pair = [place.start, place.size];
        }
        bytes.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let count = u8::get(reader)?;
        let bytes = <[u8; 2 * PLACES]>::get(reader)?;
        let mut list = [InstancePlace::default(); PLACES];
        let given = list.get_mut(..usize::from(count)).ok_or(FieldError::Range)?;
        for (place, [start, size]) in given.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *place = InstancePlace { start: *start, size: *size };
        }
        Ok(InstancePlaces { count, list })
    }
}

/// An existing instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The instance's id among the GPU instances of its device.
    pub gpu: u32,
    /// The compute instance in it; [`WHOLE`] if there is none, or more than one: then it has no UUID either.
    pub compute: u32,
    /// The id of its profile.
    pub profile: u32,
    /// Number of its first memory slice.
    pub start: u32,
    /// Number of its memory slices.
    pub size: u32,
    /// The UUID with which programs name it. A driver may reuse it for another instance.
    pub uuid: [u8; 16],
}

impl<'a> Field<'a> for Instance {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        put_pair(writer, self.gpu, self.compute)?;
        put_pair(writer, self.profile, 0)?;
        put_pair(writer, self.start, self.size)?;
        self.uuid.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let (gpu, compute) = get_pair(reader)?;
        let (profile, _) = get_pair(reader)?;
        let (start, size) = get_pair(reader)?;
        Ok(Instance { gpu, compute, profile, start, size, uuid: <[u8; 16]>::get(reader)? })
    }
}

/// A part of a name, padded with zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NamePart(pub [u8; NAME_PART]);

impl NamePart {
    /// The part of a name with this number, from 0.
    #[must_use]
    pub fn part(name: &str, part: u32) -> NamePart {
        let mut bytes = [0; NAME_PART];
        let chunk = usize::try_from(part).ok().and_then(|part| name.as_bytes().chunks(NAME_PART).nth(part));
        for (place, byte) in bytes.iter_mut().zip(chunk.unwrap_or_default()) {
            *place = *byte;
        }
        NamePart(bytes)
    }

    /// The text of all parts of a name.
    #[must_use]
    pub fn join(parts: &[NamePart]) -> String {
        let bytes = parts.iter().flat_map(|part| part.0).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    }
}

impl core::fmt::Debug for NamePart {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "{:?}", NamePart::join(&[*self]))
    }
}

impl<'a> Field<'a> for NamePart {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(NamePart(<[u8; NAME_PART]>::get(reader)?))
    }
}

numbered! {
    /// The state of a feature of a device.
    pub enum Switch {
        /// The feature is off.
        Off = 0,
        /// The feature is on.
        On = 1,
        /// The device does not have the feature, or the driver does not report it.
        Absent = 2,
    }
}

/// The action that the driver recommends for a device (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// No action.
    None,
    /// Reset the device.
    Reset,
    /// Restart the host.
    Reboot,
    /// End the traffic between devices.
    Drain,
    /// End the traffic between devices, then reset the device.
    DrainAndReset,
    /// Another action, by the driver's number.
    Other(u32),
    /// The driver does not report it.
    Unknown,
}

impl Recovery {
    /// The action with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Recovery {
        match number {
            0 => Recovery::None,
            1 => Recovery::Reset,
            2 => Recovery::Reboot,
            3 => Recovery::Drain,
            4 => Recovery::DrainAndReset,
            u32::MAX => Recovery::Unknown,
            other => Recovery::Other(other),
        }
    }

    /// The driver's number of the action.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Recovery::None => 0,
            Recovery::Reset => 1,
            Recovery::Reboot => 2,
            Recovery::Drain => 3,
            Recovery::DrainAndReset => 4,
            Recovery::Other(other) => other,
            Recovery::Unknown => u32::MAX,
        }
    }
}

impl<'a> Field<'a> for Recovery {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.number().put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(Recovery::from_number(u32::get(reader)?))
    }
}

/// The address of a GPU on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PciAddress {
    /// Its domain.
    pub domain: u32,
    /// Its bus.
    pub bus: u8,
    /// Its number on the bus.
    pub device: u8,
}

impl core::fmt::Display for PciAddress {
    /// The name of its directory in the state of NVIDIA's kernel driver: a GPU is function 0 of its device.
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { domain, bus, device } = self;
        write!(formatter, "{domain:04x}:{bus:02x}:{device:02x}.0")
    }
}

impl<'a> Field<'a> for PciAddress {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        put_pair(writer, u32::from(self.bus) << 8 | u32::from(self.device), self.domain)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let (place, domain) = get_pair(reader)?;
        let [device, bus, 0, 0] = place.to_le_bytes() else { return Err(FieldError::Range) };
        Ok(PciAddress { domain, bus, device })
    }
}

/// An instance that a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct VisibleInstance {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The address of its GPU.
    pub pci: PciAddress,
    /// Its id among the GPU instances of its GPU.
    pub gpu: u32,
    /// The id of the compute instance in it.
    pub compute: u32,
}

/// The devices that a process's driver shows it: the value of `CUDA_VISIBLE_DEVICES` before the process starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Visible {
    /// The devices that the host shows every process.
    #[default]
    Host,
    /// One GPU, by its UUID.
    Gpu([u8; 16]),
    /// One GPU, by its ordinal, if its UUID is unknown.
    Ordinal(u32),
    /// One instance, by its UUID.
    Instance(VisibleInstance),
}

impl Visible {
    /// The value of the variable; `None` if it stays unchanged.
    #[must_use]
    pub fn variable(&self) -> Option<String> {
        match self {
            Visible::Host => None,
            Visible::Ordinal(ordinal) => Some(ordinal.to_string()),
            Visible::Gpu(uuid) => Some(format!("GPU-{}", uuid_text(uuid))),
            Visible::Instance(instance) => Some(format!("MIG-{}", uuid_text(&instance.uuid))),
        }
    }

    /// The UUID of the only device that the driver must show; `None` for any device.
    #[must_use]
    pub const fn uuid(&self) -> Option<[u8; 16]> {
        match self {
            Visible::Host | Visible::Ordinal(_) => None,
            Visible::Gpu(uuid) => Some(*uuid),
            Visible::Instance(instance) => Some(instance.uuid),
        }
    }
}

impl<'a> Field<'a> for Visible {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        let kind = match self {
            Visible::Host => 0,
            Visible::Gpu(_) => 1,
            Visible::Instance(_) => 2,
            Visible::Ordinal(_) => 3,
        };
        writer.word(kind)?;
        match *self {
            Visible::Ordinal(ordinal) => u128::from(ordinal).to_be_bytes().put(writer)?,
            _ => self.uuid().unwrap_or_default().put(writer)?,
        }
        let instance = match *self {
            Visible::Instance(instance) => instance,
            _ => VisibleInstance::default(),
        };
        instance.pci.put(writer)?;
        put_pair(writer, instance.gpu, instance.compute)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let kind = reader.word()?;
        let uuid = <[u8; 16]>::get(reader)?;
        let pci = PciAddress::get(reader)?;
        let (gpu, compute) = get_pair(reader)?;
        match kind {
            0 => Ok(Visible::Host),
            1 => Ok(Visible::Gpu(uuid)),
            2 => Ok(Visible::Instance(VisibleInstance { uuid, pci, gpu, compute })),
            3 => {
                let ordinal = u32::try_from(u128::from_be_bytes(uuid)).map_err(|_| FieldError::Range)?;
                Ok(Visible::Ordinal(ordinal))
            }
            _ => Err(FieldError::Range),
        }
    }
}

/// A UUID in the usual form.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(*uuid));
    let part = |range: core::ops::Range<usize>| digits.get(range).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_split_into_parts_is_joined_again() {
        let long = "x".repeat(60) + "y";
        let parts = |name: &str| [NamePart::part(name, 0), NamePart::part(name, 1)];
        assert_eq!(NamePart::join(&parts(&long)), long);
        assert_eq!(NamePart::join(&parts("MIG 1g.10gb")), "MIG 1g.10gb");
        assert_eq!(NamePart::join(&parts("")), "");
        assert_eq!(NamePart::part("a", u32::MAX), NamePart([0; NAME_PART]));
    }

    #[test]
    fn more_than_16_places_are_refused() {
        let place = |start| InstancePlace { start, size: 1 };
        let most: Vec<_> = (0..16).map(place).collect();
        assert_eq!(InstancePlaces::new(&most).map(|places| places.as_slice().to_vec()), Some(most.clone()));
        assert_eq!(InstancePlaces::new(&[most, vec![place(16)]].concat()), None);
    }

    #[test]
    fn address_of_a_gpu_has_the_form_of_the_kernel() {
        let address = PciAddress { domain: 0x1_0000, bus: 0x65, device: 0x1f };
        assert_eq!(address.to_string(), "10000:65:1f.0");
        assert_eq!(PciAddress { domain: 0, bus: 2, device: 0 }.to_string(), "0000:02:00.0");
    }

    #[test]
    fn visible_device_is_passed_by_uuid_or_ordinal() {
        let uuid = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(
            Visible::Instance(VisibleInstance { uuid, ..VisibleInstance::default() }).variable().as_deref(),
            Some("MIG-01234567-89ab-cdef-0011-223344556677")
        );
        assert_eq!((Visible::Host.variable(), Visible::Host.uuid()), (None, None));
        let ordinal = Visible::Ordinal(3);
        assert_eq!((ordinal.variable().as_deref(), ordinal.uuid()), (Some("3"), None));
    }
}

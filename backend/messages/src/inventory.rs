//! The values in the inventory's messages, which describe devices and their instances.
//!
//! A GPU is divided along an axis of memory slices into *GPU instances*, and each of those into compute instances, of which
//! Sluice makes one that is all of it. Profiles, places and names are the driver's, passed on unchanged: nothing here knows a
//! GPU by its model.

use sluice_protocol::field::{Field, FieldError, Reader, Writer};

/// Instead of an instance: all of the device, or no instance.
pub const WHOLE: u32 = u32::MAX;
/// Places of one profile that fit in a message; drivers have eight at most.
pub const PLACES: usize = 16;
/// Bytes of a name that fit in a message.
pub const NAME_PART: usize = 48;
/// Parts of the longest name.
pub const NAME_PARTS: u32 = 2;

/// Two halves of a word.
fn put_pair(writer: &mut Writer<'_>, low: u32, high: u32) -> Result<(), FieldError> {
    writer.word(u64::from(low) | u64::from(high) << 32)
}

fn get_pair(reader: &mut Reader<'_>) -> Result<(u32, u32), FieldError> {
    let [a, b, c, d, e, f, g, h] = reader.word()?.to_le_bytes();
    Ok((u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])))
}

/// A kind of instance that a device can be divided into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Profile {
    /// Its id among those of the device.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// How many there can be.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// What the driver says of it besides (`NVML_GPU_INSTANCE_PROFILE_CAPS_*`).
    pub capabilities: u32,
    /// Engines.
    pub engines: Engines,
}

/// Engines of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Engines {
    /// Copies.
    pub copy: u8,
    /// Video decoders.
    pub decoder: u8,
    /// Video encoders.
    pub encoder: u8,
    /// Image decoders.
    pub jpeg: u8,
    /// Optical flow.
    pub ofa: u8,
}

impl<'a> Field<'a> for Profile {
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
        Ok(Profile { id, slices, instances, multiprocessors, memory, capabilities, engines })
    }
}

/// Memory slices that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    /// The first.
    pub start: u8,
    /// How many.
    pub size: u8,
}

/// Where instances of a kind can be, in the driver's order.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Places {
    count: u8,
    list: [Place; PLACES],
}

impl Places {
    /// A list; `None` when it is longer than [`PLACES`].
    #[must_use]
    pub fn new(places: &[Place]) -> Option<Places> {
        let mut list = [Place::default(); PLACES];
        list.get_mut(..places.len())?.copy_from_slice(places);
        Some(Places { count: u8::try_from(places.len()).ok()?, list })
    }

    /// The list.
    #[must_use]
    pub fn as_slice(&self) -> &[Place] {
        self.list.get(..usize::from(self.count)).unwrap_or_default()
    }
}

impl core::fmt::Debug for Places {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_list().entries(self.as_slice()).finish()
    }
}

impl<'a> Field<'a> for Places {
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
        let mut list = [Place::default(); PLACES];
        let given = list.get_mut(..usize::from(count)).ok_or(FieldError::Range)?;
        for (place, [start, size]) in given.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *place = Place { start: *start, size: *size };
        }
        Ok(Places { count, list })
    }
}

/// An instance that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its id among the GPU instances of its device.
    pub gpu: u32,
    /// The compute instance in it; [`WHOLE`] while there is none, or more than one: then it has no UUID either.
    pub compute: u32,
    /// The id of its profile.
    pub profile: u32,
    /// Its first memory slice.
    pub start: u32,
    /// Its memory slices.
    pub size: u32,
    /// The UUID that programs name it by. A driver may use it again for another instance.
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

/// A part of a name, filled up with zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name(pub [u8; NAME_PART]);

impl Name {
    /// The given part of a name, from 0.
    #[must_use]
    pub fn part(name: &str, part: u32) -> Name {
        let mut bytes = [0; NAME_PART];
        let chunk = usize::try_from(part).ok().and_then(|part| name.as_bytes().chunks(NAME_PART).nth(part));
        for (place, byte) in bytes.iter_mut().zip(chunk.unwrap_or_default()) {
            *place = *byte;
        }
        Name(bytes)
    }

    /// The text of all parts of a name.
    #[must_use]
    pub fn join(parts: &[Name]) -> String {
        let bytes = parts.iter().flat_map(|part| part.0).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    }
}

impl core::fmt::Debug for Name {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "{:?}", Name::join(&[*self]))
    }
}

impl<'a> Field<'a> for Name {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(Name(<[u8; NAME_PART]>::get(reader)?))
    }
}

/// Something that a device does, does not do, or cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Off.
    Off,
    /// On.
    On,
    /// The device has no such thing, or the driver does not say.
    Absent,
}

impl<'a> Field<'a> for Switch {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(*self as u64)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        match reader.word()? {
            0 => Ok(Switch::Off),
            1 => Ok(Switch::On),
            2 => Ok(Switch::Absent),
            _ => Err(FieldError::Range),
        }
    }
}

/// What the driver wants done about a device (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing.
    None,
    /// The device is to be reset.
    Reset,
    /// The host is to be restarted.
    Reboot,
    /// Traffic between devices is to end.
    Drain,
    /// Traffic between devices is to end, and then the device is to be reset.
    DrainAndReset,
    /// Something else, by the driver's number.
    Other(u32),
    /// The driver does not say.
    Unknown,
}

impl Recovery {
    /// The action of that number.
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

    /// Its number.
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

/// Which devices a process's driver shows it: what `CUDA_VISIBLE_DEVICES` says before the process begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Visible {
    /// What the host shows everybody.
    #[default]
    Host,
    /// One GPU, by its UUID.
    Gpu([u8; 16]),
    /// One GPU, by its ordinal, where nobody knows its UUID.
    Ordinal(u32),
    /// One instance, by its UUID.
    Instance([u8; 16]),
}

impl Visible {
    /// The value of the variable; `None` where it is left as it is.
    #[must_use]
    pub fn variable(&self) -> Option<String> {
        match self {
            Visible::Host => None,
            Visible::Ordinal(ordinal) => Some(ordinal.to_string()),
            Visible::Gpu(uuid) => Some(format!("GPU-{}", uuid_text(uuid))),
            Visible::Instance(uuid) => Some(format!("MIG-{}", uuid_text(uuid))),
        }
    }

    /// The UUID that the driver must give its only device; `None` where any will do.
    #[must_use]
    pub const fn uuid(&self) -> Option<[u8; 16]> {
        match self {
            Visible::Host | Visible::Ordinal(_) => None,
            Visible::Gpu(uuid) | Visible::Instance(uuid) => Some(*uuid),
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
            Visible::Ordinal(ordinal) => u128::from(ordinal).to_be_bytes().put(writer),
            _ => self.uuid().unwrap_or_default().put(writer),
        }
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let kind = reader.word()?;
        let uuid = <[u8; 16]>::get(reader)?;
        match kind {
            0 => Ok(Visible::Host),
            1 => Ok(Visible::Gpu(uuid)),
            2 => Ok(Visible::Instance(uuid)),
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
    fn names_come_in_parts() {
        let long = "x".repeat(60) + "y";
        let parts = |name: &str| [Name::part(name, 0), Name::part(name, 1)];
        assert_eq!(Name::join(&parts(&long)), long);
        assert_eq!(Name::join(&parts("MIG 1g.10gb")), "MIG 1g.10gb");
        assert_eq!(Name::join(&parts("")), "");
        assert_eq!(Name::part("a", u32::MAX), Name([0; NAME_PART]));
    }

    #[test]
    fn a_list_of_places_is_bounded() {
        let place = |start| Place { start, size: 1 };
        let most: Vec<_> = (0..16).map(place).collect();
        assert_eq!(Places::new(&most).map(|places| places.as_slice().to_vec()), Some(most.clone()));
        assert_eq!(Places::new(&[most, vec![place(16)]].concat()), None);
    }

    #[test]
    fn a_process_is_shown_its_device_by_uuid() {
        let uuid = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(
            Visible::Instance(uuid).variable().as_deref(),
            Some("MIG-01234567-89ab-cdef-0011-223344556677")
        );
        assert_eq!((Visible::Host.variable(), Visible::Host.uuid()), (None, None));
        let ordinal = Visible::Ordinal(3);
        assert_eq!((ordinal.variable().as_deref(), ordinal.uuid()), (Some("3"), None));
    }
}

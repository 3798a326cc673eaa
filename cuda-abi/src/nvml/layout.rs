//! Structures of `nvml.h` 13 as C lays them out, in every version that calls take.

use core::ffi::{c_char, c_uint, c_ulonglong};

/// `nvmlDevice_t`: a pointer for programs, never followed; one more than the device's place.
pub type DeviceHandle = usize;
/// `nvmlEventSet_t`, the same way.
pub type EventSetHandle = usize;

/// Instance ids of what is on no instance.
pub const NO_INSTANCE: c_uint = c_uint::MAX;
/// `nvmlEventTypeXidCriticalError`.
pub const EVENT_XID: c_ulonglong = 8;

/// The number by which a structure says which version of it it is (`NVML_STRUCT_VERSION`).
#[expect(clippy::cast_possible_truncation, reason = "the structures are small")]
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// `nvmlPciInfo_t`. The first two versions of the call know it up to `bus_id`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PciInfo {
    /// `0000:01:00.0`.
    pub bus_id_legacy: [c_char; 16],
    /// Domain.
    pub domain: c_uint,
    /// Bus.
    pub bus: c_uint,
    /// Device on the bus.
    pub device: c_uint,
    /// Device and vendor id; 0 where nobody says.
    pub device_id: c_uint,
    /// Subsystem id; 0 where nobody says.
    pub subsystem_id: c_uint,
    /// `00000000:01:00.0`.
    pub bus_id: [c_char; 32],
}

/// `nvmlMemory_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct MemoryV1 {
    /// All.
    pub total: c_ulonglong,
    /// Free.
    pub free: c_ulonglong,
    /// Used, what is reserved included.
    pub used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct MemoryV2 {
    /// [`MEMORY_V2`].
    pub version: c_uint,
    /// All.
    pub total: c_ulonglong,
    /// Reserved for the system.
    pub reserved: c_ulonglong,
    /// Free.
    pub free: c_ulonglong,
    /// Used.
    pub used: c_ulonglong,
}
/// The version of [`MemoryV2`].
pub const MEMORY_V2: c_uint = version::<MemoryV2>(2);

/// `nvmlProcessInfo_v1_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessInfoV1 {
    /// Process id.
    pub pid: c_uint,
    /// Bytes.
    pub used: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t`, which the third version of the calls takes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessInfoV2 {
    /// Process id.
    pub pid: c_uint,
    /// Bytes.
    pub used: c_ulonglong,
    /// [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// [`NO_INSTANCE`].
    pub compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessDetail {
    /// Process id.
    pub pid: c_uint,
    /// Bytes.
    pub used: c_ulonglong,
    /// [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// [`NO_INSTANCE`].
    pub compute_instance: c_uint,
    /// Bytes that confidential computing protects.
    pub protected: c_ulonglong,
}

/// `nvmlProcessDetailList_v1_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ProcessDetails {
    /// [`PROCESS_DETAILS_V1`].
    pub version: c_uint,
    /// An `nvmlProcessMode_t`.
    pub mode: c_uint,
    /// Room in `entries`, then how many there are.
    pub count: c_uint,
    /// The list.
    pub entries: *mut ProcessDetail,
}
/// The version of [`ProcessDetails`].
pub const PROCESS_DETAILS_V1: c_uint = version::<ProcessDetails>(1);

/// `nvmlUtilization_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Utilization {
    /// Percent of the time in which a kernel ran.
    pub gpu: c_uint,
    /// Percent of the time in which memory was accessed.
    pub memory: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessSample {
    /// Process id.
    pub pid: c_uint,
    /// Microseconds since 1970.
    pub time: c_ulonglong,
    /// Percent of the time in which a kernel of it ran.
    pub gpu: c_uint,
    /// Percent of the time in which it accessed memory.
    pub memory: c_uint,
    /// Percent of the encoder.
    pub encoder: c_uint,
    /// Percent of the decoder.
    pub decoder: c_uint,
}

/// `nvmlEventData_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct EventData {
    /// The device.
    pub device: DeviceHandle,
    /// [`EVENT_XID`].
    pub kind: c_ulonglong,
    /// The Xid.
    pub data: c_ulonglong,
    /// [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// [`NO_INSTANCE`].
    pub compute_instance: c_uint,
}

// The sizes that the vendor's header gives.
const _: () = {
    assert!(size_of::<PciInfo>() == 68);
    assert!(size_of::<MemoryV1>() == 24);
    assert!(size_of::<MemoryV2>() == 40 && MEMORY_V2 == 0x200_0028);
    assert!(size_of::<ProcessInfoV1>() == 16);
    assert!(size_of::<ProcessInfoV2>() == 24);
    assert!(size_of::<ProcessDetail>() == 32);
    assert!(size_of::<ProcessDetails>() == 24 && PROCESS_DETAILS_V1 == 0x100_0018);
    assert!(size_of::<Utilization>() == 8);
    assert!(size_of::<ProcessSample>() == 32);
    assert!(size_of::<EventData>() == 32);
};

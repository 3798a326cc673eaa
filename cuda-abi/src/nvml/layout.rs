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

/// `nvmlGpuInstance_t`: a pointer for programs, never followed.
pub type GpuInstanceHandle = usize;
/// `nvmlComputeInstance_t`, the same way.
pub type ComputeInstanceHandle = usize;

/// `nvmlGpuInstancePlacement_t`, and `nvmlComputeInstancePlacement_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Placement {
    /// The first slice.
    pub start: c_uint,
    /// How many.
    pub size: c_uint,
}

/// `nvmlGpuInstanceProfileInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct GpuInstanceProfileV1 {
    /// Its id.
    pub id: c_uint,
    /// Whether there is traffic between such instances.
    pub peers: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// How many there can be.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [c_uint; 5],
    /// MiB of memory.
    pub memory_mib: c_ulonglong,
}

/// `nvmlGpuInstanceProfileInfo_v2_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GpuInstanceProfileV2 {
    /// [`GPU_INSTANCE_PROFILE_V2`].
    pub version: c_uint,
    /// What the first version has.
    pub id: c_uint,
    /// As there.
    pub peers: c_uint,
    /// As there.
    pub slices: c_uint,
    /// As there.
    pub instances: c_uint,
    /// As there.
    pub multiprocessors: c_uint,
    /// As there.
    pub engines: [c_uint; 5],
    /// As there.
    pub memory_mib: c_ulonglong,
    /// What it is called.
    pub name: [c_char; 96],
}
/// The version of [`GpuInstanceProfileV2`].
pub const GPU_INSTANCE_PROFILE_V2: c_uint = version::<GpuInstanceProfileV2>(2);

/// `nvmlGpuInstanceProfileInfo_v3_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GpuInstanceProfileV3 {
    /// [`GPU_INSTANCE_PROFILE_V3`].
    pub version: c_uint,
    /// What the first version has, but for traffic between instances.
    pub id: c_uint,
    /// As there.
    pub slices: c_uint,
    /// As there.
    pub instances: c_uint,
    /// As there.
    pub multiprocessors: c_uint,
    /// As there.
    pub engines: [c_uint; 5],
    /// As there.
    pub memory_mib: c_ulonglong,
    /// What it is called.
    pub name: [c_char; 96],
    /// `NVML_GPU_INSTANCE_PROFILE_CAPS_*`.
    pub capabilities: c_uint,
}
/// The version of [`GpuInstanceProfileV3`].
pub const GPU_INSTANCE_PROFILE_V3: c_uint = version::<GpuInstanceProfileV3>(3);

/// `nvmlGpuInstanceInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct GpuInstanceInfo {
    /// The GPU.
    pub device: DeviceHandle,
    /// Its number.
    pub id: c_uint,
    /// The id of its profile.
    pub profile: c_uint,
    /// Where it is.
    pub placement: Placement,
}

/// `nvmlComputeInstanceProfileInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ComputeInstanceProfileV1 {
    /// Its id.
    pub id: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// How many there can be.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines of the GPU instance, which all in it share.
    pub engines: [c_uint; 5],
}

/// `nvmlComputeInstanceProfileInfo_v2_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ComputeInstanceProfileV2 {
    /// [`COMPUTE_INSTANCE_PROFILE_V2`].
    pub version: c_uint,
    /// What the first version has.
    pub facts: ComputeInstanceProfileV1,
    /// What it is called.
    pub name: [c_char; 96],
}
/// The version of [`ComputeInstanceProfileV2`].
pub const COMPUTE_INSTANCE_PROFILE_V2: c_uint = version::<ComputeInstanceProfileV2>(2);

/// `nvmlComputeInstanceProfileInfo_v3_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ComputeInstanceProfileV3 {
    /// [`COMPUTE_INSTANCE_PROFILE_V3`].
    pub version: c_uint,
    /// What the first version has.
    pub facts: ComputeInstanceProfileV1,
    /// What it is called.
    pub name: [c_char; 96],
    /// `NVML_COMPUTE_INSTANCE_PROFILE_CAPS_*`.
    pub capabilities: c_uint,
}
/// The version of [`ComputeInstanceProfileV3`].
pub const COMPUTE_INSTANCE_PROFILE_V3: c_uint = version::<ComputeInstanceProfileV3>(3);

/// `nvmlComputeInstanceInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ComputeInstanceInfo {
    /// The GPU.
    pub device: DeviceHandle,
    /// The GPU instance.
    pub gpu_instance: GpuInstanceHandle,
    /// Its number.
    pub id: c_uint,
    /// The id of its profile.
    pub profile: c_uint,
    /// Where it is.
    pub placement: Placement,
}

/// `nvmlDeviceAttributes_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct DeviceAttributes {
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines of the GPU instance, which all in it share.
    pub engines: [c_uint; 5],
    /// Compute slices of the GPU instance.
    pub gpu_slices: c_uint,
    /// Compute slices of the compute instance.
    pub compute_slices: c_uint,
    /// MiB of memory.
    pub memory_mib: c_ulonglong,
}

/// `nvmlFieldValue_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FieldValue {
    /// Which field.
    pub field: c_uint,
    /// Which of several.
    pub scope: c_uint,
    /// Microseconds since 1970.
    pub time: i64,
    /// Microseconds that it took.
    pub latency: i64,
    /// An `nvmlValueType_t`.
    pub kind: c_uint,
    /// An `nvmlReturn_t`.
    pub status: c_uint,
    /// The value, from its first byte on.
    pub value: c_ulonglong,
}
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
pub const FIELD_RECOVERY_ACTION: c_uint = 230;

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
    assert!(size_of::<GpuInstanceProfileV1>() == 48);
    assert!(size_of::<GpuInstanceProfileV2>() == 152 && GPU_INSTANCE_PROFILE_V2 == 0x200_0098);
    assert!(size_of::<GpuInstanceProfileV3>() == 152 && GPU_INSTANCE_PROFILE_V3 == 0x300_0098);
    assert!(size_of::<GpuInstanceInfo>() == 24);
    assert!(size_of::<ComputeInstanceProfileV1>() == 36);
    assert!(size_of::<ComputeInstanceProfileV2>() == 136 && COMPUTE_INSTANCE_PROFILE_V2 == 0x200_0088);
    assert!(size_of::<ComputeInstanceProfileV3>() == 140 && COMPUTE_INSTANCE_PROFILE_V3 == 0x300_008c);
    assert!(size_of::<ComputeInstanceInfo>() == 32);
    assert!(size_of::<DeviceAttributes>() == 40);
    assert!(size_of::<FieldValue>() == 40);
};

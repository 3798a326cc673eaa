//! Structures of `nvml.h` 13 in C layout, in every version that calls accept.

use crate::pointers::Out;
use core::ffi::{c_char, c_uint, c_ulonglong};

/// `nvmlDevice_t`: a pointer for programs, never dereferenced; the index of the device plus one.
pub type DeviceHandle = usize;
/// `nvmlEventSet_t`: a number, like [`DeviceHandle`].
pub type EventSetHandle = usize;

/// Instance id of a device or process without an instance.
pub const NO_INSTANCE: c_uint = c_uint::MAX;
/// `nvmlEventTypeXidCriticalError`.
pub const EVENT_XID: c_ulonglong = 8;

/// The version field of a structure (`NVML_STRUCT_VERSION`).
#[expect(clippy::cast_possible_truncation, reason = "the structures are small")]
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// `nvmlPciInfo_t`. In the first two versions of the call it ends before `bus_id`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PciInfo {
    /// For example `0000:01:00.0`.
    pub bus_id_legacy: [c_char; 16],
    /// Domain.
    pub domain: c_uint,
    /// Bus.
    pub bus: c_uint,
    /// Device on the bus.
    pub device: c_uint,
    /// Device and vendor id; 0 if unknown.
    pub device_id: c_uint,
    /// Subsystem id; 0 if unknown.
    pub subsystem_id: c_uint,
    /// For example `00000000:01:00.0`.
    pub bus_id: [c_char; 32],
}

/// `nvmlMemory_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct MemoryV1 {
    /// Total bytes.
    pub total: c_ulonglong,
    /// Free bytes.
    pub free: c_ulonglong,
    /// Used bytes, including reserved ones.
    pub used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct MemoryV2 {
    /// [`MEMORY_V2`].
    pub version: c_uint,
    /// Total bytes.
    pub total: c_ulonglong,
    /// Bytes reserved for the system.
    pub reserved: c_ulonglong,
    /// Free bytes.
    pub free: c_ulonglong,
    /// Used bytes.
    pub used: c_ulonglong,
}
/// The version of [`MemoryV2`].
pub const MEMORY_V2: c_uint = version::<MemoryV2>(2);

/// `nvmlGpuFabricInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FabricInfo {
    /// Id of the cluster.
    pub cluster: [u8; 16],
    /// Error of a completed registration.
    pub status: c_uint,
    /// Id of the group of devices within the cluster.
    pub clique: c_uint,
    /// `NVML_GPU_FABRIC_STATE_*`; 0 is no fabric.
    pub state: u8,
}

/// `nvmlGpuFabricInfo_v2_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FabricInfoV2 {
    /// [`FABRIC_INFO_V2`].
    pub version: c_uint,
    /// The first version.
    pub info: FabricInfo,
    /// `NVML_GPU_FABRIC_HEALTH_MASK_*`.
    pub health: c_uint,
}
/// The version of [`FabricInfoV2`].
pub const FABRIC_INFO_V2: c_uint = version::<FabricInfoV2>(2);

/// `nvmlGpuFabricInfo_v3_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FabricInfoV3 {
    /// The second version, with the number of this one.
    pub info: FabricInfoV2,
    /// `NVML_GPU_FABRIC_HEALTH_SUMMARY_*`.
    pub summary: u8,
}
/// The version of [`FabricInfoV3`].
pub const FABRIC_INFO_V3: c_uint = version::<FabricInfoV3>(3);

/// `nvmlProcessInfo_v1_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessInfoV1 {
    /// Process id.
    pub pid: c_uint,
    /// Used bytes.
    pub used: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t`, which the third version of the calls uses too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessInfoV2 {
    /// Process id.
    pub pid: c_uint,
    /// Used bytes.
    pub used: c_ulonglong,
    /// Id of the GPU instance, or [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// Id of the compute instance, or [`NO_INSTANCE`].
    pub compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ProcessDetail {
    /// Process id.
    pub pid: c_uint,
    /// Used bytes.
    pub used: c_ulonglong,
    /// Id of the GPU instance, or [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// Id of the compute instance, or [`NO_INSTANCE`].
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
    /// In: room in `entries`. Out: number of processes.
    pub count: c_uint,
    /// Array of the processes.
    pub entries: Out<ProcessDetail>,
}
/// The version of [`ProcessDetails`].
pub const PROCESS_DETAILS_V1: c_uint = version::<ProcessDetails>(1);

/// `nvmlUtilization_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Utilization {
    /// Percentage of the time in which a kernel ran.
    pub gpu: c_uint,
    /// Percentage of the time in which memory was accessed.
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
    /// Percentage of the time in which a kernel of the process ran.
    pub gpu: c_uint,
    /// Percentage of the time in which the process accessed memory.
    pub memory: c_uint,
    /// Percentage of use of the encoder.
    pub encoder: c_uint,
    /// Percentage of use of the decoder.
    pub decoder: c_uint,
}

/// `nvmlEventData_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct EventData {
    /// Device that reports the event.
    pub device: DeviceHandle,
    /// [`EVENT_XID`].
    pub kind: c_ulonglong,
    /// Number of the Xid.
    pub data: c_ulonglong,
    /// Id of the GPU instance, or [`NO_INSTANCE`].
    pub gpu_instance: c_uint,
    /// Id of the compute instance, or [`NO_INSTANCE`].
    pub compute_instance: c_uint,
}

/// `nvmlGpuInstance_t`: a pointer for programs, never dereferenced.
pub type GpuInstanceHandle = usize;
/// `nvmlComputeInstance_t`: a number, like [`GpuInstanceHandle`].
pub type ComputeInstanceHandle = usize;

/// `nvmlGpuInstancePlacement_t`, and `nvmlComputeInstancePlacement_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Placement {
    /// First slice.
    pub start: c_uint,
    /// Number of slices.
    pub size: c_uint,
}

/// `nvmlGpuInstanceProfileInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct GpuInstanceProfileV1 {
    /// Profile id.
    pub id: c_uint,
    /// Non-zero if such instances support peer-to-peer access.
    pub peers: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// Maximum number of instances.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [c_uint; 5],
    /// Memory in MiB.
    pub memory_mib: c_ulonglong,
}

/// `nvmlGpuInstanceProfileInfo_v2_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GpuInstanceProfileV2 {
    /// [`GPU_INSTANCE_PROFILE_V2`].
    pub version: c_uint,
    /// Profile id.
    pub id: c_uint,
    /// Non-zero if such instances support peer-to-peer access.
    pub peers: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// Maximum number of instances.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [c_uint; 5],
    /// Memory in MiB.
    pub memory_mib: c_ulonglong,
    /// Name of the profile.
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
    /// Profile id.
    pub id: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// Maximum number of instances.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [c_uint; 5],
    /// Memory in MiB.
    pub memory_mib: c_ulonglong,
    /// Name of the profile.
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
    /// Device handle of the GPU.
    pub device: DeviceHandle,
    /// Id of the instance.
    pub id: c_uint,
    /// Profile id.
    pub profile: c_uint,
    /// Position on the axis of memory slices.
    pub placement: Placement,
}

/// `nvmlComputeInstanceProfileInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct ComputeInstanceProfileV1 {
    /// Profile id.
    pub id: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    /// Maximum number of instances.
    pub instances: c_uint,
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines of the GPU instance, which all its compute instances share.
    pub engines: [c_uint; 5],
}

/// `nvmlComputeInstanceProfileInfo_v2_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ComputeInstanceProfileV2 {
    /// [`COMPUTE_INSTANCE_PROFILE_V2`].
    pub version: c_uint,
    /// The fields of the first version.
    pub facts: ComputeInstanceProfileV1,
    /// Name of the profile.
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
    /// The fields of the first version.
    pub facts: ComputeInstanceProfileV1,
    /// Name of the profile.
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
    /// Device handle of the GPU.
    pub device: DeviceHandle,
    /// Handle of the GPU instance.
    pub gpu_instance: GpuInstanceHandle,
    /// Id of the instance.
    pub id: c_uint,
    /// Profile id.
    pub profile: c_uint,
    /// Position on the axis of compute slices.
    pub placement: Placement,
}

/// `nvmlDeviceAttributes_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct DeviceAttributes {
    /// Multiprocessors.
    pub multiprocessors: c_uint,
    /// Engines of the GPU instance, which all its compute instances share.
    pub engines: [c_uint; 5],
    /// Compute slices of the GPU instance.
    pub gpu_slices: c_uint,
    /// Compute slices of the compute instance.
    pub compute_slices: c_uint,
    /// Memory in MiB.
    pub memory_mib: c_ulonglong,
}

/// `nvmlFieldValue_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FieldValue {
    /// Number of the field.
    pub field: c_uint,
    /// Selects one of several values of the field.
    pub scope: c_uint,
    /// Microseconds since 1970.
    pub time: i64,
    /// Duration of the query in microseconds.
    pub latency: i64,
    /// An `nvmlValueType_t`.
    pub kind: c_uint,
    /// An `nvmlReturn_t`.
    pub status: c_uint,
    /// Value, stored from the first byte on.
    pub value: c_ulonglong,
}
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
pub const FIELD_RECOVERY_ACTION: c_uint = 230;

// The sizes in the vendor's header.
const _: () = {
    assert!(size_of::<PciInfo>() == 68);
    assert!(size_of::<MemoryV1>() == 24);
    assert!(size_of::<MemoryV2>() == 40 && MEMORY_V2 == 0x200_0028);
    assert!(size_of::<FabricInfo>() == 28);
    assert!(size_of::<FabricInfoV2>() == 36 && FABRIC_INFO_V2 == 0x200_0024);
    assert!(size_of::<FabricInfoV3>() == 40 && FABRIC_INFO_V3 == 0x300_0028);
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

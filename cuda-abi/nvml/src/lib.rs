//! NVML, the management library: its layouts, its result codes, and its C surface over a [`Driver`].
//!
//! The software GPU and the guest each have a `libnvidia-ml.so.1`. Only the source of facts differs, their [`Driver`]. Everything
//! that C programs use is implemented here once: reference-counted initialisation, handles, versioned structures, buffers that
//! are too small, event sets. A library consists of a [`Library`] and [`nvml_library`], which exports every name of `nvml.h`.
//!
//! The crate owns layouts, handles and sessions. It gets every fact from its [`Driver`] and knows neither transport nor devices.
//!
//! Calls that only make sense for a physical board (temperature, clocks, power, fans…) return `NVML_ERROR_NOT_SUPPORTED`, never
//! an invented value; so do calls for instances (MIG) if the driver has none.

mod calls;
mod driver;
mod events;
mod exports;
mod facts;
mod instances;
mod layout;
mod library;
mod pointers;
mod session;
mod sets;
mod status;
mod targets;

pub use driver::{
    ComputeInstance, ComputeProfile, Driver, Facts, Gpu, GpuInstance, GpuMemory, GpuProfile, Health,
    InstanceId, Mig, Opened, Pci, Process, Watch, Xid,
};
pub use facts::{
    DRIVER_VERSION, NVML_VERSION, architecture, brand, cores_per_multiprocessor, mig_uuid_text, uuid_text,
};
pub use layout::{
    COMPUTE_INSTANCE_PROFILE_V2, COMPUTE_INSTANCE_PROFILE_V3, ComputeInstanceHandle, ComputeInstanceInfo,
    ComputeInstanceProfileV1, ComputeInstanceProfileV2, ComputeInstanceProfileV3, DeviceAttributes,
    DeviceHandle, EVENT_XID, EventData, EventSetHandle, FABRIC_INFO_V2, FABRIC_INFO_V3,
    FIELD_RECOVERY_ACTION, FabricInfo, FabricInfoV2, FabricInfoV3, FieldValue, GPU_INSTANCE_PROFILE_V2,
    GPU_INSTANCE_PROFILE_V3, GpuInstanceHandle, GpuInstanceInfo, GpuInstanceProfileV1, GpuInstanceProfileV2,
    GpuInstanceProfileV3, MEMORY_V2, MemoryV1, MemoryV2, NO_INSTANCE, PROCESS_DETAILS_V1, PciInfo, Placement,
    ProcessDetail, ProcessDetails, ProcessInfoV1, ProcessInfoV2, ProcessSample, Utilization,
};
pub use library::Library;
pub use pointers::{Out, Text};
pub use status::{Result, Status};

/// Functions for the expansion of [`nvml_library`] only.
#[doc(hidden)]
pub mod entry {
    pub use crate::calls::*;
    pub use crate::instances::*;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nvml_code_has_a_text() {
        for code in (0..=30).chain([999]) {
            let text = Status::text(code).to_str().unwrap_or_default();
            assert!(!text.is_empty() && (code == 999 || text != "Unknown Error"), "{code}: {text}");
        }
    }
}

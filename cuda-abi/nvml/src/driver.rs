//! The interface between a library and the driver behind it, which supplies all facts.

use crate::status::{Result, Status};
use std::os::fd::BorrowedFd;

/// The driver behind a management library.
pub trait Driver: Sync {
    /// Finds the GPUs. Called when the library is initialised, also after a complete shutdown.
    fn open(&self) -> Result<Opened>;
    /// Called with the name of each call, before any other work. An error becomes the result of the call.
    fn before(&self, _call: &'static str) -> Result {
        Ok(())
    }
}

/// The result of opening the driver.
pub struct Opened {
    /// The GPUs, by index.
    pub gpus: Vec<Box<dyn Gpu>>,
    /// The CUDA version that the driver supports, as `cuDriverGetVersion` returns it.
    pub cuda_version: i32,
}

/// PCI address of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pci {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device on the bus.
    pub device: u32,
}

impl std::fmt::Display for Pci {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// Properties of a GPU that do not change while the library is initialised.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Name.
    pub name: String,
    /// UUID.
    pub uuid: [u8; 16],
    /// PCI address.
    pub pci: Pci,
    /// Minor number of the device node.
    pub minor: u32,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Width of the memory bus in bits.
    pub bus_bits: u32,
    /// True if the memory corrects errors; `None` if the GPU does not support that.
    pub ecc: Option<bool>,
    /// The near NUMA node of the host, if known.
    pub node: Option<u32>,
}

/// Bytes of GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuMemory {
    /// Total bytes.
    pub total: u64,
    /// Used bytes.
    pub used: u64,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Bytes of memory that the process uses.
    pub bytes: u64,
    /// Nanoseconds for which its kernels have run since it started; `None` if they are not counted.
    pub busy_nanoseconds: Option<u64>,
    /// The instance that it computes on, if any.
    pub instance: Option<InstanceId>,
}

/// A compute instance of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstanceId {
    /// Number among all GPU instances that the GPU ever had; never used again.
    pub epoch: u32,
    /// Id of the GPU instance.
    pub gpu: u32,
    /// Id of the compute instance within the GPU instance.
    pub compute: u32,
}

/// Health of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Health {
    /// Corrected memory errors.
    pub corrected: u64,
    /// Uncorrected memory errors.
    pub uncorrected: u64,
    /// Memory rows remapped after corrected and after uncorrected errors.
    pub remapped: (u32, u32),
    /// True if more rows will be remapped at the next reset.
    pub pending: bool,
    /// An `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: u32,
}

/// A profile of GPU instances.
#[derive(Debug, Clone)]
pub struct GpuProfile {
    /// Name of the profile.
    pub name: String,
    /// Id among the profiles of the GPU.
    pub id: u32,
    /// Index (`NVML_GPU_INSTANCE_PROFILE_*`).
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    /// Maximum number of instances.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [u32; 5],
    /// Memory in bytes.
    pub memory: u64,
    /// Memory slices.
    pub size: u32,
    /// Profiles of compute instances in it.
    pub compute: Vec<ComputeProfile>,
}

/// A profile of compute instances.
#[derive(Debug, Clone)]
pub struct ComputeProfile {
    /// Index (`NVML_COMPUTE_INSTANCE_PROFILE_*`), which is also its id.
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    /// Maximum number of instances.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Possible first compute slices.
    pub starts: Vec<u32>,
}

/// A GPU instance.
#[derive(Debug, Clone)]
pub struct GpuInstance {
    /// Number among all GPU instances that the GPU ever had; never used again.
    pub epoch: u32,
    /// Id within the GPU.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Compute instances in it.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance.
#[derive(Debug, Clone, Copy)]
pub struct ComputeInstance {
    /// Id within its GPU instance.
    pub id: u32,
    /// Index of its profile.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// UUID.
    pub uuid: [u8; 16],
}

/// The instances that a GPU can be divided into (MIG). Calls return `NOT_FOUND` for a missing instance, and `INVALID_ARGUMENT`
/// for an invalid name or number.
pub trait Mig {
    /// True if the GPU is divided.
    fn is_divided(&self) -> Result<bool>;
    /// True if the GPU will be divided after its next reset.
    fn will_be_divided(&self) -> Result<bool> {
        self.is_divided()
    }
    /// Divides the GPU, or undoes the division.
    fn divide(&self, divided: bool) -> Result;
    /// Maximum number of compute instances.
    fn most(&self) -> u32;
    /// Returns the profiles of GPU instances.
    fn profiles(&self) -> Vec<GpuProfile>;
    /// Returns the possible first slices of a profile; none if the maximum number of instances exists.
    fn places(&self, profile: u32) -> Result<Vec<u32>>;
    /// Returns the number of instances of a profile that still fit.
    fn capacity(&self, profile: u32) -> Result<u32>;
    /// Returns all GPU instances.
    fn instances(&self) -> Result<Vec<GpuInstance>>;
    /// Creates a GPU instance, at memory slice `start` if given.
    fn create(&self, profile: u32, start: Option<u32>) -> Result<GpuInstance>;
    /// Destroys a GPU instance.
    fn destroy(&self, epoch: u32) -> Result;
    /// Returns the number of compute instances of a profile that still fit into a GPU instance.
    fn compute_capacity(&self, epoch: u32, profile: u32) -> Result<u32>;
    /// Creates a compute instance, at compute slice `start` if given.
    fn create_compute(&self, epoch: u32, profile: u32, start: Option<u32>) -> Result<ComputeInstance>;
    /// Destroys a compute instance.
    fn destroy_compute(&self, epoch: u32, id: u32) -> Result;
    /// Returns the present memory of a GPU instance.
    fn memory(&self, epoch: u32) -> Result<GpuMemory>;
}

/// An error that a GPU reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// Number of the error.
    pub number: u64,
    /// Ids of the GPU instance and the compute instance, if the error happened in one.
    pub instance: Option<(u32, u32)>,
}

/// One GPU.
pub trait Gpu: Send + Sync {
    /// Returns the unchanging properties.
    fn facts(&self) -> &Facts;
    /// Returns the present memory.
    fn memory(&self) -> Result<GpuMemory>;
    /// Returns the processes that compute on the GPU now.
    fn processes(&self) -> Result<Vec<Process>>;
    /// Returns the present health.
    fn health(&self) -> Result<Health> {
        Err(Status::NOT_SUPPORTED)
    }
    /// Returns the instances; `None` if the GPU cannot be divided.
    fn mig(&self) -> Option<&dyn Mig> {
        None
    }
    /// Watches for errors from now on.
    fn watch(&self) -> Result<Box<dyn Watch>> {
        Err(Status::NOT_SUPPORTED)
    }
}

/// A watch for errors of one GPU.
pub trait Watch: Send {
    /// Returns the next error, if one has been reported already.
    fn next(&mut self) -> Result<Option<Xid>>;
    /// Returns a descriptor that becomes readable when there may be an error.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

//! The source of facts: the interface between a library and the driver behind it.

use super::status::{Result, Status};
use std::os::fd::BorrowedFd;

/// The driver behind a management library.
pub trait Driver: Sync {
    /// Finds the GPUs: at the first start, and at each first start after an end.
    fn open(&self) -> Result<Opened>;
    /// Called with the name of each call before anything else is done: an error is its answer.
    fn before(&self, _call: &'static str) -> Result {
        Ok(())
    }
}

/// What a start brings.
pub struct Opened {
    /// The GPUs, in the order of their indices.
    pub gpus: Vec<Box<dyn Gpu>>,
    /// The version of CUDA that the driver serves, as `cuDriverGetVersion` gives it.
    pub cuda_version: i32,
}

/// Where a GPU is on its bus.
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

/// What a GPU is, for as long as the library is started.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its place on the bus.
    pub pci: Pci,
    /// Its number among the device nodes.
    pub minor: u32,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// The width of its memory bus in bits.
    pub bus_bits: u32,
    /// Whether its memory corrects errors; `None` where it could not.
    pub ecc: Option<bool>,
    /// The NUMA node of the host that it is near, where that is known.
    pub node: Option<u32>,
}

/// Bytes of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// All.
    pub total: u64,
    /// Of these, used.
    pub used: u64,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Bytes of memory it uses.
    pub bytes: u64,
    /// Nanoseconds for which its kernels have run since it started; `None` where nobody counts them.
    pub busy_nanoseconds: Option<u64>,
    /// The instance that it computes on, if it does on one.
    pub instance: Option<InstanceId>,
}

/// A compute instance of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstanceId {
    /// Which of all GPU instances that the GPU ever had.
    pub epoch: u32,
    /// The number of the GPU instance.
    pub gpu: u32,
    /// The number of the compute instance in it.
    pub compute: u32,
}

/// How a GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Health {
    /// Errors of memory that were corrected.
    pub corrected: u64,
    /// Errors of memory that were not.
    pub uncorrected: u64,
    /// Rows of memory that were replaced after errors of either kind.
    pub remapped: (u32, u32),
    /// Whether more will be after the next reset.
    pub pending: bool,
    /// An `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery: u32,
}

/// A kind of GPU instance.
#[derive(Debug, Clone)]
pub struct GpuProfile {
    /// What it is called.
    pub name: String,
    /// Its id among those of the GPU.
    pub id: u32,
    /// Its number (`NVML_GPU_INSTANCE_PROFILE_*`).
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    /// How many there can be.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [u32; 5],
    /// Bytes of memory.
    pub memory: u64,
    /// Memory slices.
    pub size: u32,
    /// The kinds of compute instances in it.
    pub compute: Vec<ComputeProfile>,
}

/// A kind of compute instance.
#[derive(Debug, Clone)]
pub struct ComputeProfile {
    /// Its number (`NVML_COMPUTE_INSTANCE_PROFILE_*`), and its id.
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    /// How many there can be.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Where they may start.
    pub starts: Vec<u32>,
}

/// A GPU instance.
#[derive(Debug, Clone)]
pub struct GpuInstance {
    /// Which of all that the GPU ever had.
    pub epoch: u32,
    /// Its number.
    pub id: u32,
    /// The id of its profile.
    pub profile: u32,
    /// Its first memory slice.
    pub start: u32,
    /// Its compute instances.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance.
#[derive(Debug, Clone, Copy)]
pub struct ComputeInstance {
    /// Its number in its GPU instance.
    pub id: u32,
    /// The number of its profile.
    pub profile: u32,
    /// Its first compute slice.
    pub start: u32,
    /// Its UUID.
    pub uuid: [u8; 16],
}

/// The instances that a GPU can be divided into (MIG). What is not there is `NOT_FOUND`, what is named wrongly
/// `INVALID_ARGUMENT`.
pub trait Mig {
    /// Whether the GPU is divided.
    fn is_divided(&self) -> Result<bool>;
    /// Whether it is from its next reset on.
    fn will_be_divided(&self) -> Result<bool> {
        self.is_divided()
    }
    /// Divides it, or puts it together.
    fn divide(&self, divided: bool) -> Result;
    /// Compute instances that there can be at once.
    fn most(&self) -> u32;
    /// The kinds of instances.
    fn profiles(&self) -> Vec<GpuProfile>;
    /// Where instances of a profile can start; nothing while there are as many as there can be.
    fn places(&self, profile: u32) -> Result<Vec<u32>>;
    /// How many more of a profile fit.
    fn capacity(&self, profile: u32) -> Result<u32>;
    /// What there is.
    fn instances(&self) -> Result<Vec<GpuInstance>>;
    /// Makes a GPU instance, at that slice if one is given.
    fn create(&self, profile: u32, start: Option<u32>) -> Result<GpuInstance>;
    /// Unmakes one.
    fn destroy(&self, epoch: u32) -> Result;
    /// How many more compute instances of a kind fit into a GPU instance.
    fn compute_capacity(&self, epoch: u32, profile: u32) -> Result<u32>;
    /// Makes a compute instance, at that compute slice if one is given.
    fn create_compute(&self, epoch: u32, profile: u32, start: Option<u32>) -> Result<ComputeInstance>;
    /// Unmakes one.
    fn destroy_compute(&self, epoch: u32, id: u32) -> Result;
    /// The memory of a GPU instance, now.
    fn memory(&self, epoch: u32) -> Result<Memory>;
}

/// An error that a GPU reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// Its number.
    pub number: u64,
    /// The numbers of the GPU instance and of the compute instance where it was, if it was in one.
    pub instance: Option<(u32, u32)>,
}

/// One GPU.
pub trait Gpu: Send + Sync {
    /// What it is.
    fn facts(&self) -> &Facts;
    /// Its memory, now.
    fn memory(&self) -> Result<Memory>;
    /// The processes that compute on it, now.
    fn processes(&self) -> Result<Vec<Process>>;
    /// How it is, now.
    fn health(&self) -> Result<Health> {
        Err(Status::NOT_SUPPORTED)
    }
    /// Its instances; `None` where it cannot be divided.
    fn mig(&self) -> Option<&dyn Mig> {
        None
    }
    /// Watches its errors from now on.
    fn watch(&self) -> Result<Box<dyn Watch>> {
        Err(Status::NOT_SUPPORTED)
    }
}

/// A look-out for the errors of one GPU.
pub trait Watch: Send {
    /// The next one, if there is one already.
    fn next(&mut self) -> Result<Option<Xid>>;
    /// What becomes readable when there may be one.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

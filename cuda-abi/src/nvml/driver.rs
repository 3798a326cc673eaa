//! Where the facts come from: what a library asks of the driver behind it.

use super::status::{Result, Status};
use std::os::fd::BorrowedFd;

/// The driver behind a management library.
pub trait Driver: Sync {
    /// Finds the GPUs: at the first start, and at each first start after an end.
    fn open(&self) -> Result<Opened>;
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
    /// Whether it can be divided into instances (it never is).
    pub divisible: bool,
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
}

/// One GPU.
pub trait Gpu: Send + Sync {
    /// What it is.
    fn facts(&self) -> &Facts;
    /// Its memory, now.
    fn memory(&self) -> Result<Memory>;
    /// The processes that compute on it, now.
    fn processes(&self) -> Result<Vec<Process>>;
    /// Watches its errors from now on.
    fn watch(&self) -> Result<Box<dyn Watch>> {
        Err(Status::NOT_SUPPORTED)
    }
}

/// A look-out for the errors of one GPU.
pub trait Watch: Send {
    /// The next Xid, if there is one already.
    fn next(&mut self) -> Result<Option<u64>>;
    /// What becomes readable when there may be one.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

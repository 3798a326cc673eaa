//! Options of the commands that start a backend.

use std::path::PathBuf;

use sluice_api::{ByteSize, v1::VmRequest};

use crate::vms;

/// Options of each command that starts a backend.
#[derive(Debug, clap::Args)]
pub(crate) struct BackendOptions {
    /// CUDA driver library to compute on [default: the software GPU, libsoftgpu_cuda.so]
    #[arg(long, value_name = "PATH")]
    pub(crate) driver: Option<PathBuf>,
    /// Management library (NVML) of the driver [default: that of the software GPU, with it]
    #[arg(long, value_name = "PATH")]
    pub(crate) nvml: Option<PathBuf>,
    /// Quota of device memory, for instance 1GiB [default: all of the device]
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(0), hide_default_value = true)]
    pub(crate) memory: ByteSize,
    /// Log level of Sluice's own processes on standard error: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
    /// Maximum number of page runs that a worker maps. Memory beyond it is copied. 0: copy everything
    #[arg(long, value_name = "N")]
    pub(crate) mapped_runs: Option<u32>,
    #[command(flatten)]
    pub(crate) arena: vms::ArenaOptions,
}

impl BackendOptions {
    /// The request for a VM.
    pub(crate) fn vm(&self) -> VmRequest {
        let memory_bytes = (self.memory.0 > 0).then_some(self.memory.0);
        self.arena.over(VmRequest { memory_bytes, ..VmRequest::default() })
    }
}

//! The launcher's command line.

use std::path::PathBuf;

use sluice_messages::{
    control,
    launch::{Fingerprint, NumberRange, SocketMode, VmLimits},
};

/// Command line of the launcher.
#[derive(Debug, clap::Parser)]
#[command(
    name = "sluice-launcher",
    version,
    about = "Starts the processes of Sluice for sluiced. Do not run it by hand.",
    long_about = "Starts the processes of Sluice for sluiced, which is at the other end of the SEQPACKET socket on \
                  standard input, or connects to it. Do not run it by hand: see `sluiced --run-launcher`."
)]
pub struct Arguments {
    /// Path of the device program
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// Path of the worker program
    #[arg(long, value_name = "PATH")]
    pub worker: PathBuf,
    /// Driver library that workers load: they find it and its files in a root of their own, and no others
    #[arg(long, value_name = "PATH")]
    pub driver: Option<PathBuf>,
    /// Path of the arbiter program
    #[arg(long, value_name = "PATH")]
    pub arbiter: Option<PathBuf>,
    /// Path of the inventory program
    #[arg(long, value_name = "PATH")]
    pub inventory: Option<PathBuf>,
    /// Management library that the inventory loads
    #[arg(long, value_name = "PATH", requires = "inventory")]
    pub nvml: Option<PathBuf>,
    /// Number of units, counted from 0, whose arbiter may be started
    #[arg(long, value_name = "N", default_value_t = 0, requires = "arbiter")]
    pub units: u32,
    /// Directory for the sockets of devices
    #[arg(long, value_name = "DIR")]
    pub socket_dir: PathBuf,
    /// Group of the sockets, if not the launcher's
    #[arg(long, value_name = "GID")]
    pub socket_gid: Option<u32>,
    /// Mode of the sockets
    #[arg(long, value_name = "MODE", default_value_t)]
    pub socket_mode: SocketMode,
    /// Let devices accept memory that their VMM can shrink
    #[arg(long)]
    pub trust_vmm_memory: bool,
    /// Range of VM numbers, as FIRST:COUNT
    #[arg(long, value_name = "FIRST:COUNT")]
    pub vm_numbers: NumberRange,
    /// Range of user ids for workers, as FIRST:COUNT
    #[arg(long, value_name = "FIRST:COUNT")]
    pub worker_uids: Option<NumberRange>,
    /// Delegated cgroup v2 directory
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// Bytes of host memory of all processes of a VM [default: half of the host's]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(VmLimits::MEMORY))]
    pub vm_memory: Option<u64>,
    /// Bytes of swap of all processes of a VM
    #[arg(long, value_name = "BYTES", default_value_t = VmLimits::default().swap,
          value_parser = clap::value_parser!(u64).range(VmLimits::BYTES))]
    pub vm_swap: u64,
    /// Bytes of huge pages, of each size, of all processes of a VM
    #[arg(long, value_name = "BYTES", default_value_t = VmLimits::default().huge_pages,
          value_parser = clap::value_parser!(u64).range(VmLimits::BYTES))]
    pub vm_huge_pages: u64,
    /// Threads of all processes of a VM
    #[arg(long, value_name = "N", default_value_t = VmLimits::default().tasks,
          value_parser = clap::value_parser!(u32).range(wide(VmLimits::TASKS)))]
    pub vm_tasks: u32,
    /// Threads of a worker
    #[arg(long, value_name = "N", default_value_t = VmLimits::default().worker_tasks,
          value_parser = clap::value_parser!(u32).range(wide(VmLimits::TASKS)))]
    pub worker_tasks: u32,
    /// Processor time of a VM relative to others
    #[arg(long, value_name = "N", default_value_t = VmLimits::default().cpu_weight,
          value_parser = clap::value_parser!(u32).range(wide(VmLimits::WEIGHTS)))]
    pub vm_cpu_weight: u32,
    /// Message version of sluiced; any other than the launcher's own is refused
    #[arg(long, value_name = "N", value_parser = control::version_of_option)]
    pub messages: Option<u32>,
    /// Listen on the SEQPACKET socket that is standard input, as a service of its own, for a sluiced whose configuration has this
    /// fingerprint
    #[arg(long, value_name = "FINGERPRINT", conflicts_with = "supervised")]
    pub service: Option<Fingerprint>,
    /// Treat standard output as the lifeline of a supervisor: when it closes, everything ends
    #[arg(long)]
    pub supervised: bool,
}

impl Arguments {
    /// The limits of each VM.
    pub(crate) const fn limits(&self) -> VmLimits {
        VmLimits {
            memory: self.vm_memory,
            swap: self.vm_swap,
            huge_pages: self.vm_huge_pages,
            tasks: self.vm_tasks,
            worker_tasks: self.worker_tasks,
            cpu_weight: self.vm_cpu_weight,
        }
    }
}

fn wide(range: std::ops::RangeInclusive<u32>) -> std::ops::RangeInclusive<i64> {
    i64::from(*range.start())..=i64::from(*range.end())
}

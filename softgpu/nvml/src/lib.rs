//! NVML for the software GPU.
//!
//! Built as a shared library it is `libnvidia-ml.so.1`: monitors and Sluice's inventory load it as they load the vendor's. It
//! reads the same devices as the software CUDA driver, with the same configuration. Every number comes from the device's header,
//! where the processes that use the device record it; nothing is invented.
//!
//! A process is listed once it has a context or memory. The memory that it *took* from the device is booked to it: the driver's
//! overhead, its heap, and the chunks it made. An imported chunk is booked to the process that made it, and to no process after
//! that one has ended. A process of another PID namespace is not listed, since its number would name another process; its memory
//! still counts as used.
//!
//! Tests inject errors by optional files:
//!
//! * each line appended to `xid` in a device's directory is the number of an Xid that the device then reports; the ids of a GPU
//!   instance and of a compute instance may follow it;
//! * `health` in a device's directory sets the device's health, see [`faults`];
//! * `faults` in the state directory, or in a device's, lists the calls that fail, or never return, until their line is removed.
//!
//! ```sh
//! ln -s "$PWD/target/release/libsoftgpu_nvml.so" /tmp/softgpu/libnvidia-ml.so.1
//! LD_LIBRARY_PATH=/tmp/softgpu gpustat
//! ```

mod faults;
mod instances;
mod xid;

use sluice_cuda_abi::symbols::CUDA_VERSION;
use sluice_nvml_abi::{
    Driver, Facts, Gpu, GpuMemory, Health, InstanceId, Library, Mig, Opened, Pci, Process, Result, Status,
    Watch,
};
use softgpu_device::{Booking, Client, Config, Device, Owner};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The devices of the configuration.
struct SoftDriver;

static DRIVER: SoftDriver = SoftDriver;
static LIBRARY: Library = Library::new(&DRIVER);
/// The state directory, set when the library is initialised.
static STATE: OnceLock<PathBuf> = OnceLock::new();

sluice_nvml_abi::nvml_library!(crate::LIBRARY);

impl Driver for SoftDriver {
    fn open(&self) -> Result<Opened> {
        let config = Config::from_environment().map_err(|error| failed(&error, Status::UNKNOWN))?;
        let mut gpus: Vec<Box<dyn Gpu>> = Vec::new();
        for index in 0..config.devices {
            let device =
                Device::open(&config, index).map_err(|error| failed(&error, Status::OPERATING_SYSTEM))?;
            let owner = Arc::new(device)
                .attach(Client::Nvml)
                .map_err(|error| failed(&error, Status::OPERATING_SYSTEM))?;
            gpus.push(Box::new(SoftGpu::new(owner, &config, index)));
        }
        // There is one configuration per process: the environment is read once, and a second initialisation uses the same.
        let _ = STATE.set(config.state.clone());
        let cuda_version = i32::try_from(CUDA_VERSION).map_err(|_| Status::UNKNOWN)?;
        Ok(Opened { gpus, cuda_version })
    }

    fn before(&self, call: &'static str) -> Result {
        STATE.get().map_or(Ok(()), |state| faults::before(state, call))
    }
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Prints the reason that the library does not start: a status code cannot carry it.
fn failed(reason: &dyn std::fmt::Display, status: Status) -> Status {
    use std::io::Write as _;
    // A closed standard error is ignored.
    let _ = writeln!(std::io::stderr().lock(), "softgpu: NVML cannot start: {reason}");
    status
}

/// A device, with this process as one of its users.
struct SoftGpu {
    facts: Facts,
    owner: Arc<Owner>,
    directory: PathBuf,
    booking: Booking,
}

impl SoftGpu {
    fn new(owner: Arc<Owner>, config: &Config, index: u32) -> SoftGpu {
        let directory = config.state.join(format!("gpu{index}"));
        let identity = owner.device().identity();
        let facts = Facts {
            name: identity.model.name.to_owned(),
            uuid: identity.uuid,
            // The same address as the CUDA driver reports.
            pci: Pci { domain: 0, bus: identity.index + 1, device: 0 },
            minor: identity.index,
            capability: identity.model.capability.version,
            multiprocessors: identity.model.multiprocessors,
            bus_bits: identity.model.bus_bits,
            ecc: Some(config.ecc),
            node: usize::try_from(index).ok().and_then(|index| config.nodes.get(index).copied()),
        };
        SoftGpu { facts, owner, directory, booking: config.booking }
    }

    fn device(&self) -> &Device {
        self.owner.device()
    }

    fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Gpu for SoftGpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self) -> Result<GpuMemory> {
        self.device().collect();
        Ok(GpuMemory { total: self.device().total_bytes(), used: self.device().used_bytes() })
    }

    fn processes(&self) -> Result<Vec<Process>> {
        let computing = self.device().processes().into_iter().filter(|process| {
            process.client == Client::Cuda
                && process.same_namespace
                && (process.contexts > 0 || process.held.total() > 0)
        });
        let hidden = faults::hides_bytes(&self.directory);
        let mut processes: Vec<_> = computing
            .map(|process| Process {
                pid: process.pid,
                bytes: if hidden { NOT_AVAILABLE } else { process.held.booked(self.booking) },
                busy_nanoseconds: Some(process.busy_nanoseconds),
                instance: process.confinement.map(|there| InstanceId {
                    epoch: there.epoch,
                    gpu: there.gpu,
                    compute: there.compute,
                }),
            })
            .collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Ok(processes)
    }

    fn health(&self) -> Result<Health> {
        Ok(faults::health(&self.directory))
    }

    fn mig(&self) -> Option<&dyn Mig> {
        self.device().geometry().map(|_| self as &dyn Mig)
    }

    fn watch(&self) -> Result<Box<dyn Watch>> {
        xid::Watched::open(&self.directory.join("xid"))
            .map(|watched| Box::new(watched) as Box<dyn Watch>)
            .map_err(|error| failed(&error, Status::OPERATING_SYSTEM))
    }
}

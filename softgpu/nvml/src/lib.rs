//! NVML for the software GPU.
//!
//! Built as a shared library it is `libnvidia-ml.so.1`: monitors and Sluice's inventory load it as they load the vendor's.
//! It looks at the same devices as the CUDA driver in software, by the same configuration, and takes every number from
//! what the processes that use a device have left in its header; nothing is invented.
//!
//! A process is listed once it has a context or memory. What is booked to it is what it *took* from the device: what the
//! driver needs for it, its heap, and the chunks it made. A chunk that it imported is booked to the process that made it,
//! and to nobody once that one is gone. A process of another PID namespace is not listed, for its number would name
//! somebody else; its memory counts as used all the same.
//!
//! Errors are injected by tests: each line appended to the file `xid` in a device's directory is the number of an Xid
//! that the device reports from then on.
//!
//! ```sh
//! ln -s "$PWD/target/release/libsoftgpu_nvml.so" /tmp/softgpu/libnvidia-ml.so.1
//! LD_LIBRARY_PATH=/tmp/softgpu gpustat
//! ```

mod xid;

use sluice_cuda_abi::nvml::{
    Driver, Facts, Gpu, Library, Memory, Opened, Pci, Process, Result, Status, Watch,
};
use sluice_cuda_abi::symbols::CUDA_VERSION;
use softgpu_device::{CAPABILITY, Client, Config, Device, Owner};
use std::path::PathBuf;
use std::sync::Arc;

/// The devices that the configuration names.
struct SoftDriver;

static DRIVER: SoftDriver = SoftDriver;
static LIBRARY: Library = Library::new(&DRIVER);

sluice_cuda_abi::nvml_library!(crate::LIBRARY);

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
            gpus.push(Box::new(SoftGpu::new(owner, config.state.join(format!("gpu{index}")))));
        }
        let cuda_version = i32::try_from(CUDA_VERSION).map_err(|_| Status::UNKNOWN)?;
        Ok(Opened { gpus, cuda_version })
    }
}

/// Says why the library does not start: no code can tell a person enough.
fn failed(reason: &dyn std::fmt::Display, status: Status) -> Status {
    use std::io::Write as _;
    // A closed standard error is not our concern.
    let _ = writeln!(std::io::stderr().lock(), "softgpu: NVML cannot start: {reason}");
    status
}

/// A device, and this process among those that use it.
struct SoftGpu {
    facts: Facts,
    owner: Arc<Owner>,
    directory: PathBuf,
}

impl SoftGpu {
    fn new(owner: Arc<Owner>, directory: PathBuf) -> SoftGpu {
        let identity = owner.device().identity();
        let facts = Facts {
            name: identity.model.name.to_owned(),
            uuid: identity.uuid,
            // As the CUDA driver says it.
            pci: Pci { domain: 0, bus: identity.index + 1, device: 0 },
            minor: identity.index,
            capability: CAPABILITY,
            multiprocessors: identity.model.multiprocessors,
            bus_bits: identity.model.bus_bits,
            ecc: Some(false),
            divisible: identity.model.mig,
        };
        SoftGpu { facts, owner, directory }
    }

    fn device(&self) -> &Device {
        self.owner.device()
    }
}

impl Gpu for SoftGpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self) -> Result<Memory> {
        self.device().collect();
        Ok(Memory { total: self.device().total_bytes(), used: self.device().used_bytes() })
    }

    fn processes(&self) -> Result<Vec<Process>> {
        let computing = self.device().processes().into_iter().filter(|process| {
            process.client == Client::Cuda
                && process.same_namespace
                && (process.contexts > 0 || process.held.total() > 0)
        });
        let mut processes: Vec<_> = computing
            .map(|process| Process {
                pid: process.pid,
                bytes: process.held.taken(),
                busy_nanoseconds: Some(process.busy_nanoseconds),
            })
            .collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Ok(processes)
    }

    fn watch(&self) -> Result<Box<dyn Watch>> {
        xid::Watched::open(&self.directory.join("xid"))
            .map(|watched| Box::new(watched) as Box<dyn Watch>)
            .map_err(|error| failed(&error, Status::OPERATING_SYSTEM))
    }
}

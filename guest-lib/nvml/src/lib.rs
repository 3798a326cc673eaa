//! The guest's `libnvidia-ml.so.1`: the view that monitors in a guest have of its GPUs.
//!
//! It loads the guest's `libcuda.so.1` by that name, takes the table that the library has for this purpose, and answers from
//! the host's information for the VM: names, memory to the byte of its quota, and the processes of this VM by the numbers that
//! the guest gave them. Nothing beyond the VM (other tenants, the host, the board) can be queried.
//!
//! It lists processes that hold memory, so it does not list a monitor, which holds none. All GPUs of the VM are there, regardless of
//! `CUDA_VISIBLE_DEVICES`, as with the vendor's library.

mod shim;

use shim::Shim;
use sluice_nvml_abi::{Driver, Facts, Gpu, GpuMemory, Library, Opened, Pci, Process, Result, Status};

/// The GPUs of this VM.
struct Guest;

static DRIVER: Guest = Guest;
static LIBRARY: Library = Library::new(&DRIVER);

sluice_nvml_abi::nvml_library!(crate::LIBRARY);

impl Driver for Guest {
    fn open(&self) -> Result<Opened> {
        let shim = Shim::load()?;
        let mut gpus: Vec<Box<dyn Gpu>> = Vec::new();
        for index in 0..shim.devices()? {
            gpus.push(Box::new(GuestGpu { facts: facts(shim, index)?, shim, index }));
        }
        let cuda_version = i32::try_from(shim.driver_version()?).map_err(|_| Status::UNKNOWN)?;
        Ok(Opened { gpus, cuda_version })
    }
}

/// Device attributes (`CUdevice_attribute`) that describe a GPU.
mod attribute {
    pub(crate) const MULTIPROCESSOR_COUNT: u32 = 16;
    pub(crate) const ECC_ENABLED: u32 = 32;
    pub(crate) const PCI_BUS_ID: u32 = 33;
    pub(crate) const PCI_DEVICE_ID: u32 = 34;
    pub(crate) const MEMORY_BUS_WIDTH: u32 = 37;
    pub(crate) const PCI_DOMAIN_ID: u32 = 50;
    pub(crate) const CAPABILITY_MAJOR: u32 = 75;
    pub(crate) const CAPABILITY_MINOR: u32 = 76;
}

fn facts(shim: Shim, index: u32) -> Result<Facts> {
    let attribute = |id| Ok(u32::try_from(shim.attribute(index, id)?).unwrap_or(0));
    let (name, uuid) = shim.identity(index)?;
    Ok(Facts {
        name,
        uuid,
        pci: Pci {
            domain: attribute(attribute::PCI_DOMAIN_ID)?,
            bus: attribute(attribute::PCI_BUS_ID)?,
            device: attribute(attribute::PCI_DEVICE_ID)?,
        },
        minor: index,
        capability: (attribute(attribute::CAPABILITY_MAJOR)?, attribute(attribute::CAPABILITY_MINOR)?),
        multiprocessors: attribute(attribute::MULTIPROCESSOR_COUNT)?,
        bus_bits: attribute(attribute::MEMORY_BUS_WIDTH)?,
        ecc: Some(attribute(attribute::ECC_ENABLED)? != 0),
        // NUMA nodes are the host's.
        node: None,
    })
}

/// A GPU in the shim's table.
struct GuestGpu {
    facts: Facts,
    shim: Shim,
    index: u32,
}

impl Gpu for GuestGpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self) -> Result<GpuMemory> {
        self.shim.memory(self.index)
    }

    fn processes(&self) -> Result<Vec<Process>> {
        let process = |pid, bytes| Process { pid, bytes, busy_nanoseconds: None, instance: None };
        let listed = self.shim.processes(self.index)?;
        if listed.is_empty() {
            // On a host without an arbiter each process has memory of its own, and the host lists none of them.
            let own = self.memory()?.used;
            return Ok(if own > 0 { vec![process(std::process::id(), own)] } else { Vec::new() });
        }
        let holders = listed.into_iter().filter(|listed| listed.bytes > 0);
        let mut processes: Vec<_> = holders.map(|listed| process(listed.process, listed.bytes)).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Ok(processes)
    }
}

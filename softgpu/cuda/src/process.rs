//! The driver itself, which lives from `cuInit` until the process ends.
//!
//! `cuInit` starts it, and every other entry point needs it. It owns the primary contexts, the threads that execute kernels and
//! the address windows of devices. No part of it is ever released.

use std::sync::{Arc, Mutex, OnceLock};

use sluice_cuda_frontend::environment::Environment;
use sluice_cuda_frontend::tables::DeviceIdentity;
use softgpu_device::{AttachError, Client, Config, Device, Reservation};
use softgpu_engine::{LOCAL_WINDOW, Pool, SHARED_WINDOW};

use crate::error::{Error, Result};
use crate::gpu::{self, VisibleGpu};
use crate::lock::lock;
use crate::log::log;
use crate::memory::{Rates, Space};
use crate::primary::Primary;
use crate::{lifetime, schedule, visible};

/// The driver after `cuInit`.
pub(crate) struct DriverState {
    /// The primary contexts of the GPUs, by ordinal.
    primaries: Vec<Primary>,
    pub(crate) identities: Vec<DeviceIdentity>,
    pub(crate) pool: Pool,
    /// Address windows of shared and local memory: reserved, never mapped.
    _windows: [Reservation; 2],
}

static DRIVER: OnceLock<DriverState> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

/// Address range for windows of device memory: above the engine's windows, and below the addresses that Sluice's sessions and the
/// system use. One window for each GPU, each of `WINDOW_BYTES`.
const WINDOWS: std::ops::Range<u64> = 0x7d00_0000_0000..0x7e00_0000_0000;
const WINDOW_BYTES: u64 = 64 << 30;

/// Returns the driver, if this process may use it.
pub(crate) fn driver() -> Result<&'static DriverState> {
    lifetime::check()?;
    DRIVER.get().ok_or(Error::NOT_INITIALIZED)
}

/// `cuInit`. A failed start may be repeated; a second start does nothing.
pub(crate) fn start(flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    lifetime::check()?;
    let _guard = lock(&STARTING);
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let config = Config::from_environment().map_err(|error| {
        failed(&error);
        Error::UNKNOWN
    })?;
    softgpu_engine::reserve_code(|text| log!("{text}"));
    let windows = [SHARED_WINDOW, LOCAL_WINDOW].map(|window| {
        Reservation::at(window.start, window.end - window.start).map_err(|error| {
            failed(&format_args!("cannot reserve addresses at {:#x}: {error}", window.start));
            Error::OPERATING_SYSTEM
        })
    });
    let [Ok(shared), Ok(local)] = windows else { return Err(Error::OPERATING_SYSTEM) };

    let mut opened = Vec::new();
    for index in 0..config.devices {
        opened.push(Arc::new(Device::open(&config, index).map_err(|error| {
            failed(&error);
            Error::OPERATING_SYSTEM
        })?));
    }
    let visible = visible::chosen(&opened, Environment::get());
    if visible.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    lifetime::watch(give_back)?;

    let threads = match config.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut gpus: Vec<&'static VisibleGpu> = Vec::new();
    schedule::start(config.queue_depth.unwrap_or(u64::MAX), config.start_delay);
    let mut primaries = Vec::new();
    let mut identities = Vec::new();
    let mut at = WINDOWS.start;
    for (ordinal, face) in visible.into_iter().enumerate() {
        let device = &face.device;
        let owner = match face.confinement {
            Some(confinement) => device.attach_confined(confinement),
            None => device.attach(Client::Cuda),
        };
        let owner = owner.map_err(|error| {
            failed(&error);
            match error {
                // The device was whole, or the instance existed, a moment ago.
                AttachError::Divided | AttachError::Gone => Error::NO_DEVICE,
                AttachError::Full | AttachError::Lock(_) => Error::OPERATING_SYSTEM,
            }
        })?;
        lifetime::add_witness(ordinal, owner.witness());
        let window = reserve_window(&mut at)?;
        let identity = *device.identity();
        let space: &'static Space =
            Box::leak(Box::new(Space::new(owner, window, config.memory, &config.lacks)));
        let ordinal = i32::try_from(ordinal).map_err(|_| Error::UNKNOWN)?;
        let resident = identity.model.capability.threads_per_multiprocessor;
        let resident = u64::from(face.multiprocessors) * u64::from(resident);
        let rates = Rates::new(config.context_bytes, identity.scale, resident);
        let uuid = face.uuid;
        let gpu = VisibleGpu::new(ordinal, identity, face, &config, space, rates, threads);
        let gpu: &'static VisibleGpu = Box::leak(Box::new(gpu));
        primaries.push(Primary::register(gpu)?);
        identities.push(DeviceIdentity {
            uuid,
            pci_domain: 0,
            pci_bus: i32::try_from(gpu.pci_bus()).map_err(|_| Error::UNKNOWN)?,
            pci_device: 0,
        });
        gpus.push(gpu);
    }
    let pool = Pool::new(threads);
    let driver = DriverState { primaries, identities, pool, _windows: [shared, local] };
    // The lock is held, so no other thread has set it.
    let _ = DRIVER.set(driver);
    gpu::install(gpus);
    Ok(())
}

/// Gives memory of devices that no other process uses back to the host.
fn give_back() {
    for gpu in gpu::installed() {
        gpu.space.owner().give_back();
    }
}

/// Prints the reason that the driver does not start, even without a log: a result code cannot carry it.
fn failed(reason: &dyn std::fmt::Display) {
    crate::log::line(format_args!("cannot start: {reason}"));
}

fn reserve_window(at: &mut u64) -> Result<Reservation> {
    while *at + WINDOW_BYTES <= WINDOWS.end {
        let candidate = *at;
        *at += WINDOW_BYTES;
        if let Ok(window) = Reservation::at(candidate, WINDOW_BYTES) {
            return Ok(window);
        }
    }
    failed(&"no free addresses for device memory");
    Err(Error::OPERATING_SYSTEM)
}

impl DriverState {
    /// Returns the primary context of the GPU of an ordinal.
    pub(crate) fn primary(&self, ordinal: i32) -> Result<&Primary> {
        let index = usize::try_from(ordinal).map_err(|_| Error::INVALID_DEVICE)?;
        self.primaries.get(index).ok_or(Error::INVALID_DEVICE)
    }
}

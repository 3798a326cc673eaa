//! The entry points for devices and primary contexts.

use std::ffi::c_char;

use sluice_cuda_frontend::pci::BusId;
use sluice_cuda_frontend::retains::Retainer;
use sluice_cuda_frontend::{atomics, links};
use sluice_cuda_images::{Limits, Texel};

use crate::attributes::{self, CONSTANT_BYTES};
use crate::capability::{MAX_PITCH, SHARED_PER_BLOCK, WARP};
use crate::error::{Error, Result};
use crate::ffi::{In, Out, Text};
use crate::gpu::{self, VisibleGpu};
use crate::graphs::GRAPHS;
use crate::images::IMAGES;
use crate::launch::{MAX_BLOCK, MAX_GRID, MAX_THREADS};
use crate::peers;
use crate::primary::Primary;
use crate::process::driver;

fn primary(device: i32) -> Result<&'static Primary> {
    driver()?.primary(device)
}

fn bus_id(gpu: &VisibleGpu) -> BusId {
    BusId { domain: 0, bus: gpu.pci_bus(), device: 0, function: 0 }
}

/// Flags for scheduling (3 bits), mapped host memory, resize of local memory, core dumps, synchronous memory operations.
const CONTEXT_FLAGS: u32 = 0xff;

pub(super) fn valid_context_flags(flags: u32) -> Result<u32> {
    let schedule = flags & 7;
    if flags & !CONTEXT_FLAGS != 0 || !matches!(schedule, 0 | 1 | 2 | 4) {
        return Err(Error::INVALID_VALUE);
    }
    Ok(flags)
}

calls! {
    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(i32::try_from(gpu::all()?.len()).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) { device.set(gpu::at(ordinal)?.ordinal) }

    fn cuDeviceGetName(name: Out<c_char>, room: i32, device: i32) {
        let gpu = gpu::at(device)?;
        name.set_text_cut(&gpu.face.name, room)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) { uuid.set(gpu::at(device)?.face.uuid) }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) { uuid.set(gpu::at(device)?.face.uuid) }

    fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: i32) { bytes.set(gpu::at(device)?.space.total()) }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        value.set(attributes::attribute(gpu::at(device)?, attribute)?)
    }

    fn cuDeviceComputeCapability(major: Out<u32>, minor: Out<u32>, device: i32) {
        let (first, second) = gpu::at(device)?.capability().version;
        minor.required()?;
        major.set(first)?;
        minor.set(second)
    }

    fn cuDeviceGetProperties(properties: Out<[u32; 14]>, device: i32) {
        let gpu = gpu::at(device)?;
        let ([bx, by, bz], [gx, gy, gz]) = (MAX_BLOCK, MAX_GRID);
        properties.set([
            MAX_THREADS, bx, by, bz, gx, gy, gz, SHARED_PER_BLOCK, CONSTANT_BYTES, WARP, MAX_PITCH,
            gpu.capability().registers_per_multiprocessor, gpu.identity.model.clock_khz, 512,
        ])
    }

    fn cuDeviceGetPCIBusId(text: Out<c_char>, room: i32, device: i32) {
        text.set_text_cut(bus_id(gpu::at(device)?).to_string(), room)
    }

    fn cuDeviceGetByPCIBusId(device: Out<i32>, text: Text<'_>) {
        let asked = BusId::parse(text.get()?).ok_or(Error::INVALID_VALUE)?;
        device.required()?;
        let found = gpu::all()?.iter().find(|gpu| bus_id(gpu) == asked).ok_or(Error::INVALID_DEVICE)?;
        device.set(found.ordinal)
    }

    fn cuDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) {
        let (gpu, peer) = (gpu::at(device)?, gpu::at(peer)?);
        answer.set(i32::from(peers::reaches(gpu, peer)))
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, device: i32, peer: i32) {
        let (gpu, peer) = (gpu::at(device)?, gpu::at(peer)?);
        if gpu.ordinal == peer.ordinal {
            return Err(Error::INVALID_DEVICE);
        }
        let answer = links::attribute(attribute, peers::reaches(gpu, peer), 0);
        value.set(answer.ok_or(Error::INVALID_VALUE)?)
    }

    fn cuDeviceGetHostAtomicCapabilities(capabilities: Out<u32>, operations: In<u32>, count: u32, device: i32) {
        let known = attributes::host_atomics(gpu::at(device)?);
        atomics::answer(&known, capabilities, operations, count, Error::INVALID_VALUE)
    }

    fn cuDeviceGetP2PAtomicCapabilities(
        capabilities: Out<u32>, operations: In<u32>, count: u32, device: i32, peer: i32,
    ) {
        gpu::at(device)?;
        gpu::at(peer)?;
        if device == peer {
            return Err(Error::INVALID_DEVICE);
        }
        atomics::answer(&atomics::NONE, capabilities, operations, count, Error::INVALID_VALUE)
    }

    // Only Windows has these identifiers.
    fn cuDeviceGetLuid(_luid: Out<c_char>, _mask: Out<u32>, device: i32) {
        gpu::at(device)?;
        Err(Error::NOT_SUPPORTED)
    }

    fn cuDeviceGetGraphMemAttribute(device: i32, attribute: u32, value: Out<u64>) {
        gpu::at(device)?;
        GRAPHS.memory_attribute(device, attribute, value)
    }

    fn cuDeviceSetGraphMemAttribute(device: i32, attribute: u32, value: In<u64>) {
        gpu::at(device)?;
        GRAPHS.set_memory_attribute(device, attribute, value)
    }

    fn cuDeviceGetExecAffinitySupport(value: Out<i32>, _kind: i32, device: i32) {
        gpu::at(device)?;
        // A type that does not exist is not supported either.
        value.set(0)
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(width: Out<u64>, format: u32, channels: u32, device: i32) {
        gpu::at(device)?;
        Texel::read(format, channels).map_err(|_| Error::INVALID_VALUE)?;
        width.set(u64::from(Limits::DATA_CENTRE.texture_1d_linear_width))
    }

    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) {
        context.required()?;
        context.set(primary(device)?.retain(Retainer::Program)?.handle)
    }

    fn cuDevicePrimaryCtxRelease(device: i32) {
        end_primary(device, |primary| primary.release(Retainer::Program, Error::NOT_PERMITTED))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        end_primary(device, |primary| primary.release(Retainer::Program, Error::INVALID_CONTEXT))
    }

    fn cuDevicePrimaryCtxReset(device: i32) {
        end_primary(device, |primary| {
            primary.reset();
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        end_primary(device, |primary| {
            primary.reset();
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) { set_primary_flags(device, flags) }

    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) { set_primary_flags(device, flags) }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let primary = primary(device)?;
        active.required()?;
        flags.set(primary.flags())?;
        active.set(i32::from(primary.context.is_active()))
    }
}

/// Releases or resets a primary context, whose captures end with it.
fn end_primary(device: i32, end: impl FnOnce(&Primary) -> Result) -> Result {
    let primary = primary(device)?;
    end(primary)?;
    if !primary.context.is_active() {
        GRAPHS.memory_ends_with(primary.context.handle);
        GRAPHS.context_destroyed(primary.context.handle);
        IMAGES.context_ended(primary.context.handle);
    }
    Ok(())
}

fn set_primary_flags(device: i32, flags: u32) -> Result {
    let primary = primary(device)?;
    primary.set_flags(valid_context_flags(flags)?);
    Ok(())
}

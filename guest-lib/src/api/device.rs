//! Device queries: answered from the data of session set-up.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    graphs::GRAPHS,
    process,
    state::devices::{DeviceInfo, attribute},
};
use core::ffi::{c_char, c_int, c_uint, c_void};
use sluice_cuda_frontend::{atomics, pci::BusId};
use sluice_cuda_images::Texel;

fn device(number: c_int) -> Result<&'static DeviceInfo> {
    process::get()?.devices.get(number)
}

pub(crate) fn cuDeviceGet(_: Call, place: Out<c_int>, ordinal: c_int) -> Result {
    device(ordinal)?;
    place.set(ordinal)
}

pub(crate) fn cuDeviceGetCount(_: Call, count: Out<c_int>) -> Result {
    count.set(c_int::try_from(process::get()?.devices.count()).map_err(|_| Error::UNKNOWN)?)
}

pub(crate) fn cuDeviceGetName(_: Call, name: Out<c_char>, room: c_int, dev: c_int) -> Result {
    name.set_text_cut(&device(dev)?.name, room)
}

pub(crate) fn cuDeviceGetUuid(_: Call, uuid: Out<c_void>, dev: c_int) -> Result {
    uuid.set_bytes(&device(dev)?.uuid)
}

pub(crate) fn cuDeviceGetUuid_v2(_: Call, uuid: Out<c_void>, dev: c_int) -> Result {
    uuid.set_bytes(&device(dev)?.uuid)
}

pub(crate) fn cuDeviceTotalMem_v2(_: Call, bytes: Out<usize>, dev: c_int) -> Result {
    bytes.set(usize::try_from(device(dev)?.memory).map_err(|_| Error::UNKNOWN)?)
}

pub(crate) fn cuDeviceGetAttribute(_: Call, value: Out<c_int>, id: c_uint, dev: c_int) -> Result {
    value.set(device(dev)?.attribute(id)?)
}

/// `CUdevprop`, which only old programs use.
pub(crate) fn cuDeviceGetProperties(_: Call, properties: Out<c_void>, dev: c_int) -> Result {
    let device = device(dev)?;
    let ids = [
        attribute::MAX_THREADS_PER_BLOCK,
        attribute::MAX_BLOCK_DIM_X,
        attribute::MAX_BLOCK_DIM_X + 1,
        attribute::MAX_BLOCK_DIM_X + 2,
        attribute::MAX_GRID_DIM_X,
        attribute::MAX_GRID_DIM_X + 1,
        attribute::MAX_GRID_DIM_X + 2,
        attribute::MAX_SHARED_MEMORY_PER_BLOCK,
        attribute::TOTAL_CONSTANT_MEMORY,
        attribute::WARP_SIZE,
        attribute::MAX_PITCH,
        attribute::MAX_REGISTERS_PER_BLOCK,
        attribute::CLOCK_RATE,
        attribute::TEXTURE_ALIGNMENT,
    ];
    let mut bytes = [0; 14 * 4];
    for (id, word) in ids.into_iter().zip(bytes.chunks_exact_mut(4)) {
        word.copy_from_slice(&device.attribute(id)?.to_ne_bytes());
    }
    properties.set_bytes(&bytes)
}

pub(crate) fn cuDeviceComputeCapability(_: Call, major: Out<c_int>, minor: Out<c_int>, dev: c_int) -> Result {
    let device = device(dev)?;
    minor.required()?;
    major.set(device.attribute(attribute::COMPUTE_CAPABILITY_MAJOR)?)?;
    minor.set(device.attribute(attribute::COMPUTE_CAPABILITY_MINOR)?)
}

fn bus_id(of: &DeviceInfo) -> BusId {
    let [domain, bus, device] = [attribute::PCI_DOMAIN_ID, attribute::PCI_BUS_ID, attribute::PCI_DEVICE_ID]
        .map(|id| of.attribute(id).unwrap_or(0).cast_unsigned());
    BusId { domain, bus, device, function: 0 }
}

pub(crate) fn cuDeviceGetPCIBusId(_: Call, text: Out<c_char>, room: c_int, dev: c_int) -> Result {
    text.set_text_cut(bus_id(device(dev)?).to_string(), room)
}

pub(crate) fn cuDeviceGetByPCIBusId(_: Call, place: Out<c_int>, text: In<c_char>) -> Result {
    let process = process::get()?;
    place.required()?;
    let asked = BusId::parse(text.text().get_within(64)?).ok_or(Error::INVALID_VALUE)?;
    let mut devices = (0..).zip(process.devices.iter());
    let found = devices.find(|(_, device)| bus_id(device) == asked);
    place.set(found.ok_or(Error::INVALID_DEVICE)?.0)
}

pub(crate) fn cuDeviceGetExecAffinitySupport(
    _: Call,
    supported: Out<c_int>,
    _: c_uint,
    dev: c_int,
) -> Result {
    device(dev)?;
    // A type that does not exist is not supported either.
    supported.set(0)
}

pub(crate) fn cuDeviceGetTexture1DLinearMaxWidth(
    _: Call,
    width: Out<usize>,
    format: c_uint,
    channels: c_uint,
    dev: c_int,
) -> Result {
    let device = device(dev)?;
    Texel::read(format, channels).map_err(|_| Error::INVALID_VALUE)?;
    width.set(device.bound(attribute::MAX_TEXTURE1D_LINEAR_WIDTH) as usize)
}

pub(crate) fn cuDeviceGetHostAtomicCapabilities(
    _: Call,
    capabilities: Out<c_uint>,
    operations: In<c_uint>,
    count: c_uint,
    dev: c_int,
) -> Result {
    atomics::answer(&device(dev)?.host_atomics, capabilities, operations, count, Error::INVALID_VALUE)
}

/// Only Windows has these identifiers.
pub(crate) fn cuDeviceGetLuid(_: Call, _: Out<c_char>, _: Out<c_uint>, dev: c_int) -> Result {
    device(dev)?;
    Err(Error::NOT_SUPPORTED)
}

pub(crate) fn cuDeviceGetGraphMemAttribute(_: Call, dev: c_int, id: c_uint, value: Out<u64>) -> Result {
    device(dev)?;
    GRAPHS.memory_attribute(dev, id, value)
}

pub(crate) fn cuDeviceSetGraphMemAttribute(_: Call, dev: c_int, id: c_uint, value: In<u64>) -> Result {
    device(dev)?;
    GRAPHS.set_memory_attribute(dev, id, value)
}

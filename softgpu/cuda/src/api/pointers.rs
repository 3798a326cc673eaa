//! Pointer attributes: the properties of an address.

use std::ffi::c_void;

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::gpu::{self, VisibleGpu};
use crate::memory::{Block, BlockKind, MappingInfo};

const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// The memory that an address points into.
enum Found {
    Block(Block),
    Mapping(MappingInfo),
    Reserved,
}

fn find(address: u64) -> Result<(&'static VisibleGpu, Found)> {
    for gpu in gpu::all()? {
        if let Some(block) = gpu.block_at(address) {
            return Ok((gpu, Found::Block(block)));
        }
        if let Some(mapping) = gpu.space.mapping_at(address) {
            // The GPU whose book has the mapping may differ from the GPU of the memory.
            return Ok((gpu::at(mapping.device)?, Found::Mapping(mapping)));
        }
        if gpu.space.reservation_at(address).is_some() {
            return Ok((gpu, Found::Reserved));
        }
    }
    Err(Error::INVALID_VALUE)
}

/// True if an address lies in a block of this kind.
fn is(found: &Found, kind: BlockKind) -> bool {
    matches!(found, Found::Block(block) if block.kind == kind)
}

/// Writes one attribute of a pointer, with the numbers of the header. Writes nothing for an unknown attribute.
fn attribute(data: Out<c_void>, number: i32, address: u64) -> Result {
    let (gpu, found) = find(address)?;
    let (start, bytes, id) = match &found {
        Found::Block(block) => (block.start, block.bytes, block.id),
        Found::Mapping(mapping) => (mapping.start, mapping.bytes, mapping.id),
        Found::Reserved => {
            let (start, bytes) = gpu.space.reservation_at(address).ok_or(Error::INVALID_VALUE)?;
            (start, bytes, 0)
        }
    };
    let host = matches!(&found, Found::Block(block) if block.is_host());
    let managed = matches!(&found, Found::Block(block) if block.is_managed());
    let mapped = !matches!(found, Found::Reserved);
    match number {
        1 => match found {
            Found::Block(block) => data.cast().set(block.maker.context),
            // Physical memory belongs to no context.
            _ => Err(Error::INVALID_VALUE),
        },
        2 if mapped => data.cast().set(if host && !managed { HOST } else { DEVICE }),
        3 if mapped => data.cast().set(address),
        4 if host => data.cast().set(address),
        6 => data.cast().set(0u32),
        7 if mapped => data.cast().set(id),
        8 => data.cast().set(u32::from(managed)),
        10 => data.cast().set(u32::from(is(&found, BlockKind::Device))),
        15 | 21 => data.cast().set(0u32), // RDMA, decompression
        9 => data.cast().set(gpu.ordinal),
        11 => data.cast().set(start),
        12 => data.cast().set(bytes),
        13 => data.cast().set(u32::from(mapped)),
        14 => data.cast().set(match &found {
            Found::Mapping(mapping) => u64::from(mapping.shareable),
            _ => 0,
        }),
        16 => data.cast().set(match &found {
            Found::Block(_) => 3u64,
            Found::Mapping(mapping) => u64::from(mapping.access),
            Found::Reserved => 0,
        }),
        17 => data.cast().set(match &found {
            Found::Block(block) => block.pool,
            _ => 0,
        }),
        18 if mapped => data.cast().set(bytes),
        19 if mapped => data.cast().set(start),
        20 if mapped => data.cast().set(id),
        22 => data.cast().set(-1i32),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Writes the values of `cuPointerGetAttributes` for an unknown address.
fn unknown(data: Out<c_void>, number: i32) -> Result {
    match number {
        9 => data.cast().set(-2i32),
        2 | 6 | 8 | 10 | 13 | 15 | 21 => data.cast().set(0u32),
        22 => data.cast().set(-1i32),
        1..=22 => data.cast().set(0u64),
        _ => Err(Error::INVALID_VALUE),
    }
}

calls! {
    fn cuPointerGetAttribute(data: Out<c_void>, number: i32, address: u64) {
        data.cast::<u8>().required()?;
        attribute(data, number, address)
    }

    fn cuPointerGetAttributes(count: u32, numbers: In<i32>, places: In<Out<c_void>>, address: u64) {
        if count == 0 {
            return Err(Error::INVALID_VALUE);
        }
        for index in 0..count as usize {
            let (number, place) = (numbers.get_at(index)?, places.get_at(index)?);
            if attribute(place, number, address).is_err() {
                unknown(place, number)?;
            }
        }
        Ok(())
    }

    // Memory operations on one range are ordered here in any case.
    fn cuPointerSetAttribute(value: In<u8>, number: i32, address: u64) {
        const SYNC_MEMOPS: i32 = 6;
        value.get()?;
        find(address)?;
        if number == SYNC_MEMOPS { Ok(()) } else { Err(Error::INVALID_VALUE) }
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<u64>, address: u64) {
        current_core()?;
        let (start, size) = match find(address) {
            Ok((_, Found::Block(block))) => (block.start, block.bytes),
            Ok((_, Found::Mapping(mapping))) => (mapping.start, mapping.bytes),
            _ => return Err(Error::NOT_FOUND),
        };
        base.set_if_given(start);
        bytes.set_if_given(size);
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(place: Out<u64>, address: u64, flags: u32) {
        current_core()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        match find(address) {
            Ok((_, Found::Block(block))) if block.is_host() => place.set(address),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: u64) {
        current_core()?;
        match find(address) {
            // All host memory is mapped for the device, requested or not.
            Ok((_, Found::Block(block))) if block.is_host() => flags.set(block.flags | 2),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

//! The arrays, textures and surfaces of the process, and copies from and to arrays.

use sluice_cuda_frontend::given;
use sluice_cuda_graphs::{CopySide, memory_type};
use sluice_cuda_images::Images;

use crate::copy::{self, CopyEnd, CopyExtent, Side, StatedMemory};
use crate::error::{Error, Result};

/// The arrays, textures and surfaces of the process.
pub(crate) static IMAGES: Images<SoftImages> = Images::new(SoftImages);

/// This driver, as arrays and textures know it.
pub(crate) struct SoftImages;

/// A side of a copy as the interface describes it.
pub(crate) fn side(side: &CopySide, extent: CopyExtent) -> Result<CopyEnd> {
    if side.kind != memory_type::ARRAY {
        return copy::side(side, extent).map(CopyEnd::from);
    }
    if side.level != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let of = IMAGES.array(given::<Error>(side.array)?)?;
    let region = of.shape.region([side.x, side.y, side.z], [extent.width, extent.height, extent.depth]);
    let [x, y, z] = region.map_err(|code| Error(code as u32))?.origin;
    let level = of.array.image.levels().first().ok_or(Error::UNKNOWN)?;
    let side = Side {
        // The box lies in the level, whose last byte has an address.
        start: level.address + z * level.slice_pitch + y * level.row_pitch + x,
        pitch: level.row_pitch,
        slice: level.slice_pitch,
        place: StatedMemory::Device,
    };
    Ok(CopyEnd { side, array: Some(of.array.storage) })
}

/// A side of a copy that begins in the first row of an array.
pub(crate) fn array_side(array: u64, offset: u64) -> CopySide {
    CopySide { kind: memory_type::ARRAY, array, x: offset, ..CopySide::default() }
}

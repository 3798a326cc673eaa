//! The shape of an array: its elements, its rows, and the memory that a driver takes for it.

use sluice_cuda_abi::descriptors::Array3DDescriptor;
use sluice_cuda_images::{ArrayBox, ArrayKind, ImageShape, Limits, Texel};
use sluice_driver::{ArrayExtent, Code, code};
use sluice_protocol::limits;

/// Bytes of an element of channels in a `CUarray_format`.
pub(crate) fn element_bytes(format: u32, channels: u32) -> Result<u64, Code> {
    Texel::read(format, channels).map(Texel::bytes).map_err(|refused| refused as Code)
}

/// The shape of an array with one level or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrayShape {
    first: ImageShape,
    levels: u32,
}

impl ArrayShape {
    /// Checks everything but the limits of a device, which the driver knows. `levels` is none for an array without levels.
    pub(crate) fn new(array: ArrayExtent, levels: Option<u32>) -> Result<ArrayShape, Code> {
        let ArrayExtent { extent: [width, height, depth], format, channels, flags } = array;
        let described = Array3DDescriptor { width, height, depth, format, channels, flags };
        let most = i32::try_from(limits::ARRAY_EXTENT).unwrap_or(i32::MAX);
        let bounds = Limits::read(|_| Ok::<_, Code>(most))?;
        let first =
            ImageShape::check(described, levels.is_some(), &bounds).map_err(|refused| refused as Code)?;
        let levels = levels.unwrap_or(1);
        if first.levels(levels) == levels {
            Ok(ArrayShape { first, levels })
        } else {
            Err(code::INVALID_VALUE)
        }
    }

    pub(crate) const fn driver(&self) -> ArrayExtent {
        let Array3DDescriptor { width, height, depth, format, channels, flags } = self.first.descriptor();
        ArrayExtent { extent: [width, height, depth], format, channels, flags }
    }

    pub(crate) const fn levels(&self) -> u32 {
        self.levels
    }

    /// The shape of one level.
    pub(crate) fn level(&self, level: u32) -> Result<ArrayShape, Code> {
        if level >= self.levels {
            return Err(code::INVALID_VALUE);
        }
        Ok(ArrayShape { first: self.first.level(level), levels: 1 })
    }

    /// Bytes of a row, rows of a slice, and slices of the first level.
    pub(crate) const fn bytes(&self) -> [u64; 3] {
        [self.first.row_bytes(), self.first.rows(), self.first.slices()]
    }

    /// Checks that a box has bytes and lies in the array.
    pub(crate) fn check(&self, at: [u32; 3], extent: [u64; 3]) -> Result<ArrayBox, Code> {
        if extent.contains(&0) {
            return Err(code::INVALID_VALUE);
        }
        self.first.region(at.map(u64::from), extent).map_err(|refused| refused as Code)
    }

    /// A bound of the device memory of all levels, which hardware lays out in blocks of 64 bytes, up to 128 rows and, in a volume, up to 32
    /// slices.
    pub(crate) fn device_bytes(&self) -> u64 {
        /// Bytes and rows of the smallest block, and rows of the largest.
        const BLOCK: (u64, u64, u64) = (64, 8, 128);
        /// Slices of the largest block.
        const SLICES: u64 = 32;
        /// Alignment of a level.
        const LEVEL: u64 = 512;
        let of_level = |level: u32| {
            let level = self.first.level(level);
            let row = level.row_bytes().checked_next_multiple_of(BLOCK.0)?;
            let block = match level.rows() {
                1 => 1,
                rows => rows.next_power_of_two().clamp(BLOCK.1, BLOCK.2),
            };
            let rows = level.rows().checked_next_multiple_of(block)?;
            let deep = match level.geometry {
                ArrayKind::Volume => level.slices().next_power_of_two().min(SLICES),
                _ => 1,
            };
            let slices = level.slices().checked_next_multiple_of(deep)?;
            row.checked_mul(rows)?.checked_mul(slices)?.checked_next_multiple_of(LEVEL)
        };
        (0..self.levels).try_fold(0_u64, |sum, level| sum.checked_add(of_level(level)?)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERED: u32 = 1;

    fn shape(extent: [u64; 3], flags: u32, levels: Option<u32>) -> Result<ArrayShape, Code> {
        ArrayShape::new(ArrayExtent { extent, format: 0x20, channels: 4, flags }, levels)
    }

    // Promise: C85
    #[test]
    fn memory_of_an_array_is_bounded_without_overflow() {
        let most = limits::ARRAY_EXTENT;
        assert_eq!(shape([most; 3], 0, None).unwrap().device_bytes(), u64::MAX);
        assert_eq!(shape([most + 1, 1, 1], 0, None), Err(code::INVALID_VALUE));
        assert_eq!(shape([u64::MAX; 3], 0, None), Err(code::INVALID_VALUE));
        assert_eq!(shape([0, 1, 1], 0, None), Err(code::INVALID_VALUE));
        assert_eq!(shape([1, 0, 1], 0, None), Err(code::INVALID_VALUE), "a depth without rows");
        assert!(shape([1, 0, 3], LAYERED, None).is_ok(), "layers of one row");
        assert_eq!(shape([1, 1, 0], 0x40, None), Err(code::NOT_SUPPORTED), "sparse");
        for levels in [0, 2, u32::MAX] {
            assert_eq!(shape([1, 1, 0], 0, Some(levels)), Err(code::INVALID_VALUE));
        }
        let flat = |extent, levels| shape(extent, 0, levels).unwrap().device_bytes();
        assert_eq!(flat([1000, 0, 0], None), 16_384);
        assert_eq!(flat([1024, 1024, 0], None), 16 << 20);
        assert!(flat([1024, 1024, 0], Some(11)) > 21 << 20, "all levels");
        assert_eq!(shape([64, 64, 6], LAYERED, None).unwrap().device_bytes(), 6 * 65_536);
        for (depth, laid_out) in [(1, 1), (3, 4), (6, 8), (17, 32), (33, 64), (65, 96)] {
            assert_eq!(flat([64, 64, depth], None), laid_out * 65_536, "{depth} slices of a volume");
        }
    }

    // Promise: C86
    #[test]
    fn box_beyond_its_array_is_refused() {
        let array = shape([16, 8, 4], 0, Some(5)).unwrap();
        let check = |at, extent| array.check(at, extent).map(drop);
        assert_eq!(check([0; 3], [256, 8, 4]), Ok(()));
        assert_eq!(check([240, 7, 3], [16, 1, 1]), Ok(()));
        assert_eq!(check([8, 0, 0], [8, 1, 1]), Ok(()), "a part of an element");
        for (at, extent) in [
            ([16, 0, 0], [256, 8, 4]),
            ([0, 1, 0], [256, 8, 4]),
            ([0, 0, 1], [256, 8, 4]),
            ([0; 3], [256, 8, 5]),
            ([u32::MAX - 15, 0, 0], [16, 1, 1]),
            ([0; 3], [u64::MAX - 15, 1, 1]),
            ([16, 0, 0], [u64::MAX - 15, 1, 1]),
            ([0; 3], [0, 1, 1]),
            ([0; 3], [16, 0, 1]),
            ([248, 0, 0], [16, 1, 1]),
        ] {
            assert_eq!(check(at, extent), Err(code::INVALID_VALUE), "{at:?} {extent:?}");
        }
        assert_eq!(array.level(4).unwrap().bytes(), [16, 1, 1]);
        for level in [5, u32::MAX] {
            assert_eq!(array.level(level), Err(code::INVALID_VALUE));
        }
    }
}

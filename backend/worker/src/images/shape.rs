//! The shape of an array: its elements, its rows, and the memory that a driver takes for it.

use sluice_driver::{ArrayExtent, Code, code};
use sluice_protocol::limits;

/// `CUDA_ARRAY3D_LAYERED`: the depth counts layers.
const LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_SURFACE_LDST`, `…_TEXTURE_GATHER`: they change no size.
const SURFACE: u32 = 2;
const GATHER: u32 = 8;
/// `CUDA_ARRAY3D_CUBEMAP`: the depth counts faces.
const CUBEMAP: u32 = 4;
/// The other flags are for graphics, and for arrays whose memory the program maps.
const FLAGS: u32 = LAYERED | SURFACE | CUBEMAP | GATHER;

/// Bytes of an element of channels in a `CUarray_format`.
pub(crate) fn element_bytes(format: u32, channels: u32) -> Result<u64, Code> {
    let channel = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        // Formats of normalised numbers state their channels, too.
        0xc0..=0xcb => {
            let stated = 1 << ((format - 0xc0) % 3);
            let wide = (format - 0xc0) / 3 % 2;
            return if channels == stated { Ok(u64::from(stated) << wide) } else { Err(code::INVALID_VALUE) };
        }
        _ => return Err(code::NOT_SUPPORTED),
    };
    if matches!(channels, 1 | 2 | 4) { Ok(channel * u64::from(channels)) } else { Err(code::INVALID_VALUE) }
}

/// The shape of an array with one level or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrayShape {
    array: ArrayExtent,
    element: u64,
    levels: u32,
}

/// A box in an array: bytes of a row, rows, and slices or layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrayBox {
    pub(crate) at: [u32; 3],
    pub(crate) extent: [u64; 3],
}

impl ArrayShape {
    pub(crate) fn new(array: ArrayExtent, levels: u32) -> Result<ArrayShape, Code> {
        let element = element_bytes(array.format, array.channels)?;
        let [width, height, depth] = array.extent;
        if array.flags & !FLAGS != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        let too_large = array.extent.iter().any(|size| *size > limits::ARRAY_EXTENT);
        // Only layers may have a depth without a height.
        let flat = array.flags & LAYERED == 0 && height == 0 && depth > 0;
        if width == 0 || too_large || flat || !(1..=limits::ARRAY_LEVELS).contains(&levels) {
            return Err(code::INVALID_VALUE);
        }
        Ok(ArrayShape { array, element, levels })
    }

    pub(crate) const fn driver(&self) -> &ArrayExtent {
        &self.array
    }

    pub(crate) const fn levels(&self) -> u32 {
        self.levels
    }

    /// The shape of one level.
    pub(crate) fn level(&self, level: u32) -> Result<ArrayShape, Code> {
        if level >= self.levels {
            return Err(code::INVALID_VALUE);
        }
        let halved = |size: u64| if size == 0 { 0 } else { (size >> level).max(1) };
        let [width, height, depth] = self.array.extent;
        let depth = if self.array.flags & (LAYERED | CUBEMAP) == 0 { halved(depth) } else { depth };
        let extent = [halved(width), halved(height), depth];
        Ok(ArrayShape { array: ArrayExtent { extent, ..self.array }, levels: 1, ..*self })
    }

    /// Bytes of a row, rows of a slice, and slices of the first level.
    pub(crate) fn bytes(&self) -> [u64; 3] {
        let [width, height, depth] = self.array.extent;
        // An extent is far below 2^60.
        [width * self.element, height.max(1), depth.max(1)]
    }

    /// Checks that a box has bytes and lies in the array.
    pub(crate) fn check(&self, part: ArrayBox) -> Result<(), Code> {
        let inside = |((at, length), end): ((u32, u64), u64)| {
            length > 0 && u64::from(at).checked_add(length).is_some_and(|last| last <= end)
        };
        let [x, width] = [part.at[0].into(), part.extent[0]];
        let whole = x % self.element == 0 && width % self.element == 0;
        let mut directions = part.at.into_iter().zip(part.extent).zip(self.bytes());
        if whole && directions.all(inside) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    /// A bound of the device memory of all levels, which hardware lays out in blocks of 64 bytes and up to 128 rows.
    pub(crate) fn device_bytes(&self) -> u64 {
        /// Bytes and rows of the smallest block, and rows of the largest.
        const BLOCK: (u64, u64, u64) = (64, 8, 128);
        /// Alignment of a level.
        const LEVEL: u64 = 512;
        let of_level = |level: u32| {
            let [width, height, depth] = self.level(level).ok()?.bytes();
            let row = width.checked_next_multiple_of(BLOCK.0)?;
            let block = match height {
                1 => 1,
                rows => rows.next_power_of_two().clamp(BLOCK.1, BLOCK.2),
            };
            let rows = height.checked_next_multiple_of(block)?;
            row.checked_mul(rows)?.checked_mul(depth)?.checked_next_multiple_of(LEVEL)
        };
        (0..self.levels).try_fold(0_u64, |sum, level| sum.checked_add(of_level(level)?)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(extent: [u64; 3], flags: u32, levels: u32) -> Result<ArrayShape, Code> {
        ArrayShape::new(ArrayExtent { extent, format: 0x20, channels: 4, flags }, levels)
    }

    #[test]
    fn elements_have_the_bytes_of_their_format_and_channels() {
        assert_eq!(element_bytes(0x20, 4), Ok(16));
        assert_eq!(element_bytes(0x10, 2), Ok(4));
        assert_eq!(element_bytes(0xc2, 4), Ok(4), "four channels of 8 bits");
        assert_eq!(element_bytes(0xc4, 2), Ok(4), "two channels of 16 bits");
        assert_eq!(element_bytes(0xc2, 1), Err(code::INVALID_VALUE));
        assert_eq!(element_bytes(0x01, 3), Err(code::INVALID_VALUE));
        assert_eq!(element_bytes(0xb0, 3), Err(code::NOT_SUPPORTED), "planes of video");
        assert_eq!(element_bytes(0, 1), Err(code::NOT_SUPPORTED));
    }

    // Promise: C85
    #[test]
    fn memory_of_an_array_is_bounded_without_overflow() {
        let most = limits::ARRAY_EXTENT;
        assert_eq!(shape([most; 3], 0, 1).unwrap().device_bytes(), u64::MAX);
        assert_eq!(shape([most + 1, 1, 1], 0, 1), Err(code::INVALID_VALUE));
        assert_eq!(shape([u64::MAX; 3], 0, 1), Err(code::INVALID_VALUE));
        assert_eq!(shape([0, 1, 1], 0, 1), Err(code::INVALID_VALUE));
        assert_eq!(shape([1, 0, 1], 0, 1), Err(code::INVALID_VALUE), "a depth without rows");
        assert!(shape([1, 0, 3], LAYERED, 1).is_ok(), "layers of one row");
        assert_eq!(shape([1, 1, 0], 0x40, 1), Err(code::NOT_SUPPORTED), "sparse");
        for levels in [0, limits::ARRAY_LEVELS + 1, u32::MAX] {
            assert_eq!(shape([1, 1, 0], 0, levels), Err(code::INVALID_VALUE));
        }
        let flat = |extent, levels| shape(extent, 0, levels).unwrap().device_bytes();
        assert_eq!(flat([1000, 0, 0], 1), 16_384);
        assert_eq!(flat([1024, 1024, 0], 1), 16 << 20);
        assert!(flat([1024, 1024, 0], 11) > 21 << 20, "all levels");
        assert_eq!(shape([64, 64, 6], LAYERED, 1).unwrap().device_bytes(), 6 * 65_536);
    }

    // Promise: C86
    #[test]
    fn box_beyond_its_array_is_refused() {
        let array = shape([16, 8, 4], 0, 5).unwrap();
        let check = |at, extent| array.check(ArrayBox { at, extent });
        assert_eq!(check([0; 3], [256, 8, 4]), Ok(()));
        assert_eq!(check([240, 7, 3], [16, 1, 1]), Ok(()));
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
            ([8, 0, 0], [16, 1, 1]),
            ([0; 3], [8, 1, 1]),
        ] {
            assert_eq!(check(at, extent), Err(code::INVALID_VALUE), "{at:?} {extent:?}");
        }
        let last = array.level(4).unwrap();
        assert_eq!(last.bytes(), [16, 1, 1]);
        assert_eq!(array.level(5), Err(code::INVALID_VALUE));
        assert_eq!(array.level(u32::MAX), Err(code::INVALID_VALUE));
        let layers = shape([16, 8, 4], LAYERED, 5).unwrap();
        assert_eq!(layers.level(4).unwrap().bytes(), [16, 1, 4], "layers are not halved");
    }
}

//! Descriptors of tensors, with the conditions of the driver's documentation.
//!
//! No kernel of this device can use one: its compute capability has no tensor memory accelerator. The layout is this driver's own.

use std::ffi::c_void;

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};

const MAX_RANK: u32 = 5;
const MAX_DIMENSION: u64 = 1 << 32;
const STRIDE_BOUND: u64 = 1 << 40;
const MAX_TILE: u32 = 256;
const MAX_STEP: u32 = 8;
const MAX_PIXELS: u32 = 1024;
/// The greatest `CUtensorMapIm2ColWideMode`.
const MAX_WIDE_MODE: u32 = 1;
/// Bytes of an element, by the number of its format. The packed formats are of later devices.
const ELEMENT_BYTES: [u64; 13] = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4];
/// Bytes of a swizzle's span, by its number; 0 for none.
const SWIZZLES: [u64; 4] = [0, 32, 64, 128];

mod interleave {
    pub(super) const NONE: u32 = 0;
    pub(super) const BYTES_32: u32 = 2;
}

const SWIZZLE_32: u32 = 1;
const MAX_PROMOTION: u32 = 3;
const MAX_FILL: u32 = 1;

/// A descriptor: a tensor in memory, and the boxes of it that a copy takes.
struct TensorMap {
    format: u32,
    address: u64,
    dimensions: Vec<u64>,
    strides: Vec<u64>,
    steps: Vec<u32>,
    boxes: BoxShape,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
}

enum BoxShape {
    /// Elements in each dimension.
    Tile(Vec<u32>),
    /// Columns of an image: the box of pixels between two corners, the channels of a pixel, and the pixels of a column. `wide` has the
    /// number of its mode, and only one coordinate of the corners.
    Columns { lower: Vec<i32>, upper: Vec<i32>, channels: u32, pixels: u32, wide: Option<u32> },
}

impl TensorMap {
    fn is_valid(&self) -> bool {
        let element = usize::try_from(self.format).ok().and_then(|format| ELEMENT_BYTES.get(format));
        let swizzle = usize::try_from(self.swizzle).ok().and_then(|swizzle| SWIZZLES.get(swizzle));
        let (Some(element), Some(swizzle)) = (element, swizzle) else { return false };
        let alignment = if self.interleave == interleave::BYTES_32 { 32 } else { 16 };
        let rank = self.dimensions.len();
        let (inner, boxes) = match &self.boxes {
            BoxShape::Tile(tile) => {
                (u64::from(tile[0]) * element, tile.iter().all(|count| (1..=MAX_TILE).contains(count)))
            }
            BoxShape::Columns { lower, upper, channels, pixels, wide } => {
                // Bits of a coordinate of a corner, by the number of dimensions of an image.
                let bits = [16, 8, 5].get(rank.wrapping_sub(3)).copied().unwrap_or(0);
                let bound = 1_i32 << (bits - 1).max(0);
                let corners = lower.iter().chain(upper);
                let valid = rank >= 3
                    && corners.into_iter().all(|at| (-bound..bound).contains(at))
                    && (1..=MAX_TILE).contains(channels)
                    && (1..=MAX_PIXELS).contains(pixels)
                    && wide.is_none_or(|mode| mode <= MAX_WIDE_MODE);
                (u64::from(*channels) * element, valid)
            }
        };
        let layout = match self.interleave {
            interleave::NONE => inner.is_multiple_of(16) && (*swizzle == 0 || inner <= *swizzle),
            interleave::BYTES_32 => rank >= 3 && self.swizzle == SWIZZLE_32,
            number => rank >= 3 && number < interleave::BYTES_32,
        };
        layout
            && boxes
            && self.address.is_multiple_of(alignment)
            && self.dimensions.iter().all(|count| (1..=MAX_DIMENSION).contains(count))
            && self.strides.iter().all(|bytes| bytes.is_multiple_of(alignment) && *bytes < STRIDE_BOUND)
            && self.steps.iter().all(|step| (1..=MAX_STEP).contains(step))
            && self.promotion <= MAX_PROMOTION
            && self.fill <= MAX_FILL
    }

    /// The address, the dimensions and strides, then the smaller numbers in two bytes each.
    fn encode(&self) -> [u8; 128] {
        let mut small = vec![self.format, self.interleave, self.swizzle, self.promotion, self.fill];
        match &self.boxes {
            BoxShape::Tile(tile) => small.extend(tile),
            BoxShape::Columns { lower, upper, channels, pixels, wide } => {
                small.extend(lower.iter().chain(upper).map(|at| at.cast_unsigned()));
                small.extend([*channels, *pixels, wide.map_or(0, |mode| mode + 1)]);
            }
        }
        small.extend(&self.steps);
        let small = small.iter().flat_map(|number| number.to_le_bytes()[..2].to_vec());
        let large = [self.address]
            .into_iter()
            .chain(self.dimensions.iter().copied())
            .chain(self.strides.iter().copied());
        let mut bytes = [0; 128];
        let encoded = large.flat_map(u64::to_le_bytes).chain(small);
        bytes.iter_mut().zip(encoded).for_each(|(to, from)| *to = from);
        bytes
    }
}

/// Writes the descriptor that `make` returns for a number of dimensions.
fn encode(descriptor: Out<c_void>, rank: u32, make: impl FnOnce(usize) -> Result<TensorMap>) -> Result {
    current_core()?;
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(Error::INVALID_VALUE);
    }
    let map = make(rank as usize)?;
    if !map.is_valid() {
        return Err(Error::INVALID_VALUE);
    }
    descriptor.set_bytes(&map.encode())
}

calls! {
    fn cuTensorMapEncodeTiled(
        descriptor: Out<c_void>, format: u32, rank: u32, address: u64, dimensions: In<u64>, strides: In<u64>, tile: In<u32>,
        steps: In<u32>, interleave: u32, swizzle: u32, promotion: u32, fill: u32,
    ) {
        encode(descriptor, rank, |rank| {
            Ok(TensorMap {
                format,
                address,
                dimensions: dimensions.list(rank)?,
                strides: strides.list(rank - 1)?,
                boxes: BoxShape::Tile(tile.list(rank)?),
                steps: steps.list(rank)?,
                interleave,
                swizzle,
                promotion,
                fill,
            })
        })
    }

    fn cuTensorMapEncodeIm2col(
        descriptor: Out<c_void>, format: u32, rank: u32, address: u64, dimensions: In<u64>, strides: In<u64>, lower: In<i32>,
        upper: In<i32>, channels: u32, pixels: u32, steps: In<u32>, interleave: u32, swizzle: u32, promotion: u32, fill: u32,
    ) {
        encode(descriptor, rank, |rank| {
            // Two dimensions are the channels and the images.
            let pixel_dimensions = rank.checked_sub(2).ok_or(Error::INVALID_VALUE)?;
            let (lower, upper) = (lower.list(pixel_dimensions)?, upper.list(pixel_dimensions)?);
            Ok(TensorMap {
                format,
                address,
                dimensions: dimensions.list(rank)?,
                strides: strides.list(rank - 1)?,
                boxes: BoxShape::Columns { lower, upper, channels, pixels, wide: None },
                steps: steps.list(rank)?,
                interleave,
                swizzle,
                promotion,
                fill,
            })
        })
    }

    fn cuTensorMapEncodeIm2colWide(
        descriptor: Out<c_void>, format: u32, rank: u32, address: u64, dimensions: In<u64>, strides: In<u64>, lower: i32,
        upper: i32, channels: u32, pixels: u32, steps: In<u32>, interleave: u32, mode: u32, swizzle: u32, promotion: u32,
        fill: u32,
    ) {
        encode(descriptor, rank, |rank| {
            let (lower, upper) = (vec![lower], vec![upper]);
            Ok(TensorMap {
                format,
                address,
                dimensions: dimensions.list(rank)?,
                strides: strides.list(rank - 1)?,
                boxes: BoxShape::Columns { lower, upper, channels, pixels, wide: Some(mode) },
                steps: steps.list(rank)?,
                interleave,
                swizzle,
                promotion,
                fill,
            })
        })
    }

    // The class has no effect on this architecture: every request succeeds, and the class is the small one.
    fn cuTensorMapSetAllocationClass(descriptor: Out<c_void>, class: u32, effective: Out<u32>) {
        const SMALL: u32 = 1;
        const LARGE: u32 = 2;
        effective.set_if_given(SMALL);
        current_core()?;
        descriptor.cast::<u64>().required()?;
        if class > LARGE {
            return Err(Error::INVALID_VALUE);
        }
        Ok(())
    }

    fn cuTensorMapReplaceAddress(descriptor: Out<c_void>, address: u64) {
        current_core()?;
        if !address.is_multiple_of(16) {
            return Err(Error::INVALID_VALUE);
        }
        // NVIDIA's driver takes a descriptor at any place, though the header requires an aligned one.
        descriptor.set_bytes(&address.to_ne_bytes())
    }
}

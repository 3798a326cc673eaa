//! Descriptors of tensors, with the conditions of the driver's documentation.
//!
//! No kernel of this device can use one: its compute capability has no tensor memory accelerator. The layout is this driver's own.

use std::ffi::c_void;

use crate::context::current_core;
use crate::error::Error;
use crate::ffi::{In, Out};

const ALIGNMENT: u64 = 64;
const MAX_RANK: u32 = 5;
const MAX_DIMENSION: u64 = 1 << 32;
const STRIDE_BOUND: u64 = 1 << 40;
const MAX_TILE: u32 = 256;
const MAX_STEP: u32 = 8;
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

struct Tiled {
    format: u32,
    address: u64,
    dimensions: Vec<u64>,
    strides: Vec<u64>,
    tile: Vec<u32>,
    steps: Vec<u32>,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
}

impl Tiled {
    fn is_valid(&self) -> bool {
        let element = usize::try_from(self.format).ok().and_then(|format| ELEMENT_BYTES.get(format));
        let swizzle = usize::try_from(self.swizzle).ok().and_then(|swizzle| SWIZZLES.get(swizzle));
        let (Some(element), Some(swizzle)) = (element, swizzle) else { return false };
        let alignment = if self.interleave == interleave::BYTES_32 { 32 } else { 16 };
        let inner = u64::from(self.tile[0]) * element;
        let layout = match self.interleave {
            interleave::NONE => inner.is_multiple_of(16) && (*swizzle == 0 || inner <= *swizzle),
            interleave::BYTES_32 => self.dimensions.len() >= 3 && self.swizzle == SWIZZLE_32,
            number => self.dimensions.len() >= 3 && number < interleave::BYTES_32,
        };
        layout
            && self.address.is_multiple_of(alignment)
            && self.dimensions.iter().all(|count| (1..=MAX_DIMENSION).contains(count))
            && self.strides.iter().all(|bytes| bytes.is_multiple_of(alignment) && *bytes < STRIDE_BOUND)
            && self.tile.iter().all(|count| (1..=MAX_TILE).contains(count))
            && self.steps.iter().all(|step| (1..=MAX_STEP).contains(step))
            && self.promotion <= MAX_PROMOTION
            && self.fill <= MAX_FILL
    }

    /// The address, four numbers of the whole, the dimensions, strides, tile and steps, in 128 bytes.
    fn encode(&self) -> [u8; 128] {
        // Whole numbers below 256 but for addresses, strides and dimensions.
        let small = [self.format, self.interleave, self.swizzle, self.promotion, self.fill];
        let small = small
            .iter()
            .chain(&self.tile)
            .chain(&self.steps)
            .flat_map(|number| number.to_le_bytes()[..2].to_vec());
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

calls! {
    fn cuTensorMapEncodeTiled(
        descriptor: Out<c_void>, format: u32, rank: u32, address: u64, dimensions: In<u64>, strides: In<u64>, tile: In<u32>,
        steps: In<u32>, interleave: u32, swizzle: u32, promotion: u32, fill: u32,
    ) {
        current_core()?;
        if !(1..=MAX_RANK).contains(&rank) || !descriptor.address().is_multiple_of(ALIGNMENT) {
            return Err(Error::INVALID_VALUE);
        }
        let rank = rank as usize;
        let tiled = Tiled {
            format,
            address,
            dimensions: dimensions.list(rank)?,
            strides: strides.list(rank - 1)?,
            tile: tile.list(rank)?,
            steps: steps.list(rank)?,
            interleave,
            swizzle,
            promotion,
            fill,
        };
        if !tiled.is_valid() {
            return Err(Error::INVALID_VALUE);
        }
        descriptor.set_bytes(&tiled.encode())
    }
}

//! `suld`, `sust` and `sured`.

use super::{coordinates, texel};
use crate::api::FaultKind;
use crate::exec::atomic::AtomicOp;
use crate::exec::{Fail, mem};
use crate::image::{ChannelType, Surface};
use crate::ir::{ImageAccess, ImageGeometry, ImageOperation, Outside};
use crate::ptx::Ty;
use crate::regs::Frame;

/// An access of a lane: `size` bytes, at a multiple of `size` bytes in a row or at a texel.
struct SurfaceAccess {
    geometry: ImageGeometry,
    size: u64,
    /// True if the first coordinate counts texels.
    texels: bool,
    outside: Outside,
}

impl SurfaceAccess {
    /// The address of the access; `None` if there is none and the instruction goes on.
    fn address(&self, surface: &Surface, layer: u32, at: [u32; 3]) -> Result<Option<u64>, FaultKind> {
        let image = &surface.image;
        let Some(level) = image.levels().first() else { return Ok(None) };
        let texel = u64::from(image.format().bytes());
        let row = i64::from(level.width) * i64::from(image.format().bytes());
        let [x, y, z] = at.map(|v| i64::from(v.cast_signed()));
        let slice = match self.geometry {
            ImageGeometry::D3 => z,
            _ => i64::from(layer.cast_signed()),
        };
        // Both factors are below 2^32.
        let x = if self.texels { x * texel.cast_signed() } else { x };
        let size = self.size.cast_signed();
        let limits = [row - size, i64::from(level.height) - 1, i64::from(image.slices(level)) - 1];
        let mut place = [x, y, slice];
        if place.iter().zip(limits).any(|(v, last)| !(0..=last).contains(v)) {
            match self.outside {
                Outside::Zero => return Ok(None),
                Outside::Clamp if limits[0] >= 0 => {
                    for (v, last) in place.iter_mut().zip(limits) {
                        *v = (*v).clamp(0, last);
                    }
                    // The last place of a whole access may lie before the end of the row.
                    place[0] -= place[0] % size;
                }
                _ => return Err(FaultKind::LaunchFailed),
            }
        }
        let [x, y, slice] = place.map(i64::cast_unsigned);
        if !x.is_multiple_of(self.size) {
            return Err(FaultKind::Misaligned);
        }
        let whole = |v: u64| u32::try_from(v).unwrap_or(u32::MAX);
        let start = image.texel(level, 0, whole(y), whole(slice));
        // The whole access is in the row.
        start.map(|start| start + x).map(Some).ok_or(FaultKind::LaunchFailed)
    }
}

/// Executes an access for each lane of a mask.
pub(super) fn execute(surface: &Surface, access: &ImageAccess, frame: &Frame, mask: u32) -> Result<(), Fail> {
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        one(surface, access, frame, lane).map_err(|(kind, address)| Fail::new(kind, lane, address))?;
    }
    Ok(())
}

fn one(surface: &Surface, access: &ImageAccess, frame: &Frame, lane: usize) -> Result<(), (FaultKind, u64)> {
    let format = surface.image.format();
    let bytes = |ty: Ty, slots: &[u32]| u64::from(ty.bytes()) * slots.len() as u64;
    let find = |geometry, size, texels, outside, element: u32| {
        let (layer, at) = coordinates(geometry, access, frame, lane);
        let whole = SurfaceAccess { geometry, size, texels, outside };
        let address = whole.address(surface, layer, at).map_err(|kind| (kind, 0))?;
        match address {
            Some(address) if !address.is_multiple_of(u64::from(element)) => {
                Err((FaultKind::Misaligned, address))
            }
            address => Ok(address),
        }
    };
    match access.operation {
        ImageOperation::SurfaceLoad { geometry, ty, outside } => {
            let from = find(geometry, bytes(ty, &access.results), false, outside, ty.bytes())?;
            for (n, slot) in (0u64..).zip(&access.results) {
                let value = from.map_or(0, |address| {
                    let p = mem::host(address + n * u64::from(ty.bytes()));
                    mem::read(p, ty.bytes(), false)
                });
                frame.set_bits(*slot, lane, access.wide, value);
            }
        }
        ImageOperation::SurfaceStore { geometry, ty, outside } => {
            if let Some(to) = find(geometry, bytes(ty, &access.values), false, outside, ty.bytes())? {
                for (n, slot) in (0u64..).zip(&access.values) {
                    let p = mem::host(to + n * u64::from(ty.bytes()));
                    mem::write(p, ty.bytes(), frame.bits(*slot, lane, access.wide), false);
                }
            }
        }
        ImageOperation::SurfaceStoreTexel { geometry, outside } => {
            let size = format.channel.bytes();
            if let Some(to) = find(geometry, u64::from(format.bytes()), true, outside, size)? {
                for n in 0..u64::from(format.channels) {
                    // The ISA leaves channels without a source unspecified; they become zero.
                    let slot = usize::try_from(n).ok().and_then(|n| access.values.get(n));
                    let word = slot.map_or(0, |slot| frame.get::<u32>(*slot, lane));
                    let value = u64::from(texel::encode(format.channel, word));
                    mem::write(mem::host(to + n * u64::from(size)), size, value, false);
                }
            }
        }
        ImageOperation::SurfaceReduce { geometry, op, ty, outside } => {
            let (texels, ty) = match (ty, format.channel) {
                (Some(ty), _) => (false, ty),
                (None, ChannelType::S32) => (true, Ty::S32),
                (None, _) => (true, Ty::U32),
            };
            let to = find(geometry, u64::from(ty.bytes()), texels, outside, ty.bytes())?;
            if let (Some(to), Some(slot)) = (to, access.values.first()) {
                let value = frame.bits(*slot, lane, ty.bytes() == 8);
                let op = AtomicOp::ALL[usize::from(op) % AtomicOp::ALL.len()];
                mem::exchange(mem::host(to), ty.bytes(), |old| op.apply(ty, old, value, 0));
            }
        }
        _ => {}
    }
    Ok(())
}

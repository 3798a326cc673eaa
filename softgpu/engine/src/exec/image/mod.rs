//! Texture and surface instructions: the resolution of handles, and the queries.
//!
//! The interpreter calls it. It owns the images that a launch has resolved. It must never use an address outside an image.
//!
//! [`FoundImages`] resolves a handle once for each thread of a launch and checks the bytes of an image in linear memory then. After
//! that, [`Image::texel`] gives the addresses: it knows none outside the image.
//!
//! The ISA and the programming guide leave some results open. Here, integer coordinates outside an image read zero; channels that
//! a format lacks are 0, 0 and 1; a surface access outside with `.trap` ends the launch as a failed one, and one that is not
//! aligned to its size as a misaligned one; coordinates that are not numbers are 0.

mod cube;
mod sample;
mod surface;
mod texel;

use super::Fail;
use super::found::FoundImages;
use super::lanes::each;
use super::num;
use crate::api::FaultKind;
use crate::image::{AddressMode, ChannelType, Filter, Format, Image, ReferenceKind, Shape, Storage, Texture};
use crate::ir::{Detail, ImageAccess, ImageGeometry, ImageOperation, Inst, LoweredCode, Packing, Query};
use crate::launch::Launch;
use crate::regs::Frame;

/// Executes a texture or surface instruction for the lanes of a non-empty mask.
#[inline(never)]
pub(crate) fn execute(
    launch: &Launch<'_>,
    found: &mut FoundImages,
    code: &LoweredCode,
    frame: &Frame,
    i: &Inst,
    mask: u32,
) -> Result<(), Fail> {
    let Some(access) = usize::try_from(i.imm).ok().and_then(|n| code.images.get(n)) else { return Ok(()) };
    let mut left = mask;
    while left != 0 {
        // One turn for each handle; mostly there is one.
        let first = left.trailing_zeros() as usize;
        let handle: u64 = frame.get(access.handle, first);
        let mut same = 0;
        each(left, |lane| same |= u32::from(frame.get::<u64>(access.handle, lane) == handle) << lane);
        left &= !same;
        let unknown = Fail::new(FaultKind::IllegalAddress, first, handle);
        match access.operation {
            ImageOperation::IsType(kind) => {
                let hit = match kind {
                    Some(ReferenceKind::Texture) => found.texture(launch, handle).is_some(),
                    Some(ReferenceKind::Surface) => found.surface(launch, handle).is_some(),
                    None => false,
                };
                access.results.iter().for_each(|d| frame.set_pred(*d, same, if hit { same } else { 0 }));
            }
            ImageOperation::Fetch { .. } | ImageOperation::Gather { .. } => {
                let texture = found.texture(launch, handle).ok_or(unknown)?;
                each(same, |lane| fetch(&texture, access, frame, lane));
            }
            ImageOperation::TextureQuery(query) => {
                let texture = found.texture(launch, handle).ok_or(unknown)?;
                each(same, |lane| {
                    let level = access.detail.first().map_or(0, |slot| frame.get::<u32>(*slot, lane));
                    let value = sampler_query(&texture, query)
                        .unwrap_or_else(|| image_query(&texture.image, query, level));
                    access.results.iter().for_each(|d| frame.set(*d, lane, value));
                });
            }
            ImageOperation::SurfaceQuery(query) => {
                let surface = found.surface(launch, handle).ok_or(unknown)?;
                let value = image_query(&surface.image, query, 0);
                each(same, |lane| access.results.iter().for_each(|d| frame.set(*d, lane, value)));
            }
            _ => {
                let surface = found.surface(launch, handle).ok_or(unknown)?;
                surface::execute(&surface, access, frame, same)?;
            }
        }
    }
    Ok(())
}

/// The coordinates of a lane: a layer, and up to three others.
fn coordinates(geometry: ImageGeometry, access: &ImageAccess, frame: &Frame, lane: usize) -> (u32, [u32; 3]) {
    let all = access.coordinates.as_slice();
    let (layer, rest) = match all.split_first() {
        Some((layer, rest)) if geometry.layered() => (frame.get(*layer, lane), rest),
        _ => (0, all),
    };
    let mut out = [0; 3];
    for (to, slot) in out.iter_mut().zip(rest).take(geometry.dimensions()) {
        *to = frame.get(*slot, lane);
    }
    (layer, out)
}

fn floats(slots: &[u32], frame: &Frame, lane: usize) -> [f32; 3] {
    let mut out = [0.0; 3];
    for (to, slot) in out.iter_mut().zip(slots) {
        *to = frame.get(*slot, lane);
    }
    out
}

/// `tex` and `tld4` for one lane.
fn fetch(texture: &Texture, access: &ImageAccess, frame: &Frame, lane: usize) {
    let mut offset = [0i32; 3];
    for (to, slot) in offset.iter_mut().zip(&access.offsets) {
        *to = frame.get(*slot, lane);
    }
    let (texel, packing) = match access.operation {
        ImageOperation::Gather { geometry, channel, packing } => {
            let (layer, at) = coordinates(geometry, access, frame, lane);
            let at = at.map(f32::from_bits);
            (sample::gather(texture, geometry, layer, at, offset, usize::from(channel)), packing)
        }
        ImageOperation::Fetch { geometry, float: false, packing, .. } => {
            let (layer, at) = coordinates(geometry, access, frame, lane);
            let level = access.detail.first().map_or(0, |slot| frame.get::<i32>(*slot, lane));
            (sample::load(texture, geometry, layer, at.map(u32::cast_signed), offset, level), packing)
        }
        ImageOperation::Fetch { geometry, detail, packing, .. } => {
            let (layer, at) = coordinates(geometry, access, frame, lane);
            let at = at.map(f32::from_bits);
            let lod = match detail {
                Detail::Base => None,
                Detail::Level => Some(f64::from(floats(&access.detail, frame, lane)[0])),
                Detail::Gradients => {
                    let (x, y) = access.detail.split_at(access.detail.len() / 2);
                    let (x, y) = (floats(x, frame, lane), floats(y, frame, lane));
                    Some(sample::detail(texture, geometry, at, x, y))
                }
            };
            (sample::sample(texture, geometry, layer, at, offset, lod), packing)
        }
        _ => return,
    };
    let half = |bits: u32| {
        if texel::is_float(texture) { num::to_f16(f32::from_bits(bits)) } else { bits & 0xffff }
    };
    let values = match packing {
        Packing::Words => texel,
        Packing::Halves => texel.map(half),
        Packing::HalfPairs => {
            [half(texel[0]) | half(texel[1]) << 16, half(texel[2]) | half(texel[3]) << 16, 0, 0]
        }
    };
    for (slot, value) in access.results.iter().zip(values) {
        frame.set(*slot, lane, value);
    }
}

/// The value of a query about the sampler; `None` if the query is about the image.
fn sampler_query(texture: &Texture, query: Query) -> Option<u32> {
    let sampler = &texture.sampler;
    Some(match query {
        Query::NormalizedCoords => u32::from(sampler.normalized),
        Query::ForceUnnormalizedCoords => u32::from(!sampler.normalized),
        Query::FilterMode => u32::from(sampler.filter == Filter::Linear),
        // The order of the ISA: wrap, mirror, clamp_ogl, clamp_to_edge, clamp_to_border.
        Query::AddressMode(axis) => match sampler.address[usize::from(axis) % 3] {
            AddressMode::Wrap => 0,
            AddressMode::Mirror => 1,
            AddressMode::Clamp => 3,
            AddressMode::Border => 4,
        },
        _ => return None,
    })
}

/// The value of a query about the image. The channel type is a `CUarray_format`, the channel order is the number of channels.
fn image_query(image: &Image, query: Query, level: u32) -> u32 {
    let levels = image.levels();
    let count = u32::try_from(levels.len()).unwrap_or(u32::MAX);
    let Some(at) = levels.get(level.min(count - 1) as usize) else { return 0 };
    match query {
        Query::Width => at.width,
        Query::Height if image.is_one_dimensional() => 0,
        Query::Height => at.height,
        Query::Depth if image.shape() == Shape::D3 => at.depth,
        Query::ArraySize if image.is_layered() => image.layers(),
        Query::Levels => count,
        Query::Samples => 1,
        Query::ChannelType => array_format(image.format()),
        Query::ChannelOrder => u32::from(image.format().channels),
        Query::MemoryLayout => u32::from(*image.storage() == Storage::Memory),
        _ => 0,
    }
}

/// The `CUarray_format` of a format.
fn array_format(format: Format) -> u32 {
    let packed = |first: u32| first + u32::from(format.channels / 2);
    match format.channel {
        ChannelType::U8 => 1,
        ChannelType::U16 => 2,
        ChannelType::U32 => 3,
        ChannelType::S8 => 8,
        ChannelType::S16 => 9,
        ChannelType::S32 => 10,
        ChannelType::F16 => 0x10,
        ChannelType::F32 => 0x20,
        ChannelType::Unorm8 => packed(0xc0),
        ChannelType::Unorm16 => packed(0xc3),
        ChannelType::Snorm8 => packed(0xc6),
        ChannelType::Snorm16 => packed(0xc9),
    }
}

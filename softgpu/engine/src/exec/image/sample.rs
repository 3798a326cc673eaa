//! Filtered and unfiltered reads of textures, as the CUDA programming guide defines them: weights and levels of detail have eight
//! bits of fraction.

#![expect(
    clippy::cast_possible_truncation,
    reason = "coordinates saturate, and filtered values round to f32"
)]

use super::{cube, texel};
use crate::image::{AddressMode, Filter, Level, Texture};
use crate::ir::ImageGeometry;

/// Steps of a weight.
const STEPS: f64 = 256.0;

/// The part of a texture that a fetch reads: one level, and one layer or face.
#[derive(Clone, Copy)]
struct Site<'a> {
    texture: &'a Texture,
    level: &'a Level,
    geometry: ImageGeometry,
    slice: u32,
}

/// The first texel along an axis and the weight of the next one.
#[derive(Clone, Copy, Default)]
struct Tap {
    index: i64,
    weight: f64,
}

/// The largest integer that is not above `x`; saturates. `f64::floor` is a call without SSE4.1.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "an integer that a conversion made converts back")]
fn floor(x: f64) -> i64 {
    let whole = x as i64;
    whole.saturating_sub(i64::from(whole as f64 > x))
}

/// The part of a number after its integral part, from 0 to 1.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "larger numbers have no fraction")]
fn fraction(x: f64) -> f64 {
    if x.abs() < (1u64 << 52) as f64 { x - floor(x) as f64 } else { 0.0 }
}

impl Tap {
    #[inline(always)]
    fn new(x: f64, filter: Filter) -> Tap {
        match filter {
            Filter::Point => Tap { index: floor(x), weight: 0.0 },
            Filter::Linear => {
                let steps = floor((x - 0.5) * STEPS + 0.5);
                Tap { index: steps >> 8, weight: f64::from((steps & 0xff) as i32) / STEPS }
            }
        }
    }
}

/// The index of a texel of an axis of `n` texels; `None` in the border.
#[inline(always)]
fn resolve(index: i64, n: u32, mode: AddressMode) -> Option<u32> {
    // Mostly a texel lies inside; divisions are slow.
    if let Some(inside) = u32::try_from(index).ok().filter(|index| *index < n) {
        return Some(inside);
    }
    outside(index, n, mode)
}

fn outside(index: i64, n: u32, mode: AddressMode) -> Option<u32> {
    let n = i64::from(n);
    let inside = match mode {
        AddressMode::Wrap => index.rem_euclid(n),
        AddressMode::Mirror => {
            let m = index.rem_euclid(2 * n);
            if m < n { m } else { 2 * n - 1 - m }
        }
        AddressMode::Clamp => index.clamp(0, n - 1),
        AddressMode::Border => return None,
    };
    u32::try_from(inside).ok()
}

impl<'a> Site<'a> {
    fn new(
        texture: &'a Texture,
        level: usize,
        geometry: ImageGeometry,
        layer: u32,
        face: u32,
    ) -> Option<Site<'a>> {
        let image = &texture.image;
        let level = image.levels().get(level)?;
        let slice = if geometry.cube() {
            layer.min(image.layers() - 1).saturating_mul(6) + face
        } else if geometry.layered() {
            layer
        } else {
            0
        };
        Some(Site { texture, level, geometry, slice: slice.min(image.slices(level) - 1) })
    }

    /// The number of axes that are filtered.
    fn dimensions(&self) -> usize {
        if self.geometry.cube() { 2 } else { self.geometry.dimensions() }
    }

    /// Texels along an axis.
    fn extent(&self, axis: usize) -> u32 {
        match axis {
            0 => self.level.width,
            1 => self.level.height,
            _ => self.texture.image.slices(self.level),
        }
    }

    /// The address mode of an axis. Without normalized coordinates, an image does not repeat.
    fn mode(&self, axis: usize) -> AddressMode {
        match self.texture.sampler.address[axis] {
            AddressMode::Wrap | AddressMode::Mirror if !self.is_normalized() => AddressMode::Clamp,
            mode => mode,
        }
    }

    fn is_normalized(&self) -> bool {
        self.texture.sampler.normalized || self.geometry.cube()
    }

    /// A coordinate in texels.
    fn scaled(&self, axis: usize, x: f64) -> f64 {
        let x = if self.is_normalized() {
            let reduced = match self.mode(axis) {
                AddressMode::Wrap => fraction(x),
                AddressMode::Mirror => 2.0 * fraction(x / 2.0),
                _ => x,
            };
            reduced * f64::from(self.extent(axis))
        } else {
            x
        };
        if x.is_nan() { 0.0 } else { x }
    }

    /// The slice of a texel, and its place there; `None` in the border.
    fn place(&self, at: [i64; 3]) -> Option<[u32; 3]> {
        let dimensions = self.dimensions();
        let mut out = [0, 0, self.slice];
        for (axis, to) in out.iter_mut().enumerate().take(dimensions) {
            *to = resolve(at[axis], self.extent(axis), self.mode(axis))?;
        }
        Some(out)
    }

    fn integers(&self, at: [i64; 3]) -> [u32; 4] {
        let found = self.place(at).and_then(|[x, y, s]| texel::integers(self.texture, self.level, x, y, s));
        found.unwrap_or_else(|| {
            let border = self.texture.sampler.border.map(f32::to_bits);
            texel::missing(self.texture.image.format(), border, 1)
        })
    }

    fn floats(&self, at: [i64; 3]) -> [f64; 4] {
        if self.geometry.cube() && self.texture.sampler.seamless {
            return self.seamless(at[0], at[1]);
        }
        self.floats_inside(at).map(f64::from)
    }

    fn floats_inside(&self, at: [i64; 3]) -> [f32; 4] {
        self.floats_at(self.place(at))
    }

    /// A texel, or the border.
    #[inline]
    fn floats_at(&self, place: Option<[u32; 3]>) -> [f32; 4] {
        let found = place.and_then(|[x, y, s]| texel::floats(self.texture, self.level, x, y, s));
        found.unwrap_or_else(|| texel::missing(self.texture.image.format(), self.texture.sampler.border, 1.0))
    }

    /// A texel of a cube, at most one texel beside a face. At a corner three faces meet: the mean of their texels.
    fn seamless(&self, i: i64, j: i64) -> [f64; 4] {
        let n = self.level.width;
        let last = i64::from(n) - 1;
        let (ci, cj) = (i.clamp(0, last), j.clamp(0, last));
        let own = |i: i64, j: i64| self.floats_inside([i, j, 0]).map(f64::from);
        let other = |i: i64, j: i64| {
            let (face, i, j) = cube::beside(self.slice % 6, i, j, n);
            let last = self.texture.image.slices(self.level) - 1;
            let slice = (self.slice - self.slice % 6).saturating_add(face).min(last);
            Site { slice, ..*self }.floats_inside([i, j, 0]).map(f64::from)
        };
        match (ci == i, cj == j) {
            (true, true) => own(i, j),
            (false, false) => {
                let (a, b, c) = (own(ci, cj), other(i, cj), other(ci, j));
                core::array::from_fn(|n| (a[n] + b[n] + c[n]) / 3.0)
            }
            _ => other(i, j),
        }
    }

    /// The weighted sum of the texels at the taps.
    fn blend(&self, taps: [Tap; 3]) -> [f64; 4] {
        let seamless = self.geometry.cube() && self.texture.sampler.seamless;
        let mut places = [[Some(0); 2], [Some(0); 2], [Some(self.slice); 2]];
        let dimensions = self.dimensions();
        for (axis, (place, tap)) in places.iter_mut().zip(&taps).enumerate().take(dimensions) {
            let (n, mode) = (self.extent(axis), self.mode(axis));
            *place = [tap.index, tap.index.saturating_add(1)].map(|index| resolve(index, n, mode));
        }
        let mut sum = [0.0; 4];
        for corner in 0..1usize << dimensions {
            let mut weight = 1.0;
            for (axis, tap) in taps.iter().enumerate().take(dimensions) {
                weight *= if corner >> axis & 1 == 1 { tap.weight } else { 1.0 - tap.weight };
            }
            // Texels without a weight are not read: an infinity there must not count.
            if weight <= 0.0 {
                continue;
            }
            let next = [0, 1, 2].map(|axis| corner >> axis & 1);
            let texel = if seamless {
                let at = |axis: usize| taps[axis].index.saturating_add(i64::from(next[axis] == 1));
                self.seamless(at(0), at(1))
            } else {
                let [x, y, slice] = [0, 1, 2].map(|axis| places[axis][next[axis]]);
                let place = x.zip(y).zip(slice).map(|((x, y), slice)| [x, y, slice]);
                self.floats_at(place).map(f64::from)
            };
            for (to, v) in sum.iter_mut().zip(texel) {
                *to += weight * v;
            }
        }
        sum
    }

    fn taps(&self, at: [f64; 3], offset: [i32; 3], filter: Filter) -> [Tap; 3] {
        let dimensions = self.dimensions();
        let mut taps = [Tap::default(); 3];
        for (axis, tap) in taps.iter_mut().enumerate().take(dimensions) {
            *tap = Tap::new(self.scaled(axis, at[axis]), filter);
            if !self.geometry.cube() {
                tap.index = tap.index.saturating_add(i64::from(offset[axis]));
            }
        }
        taps
    }
}

/// The face and the coordinates on it; face 0 if the geometry is no cube.
fn placed(geometry: ImageGeometry, at: [f32; 3]) -> (u32, [f64; 3]) {
    let at = at.map(f64::from);
    if geometry.cube() {
        let place = cube::project(at);
        return (place.face, [place.at[0], place.at[1], 0.0]);
    }
    (0, at)
}

/// The level of detail of a pair of derivatives: the logarithm of the longer one in texels.
pub(super) fn detail(
    texture: &Texture,
    geometry: ImageGeometry,
    at: [f32; 3],
    x: [f32; 3],
    y: [f32; 3],
) -> f64 {
    let image = &texture.image;
    let Some(level) = image.levels().first() else { return 0.0 };
    let at = at.map(f64::from);
    let length = |d: [f32; 3]| {
        let mut d = d.map(f64::from);
        if geometry.cube() {
            let face = cube::project(at).face;
            let ([u, v, normal], [du, dv, dn]) = (cube::along(face, at), cube::along(face, d));
            let slope = |a: f64, da: f64| (da * normal - a * dn) / (2.0 * normal * normal);
            d = [slope(u, du), slope(v, dv), 0.0];
        }
        if texture.sampler.normalized || geometry.cube() {
            let extents = [level.width, level.height, level.depth].map(f64::from);
            d.iter_mut().zip(extents).for_each(|(d, n)| *d *= n);
        }
        let dimensions = if geometry.cube() { 2 } else { geometry.dimensions() };
        d.iter().take(dimensions).map(|d| d * d).sum::<f64>().sqrt()
    };
    length(x).max(length(y)).log2()
}

/// The level of detail after the bias and the limits of the sampler and the image. A level that the instruction does not give is 0.
fn limited(texture: &Texture, lod: Option<f64>) -> f64 {
    let sampler = &texture.sampler;
    if texture.image.levels().len() == 1 {
        return 0.0;
    }
    let lod = lod.map_or(0.0, |lod| lod + f64::from(sampler.mip_bias));
    let [low, high] = sampler.mip_clamp.map(f64::from);
    let top = f64::from(u8::try_from(texture.image.levels().len() - 1).unwrap_or(u8::MAX));
    // `max` and `min` drop a NaN.
    lod.max(low).min(high).max(0.0).min(top)
}

/// A fetch with float coordinates.
pub(super) fn sample(
    texture: &Texture,
    geometry: ImageGeometry,
    layer: u32,
    at: [f32; 3],
    offset: [i32; 3],
    lod: Option<f64>,
) -> [u32; 4] {
    let (face, at) = placed(geometry, at);
    let site = |level: usize| Site::new(texture, level, geometry, layer, face);
    let lod = limited(texture, lod);
    let nearest = index(lod + 0.5);
    if !texel::is_float(texture) {
        return site(nearest)
            .map_or([0; 4], |site| site.integers(site.taps(at, offset, Filter::Point).map(|tap| tap.index)));
    }
    let filtered = |level: usize| {
        site(level).map_or([0.0; 4], |site| site.blend(site.taps(at, offset, texture.sampler.filter)))
    };
    let value = match texture.sampler.mip_filter {
        Filter::Point => filtered(nearest),
        Filter::Linear => {
            let steps = index(lod * STEPS + 0.5);
            let (level, weight) = (steps >> 8, f64::from((steps & 0xff) as u32) / STEPS);
            let mut value = filtered(level);
            if weight > 0.0 {
                for (v, next) in value.iter_mut().zip(filtered(level + 1)) {
                    *v = *v * (1.0 - weight) + next * weight;
                }
            }
            value
        }
    };
    value.map(|v| (v as f32).to_bits())
}

#[expect(clippy::cast_sign_loss, reason = "levels of detail are limited to the levels of the image")]
fn index(lod: f64) -> usize {
    lod as usize
}

/// A fetch with integer coordinates: one texel, or zero outside the image.
pub(super) fn load(
    texture: &Texture,
    geometry: ImageGeometry,
    layer: u32,
    at: [i32; 3],
    offset: [i32; 3],
    level: i32,
) -> [u32; 4] {
    let format = texture.image.format();
    let top = texture.image.levels().len() - 1;
    let level = usize::try_from(level).unwrap_or(0).min(top);
    let Some(site) = Site::new(texture, level, geometry, layer, 0) else { return [0; 4] };
    let mut place = [0, 0, site.slice];
    let mut inside = true;
    for axis in 0..geometry.dimensions() {
        let index = u32::try_from(i64::from(at[axis]) + i64::from(offset[axis]));
        inside &= index.is_ok_and(|index| index < site.extent(axis));
        place[axis] = index.unwrap_or(0);
    }
    let [x, y, slice] = place;
    let found = if !inside {
        None
    } else if texel::is_float(texture) {
        texel::floats(texture, site.level, x, y, slice).map(|v| v.map(f32::to_bits))
    } else {
        texel::integers(texture, site.level, x, y, slice)
    };
    let one = if texel::is_float(texture) { 1.0f32.to_bits() } else { 1 };
    found.unwrap_or_else(|| texel::missing(format, [0; 4], one))
}

/// One channel of the four texels that a linear filter would read, from below left against the clock.
pub(super) fn gather(
    texture: &Texture,
    geometry: ImageGeometry,
    layer: u32,
    at: [f32; 3],
    offset: [i32; 3],
    channel: usize,
) -> [u32; 4] {
    let (face, at) = placed(geometry, at);
    let level = index(limited(texture, None) + 0.5);
    let Some(site) = Site::new(texture, level, geometry, layer, face) else { return [0; 4] };
    let [x, y, _] = site.taps(at, offset, Filter::Linear).map(|tap| tap.index);
    let (right, below) = (x.saturating_add(1), y.saturating_add(1));
    [[x, below], [right, below], [right, y], [x, y]].map(|[x, y]| {
        let texel = if texel::is_float(texture) {
            site.floats([x, y, 0]).map(|v| (v as f32).to_bits())
        } else {
            site.integers([x, y, 0])
        };
        texel[channel & 3]
    })
}

//! Texture and surface instructions, compared with a plain reference in f64.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "reference values are made by casts"
)]

mod filters;
mod formats;
mod forms;
mod queries;
mod reference;
mod surfaces;

use std::collections::HashMap;
use std::sync::Arc;

use softgpu_engine::{
    AddressMode, ChannelType, Fault, Filter, Format, Image, Images, Level, Sampler, Shape, Storage, Surface,
    Texture,
};

use crate::common::{Buffer, Params, Rig, shape};

pub(crate) const TEXTURE: u64 = 0x1_0000_0001;
pub(crate) const SURFACE: u64 = 0x2_0000_0007;
/// The bytes around and between the rows of an image.
const FILL: u8 = 0xee;

/// A table of handles.
#[derive(Default)]
pub(crate) struct Handles {
    pub(crate) textures: HashMap<u64, Arc<Texture>>,
    pub(crate) surfaces: HashMap<u64, Arc<Surface>>,
}

impl Images for Handles {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        self.textures.get(&handle).cloned()
    }

    fn surface(&self, handle: u64) -> Option<Arc<Surface>> {
        self.surfaces.get(&handle).cloned()
    }
}

pub(crate) fn plain() -> Sampler {
    Sampler {
        address: [AddressMode::Clamp; 3],
        filter: Filter::Point,
        normalized: false,
        promote: false,
        srgb: false,
        mip_filter: Filter::Point,
        mip_bias: 0.0,
        mip_clamp: [0.0, 1000.0],
        border: [0.0; 4],
        seamless: true,
    }
}

/// An array in a buffer, with bytes before, between and after its rows that are no part of it.
pub(crate) struct Array {
    pub(crate) bytes: Buffer,
    pub(crate) image: Arc<Image>,
}

/// The extents of an array: width, height, depth, layers (faces count for cubes), levels.
#[derive(Clone, Copy)]
pub(crate) struct Extents(pub u32, pub u32, pub u32, pub u32, pub u32);

impl Array {
    pub(crate) fn new(kind: Shape, format: Format, extents: Extents) -> Array {
        let Extents(width, height, depth, layers, count) = extents;
        let texel = u64::from(format.bytes());
        let faces = if matches!(kind, Shape::Cube | Shape::CubeLayered) { 6 } else { 1 };
        let mut levels = Vec::new();
        let mut at = 64;
        for n in 0..count {
            let (w, h, d) = ((width >> n).max(1), (height >> n).max(1), (depth >> n).max(1));
            let row_pitch = (u64::from(w) * texel + 5).next_multiple_of(texel.max(8));
            let slice_pitch = row_pitch * u64::from(h) + 3 * texel.max(8);
            levels.push(Level { address: at, width: w, height: h, depth: d, row_pitch, slice_pitch });
            at = (at + slice_pitch * u64::from(d * layers * faces) + 64).next_multiple_of(64);
        }
        let bytes = Buffer::zeroed(at as usize + 64);
        (0..at as usize + 64).for_each(|n| bytes.set(n, FILL));
        levels.iter_mut().for_each(|level| level.address += bytes.addr());
        let image = Image::new(kind, format, Storage::Array(bytes.range()), layers, levels);
        Array { image: Arc::new(image.expect("a sound image")), bytes }
    }

    /// Sets the bits of each channel: `f([level, x, y, slice, channel])`.
    pub(crate) fn paint(self, f: impl Fn([u32; 5]) -> u32) -> Array {
        let format = self.image.format();
        for (n, level) in (0..).zip(self.image.levels()) {
            for slice in 0..slices(&self.image, level) {
                for (y, x) in (0..level.height).flat_map(|y| (0..level.width).map(move |x| (y, x))) {
                    for c in 0..u32::from(format.channels) {
                        let at = self.offset(level, x, y, slice) + (c * format.channel.bytes()) as usize;
                        let v = f([n, x, y, slice, c]);
                        for (k, byte) in
                            v.to_le_bytes().iter().enumerate().take(format.channel.bytes() as usize)
                        {
                            self.bytes.set(at + k, *byte);
                        }
                    }
                }
            }
        }
        self
    }

    fn offset(&self, level: &Level, x: u32, y: u32, slice: u32) -> usize {
        let at = level.address - self.bytes.addr()
            + u64::from(slice) * level.slice_pitch
            + u64::from(y) * level.row_pitch
            + u64::from(x) * u64::from(self.image.format().bytes());
        at as usize
    }

    /// The bits of a channel.
    pub(crate) fn channel(&self, level: usize, x: u32, y: u32, slice: u32, c: u32) -> u32 {
        let format = self.image.format();
        let size = format.channel.bytes() as usize;
        let at = self.offset(&self.image.levels()[level], x, y, slice) + c as usize * size;
        (0..size).fold(0, |v, n| v | u32::from(self.bytes.get::<u8>(at + n)) << (8 * n))
    }

    /// True if no byte outside the texels has changed.
    pub(crate) fn surroundings_are_whole(&self) -> bool {
        let mut inside = vec![false; self.bytes.all::<u8>().len()];
        for level in self.image.levels() {
            let row = (level.width * self.image.format().bytes()) as usize;
            for (slice, y) in
                (0..slices(&self.image, level)).flat_map(|s| (0..level.height).map(move |y| (s, y)))
            {
                let at = self.offset(level, 0, y, slice);
                inside[at..at + row].fill(true);
            }
        }
        self.bytes.all::<u8>().iter().zip(inside).all(|(byte, inside)| inside || *byte == FILL)
    }
}

fn slices(image: &Image, level: &Level) -> u32 {
    let faces = if matches!(image.shape(), Shape::Cube | Shape::CubeLayered) { 6 } else { 1 };
    level.depth * image.layers() * faces
}

pub(crate) fn float(channels: u8) -> Format {
    Format { channel: ChannelType::F32, channels }
}

/// A kernel that gives each thread four words `c0` to `c3` and stores the words `r0` to `r3`.
pub(crate) fn kernel(instructions: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.global .texref tref;\n.visible .global .surfref sref;\n\
         .visible .entry k(.param .u64 h, .param .u64 in, .param .u64 out, .param .texref p)\n{{\n\
         .reg .b64 %h, %in, %out, %a, %w<4>;\n.reg .b32 %c<4>, %r<4>, %id, %n, %m;\n.reg .b16 %s<4>;\n\
         .reg .f32 %f<8>;\n.reg .pred %p, %q;\n\
         ld.param.u64 %h, [h];\nld.param.u64 %in, [in];\nld.param.u64 %out, [out];\n\
         mov.u32 %id, %tid.x;\nmov.u32 %n, %ctaid.x;\nmov.u32 %m, %ntid.x;\nmad.lo.u32 %id, %n, %m, %id;\n\
         mul.wide.u32 %a, %id, 16;\nadd.u64 %in, %in, %a;\nadd.u64 %out, %out, %a;\n\
         ld.global.v4.b32 {{%c0, %c1, %c2, %c3}}, [%in];\n\
         mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\nmov.u32 %r3, 0;\n\
         {instructions}\n\
         st.global.v4.b32 [%out], {{%r0, %r1, %r2, %r3}};\nret;\n}}\n"
    )
}

/// Runs the instructions once for each input, with this handle.
pub(crate) fn run(
    handles: Handles,
    handle: u64,
    instructions: &str,
    inputs: &[[u32; 4]],
) -> Result<Vec<[u32; 4]>, Fault> {
    let mut rig = Rig::new(&kernel(instructions));
    rig.references = vec![handle; rig.linked.module().references().len()];
    rig.alone = !handles.surfaces.is_empty();
    rig.images = Box::new(handles);
    let threads = inputs.len().next_multiple_of(32).max(32);
    let words: Vec<u32> = inputs.iter().flatten().copied().collect();
    let input = Buffer::zeroed(threads * 16);
    words.iter().enumerate().for_each(|(n, v)| input.set(n, *v));
    let output = Buffer::zeroed(threads * 16);
    rig.map(&[&input, &output]);
    let params = Params::new().put(handle).buf(&input).buf(&output).put(handle);
    // The last warp of the block is full: its extra threads repeat the first input.
    for n in inputs.len()..threads {
        (0..4).for_each(|k| input.set(n * 4 + k, inputs.first().map_or(0, |v| v[k])));
    }
    rig.launch("k", shape((threads / 32) as u32, 32), params)?;
    let all: Vec<u32> = output.all();
    Ok(all.as_chunks::<4>().0[..inputs.len()].to_vec())
}

/// Runs a fetch from a texture.
pub(crate) fn fetch(
    array: &Array,
    sampler: Sampler,
    instruction: &str,
    inputs: &[[u32; 4]],
) -> Vec<[u32; 4]> {
    let texture = Arc::new(Texture { image: Arc::clone(&array.image), sampler });
    let handles = Handles { textures: HashMap::from([(TEXTURE, texture)]), ..Handles::default() };
    run(handles, TEXTURE, instruction, inputs).unwrap_or_else(|fault| panic!("{instruction}: {fault}"))
}

/// Runs instructions on a surface.
pub(crate) fn on_surface(
    array: &Array,
    instruction: &str,
    inputs: &[[u32; 4]],
) -> Result<Vec<[u32; 4]>, Fault> {
    let surface = Arc::new(Surface { image: Arc::clone(&array.image) });
    let handles = Handles { surfaces: HashMap::from([(SURFACE, surface)]), ..Handles::default() };
    run(handles, SURFACE, instruction, inputs)
}

/// Pseudo-random words.
pub(crate) fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut s = u64::from(seed) | 0x9e37_79b9_0000_0000;
    move || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 16) as u32
    }
}

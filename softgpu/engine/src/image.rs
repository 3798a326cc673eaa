//! Images, samplers, textures and surfaces, as a device lends them to a launch.
//!
//! An [`Image`] lists the bytes of every mip level; [`Image::new`] accepts only levels that lie inside their storage, so that an
//! access with coordinates inside the image never leaves it. The bytes of an array are no part of [`Memory`](crate::Memory): only
//! an image names them, and generic loads never reach them.

use core::ops::Range;
use std::sync::Arc;

/// Largest extent of an image in texels, in each direction.
const MAX_EXTENT: u32 = 1 << 17;
/// Most texels of a one-dimensional image in linear memory.
const MAX_LINEAR: u32 = 1 << 28;
/// Most mip levels of an image.
const MAX_LEVELS: usize = 18;
/// Faces of a cube.
const FACES: u32 = 6;

/// The type of each channel of a texel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelType {
    /// Unsigned, 8 bits.
    U8,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 8 bits.
    S8,
    /// Signed, 16 bits.
    S16,
    /// Signed, 32 bits.
    S32,
    /// Floating-point, 16 bits.
    F16,
    /// Floating-point, 32 bits.
    F32,
    /// An unsigned fraction of 255, always read as a float.
    Unorm8,
    /// An unsigned fraction of 65,535, always read as a float.
    Unorm16,
    /// A signed fraction of 127, always read as a float.
    Snorm8,
    /// A signed fraction of 32,767, always read as a float.
    Snorm16,
}

impl ChannelType {
    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            ChannelType::U8 | ChannelType::S8 | ChannelType::Unorm8 | ChannelType::Snorm8 => 1,
            ChannelType::U16
            | ChannelType::S16
            | ChannelType::F16
            | ChannelType::Unorm16
            | ChannelType::Snorm16 => 2,
            ChannelType::U32 | ChannelType::S32 | ChannelType::F32 => 4,
        }
    }
}

/// The format of a texel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The type of each channel.
    pub channel: ChannelType,
    /// Number of channels: 1, 2 or 4.
    pub channels: u8,
}

impl Format {
    /// Size of a texel in bytes.
    pub const fn bytes(self) -> u32 {
        self.channel.bytes() * self.channels as u32
    }
}

/// The arrangement of the texels of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One dimension.
    D1,
    /// Two dimensions.
    D2,
    /// Three dimensions.
    D3,
    /// Layers of one dimension.
    D1Layered,
    /// Layers of two dimensions.
    D2Layered,
    /// Six square faces.
    Cube,
    /// Layers of six square faces.
    CubeLayered,
}

/// The place of the bytes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Linear memory: the bytes must be mapped in [`Memory`](crate::Memory) when a launch first uses the image. If they are not, the
    /// launch fails with an illegal address.
    Memory,
    /// The bytes of an array. They must stay mapped and writable until each launch ends that may have looked up the image.
    Array(Range<u64>),
}

/// One mip level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Address of the first texel.
    pub address: u64,
    /// Texels in a row.
    pub width: u32,
    /// Rows; 1 for images of one dimension.
    pub height: u32,
    /// Slices; 1 except for [`Shape::D3`].
    pub depth: u32,
    /// Bytes from a row to the next.
    pub row_pitch: u64,
    /// Bytes from a slice, layer or face to the next.
    pub slice_pitch: u64,
}

/// The reason that an image is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The number of channels is not 1, 2 or 4.
    #[error("a texel has 1, 2 or 4 channels")]
    Channels,
    /// The number of mip levels is zero or too large.
    #[error("the number of mip levels is out of range")]
    Levels,
    /// An extent is zero or too large, or does not fit the shape.
    #[error("an extent of the image is out of range")]
    Extent,
    /// An address or a pitch is not a multiple of the size of a texel.
    #[error("an address or pitch is not a multiple of the size of a texel")]
    Alignment,
    /// Rows or slices overlap.
    #[error("a pitch is smaller than the bytes that it separates")]
    Pitch,
    /// Bytes of a level lie outside the storage.
    #[error("a level lies outside the storage of the image")]
    Outside,
}

/// An image: texels of one format, in one or more mip levels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    shape: Shape,
    format: Format,
    storage: Storage,
    layers: u32,
    levels: Vec<Level>,
}

impl Image {
    /// Checks and makes an image. `layers` counts layers, of six faces each for [`Shape::CubeLayered`]; it is 1 for shapes
    /// without layers. The slices of a level are its depth, its layers, or the faces of its layers in ascending order.
    ///
    /// # Errors
    /// The first rule that the image breaks.
    pub fn new(
        shape: Shape,
        format: Format,
        storage: Storage,
        layers: u32,
        levels: Vec<Level>,
    ) -> Result<Image, ImageError> {
        if !matches!(format.channels, 1 | 2 | 4) {
            return Err(ImageError::Channels);
        }
        if levels.is_empty() || levels.len() > MAX_LEVELS {
            return Err(ImageError::Levels);
        }
        let image = Image { shape, format, storage, layers, levels };
        for level in &image.levels {
            image.check(level)?;
        }
        Ok(image)
    }

    fn check(&self, level: &Level) -> Result<(), ImageError> {
        let widest =
            if self.storage == Storage::Memory && self.shape == Shape::D1 { MAX_LINEAR } else { MAX_EXTENT };
        let extent = |n: u32, most: u32| (1..=most).contains(&n);
        if !extent(level.width, widest)
            || !extent(level.height, if self.is_one_dimensional() { 1 } else { MAX_EXTENT })
            || !extent(level.depth, if self.shape == Shape::D3 { MAX_EXTENT } else { 1 })
            || !extent(self.layers, if self.is_layered() { MAX_EXTENT } else { 1 })
            || self.is_cube() && level.width != level.height
        {
            return Err(ImageError::Extent);
        }
        let texel = u64::from(self.format.bytes());
        let (rows, slices) = (u64::from(level.height), u64::from(self.slices(level)));
        if !level.address.is_multiple_of(texel)
            || rows > 1 && !level.row_pitch.is_multiple_of(texel)
            || slices > 1 && !level.slice_pitch.is_multiple_of(texel)
        {
            return Err(ImageError::Alignment);
        }
        let row = u64::from(level.width) * texel;
        if rows > 1 && level.row_pitch < row {
            return Err(ImageError::Pitch);
        }
        let slice = level.row_pitch.checked_mul(rows - 1).and_then(|n| n.checked_add(row));
        let slice = slice.ok_or(ImageError::Outside)?;
        if slices > 1 && level.slice_pitch < slice {
            return Err(ImageError::Pitch);
        }
        let bytes = self.level_bytes(level).ok_or(ImageError::Outside)?;
        match &self.storage {
            Storage::Array(all) if bytes.start < all.start || bytes.end > all.end => Err(ImageError::Outside),
            _ => Ok(()),
        }
    }

    /// The addresses from the first byte of a level to its last; `None` if they do not fit 64 bits.
    pub(crate) fn level_bytes(&self, level: &Level) -> Option<Range<u64>> {
        let rows = level.row_pitch.checked_mul(u64::from(level.height - 1))?;
        let slices = level.slice_pitch.checked_mul(u64::from(self.slices(level) - 1))?;
        let row = u64::from(level.width) * u64::from(self.format.bytes());
        let size = rows.checked_add(slices)?.checked_add(row)?;
        Some(level.address..level.address.checked_add(size)?)
    }

    /// An image of some of the levels and layers of this one, whose texels are read in another format of the same size: the
    /// resource view of a texture. `layers` counts faces for cubes.
    ///
    /// # Errors
    /// As [`Image::new`]; a range that is empty or beyond the image is [`ImageError::Levels`] or [`ImageError::Extent`].
    pub fn view(
        &self,
        shape: Shape,
        format: Format,
        levels: Range<usize>,
        slices: Range<u32>,
    ) -> Result<Image, ImageError> {
        let mut chosen =
            self.levels.get(levels).filter(|l| !l.is_empty()).ok_or(ImageError::Levels)?.to_vec();
        if format.bytes() != self.format.bytes() {
            return Err(ImageError::Alignment);
        }
        let layers = if self.shape == Shape::D3 {
            1
        } else {
            if slices.is_empty() || chosen.iter().any(|level| slices.end > self.slices(level)) {
                return Err(ImageError::Extent);
            }
            for level in &mut chosen {
                level.address += u64::from(slices.start) * level.slice_pitch;
            }
            let count = slices.end - slices.start;
            let faces = if matches!(shape, Shape::Cube | Shape::CubeLayered) { FACES } else { 1 };
            if !count.is_multiple_of(faces) {
                return Err(ImageError::Extent);
            }
            count / faces
        };
        Image::new(shape, format, self.storage.clone(), layers, chosen)
    }

    /// The arrangement of the texels.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The format of a texel.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The place of the bytes.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The number of layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The mip levels, the largest first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The address of a texel; `None` outside the level.
    #[inline]
    pub(crate) fn texel(&self, level: &Level, x: u32, y: u32, slice: u32) -> Option<u64> {
        let inside = x < level.width && y < level.height && slice < self.slices(level);
        // `check` has shown that the sum of the largest terms is an address of the level.
        inside.then(|| {
            level.address
                + u64::from(slice) * level.slice_pitch
                + u64::from(y) * level.row_pitch
                + u64::from(x) * u64::from(self.format.bytes())
        })
    }

    pub(crate) fn is_layered(&self) -> bool {
        matches!(self.shape, Shape::D1Layered | Shape::D2Layered | Shape::CubeLayered)
    }

    fn is_cube(&self) -> bool {
        matches!(self.shape, Shape::Cube | Shape::CubeLayered)
    }

    fn is_one_dimensional(&self) -> bool {
        matches!(self.shape, Shape::D1 | Shape::D1Layered)
    }

    /// The number of slices of a level, of which faces and layers are some.
    pub(crate) fn slices(&self, level: &Level) -> u32 {
        match self.shape {
            Shape::D3 => level.depth,
            Shape::Cube | Shape::CubeLayered => self.layers * FACES,
            _ => self.layers,
        }
    }
}

/// The treatment of coordinates outside the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressMode {
    /// The image repeats. Without normalized coordinates, this is [`AddressMode::Clamp`].
    Wrap,
    /// The texel at the edge continues.
    Clamp,
    /// The image repeats, each time mirrored. Without normalized coordinates, this is [`AddressMode::Clamp`].
    Mirror,
    /// The border colour lies around the image.
    Border,
}

/// The filter between texels, and between mip levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The nearest one.
    Point,
    /// An interpolation with weights of 8 bits.
    Linear,
}

/// The way that a texture is read. Anisotropy does not exist: each fetch takes one footprint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// The treatment of coordinates outside the image, in each direction.
    pub address: [AddressMode; 3],
    /// The filter between texels. Integers that are not promoted are always read with [`Filter::Point`].
    pub filter: Filter,
    /// True if float coordinates run from 0 to 1.
    pub normalized: bool,
    /// True if integers of 8 and 16 bits are read as fractions of their largest value.
    pub promote: bool,
    /// True if the first three channels of 8-bit fractions are decoded from sRGB.
    pub srgb: bool,
    /// The filter between mip levels.
    pub mip_filter: Filter,
    /// Added to each level of detail.
    pub mip_bias: f32,
    /// The least and the greatest level of detail.
    pub mip_clamp: [f32; 2],
    /// The border colour. For integers that are not promoted, the bits of each float are the integer.
    pub border: [f32; 4],
    /// True if filters of cubes continue on the adjacent face.
    pub seamless: bool,
}

/// An image and the way that it is read: the target of a texture handle.
#[derive(Clone, Debug, PartialEq)]
pub struct Texture {
    /// The image.
    pub image: Arc<Image>,
    /// The sampler.
    pub sampler: Sampler,
}

/// The first level of an image, for reads and writes: the target of a surface handle. For another level, the image is a
/// [`Image::view`] of that level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surface {
    /// The image.
    pub image: Arc<Image>,
}

/// The table of texture and surface handles.
///
/// A thread of a launch asks once for each handle that it meets and keeps the answer until the launch ends, so a look-up may take
/// a lock. A handle that is unknown fails the launch with an illegal address.
pub trait Images: Sync {
    /// Returns the texture of a handle.
    fn texture(&self, handle: u64) -> Option<Arc<Texture>>;
    /// Returns the surface of a handle.
    fn surface(&self, handle: u64) -> Option<Arc<Surface>>;
}

/// A table without handles.
#[derive(Clone, Copy, Debug)]
pub struct NoImages;

impl Images for NoImages {
    fn texture(&self, _: u64) -> Option<Arc<Texture>> {
        None
    }

    fn surface(&self, _: u64) -> Option<Arc<Surface>> {
        None
    }
}

/// The type of a module-scope reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    /// `.texref`.
    Texture,
    /// `.surfref`.
    Surface,
}

/// A module-scope `.texref` or `.surfref`. [`Launch::references`](crate::Launch::references) gives the handle that it names in a
/// launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The name as written in the PTX.
    pub name: String,
    /// Its type.
    pub kind: ReferenceKind,
    /// True if the reference is visible outside its module.
    pub visible: bool,
}

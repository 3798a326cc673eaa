//! The shape of an array: its extents, its element, and its levels.

use sluice_cuda_abi::sys::CUresult as Code;

use crate::limits::Limits;
use crate::texel::Texel;
use sluice_cuda_abi::descriptors::Array3DDescriptor;

const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;

/// `CUDA_ARRAY3D_*`.
pub mod flags {
    /// Layers instead of a depth.
    pub const LAYERED: u32 = 0x01;
    /// Surfaces may be bound to the array.
    pub const SURFACE: u32 = 0x02;
    /// The faces of a cube.
    pub const CUBEMAP: u32 = 0x04;
    /// Textures over the array may be gathered.
    pub const GATHER: u32 = 0x08;
    /// A graphics API may draw into the array. It has no meaning without such an API.
    pub const COLOUR_ATTACHMENT: u32 = 0x20;
    /// Depth textures, sparse arrays, deferred mapping, and video.
    pub(crate) const REFUSED: u32 = 0x10 | 0x40 | 0x80 | 0x100;
    pub(crate) const SERVED: u32 = LAYERED | SURFACE | CUBEMAP | GATHER | COLOUR_ATTACHMENT;
}

/// The kind of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayKind {
    /// One dimension.
    Line,
    /// Two dimensions.
    Plane,
    /// Three dimensions.
    Volume,
    /// Layers of one dimension.
    Lines,
    /// Layers of two dimensions.
    Planes,
    /// The six faces of a cube.
    Cube,
    /// Layers that are the faces of cubes.
    Cubes,
}

impl ArrayKind {
    /// True if the depth counts layers, which all levels have.
    #[must_use]
    pub const fn is_layered(self) -> bool {
        !matches!(self, ArrayKind::Line | ArrayKind::Plane | ArrayKind::Volume)
    }
}

/// The shape of an array or of one level of a mipmapped array. Its extents are within the limits of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageShape {
    /// Elements of a row, at least 1.
    pub width: u64,
    /// Rows; 0 for one dimension.
    pub height: u64,
    /// Slices or layers; 0 for neither.
    pub depth: u64,
    /// The element.
    pub texel: Texel,
    /// `CUDA_ARRAY3D_*`.
    pub flags: u32,
    /// The kind.
    pub geometry: ArrayKind,
}

/// A box of an array, in bytes of a row, rows, and slices or layers. It lies within its array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayBox {
    /// The first byte of a row, the first row and the first slice.
    pub origin: [u64; 3],
    /// Bytes of a row, rows and slices.
    pub extent: [u64; 3],
}

impl ImageShape {
    /// Checks a descriptor. `levels` is none for an array, and the requested number for a mipmapped array.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`; `CUDA_ERROR_NOT_SUPPORTED` for sparse arrays, deferred mapping, and formats of blocks.
    pub fn check(array: Array3DDescriptor, is_mipmapped: bool, limits: &Limits) -> Result<ImageShape, Code> {
        let Array3DDescriptor { width, height, depth, format, channels, flags: bits } = array;
        if bits & !(flags::SERVED | flags::REFUSED) != 0 {
            return Err(INVALID);
        }
        let texel = Texel::read(format, channels)?;
        if bits & flags::REFUSED != 0 {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (layered, cube) = (bits & flags::LAYERED != 0, bits & flags::CUBEMAP != 0);
        let geometry = match (width, height, depth, layered, cube) {
            (0, ..) => return Err(INVALID),
            (_, 0, 0, false, false) => ArrayKind::Line,
            (_, 1.., 0, false, false) => ArrayKind::Plane,
            (_, 1.., 1.., false, false) => ArrayKind::Volume,
            (_, 0, 1.., true, false) => ArrayKind::Lines,
            (_, 1.., 1.., true, false) => ArrayKind::Planes,
            (_, 1.., 6, false, true) if width == height => ArrayKind::Cube,
            (_, 1.., 6.., true, true) if width == height && depth % 6 == 0 => ArrayKind::Cubes,
            _ => return Err(INVALID),
        };
        let shape = ImageShape { width, height, depth, texel, flags: bits, geometry };
        let gather = bits & flags::GATHER != 0;
        if gather && (geometry != ArrayKind::Plane || limits.can_gather == 0) {
            return Err(INVALID);
        }
        let surface = bits & flags::SURFACE != 0;
        let fits =
            shape.fits_texture(is_mipmapped, gather, limits) && (!surface || shape.fits_surface(limits));
        if fits { Ok(shape) } else { Err(INVALID) }
    }

    fn within(&self, width: u32, height: u32, depth: u32) -> bool {
        self.width <= u64::from(width) && self.height <= u64::from(height) && self.depth <= u64::from(depth)
    }

    fn fits_texture(&self, is_mipmapped: bool, gather: bool, limits: &Limits) -> bool {
        let l = limits;
        match self.geometry {
            ArrayKind::Line if is_mipmapped => self.within(l.texture_1d_mipmapped_width, 0, 0),
            ArrayKind::Line => self.within(l.texture_1d_width, 0, 0),
            ArrayKind::Plane if gather => self.within(l.texture_gather_width, l.texture_gather_height, 0),
            ArrayKind::Plane if is_mipmapped => {
                self.within(l.texture_2d_mipmapped_width, l.texture_2d_mipmapped_height, 0)
            }
            ArrayKind::Plane => self.within(l.texture_2d_width, l.texture_2d_height, 0),
            ArrayKind::Volume => {
                self.within(l.texture_3d_width, l.texture_3d_height, l.texture_3d_depth)
                    || self.within(
                        l.texture_3d_width_alternate,
                        l.texture_3d_height_alternate,
                        l.texture_3d_depth_alternate,
                    )
            }
            ArrayKind::Lines => self.within(l.texture_1d_layered_width, 0, l.texture_1d_layered_layers),
            ArrayKind::Planes => self.within(
                l.texture_2d_layered_width,
                l.texture_2d_layered_height,
                l.texture_2d_layered_layers,
            ),
            ArrayKind::Cube => self.within(l.texture_cubemap_width, l.texture_cubemap_width, 6),
            ArrayKind::Cubes => self.within(
                l.texture_cubemap_layered_width,
                l.texture_cubemap_layered_width,
                l.texture_cubemap_layered_layers,
            ),
        }
    }

    fn fits_surface(&self, limits: &Limits) -> bool {
        let l = limits;
        match self.geometry {
            ArrayKind::Line => self.within(l.surface_1d_width, 0, 0),
            ArrayKind::Plane => self.within(l.surface_2d_width, l.surface_2d_height, 0),
            ArrayKind::Volume => self.within(l.surface_3d_width, l.surface_3d_height, l.surface_3d_depth),
            ArrayKind::Lines => self.within(l.surface_1d_layered_width, 0, l.surface_1d_layered_layers),
            ArrayKind::Planes => self.within(
                l.surface_2d_layered_width,
                l.surface_2d_layered_height,
                l.surface_2d_layered_layers,
            ),
            ArrayKind::Cube => self.within(l.surface_cubemap_width, l.surface_cubemap_width, 6),
            ArrayKind::Cubes => self.within(
                l.surface_cubemap_layered_width,
                l.surface_cubemap_layered_width,
                l.surface_cubemap_layered_layers,
            ),
        }
    }

    /// The descriptor that getters return.
    #[must_use]
    pub const fn descriptor(&self) -> Array3DDescriptor {
        Array3DDescriptor {
            width: self.width,
            height: self.height,
            depth: self.depth,
            format: self.texel.format(),
            channels: self.texel.channels,
            flags: self.flags,
        }
    }

    /// The number of levels for a request: from 1 to that at which every extent is 1.
    #[must_use]
    pub fn levels(&self, requested: u32) -> u32 {
        let depth = if self.geometry.is_layered() { 0 } else { self.depth };
        let longest = self.width.max(self.height).max(depth).max(1);
        requested.clamp(1, longest.ilog2() + 1)
    }

    /// The shape of a level: extents are halved, layers stay.
    #[must_use]
    pub fn level(&self, level: u32) -> ImageShape {
        let halved = |extent: u64| match extent {
            0 => 0,
            _ => extent.checked_shr(level).unwrap_or(0).max(1),
        };
        let depth = if self.geometry.is_layered() { self.depth } else { halved(self.depth) };
        ImageShape { width: halved(self.width), height: halved(self.height), depth, ..*self }
    }

    /// Bytes of a row.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        // Widths are at most 2^32 and elements have at most 16 bytes.
        self.width.saturating_mul(self.texel.bytes())
    }

    /// Rows of a slice, at least 1.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        if self.height == 0 { 1 } else { self.height }
    }

    /// Slices or layers, at least 1.
    #[must_use]
    pub const fn slices(&self) -> u64 {
        if self.depth == 0 { 1 } else { self.depth }
    }

    /// Bytes of the array if each row begins at a multiple of `alignment`, a power of two; none if the number does not fit.
    #[must_use]
    pub fn bytes(&self, alignment: u64) -> Option<u64> {
        let pitch = self.row_bytes().checked_next_multiple_of(alignment)?;
        pitch.checked_mul(self.rows())?.checked_mul(self.slices())
    }

    /// Checks a box. Like NVIDIA's driver, it takes a row that begins or ends within an element: copies count bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn region(&self, origin: [u64; 3], extent: [u64; 3]) -> Result<ArrayBox, Code> {
        let room = [self.row_bytes(), self.rows(), self.slices()];
        let inside =
            (0..3).all(|axis| origin[axis].checked_add(extent[axis]).is_some_and(|end| end <= room[axis]));
        if inside { Ok(ArrayBox { origin, extent }) } else { Err(INVALID) }
    }

    /// Checks a run of bytes in the first row, for a copy between an array of one dimension and linear memory.
    ///
    /// # Errors
    /// The same.
    pub fn run(&self, offset: u64, bytes: u64) -> Result<ArrayBox, Code> {
        self.region([offset, 0, 0], [bytes, 1, 1])
    }

    /// Checks a box whose origin and extent count elements, as batches of copies have them.
    ///
    /// # Errors
    /// The same.
    pub fn element_region(&self, origin: [u64; 3], extent: [u64; 3]) -> Result<ArrayBox, Code> {
        let bytes = |elements: u64| elements.checked_mul(self.texel.bytes()).ok_or(INVALID);
        self.region([bytes(origin[0])?, origin[1], origin[2]], [bytes(extent[0])?, extent[1], extent[2]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits::DATA_CENTRE;

    fn check(width: u64, height: u64, depth: u64, flags: u32, mipmapped: bool) -> Result<ImageShape, Code> {
        let array = Array3DDescriptor { width, height, depth, format: 0x20, channels: 2, flags };
        ImageShape::check(array, mipmapped, &LIMITS)
    }

    fn geometry(width: u64, height: u64, depth: u64, flags: u32) -> Result<ArrayKind, Code> {
        check(width, height, depth, flags, false).map(|shape| shape.geometry)
    }

    #[test]
    fn extents_and_flags_give_the_kind_that_the_header_states() {
        assert_eq!(geometry(5, 0, 0, 0), Ok(ArrayKind::Line));
        assert_eq!(geometry(5, 1, 0, 0), Ok(ArrayKind::Plane));
        assert_eq!(geometry(5, 4, 3, 0), Ok(ArrayKind::Volume));
        assert_eq!(geometry(5, 0, 3, flags::LAYERED), Ok(ArrayKind::Lines));
        assert_eq!(geometry(5, 4, 3, flags::LAYERED), Ok(ArrayKind::Planes));
        assert_eq!(geometry(5, 5, 6, flags::CUBEMAP), Ok(ArrayKind::Cube));
        assert_eq!(geometry(5, 5, 12, flags::CUBEMAP | flags::LAYERED), Ok(ArrayKind::Cubes));
        for (width, height, depth, flags) in [
            (0, 0, 0, 0),
            (5, 0, 3, 0),
            (5, 4, 6, flags::CUBEMAP),
            (5, 5, 5, flags::CUBEMAP),
            (5, 5, 12, flags::CUBEMAP),
            (5, 5, 7, flags::CUBEMAP | flags::LAYERED),
            (5, 4, 0, flags::LAYERED),
            (5, 4, 3, flags::GATHER),
            (5, 4, 0, 0x200),
        ] {
            assert_eq!(
                geometry(width, height, depth, flags),
                Err(INVALID),
                "{width} {height} {depth} {flags}"
            );
        }
        for refused in [0x10, 0x40, 0x80, 0x100] {
            assert_eq!(geometry(5, 4, 0, refused), Err(Code::CUDA_ERROR_NOT_SUPPORTED));
        }
    }

    // Promise: C83
    #[test]
    fn extents_beyond_a_limit_are_refused() {
        assert!(check(131_072, 65_536, 0, 0, false).is_ok());
        assert_eq!(check(131_073, 1, 0, 0, false), Err(INVALID));
        assert_eq!(check(1, 65_537, 0, 0, false), Err(INVALID));
        assert_eq!(check(32_769, 0, 0, 0, true), Err(INVALID), "mipmapped");
        assert_eq!(check(32_769, 0, 0, flags::SURFACE, false), Err(INVALID), "a surface");
        assert!(check(8_192, 8_192, 32_768, 0, false).is_ok(), "the other extents of three dimensions");
        assert_eq!(check(8_193, 8_192, 32_768, 0, false), Err(INVALID));
        assert_eq!(check(1, 0, 2_049, flags::LAYERED, false), Err(INVALID));
        assert_eq!(check(32_769, 1, 0, flags::GATHER, false), Err(INVALID));
        assert_eq!(check(u64::MAX, u64::MAX, u64::MAX, 0, false), Err(INVALID));
    }

    #[test]
    fn levels_halve_every_extent_but_layers() {
        let volume = check(20, 5, 9, 0, true).unwrap();
        assert_eq!((volume.levels(0), volume.levels(3), volume.levels(u32::MAX)), (1, 3, 5));
        let third = volume.level(2);
        assert_eq!((third.width, third.height, third.depth), (5, 1, 2));
        let last = volume.level(40);
        assert_eq!((last.width, last.height, last.depth), (1, 1, 1));
        let layers = check(4, 0, 100, flags::LAYERED, true).unwrap();
        assert_eq!(layers.levels(9), 3);
        let second = layers.level(1);
        assert_eq!((second.width, second.height, second.depth), (2, 0, 100));
    }

    #[test]
    fn bytes_of_an_array_count_its_aligned_rows() {
        let shape = check(3, 4, 5, 0, false).unwrap();
        assert_eq!((shape.row_bytes(), shape.bytes(32), shape.bytes(1)), (24, Some(640), Some(480)));
        assert_eq!(check(9, 0, 0, 0, false).unwrap().bytes(512), Some(512));
    }

    // Promise: C84
    #[test]
    fn box_beyond_an_array_is_refused() {
        let shape = check(4, 3, 2, 0, false).unwrap();
        assert!(shape.region([8, 1, 1], [24, 2, 1]).is_ok());
        assert!(shape.region([4, 1, 1], [6, 2, 1]).is_ok(), "within elements");
        for (origin, extent) in [
            ([16, 0, 0], [24, 1, 1]),
            ([0, 2, 0], [8, 2, 1]),
            ([0, 0, 1], [8, 1, 2]),
            ([28, 0, 0], [8, 1, 1]),
            ([u64::MAX - 7, 0, 0], [16, 1, 1]),
            ([0, u64::MAX, 0], [8, 1, 1]),
        ] {
            assert_eq!(shape.region(origin, extent), Err(INVALID), "{origin:?} {extent:?}");
        }
        assert_eq!(shape.element_region([1, 0, 0], [3, 3, 2]), shape.region([8, 0, 0], [24, 3, 2]));
        assert_eq!(shape.element_region([u64::MAX, 0, 0], [1, 1, 1]), Err(INVALID));
        assert!(shape.run(8, 24).is_ok() && shape.run(8, 32).is_err());
    }
}

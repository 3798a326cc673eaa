//! Textures and surfaces: a resource, and the way in which a kernel reads it.

use sluice_cuda_abi::sys::CUresult as Code;

use crate::limits::Limits;
use crate::shape::{ArrayKind, ImageShape, flags};
use crate::texel::Texel;
use sluice_cuda_abi::descriptors::{ResourceDescriptor, TextureDescriptor, ViewDescriptor, resource};

const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;

/// `CU_TRSF_*`.
pub mod texture_flags {
    /// Integers are not converted to floats.
    pub const READ_AS_INTEGER: u32 = 0x01;
    /// Coordinates reach from 0 to 1.
    pub const NORMALISED_COORDINATES: u32 = 0x02;
    /// Components of 8 bits are sRGB.
    pub const SRGB: u32 = 0x10;
    /// A hint.
    pub const DISABLE_TRILINEAR_OPTIMISATION: u32 = 0x20;
    /// Filters across the edges of a cube.
    pub const SEAMLESS_CUBEMAP: u32 = 0x40;
    pub(crate) const ALL: u32 =
        READ_AS_INTEGER | NORMALISED_COORDINATES | SRGB | DISABLE_TRILINEAR_OPTIMISATION | SEAMLESS_CUBEMAP;
}

/// `CUaddress_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressMode {
    /// Coordinates repeat.
    Wrap,
    /// Coordinates end at the edge.
    Clamp,
    /// Coordinates repeat and turn around.
    Mirror,
    /// The border's colour lies outside.
    Border,
}

impl AddressMode {
    /// Reads the number of the header.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const fn read(number: u32) -> Result<AddressMode, Code> {
        match number {
            0 => Ok(AddressMode::Wrap),
            1 => Ok(AddressMode::Clamp),
            2 => Ok(AddressMode::Mirror),
            3 => Ok(AddressMode::Border),
            _ => Err(INVALID),
        }
    }

    /// The number of the header.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// `CUfilter_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterMode {
    /// The nearest element.
    Point,
    /// The mean of the nearest elements, by their distance.
    Linear,
}

impl FilterMode {
    /// Reads the number of the header.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const fn read(number: u32) -> Result<FilterMode, Code> {
        match number {
            0 => Ok(FilterMode::Point),
            1 => Ok(FilterMode::Linear),
            _ => Err(INVALID),
        }
    }

    /// The number of the header.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// The way in which a texture is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Coordinates outside, by dimension.
    pub address_modes: [AddressMode; 3],
    /// Filter within a level.
    pub filter: FilterMode,
    /// `CU_TRSF_*`.
    pub flags: u32,
    /// The greatest ratio of anisotropic filtering, as the program states it.
    pub max_anisotropy: u32,
    /// Filter between levels.
    pub mipmap_filter: FilterMode,
    /// Added to a level.
    pub level_bias: f32,
    /// The least level.
    pub min_level: f32,
    /// The greatest level.
    pub max_level: f32,
    /// The colour outside; a texture of integers has the bits of integers here.
    pub border: [f32; 4],
}

impl Sampling {
    /// That of a new texture reference.
    pub const DEFAULT: Sampling = Sampling {
        address_modes: [AddressMode::Clamp; 3],
        filter: FilterMode::Point,
        flags: 0,
        max_anisotropy: 0,
        mipmap_filter: FilterMode::Point,
        level_bias: 0.0,
        min_level: 0.0,
        max_level: 0.0,
        border: [0.0; 4],
    };

    /// Reads the structure of the header.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn read(texture: &TextureDescriptor) -> Result<Sampling, Code> {
        let [x, y, z] = texture.address_modes;
        if texture.flags & !texture_flags::ALL != 0 {
            return Err(INVALID);
        }
        Ok(Sampling {
            address_modes: [AddressMode::read(x)?, AddressMode::read(y)?, AddressMode::read(z)?],
            filter: FilterMode::read(texture.filter)?,
            flags: texture.flags,
            max_anisotropy: texture.max_anisotropy,
            mipmap_filter: FilterMode::read(texture.mipmap_filter)?,
            level_bias: texture.level_bias,
            min_level: texture.min_level,
            max_level: texture.max_level,
            border: texture.border,
        })
    }

    /// The structure of the header.
    #[must_use]
    pub fn descriptor(&self) -> TextureDescriptor {
        TextureDescriptor {
            address_modes: self.address_modes.map(AddressMode::number),
            filter: self.filter.number(),
            flags: self.flags,
            max_anisotropy: self.max_anisotropy,
            mipmap_filter: self.mipmap_filter.number(),
            level_bias: self.level_bias,
            min_level: self.min_level,
            max_level: self.max_level,
            border: self.border,
            reserved: [0; 12],
        }
    }

    /// True if coordinates reach from 0 to 1.
    #[must_use]
    pub const fn is_normalised(&self) -> bool {
        self.flags & texture_flags::NORMALISED_COORDINATES != 0
    }

    /// True if elements of this format reach a kernel as integers.
    #[must_use]
    pub const fn reads_integers(&self, texel: Texel) -> bool {
        // The header: components of 32 bits are never converted.
        let wide = texel.component.bytes() == 4;
        texel.component.is_integer() && (wide || self.flags & texture_flags::READ_AS_INTEGER != 0)
    }

    /// The modes that apply: without normalised coordinates, those that repeat count as clamping.
    #[must_use]
    pub fn applied_modes(&self) -> [AddressMode; 3] {
        self.address_modes.map(|mode| match mode {
            AddressMode::Wrap | AddressMode::Mirror if !self.is_normalised() => AddressMode::Clamp,
            mode => mode,
        })
    }

    /// The ratio of anisotropic filtering that applies: from 1 to 16.
    #[must_use]
    pub fn applied_anisotropy(&self) -> u32 {
        self.max_anisotropy.clamp(1, 16)
    }
}

/// Linear memory with rows, for a texture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitched {
    /// The first byte.
    pub address: u64,
    /// The element.
    pub texel: Texel,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Bytes between rows.
    pub pitch: u64,
}

impl Pitched {
    /// Checks the fields against the limits of a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn check(self, limits: &Limits) -> Result<Pitched, Code> {
        let within = |value: u64, limit: u32| (1..=u64::from(limit)).contains(&value);
        let fits = within(self.width, limits.texture_2d_linear_width)
            && within(self.height, limits.texture_2d_linear_height)
            && within(self.pitch, limits.texture_2d_linear_pitch);
        let aligned = is_aligned(self.address, limits.texture_alignment)
            && is_aligned(self.pitch, limits.texture_pitch_alignment);
        if fits && aligned && self.address != 0 && self.pitch >= self.width * self.texel.bytes() {
            Ok(self)
        } else {
            Err(INVALID)
        }
    }

    /// Bytes from the first to the last that a kernel may read.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pitch * (self.height - 1) + self.width * self.texel.bytes()
    }
}

/// Linear memory without rows, for a texture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// The first byte.
    pub address: u64,
    /// The element.
    pub texel: Texel,
    /// Bytes.
    pub bytes: u64,
}

impl Linear {
    /// Checks the fields against the limits of a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn check(self, limits: &Limits) -> Result<Linear, Code> {
        let elements = self.bytes / self.texel.bytes();
        let fits = (1..=u64::from(limits.texture_1d_linear_width)).contains(&elements);
        if fits && self.address != 0 && is_aligned(self.address, limits.texture_alignment) {
            Ok(self)
        } else {
            Err(INVALID)
        }
    }
}

/// A limit of 0 states no alignment.
fn is_aligned(value: u64, alignment: u32) -> bool {
    value.is_multiple_of(u64::from(alignment.max(1)))
}

/// An array, as a library keeps it, with its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayResource<A> {
    /// The library's array.
    pub array: A,
    /// Its shape; of a mipmapped array, that of its first level.
    pub shape: ImageShape,
    /// Levels; 1 for an array.
    pub levels: u32,
}

/// The memory of a texture. `A` is an array as a library keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource<A> {
    /// An array.
    Array(ArrayResource<A>),
    /// A mipmapped array.
    Mipmapped(ArrayResource<A>),
    /// Linear memory.
    Linear(Linear),
    /// Linear memory with rows.
    Pitched(Pitched),
}

impl<A> Resource<A> {
    /// Reads the structure of the header. `array` finds an array by its handle, and a mipmapped array if its second argument is true.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, that of an unknown format, and those of `array`.
    pub fn read(
        described: &ResourceDescriptor,
        limits: &Limits,
        array: impl FnOnce(u64, bool) -> Result<ArrayResource<A>, Code>,
    ) -> Result<Resource<A>, Code> {
        let ResourceDescriptor { kind, object, format, channels, width, height, pitch, flags, .. } =
            *described;
        if flags != 0 {
            return Err(INVALID);
        }
        match kind {
            resource::ARRAY => array(object, false).map(Resource::Array),
            resource::MIPMAPPED_ARRAY => array(object, true).map(Resource::Mipmapped),
            resource::LINEAR => {
                let texel = Texel::read(format, channels)?;
                Linear { address: object, texel, bytes: width }.check(limits).map(Resource::Linear)
            }
            resource::PITCH_2D => {
                let texel = Texel::read(format, channels)?;
                let pitched = Pitched { address: object, texel, width, height, pitch };
                pitched.check(limits).map(Resource::Pitched)
            }
            _ => Err(INVALID),
        }
    }

    /// The element.
    pub const fn texel(&self) -> Texel {
        match self {
            Resource::Array(of) | Resource::Mipmapped(of) => of.shape.texel,
            Resource::Linear(of) => of.texel,
            Resource::Pitched(of) => of.texel,
        }
    }

    /// The array, if it is one.
    pub const fn array(&self) -> Option<&ArrayResource<A>> {
        match self {
            Resource::Array(of) | Resource::Mipmapped(of) => Some(of),
            Resource::Linear(_) | Resource::Pitched(_) => None,
        }
    }

    /// The linear memory that a kernel may read: address and bytes.
    pub const fn memory(&self) -> Option<(u64, u64)> {
        match self {
            Resource::Array(_) | Resource::Mipmapped(_) => None,
            Resource::Linear(of) => Some((of.address, of.bytes)),
            Resource::Pitched(of) => Some((of.address, of.bytes())),
        }
    }
}

/// The part of an array that a texture shows, and the format in which it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The element.
    pub texel: Texel,
    /// The first level and the last.
    pub levels: [u32; 2],
    /// The first layer and the last, of cubes the first face and the last; both 0 without layers.
    pub layers: [u32; 2],
}

impl View {
    /// Checks the structure of the header against its resource.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`; `CUDA_ERROR_NOT_SUPPORTED` for formats of blocks.
    pub fn check<A>(view: &ViewDescriptor, of: &Resource<A>) -> Result<View, Code> {
        let array = of.array().ok_or(INVALID)?;
        let shape = &array.shape;
        let texel = Texel::read_view(view.format)?.unwrap_or(shape.texel);
        let same = (view.width, view.height, view.depth) == (shape.width, shape.height, shape.depth);
        let layers = if shape.flags & flags::LAYERED != 0 { shape.depth } else { 1 };
        let levels_fit = view.first_level <= view.last_level && view.last_level < array.levels;
        // Layers of cubes are their faces, of which a view has all.
        let faces = if shape.geometry == ArrayKind::Cubes { 6 } else { 1 };
        let whole = view.first_layer.is_multiple_of(faces)
            && (u64::from(view.last_layer) + 1).is_multiple_of(u64::from(faces));
        let layers_fit = whole && view.first_layer <= view.last_layer && u64::from(view.last_layer) < layers;
        if same && levels_fit && layers_fit && texel.bytes() == shape.texel.bytes() {
            let levels = [view.first_level, view.last_level];
            Ok(View { texel, levels, layers: [view.first_layer, view.last_layer] })
        } else {
            Err(INVALID)
        }
    }
}

/// A texture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Texture<A> {
    /// The memory.
    pub resource: Resource<A>,
    /// The way in which it is read.
    pub sampling: Sampling,
    /// The part that it shows; without one, all of it.
    pub view: Option<View>,
}

impl<A> Texture<A> {
    /// Checks the parts of a texture object against each other.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn check(resource: Resource<A>, sampling: Sampling, view: Option<View>) -> Result<Texture<A>, Code> {
        let texel = view.map_or(resource.texel(), |view| view.texel);
        let is_linear = matches!(resource, Resource::Linear(_));
        let is_mipmapped = matches!(resource, Resource::Mipmapped(_));
        // Integers have no mean, and the header requires normalised coordinates for levels.
        let filters = sampling.filter == FilterMode::Linear
            || is_mipmapped && sampling.mipmap_filter == FilterMode::Linear;
        let mixes_integers = !is_linear && filters && sampling.reads_integers(texel);
        let cube = resource.array().is_some_and(|of| of.shape.flags & flags::CUBEMAP != 0);
        let seamless = sampling.flags & texture_flags::SEAMLESS_CUBEMAP != 0;
        if mixes_integers || is_mipmapped && !sampling.is_normalised() || seamless && !cube {
            return Err(INVALID);
        }
        Ok(Texture { resource, sampling, view })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texel::Component;
    use sluice_cuda_abi::descriptors::Array3DDescriptor;

    const LIMITS: Limits = Limits::DATA_CENTRE;

    fn array(format: u32, depth: u64, flags: u32, levels: u32) -> Result<ArrayResource<u32>, Code> {
        let described = Array3DDescriptor { width: 8, height: 8, depth, format, channels: 4, flags };
        let shape = ImageShape::check(described, levels > 1, &LIMITS)?;
        Ok(ArrayResource { array: 7, shape, levels })
    }

    fn resource(format: u32, depth: u64, flags: u32, levels: u32) -> Resource<u32> {
        let of = array(format, depth, flags, levels).unwrap();
        if levels > 1 { Resource::Mipmapped(of) } else { Resource::Array(of) }
    }

    fn none(_: u64, _: bool) -> Result<ArrayResource<u32>, Code> {
        Err(Code::CUDA_ERROR_INVALID_HANDLE)
    }

    fn linear(object: u64, width: u64) -> ResourceDescriptor {
        ResourceDescriptor { kind: 2, object, format: 0x20, channels: 1, width, ..Default::default() }
    }

    // Promise: C83
    #[test]
    fn linear_memory_is_aligned_and_within_its_limits() {
        let read = |described| Resource::read(&described, &LIMITS, none).map(|resource| resource.memory());
        assert_eq!(read(linear(0x1000, 10)), Ok(Some((0x1000, 10))));
        assert_eq!(read(linear(0x1004, 64)), Err(INVALID));
        assert_eq!(read(linear(0, 64)), Err(INVALID));
        assert_eq!(read(linear(0x1000, 3)), Err(INVALID), "no whole element");
        assert_eq!(read(linear(0x1000, (1 << 30) + 4)), Err(INVALID));
        assert_eq!(read(ResourceDescriptor { flags: 1, ..linear(0x1000, 64) }), Err(INVALID));
        assert_eq!(read(ResourceDescriptor { kind: 4, ..linear(0x1000, 64) }), Err(INVALID));
        let pitched =
            |width, height, pitch| ResourceDescriptor { kind: 3, height, pitch, ..linear(0x1000, width) };
        assert_eq!(read(pitched(10, 3, 64)), Ok(Some((0x1000, 168))));
        for (width, height, pitch) in
            [(17, 3, 64), (10, 0, 64), (0, 3, 64), (10, 3, 60), (10, 65_001, 64), (1, 1, 1 << 21)]
        {
            assert_eq!(read(pitched(width, height, pitch)), Err(INVALID), "{width} {height} {pitch}");
        }
        let array = ResourceDescriptor { object: 9, ..Default::default() };
        assert_eq!(read(array), Err(Code::CUDA_ERROR_INVALID_HANDLE));
    }

    #[test]
    fn description_of_a_texture_is_returned_as_it_was_given() {
        let given = TextureDescriptor {
            address_modes: [0, 3, 2],
            filter: 1,
            flags: 0x33,
            max_anisotropy: 99,
            mipmap_filter: 1,
            level_bias: 0.5,
            min_level: 1.0,
            max_level: 2.0,
            border: [1.0, 2.0, 3.0, 4.0],
            reserved: [0; 12],
        };
        let sampling = Sampling::read(&given).unwrap();
        assert_eq!(sampling.descriptor(), given);
        assert_eq!(sampling.applied_anisotropy(), 16);
        for wrong in [
            TextureDescriptor { address_modes: [0, 0, 4], ..given },
            TextureDescriptor { filter: 2, ..given },
            TextureDescriptor { mipmap_filter: 2, ..given },
            TextureDescriptor { flags: 4, ..given },
        ] {
            assert_eq!(Sampling::read(&wrong), Err(INVALID));
        }
    }

    #[test]
    fn repeating_coordinates_clamp_where_they_are_not_normalised() {
        use AddressMode::{Border, Clamp, Mirror, Wrap};
        let sampling = Sampling { address_modes: [Wrap, Mirror, Border], ..Sampling::DEFAULT };
        assert_eq!(sampling.applied_modes(), [Clamp, Clamp, Border]);
        let normalised = Sampling { flags: texture_flags::NORMALISED_COORDINATES, ..sampling };
        assert_eq!(normalised.applied_modes(), [Wrap, Mirror, Border]);
    }

    // Promise: C83
    #[test]
    fn texture_whose_parts_contradict_each_other_is_refused() {
        let check = |resource, filter, flags| {
            let sampling = Sampling { filter, flags, ..Sampling::DEFAULT };
            Texture::check(resource, sampling, None).map(|_| ())
        };
        let (point, mean) = (FilterMode::Point, FilterMode::Linear);
        assert_eq!(check(resource(0x01, 0, 0, 1), mean, 0), Ok(()), "promoted to floats");
        assert_eq!(check(resource(0x01, 0, 0, 1), mean, 1), Err(INVALID), "integers have no mean");
        assert_eq!(check(resource(0x03, 0, 0, 1), mean, 0), Err(INVALID), "wide ones are not promoted");
        assert_eq!(check(resource(0x03, 0, 0, 1), point, 1), Ok(()));
        assert_eq!(check(resource(0x20, 0, 0, 3), point, 0), Err(INVALID), "levels");
        assert_eq!(check(resource(0x20, 0, 0, 3), point, 2), Ok(()));
        assert_eq!(check(resource(0x20, 0, 0, 1), point, 0x40), Err(INVALID), "no cube");
        assert_eq!(check(resource(0x20, 6, flags::CUBEMAP, 1), point, 0x40), Ok(()));
    }

    #[test]
    fn view_has_the_extents_of_its_array_and_elements_of_the_same_size() {
        let layered = resource(0x20, 5, flags::LAYERED, 3);
        let view = ViewDescriptor { width: 8, height: 8, depth: 5, ..Default::default() };
        let check = |view| View::check(&view, &layered);
        let part = ViewDescriptor { first_level: 1, last_level: 2, first_layer: 2, last_layer: 4, ..view };
        let shown = check(part).unwrap();
        assert_eq!((shown.levels, shown.layers), ([1, 2], [2, 4]));
        assert_eq!(check(ViewDescriptor { format: 0x0f, ..view }).unwrap().texel.component, Component::U32);
        for wrong in [
            ViewDescriptor { width: 4, ..view },
            ViewDescriptor { last_level: 3, ..view },
            ViewDescriptor { first_level: 1, ..view },
            ViewDescriptor { last_layer: 5, ..view },
            ViewDescriptor { first_layer: 1, ..view },
            ViewDescriptor { format: 0x03, ..view },
        ] {
            assert_eq!(check(wrong), Err(INVALID), "{wrong:?}");
        }
        let cubes = resource(0x20, 12, flags::LAYERED | flags::CUBEMAP, 1);
        let faces = |first_layer, last_layer| {
            let view = ViewDescriptor { depth: 12, first_layer, last_layer, ..view };
            View::check(&view, &cubes).map(|view| view.layers)
        };
        assert_eq!((faces(6, 11), faces(0, 4), faces(1, 5)), (Ok([6, 11]), Err(INVALID), Err(INVALID)));
        let blocks = ViewDescriptor { format: 0x19, ..view };
        assert_eq!(check(blocks), Err(Code::CUDA_ERROR_NOT_SUPPORTED));
        let memory = Resource::<u32>::Linear(Linear { address: 512, texel: shown.texel, bytes: 64 });
        assert_eq!(View::check(&view, &memory), Err(INVALID));
    }
}

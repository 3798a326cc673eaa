//! Texture references: variables of a module whose texture the host sets.

use sluice_cuda_abi::sys::CUresult as Code;

use crate::limits::Limits;
use crate::texel::{Component, Texel};
use crate::texture::{AddressMode, FilterMode, Linear, Pitched, Resource, Sampling, Texture, texture_flags};

const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;

/// `CU_TRSA_OVERRIDE_FORMAT`.
const OVERRIDE_FORMAT: u32 = 1;

/// The memory of a texture reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound<A> {
    /// An array, or a mipmapped array, with its handle.
    Array(u64, Resource<A>),
    /// Linear memory from an aligned address on.
    Linear { address: u64, bytes: u64, given: u64 },
    /// Linear memory with rows.
    Pitched(Pitched),
}

/// The state of a texture reference. Setters check their arguments; a state that contradicts itself shows at a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextureReference<A> {
    bound: Option<Bound<A>>,
    texel: Texel,
    sampling: Sampling,
}

impl<A: Clone> TextureReference<A> {
    /// A reference without memory.
    pub const NEW: TextureReference<A> = TextureReference {
        bound: None,
        texel: Texel { component: Component::F32, channels: 1 },
        sampling: Sampling::DEFAULT,
    };

    /// The texture that a launch uses; none without memory.
    #[must_use]
    pub fn texture(&self) -> Option<Texture<A>> {
        let resource = match self.bound.clone()? {
            Bound::Array(_, resource) => resource,
            Bound::Linear { address, bytes, .. } => {
                Resource::Linear(Linear { address, texel: self.texel, bytes })
            }
            Bound::Pitched(pitched) => Resource::Pitched(pitched),
        };
        Some(Texture { resource, sampling: self.sampling, view: None })
    }

    /// `cuTexRefSetArray` and `cuTexRefSetMipmappedArray`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for other flags than `CU_TRSA_OVERRIDE_FORMAT`.
    pub fn set_array(&mut self, handle: u64, resource: Resource<A>, flags: u32) -> Result<(), Code> {
        if flags != OVERRIDE_FORMAT {
            return Err(INVALID);
        }
        self.texel = resource.texel();
        self.bound = Some(Bound::Array(handle, resource));
        Ok(())
    }

    /// `cuTexRefSetAddress`: returns the bytes from an aligned address to the given one, which may differ only if `takes_offset`.
    /// Address 0 unbinds the reference.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn set_address(
        &mut self,
        given: u64,
        bytes: u64,
        takes_offset: bool,
        limits: &Limits,
    ) -> Result<u64, Code> {
        if given == 0 {
            self.bound = None;
            return Ok(0);
        }
        let offset = given % u64::from(limits.texture_alignment.max(1));
        let bytes = bytes.checked_add(offset).ok_or(INVALID)?;
        let linear = Linear { address: given - offset, texel: self.texel, bytes }.check(limits)?;
        if offset != 0 && !takes_offset {
            return Err(INVALID);
        }
        self.bound = Some(Bound::Linear { address: linear.address, bytes, given });
        Ok(offset)
    }

    /// `cuTexRefSetAddress2D`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn set_pitched(&mut self, pitched: Pitched, limits: &Limits) -> Result<(), Code> {
        self.bound = Some(Bound::Pitched(pitched.check(limits)?));
        self.texel = pitched.texel;
        Ok(())
    }

    /// `cuTexRefSetFormat`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, also after [`TextureReference::set_pitched`], which sets a format itself.
    pub fn set_format(&mut self, texel: Texel) -> Result<(), Code> {
        if matches!(self.bound, Some(Bound::Pitched(_))) {
            return Err(INVALID);
        }
        self.texel = texel;
        Ok(())
    }

    /// `cuTexRefSetAddressMode`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn set_address_mode(&mut self, dimension: i32, mode: AddressMode) -> Result<(), Code> {
        let dimension = usize::try_from(dimension).map_err(|_| INVALID)?;
        *self.sampling.address_modes.get_mut(dimension).ok_or(INVALID)? = mode;
        Ok(())
    }

    /// `cuTexRefGetAddressMode`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn address_mode(&self, dimension: i32) -> Result<AddressMode, Code> {
        let dimension = usize::try_from(dimension).map_err(|_| INVALID)?;
        self.sampling.address_modes.get(dimension).copied().ok_or(INVALID)
    }

    /// `cuTexRefSetFilterMode`.
    pub const fn set_filter(&mut self, filter: FilterMode) {
        self.sampling.filter = filter;
    }

    /// `cuTexRefSetMipmapFilterMode`.
    pub const fn set_mipmap_filter(&mut self, filter: FilterMode) {
        self.sampling.mipmap_filter = filter;
    }

    /// `cuTexRefSetMipmapLevelBias`.
    pub const fn set_level_bias(&mut self, bias: f32) {
        self.sampling.level_bias = bias;
    }

    /// `cuTexRefSetMipmapLevelClamp`.
    pub const fn set_level_clamp(&mut self, least: f32, greatest: f32) {
        self.sampling.min_level = least;
        self.sampling.max_level = greatest;
    }

    /// `cuTexRefSetMaxAnisotropy`.
    pub const fn set_max_anisotropy(&mut self, ratio: u32) {
        self.sampling.max_anisotropy = ratio;
    }

    /// `cuTexRefSetBorderColor`.
    pub const fn set_border(&mut self, border: [f32; 4]) {
        self.sampling.border = border;
    }

    /// `cuTexRefSetFlags`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const fn set_flags(&mut self, flags: u32) -> Result<(), Code> {
        if flags & !texture_flags::ALL != 0 {
            return Err(INVALID);
        }
        self.sampling.flags = flags;
        Ok(())
    }

    /// The format.
    pub const fn texel(&self) -> Texel {
        self.texel
    }

    /// The settings that getters return.
    pub const fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// `cuTexRefGetAddress`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the memory is not linear.
    pub const fn address(&self) -> Result<u64, Code> {
        match &self.bound {
            Some(Bound::Linear { given, .. }) => Ok(*given),
            Some(Bound::Pitched(pitched)) => Ok(pitched.address),
            _ => Err(INVALID),
        }
    }

    /// `cuTexRefGetArray`, and `cuTexRefGetMipmappedArray` if `is_mipmapped`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if no such array is bound.
    pub const fn array(&self, is_mipmapped: bool) -> Result<u64, Code> {
        match &self.bound {
            Some(Bound::Array(handle, resource))
                if matches!(resource, Resource::Mipmapped(_)) == is_mipmapped =>
            {
                Ok(*handle)
            }
            _ => Err(INVALID),
        }
    }

    /// Unbinds an array that ends. Returns true if it was bound.
    pub fn forget_array(&mut self, handle: u64) -> bool {
        let bound = matches!(&self.bound, Some(Bound::Array(of, _)) if *of == handle);
        if bound {
            self.bound = None;
        }
        bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::ImageShape;
    use crate::texture::ArrayResource;
    use sluice_cuda_abi::descriptors::Array3DDescriptor;

    const LIMITS: Limits = Limits::DATA_CENTRE;
    const BYTES: Texel = Texel { component: Component::U8, channels: 2 };

    fn array(levels: u32) -> Resource<u32> {
        let described =
            Array3DDescriptor { width: 8, height: 8, depth: 0, format: 0x10, channels: 4, flags: 0 };
        let shape = ImageShape::check(described, levels > 1, &LIMITS).unwrap();
        let of = ArrayResource { array: 3, shape, levels };
        if levels > 1 { Resource::Mipmapped(of) } else { Resource::Array(of) }
    }

    #[test]
    fn memory_that_is_bound_last_replaces_the_memory_before() {
        let mut reference = TextureReference::NEW;
        assert_eq!(reference.texture(), None);
        assert_eq!(reference.set_array(5, array(1), 0), Err(INVALID));
        reference.set_array(5, array(1), 1).unwrap();
        assert_eq!((reference.array(false), reference.array(true)), (Ok(5), Err(INVALID)));
        assert_eq!(reference.texel().component, Component::F16, "the array's format");
        reference.set_array(6, array(3), 1).unwrap();
        assert_eq!((reference.array(false), reference.array(true)), (Err(INVALID), Ok(6)));
        reference.set_format(BYTES).unwrap();
        assert_eq!(reference.set_address(0x1000, 64, false, &LIMITS), Ok(0));
        assert_eq!((reference.address(), reference.array(true)), (Ok(0x1000), Err(INVALID)));
        let texture = reference.texture().unwrap();
        assert_eq!(texture.resource, Resource::Linear(Linear { address: 0x1000, texel: BYTES, bytes: 64 }));
        assert_eq!(reference.set_address(0, 0, false, &LIMITS), Ok(0));
        assert_eq!((reference.texture(), reference.address()), (None, Err(INVALID)));
    }

    #[test]
    fn address_between_aligned_ones_needs_a_place_for_its_offset() {
        let mut reference = TextureReference::<u32>::NEW;
        assert_eq!(reference.set_address(0x1010, 64, false, &LIMITS), Err(INVALID));
        assert_eq!(reference.set_address(0x1010, 64, true, &LIMITS), Ok(0x10));
        assert_eq!(reference.texture().unwrap().resource.memory(), Some((0x1000, 0x50)));
        assert_eq!(reference.set_address(0x1010, u64::MAX, true, &LIMITS), Err(INVALID));
        assert_eq!(reference.address(), Ok(0x1010), "an error changes nothing");
    }

    #[test]
    fn format_cannot_follow_pitched_memory() {
        let mut reference = TextureReference::<u32>::NEW;
        let pitched = Pitched { address: 0x1000, texel: BYTES, width: 4, height: 4, pitch: 32 };
        reference.set_pitched(pitched, &LIMITS).unwrap();
        assert_eq!((reference.texel(), reference.address()), (BYTES, Ok(0x1000)));
        assert_eq!(reference.set_format(BYTES), Err(INVALID));
        assert_eq!(reference.set_pitched(Pitched { pitch: 33, ..pitched }, &LIMITS), Err(INVALID));
    }

    #[test]
    fn settings_reach_the_texture_of_a_launch() {
        let mut reference = TextureReference::NEW;
        reference.set_array(5, array(1), 1).unwrap();
        reference.set_address_mode(1, AddressMode::Border).unwrap();
        assert_eq!(reference.set_address_mode(3, AddressMode::Wrap), Err(INVALID));
        assert_eq!(reference.set_address_mode(-1, AddressMode::Wrap), Err(INVALID));
        reference.set_filter(FilterMode::Linear);
        reference.set_border([1.0, 2.0, 3.0, 4.0]);
        reference.set_flags(texture_flags::NORMALISED_COORDINATES).unwrap();
        assert_eq!(reference.set_flags(8), Err(INVALID));
        let sampling = reference.texture().unwrap().sampling;
        assert_eq!(sampling.address_modes, [AddressMode::Clamp, AddressMode::Border, AddressMode::Clamp]);
        assert_eq!((sampling.filter, sampling.border), (FilterMode::Linear, [1.0, 2.0, 3.0, 4.0]));
        assert!(sampling.is_normalised());
        assert!(!reference.forget_array(4) && reference.forget_array(5));
        assert_eq!(reference.texture(), None);
    }
}

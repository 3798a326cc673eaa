//! Texture references and surface references.

use std::ffi::c_char;

use sluice_cuda_abi::sys::CUresult as Code;

use super::{INVALID, INVALID_HANDLE, ImageState, Images, In, Out, Result, failed};
use crate::driver::ImageDriver;
use crate::reference::TextureReference;
use crate::shape::flags;
use crate::texel::Texel;
use crate::texture::{AddressMode, ArrayResource, FilterMode, Pitched, Resource, Texture};
use sluice_cuda_abi::descriptors::ArrayDescriptor;

/// Defines the C functions of texture and surface references, as [`array_functions!`](crate::array_functions) those of arrays.
#[macro_export]
macro_rules! reference_functions {
    ($define:ident, $images:expr) => {
        $define! {
            fn cuModuleGetTexRef(place: Out<u64>, module: u64, name: In<c_char>) {
                $images.module_get_tex_ref(place, module, name)
            }
            fn cuModuleGetSurfRef(place: Out<u64>, module: u64, name: In<c_char>) {
                $images.module_get_surf_ref(place, module, name)
            }
            fn cuParamSetTexRef(function: u64, unit: i32, reference: u64) {
                $images.param_set_tex_ref(function, unit, reference)
            }
            fn cuTexRefCreate(place: Out<u64>) { $images.tex_ref_create(place) }
            fn cuTexRefDestroy(reference: u64) { $images.tex_ref_destroy(reference) }
            fn cuTexRefSetArray(reference: u64, array: u64, flags: u32) {
                $images.tex_ref_set_array(reference, array, flags)
            }
            fn cuTexRefSetMipmappedArray(reference: u64, array: u64, flags: u32) {
                $images.tex_ref_set_mipmapped_array(reference, array, flags)
            }
            fn cuTexRefSetAddress_v2(offset: Out<usize>, reference: u64, address: u64, bytes: usize) {
                $images.tex_ref_set_address(offset, reference, address, bytes)
            }
            fn cuTexRefSetAddress2D_v2(reference: u64, array: In<c_void>, address: u64, pitch: usize) {
                $images.tex_ref_set_address_2d(reference, array.cast(), address, pitch)
            }
            fn cuTexRefSetAddress2D_v3(reference: u64, array: In<c_void>, address: u64, pitch: usize) {
                $images.tex_ref_set_address_2d(reference, array.cast(), address, pitch)
            }
            fn cuTexRefSetFormat(reference: u64, format: u32, channels: i32) {
                $images.tex_ref_set_format(reference, format, channels)
            }
            fn cuTexRefSetAddressMode(reference: u64, dimension: i32, mode: u32) {
                $images.tex_ref_set_address_mode(reference, dimension, mode)
            }
            fn cuTexRefSetFilterMode(reference: u64, filter: u32) {
                $images.tex_ref_set_filter_mode(reference, filter)
            }
            fn cuTexRefSetMipmapFilterMode(reference: u64, filter: u32) {
                $images.tex_ref_set_mipmap_filter_mode(reference, filter)
            }
            fn cuTexRefSetMipmapLevelBias(reference: u64, bias: f32) {
                $images.tex_ref_set_mipmap_level_bias(reference, bias)
            }
            fn cuTexRefSetMipmapLevelClamp(reference: u64, least: f32, greatest: f32) {
                $images.tex_ref_set_mipmap_level_clamp(reference, least, greatest)
            }
            fn cuTexRefSetMaxAnisotropy(reference: u64, ratio: u32) {
                $images.tex_ref_set_max_anisotropy(reference, ratio)
            }
            fn cuTexRefSetBorderColor(reference: u64, border: In<f32>) {
                $images.tex_ref_set_border_color(reference, border)
            }
            fn cuTexRefSetFlags(reference: u64, flags: u32) { $images.tex_ref_set_flags(reference, flags) }
            fn cuTexRefGetAddress_v2(place: Out<u64>, reference: u64) {
                $images.tex_ref_get_address(place, reference)
            }
            fn cuTexRefGetArray(place: Out<u64>, reference: u64) {
                $images.tex_ref_get_array(place, reference)
            }
            fn cuTexRefGetMipmappedArray(place: Out<u64>, reference: u64) {
                $images.tex_ref_get_mipmapped_array(place, reference)
            }
            fn cuTexRefGetAddressMode(place: Out<u32>, reference: u64, dimension: i32) {
                $images.tex_ref_get_address_mode(place, reference, dimension)
            }
            fn cuTexRefGetFilterMode(place: Out<u32>, reference: u64) {
                $images.tex_ref_get_filter_mode(place, reference)
            }
            fn cuTexRefGetFormat(format: Out<u32>, channels: Out<i32>, reference: u64) {
                $images.tex_ref_get_format(format, channels, reference)
            }
            fn cuTexRefGetMipmapFilterMode(place: Out<u32>, reference: u64) {
                $images.tex_ref_get_mipmap_filter_mode(place, reference)
            }
            fn cuTexRefGetMipmapLevelBias(place: Out<f32>, reference: u64) {
                $images.tex_ref_get_mipmap_level_bias(place, reference)
            }
            fn cuTexRefGetMipmapLevelClamp(least: Out<f32>, greatest: Out<f32>, reference: u64) {
                $images.tex_ref_get_mipmap_level_clamp(least, greatest, reference)
            }
            fn cuTexRefGetMaxAnisotropy(place: Out<i32>, reference: u64) {
                $images.tex_ref_get_max_anisotropy(place, reference)
            }
            fn cuTexRefGetBorderColor(place: Out<f32>, reference: u64) {
                $images.tex_ref_get_border_color(place, reference)
            }
            fn cuTexRefGetFlags(place: Out<u32>, reference: u64) {
                $images.tex_ref_get_flags(place, reference)
            }
            fn cuSurfRefSetArray(reference: u64, array: u64, flags: u32) {
                $images.surf_ref_set_array(reference, array, flags)
            }
            fn cuSurfRefGetArray(place: Out<u64>, reference: u64) {
                $images.surf_ref_get_array(place, reference)
            }
        }
    };
}

/// The functions for references that a library supplies.
pub trait ReferenceDriver: ImageDriver {
    /// Finds a texture reference of a module.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for other modules, `CUDA_ERROR_NOT_FOUND` for other names.
    fn texture_variable(&self, module: u64, name: &[u8]) -> Result<Self::Variable, Self>;

    /// Finds a surface reference of a module.
    ///
    /// # Errors
    /// The same.
    fn surface_variable(&self, module: u64, name: &[u8]) -> Result<Self::Variable, Self>;

    /// Sets the texture that later launches find in a texture reference; without one, an access fails.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    fn bind_texture(
        &self,
        variable: &Self::Variable,
        texture: Option<&Texture<Self::Array>>,
    ) -> Result<(), Self>;

    /// Sets the array that later launches find in a surface reference; without one, an access fails.
    ///
    /// # Errors
    /// The driver's code.
    fn bind_surface(
        &self,
        variable: &Self::Variable,
        array: Option<&ArrayResource<Self::Array>>,
    ) -> Result<(), Self>;

    /// Checks the handle of a function.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`.
    fn check_function(&self, function: u64) -> Result<(), Self>;
}

/// `CU_PARAM_TR_DEFAULT`.
const DEFAULT_UNIT: i32 = -1;

/// A texture reference.
pub(crate) struct TextureVariable<D: ImageDriver> {
    pub(crate) context: u64,
    pub(crate) state: TextureReference<D::Array>,
    /// The module, the name in it, and the library's variable; none for a reference that the program made, which no kernel can use.
    pub(crate) variable: Option<(u64, Vec<u8>, D::Variable)>,
}

impl<D: ImageDriver> TextureVariable<D> {
    pub(crate) fn is_in(&self, module: u64) -> bool {
        self.variable.as_ref().is_some_and(|(of, _, _)| *of == module)
    }
}

/// A surface reference.
pub(crate) struct SurfaceVariable<D: ImageDriver> {
    pub(crate) context: u64,
    pub(crate) module: u64,
    name: Vec<u8>,
    pub(crate) variable: D::Variable,
    pub(crate) bound: Option<(u64, ArrayResource<D::Array>)>,
}

impl<D: ReferenceDriver> Images<D> {
    /// `cuModuleGetTexRef`: the same reference for each call.
    pub fn module_get_tex_ref(&self, place: Out<u64, D>, module: u64, name: In<c_char, D>) -> Result<(), D> {
        if module == 0 {
            return Err(failed::<D>(INVALID_HANDLE));
        }
        place.required()?;
        let text = name.text();
        let name = text.get()?;
        let context = self.driver.context()?;
        let variable = self.driver.texture_variable(module, name)?;
        let mut state = self.state();
        let known = state.texture_references.iter().find_map(|(handle, of)| {
            let (in_module, named, _) = of.variable.as_ref()?;
            (*in_module == module && named == name).then_some(handle)
        });
        let made = || {
            let variable = Some((module, name.to_vec(), variable));
            let made = TextureVariable { context, state: TextureReference::NEW, variable };
            state.texture_references.insert(made)
        };
        place.set(known.or_else(made).ok_or_else(|| failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))?)
    }

    /// `cuModuleGetSurfRef`: the same reference for each call.
    pub fn module_get_surf_ref(&self, place: Out<u64, D>, module: u64, name: In<c_char, D>) -> Result<(), D> {
        if module == 0 {
            return Err(failed::<D>(INVALID_HANDLE));
        }
        place.required()?;
        let text = name.text();
        let name = text.get()?;
        let context = self.driver.context()?;
        let variable = self.driver.surface_variable(module, name)?;
        let mut state = self.state();
        let mut references = state.surface_references.iter();
        let known =
            references.find(|(_, of)| of.module == module && of.name == name).map(|(handle, _)| handle);
        drop(references);
        let made = || {
            let name = name.to_vec();
            let made = SurfaceVariable { context, module, name, variable, bound: None };
            state.surface_references.insert(made)
        };
        place.set(known.or_else(made).ok_or_else(|| failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))?)
    }

    /// `cuParamSetTexRef`: the reference of a module is part of it, so the call only checks its arguments.
    pub fn param_set_tex_ref(&self, function: u64, unit: i32, reference: u64) -> Result<(), D> {
        self.driver.context()?;
        self.driver.check_function(function)?;
        let state = self.state();
        let found = state.texture_references.get(reference).filter(|of| of.variable.is_some());
        if unit == DEFAULT_UNIT && found.is_some() { Ok(()) } else { Err(failed::<D>(INVALID)) }
    }

    /// `cuTexRefCreate`.
    pub fn tex_ref_create(&self, place: Out<u64, D>) -> Result<(), D> {
        let context = self.driver.context()?;
        place.required()?;
        let made = TextureVariable { context, state: TextureReference::NEW, variable: None };
        let handle = self.state().texture_references.insert(made);
        place.set(handle.ok_or_else(|| failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))?)
    }

    /// Returns the context of a call about a reference that `exists`. The driver reports a wrong handle before a missing context, and both
    /// before it reads other arguments.
    fn context_for(&self, exists: impl FnOnce(&ImageState<D>) -> bool) -> Result<u64, D> {
        if exists(&self.state()) { self.driver.context() } else { Err(failed::<D>(INVALID_HANDLE)) }
    }

    /// The same for a texture reference.
    fn check_reference(&self, reference: u64) -> Result<u64, D> {
        self.context_for(|state| state.texture_references.get(reference).is_some())
    }

    /// Looks a texture reference up for a call with no other arguments to read. Errors are those of [`Self::check_reference`].
    fn with_reference<T>(
        &self,
        reference: u64,
        action: impl FnOnce(&mut TextureVariable<D>) -> std::result::Result<T, Code>,
    ) -> Result<T, D> {
        // Before the lock, since it is the library's code.
        let context = self.driver.context();
        let mut state = self.state();
        let found = state.texture_references.get_mut(reference);
        let found = found.ok_or_else(|| failed::<D>(INVALID_HANDLE))?;
        context.and_then(|_| action(found).map_err(failed::<D>))
    }

    /// `cuTexRefDestroy`: only for a reference that the program made.
    pub fn tex_ref_destroy(&self, reference: u64) -> Result<(), D> {
        self.check_reference(reference)?;
        let mut state = self.state();
        let invalid = || failed::<D>(INVALID);
        let found = state.texture_references.get(reference).filter(|of| of.variable.is_none());
        found.ok_or_else(invalid)?;
        state.texture_references.remove(reference).map(|_| ()).ok_or_else(invalid)
    }

    /// Changes the state of a reference, and then the texture of its variable. An error changes nothing.
    fn change<T>(
        &self,
        reference: u64,
        action: impl FnOnce(&mut TextureReference<D::Array>) -> std::result::Result<T, Code>,
    ) -> Result<T, D> {
        let (answer, before, changed) = {
            let mut state = self.state();
            let found = state.texture_references.get_mut(reference);
            let found = found.ok_or_else(|| failed::<D>(INVALID_HANDLE))?;
            let before = found.state.clone();
            let answer = action(&mut found.state).map_err(failed::<D>)?;
            let variable = found.variable.as_ref().map(|(_, _, variable)| variable.clone());
            (answer, before, variable.map(|variable| (variable, found.state.texture())))
        };
        if let Some((variable, texture)) = changed
            && let Err(error) = self.driver.bind_texture(&variable, texture.as_ref())
        {
            if let Some(found) = self.state().texture_references.get_mut(reference) {
                found.state = before;
            }
            return Err(error);
        }
        Ok(answer)
    }

    /// Changes a setting that names no memory. The memory may have ended since it was bound; then the variable has no texture, until
    /// the program binds memory again.
    fn set(
        &self,
        reference: u64,
        action: impl FnOnce(&mut TextureReference<D::Array>) -> std::result::Result<(), Code>,
    ) -> Result<(), D> {
        let changed = self.with_reference(reference, |found| {
            action(&mut found.state)?;
            let variable = found.variable.as_ref().map(|(_, _, variable)| variable.clone());
            Ok(variable.map(|variable| (variable, found.state.texture())))
        })?;
        match changed {
            Some((variable, Some(texture))) => {
                let bound = self.driver.bind_texture(&variable, Some(&texture));
                bound.or_else(|_| self.driver.bind_texture(&variable, None))
            }
            _ => Ok(()),
        }
    }

    fn read<T>(
        &self,
        reference: u64,
        action: impl FnOnce(&TextureReference<D::Array>) -> std::result::Result<T, Code>,
    ) -> Result<T, D> {
        self.with_reference(reference, |found| action(&found.state))
    }

    /// `cuTexRefSetArray`.
    pub fn tex_ref_set_array(&self, reference: u64, array: u64, flags: u32) -> Result<(), D> {
        let context = self.check_reference(reference)?;
        let of = self.array_for(context, array, false).map_err(failed::<D>)?;
        self.change(reference, |state| state.set_array(array, Resource::Array(of), flags))
    }

    /// `cuTexRefSetMipmappedArray`.
    pub fn tex_ref_set_mipmapped_array(&self, reference: u64, array: u64, flags: u32) -> Result<(), D> {
        let context = self.check_reference(reference)?;
        let of = self.array_for(context, array, true).map_err(failed::<D>)?;
        self.change(reference, |state| state.set_array(array, Resource::Mipmapped(of), flags))
    }

    /// `cuTexRefSetAddress_v2`.
    pub fn tex_ref_set_address(
        &self,
        offset: Out<usize, D>,
        reference: u64,
        address: u64,
        bytes: usize,
    ) -> Result<(), D> {
        self.check_reference(reference)?;
        let limits = self.driver.limits()?;
        let takes_offset = offset.is_given();
        let set = |state: &mut TextureReference<D::Array>| {
            state.set_address(address, bytes as u64, takes_offset, &limits)
        };
        let found = usize::try_from(self.change(reference, set)?).map_err(|_| failed::<D>(INVALID))?;
        offset.set_if_given(found);
        Ok(())
    }

    /// `cuTexRefSetAddress2D_v2` and `_v3`.
    pub fn tex_ref_set_address_2d(
        &self,
        reference: u64,
        array: In<ArrayDescriptor, D>,
        address: u64,
        pitch: usize,
    ) -> Result<(), D> {
        self.check_reference(reference)?;
        let ArrayDescriptor { width, height, format, channels } = array.get()?;
        let limits = self.driver.limits()?;
        let texel = Texel::read(format, channels).map_err(failed::<D>)?;
        let pitched = Pitched { address, texel, width, height, pitch: pitch as u64 };
        self.change(reference, |state| state.set_pitched(pitched, &limits))
    }

    /// `cuTexRefSetFormat`.
    pub fn tex_ref_set_format(&self, reference: u64, format: u32, channels: i32) -> Result<(), D> {
        self.check_reference(reference)?;
        let channels = u32::try_from(channels).map_err(|_| failed::<D>(INVALID))?;
        let texel = Texel::read(format, channels).map_err(failed::<D>)?;
        self.set(reference, |state| state.set_format(texel))
    }

    /// `cuTexRefSetAddressMode`.
    pub fn tex_ref_set_address_mode(&self, reference: u64, dimension: i32, mode: u32) -> Result<(), D> {
        self.set(reference, |state| state.set_address_mode(dimension, AddressMode::read(mode)?))
    }

    /// `cuTexRefSetFilterMode`.
    pub fn tex_ref_set_filter_mode(&self, reference: u64, filter: u32) -> Result<(), D> {
        self.set(reference, |state| FilterMode::read(filter).map(|filter| state.set_filter(filter)))
    }

    /// `cuTexRefSetMipmapFilterMode`.
    pub fn tex_ref_set_mipmap_filter_mode(&self, reference: u64, filter: u32) -> Result<(), D> {
        self.set(reference, |state| FilterMode::read(filter).map(|filter| state.set_mipmap_filter(filter)))
    }

    /// `cuTexRefSetMipmapLevelBias`.
    pub fn tex_ref_set_mipmap_level_bias(&self, reference: u64, bias: f32) -> Result<(), D> {
        self.set(reference, |state| {
            state.set_level_bias(bias);
            Ok(())
        })
    }

    /// `cuTexRefSetMipmapLevelClamp`.
    pub fn tex_ref_set_mipmap_level_clamp(&self, reference: u64, least: f32, greatest: f32) -> Result<(), D> {
        self.set(reference, |state| {
            state.set_level_clamp(least, greatest);
            Ok(())
        })
    }

    /// `cuTexRefSetMaxAnisotropy`.
    pub fn tex_ref_set_max_anisotropy(&self, reference: u64, ratio: u32) -> Result<(), D> {
        self.set(reference, |state| {
            state.set_max_anisotropy(ratio);
            Ok(())
        })
    }

    /// `cuTexRefSetBorderColor`.
    pub fn tex_ref_set_border_color(&self, reference: u64, border: In<f32, D>) -> Result<(), D> {
        self.check_reference(reference)?;
        let border = border.array::<4>(4_u32)?;
        self.set(reference, |state| {
            state.set_border(border);
            Ok(())
        })
    }

    /// `cuTexRefSetFlags`.
    pub fn tex_ref_set_flags(&self, reference: u64, flags: u32) -> Result<(), D> {
        self.set(reference, |state| state.set_flags(flags))
    }

    /// `cuTexRefGetAddress_v2`.
    pub fn tex_ref_get_address(&self, place: Out<u64, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, TextureReference::address)?)
    }

    /// `cuTexRefGetArray`.
    pub fn tex_ref_get_array(&self, place: Out<u64, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| state.array(false))?)
    }

    /// `cuTexRefGetMipmappedArray`.
    pub fn tex_ref_get_mipmapped_array(&self, place: Out<u64, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| state.array(true))?)
    }

    /// `cuTexRefGetAddressMode`.
    pub fn tex_ref_get_address_mode(
        &self,
        place: Out<u32, D>,
        reference: u64,
        dimension: i32,
    ) -> Result<(), D> {
        place.set(self.read(reference, |state| state.address_mode(dimension))?.number())
    }

    /// `cuTexRefGetFilterMode`.
    pub fn tex_ref_get_filter_mode(&self, place: Out<u32, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| Ok(state.sampling().filter.number()))?)
    }

    /// `cuTexRefGetFormat`: either place may be null.
    pub fn tex_ref_get_format(
        &self,
        format: Out<u32, D>,
        channels: Out<i32, D>,
        reference: u64,
    ) -> Result<(), D> {
        let texel = self.read(reference, |state| Ok(state.texel()))?;
        format.set_if_given(texel.format());
        channels.set_if_given(i32::try_from(texel.channels).map_err(|_| failed::<D>(INVALID))?);
        Ok(())
    }

    /// `cuTexRefGetMipmapFilterMode`.
    pub fn tex_ref_get_mipmap_filter_mode(&self, place: Out<u32, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| Ok(state.sampling().mipmap_filter.number()))?)
    }

    /// `cuTexRefGetMipmapLevelBias`.
    pub fn tex_ref_get_mipmap_level_bias(&self, place: Out<f32, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| Ok(state.sampling().level_bias))?)
    }

    /// `cuTexRefGetMipmapLevelClamp`.
    pub fn tex_ref_get_mipmap_level_clamp(
        &self,
        least: Out<f32, D>,
        greatest: Out<f32, D>,
        reference: u64,
    ) -> Result<(), D> {
        let sampling = self.read(reference, |state| Ok(*state.sampling()))?;
        let (least, greatest) = (least.required()?, greatest.required()?);
        least.set(sampling.min_level)?;
        greatest.set(sampling.max_level)
    }

    /// `cuTexRefGetMaxAnisotropy`.
    pub fn tex_ref_get_max_anisotropy(&self, place: Out<i32, D>, reference: u64) -> Result<(), D> {
        let ratio = self.read(reference, |state| Ok(state.sampling().max_anisotropy))?;
        place.required()?.set(i32::try_from(ratio).unwrap_or(i32::MAX))
    }

    /// `cuTexRefGetBorderColor`.
    pub fn tex_ref_get_border_color(&self, place: Out<f32, D>, reference: u64) -> Result<(), D> {
        let border = self.read(reference, |state| Ok(state.sampling().border))?;
        place.required()?.cast().set(border)
    }

    /// `cuTexRefGetFlags`.
    pub fn tex_ref_get_flags(&self, place: Out<u32, D>, reference: u64) -> Result<(), D> {
        place.set(self.read(reference, |state| Ok(state.sampling().flags))?)
    }

    /// `cuSurfRefSetArray`.
    pub fn surf_ref_set_array(&self, reference: u64, array: u64, set_flags: u32) -> Result<(), D> {
        let context = self.context_for(|state| state.surface_references.get(reference).is_some())?;
        let invalid = || failed::<D>(INVALID);
        let of = self.array_for(context, array, false).map_err(failed::<D>)?;
        if set_flags != 0 || of.shape.flags & flags::SURFACE == 0 {
            return Err(invalid());
        }
        let variable = {
            let mut state = self.state();
            let found = state.surface_references.get_mut(reference).ok_or_else(invalid)?;
            found.bound = Some((array, of.clone()));
            found.variable.clone()
        };
        self.driver.bind_surface(&variable, Some(&of))
    }

    /// `cuSurfRefGetArray`.
    pub fn surf_ref_get_array(&self, place: Out<u64, D>, reference: u64) -> Result<(), D> {
        self.context_for(|state| state.surface_references.get(reference).is_some())?;
        place.required()?;
        let state = self.state();
        let found = state.surface_references.get(reference).and_then(|of| of.bound.as_ref());
        place.set(found.ok_or_else(|| failed::<D>(INVALID))?.0)
    }
}

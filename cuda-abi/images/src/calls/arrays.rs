//! Arrays and mipmapped arrays.

use std::ffi::c_void;

use sluice_cuda_abi::sys::CUresult as Code;

use super::{INVALID, ImageState, Images, In, Out, ReferenceDriver, Result, failed};
use crate::driver::ImageDriver;
use crate::shape::ImageShape;
use crate::texture::ArrayResource;
use sluice_cuda_abi::descriptors::{Array3DDescriptor, ArrayDescriptor};

/// Defines the C functions of arrays that name no stream: `array_functions!(define, IMAGES, GRAPHS)` calls the library's macro `define`
/// with all of them, as `fn name(argument: type, …) { body }`. A body forwards its call to `IMAGES`, the library's [`Images`]; `GRAPHS` has
/// the captures, which may forbid it. The types `In` and `Out` are those of the library.
#[macro_export]
macro_rules! array_functions {
    ($define:ident, $images:expr, $graphs:expr) => {
        $define! {
            fn cuArrayCreate_v2(place: Out<u64>, array: In<c_void>) {
                $images.array_create(place, array.cast(), || $graphs.potentially_unsafe())
            }
            fn cuArray3DCreate_v2(place: Out<u64>, array: In<c_void>) {
                $images.array_3d_create(place, array.cast(), || $graphs.potentially_unsafe())
            }
            fn cuArrayGetDescriptor_v2(place: Out<c_void>, array: u64) {
                $images.array_get_descriptor(place.cast(), array)
            }
            fn cuArray3DGetDescriptor_v2(place: Out<c_void>, array: u64) {
                $images.array_3d_get_descriptor(place.cast(), array)
            }
            fn cuArrayGetSparseProperties(place: Out<c_void>, array: u64) {
                $images.array_get_deferred(place, array)
            }
            fn cuMipmappedArrayGetSparseProperties(place: Out<c_void>, array: u64) {
                $images.mipmapped_array_get_deferred(place, array)
            }
            fn cuArrayGetMemoryRequirements(place: Out<c_void>, array: u64, _device: i32) {
                $images.array_get_deferred(place, array)
            }
            fn cuMipmappedArrayGetMemoryRequirements(place: Out<c_void>, array: u64, _device: i32) {
                $images.mipmapped_array_get_deferred(place, array)
            }
            fn cuArrayGetPlane(place: Out<u64>, array: u64, plane: u32) {
                $images.array_get_plane(place, array, plane)
            }
            fn cuArrayDestroy(array: u64) { $images.array_destroy(array, || $graphs.potentially_unsafe()) }
            fn cuMipmappedArrayCreate(place: Out<u64>, array: In<c_void>, levels: u32) {
                $images.mipmapped_array_create(place, array.cast(), levels, || $graphs.potentially_unsafe())
            }
            fn cuMipmappedArrayGetLevel(place: Out<u64>, array: u64, level: u32) {
                $images.mipmapped_array_get_level(place, array, level)
            }
            fn cuMipmappedArrayDestroy(array: u64) {
                $images.mipmapped_array_destroy(array, || $graphs.potentially_unsafe())
            }
        }
    };
}

/// The functions for arrays that a library supplies.
pub trait ArrayDriver: ImageDriver {
    /// Makes the storage of an array, or if `levels` is given, of a mipmapped array with so many levels. Its contents are not defined.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, or another code of the driver.
    fn create_array(&self, shape: &ImageShape, levels: Option<u32>) -> Result<Self::Array, Self>;

    /// Returns one level of a mipmapped array. It is called once for each level.
    ///
    /// # Errors
    /// The driver's code.
    fn level(&self, of: &ArrayResource<Self::Array>, level: u32) -> Result<Self::Array, Self>;

    /// Ends an array or a mipmapped array with its levels. Work that uses it and was submitted before still completes. A texture or
    /// surface over it must not reach the memory of a later array.
    ///
    /// # Errors
    /// The driver's code; the handle is gone in any case.
    fn destroy_array(&self, array: Self::Array, is_mipmapped: bool) -> Result<(), Self>;
}

/// An array.
pub(crate) struct Single<D: ImageDriver> {
    pub(crate) context: u64,
    pub(crate) of: ArrayResource<D::Array>,
    /// False for a level, which ends with its mipmapped array.
    owns: bool,
}

/// A mipmapped array.
pub(crate) struct Mipmapped<D: ImageDriver> {
    pub(crate) context: u64,
    pub(crate) of: ArrayResource<D::Array>,
    /// The arrays of levels that the program has asked for.
    handles: Vec<Option<u64>>,
}

/// References whose memory has ended.
struct Unbound<D: ImageDriver> {
    textures: Vec<D::Variable>,
    surfaces: Vec<D::Variable>,
}

impl<D: ImageDriver> ImageState<D> {
    /// Takes arrays out of the references that are bound to them.
    fn unbind(&mut self, handles: &[u64]) -> Unbound<D> {
        let mut unbound = Unbound { textures: Vec::new(), surfaces: Vec::new() };
        for reference in self.texture_references.values_mut() {
            if handles.iter().any(|handle| reference.state.forget_array(*handle)) {
                unbound.textures.extend(reference.variable.as_ref().map(|(_, _, variable)| variable.clone()));
            }
        }
        for reference in self.surface_references.values_mut() {
            if reference.bound.as_ref().is_some_and(|(handle, _)| handles.contains(handle)) {
                reference.bound = None;
                unbound.surfaces.push(reference.variable.clone());
            }
        }
        unbound
    }
}

/// `may_allocate` checks that no capture of a stream forbids the calling thread to take or give back memory.
impl<D: ArrayDriver + ReferenceDriver> Images<D> {
    fn make_array<T: Copy + Into<Array3DDescriptor>>(
        &self,
        place: Out<u64, D>,
        array: In<T, D>,
        may_allocate: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        let context = self.driver.context()?;
        let array = array.get()?.into();
        place.required()?;
        may_allocate()?;
        let shape = ImageShape::check(array, false, &self.driver.limits()?).map_err(failed::<D>)?;
        let made = self.driver.create_array(&shape, None)?;
        let of = ArrayResource { array: made.clone(), shape, levels: 1 };
        let handle = self.state().arrays.insert(Single { context, of, owns: true });
        match handle {
            Some(handle) => place.set(handle),
            None => {
                self.driver.destroy_array(made, false)?;
                Err(failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))
            }
        }
    }

    /// `cuArrayCreate_v2`.
    pub fn array_create(
        &self,
        place: Out<u64, D>,
        array: In<ArrayDescriptor, D>,
        may_allocate: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        self.make_array(place, array, may_allocate)
    }

    /// `cuArray3DCreate_v2`.
    pub fn array_3d_create(
        &self,
        place: Out<u64, D>,
        array: In<Array3DDescriptor, D>,
        may_allocate: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        self.make_array(place, array, may_allocate)
    }

    /// `cuArrayGetDescriptor_v2`.
    pub fn array_get_descriptor(&self, place: Out<ArrayDescriptor, D>, array: u64) -> Result<(), D> {
        let found = self.array(array)?;
        self.driver.context()?;
        place.set(found.shape.descriptor().into())
    }

    /// `cuArray3DGetDescriptor_v2`.
    pub fn array_3d_get_descriptor(&self, place: Out<Array3DDescriptor, D>, array: u64) -> Result<(), D> {
        let found = self.array(array)?;
        self.driver.context()?;
        place.set(found.shape.descriptor())
    }

    /// `cuArrayGetSparseProperties` and `cuArrayGetMemoryRequirements`: no array is sparse, or mapped later.
    pub fn array_get_deferred(&self, place: Out<c_void, D>, array: u64) -> Result<(), D> {
        place.required()?;
        self.driver.context()?;
        self.array(array)?;
        Err(failed::<D>(INVALID))
    }

    /// `cuMipmappedArrayGetSparseProperties` and `cuMipmappedArrayGetMemoryRequirements`.
    pub fn mipmapped_array_get_deferred(&self, place: Out<c_void, D>, array: u64) -> Result<(), D> {
        place.required()?;
        self.driver.context()?;
        self.mipmapped_array(array)?;
        Err(failed::<D>(INVALID))
    }

    /// `cuArrayGetPlane`: no array has several planes.
    pub fn array_get_plane(&self, place: Out<u64, D>, array: u64, _plane: u32) -> Result<(), D> {
        self.array(array)?;
        self.driver.context()?;
        place.required()?;
        Err(failed::<D>(INVALID))
    }

    fn mipmapped_array(&self, handle: u64) -> Result<ArrayResource<D::Array>, D> {
        let found = self.state().mipmapped.get(handle).map(|array| array.of.clone());
        found.ok_or_else(|| failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE))
    }

    /// Unbinds all references, also behind one that the driver refuses, and returns the first failure.
    fn unbind_all(&self, unbound: Unbound<D>) -> Result<(), D> {
        let textures = unbound.textures.iter().map(|variable| self.driver.bind_texture(variable, None));
        let surfaces = unbound.surfaces.iter().map(|variable| self.driver.bind_surface(variable, None));
        let mut first = Ok(());
        for unbound in textures.chain(surfaces) {
            first = first.and(unbound);
        }
        first
    }

    /// `cuArrayDestroy`. A level of a mipmapped array cannot be destroyed.
    pub fn array_destroy(&self, handle: u64, may_allocate: impl FnOnce() -> Result<(), D>) -> Result<(), D> {
        self.array(handle)?;
        may_allocate()?;
        self.driver.context()?;
        let (ended, unbound) = {
            let mut state = self.state();
            let invalid = || failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE);
            state.arrays.get(handle).filter(|array| array.owns).ok_or_else(invalid)?;
            let ended = state.arrays.remove(handle).ok_or_else(invalid)?;
            (ended, state.unbind(&[handle]))
        };
        // Its memory ends in any case: the program has no other way to it.
        let unbound = self.unbind_all(unbound);
        unbound.and(self.driver.destroy_array(ended.of.array, false))
    }

    /// `cuMipmappedArrayCreate`.
    pub fn mipmapped_array_create(
        &self,
        place: Out<u64, D>,
        array: In<Array3DDescriptor, D>,
        levels: u32,
        may_allocate: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        let context = self.driver.context()?;
        place.required()?;
        let array = array.get()?;
        may_allocate()?;
        let shape = ImageShape::check(array, true, &self.driver.limits()?).map_err(failed::<D>)?;
        let levels = shape.levels(levels);
        let made = self.driver.create_array(&shape, Some(levels))?;
        let handles = vec![None; levels as usize];
        let of = ArrayResource { array: made.clone(), shape, levels };
        let handle = self.state().mipmapped.insert(Mipmapped { context, of, handles });
        match handle {
            Some(handle) => place.set(handle),
            None => {
                self.driver.destroy_array(made, true)?;
                Err(failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))
            }
        }
    }

    /// `cuMipmappedArrayGetLevel`: the same array for each call.
    pub fn mipmapped_array_get_level(&self, place: Out<u64, D>, handle: u64, level: u32) -> Result<(), D> {
        self.mipmapped_array(handle)?;
        self.driver.context()?;
        place.required()?;
        let known = {
            let state = self.state();
            let invalid = || failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE);
            let array = state.mipmapped.get(handle).ok_or_else(invalid)?;
            let known = array.handles.get(level as usize).ok_or_else(|| failed::<D>(INVALID))?;
            known.ok_or_else(|| array.of.clone())
        };
        let of = match known {
            Ok(known) => return place.set(known),
            Err(of) => of,
        };
        let shape = of.shape.level(level);
        let made = ArrayResource { array: self.driver.level(&of, level)?, shape, levels: 1 };
        let mut state = self.state();
        let ImageState { arrays, mipmapped, .. } = &mut *state;
        let array = mipmapped.get_mut(handle).ok_or_else(|| failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE))?;
        let known = array.handles.get_mut(level as usize).ok_or_else(|| failed::<D>(INVALID))?;
        // Another thread may have been faster.
        if known.is_none() {
            *known = arrays.insert(Single { context: array.context, of: made, owns: false });
        }
        place.set(known.ok_or_else(|| failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY))?)
    }

    /// `cuMipmappedArrayDestroy`.
    pub fn mipmapped_array_destroy(
        &self,
        handle: u64,
        may_allocate: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        self.mipmapped_array(handle)?;
        may_allocate()?;
        self.driver.context()?;
        let (ended, unbound) = {
            let mut state = self.state();
            let invalid = || failed::<D>(Code::CUDA_ERROR_INVALID_HANDLE);
            let ended = state.mipmapped.remove(handle).ok_or_else(invalid)?;
            let mut handles: Vec<u64> = ended.handles.iter().flatten().copied().collect();
            handles.iter().for_each(|level| drop(state.arrays.remove(*level)));
            handles.push(handle);
            (ended, state.unbind(&handles))
        };
        // Its memory ends in any case: the program has no other way to it.
        let unbound = self.unbind_all(unbound);
        unbound.and(self.driver.destroy_array(ended.of.array, true))
    }
}

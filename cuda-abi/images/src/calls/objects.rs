//! Texture objects and surface objects.

use super::{INVALID, Images, In, Out, Result, failed};
use crate::driver::ImageDriver;
use crate::texture::{ArrayResource, Resource, Sampling, Texture, View};
use sluice_cuda_abi::descriptors::{ResourceDescriptor, TextureDescriptor, ViewDescriptor};

/// Defines the C functions of texture and surface objects, as [`array_functions!`](crate::array_functions) those of arrays.
#[macro_export]
macro_rules! object_functions {
    ($define:ident, $images:expr) => {
        $define! {
            fn cuTexObjectCreate(place: Out<u64>, resource: In<c_void>, texture: In<c_void>, view: In<c_void>) {
                $images.tex_object_create(place, resource.cast(), texture.cast(), view.cast())
            }
            fn cuTexObjectDestroy(object: u64) { $images.tex_object_destroy(object) }
            fn cuTexObjectGetResourceDesc(place: Out<c_void>, object: u64) {
                $images.tex_object_get_resource_desc(place.cast(), object)
            }
            fn cuTexObjectGetTextureDesc(place: Out<c_void>, object: u64) {
                $images.tex_object_get_texture_desc(place.cast(), object)
            }
            fn cuTexObjectGetResourceViewDesc(place: Out<c_void>, object: u64) {
                $images.tex_object_get_resource_view_desc(place.cast(), object)
            }
            fn cuSurfObjectCreate(place: Out<u64>, resource: In<c_void>) {
                $images.surf_object_create(place, resource.cast())
            }
            fn cuSurfObjectDestroy(object: u64) { $images.surf_object_destroy(object) }
            fn cuSurfObjectGetResourceDesc(place: Out<c_void>, object: u64) {
                $images.surf_object_get_resource_desc(place.cast(), object)
            }
        }
    };
}

/// The functions for texture and surface objects that a library supplies.
pub trait ObjectDriver: ImageDriver {
    /// Makes a texture object, and returns the number that kernels read.
    ///
    /// # Errors
    /// The driver's code; `CUDA_ERROR_INVALID_VALUE` for linear memory that is not the program's.
    fn create_texture(&self, texture: &Texture<Self::Array>) -> Result<u64, Self>;

    /// Ends a texture object.
    ///
    /// # Errors
    /// The driver's code.
    fn destroy_texture(&self, object: u64) -> Result<(), Self>;

    /// Makes a surface object, and returns the number that kernels read.
    ///
    /// # Errors
    /// The driver's code.
    fn create_surface(&self, array: &ArrayResource<Self::Array>) -> Result<u64, Self>;

    /// Ends a surface object.
    ///
    /// # Errors
    /// The driver's code.
    fn destroy_surface(&self, object: u64) -> Result<(), Self>;
}

/// The descriptions of a texture object, as the program gave them.
#[derive(Clone, Copy)]
pub(crate) struct TextureEntry {
    resource: ResourceDescriptor,
    texture: TextureDescriptor,
    view: Option<ViewDescriptor>,
}

/// The description of a surface object.
#[derive(Clone, Copy)]
pub(crate) struct SurfaceEntry {
    resource: ResourceDescriptor,
}

impl<D: ImageDriver> Images<D> {
    /// Finds the array of a texture or surface in the current context.
    pub(crate) fn array_for(
        &self,
        context: u64,
        handle: u64,
        is_mipmapped: bool,
    ) -> std::result::Result<ArrayResource<D::Array>, sluice_cuda_abi::sys::CUresult> {
        let state = self.state();
        let found = if is_mipmapped {
            state.mipmapped.get(handle).map(|array| (array.context, array.of.clone()))
        } else {
            state.arrays.get(handle).map(|array| (array.context, array.of.clone()))
        };
        found.filter(|(of, _)| *of == context).map(|(_, array)| array).ok_or(INVALID)
    }

    fn resource(&self, context: u64, resource: &ResourceDescriptor) -> Result<Resource<D::Array>, D> {
        let limits = self.driver.limits()?;
        let array = |handle, is_mipmapped| self.array_for(context, handle, is_mipmapped);
        Resource::read(resource, &limits, array).map_err(failed::<D>)
    }
}

impl<D: ObjectDriver> Images<D> {
    /// `cuTexObjectCreate`.
    pub fn tex_object_create(
        &self,
        place: Out<u64, D>,
        resource: In<ResourceDescriptor, D>,
        texture: In<TextureDescriptor, D>,
        view: In<ViewDescriptor, D>,
    ) -> Result<(), D> {
        let context = self.driver.context()?;
        place.required()?;
        let (resource, texture) = (resource.get()?, texture.get()?);
        let view = if view.is_given() { Some(view.get()?) } else { None };
        let memory = self.resource(context, &resource)?;
        let shown = view.map(|view| View::check(&view, &memory)).transpose().map_err(failed::<D>)?;
        let sampling = Sampling::read(&texture).map_err(failed::<D>)?;
        let made = Texture::check(memory, sampling, shown).map_err(failed::<D>)?;
        let object = self.driver.create_texture(&made)?;
        self.state().textures.insert((context, object), TextureEntry { resource, texture, view });
        place.set(object)
    }

    fn texture_entry(&self, object: u64) -> Result<TextureEntry, D> {
        let context = self.driver.context()?;
        let found = self.state().textures.get(&(context, object)).copied();
        found.ok_or_else(|| failed::<D>(INVALID))
    }

    /// `cuTexObjectDestroy`.
    pub fn tex_object_destroy(&self, object: u64) -> Result<(), D> {
        let context = self.driver.context()?;
        // NVIDIA's driver takes the number of no object, and does nothing.
        let found = self.state().textures.remove(&(context, object));
        found.map_or(Ok(()), |_| self.driver.destroy_texture(object))
    }

    /// `cuTexObjectGetResourceDesc`.
    pub fn tex_object_get_resource_desc(
        &self,
        place: Out<ResourceDescriptor, D>,
        object: u64,
    ) -> Result<(), D> {
        let entry = self.texture_entry(object)?;
        place.set(entry.resource)
    }

    /// `cuTexObjectGetTextureDesc`.
    pub fn tex_object_get_texture_desc(
        &self,
        place: Out<TextureDescriptor, D>,
        object: u64,
    ) -> Result<(), D> {
        let entry = self.texture_entry(object)?;
        place.set(entry.texture)
    }

    /// `cuTexObjectGetResourceViewDesc`.
    pub fn tex_object_get_resource_view_desc(
        &self,
        place: Out<ViewDescriptor, D>,
        object: u64,
    ) -> Result<(), D> {
        let view = self.texture_entry(object)?.view;
        place.required()?.set(view.ok_or_else(|| failed::<D>(INVALID))?)
    }

    /// `cuSurfObjectCreate`.
    pub fn surf_object_create(
        &self,
        place: Out<u64, D>,
        resource: In<ResourceDescriptor, D>,
    ) -> Result<(), D> {
        let context = self.driver.context()?;
        place.required()?;
        let resource = resource.get()?;
        // NVIDIA's driver also takes an array that was not made for surfaces.
        let Resource::Array(array) = self.resource(context, &resource)? else {
            return Err(failed::<D>(INVALID));
        };
        let object = self.driver.create_surface(&array)?;
        self.state().surfaces.insert((context, object), SurfaceEntry { resource });
        place.set(object)
    }

    /// `cuSurfObjectDestroy`.
    pub fn surf_object_destroy(&self, object: u64) -> Result<(), D> {
        let context = self.driver.context()?;
        // As for textures.
        let found = self.state().surfaces.remove(&(context, object));
        found.map_or(Ok(()), |_| self.driver.destroy_surface(object))
    }

    /// `cuSurfObjectGetResourceDesc`.
    pub fn surf_object_get_resource_desc(
        &self,
        place: Out<ResourceDescriptor, D>,
        object: u64,
    ) -> Result<(), D> {
        let context = self.driver.context()?;
        let found = self.state().surfaces.get(&(context, object)).copied();
        place.required()?.set(found.ok_or_else(|| failed::<D>(INVALID))?.resource)
    }
}

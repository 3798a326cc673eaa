//! Arrays, textures and surfaces: the worker's objects behind those of the program.
//!
//! The functions of the C API call [`IMAGES`], whose implementation the software GPU has, too: descriptors, their checks and the state of
//! references live here, in the program's process. This module makes the wire calls.

use crate::{
    error::{Error, Result},
    process::{self, ProcessState},
    state::{
        objects::{ImageKind, Objects},
        thread,
    },
};
use sluice_cuda_images::{
    ArrayDriver, ArrayResource, ImageDriver, ImageShape, Images, Limits, ObjectDriver, ReferenceDriver,
    Resource, Sampling, Texel, Texture, View,
};
use sluice_protocol::{
    calls::wire,
    field::{Mint, Name, Take},
    handle::{Array, Id, Kind, MipmappedArray, Module, SurfaceReference, TextureReference},
    image::{self, ImageResource, ImageView, LinearImage, ViewedPart},
    limits,
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The arrays, textures and surfaces of the process.
pub(crate) static IMAGES: Images<GuestImages> =
    Images::new(GuestImages { named: Mutex::new(BTreeMap::new()) });

/// This library, as arrays and textures know it.
pub(crate) struct GuestImages {
    /// The references that were looked up, so that each has one id.
    named: Mutex<BTreeMap<NamedReference, GuestReference>>,
}

/// A reference by its module, its kind and its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NamedReference {
    module: u64,
    is_surface: bool,
    name: Vec<u8>,
}

/// The storage of an array, in the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestArray {
    /// An array, or a level.
    Single(Id<Array>),
    /// An array with levels.
    Mipmapped(Id<MipmappedArray>),
}

/// A reference of a module, in the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestReference {
    Texture(Id<TextureReference>),
    Surface(Id<SurfaceReference>),
}

impl GuestArray {
    /// An array that copies and surfaces can name.
    pub(crate) fn single(self) -> Result<Id<Array>> {
        match self {
            GuestArray::Single(id) => Ok(id),
            GuestArray::Mipmapped(_) => Err(Error::INVALID_HANDLE),
        }
    }
}

/// Ends what a context has, and the references of its modules. The worker ends that with the context.
pub(crate) fn context_ended(process: &ProcessState, context: u64, modules: &[u64]) {
    modules.iter().for_each(|module| module_ended(process, *module));
    IMAGES.context_ended(context);
    process.images.forget_owner(context);
}

/// Ends the references of a module.
pub(crate) fn module_ended(process: &ProcessState, module: u64) {
    IMAGES.module_ended(module);
    IMAGES.driver().lock().retain(|named, _| named.module != module);
    process.images.forget_owner(module);
}

/// An id of an owner's object that `make` makes.
fn made<K: ImageKind>(
    process: &ProcessState,
    owner: u64,
    make: impl FnOnce(Mint<K>) -> Result,
) -> Result<Id<K>> {
    let objects: &Objects<K> = K::of(&process.images);
    let id = objects.mint(owner)?;
    match make(Mint(id)) {
        Ok(()) => {
            objects.made(id);
            Ok(id)
        }
        Err(refused) => {
            objects.release(id);
            Err(refused)
        }
    }
}

/// Ends an object by `end`. The worker forgets its id in any case.
fn ended<K: ImageKind + Kind>(
    process: &ProcessState,
    id: Id<K>,
    end: impl FnOnce(Take<K>) -> Result,
) -> Result {
    let objects: &Objects<K> = K::of(&process.images);
    objects.take(id.raw())?;
    let result = end(Take(id));
    objects.release(id);
    result
}

fn resource(resource: &Resource<GuestArray>) -> ImageResource {
    let linear = |address, texel: Texel, length| LinearImage {
        address,
        format: texel.format(),
        channels: texel.channels,
        length,
    };
    match resource {
        Resource::Array(of) | Resource::Mipmapped(of) => match of.array {
            GuestArray::Single(id) => ImageResource::Array(id),
            GuestArray::Mipmapped(id) => ImageResource::Mipmapped(id),
        },
        Resource::Linear(of) => ImageResource::Linear(linear(of.address, of.texel, of.bytes)),
        Resource::Pitched(of) => ImageResource::Pitched {
            memory: linear(of.address, of.texel, of.width),
            height: of.height,
            pitch: of.pitch,
        },
    }
}

fn sampling(sampling: &Sampling) -> image::Sampling {
    let described = sampling.descriptor();
    image::Sampling {
        address_modes: described.address_modes,
        filter: described.filter,
        flags: described.flags,
        anisotropy: described.max_anisotropy,
        level_filter: described.mipmap_filter,
        level_bias: described.level_bias.to_bits(),
        level_clamp: [described.min_level, described.max_level].map(f32::to_bits),
        border: described.border.map(f32::to_bits),
    }
}

/// The part of an array that a view shows. It names its format, also if it is that of the array: a driver may take format 0, "as the
/// array", for no view at all. A format of the array that has no number is sent as 0.
fn viewed(shape: &ImageShape, view: &View) -> Result<ViewedPart> {
    /// The greatest `CUresourceViewFormat` without blocks.
    const FORMATS: u32 = 24;
    let shown = |format: &u32| Texel::read_view(*format) == Ok(Some(view.texel));
    let format = (1..=FORMATS).find(shown).or_else(|| (view.texel == shape.texel).then_some(0));
    let ([first_level, last_level], [first_layer, last_layer]) = (view.levels, view.layers);
    Ok(ViewedPart {
        format: format.ok_or(Error::INVALID_VALUE)?,
        extent: [shape.width, shape.height, shape.depth],
        range: [first_level, last_level, first_layer, last_layer],
    })
}

/// The process, and the current context.
fn here() -> Result<(&'static ProcessState, u64)> {
    let process = process::get()?;
    Ok((process, process.current()?.raw))
}

impl GuestImages {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NamedReference, GuestReference>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reference of a module, which `find` looks up if no earlier call has.
    fn named(
        &self,
        module: u64,
        name: &[u8],
        is_surface: bool,
        find: impl FnOnce(&ProcessState, u64, Id<Module>) -> Result<GuestReference>,
    ) -> Result<GuestReference> {
        let (process, context) = here()?;
        let (id, _) = process.modules.resolve(module)?;
        if name.len() > limits::NAME_BYTES {
            return Err(Error::NOT_FOUND);
        }
        let named = NamedReference { module, is_surface, name: name.to_vec() };
        // Held during the look-up, so that two threads make one.
        let mut known = self.lock();
        if let Some(found) = known.get(&named) {
            return Ok(*found);
        }
        let found = find(process, context, id)?;
        known.insert(named, found);
        Ok(found)
    }
}

impl ImageDriver for GuestImages {
    type Error = Error;
    type Array = GuestArray;
    type Variable = GuestReference;

    fn context(&self) -> Result<u64> {
        here().map(|(_, context)| context)
    }

    fn limits(&self) -> Result<Limits> {
        let (process, _) = here()?;
        let device = process.devices.get(process.current()?.device)?;
        Limits::read(|attribute| device.attribute(attribute.cast_unsigned()))
    }
}

impl ArrayDriver for GuestImages {
    fn create_array(&self, shape: &ImageShape, levels: Option<u32>) -> Result<GuestArray> {
        let (process, context) = here()?;
        let described = shape.descriptor();
        let extent = [described.width, described.height, described.depth];
        let (format, channels, flags) = (described.format, described.channels, described.flags);
        let session = &process.session;
        match levels {
            None => made(process, context, |array| {
                let call = wire::array_create::Args { extent, format, channels, flags, array };
                session.sync(context, &call).map(drop)
            })
            .map(GuestArray::Single),
            Some(levels) => made(process, context, |array| {
                let call =
                    wire::mipmapped_array_create::Args { extent, format, channels, flags, levels, array };
                session.sync(context, &call).map(drop)
            })
            .map(GuestArray::Mipmapped),
        }
    }

    fn level(&self, of: &ArrayResource<GuestArray>, level: u32) -> Result<GuestArray> {
        let (process, context) = here()?;
        let GuestArray::Mipmapped(whole) = of.array else { return Err(Error::INVALID_HANDLE) };
        // The level ends with the whole, whose id is its owner.
        let level = made(process, whole.raw(), |array| {
            let call = wire::mipmapped_array_level::Args { whole, level, array };
            process.session.sync(context, &call).map(drop)
        });
        level.map(GuestArray::Single)
    }

    fn destroy_array(&self, array: GuestArray, _is_mipmapped: bool) -> Result {
        let (process, context) = here()?;
        // The worker clears it before the driver has its memory back.
        process.streams.wait_all(&process.session)?;
        let session = &process.session;
        match array {
            GuestArray::Single(id) => ended(process, id, |array| {
                session.sync(context, &wire::array_destroy::Args { array }).map(drop)
            }),
            GuestArray::Mipmapped(id) => {
                let destroyed = ended(process, id, |array| {
                    session.sync(context, &wire::mipmapped_array_destroy::Args { array }).map(drop)
                });
                process.images.forget_owner(id.raw());
                destroyed
            }
        }
    }
}

impl ObjectDriver for GuestImages {
    fn create_texture(&self, texture: &Texture<GuestArray>) -> Result<u64> {
        let (process, context) = here()?;
        let view = match (&texture.view, texture.resource.array()) {
            (Some(view), Some(of)) => Some(viewed(&of.shape, view)?),
            _ => None,
        };
        let call = wire::texture_create::Args {
            resource: resource(&texture.resource),
            sampling: sampling(&texture.sampling),
            view: ImageView(view),
        };
        process.session.sync(context, &call).map(|reply| reply.texture)
    }

    fn destroy_texture(&self, texture: u64) -> Result {
        let (process, context) = here()?;
        process.session.sync(context, &wire::texture_destroy::Args { texture }).map(drop)
    }

    fn create_surface(&self, array: &ArrayResource<GuestArray>) -> Result<u64> {
        let (process, context) = here()?;
        let call = wire::surface_create::Args { array: array.array.single()? };
        process.session.sync(context, &call).map(|reply| reply.surface)
    }

    fn destroy_surface(&self, surface: u64) -> Result {
        let (process, context) = here()?;
        process.session.sync(context, &wire::surface_destroy::Args { surface }).map(drop)
    }
}

impl ReferenceDriver for GuestImages {
    fn texture_variable(&self, module: u64, name: &[u8]) -> Result<GuestReference> {
        self.named(module, name, false, |process, context, id| {
            let found = made(process, module, |reference| {
                let call = wire::texture_reference::Args { module: id, name: Name(name), reference };
                process.session.sync(context, &call).map(drop)
            });
            found.map(GuestReference::Texture)
        })
    }

    fn surface_variable(&self, module: u64, name: &[u8]) -> Result<GuestReference> {
        self.named(module, name, true, |process, context, id| {
            let found = made(process, module, |reference| {
                let call = wire::surface_reference::Args { module: id, name: Name(name), reference };
                process.session.sync(context, &call).map(drop)
            });
            found.map(GuestReference::Surface)
        })
    }

    fn bind_texture(&self, variable: &GuestReference, texture: Option<&Texture<GuestArray>>) -> Result {
        let GuestReference::Texture(reference) = *variable else { return Err(Error::INVALID_HANDLE) };
        let process = process::get()?;
        let call = wire::texture_reference_set::Args {
            reference,
            resource: texture.map_or(ImageResource::Nothing, |texture| resource(&texture.resource)),
            sampling: sampling(&texture.map_or(Sampling::DEFAULT, |texture| texture.sampling)),
        };
        process.session.sync(thread::current_context(), &call).map(drop)
    }

    fn bind_surface(&self, variable: &GuestReference, array: Option<&ArrayResource<GuestArray>>) -> Result {
        let GuestReference::Surface(reference) = *variable else { return Err(Error::INVALID_HANDLE) };
        // A program cannot unbind a surface reference; the driver does when the array ends.
        let Some(array) = array else { return Ok(()) };
        let process = process::get()?;
        let call = wire::surface_reference_set::Args { reference, array: array.array.single()? };
        process.session.sync(thread::current_context(), &call).map(drop)
    }

    fn check_function(&self, function: u64) -> Result {
        process::get()?.modules.functions.resolve(function).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_cuda_images::{ArrayKind, Component};

    fn view_of(texel: Texel) -> ViewedPart {
        let texels = Texel { component: Component::F32, channels: 1 };
        let shape = ImageShape {
            width: 6,
            height: 5,
            depth: 4,
            texel: texels,
            flags: 1,
            geometry: ArrayKind::Planes,
        };
        viewed(&shape, &View { texel, levels: [0, 0], layers: [1, 2] }).unwrap()
    }

    #[test]
    fn view_names_its_format_also_if_it_is_that_of_the_array() {
        /// `CU_RES_VIEW_FORMAT_FLOAT_1X32` and `CU_RES_VIEW_FORMAT_UINT_1X32`.
        const FORMATS: [u32; 2] = [0x16, 0x0d];
        let formats = [Component::F32, Component::U32]
            .map(|component| view_of(Texel { component, channels: 1 }).format);
        assert_eq!(formats, FORMATS);
    }
}

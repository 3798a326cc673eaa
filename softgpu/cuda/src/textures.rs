//! Textures, surfaces and references: the objects behind the functions of the interface.

use std::sync::{Arc, Weak};

use sluice_cuda_images::{
    AddressMode, ArrayDriver, ArrayResource, FilterMode, ImageDriver, ImageShape, Limits, ObjectDriver,
    ReferenceDriver, Resource, Sampling, Texture, View, shape, texture::texture_flags,
};
use softgpu_engine::{self as engine, Filter, Image, Level, ReferenceKind, Sampler, Storage};

use crate::arrays::{
    self, ArrayPart, BoundReference, SURFACES, SurfaceObject, SurfaceTarget, TEXTURES, TextureObject,
    TextureTarget,
};
use crate::context::{Core, current_core};
use crate::error::{Error, Result};
use crate::images::SoftImages;
use crate::module::{self, Module, described};

/// A reference of a module.
#[derive(Clone)]
pub(crate) struct Variable {
    module: Weak<Module>,
    index: usize,
}

const fn filter(mode: FilterMode) -> Filter {
    match mode {
        FilterMode::Point => Filter::Point,
        FilterMode::Linear => Filter::Linear,
    }
}

fn sampler(sampling: &Sampling) -> Sampler {
    let has = |flag: u32| sampling.flags & flag != 0;
    Sampler {
        address: sampling.applied_modes().map(|mode| match mode {
            AddressMode::Wrap => engine::AddressMode::Wrap,
            AddressMode::Clamp => engine::AddressMode::Clamp,
            AddressMode::Mirror => engine::AddressMode::Mirror,
            AddressMode::Border => engine::AddressMode::Border,
        }),
        filter: filter(sampling.filter),
        normalized: sampling.is_normalised(),
        promote: !has(texture_flags::READ_AS_INTEGER),
        srgb: has(texture_flags::SRGB),
        mip_filter: filter(sampling.mipmap_filter),
        mip_bias: sampling.level_bias,
        mip_clamp: [sampling.min_level, sampling.max_level],
        border: sampling.border,
        seamless: has(texture_flags::SEAMLESS_CUBEMAP),
    }
}

/// The part of an array that a view shows.
fn shown(of: &ArrayResource<ArrayPart>, view: Option<View>) -> Result<Arc<Image>> {
    let image = &of.array.image;
    let Some(view) = view else { return Ok(Arc::clone(image)) };
    let index = |level: u32| usize::try_from(level).map_err(|_| Error::INVALID_VALUE);
    let levels = index(view.levels[0])?..index(view.levels[1])? + 1;
    // Without layers, all slices and faces are shown.
    let slices = if of.shape.flags & shape::flags::LAYERED != 0 {
        view.layers[0]..view.layers[1] + 1
    } else {
        0..u32::try_from(of.shape.slices()).map_err(|_| Error::INVALID_VALUE)?
    };
    let view = image.view(image.shape(), arrays::format(view.texel)?, levels, slices);
    Ok(Arc::new(view.map_err(|_| Error::INVALID_VALUE)?))
}

/// A texture of linear memory: rows of `width` elements.
fn linear(of: &Resource<ArrayPart>) -> Result<Arc<Image>> {
    let (shape, texel, address, [width, height], row_pitch) = match of {
        Resource::Linear(linear) => {
            let elements = linear.bytes / linear.texel.bytes();
            (engine::Shape::D1, linear.texel, linear.address, [elements, 1], linear.bytes)
        }
        Resource::Pitched(rows) => {
            (engine::Shape::D2, rows.texel, rows.address, [rows.width, rows.height], rows.pitch)
        }
        Resource::Array(_) | Resource::Mipmapped(_) => return Err(Error::INVALID_VALUE),
    };
    let extent = |number: u64| u32::try_from(number).map_err(|_| Error::INVALID_VALUE);
    let slice_pitch = row_pitch.checked_mul(height).ok_or(Error::INVALID_VALUE)?;
    let (width, height) = (extent(width)?, extent(height)?);
    let level = Level { address, width, height, depth: 1, row_pitch, slice_pitch };
    let image = Image::new(shape, arrays::format(texel)?, Storage::Memory, 1, vec![level]);
    Ok(Arc::new(image.map_err(|_| Error::INVALID_VALUE)?))
}

fn texture_target(core: &Core, texture: &Texture<ArrayPart>) -> Result<TextureTarget> {
    if let Some((address, bytes)) = texture.resource.memory() {
        let end = address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
        if !core.gpu.space.table.spans().covers(&(address..end), false) {
            return Err(Error::INVALID_VALUE);
        }
    }
    let (image, storage) = match texture.resource.array() {
        Some(of) => (shown(of, texture.view)?, Some(Arc::clone(&of.array.storage))),
        None => (linear(&texture.resource)?, None),
    };
    let texture = Arc::new(engine::Texture { image, sampler: sampler(&texture.sampling) });
    Ok(TextureTarget { texture, storage })
}

fn surface_target(of: &ArrayResource<ArrayPart>) -> SurfaceTarget {
    let surface = Arc::new(engine::Surface { image: Arc::clone(&of.array.image) });
    SurfaceTarget { surface, storage: Arc::clone(&of.array.storage) }
}

fn variable(handle: u64, name: &[u8], kind: ReferenceKind) -> Result<Variable> {
    let (module, index) = module::reference(handle, name, kind)?;
    Ok(Variable { module: Arc::downgrade(&module), index })
}

fn bind(variable: &Variable, target: Option<BoundReference>) -> Result {
    let module = variable.module.upgrade().ok_or(Error::INVALID_VALUE)?;
    module.bind(variable.index, target);
    Ok(())
}

impl ImageDriver for SoftImages {
    type Error = Error;
    type Array = ArrayPart;
    type Variable = Variable;

    fn context(&self) -> Result<u64> {
        Ok(current_core()?.handle)
    }

    fn limits(&self) -> Result<Limits> {
        Ok(Limits::DATA_CENTRE)
    }
}

impl ArrayDriver for SoftImages {
    fn create_array(&self, shape: &ImageShape, levels: Option<u32>) -> Result<ArrayPart> {
        arrays::create(&*current_core()?, shape, levels.unwrap_or(1))
    }

    fn level(&self, of: &ArrayResource<ArrayPart>, level: u32) -> Result<ArrayPart> {
        of.array.level(&of.shape, level)
    }

    fn destroy_array(&self, array: ArrayPart, _is_mipmapped: bool) -> Result {
        array.storage.end()
    }
}

impl ObjectDriver for SoftImages {
    fn create_texture(&self, texture: &Texture<ArrayPart>) -> Result<u64> {
        let core = current_core()?;
        let target = texture_target(&core, texture)?;
        Ok(TEXTURES.insert_with(|_| TextureObject { core: core.id, target })?.0)
    }

    fn destroy_texture(&self, object: u64) -> Result {
        TEXTURES.remove(object).map(drop)
    }

    fn create_surface(&self, array: &ArrayResource<ArrayPart>) -> Result<u64> {
        let core = current_core()?;
        let target = surface_target(array);
        Ok(SURFACES.insert_with(|_| SurfaceObject { core: core.id, target })?.0)
    }

    fn destroy_surface(&self, object: u64) -> Result {
        SURFACES.remove(object).map(drop)
    }
}

impl ReferenceDriver for SoftImages {
    fn texture_variable(&self, module: u64, name: &[u8]) -> Result<Variable> {
        variable(module, name, ReferenceKind::Texture)
    }

    fn surface_variable(&self, module: u64, name: &[u8]) -> Result<Variable> {
        variable(module, name, ReferenceKind::Surface)
    }

    fn bind_texture(&self, variable: &Variable, texture: Option<&Texture<ArrayPart>>) -> Result {
        let core = current_core()?;
        let target = texture.map(|texture| texture_target(&core, texture)).transpose()?;
        bind(variable, target.map(BoundReference::Texture))
    }

    fn bind_surface(&self, variable: &Variable, array: Option<&ArrayResource<ArrayPart>>) -> Result {
        bind(variable, array.map(|of| BoundReference::Surface(surface_target(of))))
    }

    fn check_function(&self, function: u64) -> Result {
        described(function).map(drop)
    }
}

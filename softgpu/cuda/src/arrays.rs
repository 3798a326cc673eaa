//! The storage of arrays, and the textures and surfaces that kernels name by a number.
//!
//! An array lies in device memory of the driver, row after row; nothing clears it. Copies and launches hold its [`ArrayStorage`], and ask
//! at their execution whether the array still exists: after its end its memory may belong to another block.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use sluice_cuda_images::{ArrayKind, Component, ImageShape, Texel};
use softgpu_engine::{self as engine, ChannelType, Format, Image, Images, Level, Storage};

use crate::context::Core;
use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::handles::{Kind, Registry};
use crate::health::Health;
use crate::memory::BlockKind;

/// Alignment of rows, which is that of pitched memory of textures.
const ROW_ALIGNMENT: u64 = 32;
/// Alignment of levels.
const LEVEL_ALIGNMENT: u64 = 512;

/// All texture objects of the process.
pub(crate) static TEXTURES: Registry<TextureObject> = Registry::new(Kind::Texture, Error::INVALID_VALUE);
/// All surface objects of the process.
pub(crate) static SURFACES: Registry<SurfaceObject> = Registry::new(Kind::Surface, Error::INVALID_VALUE);

/// The memory of an array, or of a mipmapped array with all levels.
pub(crate) struct ArrayStorage {
    gpu: &'static VisibleGpu,
    start: u64,
    /// The health of its context, whose end frees the memory.
    health: Arc<Health>,
    ended: AtomicBool,
}

/// An array, a mipmapped array, or one level of a mipmapped array.
#[derive(Clone)]
pub(crate) struct ArrayPart {
    pub(crate) storage: Arc<ArrayStorage>,
    pub(crate) image: Arc<Image>,
}

/// A texture that a kernel reads.
#[derive(Clone)]
pub(crate) struct TextureTarget {
    pub(crate) texture: Arc<engine::Texture>,
    /// None for linear memory, which the engine finds in the mapping table.
    pub(crate) storage: Option<Arc<ArrayStorage>>,
}

/// An array that a kernel reads and writes.
#[derive(Clone)]
pub(crate) struct SurfaceTarget {
    pub(crate) surface: Arc<engine::Surface>,
    pub(crate) storage: Arc<ArrayStorage>,
}

/// A texture object of a context, by the id of its core.
pub(crate) struct TextureObject {
    pub(crate) core: u64,
    pub(crate) target: TextureTarget,
}

/// A surface object of a context, by the id of its core.
pub(crate) struct SurfaceObject {
    pub(crate) core: u64,
    pub(crate) target: SurfaceTarget,
}

/// The object that a reference of a module names in a launch.
#[derive(Clone)]
pub(crate) enum BoundReference {
    Texture(TextureTarget),
    Surface(SurfaceTarget),
}

impl ArrayStorage {
    /// True until the array is destroyed, or its context ends or has a fault. An operation asks after it has entered the list of running
    /// ones.
    pub(crate) fn exists(&self) -> bool {
        !self.ended.load(Acquire) && !self.health.stop.load(Acquire)
    }

    /// Ends the array: waits for work that was submitted before, and frees its memory. Work that another thread submits meanwhile may
    /// still find the array, so the memory goes back only when no operation runs that has begun before the end.
    pub(crate) fn end(&self) -> Result {
        self.gpu.drain();
        self.ended.store(true, Release);
        self.gpu.space.running.wait();
        self.gpu.free(self.start, &[BlockKind::Internal])
    }
}

/// Ends the texture and surface objects of a context, by the id of its core.
pub(crate) fn context_ended(core: u64) {
    TEXTURES.retain(|object| object.core != core);
    SURFACES.retain(|object| object.core != core);
}

/// The format of an element, as the engine names it.
pub(crate) fn format(texel: Texel) -> Result<Format> {
    let channel = match texel.component {
        Component::U8 => ChannelType::U8,
        Component::U16 => ChannelType::U16,
        Component::U32 => ChannelType::U32,
        Component::S8 => ChannelType::S8,
        Component::S16 => ChannelType::S16,
        Component::S32 => ChannelType::S32,
        Component::F16 => ChannelType::F16,
        Component::F32 => ChannelType::F32,
        Component::Unorm8 => ChannelType::Unorm8,
        Component::Unorm16 => ChannelType::Unorm16,
        Component::Snorm8 => ChannelType::Snorm8,
        Component::Snorm16 => ChannelType::Snorm16,
    };
    let channels = u8::try_from(texel.channels).map_err(|_| Error::INVALID_VALUE)?;
    Ok(Format { channel, channels })
}

fn engine_shape(geometry: ArrayKind) -> engine::Shape {
    match geometry {
        ArrayKind::Line => engine::Shape::D1,
        ArrayKind::Plane => engine::Shape::D2,
        ArrayKind::Volume => engine::Shape::D3,
        ArrayKind::Lines => engine::Shape::D1Layered,
        ArrayKind::Planes => engine::Shape::D2Layered,
        ArrayKind::Cube => engine::Shape::Cube,
        ArrayKind::Cubes => engine::Shape::CubeLayered,
    }
}

/// Layers as the engine counts them: those of cubes have six faces.
fn layers(shape: &ImageShape) -> u64 {
    match shape.geometry {
        ArrayKind::Line | ArrayKind::Plane | ArrayKind::Volume => 1,
        ArrayKind::Lines | ArrayKind::Planes => shape.slices(),
        ArrayKind::Cube | ArrayKind::Cubes => shape.slices() / 6,
    }
}

fn extent(number: u64) -> Result<u32> {
    u32::try_from(number).map_err(|_| Error::INVALID_VALUE)
}

/// The levels from offset 0 on, and the bytes of all.
fn levels(shape: &ImageShape, count: u32) -> Result<(Vec<Level>, u64)> {
    let (mut levels, mut end) = (Vec::new(), 0_u64);
    for number in 0..count {
        let level = shape.level(number);
        let row_pitch =
            level.row_bytes().checked_next_multiple_of(ROW_ALIGNMENT).ok_or(Error::OUT_OF_MEMORY)?;
        let slice_pitch = row_pitch.checked_mul(level.rows()).ok_or(Error::OUT_OF_MEMORY)?;
        let depth = if shape.geometry == ArrayKind::Volume { level.slices() } else { 1 };
        levels.push(Level {
            address: end,
            width: extent(level.width)?,
            height: extent(level.rows())?,
            depth: extent(depth)?,
            row_pitch,
            slice_pitch,
        });
        let bytes =
            level.bytes(ROW_ALIGNMENT).and_then(|bytes| bytes.checked_next_multiple_of(LEVEL_ALIGNMENT));
        end = bytes.and_then(|bytes| end.checked_add(bytes)).ok_or(Error::OUT_OF_MEMORY)?;
    }
    Ok((levels, end))
}

/// Allocates an array or a mipmapped array in the current context. Its memory keeps the content of the last owner.
pub(crate) fn create(core: &Core, shape: &ImageShape, count: u32) -> Result<ArrayPart> {
    let (mut levels, bytes) = levels(shape, count)?;
    let format = format(shape.texel)?;
    let layers = extent(layers(shape))?;
    let start = core.gpu.space.allocate(core.maker(), bytes, BlockKind::Internal)?;
    let (gpu, health) = (core.gpu, Arc::clone(&core.health));
    let storage = Arc::new(ArrayStorage { gpu, start, health, ended: AtomicBool::new(false) });
    for level in &mut levels {
        level.address += start;
    }
    let place = Storage::Array(start..start + bytes);
    match Image::new(engine_shape(shape.geometry), format, place, layers, levels) {
        Ok(image) => Ok(ArrayPart { storage, image: Arc::new(image) }),
        Err(_) => {
            storage.end()?;
            Err(Error::INVALID_VALUE)
        }
    }
}

impl ArrayPart {
    /// One level of a mipmapped array.
    pub(crate) fn level(&self, shape: &ImageShape, level: u32) -> Result<ArrayPart> {
        let level = usize::try_from(level).map_err(|_| Error::INVALID_VALUE)?;
        let slices = extent(shape.slices())?;
        let image = self.image.view(self.image.shape(), self.image.format(), level..level + 1, 0..slices);
        let image = Arc::new(image.map_err(|_| Error::INVALID_VALUE)?);
        Ok(ArrayPart { storage: Arc::clone(&self.storage), image })
    }
}

/// The handle in a launch of a module's reference with this index.
pub(crate) fn reference_handle(index: usize) -> u64 {
    (Kind::Reference as u64) << 52 | index as u64
}

/// The textures and surfaces of one launch: the objects of its context, and the references of its module.
pub(crate) struct LaunchImages<'a> {
    pub(crate) core: u64,
    pub(crate) references: &'a [Option<BoundReference>],
}

impl LaunchImages<'_> {
    fn reference(&self, handle: u64) -> Option<&BoundReference> {
        let index = usize::try_from(handle.checked_sub(reference_handle(0))?).ok()?;
        self.references.get(index)?.as_ref()
    }
}

impl TextureTarget {
    fn get(&self) -> Option<Arc<engine::Texture>> {
        let exists = self.storage.as_ref().is_none_or(|storage| storage.exists());
        exists.then(|| Arc::clone(&self.texture))
    }
}

impl SurfaceTarget {
    fn get(&self) -> Option<Arc<engine::Surface>> {
        self.storage.exists().then(|| Arc::clone(&self.surface))
    }
}

impl Images for LaunchImages<'_> {
    fn texture(&self, handle: u64) -> Option<Arc<engine::Texture>> {
        if let Some(BoundReference::Texture(target)) = self.reference(handle) {
            return target.get();
        }
        TEXTURES.get(handle).ok().filter(|object| object.core == self.core)?.target.get()
    }

    fn surface(&self, handle: u64) -> Option<Arc<engine::Surface>> {
        if let Some(BoundReference::Surface(target)) = self.reference(handle) {
            return target.get();
        }
        SURFACES.get(handle).ok().filter(|object| object.core == self.core)?.target.get()
    }
}

#[cfg(test)]
mod tests {
    use sluice_cuda_abi::descriptors::Array3DDescriptor;
    use sluice_cuda_images::Limits;

    use super::*;

    fn shape(width: u64, height: u64, depth: u64, flags: u32) -> ImageShape {
        let array = Array3DDescriptor { width, height, depth, format: 0x20, channels: 1, flags };
        ImageShape::check(array, true, &Limits::DATA_CENTRE).unwrap()
    }

    #[test]
    fn levels_follow_each_other_without_overlap_and_aligned() {
        let volume = shape(20, 6, 3, 0);
        let (found, bytes) = levels(&volume, 3).unwrap();
        let row = |level: &Level| (level.address, level.row_pitch, level.slice_pitch, level.depth);
        assert_eq!(
            found.iter().map(row).collect::<Vec<_>>(),
            [(0, 96, 576, 3), (2048, 64, 192, 1), (2560, 32, 32, 1),]
        );
        assert_eq!(bytes, 3072);
        let cubes = shape(4, 4, 12, 5);
        assert_eq!((layers(&cubes), levels(&cubes, 1).unwrap().1), (2, 32 * 4 * 12));
    }

    #[test]
    fn image_of_every_kind_of_array_is_accepted_by_the_engine() {
        for (height, depth, flags) in
            [(0, 0, 0), (16, 0, 0), (16, 16, 0), (0, 3, 1), (16, 3, 1), (16, 6, 4), (16, 12, 5)]
        {
            let shape = shape(16, height, depth, flags);
            let (found, bytes) = levels(&shape, 4).unwrap();
            let layers = extent(layers(&shape)).unwrap();
            let format = format(shape.texel).unwrap();
            let place = Storage::Array(0..bytes);
            let image = Image::new(engine_shape(shape.geometry), format, place, layers, found);
            assert!(image.is_ok(), "{height} {depth} {flags}: {image:?}");
        }
    }

    #[test]
    fn array_larger_than_all_addresses_is_out_of_memory() {
        let planes = shape(32_768, 32_768, 2_048, 1);
        assert_eq!(levels(&planes, 1).unwrap().1, 1 << 43);
        let wide = ImageShape { width: u64::MAX / 4, ..planes };
        assert_eq!(levels(&wide, 1).unwrap_err(), Error::OUT_OF_MEMORY);
    }
}

//! Arrays, their copies, texture and surface objects, and references.

use super::{CopyBox, CopyEnd, CopyMemory, Result, input, size};
use crate::{DeviceRange, Driver, Handle, HostRange, code};
use core::{
    ffi::{CStr, c_int, c_uint},
    sync::atomic::AtomicU64,
};
use sluice_cuda_abi::descriptors::{
    Array3DDescriptor, ArrayDescriptor, ResourceDescriptor, TextureDescriptor, ViewDescriptor, resource,
};
use sluice_protocol::image::{Sampling, ViewedPart};

/// The elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayExtent {
    /// Width, height and depth in elements; 0 for a direction that the array does not have.
    pub extent: [u64; 3],
    /// `CUarray_format` of a channel.
    pub format: u32,
    /// Channels of an element.
    pub channels: u32,
    /// `CUDA_ARRAY3D_*`.
    pub flags: u32,
}

impl ArrayExtent {
    const fn descriptor(&self) -> Array3DDescriptor {
        let ArrayExtent { extent: [width, height, depth], format, channels, flags } = *self;
        Array3DDescriptor { width, height, depth, format, channels, flags }
    }
}

/// The distances in memory of a copy from or to an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitches {
    /// Bytes between rows.
    pub pitch: u32,
    /// Rows between slices.
    pub rows: u32,
}

/// One end of an [`ArrayCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayCopyEnd {
    /// An array, from a byte of a row, a row and a slice on.
    Array(Handle, [u32; 3]),
    /// Device memory.
    Device(DeviceRange, Pitches),
    /// Host memory.
    Host(HostRange, Pitches),
}

/// A copy of a box from or to an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayCopy {
    /// The destination.
    pub to: ArrayCopyEnd,
    /// The source.
    pub from: ArrayCopyEnd,
    /// Bytes of a row, rows of a slice, and slices.
    pub extent: [u32; 3],
}

impl From<ArrayCopyEnd> for CopyEnd {
    fn from(end: ArrayCopyEnd) -> CopyEnd {
        let (memory, Pitches { pitch, rows }) = match end {
            ArrayCopyEnd::Array(array, at) => (CopyMemory::Array(array, at), Pitches { pitch: 0, rows: 0 }),
            ArrayCopyEnd::Device(range, pitches) => (CopyMemory::Device(range), pitches),
            ArrayCopyEnd::Host(range, pitches) => (CopyMemory::Host(range), pitches),
        };
        CopyEnd { memory, pitch: pitch.into(), rows: rows.into() }
    }
}

impl From<ArrayCopy> for CopyBox {
    fn from(ArrayCopy { to, from, extent }: ArrayCopy) -> CopyBox {
        let [width, height, depth] = extent.map(u64::from);
        CopyBox { to: to.into(), from: from.into(), width, height, depth }
    }
}

/// The memory of a texture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageMemory {
    /// An array.
    Array(Handle),
    /// An array with mipmap levels.
    Mipmapped(Handle),
    /// One row of elements.
    Linear {
        /// The elements.
        memory: DeviceRange,
        /// `CUarray_format` of a channel.
        format: u32,
        /// Channels of an element.
        channels: u32,
    },
    /// Rows of elements.
    Pitched {
        /// From the first element to the last.
        memory: DeviceRange,
        /// `CUarray_format` of a channel.
        format: u32,
        /// Channels of an element.
        channels: u32,
        /// Elements of a row.
        width: u64,
        /// Rows.
        height: u64,
        /// Bytes between rows.
        pitch: u64,
    },
}

impl ImageMemory {
    fn descriptor(&self) -> ResourceDescriptor {
        let none = ResourceDescriptor::default();
        match *self {
            ImageMemory::Array(object) => ResourceDescriptor { kind: resource::ARRAY, object, ..none },
            ImageMemory::Mipmapped(object) => {
                ResourceDescriptor { kind: resource::MIPMAPPED_ARRAY, object, ..none }
            }
            ImageMemory::Linear { memory, format, channels } => ResourceDescriptor {
                kind: resource::LINEAR,
                object: memory.address(),
                format,
                channels,
                width: memory.bytes(),
                ..none
            },
            ImageMemory::Pitched { memory, format, channels, width, height, pitch } => ResourceDescriptor {
                kind: resource::PITCH_2D,
                object: memory.address(),
                format,
                channels,
                width,
                height,
                pitch,
                ..none
            },
        }
    }
}

const fn texture(sampling: &Sampling) -> TextureDescriptor {
    let Sampling { level_clamp: [least, most], border: [red, green, blue, alpha], .. } = *sampling;
    TextureDescriptor {
        address_modes: sampling.address_modes,
        filter: sampling.filter,
        flags: sampling.flags,
        max_anisotropy: sampling.anisotropy,
        mipmap_filter: sampling.level_filter,
        level_bias: f32::from_bits(sampling.level_bias),
        min_level: f32::from_bits(least),
        max_level: f32::from_bits(most),
        border: [f32::from_bits(red), f32::from_bits(green), f32::from_bits(blue), f32::from_bits(alpha)],
        reserved: [0; 12],
    }
}

/// Zeroes from which arrays are cleared. Atomic, so that they are no part of the program's file.
static ZEROES: [AtomicU64; 1 << 17] = [const { AtomicU64::new(0) }; 1 << 17];

impl Driver {
    /// `cuArray3DCreate_v2`.
    pub fn array_create(&self, array: &ArrayExtent) -> Result<Handle> {
        let mut handle = 0;
        let descriptor = array.descriptor();
        call!(self.cuArray3DCreate_v2(&raw mut handle, input(&descriptor)))?;
        Ok(handle)
    }

    /// `cuMipmappedArrayCreate`.
    pub fn mipmapped_array_create(&self, array: &ArrayExtent, levels: u32) -> Result<Handle> {
        let mut handle = 0;
        let descriptor = array.descriptor();
        call!(self.cuMipmappedArrayCreate(&raw mut handle, input(&descriptor), levels))?;
        Ok(handle)
    }

    /// `cuMemcpy3DAsync_v2`.
    pub fn memcpy_box(&self, copy: &CopyBox, stream: Handle) -> Result<()> {
        call!(self.cuMemcpy3DAsync_v2(input(&copy.parameters()?), stream))
    }

    /// The most bytes that [`Driver::array_clear`] writes at once.
    pub const ZEROES: u64 = size_of_val(&ZEROES) as u64;

    /// Writes zeroes to a box of an array, in the order of a stream.
    pub fn array_clear(&self, array: Handle, at: [u32; 3], extent: [u64; 3], stream: Handle) -> Result<()> {
        let [width, height, depth] = extent;
        let bytes = width.checked_mul(height).and_then(|bytes| bytes.checked_mul(depth));
        let bytes = bytes.filter(|bytes| *bytes <= Driver::ZEROES).ok_or(code::INVALID_VALUE)?;
        // SAFETY: the zeroes live as long as the process, and nothing writes to them.
        let from = unsafe { HostRange::new(ZEROES.as_ptr().expose_provenance() as u64, bytes) };
        let from = CopyEnd { memory: CopyMemory::Host(from), pitch: width, rows: height };
        let to = CopyEnd { memory: CopyMemory::Array(array, at), pitch: 0, rows: 0 };
        self.memcpy_box(&CopyBox { to, from, width, height, depth }, stream)
    }

    /// `cuTexObjectCreate`.
    pub fn texture_create(
        &self,
        memory: &ImageMemory,
        sampling: &Sampling,
        view: Option<&ViewedPart>,
    ) -> Result<u64> {
        let mut object = 0;
        let (resource, sampling) = (memory.descriptor(), texture(sampling));
        let view = view.map(|part| {
            let ViewedPart { format, extent: [width, height, depth], range } = *part;
            let [first_level, last_level, first_layer, last_layer] = range;
            let reserved = [0; 16];
            ViewDescriptor {
                format,
                width,
                height,
                depth,
                first_level,
                last_level,
                first_layer,
                last_layer,
                reserved,
            }
        });
        let view = view.as_ref().map_or(core::ptr::null(), input);
        call!(self.cuTexObjectCreate(&raw mut object, input(&resource), input(&sampling), view))?;
        Ok(object)
    }

    /// `cuSurfObjectCreate`.
    pub fn surface_create(&self, array: Handle) -> Result<u64> {
        let mut object = 0;
        let resource = ImageMemory::Array(array).descriptor();
        call!(self.cuSurfObjectCreate(&raw mut object, input(&resource)))?;
        Ok(object)
    }

    /// `cuModuleGetTexRef`.
    pub fn texture_reference(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let mut reference = 0;
        call!(self.cuModuleGetTexRef(&raw mut reference, module, name.as_ptr()))?;
        Ok(reference)
    }

    /// `cuModuleGetSurfRef`.
    pub fn surface_reference(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let mut reference = 0;
        call!(self.cuModuleGetSurfRef(&raw mut reference, module, name.as_ptr()))?;
        Ok(reference)
    }

    /// Sets how launches read through a texture reference.
    pub fn texture_reference_sample(&self, reference: Handle, sampling: &Sampling) -> Result<()> {
        let description = texture(sampling);
        for (dimension, mode) in (0..).zip(sampling.address_modes) {
            call!(self.cuTexRefSetAddressMode(reference, dimension, mode))?;
        }
        call!(self.cuTexRefSetFilterMode(reference, description.filter))?;
        call!(self.cuTexRefSetFlags(reference, description.flags))?;
        call!(self.cuTexRefSetMaxAnisotropy(reference, description.max_anisotropy))?;
        call!(self.cuTexRefSetMipmapFilterMode(reference, description.mipmap_filter))?;
        call!(self.cuTexRefSetMipmapLevelBias(reference, description.level_bias))?;
        call!(self.cuTexRefSetMipmapLevelClamp(reference, description.min_level, description.max_level))?;
        call!(self.cuTexRefSetBorderColor(reference, description.border.as_ptr()))
    }

    /// Binds a texture reference to memory, or to none.
    pub fn texture_reference_bind(&self, reference: Handle, memory: Option<&ImageMemory>) -> Result<()> {
        /// `CU_TRSA_OVERRIDE_FORMAT`: the only flag, and required.
        const OVERRIDE_FORMAT: c_uint = 1;
        let mut offset = 0_usize;
        match memory {
            None => call!(self.cuTexRefSetAddress_v2(&raw mut offset, reference, 0, 0)),
            Some(ImageMemory::Array(array)) => {
                call!(self.cuTexRefSetArray(reference, *array, OVERRIDE_FORMAT))
            }
            Some(ImageMemory::Mipmapped(array)) => {
                call!(self.cuTexRefSetMipmappedArray(reference, *array, OVERRIDE_FORMAT))
            }
            Some(ImageMemory::Linear { memory, format, channels }) => {
                let channels = c_int::try_from(*channels).map_err(|_| code::INVALID_VALUE)?;
                // A reference to rows has their format until it is bound to none.
                call!(self.cuTexRefSetAddress_v2(&raw mut offset, reference, 0, 0))?;
                call!(self.cuTexRefSetFormat(reference, *format, channels))?;
                let bytes = size(memory.bytes())?;
                call!(self.cuTexRefSetAddress_v2(&raw mut offset, reference, memory.address(), bytes))
            }
            Some(ImageMemory::Pitched { memory, format, channels, width, height, pitch }) => {
                let rows =
                    ArrayDescriptor { width: *width, height: *height, format: *format, channels: *channels };
                let (address, pitch) = (memory.address(), size(*pitch)?);
                call!(self.cuTexRefSetAddress2D_v3(reference, input(&rows), address, pitch))
            }
        }
    }
}

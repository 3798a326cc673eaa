//! Arrays, textures and surfaces in the driver's C interface.

use std::ffi::{c_char, c_void};

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ArrayDescription {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

/// `CUDA_RESOURCE_DESC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ResourceDescription {
    pub(crate) kind: u32,
    pub(crate) object: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) extents: [u64; 3],
    pub(crate) reserved: [u64; 11],
    pub(crate) flags: u32,
}

/// `CUDA_TEXTURE_DESC`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct TextureDescription {
    pub(crate) modes: [u32; 3],
    pub(crate) filter: u32,
    pub(crate) flags: u32,
    pub(crate) anisotropy: u32,
    pub(crate) mipmap_filter: u32,
    pub(crate) levels: [f32; 3],
    pub(crate) border: [f32; 4],
    pub(crate) reserved: [u32; 12],
}

/// One side of `CUDA_MEMCPY3D`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct CopySide {
    pub(crate) origin: [u64; 3],
    pub(crate) level: u64,
    pub(crate) kind: u32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    pub(crate) context: u64,
    pub(crate) pitch: u64,
    pub(crate) height: u64,
}

/// `CUDA_MEMCPY3D`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct BoxCopy {
    pub(crate) from: CopySide,
    pub(crate) to: CopySide,
    pub(crate) extent: [u64; 3],
}

/// `CUmemcpy3DOperand`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct BatchOperand {
    pub(crate) kind: u64,
    pub(crate) words: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct BatchCopy {
    pub(crate) from: BatchOperand,
    pub(crate) to: BatchOperand,
    pub(crate) extent: [u64; 3],
    pub(crate) order: u32,
    pub(crate) flags: u32,
}

unsafe extern "C" {
    pub(crate) fn cuArray3DCreate_v2(array: *mut u64, description: *const ArrayDescription) -> u32;
    pub(crate) fn cuArray3DGetDescriptor_v2(description: *mut ArrayDescription, array: u64) -> u32;
    pub(crate) fn cuArrayDestroy(array: u64) -> u32;
    pub(crate) fn cuMipmappedArrayCreate(
        array: *mut u64,
        description: *const ArrayDescription,
        levels: u32,
    ) -> u32;
    pub(crate) fn cuMipmappedArrayGetLevel(level: *mut u64, array: u64, number: u32) -> u32;
    pub(crate) fn cuMipmappedArrayDestroy(array: u64) -> u32;
    pub(crate) fn cuTexObjectCreate(
        object: *mut u64,
        resource: *const ResourceDescription,
        texture: *const TextureDescription,
        view: *const c_void,
    ) -> u32;
    pub(crate) fn cuTexObjectDestroy(object: u64) -> u32;
    pub(crate) fn cuTexObjectGetResourceDesc(resource: *mut ResourceDescription, object: u64) -> u32;
    pub(crate) fn cuSurfObjectCreate(object: *mut u64, resource: *const ResourceDescription) -> u32;
    pub(crate) fn cuSurfObjectDestroy(object: u64) -> u32;
    pub(crate) fn cuModuleGetTexRef(reference: *mut u64, module: u64, name: *const c_char) -> u32;
    pub(crate) fn cuModuleGetSurfRef(reference: *mut u64, module: u64, name: *const c_char) -> u32;
    pub(crate) fn cuTexRefSetArray(reference: u64, array: u64, flags: u32) -> u32;
    pub(crate) fn cuTexRefSetAddress_v2(
        offset: *mut usize,
        reference: u64,
        address: u64,
        bytes: usize,
    ) -> u32;
    pub(crate) fn cuTexRefSetFlags(reference: u64, flags: u32) -> u32;
    pub(crate) fn cuTexRefSetFormat(reference: u64, format: u32, channels: i32) -> u32;
    pub(crate) fn cuSurfRefSetArray(reference: u64, array: u64, flags: u32) -> u32;
    pub(crate) fn cuMemcpyHtoA_v2(to: u64, offset: u64, from: *const c_void, bytes: u64) -> u32;
    pub(crate) fn cuMemcpyAtoH_v2(to: *mut c_void, from: u64, offset: u64, bytes: u64) -> u32;
    pub(crate) fn cuMemcpyDtoA_v2(to: u64, offset: u64, from: u64, bytes: u64) -> u32;
    pub(crate) fn cuMemcpyAtoD_v2(to: u64, from: u64, offset: u64, bytes: u64) -> u32;
    pub(crate) fn cuMemcpyAtoA_v2(to: u64, to_offset: u64, from: u64, from_offset: u64, bytes: u64) -> u32;
    pub(crate) fn cuMemcpyHtoAAsync_v2(
        to: u64,
        offset: u64,
        from: *const c_void,
        bytes: u64,
        stream: u64,
    ) -> u32;
    pub(crate) fn cuMemcpy3D_v2(copy: *const BoxCopy) -> u32;
    pub(crate) fn cuMemcpy3DBatchAsync_v2(
        count: usize,
        copies: *const BatchCopy,
        flags: u64,
        stream: u64,
    ) -> u32;
    pub(crate) fn cuMemMapArrayAsync(list: *const c_void, count: u32, stream: u64) -> u32;
    pub(crate) fn cuDeviceGetTexture1DLinearMaxWidth(
        width: *mut u64,
        format: u32,
        channels: u32,
        device: i32,
    ) -> u32;
}

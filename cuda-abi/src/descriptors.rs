//! Structures of the header that describe arrays, textures, surfaces and views.

use crate::sys;

/// Asserts that a structure has the size of the header's.
macro_rules! same_size {
    ($($own:ty = $header:ident),* $(,)?) => {
        $(const _: () = assert!(
            size_of::<$own>() == size_of::<sys::$header>() && align_of::<$own>() == align_of::<sys::$header>()
        );)*
    };
}

same_size! {
    ArrayDescriptor = CUDA_ARRAY_DESCRIPTOR,
    Array3DDescriptor = CUDA_ARRAY3D_DESCRIPTOR,
    ResourceDescriptor = CUDA_RESOURCE_DESC,
    TextureDescriptor = CUDA_TEXTURE_DESC,
    ViewDescriptor = CUDA_RESOURCE_VIEW_DESC,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ArrayDescriptor {
    /// Elements of a row.
    pub width: u64,
    /// Rows; 0 for one dimension.
    pub height: u64,
    /// `CUarray_format`.
    pub format: u32,
    /// Components of an element.
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Array3DDescriptor {
    /// Elements of a row.
    pub width: u64,
    /// Rows; 0 for one dimension.
    pub height: u64,
    /// Slices or layers; 0 for neither.
    pub depth: u64,
    /// `CUarray_format`.
    pub format: u32,
    /// Components of an element.
    pub channels: u32,
    /// `CUDA_ARRAY3D_*`.
    pub flags: u32,
}

impl From<ArrayDescriptor> for Array3DDescriptor {
    fn from(array: ArrayDescriptor) -> Array3DDescriptor {
        let ArrayDescriptor { width, height, format, channels } = array;
        Array3DDescriptor { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl From<Array3DDescriptor> for ArrayDescriptor {
    fn from(array: Array3DDescriptor) -> ArrayDescriptor {
        let Array3DDescriptor { width, height, format, channels, .. } = array;
        ArrayDescriptor { width, height, format, channels }
    }
}

/// `CU_RESOURCE_TYPE_ARRAY`, `…_MIPMAPPED_ARRAY`, `…_LINEAR` and `…_PITCH2D`.
pub mod resource {
    /// One array.
    pub const ARRAY: u32 = 0;
    /// All levels of a mipmapped array.
    pub const MIPMAPPED_ARRAY: u32 = 1;
    /// Elements in one row of memory.
    pub const LINEAR: u32 = 2;
    /// Rows of memory.
    pub const PITCH_2D: u32 = 3;
}

/// `CUDA_RESOURCE_DESC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResourceDescriptor {
    /// `CUresourcetype`.
    pub kind: u32,
    /// The handle of the array, or the address.
    pub object: u64,
    /// Linear and pitched memory: `CUarray_format`.
    pub format: u32,
    /// Linear and pitched memory: components of an element.
    pub channels: u32,
    /// Bytes of linear memory, or elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Bytes between rows.
    pub pitch: u64,
    /// The rest of the header's 128 bytes.
    pub reserved: [u64; 11],
    /// Must be 0.
    pub flags: u32,
}

/// `CUDA_TEXTURE_DESC`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct TextureDescriptor {
    /// `CUaddress_mode` of each dimension.
    pub address_modes: [u32; 3],
    /// `CUfilter_mode`.
    pub filter: u32,
    /// `CU_TRSF_*`.
    pub flags: u32,
    /// The greatest ratio of anisotropic filtering.
    pub max_anisotropy: u32,
    /// `CUfilter_mode` between levels.
    pub mipmap_filter: u32,
    /// Added to a level.
    pub level_bias: f32,
    /// The least level.
    pub min_level: f32,
    /// The greatest level.
    pub max_level: f32,
    /// The colour outside.
    pub border: [f32; 4],
    /// Not used by the header.
    pub reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ViewDescriptor {
    /// `CUresourceViewFormat`.
    pub format: u32,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Slices or layers.
    pub depth: u64,
    /// The most detailed level.
    pub first_level: u32,
    /// The least detailed level.
    pub last_level: u32,
    /// The first layer.
    pub first_layer: u32,
    /// The last layer.
    pub last_layer: u32,
    /// Not used by the header.
    pub reserved: [u32; 16],
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn fields_lie_where_the_header_has_them() {
        assert_eq!(offset_of!(Array3DDescriptor, flags), offset_of!(sys::CUDA_ARRAY3D_DESCRIPTOR, Flags));
        assert_eq!(offset_of!(ResourceDescriptor, object), offset_of!(sys::CUDA_RESOURCE_DESC, res));
        assert_eq!(offset_of!(ResourceDescriptor, flags), offset_of!(sys::CUDA_RESOURCE_DESC, flags));
        assert_eq!(offset_of!(TextureDescriptor, border), offset_of!(sys::CUDA_TEXTURE_DESC, borderColor));
        assert_eq!(
            offset_of!(ViewDescriptor, last_layer),
            offset_of!(sys::CUDA_RESOURCE_VIEW_DESC, lastLayer)
        );
    }
}

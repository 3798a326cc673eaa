//! The list of C functions.

/// Defines the C functions of arrays, textures and surfaces that name no stream: `functions!(define, IMAGES, GRAPHS)` calls the library's macro
/// `define` once with all of them, as `fn name(argument: type, …) { body }`. A body forwards its call to `IMAGES`, the library's
/// [`Images`](crate::Images); `GRAPHS` has the captures, which may forbid it. The types `In` and `Out` are those of the library.
#[macro_export]
macro_rules! functions {
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

//! The functions of the C interface over a driver that only counts.

use std::sync::Mutex;

use sluice_cuda_frontend::ErrorCode;

use super::*;
use crate::limits::Limits;
use crate::shape::{ImageShape, flags};
use crate::texture::Texture;
use sluice_cuda_abi::descriptors::{
    Array3DDescriptor, ArrayDescriptor, ResourceDescriptor, TextureDescriptor, ViewDescriptor, resource,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Error(u32);

impl From<u32> for Error {
    fn from(code: u32) -> Error {
        Error(code)
    }
}

impl ErrorCode for Error {
    const NULL_POINTER: Error = Error(1);
    const NO_ROOM: Error = Error(1);
    const PANIC: Error = Error(999);

    fn code(self) -> u32 {
        self.0
    }
}

const INVALID: Error = Error(1);
const NO_HANDLE: Error = Error(400);
const CAPTURED: Error = Error(900);

/// No capture forbids a call.
fn allowed() -> Answer {
    Ok(())
}

#[derive(Default)]
struct Counts {
    context: u64,
    made: u64,
    ended: Vec<u64>,
    bound: Vec<(u64, bool)>,
    /// The memory of textures has ended.
    lacks_memory: bool,
    /// No reference can be unbound.
    keeps_bound: bool,
}

struct Fake(Mutex<Counts>);

type Answer<T = ()> = std::result::Result<T, Error>;

impl Fake {
    fn next(&self) -> u64 {
        let mut counts = self.0.lock().unwrap();
        counts.made += 1;
        counts.made
    }

    fn end(&self, number: u64) -> Answer {
        self.0.lock().unwrap().ended.push(number);
        Ok(())
    }
}

impl ImageDriver for Fake {
    type Error = Error;
    type Array = u64;
    type Variable = u64;

    fn context(&self) -> Answer<u64> {
        Ok(self.0.lock().unwrap().context)
    }
    fn limits(&self) -> Answer<Limits> {
        Ok(Limits::DATA_CENTRE)
    }
}

impl ArrayDriver for Fake {
    fn create_array(&self, _: &ImageShape, _: Option<u32>) -> Answer<u64> {
        Ok(self.next())
    }
    fn level(&self, of: &ArrayResource<u64>, level: u32) -> Answer<u64> {
        Ok(of.array * 100 + u64::from(level))
    }
    fn destroy_array(&self, array: u64, _: bool) -> Answer {
        self.end(array)
    }
}

impl ObjectDriver for Fake {
    fn create_texture(&self, _: &Texture<u64>) -> Answer<u64> {
        Ok(self.next())
    }
    fn destroy_texture(&self, object: u64) -> Answer {
        self.end(object)
    }
    fn create_surface(&self, _: &ArrayResource<u64>) -> Answer<u64> {
        Ok(self.next())
    }
    fn destroy_surface(&self, object: u64) -> Answer {
        self.end(object)
    }
}

impl ReferenceDriver for Fake {
    fn texture_variable(&self, _: u64, name: &[u8]) -> Answer<u64> {
        if name == b"texture" { Ok(7) } else { Err(Error(500)) }
    }
    fn surface_variable(&self, _: u64, name: &[u8]) -> Answer<u64> {
        if name == b"surface" { Ok(8) } else { Err(Error(500)) }
    }
    fn bind_texture(&self, variable: &u64, texture: Option<&Texture<u64>>) -> Answer {
        let mut counts = self.0.lock().unwrap();
        if texture.is_some() && counts.lacks_memory {
            return Err(INVALID);
        }
        if texture.is_none() && counts.keeps_bound {
            return Err(NO_HANDLE);
        }
        counts.bound.push((*variable, texture.is_some()));
        Ok(())
    }
    fn bind_surface(&self, variable: &u64, array: Option<&ArrayResource<u64>>) -> Answer {
        self.0.lock().unwrap().bound.push((*variable, array.is_some()));
        Ok(())
    }
    fn check_function(&self, function: u64) -> Answer {
        if function == 1 { Ok(()) } else { Err(NO_HANDLE) }
    }
}

fn images() -> Images<Fake> {
    Images::new(Fake(Mutex::default()))
}

#[expect(unsafe_code, reason = "the functions take pointers of a C program")]
fn input<T>(value: &T) -> In<T, Fake> {
    // SAFETY: the tests use the pointer only in the call to which they pass it.
    unsafe { In::<T, Fake>::new(value) }
}

/// Calls a function with a place for its result.
#[expect(unsafe_code, reason = "the functions take pointers of a C program")]
fn result<T: Copy + Default>(call: impl FnOnce(Out<T, Fake>) -> Answer) -> Answer<T> {
    let mut value = T::default();
    // SAFETY: the place outlives the call.
    call(unsafe { Out::<T, Fake>::new(&raw mut value) })?;
    Ok(value)
}

fn plane(flags: u32) -> Array3DDescriptor {
    Array3DDescriptor { width: 16, height: 8, depth: 0, format: 0x20, channels: 1, flags }
}

fn make(images: &Images<Fake>, flags: u32) -> u64 {
    result(|place| images.array_3d_create(place, input(&plane(flags)), allowed)).unwrap()
}

fn over(array: u64) -> ResourceDescriptor {
    ResourceDescriptor { object: array, ..Default::default() }
}

#[test]
fn array_has_the_description_that_made_it_until_it_is_destroyed() {
    let images = images();
    let flat = ArrayDescriptor { width: 5, height: 0, format: 8, channels: 2 };
    let array = result(|place| images.array_create(place, input(&flat), allowed)).unwrap();
    assert_eq!(result(|place| images.array_get_descriptor(place, array)), Ok(flat));
    assert_eq!(result(|place| images.array_3d_get_descriptor(place, array)), Ok(flat.into()));
    let none = result::<[u64; 8]>(|place| images.array_get_deferred(place.cast(), array));
    assert_eq!(none, Err(INVALID));
    assert_eq!(result(|place| images.array_get_plane(place, array, 0)), Err(INVALID));
    assert_eq!(images.array_destroy(array, allowed), Ok(()));
    assert_eq!(images.array_destroy(array, allowed), Err(NO_HANDLE));
    assert_eq!(result(|place| images.array_get_descriptor(place, array)), Err(NO_HANDLE));
    assert_eq!(images.driver().0.lock().unwrap().ended, [1]);
    assert_eq!(images.array_create(Out::<u64, Fake>::missing(), input(&flat), allowed), Err(INVALID));
    assert_eq!(images.driver().0.lock().unwrap().made, 1, "nothing is made without a place for its handle");
}

#[test]
fn level_is_an_array_that_ends_with_its_mipmapped_array() {
    let images = images();
    let made =
        |levels| result(|place| images.mipmapped_array_create(place, input(&plane(0)), levels, allowed));
    let array = made(3).unwrap();
    let level = |level| result(|place| images.mipmapped_array_get_level(place, array, level));
    let second = level(1).unwrap();
    assert_eq!(level(1), Ok(second), "the same array for each call");
    assert_eq!(level(3), Err(INVALID));
    let described: Array3DDescriptor = result(|place| images.array_3d_get_descriptor(place, second)).unwrap();
    assert_eq!((described.width, described.height), (8, 4));
    assert_eq!(images.array(second).unwrap().array, 101);
    assert_eq!(images.array_destroy(second, allowed), Err(NO_HANDLE));
    assert_eq!(images.mipmapped_array_destroy(array, allowed), Ok(()));
    assert!(images.array(second).is_err());
    assert_eq!(level(1), Err(NO_HANDLE));
    assert_eq!(images.driver().0.lock().unwrap().ended, [1]);
}

// Promise: C83
#[test]
fn texture_object_returns_what_it_was_made_of() {
    let images = images();
    let array = make(&images, 0);
    let (resource, texture) = (over(array), TextureDescriptor { flags: 2, ..Default::default() });
    let view = ViewDescriptor { width: 16, height: 8, ..Default::default() };
    let create = |resource: &ResourceDescriptor, view| {
        result(|place| images.tex_object_create(place, input(resource), input(&texture), view))
    };
    let plain = create(&resource, In::<_, Fake>::missing()).unwrap();
    let shown = create(&resource, input(&view)).unwrap();
    assert_eq!(result(|place| images.tex_object_get_resource_desc(place, plain)), Ok(resource));
    assert_eq!(result(|place| images.tex_object_get_texture_desc(place, plain)), Ok(texture));
    assert_eq!(result(|place| images.tex_object_get_resource_view_desc(place, plain)), Err(INVALID));
    assert_eq!(result(|place| images.tex_object_get_resource_view_desc(place, shown)), Ok(view));
    assert_eq!(create(&over(array + 16), In::<_, Fake>::missing()), Err(INVALID));
    let descriptor = |object| result(|place| images.tex_object_get_resource_desc(place, object));
    images.tex_object_destroy(plain).unwrap();
    assert_eq!(descriptor(plain), Err(INVALID));
    assert_eq!(images.tex_object_destroy(plain), Ok(()), "it does nothing");
    images.driver().0.lock().unwrap().context = 5;
    assert_eq!(images.tex_object_destroy(shown), Ok(()), "an object of another context");
    assert_eq!(create(&resource, In::<_, Fake>::missing()), Err(INVALID), "an array of another context");
    images.driver().0.lock().unwrap().context = 0;
    assert_eq!(descriptor(shown), Ok(resource), "it still exists");
}

#[test]
fn surface_object_is_made_of_any_array_without_levels() {
    let images = images();
    let plain = over(make(&images, 0));
    assert!(result(|place| images.surf_object_create(place, input(&plain))).is_ok());
    let resource = over(make(&images, flags::SURFACE));
    let object = result(|place| images.surf_object_create(place, input(&resource))).unwrap();
    assert_eq!(result(|place| images.surf_object_get_resource_desc(place, object)), Ok(resource));
    images.surf_object_destroy(object).unwrap();
    assert_eq!(result(|place| images.surf_object_get_resource_desc(place, object)), Err(INVALID));
    assert_eq!(images.surf_object_destroy(object), Ok(()), "it does nothing");
    let whole = |place| images.mipmapped_array_create(place, input(&plane(flags::SURFACE)), 2, allowed);
    let whole = ResourceDescriptor { kind: resource::MIPMAPPED_ARRAY, ..over(result(whole).unwrap()) };
    assert_eq!(result(|place| images.surf_object_create(place, input(&whole))), Err(INVALID));
}

// Promise: C82
#[test]
fn variable_gets_its_texture_at_each_setter_and_loses_it_with_its_array() {
    let images = images();
    let named =
        |name: &'static [u8]| result(|place| images.module_get_tex_ref(place, 3, input(&name[0]).cast()));
    assert_eq!(named(b"other\0"), Err(Error(500)));
    let reference = named(b"texture\0").unwrap();
    assert_eq!(named(b"texture\0"), Ok(reference));
    let array = make(&images, 0);
    images.tex_ref_set_filter_mode(reference, 1).unwrap();
    images.tex_ref_set_array(reference, array, 1).unwrap();
    assert_eq!(result(|place| images.tex_ref_get_array(place, reference)), Ok(array));
    images.array_destroy(array, allowed).unwrap();
    assert_eq!(result(|place| images.tex_ref_get_array(place, reference)), Err(INVALID));
    let bound = std::mem::take(&mut images.driver().0.lock().unwrap().bound);
    assert_eq!(bound, [(7, true), (7, false)]);
    assert_eq!(images.tex_ref_destroy(reference), Err(INVALID), "a module's");
    assert_eq!(images.param_set_tex_ref(1, -1, reference), Ok(()));
    assert_eq!(images.param_set_tex_ref(1, 0, reference), Err(INVALID));
    assert_eq!(images.param_set_tex_ref(2, -1, reference), Err(NO_HANDLE));
    let own = result(|place| images.tex_ref_create(place)).unwrap();
    assert_eq!(images.param_set_tex_ref(1, -1, own), Err(INVALID), "no kernel can use it");
    images.tex_ref_destroy(own).unwrap();
    images.module_ended(3);
    assert_eq!(images.tex_ref_set_filter_mode(reference, 1), Err(NO_HANDLE));
}

// Promise: C82
#[test]
fn reference_over_ended_memory_can_be_set_and_bound_again() {
    let images = images();
    let reference =
        result(|place| images.module_get_tex_ref(place, 3, input(&b"texture\0"[0]).cast())).unwrap();
    let set = |address| images.tex_ref_set_address(Out::<usize, Fake>::missing(), reference, address, 64);
    set(0x1000).unwrap();
    images.driver().0.lock().unwrap().lacks_memory = true;
    assert_eq!(images.tex_ref_set_format(reference, 8, 1), Ok(()), "the memory is not the setter's");
    assert_eq!(set(0x2000), Err(INVALID));
    assert_eq!(result(|place| images.tex_ref_get_address(place, reference)), Ok(0x1000));
    images.driver().0.lock().unwrap().lacks_memory = false;
    set(0x2000).unwrap();
    assert_eq!(images.driver().0.lock().unwrap().bound, [(7, true), (7, false), (7, true)]);
}

#[test]
fn array_ends_although_a_reference_to_it_cannot_be_unbound() {
    let images = images();
    let texture =
        result(|place| images.module_get_tex_ref(place, 3, input(&b"texture\0"[0]).cast())).unwrap();
    let surface =
        result(|place| images.module_get_surf_ref(place, 3, input(&b"surface\0"[0]).cast())).unwrap();
    let array = make(&images, flags::SURFACE);
    images.tex_ref_set_array(texture, array, 1).unwrap();
    images.surf_ref_set_array(surface, array, 0).unwrap();
    images.driver().0.lock().unwrap().keeps_bound = true;
    assert_eq!(images.array_destroy(array, allowed), Err(NO_HANDLE));
    let counts = images.driver().0.lock().unwrap();
    assert_eq!(counts.ended, [1], "its memory would stay until the context ends");
    assert_eq!(counts.bound, [(7, true), (8, true), (8, false)]);
}

#[test]
fn capture_forbids_to_make_and_to_destroy_arrays() {
    let images = images();
    let array = make(&images, 0);
    let mipmapped =
        result(|place| images.mipmapped_array_create(place, input(&plane(0)), 1, allowed)).unwrap();
    let captured = || Err(CAPTURED);
    assert_eq!(result(|place| images.array_3d_create(place, input(&plane(0)), captured)), Err(CAPTURED));
    assert_eq!(
        result(|place| images.mipmapped_array_create(place, input(&plane(0)), 1, captured)),
        Err(CAPTURED)
    );
    assert_eq!(
        (images.array_destroy(array, captured), images.mipmapped_array_destroy(mipmapped, captured)),
        (Err(CAPTURED), Err(CAPTURED))
    );
    assert!(images.array(array).is_ok());
}

#[test]
fn getters_of_a_reference_return_its_settings() {
    let images = images();
    let reference = result(|place| images.tex_ref_create(place)).unwrap();
    images.tex_ref_set_format(reference, 0x08, 4).unwrap();
    images.tex_ref_set_address_mode(reference, 1, 2).unwrap();
    images.tex_ref_set_mipmap_filter_mode(reference, 1).unwrap();
    images.tex_ref_set_mipmap_level_bias(reference, 0.25).unwrap();
    images.tex_ref_set_mipmap_level_clamp(reference, 1.0, 2.0).unwrap();
    images.tex_ref_set_max_anisotropy(reference, 4).unwrap();
    images.tex_ref_set_flags(reference, 3).unwrap();
    let border = [1.0_f32, 2.0, 3.0, 4.0];
    images.tex_ref_set_border_color(reference, input(&border).cast()).unwrap();
    let missing = Out::<i32, Fake>::missing();
    assert_eq!(result(|place| images.tex_ref_get_format(place, missing, reference)), Ok(8));
    assert_eq!(result(|place| images.tex_ref_get_address_mode(place, reference, 1)), Ok(2));
    assert_eq!(result(|place| images.tex_ref_get_address_mode(place, reference, 3)), Err(INVALID));
    assert_eq!(result(|place| images.tex_ref_get_filter_mode(place, reference)), Ok(0));
    assert_eq!(result(|place| images.tex_ref_get_mipmap_filter_mode(place, reference)), Ok(1));
    assert_eq!(result(|place| images.tex_ref_get_mipmap_level_bias(place, reference)), Ok(0.25));
    assert_eq!(result(|place| images.tex_ref_get_max_anisotropy(place, reference)), Ok(4));
    assert_eq!(result(|place| images.tex_ref_get_flags(place, reference)), Ok(3));
    let read = result::<[f32; 4]>(|place| images.tex_ref_get_border_color(place.cast(), reference));
    assert_eq!(read, Ok(border));
    assert_eq!(result(|place| images.tex_ref_get_address(place, reference)), Err(INVALID));
    assert_eq!(images.tex_ref_set_format(reference, 0x08, -1), Err(INVALID));
    assert_eq!(images.tex_ref_set_filter_mode(reference + 16, 0), Err(NO_HANDLE));
}

#[test]
fn surface_reference_takes_only_arrays_for_surfaces() {
    let images = images();
    let reference =
        result(|place| images.module_get_surf_ref(place, 3, input(&b"surface\0"[0]).cast())).unwrap();
    let (plain, array) = (make(&images, 0), make(&images, flags::SURFACE));
    assert_eq!(images.surf_ref_set_array(reference, plain, 0), Err(INVALID));
    assert_eq!(images.surf_ref_set_array(reference, array, 1), Err(INVALID));
    assert_eq!(result(|place| images.surf_ref_get_array(place, reference)), Err(INVALID));
    images.surf_ref_set_array(reference, array, 0).unwrap();
    assert_eq!(result(|place| images.surf_ref_get_array(place, reference)), Ok(array));
    images.array_destroy(array, allowed).unwrap();
    assert_eq!(images.driver().0.lock().unwrap().bound, [(8, true), (8, false)]);
}

#[test]
fn objects_of_an_ended_context_are_gone() {
    let images = images();
    let array = make(&images, 0);
    let (resource, texture) = (over(array), TextureDescriptor::default());
    let view = In::<ViewDescriptor, Fake>::missing();
    let object =
        result(|place| images.tex_object_create(place, input(&resource), input(&texture), view)).unwrap();
    images.context_ended(9);
    assert!(images.array(array).is_ok());
    images.context_ended(0);
    assert_eq!(images.array(array).map(|_| ()), Err(NO_HANDLE));
    assert_eq!(result(|place| images.tex_object_get_resource_desc(place, object)), Err(INVALID));
    assert_eq!(images.driver().0.lock().unwrap().ended, [0; 0], "the library ends the storage itself");
}

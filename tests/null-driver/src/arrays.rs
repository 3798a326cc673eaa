//! Arrays, with the bytes `0xa5` when they are made, and objects and references that only exist.
//!
//! All arrays of a process have [`MOST`] bytes together. Rows lie behind one another without gaps. An array, or an object, that was
//! destroyed is never freed, so that a call on it is detected. An array with rows of [`TAKES_ONE_COPY`] bytes refuses every copy to it
//! but the first.

use super::{
    Handle, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY, SUCCESS, Status, current, export, give, life, module,
    pointer, put,
};
use crate::life::Life;
use core::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicBool, Ordering},
};
use std::sync::{Mutex, PoisonError};

/// Bytes of all arrays.
const MOST: usize = 64 << 20;
/// Bytes of the rows of an array to which only one copy is possible.
const TAKES_ONE_COPY: usize = 77;
/// Contents of a new array.
const DIRT: u8 = 0xa5;

/// Arrays whose memory is in use.
static LIVE: Mutex<Vec<&'static Array>> = Mutex::new(Vec::new());
/// Texture and surface objects by their numbers, which begin at 1: the lowest that no living object has is given next.
static OBJECTS: Mutex<Vec<&'static Life>> = Mutex::new(Vec::new());

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Descriptor {
    extent: [usize; 3],
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// An array, or a level of one.
pub(super) struct Array {
    life: Life,
    start: u64,
    /// Bytes of a row, and rows of a slice.
    row: usize,
    rows: usize,
    bytes: usize,
    copied: AtomicBool,
}

struct Mipmapped {
    life: Life,
    levels: Vec<Handle>,
}

/// The array of a handle, which a call uses.
pub(super) fn array(handle: Handle) -> &'static Array {
    // SAFETY: a handle that `make` gave; none is ever freed.
    unsafe { &*pointer::<Array>(handle) }
}

fn mipmapped(handle: Handle) -> &'static Mipmapped {
    // SAFETY: a handle that `cuMipmappedArrayCreate` gave; none is ever freed.
    unsafe { &*pointer::<Mipmapped>(handle) }
}

impl Array {
    /// Begins a copy to it, or refuses one.
    pub(super) fn takes_copy(&self) -> bool {
        !self.copied.swap(true, Ordering::Relaxed) || self.row != TAKES_ONE_COPY
    }

    /// The address of a byte of a row in a slice.
    pub(super) fn at(&self, x: usize, y: usize, z: usize) -> u64 {
        let _call = self.life.call("a copy of an array");
        self.start + (x + (z * self.rows + y) * self.row) as u64
    }

    fn end(&self, call: &'static str) {
        self.life.end(call);
        free_ended(&mut LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Frees the memory of arrays that were destroyed, or whose context was.
fn free_ended(live: &mut Vec<&'static Array>) {
    live.retain(|array| {
        let over = array.life.is_over();
        if over {
            // SAFETY: memory of `make` with these bytes; each use is checked before.
            unsafe { libc::munmap(pointer(array.start), array.bytes) };
        }
        !over
    });
}

/// Bytes of a row, rows and slices of a level.
fn sizes(array: &Descriptor, level: u32) -> Option<[usize; 3]> {
    let channel = match array.format {
        0x01 | 0x08 | 0xc0..=0xc2 | 0xc6..=0xc8 => 1,
        0x02 | 0x09 | 0x10 | 0xc3..=0xc5 | 0xc9..=0xcb => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return None,
    };
    let halved = |size: usize| (size >> level).max(1);
    let [width, height, depth] = array.extent;
    let depth = if array.flags & 5 == 0 { halved(depth) } else { depth };
    let row = halved(width).checked_mul(channel)?.checked_mul(array.channels as usize)?;
    (width > 0).then_some([row, halved(height), depth.max(1)])
}

fn make(described: &Descriptor, level: u32) -> Result<Handle, Status> {
    let [row, rows, slices] = sizes(described, level).ok_or(INVALID_VALUE)?;
    let bytes = row.checked_mul(rows).and_then(|slice| slice.checked_mul(slices)).ok_or(OUT_OF_MEMORY)?;
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    free_ended(&mut live);
    if bytes > MOST - live.iter().map(|array| array.bytes).sum::<usize>() {
        return Err(OUT_OF_MEMORY);
    }
    let memory = super::anonymous(core::ptr::null_mut(), bytes, super::ACCESSIBLE, 0);
    if memory == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: fresh memory of these bytes.
    unsafe { memory.cast::<u8>().write_bytes(DIRT, bytes) };
    let start = memory.expose_provenance() as u64;
    let handle =
        give(Array { life: Life::of_current(), start, row, rows, bytes, copied: AtomicBool::new(false) });
    live.push(array(handle));
    Ok(handle)
}

fn reference(place: *mut Handle, owner: Handle, name: *const c_char) -> Status {
    let _call = module(owner).call("the look-up of a reference");
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a C string.
    if unsafe { CStr::from_ptr(name) }.to_bytes().starts_with(b"missing") {
        return NOT_FOUND;
    }
    put(place, owner)
}

/// Makes an object of the current context; returns its number.
fn new_object() -> u64 {
    let life: &'static Life = Box::leak(Box::new(Life::of_current()));
    let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let place = objects.iter().position(|object| object.is_over());
    match place {
        Some(place) => objects[place] = life,
        None => objects.push(life),
    }
    place.unwrap_or(objects.len() - 1) as u64 + 1
}

/// Ends an object; the process ends if the object has ended before.
fn end_object(number: u64, call: &'static str) -> Status {
    if life::current_handle() == 0 {
        return INVALID_VALUE;
    }
    let objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let place = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    let Some(object) = place.and_then(|place| objects.get(place)) else { return INVALID_VALUE };
    object.end(call);
    SUCCESS
}

export! {
    cuArray3DCreate_v2(place: *mut Handle, described: *const Descriptor) {
        let _call = current().call("cuArray3DCreate");
        // SAFETY: the caller passes a descriptor.
        match make(unsafe { &*described }, 0) {
            Ok(handle) => put(place, handle),
            Err(failed) => failed,
        }
    }
    cuArrayDestroy(handle: Handle) {
        array(handle).end("cuArrayDestroy");
        SUCCESS
    }
    cuMipmappedArrayCreate(place: *mut Handle, described: *const Descriptor, levels: c_uint) {
        let _call = current().call("cuMipmappedArrayCreate");
        // SAFETY: the caller passes a descriptor.
        let described = unsafe { &*described };
        let mut made = Vec::new();
        for level in 0..levels {
            match make(described, level) {
                Ok(handle) => made.push(handle),
                Err(failed) => {
                    made.into_iter().for_each(|level| array(level).end("the creation of levels"));
                    return failed;
                }
            }
        }
        put(place, give(Mipmapped { life: Life::of_current(), levels: made }))
    }
    cuMipmappedArrayGetLevel(place: *mut Handle, handle: Handle, level: c_uint) {
        let whole = mipmapped(handle);
        let _call = whole.life.call("cuMipmappedArrayGetLevel");
        match whole.levels.get(level as usize) {
            Some(level) => put(place, *level),
            None => INVALID_VALUE,
        }
    }
    cuMipmappedArrayDestroy(handle: Handle) {
        let whole = mipmapped(handle);
        whole.life.end("cuMipmappedArrayDestroy");
        whole.levels.iter().for_each(|level| array(*level).end("cuMipmappedArrayDestroy"));
        SUCCESS
    }
    cuTexObjectCreate(place: *mut u64, _resource: *const c_void, _sampling: *const c_void, _view: *const c_void) {
        let _call = current().call("cuTexObjectCreate");
        put(place, new_object())
    }
    cuTexObjectDestroy(object: u64) {
        let _call = current().call("cuTexObjectDestroy");
        end_object(object, "cuTexObjectDestroy")
    }
    cuSurfObjectCreate(place: *mut u64, _resource: *const c_void) {
        let _call = current().call("cuSurfObjectCreate");
        put(place, new_object())
    }
    cuSurfObjectDestroy(object: u64) {
        let _call = current().call("cuSurfObjectDestroy");
        end_object(object, "cuSurfObjectDestroy")
    }
    cuModuleGetTexRef(place: *mut Handle, owner: Handle, name: *const c_char) { reference(place, owner, name) }
    cuModuleGetSurfRef(place: *mut Handle, owner: Handle, name: *const c_char) { reference(place, owner, name) }
    cuTexRefSetArray(owner: Handle, handle: Handle, _flags: c_uint) {
        let _call = (module(owner).call("cuTexRefSetArray"), array(handle).life.call("cuTexRefSetArray"));
        SUCCESS
    }
    cuTexRefSetMipmappedArray(owner: Handle, handle: Handle, _flags: c_uint) {
        let _call = (module(owner).call("cuTexRefSetMipmapped"), mipmapped(handle).life.call("cuTexRefSetMipmapped"));
        SUCCESS
    }
    cuTexRefSetAddress_v2(_offset: *mut usize, owner: Handle, _address: u64, _bytes: usize) {
        let _call = module(owner).call("cuTexRefSetAddress");
        SUCCESS
    }
    cuTexRefSetAddress2D_v3(owner: Handle, _described: *const c_void, _address: u64, _pitch: usize) {
        let _call = module(owner).call("cuTexRefSetAddress2D");
        SUCCESS
    }
    cuTexRefSetFormat(owner: Handle, _format: c_uint, _channels: c_int) {
        let _call = module(owner).call("cuTexRefSetFormat");
        SUCCESS
    }
    cuTexRefSetAddressMode(owner: Handle, _dimension: c_int, _mode: c_uint) {
        let _call = module(owner).call("cuTexRefSetAddressMode");
        SUCCESS
    }
    cuTexRefSetFilterMode(owner: Handle, _mode: c_uint) {
        let _call = module(owner).call("cuTexRefSetFilterMode");
        SUCCESS
    }
    cuTexRefSetMipmapFilterMode(owner: Handle, _mode: c_uint) {
        let _call = module(owner).call("cuTexRefSetMipmapFilterMode");
        SUCCESS
    }
    cuTexRefSetMipmapLevelBias(owner: Handle, _bias: f32) {
        let _call = module(owner).call("cuTexRefSetMipmapLevelBias");
        SUCCESS
    }
    cuTexRefSetMipmapLevelClamp(owner: Handle, _least: f32, _most: f32) {
        let _call = module(owner).call("cuTexRefSetMipmapLevelClamp");
        SUCCESS
    }
    cuTexRefSetMaxAnisotropy(owner: Handle, _most: c_uint) {
        let _call = module(owner).call("cuTexRefSetMaxAnisotropy");
        SUCCESS
    }
    cuTexRefSetBorderColor(owner: Handle, _colour: *mut f32) {
        let _call = module(owner).call("cuTexRefSetBorderColor");
        SUCCESS
    }
    cuTexRefSetFlags(owner: Handle, _flags: c_uint) {
        let _call = module(owner).call("cuTexRefSetFlags");
        SUCCESS
    }
    cuSurfRefSetArray(owner: Handle, handle: Handle, _flags: c_uint) {
        let _call = (module(owner).call("cuSurfRefSetArray"), array(handle).life.call("cuSurfRefSetArray"));
        SUCCESS
    }
}

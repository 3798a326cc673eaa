//! Arrays, copies with them, texture and surface objects, and references.

use crate::{
    arbiter::{FakeArbiter, Terms},
    code::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, OUT_OF_MEMORY},
    guest::{ARENA, Arena, Guest, Start, null_driver},
    softgpu::Device,
    streams::{function, image},
};
use sluice_kit::wait::eventually;
use sluice_messages::custody::Growth;
use sluice_protocol::{
    calls::wire,
    field::{ArenaOut, ArenaRowsIn, ArenaRowsOut, DeviceAddress, Mint, Name, Ordinal, Take},
    handle::{Array, Context, Id, MipmappedArray, Module, SurfaceReference, TextureReference},
    image::{ImageResource, ImageView, LinearImage, Sampling},
    limits,
};

const MIB: u64 = 1 << 20;
/// `CU_AD_FORMAT_FLOAT`.
const FLOAT: u32 = 0x20;
const ONE: Id<Array> = Id::<Array>::new(0, 1);
const TWO: Id<Array> = Id::<Array>::new(1, 1);
const WHOLE: Id<MipmappedArray> = Id::<MipmappedArray>::new(0, 1);

fn ready() -> (Guest, Arena) {
    let mut guest = Guest::start();
    guest.begin();
    let arena = guest.attach(1, ARENA, 16 * MIB);
    (guest, arena)
}

fn create(guest: &mut Guest, array: Id<Array>, extent: [u64; 3]) -> u32 {
    create_with(guest, array, extent, 0)
}

fn create_with(guest: &mut Guest, array: Id<Array>, extent: [u64; 3], flags: u32) -> u32 {
    let call = wire::array_create::Args { extent, format: FLOAT, channels: 1, flags, array: Mint(array) };
    guest.call(wire::array_create::CALL, |w| call.put(w)).0
}

fn destroy(guest: &mut Guest, array: Id<Array>) -> u32 {
    guest.call(wire::array_destroy::CALL, |w| wire::array_destroy::Args { array: Take(array) }.put(w)).0
}

fn create_mipmapped(guest: &mut Guest, extent: [u64; 3], levels: u32) -> u32 {
    let call = wire::mipmapped_array_create::Args {
        extent,
        format: FLOAT,
        channels: 1,
        flags: 0,
        levels,
        array: Mint(WHOLE),
    };
    guest.call(wire::mipmapped_array_create::CALL, |w| call.put(w)).0
}

fn destroy_mipmapped(guest: &mut Guest) -> u32 {
    let call = wire::mipmapped_array_destroy::Args { array: Take(WHOLE) };
    guest.call(wire::mipmapped_array_destroy::CALL, |w| call.put(w)).0
}

fn level(guest: &mut Guest, level: u32, array: Id<Array>) -> u32 {
    let call = wire::mipmapped_array_level::Args { whole: WHOLE, level, array: Mint(array) };
    guest.call(wire::mipmapped_array_level::CALL, |w| call.put(w)).0
}

/// Posts a copy of rows from the start of the arena.
fn write(guest: &mut Guest, to: Id<Array>, at: [u32; 3], width: u64, height: u64) -> u64 {
    let from = ArenaRowsIn { address: ARENA, pitch: width, width, height };
    guest.work(wire::memcpy_htoa::CALL, 0, |w| wire::memcpy_htoa::Args { to, at, from }.put(w))
}

/// Copies rows of an array to the arena, and returns them.
fn read(guest: &mut Guest, arena: &Arena, from: Id<Array>, at: [u32; 3], width: u64, height: u64) -> Vec<u8> {
    let to = ArenaRowsOut { address: ARENA + 8 * MIB, pitch: width, width, height };
    let last = guest.work(wire::memcpy_atoh::CALL, 0, |w| wire::memcpy_atoh::Args { to, from, at }.put(w));
    guest.wait(0, last);
    arena.read(8 << 20, usize::try_from(width * height).unwrap())
}

fn pattern(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| u8::try_from((i * 11 + i / 97) % 251).unwrap() + 1).collect()
}

fn texture(guest: &mut Guest, resource: ImageResource) -> Result<u64, u32> {
    let call = wire::texture_create::Args { resource, sampling: Sampling::default(), view: ImageView(None) };
    match guest.call(wire::texture_create::CALL, |w| call.put(w)) {
        (0, fields) => Ok(wire::texture_create::Reply::get(&fields).unwrap().texture),
        (refused, _) => Err(refused),
    }
}

fn end_texture(guest: &mut Guest, texture: u64) -> u32 {
    guest.call(wire::texture_destroy::CALL, |w| wire::texture_destroy::Args { texture }.put(w)).0
}

// Promise: C85
#[test]
fn new_array_has_no_bytes_of_an_earlier_owner() {
    let (guest, arena) = ready();
    zeroes(guest, &arena);
    let mut guest = Guest::with_mapped_runs(0);
    guest.begin();
    let arena = guest.attach(1, ARENA, 16 * MIB);
    zeroes(guest, &arena);
}

/// The driver fills new arrays with a pattern.
fn zeroes(mut guest: Guest, arena: &Arena) {
    // A row, many rows, a row longer than the zeroes that are sent at once, slices, layers.
    let extents =
        [([100, 0, 0], 0), ([100, 300, 0], 0), ([400_000, 3, 0], 0), ([64, 40, 7], 0), ([64, 0, 5], 1)];
    for (extent, flags) in extents {
        assert_eq!(create_with(&mut guest, ONE, extent, flags), 0, "{extent:?}");
        let (width, height) = (extent[0] * 4, extent[1].max(1));
        for slice in 0..u32::try_from(extent[2].max(1)).unwrap() {
            let found = read(&mut guest, arena, ONE, [0, 0, slice], width, height);
            assert!(found.iter().all(|byte| *byte == 0), "{extent:?}, slice {slice}");
        }
        assert_eq!(destroy(&mut guest, ONE), 0);
    }
    assert_eq!(create_mipmapped(&mut guest, [33, 17, 0], 6), 0);
    for at in 0..6 {
        let id = Id::new(at, 1);
        assert_eq!(level(&mut guest, at, id), 0);
        let (width, height) = ((33 >> at).max(1) * 4, (17_u64 >> at).max(1));
        let found = read(&mut guest, arena, id, [0; 3], width, height);
        assert!(found.iter().all(|byte| *byte == 0), "level {at}");
    }
}

// Promise: C86
#[test]
fn copies_with_arrays_move_their_box_only() {
    let (mut guest, arena) = ready();
    assert_eq!(create(&mut guest, ONE, [16, 8, 3]), 0);
    assert_eq!(create(&mut guest, TWO, [16, 8, 3]), 0);
    let data = pattern(64 * 8);
    arena.write(0, &data);
    write(&mut guest, ONE, [0, 0, 1], 64, 8);
    assert_eq!(read(&mut guest, &arena, ONE, [0, 0, 1], 64, 8), data);
    assert!(read(&mut guest, &arena, ONE, [0, 0, 2], 64, 8).iter().all(|byte| *byte == 0));
    // A box of both slices, to another place and another array.
    guest.work(wire::memcpy_atoa::CALL, 0, |w| {
        wire::memcpy_atoa::Args {
            to: TWO,
            to_at: [8, 1, 0],
            from: ONE,
            from_at: [4, 2, 1],
            extent: [12, 3, 2],
        }
        .put(w)
    });
    let found = read(&mut guest, &arena, TWO, [8, 1, 0], 12, 3);
    let part: Vec<u8> = (2..5).flat_map(|row| data[row * 64 + 4..row * 64 + 16].to_vec()).collect();
    assert_eq!(found, part);
    assert!(read(&mut guest, &arena, TWO, [0, 0, 0], 64, 1).iter().all(|byte| *byte == 0));
    assert!(read(&mut guest, &arena, TWO, [20, 1, 0], 44, 7).iter().all(|byte| *byte == 0));
    // Through device memory, with gaps between rows and slices.
    let memory = guest.allocate(4096).unwrap();
    let (address, extent) = (DeviceAddress(memory + 16), [12, 3, 2]);
    guest.work(wire::memcpy_atod::CALL, 0, |w| {
        wire::memcpy_atod::Args { to: address, to_pitch: 40, to_rows: 5, from: TWO, at: [8, 1, 0], extent }
            .put(w)
    });
    guest.work(wire::memcpy_dtoa::CALL, 0, |w| {
        wire::memcpy_dtoa::Args {
            to: ONE,
            at: [0, 4, 0],
            from: address,
            from_pitch: 40,
            from_rows: 5,
            extent,
        }
        .put(w)
    });
    assert_eq!(read(&mut guest, &arena, ONE, [0, 4, 0], 12, 3), part);
    assert_eq!(guest.late_error(0).0, 0);
}

// Promise: C86
#[test]
fn copy_that_names_what_its_session_does_not_have_is_refused() {
    let (mut guest, _arena) = ready();
    assert_eq!(create(&mut guest, ONE, [16, 8, 0]), 0);
    let memory = guest.allocate(4096).unwrap();
    let mut refused = |to, at, from, from_pitch, from_rows, extent| {
        let header = guest.on(wire::memcpy_dtoa::CALL, 0);
        let from = DeviceAddress(from);
        let call = wire::memcpy_dtoa::Args { to, at, from, from_pitch, from_rows, extent };
        guest.ask(header, |w| call.put(w)).0
    };
    assert_eq!(refused(ONE, [0; 3], memory, 64, 8, [64, 8, 1]), 0);
    assert_eq!(refused(ONE, [2, 0, 0], memory, 64, 8, [60, 1, 1]), 0, "parts of elements");
    for array in [TWO, Id::new(0, 2), Id::new(limits::ARRAYS - 1, 1)] {
        assert_eq!(refused(array, [0; 3], memory, 64, 8, [64, 8, 1]), INVALID_HANDLE);
    }
    for (at, pitch, rows, extent) in [
        ([4, 0, 0], 64, 8, [64, 8, 1]),
        ([0, 1, 0], 64, 8, [64, 8, 1]),
        ([0, 0, 1], 64, 8, [64, 8, 1]),
        ([0; 3], 64, 8, [64, 8, 2]),
        ([0; 3], 64, 8, [u64::MAX, 8, 1]),
        ([0; 3], u64::MAX, 8, [64, 8, 1]),
        ([0; 3], 63, 8, [64, 8, 1]),
        ([0; 3], 4096, 8, [64, 2, 1]),
        ([2, 0, 0], 64, 8, [63, 1, 1]),
        ([u32::MAX; 3], 64, 8, [64, 8, 1]),
    ] {
        assert_eq!(refused(ONE, at, memory, pitch, rows, extent), INVALID_VALUE, "{at:?} {pitch} {extent:?}");
    }
    for address in [memory + 4096 - 511, ARENA - 64, 0x1000, u64::MAX] {
        assert_eq!(refused(ONE, [0; 3], address, 64, 8, [64, 8, 1]), INVALID_VALUE, "{address:#x}");
    }
    // Rows of the host that are not the guest's.
    let from = ArenaRowsIn { address: ARENA + 16 * MIB - 64, pitch: 64, width: 64, height: 8 };
    let header = guest.on(wire::memcpy_htoa::CALL, 0);
    let refused = guest.ask(header, |w| wire::memcpy_htoa::Args { to: ONE, at: [0; 3], from }.put(w));
    assert_eq!(refused.0, INVALID_VALUE);
    assert_eq!(guest.sticky(), 0);
}

// Promise: C85
#[test]
fn array_is_granted_and_gives_its_memory_back() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let before = (arbiter.granted_now(), arbiter.shrunk());
    assert_eq!(create(&mut guest, ONE, [1024, 1024, 0]), 0);
    eventually("the end of the grant", || arbiter.grants().1 == 0);
    assert_eq!(arbiter.grants().0.last(), Some(&(Growth::Array as u32)));
    assert!(arbiter.granted_now() >= before.0 + 4 * MIB);
    assert_eq!(create_mipmapped(&mut guest, [1024, 1024, 0], 11), 0);
    assert!(arbiter.granted_now() >= before.0 + 9 * MIB, "all levels");
    assert_eq!(destroy(&mut guest, ONE), 0);
    let call = wire::mipmapped_array_destroy::Args { array: Take(WHOLE) };
    assert_eq!(guest.call(wire::mipmapped_array_destroy::CALL, |w| call.put(w)).0, 0);
    eventually("the memory is given back", || arbiter.granted_now() == before.0);
    // An array that the driver refuses gives its grant back, too: it has no room for 256 MiB of arrays.
    assert_eq!(create(&mut guest, ONE, [8192, 8192, 0]), OUT_OF_MEMORY);
    eventually("the grant is given back", || arbiter.granted_now() == before.0);
}

// Promise: C85
#[test]
fn array_that_needs_more_than_its_bound_is_granted_all_that_is_free() {
    const FREE: u64 = 100 * MIB;
    let arbiter = FakeArbiter::with(Terms { limit: FREE, headroom: FREE, ..Terms::default() });
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    // The null driver then has no room for 60 MiB, although they are granted; twice as much is refused.
    assert_eq!(create(&mut guest, ONE, [2048, 1280, 0]), 0);
    let before = arbiter.grants().0.len();
    assert_eq!(create(&mut guest, TWO, [2048, 7680, 0]), OUT_OF_MEMORY);
    assert_eq!(arbiter.grants().0.len(), before + 2, "its bound, and all that is free");
    assert!((90 * MIB..=FREE).contains(&arbiter.last_grant()), "{}", arbiter.last_grant());
}

// Promise: C85
#[test]
fn array_beyond_the_quota_is_refused_at_once_and_spoils_nothing() {
    let terms = Terms { headroom: 8 * MIB, ..Terms::default() };
    let arbiter = FakeArbiter::with(terms);
    let mut guest = Guest::ready(Start { lenders: vec![arbiter.admit()], ..Start::on(null_driver()) });
    guest.begin();
    let arena = guest.attach(1, ARENA, 16 * MIB);
    let most = limits::ARRAY_EXTENT;
    for extent in [[2048, 2048, 0], [most, most, most], [most, 0, 0]] {
        assert_eq!(create(&mut guest, ONE, extent), OUT_OF_MEMORY, "{extent:?}");
    }
    assert_eq!(create_mipmapped(&mut guest, [1024, 1024, 4], 11), OUT_OF_MEMORY);
    for extent in [[most + 1, 0, 0], [0, 1, 1], [u64::MAX; 3]] {
        assert_eq!(create(&mut guest, ONE, extent), INVALID_VALUE, "{extent:?}");
    }
    assert_eq!(create_with(&mut guest, ONE, [16, 16, 0], 0x40), NOT_SUPPORTED, "sparse");
    assert_eq!(create(&mut guest, ONE, [1024, 1024, 0]), 0, "no error sticks");
    arena.write(0, &pattern(4096));
    write(&mut guest, ONE, [0; 3], 4096, 1);
    assert_eq!(read(&mut guest, &arena, ONE, [0; 3], 4096, 1), pattern(4096));
}

// Promise: C86
#[test]
fn destroyed_array_ends_after_the_copies_that_were_posted_before() {
    let (mut guest, arena) = ready();
    assert_eq!(create_mipmapped(&mut guest, [64, 64, 0], 3), 0);
    assert_eq!(level(&mut guest, 0, ONE), 0);
    assert_eq!(level(&mut guest, 2, TWO), 0);
    assert_eq!(level(&mut guest, 3, Id::new(2, 1)), INVALID_VALUE);
    assert_eq!(level(&mut guest, u32::MAX, Id::new(2, 1)), INVALID_VALUE);
    assert_eq!(destroy(&mut guest, ONE), INVALID_HANDLE, "a level ends with the whole");
    arena.write(0, &pattern(256));
    for _ in 0..200 {
        write(&mut guest, TWO, [0; 3], 64, 4);
    }
    let call = wire::mipmapped_array_destroy::Args { array: Take(WHOLE) };
    assert_eq!(guest.call(wire::mipmapped_array_destroy::CALL, |w| call.put(w)).0, 0);
    for gone in [ONE, TWO] {
        let header = guest.on(wire::memcpy_htoa::CALL, 0);
        let from = ArenaRowsIn { address: ARENA, pitch: 64, width: 64, height: 1 };
        let refused = guest.ask(header, |w| wire::memcpy_htoa::Args { to: gone, at: [0; 3], from }.put(w));
        assert_eq!(refused.0, INVALID_HANDLE);
    }
    assert_eq!(destroy(&mut guest, TWO), INVALID_HANDLE);
    assert_eq!(guest.late_error(0).0, 0);
    assert_eq!(create(&mut guest, ONE, [16, 16, 0]), 0, "the ids of the levels are free");
}

// Promise: C87
#[test]
fn texture_over_memory_that_its_session_does_not_have_is_refused() {
    let (mut guest, _arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let linear =
        |address, length| ImageResource::Linear(LinearImage { address, format: FLOAT, channels: 1, length });
    let pitched = |address, length, height, pitch| ImageResource::Pitched {
        memory: LinearImage { address, format: FLOAT, channels: 1, length },
        height,
        pitch,
    };
    assert!(texture(&mut guest, linear(memory, 4096)).is_ok());
    assert!(texture(&mut guest, pitched(memory, 16, 64, 64)).is_ok());
    assert!(texture(&mut guest, pitched(memory + 32, 8, 64, 64)).is_ok(), "a part of each row");
    for resource in [
        linear(memory, 4097),
        linear(memory + 4, 4096),
        linear(memory + 1, 16),
        linear(memory, 0),
        linear(memory, u64::MAX),
        linear(0x1000, 64),
        linear(u64::MAX - 3, 64),
        pitched(memory, 16, 65, 64),
        pitched(memory, 17, 64, 64),
        pitched(memory, 16, 0, 64),
        pitched(memory, 16, u64::MAX, 64),
        pitched(memory, 16, 3, u64::MAX / 2),
        pitched(memory, u64::MAX / 2, 1, u64::MAX),
        pitched(ARENA - 64, 16, 1, 64),
        ImageResource::Nothing,
    ] {
        assert_eq!(texture(&mut guest, resource), Err(INVALID_VALUE), "{resource:?}");
    }
    for resource in [ImageResource::Array(ONE), ImageResource::Mipmapped(WHOLE)] {
        assert_eq!(texture(&mut guest, resource), Err(INVALID_HANDLE));
    }
    let of_planes = LinearImage { address: memory, format: 0xb0, channels: 3, length: 64 };
    assert_eq!(texture(&mut guest, ImageResource::Linear(of_planes)), Err(INVALID_VALUE));
    assert_eq!(guest.sticky(), 0);
}

// Promise: C87
#[test]
fn object_ends_once_and_only_in_its_context() {
    let (mut guest, _arena) = ready();
    assert_eq!(create(&mut guest, ONE, [16, 16, 0]), 0);
    let of_first = guest.session.context;
    let object = texture(&mut guest, ImageResource::Array(ONE)).unwrap();
    let other = guest.create_context(1, 7).raw();
    guest.session.context = other;
    assert_eq!(end_texture(&mut guest, object), INVALID_VALUE, "an object of another context");
    guest.session.context = of_first;
    for forged in [0, object + 1, u64::MAX] {
        assert_eq!(end_texture(&mut guest, forged), INVALID_VALUE);
    }
    let (result, fields) =
        guest.call(wire::surface_create::CALL, |w| wire::surface_create::Args { array: ONE }.put(w));
    assert_eq!(result, 0);
    let surface = wire::surface_create::Reply::get(&fields).unwrap().surface;
    assert_eq!(end_texture(&mut guest, surface), INVALID_VALUE, "a surface is no texture");
    assert_eq!(destroy(&mut guest, ONE), 0, "an array may end before its objects");
    assert_eq!((end_texture(&mut guest, object), end_texture(&mut guest, object)), (0, INVALID_VALUE));
    let mut end_surface = |surface| {
        guest.call(wire::surface_destroy::CALL, |w| wire::surface_destroy::Args { surface }.put(w)).0
    };
    assert_eq!((end_surface(surface), end_surface(surface)), (0, INVALID_VALUE));
}

// Promise: C87
#[test]
fn descriptors_of_objects_are_granted_by_the_thousand() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let memory = guest.allocate(4096).unwrap();
    let before = arbiter.grants().0.len();
    for _ in 0..2000 {
        let image = LinearImage { address: memory, format: FLOAT, channels: 1, length: 4096 };
        texture(&mut guest, ImageResource::Linear(image)).unwrap();
    }
    assert_eq!(arbiter.grants().0.len(), before + 2);
}

// Promise: C88
#[test]
fn reference_is_bound_by_its_whole_state_and_ends_with_its_module() {
    const MODULE: Id<Module> = Id::<Module>::new(0, 1);
    const TEXTURE: Id<TextureReference> = Id::<TextureReference>::new(0, 1);
    const SURFACE: Id<SurfaceReference> = Id::<SurfaceReference>::new(0, 1);
    let mut guest = Guest::start();
    guest.begin();
    let _arena = image(&guest);
    function(&mut guest, 0, "work");
    assert_eq!(create(&mut guest, ONE, [16, 16, 0]), 0);
    let memory = guest.allocate(4096).unwrap();
    let mut find = |name: &[u8], reference| {
        let call =
            wire::texture_reference::Args { module: MODULE, name: Name(name), reference: Mint(reference) };
        guest.call(wire::texture_reference::CALL, |w| call.put(w)).0
    };
    assert_eq!(find(b"missing", TEXTURE), NOT_FOUND);
    assert_eq!(find(b"picture", TEXTURE), 0, "the id of a look-up that failed is free");
    assert_eq!(find(b"picture", TEXTURE), INVALID_VALUE, "the id is taken");
    let call =
        wire::surface_reference::Args { module: MODULE, name: Name(b"drawn"), reference: Mint(SURFACE) };
    assert_eq!(guest.call(wire::surface_reference::CALL, |w| call.put(w)).0, 0);
    let bind = |guest: &mut Guest, reference, resource| {
        let call = wire::texture_reference_set::Args { reference, resource, sampling: Sampling::default() };
        guest.call(wire::texture_reference_set::CALL, |w| call.put(w)).0
    };
    let linear =
        |length| ImageResource::Linear(LinearImage { address: memory, format: FLOAT, channels: 1, length });
    for resource in [ImageResource::Array(ONE), linear(4096), ImageResource::Nothing] {
        assert_eq!(bind(&mut guest, TEXTURE, resource), 0, "{resource:?}");
    }
    assert_eq!(bind(&mut guest, TEXTURE, linear(4097)), INVALID_VALUE);
    assert_eq!(bind(&mut guest, TEXTURE, ImageResource::Array(TWO)), INVALID_HANDLE);
    assert_eq!(bind(&mut guest, Id::new(1, 1), linear(4096)), INVALID_HANDLE);
    let draw = |guest: &mut Guest, array| {
        let call = wire::surface_reference_set::Args { reference: SURFACE, array };
        guest.call(wire::surface_reference_set::CALL, |w| call.put(w)).0
    };
    assert_eq!((draw(&mut guest, ONE), draw(&mut guest, TWO)), (0, INVALID_HANDLE));
    let unload = wire::module_unload::Args { module: Take(MODULE) };
    assert_eq!(guest.call(wire::module_unload::CALL, |w| unload.put(w)).0, 0);
    assert_eq!(bind(&mut guest, TEXTURE, ImageResource::Array(ONE)), INVALID_HANDLE);
    assert_eq!(draw(&mut guest, ONE), INVALID_HANDLE);
}

// Promise: C85
#[test]
fn array_that_cannot_be_cleared_keeps_its_memory_until_its_context_ends() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let second = guest.create_context(1, 7);
    let before = arbiter.granted_now();
    let first = std::mem::replace(&mut guest.session.context, second.raw());
    // The null driver takes no second copy to an array with rows of 77 bytes.
    let call = wire::array_create::Args {
        extent: [77, 0, 0],
        format: 0x01,
        channels: 1,
        flags: 0,
        array: Mint(ONE),
    };
    assert_eq!(guest.call(wire::array_create::CALL, |w| call.put(w)).0, 0);
    let with_array = arbiter.granted_now();
    assert_eq!(destroy(&mut guest, ONE), OUT_OF_MEMORY);
    assert_eq!(destroy(&mut guest, ONE), INVALID_HANDLE, "it has no name any more");
    // The memory of an array that can be cleared is given back behind that of one that cannot.
    assert_eq!(create(&mut guest, ONE, [16, 16, 0]), 0, "the id is free");
    assert_eq!(destroy(&mut guest, ONE), 0);
    eventually("the memory of the second array is given back", || arbiter.granted_now() <= with_array);
    assert_eq!(arbiter.granted_now(), with_array, "the memory of the first array is not");
    guest.session.context = first;
    let gone = wire::context_destroy::Args { context: second };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    eventually("the first array is given back with its context", || arbiter.granted_now() < before);
}

// Promise: C85
#[test]
fn everything_in_a_context_ends_with_it() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let second = guest.create_context(1, 7);
    let before = arbiter.granted_now();
    let first = guest.session.context;
    guest.session.context = second.raw();
    assert_eq!(create(&mut guest, ONE, [1024, 1024, 0]), 0);
    assert_eq!(create_mipmapped(&mut guest, [64, 64, 0], 3), 0);
    assert_eq!(level(&mut guest, 1, TWO), 0);
    let object = texture(&mut guest, ImageResource::Array(TWO)).unwrap();
    guest.session.context = first;
    let gone = wire::context_destroy::Args { context: second };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    eventually("its arrays are given back with it", || arbiter.granted_now() < before);
    assert_eq!((destroy(&mut guest, ONE), destroy(&mut guest, TWO)), (INVALID_HANDLE, INVALID_HANDLE));
    assert_eq!(end_texture(&mut guest, object), INVALID_VALUE);
    assert_eq!(create(&mut guest, ONE, [16, 16, 0]), 0, "the ids are free");
}

// Promise: C85
#[test]
fn new_array_on_dirty_memory_holds_zeroes() {
    // Fresh memory of this device has the bytes 0xa5, as if another VM had left it.
    let device = Device::small(Terms { limit: 64 * MIB, ..Terms::default() });
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let arena = guest.attach(1, ARENA, 16 * MIB);
    let memory = guest.allocate(4096).unwrap();
    assert_eq!(create(&mut guest, ONE, [1024, 256, 0]), 0);
    let found = read(&mut guest, &arena, ONE, [0; 3], 4096, 256);
    assert!(found.iter().all(|byte| *byte == 0), "an array shows remnants");
    // The same memory without arrays does have them, or else the search would prove nothing.
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        let to = ArenaOut { address: ARENA, bytes: 4096 };
        wire::memcpy_dtoh::Args { to, from: DeviceAddress(memory) }.put(w)
    });
    guest.wait(0, last);
    assert!(arena.read(0, 4096).contains(&0xa5));
}

// Promise: C85
#[test]
fn array_leaves_no_bytes_in_memory_that_its_driver_gives_back() {
    let device = Device::small(Terms { limit: 64 * MIB, ..Terms::default() });
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let arena = guest.attach(1, ARENA, 16 * MIB);
    let secret = [0x5e, 0xc2, 0xe7, 0x99].repeat(1 << 20);
    arena.write(0, &secret);
    assert_eq!(create(&mut guest, ONE, [1024, 1024, 0]), 0);
    let last = write(&mut guest, ONE, [0; 3], 4096, 1024);
    guest.wait(0, last);
    assert_eq!(read(&mut guest, &arena, ONE, [0; 3], 4096, 1024), secret);
    let pattern = secret.first_chunk().unwrap();
    assert_eq!(device.search(pattern), 4 * 65_536, "the array is in the device's memory");
    assert_eq!(destroy(&mut guest, ONE), 0);
    // The worker lives on, so that no arbiter clears its memory.
    assert_eq!(device.search(pattern), 0, "remnants of a destroyed array");
}

// Promise: C85
#[test]
fn names_of_levels_of_a_mipmapped_array_are_bounded() {
    const LEVELS: u32 = 3;
    let (mut guest, arena) = ready();
    for _ in 0..2 {
        assert_eq!(create_mipmapped(&mut guest, [64, 64, 0], LEVELS), 0);
        for index in 0..limits::LEVEL_NAMES {
            assert_eq!(level(&mut guest, index % LEVELS, Id::new(index, 1)), 0, "name {index}");
        }
        let beyond = Id::new(limits::LEVEL_NAMES, 1);
        assert_eq!(level(&mut guest, 0, beyond), OUT_OF_MEMORY);
        assert_eq!(destroy(&mut guest, beyond), INVALID_HANDLE);
        // The names that exist remain, and end with the array.
        let last = Id::new(limits::LEVEL_NAMES - 1, 1);
        assert!(read(&mut guest, &arena, last, [0; 3], 64, 1).iter().all(|byte| *byte == 0));
        assert_eq!(destroy_mipmapped(&mut guest), 0);
        assert_eq!(texture(&mut guest, ImageResource::Array(last)), Err(INVALID_HANDLE));
    }
}

// Promise: C85
#[test]
fn growth_for_an_array_and_its_textures_is_granted_by_the_device_of_their_context() {
    let devices = [FakeArbiter::new(0), FakeArbiter::new(0)];
    let granted = || devices.each_ref().map(FakeArbiter::granted_now);
    let mut guest = Guest::ready(Start {
        lenders: devices.iter().map(FakeArbiter::admit).collect(),
        environment: &[("SLUICE_NULL_DEVICES", "2".as_ref())],
        ..Start::on(null_driver())
    });
    guest.begin();
    let context = Id::<Context>::new(1, 1);
    let call = wire::context_create::Args {
        context: Mint(context),
        device: Ordinal(1),
        flags: 0,
        primary: false,
        stream: 7,
    };
    assert_eq!(guest.call(wire::context_create::CALL, |w| call.put(w)).0, 0);
    let first = std::mem::replace(&mut guest.session.context, context.raw());
    let before = granted();
    assert_eq!(create(&mut guest, ONE, [1024, 1024, 0]), 0);
    let with_array = granted();
    assert_eq!(with_array[0], before[0], "an array of the second device");
    assert!(with_array[1] >= before[1] + 4 * MIB);
    // Calls from a context of the first device about the array of the second.
    guest.session.context = first;
    let asked = devices.each_ref().map(|device| device.grants().0.len());
    texture(&mut guest, ImageResource::Array(ONE)).unwrap();
    let now = devices.each_ref().map(|device| device.grants().0.len());
    assert_eq!(now[0], asked[0], "the first device was asked for descriptors of the second");
    assert_eq!(now[1], asked[1] + 1);
    assert_eq!(destroy(&mut guest, ONE), 0);
    eventually("the array's memory is given back", || granted()[1] + 4 * MIB <= with_array[1]);
    assert_eq!(granted()[0], before[0]);
}

//! Modules, libraries, functions.

use crate::{
    guest::{ARENA, Guest, eventually},
    lender::{Lender, Terms},
    streams::{function, launch, put_launch, ready},
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaAddress, DeviceAddress, Mint, Name, Size, Writer},
    handle::{Context, Function, Id, Module},
};

fn load(guest: &mut Guest, id: Id<Module>, library: bool, bytes: u64) -> u32 {
    let (result, fields) = guest.call(wire::module_load::CALL, |w| {
        let log = ArenaAddress(ARENA + 8192);
        wire::module_load::put(w, Mint(id), library, ArenaAddress(ARENA), Size(bytes), log, Size(256))
    });
    assert_eq!(fields.len(), 8, "the log's length comes in any case");
    result
}

fn find(guest: &mut Guest, module: Id<Module>, id: Id<Function>, name: &str) -> (u32, Vec<u8>) {
    guest.call(wire::module_function::CALL, |w| {
        wire::module_function::put(w, module, Mint(id), Name(name.as_bytes()))
    })
}

#[test]
fn a_function_brings_its_attributes_and_layout() {
    let (mut guest, _arena) = ready();
    for (index, library) in [(0, false), (1, true)] {
        let module = Id::<Module>::new(index, 1);
        assert_eq!(load(&mut guest, module, library, 64), 0);
        let id = Id::<Function>::new(index, 1);
        let (result, fields) = find(&mut guest, module, id, "some_p3");
        assert_eq!(result, 0);
        let reply = wire::module_function::Reply::get(&fields).unwrap();
        assert_eq!(reply.parameters.entries(), [(0, 8), (8, 8), (16, 8)]);
        assert_eq!(reply.attributes.0[0], 1024);
        assert_eq!(reply.attributes.0[16], 24, "bytes of all parameters");
        let sequence = launch(&mut guest, 0, id, &[0; 24]);
        guest.wait(0, sequence);
    }
    let module = Id::<Module>::new(0, 1);
    assert_eq!(find(&mut guest, module, Id::new(5, 1), "missing").0, 500);
    assert_eq!(find(&mut guest, module, Id::new(5, 1), "found").0, 0, "the id of a failure is free");
    assert_eq!(find(&mut guest, module, Id::new(5, 1), "again").0, 1, "that of a success is not");
    assert_eq!(find(&mut guest, Id::new(9, 1), Id::new(6, 1), "x").0, 400, "no such module");
}

#[test]
fn what_is_unloaded_is_gone_with_its_functions() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    let module = Id::<Module>::new(0, 1);
    let (result, fields) =
        guest.call(wire::module_global::CALL, |w| wire::module_global::put(w, module, Name(b"variable")));
    assert_eq!(result, 0);
    let variable = wire::module_global::Reply::get(&fields).unwrap();
    assert_eq!(variable.bytes, 64);
    let write = |guest: &mut Guest| {
        let header = guest.on(wire::fill::CALL, 0);
        guest
            .ask(header, |w| wire::fill::put(w, DeviceAddress(variable.address), 0, 1, 7, variable.bytes, 1))
            .0
    };
    assert_eq!(write(&mut guest), 0);
    let unload =
        |guest: &mut Guest| guest.call(wire::module_unload::CALL, |w| wire::module_unload::put(w, module)).0;
    assert_eq!(unload(&mut guest), 0);
    assert_eq!(unload(&mut guest), 400);
    assert_eq!(write(&mut guest), 1, "its variables are no memory of the session any more");
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(guest.ask(header, |w| put_launch(w, kernel, &[])).0, 400);
}

#[test]
fn images_are_whole_and_hold_no_pointers_of_ours() {
    let (mut guest, arena) = ready();
    let id = Id::<Module>::new(0, 1);
    // A wrapper's pointer would be followed inside the worker.
    let mut wrapper = 0x4662_43b1_u32.to_le_bytes().to_vec();
    wrapper.extend(1_u32.to_le_bytes());
    wrapper.extend(0x40_0000_u64.to_le_bytes());
    arena.write(0, &wrapper);
    assert_eq!(load(&mut guest, id, true, 24), 200);
    // A fatbin that says it is longer than what came.
    let mut fatbin = 0xba55_ed50_u32.to_le_bytes().to_vec();
    fatbin.extend([1, 0, 16, 0]);
    fatbin.extend(4096_u64.to_le_bytes());
    arena.write(0, &fatbin);
    assert_ne!(load(&mut guest, id, true, 64), 0);
    assert_eq!(load(&mut guest, id, true, 8192), 0, "whole now");
    // Outside the arena: refused before anything is copied.
    let (result, _) = guest.call(wire::module_load::CALL, |w| {
        let (image, log) = (ArenaAddress(ARENA + (1 << 20) - 32), ArenaAddress(0));
        wire::module_load::put(w, Mint(Id::new(1, 1)), true, image, Size(64), log, Size(0))
    });
    assert_eq!(result, 1);
}

// Promise: Q30
#[test]
fn an_image_is_compiled_before_leave_to_grow_is_asked_for() {
    const TAKES: u64 = 8 << 20;
    let lender = Lender::new(0);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut modules = (0..).map(|index| Id::<Module>::new(index, 1));
    let mut load = |text: &str| {
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        arena.write(8192, &[0; 256]);
        let (module, bytes) = (modules.next().unwrap(), text.len() as u64 + 1);
        let result = load(&mut guest, module, false, bytes);
        let log = arena.read(8192, 256);
        let end = log.iter().position(|byte| *byte == 0).unwrap();
        (result, String::from_utf8_lossy(&log[..end]).into_owned(), lender.last_grant())
    };
    // Only the compiled image says what it takes, and the driver does not take the text for it.
    let (result, log, granted) = load(&format!(".version 8.0 /* takes {TAKES} unloadable */"));
    assert_eq!((result, log.as_str()), (0, ""));
    assert!((TAKES..TAKES + (1 << 20)).contains(&granted), "{granted}");
    // Where the driver's compiler fails, its answer to the text is the guest's.
    let (result, log, granted) = load(&format!(".version 8.0 /* takes {TAKES} unlinkable */"));
    assert_eq!((result, log.as_str()), (0, ""));
    assert!(granted < 1 << 20, "{granted}");
    let (result, log, _) = load(".version 8.0 /* unlinkable unloadable */");
    assert_eq!((result, log.as_str()), (218, "the text says so"));
}

// Promise: Q30
#[test]
fn images_that_come_and_go_within_the_margin_need_no_message() {
    let lender = Lender::with(Terms { margin: 1 << 20, ..Terms::default() });
    let mut guest = Guest::of(&lender);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load = |generation: u32, text: &str| {
        let module = Id::<Module>::new(0, generation);
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        assert_eq!(load(&mut guest, module, false, text.len() as u64 + 1), 0);
        let unload = |w: &mut Writer<'_>| wire::module_unload::put(w, module);
        assert_eq!(guest.call(wire::module_unload::CALL, unload).0, 0);
    };
    // The margin comes with the context's grant, and would be used up by sixteen of these.
    (1..=100).for_each(|generation| load(generation, ".version 8.0"));
    assert_eq!((lender.grants().0.len(), lender.shrunk()), (1, 0));
    load(101, ".version 8.0 /* takes 4194304 */");
    eventually("a word about more than the margin", || lender.shrunk() == 1);
    assert_eq!(lender.grants().0.len(), 2);
}

// Promise: Q6
#[test]
fn the_heap_of_a_context_is_asked_for_with_the_first_image_that_calls_malloc() {
    const HEAP: u64 = 8 << 20;
    let lender = Lender::new(0);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load_text = |index: u32, library: bool, text: &str| {
        let module = Id::<Module>::new(index, 1);
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        assert_eq!(load(&mut guest, module, library, text.len() as u64 + 1), 0);
        if library {
            assert_eq!(find(&mut guest, module, Id::new(index, 1), "work").0, 0);
        }
        lender.last_grant() >= HEAP
    };
    let calls = ".version 8.0 call (out), malloc, (in);";
    assert!(!load_text(0, false, ".version 8.0"));
    assert!(load_text(1, true, calls));
    assert!(!load_text(2, true, calls), "one heap for all images");
    assert!(!load_text(3, false, calls));
}

// Promise: Q6
#[test]
fn an_image_is_refused_like_a_driver_does_where_there_is_no_room_for_its_heap() {
    let lender = Lender::with(Terms { headroom: 4 << 20, ..Terms::default() });
    let mut guest = Guest::of(&lender);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load_text = |index: u32, text: &str| {
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        load(&mut guest, Id::<Module>::new(index, 1), false, text.len() as u64 + 1)
    };
    assert_eq!(load_text(0, ".version 8.0 call (out), malloc, (in);"), 303);
    assert_eq!(load_text(0, ".version 8.0 /* takes 8388608 */"), 2);
    assert_eq!(load_text(0, ".version 8.0"), 0);
}

#[test]
fn questions_about_functions_are_answered() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    let (result, fields) =
        guest.call(wire::occupancy_blocks::CALL, |w| wire::occupancy_blocks::put(w, kernel, 128, 0, 0));
    assert_eq!((result, wire::occupancy_blocks::Reply::get(&fields).unwrap().blocks), (0, 2));
    let (result, fields) = guest
        .call(wire::function_set_attribute::CALL, |w| wire::function_set_attribute::put(w, kernel, 8, 65536));
    assert_eq!(result, 0);
    assert_eq!(wire::function_set_attribute::Reply::get(&fields).unwrap().attributes.0[0], 1024);
    let missing =
        guest.call(wire::occupancy_shared::CALL, |w| wire::occupancy_shared::put(w, kernel, 1, 128));
    assert_eq!(missing.0, 801, "a driver without the entry point");
    let (result, fields) = guest.call(wire::context_limit::CALL, |w| wire::context_limit::put(w, 0));
    assert_eq!((result, wire::context_limit::Reply::get(&fields).unwrap().value), (0, 1024));
    let (result, _) = guest.call(wire::context_limit::CALL, |w| wire::context_limit::put(w, 99));
    assert_eq!(result, 215);
    let (result, fields) =
        guest.call(wire::context_set_limit::CALL, |w| wire::context_set_limit::put(w, 1, 1 << 21));
    assert_eq!((result, wire::context_set_limit::Reply::get(&fields).unwrap().value), (0, 1 << 20));
}

/// Asks for a function that takes long to be found, and does not wait for it.
fn ask_slowly(guest: &mut Guest, module: Id<Module>, index: u32) {
    let id = Mint(Id::<Function>::new(index, 1));
    guest.post(wire::module_function::CALL, |w| wire::module_function::put(w, module, id, Name(b"slow")));
}

fn destroy_context(guest: &mut Guest) -> u32 {
    let context = Id::<Context>::from_raw(guest.context).unwrap();
    guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::put(w, context)).0
}

// Promise: C51
#[test]
fn a_context_ends_behind_what_was_asked_about_its_modules() {
    let (mut guest, _arena) = ready();
    let (module, late) = (Id::<Module>::new(0, 1), Id::<Module>::new(1, 1));
    assert_eq!(load(&mut guest, module, false, 64), 0);
    let variable = |w: &mut Writer<'_>| wire::module_global::put(w, module, Name(b"variable"));
    ask_slowly(&mut guest, module, 0);
    ask_slowly(&mut guest, module, 1);
    guest.post(wire::module_global::CALL, variable);
    // The driver unloads it with the context before its id can be used.
    guest.post(wire::module_load::CALL, |w| {
        let none = ArenaAddress(0);
        wire::module_load::put(w, Mint(late), false, ArenaAddress(ARENA), Size(64), none, Size(0))
    });
    assert_eq!(destroy_context(&mut guest), 0);
    guest.context = guest.create_context(0, 0).raw();
    for gone in [module, late] {
        assert_eq!(find(&mut guest, gone, Id::new(2, 1), "work").0, 400);
    }
    assert_eq!(load(&mut guest, late, false, 64), 0, "its id is free");
    assert_eq!(find(&mut guest, late, Id::new(2, 1), "work").0, 0);
    assert_eq!(guest.worker.try_wait().unwrap(), None, "the driver saw no call on what was gone");
}

// Promise: C51
#[test]
fn memory_that_comes_too_late_for_its_context_is_freed() {
    let (mut guest, _arena) = ready();
    let before = guest.info();
    for round in 0..20 {
        guest.post(wire::memory_allocate::CALL, |w| wire::memory_allocate::put(w, Size(64 << 20)));
        assert_eq!(destroy_context(&mut guest), 0);
        guest.context = guest.create_context(0, 0).raw();
        assert_eq!(guest.info(), before, "round {round}");
    }
}

// Promise: C52
#[test]
fn variables_that_are_no_device_memory_are_refused() {
    let (mut guest, _arena) = ready();
    for (index, library) in [(0, false), (1, true)] {
        let module = Id::<Module>::new(index, 1);
        assert_eq!(load(&mut guest, module, library, 64), 0);
        let mut ask = |name: &[u8]| {
            let put = |w: &mut Writer<'_>| wire::module_global::put(w, module, Name(name));
            guest.call(wire::module_global::CALL, put).0
        };
        assert_eq!((ask(b"stack"), ask(b"beyond"), ask(b"variable")), (200, 200, 0));
    }
    let header = guest.on(wire::fill::CALL, 0);
    let (result, _) = guest.ask(header, |w| wire::fill::put(w, DeviceAddress(u64::MAX), 0, 1, 7, 0, 1));
    assert_eq!(result, 0, "of nothing");
    let header = guest.on(wire::fill::CALL, 0);
    let (result, _) = guest.ask(header, |w| wire::fill::put(w, DeviceAddress(u64::MAX), 0, 1, 7, 1, 1));
    assert_eq!(result, 1);
}

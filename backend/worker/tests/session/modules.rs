//! Modules, libraries, functions.

use crate::{
    arbiter::{FakeArbiter, Terms},
    code::{
        INVALID_CONTEXT, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED,
        OUT_OF_MEMORY, SHARED_OBJECT_INIT_FAILED, UNSUPPORTED_LIMIT,
    },
    guest::{ARENA, Guest},
    streams::{function, launch, put_launch, ready},
};
use sluice_kit::wait::eventually;
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaText, CarriedOptions, DeviceAddress, ElementSize, Mint, Name, Size, Take, Writer},
    handle::{Context, Function, Id, Module},
    jit::ReportHead,
};
use std::time::{Duration, Instant};

fn load(guest: &mut Guest, id: Id<Module>, library: bool, bytes: u64) -> u32 {
    let (result, _) = guest.call(wire::module_load::CALL, |w| {
        let log = ARENA + 8192;
        wire::module_load::Args {
            module: Mint(id),
            library,
            image: ArenaIn { address: ARENA, bytes },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(256 - ReportHead::BYTES as u64),
            report: ArenaText { address: log, bytes: 256 },
        }
        .put(w)
    });
    result
}

fn find(guest: &mut Guest, module: Id<Module>, id: Id<Function>, name: &str) -> (u32, Vec<u8>) {
    guest.call(wire::module_function::CALL, |w| {
        wire::module_function::Args { module, function: Mint(id), name: Name(name.as_bytes()) }.put(w)
    })
}

#[test]
fn function_lookup_returns_its_attributes_and_layout() {
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
    assert_eq!(find(&mut guest, module, Id::new(5, 1), "missing").0, NOT_FOUND);
    assert_eq!(find(&mut guest, module, Id::new(5, 1), "found").0, 0, "the id of a failure is free");
    assert_eq!(
        find(&mut guest, module, Id::new(5, 1), "again").0,
        INVALID_VALUE,
        "the id of a success is not"
    );
    assert_eq!(
        find(&mut guest, Id::new(9, 1), Id::new(6, 1), "x").0,
        INVALID_HANDLE,
        "there is no such module"
    );
}

#[test]
fn unloaded_module_is_gone_with_its_functions_and_variables() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    let module = Id::<Module>::new(0, 1);
    let (result, fields) = variable(&mut guest, module);
    assert_eq!(result, 0);
    let variable = wire::module_global::Reply::get(&fields).unwrap();
    assert_eq!(variable.bytes, 64);
    let write = |guest: &mut Guest| {
        let header = guest.on(wire::memset::CALL, 0);
        guest
            .ask(header, |w| {
                wire::memset::Args {
                    to: DeviceAddress(variable.address),
                    pitch: 0,
                    element: ElementSize::Byte,
                    value: 7,
                    width: variable.bytes,
                    height: 1,
                }
                .put(w)
            })
            .0
    };
    assert_eq!(write(&mut guest), 0);
    let unload = |guest: &mut Guest| {
        guest.call(wire::module_unload::CALL, |w| wire::module_unload::Args { module: Take(module) }.put(w)).0
    };
    assert_eq!(unload(&mut guest), 0);
    assert_eq!(unload(&mut guest), INVALID_HANDLE);
    assert_eq!(write(&mut guest), INVALID_VALUE, "its variables are no longer memory of the session");
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(guest.ask(header, |w| put_launch(w, kernel, &[])).0, INVALID_HANDLE);
}

#[test]
fn image_that_is_incomplete_or_holds_pointers_is_refused() {
    let (mut guest, arena) = ready();
    let id = Id::<Module>::new(0, 1);
    // The driver would dereference a wrapper's pointer inside the worker.
    let mut wrapper = 0x4662_43b1_u32.to_le_bytes().to_vec();
    wrapper.extend(1_u32.to_le_bytes());
    wrapper.extend(0x40_0000_u64.to_le_bytes());
    arena.write(0, &wrapper);
    assert_eq!(load(&mut guest, id, true, 24), INVALID_IMAGE);
    // A fatbin that declares a larger size than the bytes that came.
    let mut fatbin = 0xba55_ed50_u32.to_le_bytes().to_vec();
    fatbin.extend([1, 0, 16, 0]);
    fatbin.extend(4096_u64.to_le_bytes());
    arena.write(0, &fatbin);
    assert_ne!(load(&mut guest, id, true, 64), 0);
    assert_eq!(load(&mut guest, id, true, 8192), 0, "the image is complete now");
    // Outside the arena: refused before anything is copied.
    let (result, _) = guest.call(wire::module_load::CALL, |w| {
        let (image, log) = (ARENA + (1 << 20) - 32, 0);
        wire::module_load::Args {
            module: Mint(Id::new(1, 1)),
            library: true,
            image: ArenaIn { address: image, bytes: 64 },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(0),
            report: ArenaText { address: log, bytes: 0 },
        }
        .put(w)
    });
    assert_eq!(result, INVALID_VALUE);
    assert_eq!(load(&mut guest, Id::new(1, 1), true, 8192), 0, "its id is free again");
}

#[test]
fn module_id_is_free_again_after_a_load_without_context() {
    let (mut guest, _arena) = ready();
    let (module, context) = (Id::<Module>::new(0, 1), guest.session.context);
    guest.session.context = 0;
    assert_eq!(load(&mut guest, module, false, 64), INVALID_CONTEXT);
    guest.session.context = context;
    assert_eq!(load(&mut guest, module, false, 64), 0);
}

// Promise: Q30
#[test]
fn image_is_compiled_before_a_grant_is_requested() {
    const TAKES: u64 = 8 << 20;
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut modules = (0..).map(|index| Id::<Module>::new(index, 1));
    let mut load = |text: &str| {
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        arena.write(8192, &[0; 256]);
        let (module, bytes) = (modules.next().unwrap(), text.len() as u64 + 1);
        let result = load(&mut guest, module, false, bytes);
        let log = arena.read(8192 + ReportHead::BYTES, 256 - ReportHead::BYTES);
        let end = log.iter().position(|byte| *byte == 0).unwrap();
        (result, String::from_utf8_lossy(&log[..end]).into_owned(), arbiter.last_grant())
    };
    // Only the compiled image declares its size, and the driver does not load the text in its place.
    let (result, log, granted) = load(&format!(".version 8.0 /* takes {TAKES} unloadable */"));
    assert_eq!((result, log.as_str()), (0, ""));
    assert!((TAKES..TAKES + (1 << 20)).contains(&granted), "{granted}");
    // If the driver's compiler fails, the guest gets the result of loading the text.
    let (result, log, granted) = load(&format!(".version 8.0 /* takes {TAKES} unlinkable */"));
    assert_eq!((result, log.as_str()), (0, ""));
    assert!(granted < 1 << 20, "{granted}");
    let (result, log, _) = load(".version 8.0 /* unlinkable unloadable */");
    assert_eq!((result, log.as_str()), (INVALID_PTX, "the result of the text"));
}

// Promise: Q30
#[test]
fn images_loaded_and_unloaded_ask_for_growth_once_per_margin() {
    let arbiter = FakeArbiter::with(Terms { margin: 1 << 20, ..Terms::default() });
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load = |generation: u32, text: &str| {
        let module = Id::<Module>::new(0, generation);
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        assert_eq!(load(&mut guest, module, false, text.len() as u64 + 1), 0);
        let unload = |w: &mut Writer<'_>| wire::module_unload::Args { module: Take(module) }.put(w);
        assert_eq!(guest.call(wire::module_unload::CALL, unload).0, 0);
    };
    // The margin comes with the context's grant, and sixteen of these images would use it up.
    (1..=100).for_each(|generation| load(generation, ".version 8.0"));
    let (asked, reports) = (arbiter.grants().0.len(), arbiter.shrunk());
    assert!((2..=1 + 100 / 15).contains(&asked), "{asked} grants");
    assert!(reports < asked, "reported with a request only: {reports} reports, {asked} grants");
    load(101, ".version 8.0 /* takes 4194304 */");
    eventually("a message about more than the margin", || arbiter.shrunk() > reports);
    assert_eq!(arbiter.grants().0.len(), asked + 1);
}

// Promise: Q67
#[test]
fn small_image_loads_in_100_us_without_a_request_while_there_is_margin() {
    const BYTES: usize = 300;
    const LOADS: u32 = 300;
    const BOUND: Duration = Duration::from_micros(100);
    let arbiter = FakeArbiter::with(Terms { margin: 64 << 20, ..Terms::default() });
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut image = b".version 8.0 //".to_vec();
    image.resize(BYTES - 1, b'-');
    image.push(0);
    arena.write(0, &image);
    let kept = Id::<Module>::new(0, 1);
    assert_eq!(load(&mut guest, kept, false, BYTES as u64), 0);
    let asked = arbiter.grants().0.len();
    let (mut loads, mut others) = (Vec::new(), Vec::new());
    for generation in 1..=LOADS {
        let module = Id::<Module>::new(1, generation);
        let began = Instant::now();
        assert_eq!(load(&mut guest, module, false, BYTES as u64), 0);
        loads.push(began.elapsed());
        let unload = |w: &mut Writer<'_>| wire::module_unload::Args { module: Take(module) }.put(w);
        assert_eq!(guest.call(wire::module_unload::CALL, unload).0, 0);
        // The same thread answers this one, without work.
        let count = |w: &mut Writer<'_>| wire::module_function_count::Args { module: kept }.put(w);
        let began = Instant::now();
        assert_eq!(guest.call(wire::module_function_count::CALL, count).0, 0);
        others.push(began.elapsed());
    }
    assert_eq!(arbiter.grants().0.len(), asked, "the margin is not used up");
    // Other load on the machine lengthens most of them by more than the bound. A request to the arbiter would lengthen each load.
    let shortest = |times: Vec<Duration>| times.into_iter().min().unwrap();
    let (load, other) = (shortest(loads), shortest(others));
    println!("{load:?} for an image, {other:?} for another call to the same thread");
    if cfg!(debug_assertions) {
        return sluice_skip::skip("the time is meaningful only in optimised code");
    }
    assert!(load < other + BOUND, "{load:?} for an image, {other:?} for another call");
}

// Promise: Q6
#[test]
fn heap_of_a_context_is_granted_with_the_first_image_that_calls_malloc() {
    const HEAP: u64 = 8 << 20;
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load_text = |index: u32, library: bool, text: &str| {
        let module = Id::<Module>::new(index, 1);
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        assert_eq!(load(&mut guest, module, library, text.len() as u64 + 1), 0);
        if library {
            assert_eq!(find(&mut guest, module, Id::new(index, 1), "work").0, 0);
        }
        arbiter.last_grant() >= HEAP
    };
    let calls = ".version 8.0 call (out), malloc, (in);";
    assert!(!load_text(0, false, ".version 8.0"));
    assert!(load_text(1, true, calls));
    assert!(!load_text(2, true, calls), "one heap for all images");
    assert!(!load_text(3, false, calls));
}

// Promise: Q6
#[test]
fn image_without_room_for_its_heap_gets_the_code_of_a_driver() {
    let arbiter = FakeArbiter::with(Terms { headroom: 4 << 20, ..Terms::default() });
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let mut load_text = |index: u32, text: &str| {
        arena.write(0, &[text.as_bytes(), b"\0"].concat());
        load(&mut guest, Id::<Module>::new(index, 1), false, text.len() as u64 + 1)
    };
    assert_eq!(load_text(0, ".version 8.0 call (out), malloc, (in);"), SHARED_OBJECT_INIT_FAILED);
    assert_eq!(load_text(0, ".version 8.0 /* takes 8388608 */"), OUT_OF_MEMORY);
    assert_eq!(load_text(0, ".version 8.0"), 0);
}

#[test]
fn query_about_a_function_is_answered() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    let (result, fields) = guest.call(wire::occupancy_blocks::CALL, |w| {
        wire::occupancy_blocks::Args { function: kernel, block: 128, shared: 0, flags: 0 }.put(w)
    });
    assert_eq!((result, wire::occupancy_blocks::Reply::get(&fields).unwrap().blocks), (0, 2));
    let (result, fields) = guest.call(wire::function_set_attribute::CALL, |w| {
        wire::function_set_attribute::Args { function: kernel, attribute: 8, value: 65536 }.put(w)
    });
    assert_eq!(result, 0);
    assert_eq!(wire::function_set_attribute::Reply::get(&fields).unwrap().attributes.0[0], 1024);
    let missing = guest.call(wire::occupancy_shared::CALL, |w| {
        wire::occupancy_shared::Args { function: kernel, blocks: 1, block: 128 }.put(w)
    });
    assert_eq!(missing.0, NOT_SUPPORTED, "a driver without the entry point");
    let (result, fields) =
        guest.call(wire::context_limit::CALL, |w| wire::context_limit::Args { limit: 0 }.put(w));
    assert_eq!((result, wire::context_limit::Reply::get(&fields).unwrap().value), (0, 1024));
    let (result, _) =
        guest.call(wire::context_limit::CALL, |w| wire::context_limit::Args { limit: 99 }.put(w));
    assert_eq!(result, UNSUPPORTED_LIMIT);
    let (result, fields) = guest.call(wire::context_set_limit::CALL, |w| {
        wire::context_set_limit::Args { limit: 1, value: 1 << 21 }.put(w)
    });
    assert_eq!((result, wire::context_set_limit::Reply::get(&fields).unwrap().value), (0, 1 << 20));
}

/// Requests a function whose lookup is slow, without waiting for the answer.
fn ask_slowly(guest: &mut Guest, module: Id<Module>, index: u32) {
    let id = Mint(Id::<Function>::new(index, 1));
    guest.post(wire::module_function::CALL, |w| {
        wire::module_function::Args { module, function: id, name: Name(b"slow") }.put(w)
    });
}

fn destroy_context(guest: &mut Guest) -> u32 {
    let context = Id::<Context>::from_raw(guest.session.context).unwrap();
    guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context }.put(w)).0
}

// Promise: C51
#[test]
fn context_is_destroyed_after_earlier_calls_about_its_modules() {
    let (mut guest, _arena) = ready();
    let (module, late) = (Id::<Module>::new(0, 1), Id::<Module>::new(1, 1));
    assert_eq!(load(&mut guest, module, false, 64), 0);
    let variable = |w: &mut Writer<'_>| wire::module_global::Args { module, name: Name(b"variable") }.put(w);
    ask_slowly(&mut guest, module, 0);
    ask_slowly(&mut guest, module, 1);
    guest.post(wire::module_global::CALL, variable);
    // The driver unloads it with the context before its id can be used.
    guest.post(wire::module_load::CALL, |w| {
        let none = 0;
        wire::module_load::Args {
            module: Mint(late),
            library: false,
            image: ArenaIn { address: ARENA, bytes: 64 },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(0),
            report: ArenaText { address: none, bytes: 0 },
        }
        .put(w)
    });
    assert_eq!(destroy_context(&mut guest), 0);
    guest.session.context = guest.create_context(0, 0).raw();
    for gone in [module, late] {
        assert_eq!(find(&mut guest, gone, Id::new(2, 1), "work").0, INVALID_HANDLE);
    }
    assert_eq!(load(&mut guest, late, false, 64), 0, "its id is free");
    assert_eq!(find(&mut guest, late, Id::new(2, 1), "work").0, 0);
    assert_eq!(guest.worker.try_wait().unwrap(), None, "the driver received no call on a destroyed object");
}

/// Looks up a variable in the guest's current context.
fn look_up(guest: &mut Guest, module: Id<Module>, name: &[u8]) -> (u32, Vec<u8>) {
    guest.call(wire::module_global::CALL, |w| wire::module_global::Args { module, name: Name(name) }.put(w))
}

fn variable(guest: &mut Guest, module: Id<Module>) -> (u32, Vec<u8>) {
    look_up(guest, module, b"variable")
}

/// The result of a `memset` of 64 bytes on the stream in a slot.
fn write(guest: &mut Guest, slot: u32, address: u64) -> u32 {
    let header = guest.on(wire::memset::CALL, slot);
    let (result, _) = guest.ask(header, |w| {
        wire::memset::Args {
            to: DeviceAddress(address),
            pitch: 0,
            element: ElementSize::Byte,
            value: 7,
            width: 64,
            height: 1,
        }
        .put(w)
    });
    result
}

// Promise: C51
#[test]
fn variable_of_a_library_is_refused_after_its_context_is_destroyed() {
    let (mut guest, _arena) = ready();
    let (library, primary) = (Id::<Module>::new(0, 1), guest.session.context);
    assert_eq!(load(&mut guest, library, true, 64), 0);
    guest.session.context = guest.create_context(1, 1).raw();
    let (result, fields) = variable(&mut guest, library);
    assert_eq!(result, 0);
    let address = wire::module_global::Reply::get(&fields).unwrap().address;
    assert_eq!(write(&mut guest, 1, address), 0);
    // The answer to this look-up is due after the context is gone.
    ask_slowly(&mut guest, library, 0);
    guest.post(wire::module_global::CALL, |w| {
        wire::module_global::Args { module: library, name: Name(b"variable") }.put(w)
    });
    assert_eq!(destroy_context(&mut guest), 0);
    guest.session.context = primary;
    assert_eq!(write(&mut guest, 0, address), INVALID_VALUE, "the driver may have reused the address");
    let (result, fields) = variable(&mut guest, library);
    assert_eq!(result, 0, "the library is still loaded");
    let address = wire::module_global::Reply::get(&fields).unwrap().address;
    assert_eq!(write(&mut guest, 0, address), 0, "the variable of another context");
}

// Promise: Q30
#[test]
fn everything_granted_for_a_context_is_given_back_with_it() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let library = Id::<Module>::new(0, 1);
    arena.write(0, b".version 8.0 /* takes 4194304 */\0");
    assert_eq!(load(&mut guest, library, true, 64), 0);
    let primary = guest.session.context;
    let before = arbiter.granted_now();
    for generation in 1..=3 {
        guest.session.context = guest.create_context(1, 1).raw();
        for (index, text) in
            [(1, ".version 8.0 /* takes 8388608 */"), (2, ".version 8.0 call (out), malloc, (in);")]
        {
            arena.write(0, &[text.as_bytes(), b"\0"].concat());
            let module = Id::<Module>::new(index, generation);
            assert_eq!(load(&mut guest, module, false, text.len() as u64 + 1), 0);
        }
        assert_eq!(find(&mut guest, library, Id::new(generation, 1), "work").0, 0);
        let limit = |w: &mut Writer<'_>| wire::context_set_limit::Args { limit: 1, value: 2 << 20 }.put(w);
        assert_eq!(guest.call(wire::context_set_limit::CALL, limit).0, 0);
        assert!(arbiter.granted_now() > before + (16 << 20));
        assert_eq!(destroy_context(&mut guest), 0);
        eventually("the report of every grant", || arbiter.granted_now() == before);
        guest.session.context = primary;
    }
}

// Promise: Q30
#[test]
fn grant_of_a_call_that_fails_is_given_back() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let before = arbiter.granted_now();
    let text = b".version 8.0 /* takes 8388608 unlinkable */ unloadable\0";
    arena.write(0, text);
    assert_eq!(load(&mut guest, Id::new(0, 1), false, text.len() as u64), INVALID_PTX);
    let limit = |w: &mut Writer<'_>| wire::context_set_limit::Args { limit: 99, value: 1 << 20 }.put(w);
    assert_eq!(guest.call(wire::context_set_limit::CALL, limit).0, UNSUPPORTED_LIMIT);
    eventually("the report of both grants", || arbiter.granted_now() == before);
}

// Promise: C51
#[test]
fn memory_allocated_too_late_for_its_context_is_freed() {
    let (mut guest, _arena) = ready();
    let before = guest.info();
    for round in 0..20 {
        guest.post(wire::memory_allocate::CALL, |w| {
            wire::memory_allocate::Args { pool: 0, bytes: Size(64 << 20) }.put(w)
        });
        assert_eq!(destroy_context(&mut guest), 0);
        guest.session.context = guest.create_context(0, 0).raw();
        assert_eq!(guest.info(), before, "round {round}");
    }
}

/// A library has its managed variables by another function of the driver.
// Promise: C128
#[test]
fn managed_variable_is_found_in_a_module_and_in_a_library() {
    let (mut guest, _arena) = ready();
    for (index, library) in [(0, false), (1, true)] {
        let module = Id::<Module>::new(index, 1);
        assert_eq!(load(&mut guest, module, library, 64), 0);
        let mut ask = |name: &[u8]| {
            let (result, fields) = look_up(&mut guest, module, name);
            assert_eq!(result, 0);
            wire::module_global::Reply::get(&fields).unwrap()
        };
        let (managed, other) = (ask(b"managed"), ask(b"variable"));
        assert!(managed.managed && !other.managed, "library: {library}");
        // Both are addresses for the guest from now on.
        for address in [managed.address, other.address] {
            assert_eq!(write(&mut guest, 0, address), 0);
        }
    }
}

// Promise: C52
#[test]
fn variable_outside_device_memory_is_refused() {
    let (mut guest, _arena) = ready();
    for (index, library) in [(0, false), (1, true)] {
        let module = Id::<Module>::new(index, 1);
        assert_eq!(load(&mut guest, module, library, 64), 0);
        let mut ask = |name: &[u8]| look_up(&mut guest, module, name).0;
        assert_eq!((ask(b"stack"), ask(b"beyond"), ask(b"variable")), (INVALID_IMAGE, INVALID_IMAGE, 0));
    }
    let header = guest.on(wire::memset::CALL, 0);
    let (result, _) = guest.ask(header, |w| {
        wire::memset::Args {
            to: DeviceAddress(u64::MAX),
            pitch: 0,
            element: ElementSize::Byte,
            value: 7,
            width: 0,
            height: 1,
        }
        .put(w)
    });
    assert_eq!(result, 0, "an empty range is accepted");
    let header = guest.on(wire::memset::CALL, 0);
    let (result, _) = guest.ask(header, |w| {
        wire::memset::Args {
            to: DeviceAddress(u64::MAX),
            pitch: 0,
            element: ElementSize::Byte,
            value: 7,
            width: 1,
            height: 1,
        }
        .put(w)
    });
    assert_eq!(result, INVALID_VALUE);
}

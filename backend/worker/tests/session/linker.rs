//! Links, and the report of the compiler.

use crate::{
    code::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, OUT_OF_MEMORY},
    guest::{ARENA, Arena, Guest},
    streams::ready,
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, ArenaText, CarriedOptions, Mint, Name, Size, Take, Writer},
    handle::{Context, Id, Link, Module},
    jit::{ReportHead, report_bytes},
    limits,
};

const REPORT: u64 = ARENA + (512 << 10);
const LOG: u64 = 256;
const PTX: u32 = 1;
const FATBINARY: u32 = 2;

fn report() -> ArenaText<{ limits::JIT_REPORT_BYTES }> {
    ArenaText { address: REPORT, bytes: report_bytes(0, LOG) }
}

fn create(guest: &mut Guest, link: Id<Link>, options: &[[u8; 8]]) -> u32 {
    let options = options.concat();
    let put = |w: &mut Writer<'_>| {
        let options = CarriedOptions::new(&options)?;
        let (link, report) = (Mint(link), report());
        wire::link_create::Args { link, options, info: Size(0), error: Size(LOG), report }.put(w)
    };
    guest.call(wire::link_create::CALL, put).0
}

fn add(guest: &mut Guest, link: Id<Link>, kind: u32, bytes: u64, options: &[u8]) -> u32 {
    let put = |w: &mut Writer<'_>| {
        let options = CarriedOptions::new(options)?;
        let input = ArenaIn { address: ARENA, bytes };
        wire::link_add::Args { link, kind, input, name: Name(b"input"), options, report: report() }.put(w)
    };
    guest.call(wire::link_add::CALL, put).0
}

fn complete(guest: &mut Guest, link: Id<Link>) -> Result<u64, u32> {
    let put = |w: &mut Writer<'_>| wire::link_complete::Args { link, report: report() }.put(w);
    match guest.call(wire::link_complete::CALL, put) {
        (0, fields) => Ok(wire::link_complete::Reply::get(&fields).unwrap().bytes),
        (failed, _) => Err(failed),
    }
}

fn image(guest: &mut Guest, link: Id<Link>, offset: u64, bytes: u64) -> u32 {
    let into = ArenaOut { address: ARENA, bytes };
    guest.call(wire::link_image::CALL, |w| wire::link_image::Args { link, offset, into }.put(w)).0
}

fn destroy(guest: &mut Guest, link: Id<Link>) -> u32 {
    guest.call(wire::link_destroy::CALL, |w| wire::link_destroy::Args { link: Take(link) }.put(w)).0
}

/// The report that the worker has written, with its error log.
fn read(arena: &Arena) -> Option<(ReportHead, String)> {
    let at = usize::try_from(REPORT - ARENA).unwrap();
    let bytes = arena.read(at, ReportHead::BYTES + usize::try_from(LOG).unwrap());
    let (head, log) = bytes.split_first_chunk().unwrap();
    let end = log.iter().position(|byte| *byte == 0).expect("a NUL");
    Some((ReportHead::decode(head)?, String::from_utf8_lossy(&log[..end]).into_owned()))
}

// Promise: C56
#[test]
fn link_makes_an_image_that_is_read_in_parts_until_the_link_ends() {
    let (mut guest, arena) = ready();
    let (link, next) = (Id::<Link>::new(0, 1), Id::<Link>::new(0, 2));
    assert_eq!(create(&mut guest, link, &[CarriedOptions::one(2, 0)]), 0);
    assert_eq!(create(&mut guest, next, &[]), INVALID_VALUE, "the id is taken");
    let text = b".version 8.0 /* takes 4096 */\0";
    arena.write(0, text);
    assert_eq!(image(&mut guest, link, 0, 1), INVALID_VALUE, "there is no image yet");
    assert_eq!(add(&mut guest, link, PTX, text.len() as u64, &[]), 0);
    let bytes = complete(&mut guest, link).unwrap();
    let (head, log) = read(&arena).unwrap();
    assert_eq!((f32::from_bits(head.wall_time), log.as_str()), (1.5, ""));
    assert_eq!(image(&mut guest, link, 0, 4), 0);
    assert_eq!(arena.read(0, 4), b"\x7fELF");
    assert_eq!(image(&mut guest, link, bytes - 8, 8), 0);
    for (offset, length) in [(bytes - 8, 9), (bytes + 1, 0), (u64::MAX, 8)] {
        assert_eq!(image(&mut guest, link, offset, length), INVALID_VALUE, "{offset} {length}");
    }
    // The image of a link loads.
    assert_eq!(image(&mut guest, link, 0, bytes), 0);
    let (loaded, _) = guest.call(wire::module_load::CALL, |w| {
        let (module, options) = (Mint(Id::<Module>::new(0, 1)), CarriedOptions::NONE);
        let image = ArenaIn { address: ARENA, bytes };
        let report = ArenaText { address: 0, bytes: 0 };
        wire::module_load::Args {
            module,
            library: false,
            image,
            options,
            info: Size(0),
            error: Size(0),
            report,
        }
        .put(w)
    });
    assert_eq!(loaded, 0);
    assert_eq!(destroy(&mut guest, link), 0);
    assert_eq!(destroy(&mut guest, link), INVALID_HANDLE);
    assert_eq!(complete(&mut guest, link), Err(INVALID_HANDLE));
    assert_eq!(create(&mut guest, next, &[]), 0, "the id is free again");
}

// Promise: C56
#[test]
fn link_survives_its_context() {
    let (mut guest, arena) = ready();
    let link = Id::<Link>::new(0, 1);
    assert_eq!(create(&mut guest, link, &[]), 0);
    let context = Id::<Context>::from_raw(guest.session.context).unwrap();
    let put = |w: &mut Writer<'_>| wire::context_destroy::Args { context }.put(w);
    assert_eq!(guest.call(wire::context_destroy::CALL, put).0, 0);
    guest.session.context = 0;
    arena.write(0, b".version 8.0\0");
    assert_eq!(add(&mut guest, link, PTX, 13, &[]), 0);
    assert!(complete(&mut guest, link).is_ok());
    assert_eq!(destroy(&mut guest, link), 0);
    assert_eq!(create(&mut guest, Id::new(0, 2), &[]), INVALID_CONTEXT);
    assert_eq!(create(&mut guest, Id::new(0, 2), &[]), INVALID_CONTEXT, "its id is free again");
}

// Promise: C56
#[test]
fn log_of_a_failure_is_returned_for_links_modules_and_libraries() {
    let (mut guest, arena) = ready();
    let link = Id::<Link>::new(0, 1);
    assert_eq!(create(&mut guest, link, &[]), 0);
    let text = b".version 8.0 /* unlinkable unloadable */\0";
    arena.write(0, text);
    assert_eq!(add(&mut guest, link, PTX, text.len() as u64, &[]), INVALID_PTX);
    let (head, log) = read(&arena).unwrap();
    assert_eq!((head.error, log.as_str()), (24, "the input is unlinkable"));
    for (index, library) in [(0, false), (1, true)] {
        arena.write(512 << 10, &[0; 256]);
        assert_eq!(read(&arena), None);
        let (result, _) = guest.call(wire::module_load::CALL, |w| {
            let wall_time = CarriedOptions::one(2, 0);
            wire::module_load::Args {
                module: Mint(Id::new(index, 1)),
                library,
                image: ArenaIn { address: ARENA, bytes: text.len() as u64 },
                options: CarriedOptions::new(&wall_time)?,
                info: Size(0),
                error: Size(LOG),
                report: report(),
            }
            .put(w)
        });
        assert_eq!(result, INVALID_PTX);
        let (head, log) = read(&arena).unwrap();
        assert_eq!((head.error, log.as_str()), (23, "the result of the text"), "a library: {library}");
        assert_eq!(f32::from_bits(head.wall_time), 1.5);
    }
}

// Promise: C57
#[test]
fn input_that_the_driver_would_read_beyond_its_end_or_through_pointers_is_refused() {
    let (mut guest, arena) = ready();
    let link = Id::<Link>::new(0, 1);
    assert_eq!(create(&mut guest, link, &[]), 0);
    let mut fatbin = 0xba55_ed50_u32.to_le_bytes().to_vec();
    fatbin.extend([1, 0, 16, 0]);
    fatbin.extend(4096_u64.to_le_bytes());
    arena.write(0, &fatbin);
    assert_ne!(add(&mut guest, link, FATBINARY, 64, &[]), 0);
    assert_eq!(add(&mut guest, link, FATBINARY, 8192, &[]), 0);
    arena.write(0, &0x4662_43b1_u32.to_le_bytes());
    for kind in 0..6 {
        assert_eq!(add(&mut guest, link, kind, 64, &[]), INVALID_IMAGE, "kind {kind}");
    }
    arena.write(0, b".version 8.0\0");
    for kind in [6, u32::MAX] {
        assert_eq!(add(&mut guest, link, kind, 64, &[]), INVALID_VALUE, "kind {kind}");
    }
    assert_eq!(add(&mut guest, link, PTX, 0, &[]), INVALID_VALUE);
    // Buffers, lists of names, and host threads; the first also as an option of a link.
    for option in [3, 5, 17, 25, 34, 36] {
        let options = CarriedOptions::one(option, 64);
        assert_eq!(add(&mut guest, link, PTX, 13, &options), INVALID_VALUE, "option {option}");
        assert_eq!(create(&mut guest, Id::new(1, 1), &[options]), INVALID_VALUE, "option {option}");
    }
    assert_eq!(create(&mut guest, Id::new(1, 1), &[CarriedOptions::one(10, 0)]), INVALID_VALUE, "the driver");
    assert_eq!(add(&mut guest, link, PTX, 13, &CarriedOptions::one(7, 0)), 0);
}

// Promise: C57
#[test]
fn bytes_of_all_links_of_a_session_are_bounded_and_given_back() {
    const EACH: u64 = 64 << 20;
    let mut guest = Guest::start();
    guest.begin();
    let arena = guest.attach(1, ARENA, EACH + (1 << 20));
    arena.write(0, b".version 8.0\0");
    let links: Vec<Id<Link>> = (0..2).map(|index| Id::new(index, 1)).collect();
    let inputs = limits::LINK_BYTES / EACH;
    // The report lies behind the input.
    let report = || ArenaText { address: ARENA + EACH, bytes: report_bytes(0, LOG) };
    let create = |guest: &mut Guest, link| {
        let put = |w: &mut Writer<'_>| {
            let (link, options) = (Mint(link), CarriedOptions::NONE);
            wire::link_create::Args { link, options, info: Size(0), error: Size(LOG), report: report() }
                .put(w)
        };
        guest.call(wire::link_create::CALL, put).0
    };
    let add = |guest: &mut Guest, link| {
        let put = |w: &mut Writer<'_>| {
            let input = ArenaIn { address: ARENA, bytes: EACH };
            let (name, options) = (Name(b""), CarriedOptions::NONE);
            wire::link_add::Args { link, kind: PTX, input, name, options, report: report() }.put(w)
        };
        guest.call(wire::link_add::CALL, put).0
    };
    links.iter().for_each(|link| assert_eq!(create(&mut guest, *link), 0));
    let added =
        (0..inputs).map(|n| add(&mut guest, links[usize::from(n % 2 == 1)])).filter(|code| *code == 0);
    assert_eq!(added.count() as u64, inputs - 1, "the logs count, too");
    assert_eq!(add(&mut guest, links[0]), OUT_OF_MEMORY);
    assert_eq!(destroy(&mut guest, links[1]), 0);
    assert_eq!(add(&mut guest, links[0]), 0);
}

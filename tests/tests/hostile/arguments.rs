//! Calls whose arguments point, count or name beyond their bounds.

use super::guest::{ARENA, Guest, PAGES_BYTES, Put, WINDOW};
use super::scene::Scene;
use anyhow::{Result, ensure};
use sluice_protocol::calls::wire;
use sluice_protocol::field::{
    ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, ArenaText, Bytes, CarriedOptions, DeviceAddress,
    ElementSize, LaunchAttributes, Mint, Ordinal, Size,
};
use sluice_protocol::handle::{self, Id};
use sluice_protocol::limits;
use sluice_tests::direct;

const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;
/// Permitted growth of a worker over all of this: its tables and its driver's memory, nothing a guest chose.
const GROWTH_KIB: u64 = 48 << 10;

// Promise: F6
#[test]
fn pointers_into_the_worker_and_sizes_near_overflow_are_refused() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    let device = guest.settle()?;
    let worker = scene.worker()?;
    let before = direct::private_kibibytes(worker)?;

    // All addresses at which the worker has a mapping: program, heap, stack, libraries, driver memory, the session's page.
    let maps = std::fs::read_to_string(format!("/proc/{worker}/maps"))?;
    let arena = ARENA..ARENA + u64::from(PAGES_BYTES);
    let mut forged: Vec<u64> = maps
        .lines()
        .filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok())
        .filter(|start| !arena.contains(start) && *start / 4096 != device / 4096)
        .collect();
    ensure!(forged.len() > 30, "the worker's mappings:\n{maps}");
    println!("{} mappings of the worker", forged.len());
    forged.extend([0, 8, device - 8, device + 4096, ARENA - 8, arena.end, u64::MAX - 63, u64::MAX]);

    for forged in &forged {
        let forged = *forged;
        let (arena, device) = (ARENA, DeviceAddress(device));
        let cases: [(u16, Put<'_>); 9] = [
            (wire::memcpy_htod::CALL, &|w| {
                wire::memcpy_htod::Args {
                    to: DeviceAddress(forged),
                    from: ArenaIn { address: arena, bytes: 64 },
                }
                .put(w)
            }),
            (wire::memcpy_htod::CALL, &|w| {
                wire::memcpy_htod::Args { to: device, from: ArenaIn { address: forged, bytes: 64 } }.put(w)
            }),
            (wire::memcpy_dtoh::CALL, &|w| {
                wire::memcpy_dtoh::Args { to: ArenaOut { address: forged, bytes: 64 }, from: device }.put(w)
            }),
            (wire::memcpy_dtoh::CALL, &|w| {
                wire::memcpy_dtoh::Args {
                    to: ArenaOut { address: arena, bytes: 64 },
                    from: DeviceAddress(forged),
                }
                .put(w)
            }),
            (wire::memcpy_dtod::CALL, &|w| {
                wire::memcpy_dtod::Args { to: device, from: DeviceAddress(forged), bytes: 64 }.put(w)
            }),
            (wire::memcpy_2d_htod::CALL, &|w| {
                let from = ArenaRowsIn { address: forged, pitch: 64, width: 16, height: 4 };
                wire::memcpy_2d_htod::Args { to: device, to_pitch: 64, from }.put(w)
            }),
            (wire::memcpy_2d_dtoh::CALL, &|w| {
                let to = ArenaRowsOut { address: forged, pitch: 64, width: 16, height: 4 };
                wire::memcpy_2d_dtoh::Args { to, from: device, from_pitch: 64 }.put(w)
            }),
            (wire::memcpy_2d_dtod::CALL, &|w| {
                let (to, from) = (DeviceAddress(forged), device);
                wire::memcpy_2d_dtod::Args { to, to_pitch: 64, from, from_pitch: 64, width: 16, height: 4 }
                    .put(w)
            }),
            (wire::memset::CALL, &|w| {
                wire::memset::Args {
                    to: DeviceAddress(forged),
                    pitch: 64,
                    element: ElementSize::Word,
                    value: 7,
                    width: 16,
                    height: 4,
                }
                .put(w)
            }),
        ];
        for (number, (call, put)) in cases.into_iter().enumerate() {
            let result = guest.work(call, put)?;
            ensure!(result == INVALID_VALUE, "{forged:#x}, case {number}: {result}");
        }
        let module = Id::<handle::Module>::new(1, 1);
        let log = forged;
        let result = guest.ask(wire::module_load::CALL, &|w| {
            wire::module_load::Args {
                module: Mint(module),
                library: true,
                image: ArenaIn { address: log, bytes: 64 },
                options: CarriedOptions::NONE,
                info: Size(0),
                error: Size(0),
                report: ArenaText { address: arena, bytes: 64 },
            }
            .put(w)
        })?;
        ensure!(result == INVALID_VALUE, "image at {forged:#x}: {result}");
        let result = guest.ask(wire::module_load::CALL, &|w| {
            wire::module_load::Args {
                module: Mint(module),
                library: false,
                image: ArenaIn { address: arena, bytes: 4096 },
                options: CarriedOptions::NONE,
                info: Size(0),
                error: Size(0),
                report: ArenaText { address: log, bytes: 64 },
            }
            .put(w)
        })?;
        ensure!(result == INVALID_VALUE, "log at {forged:#x}: {result}");
        let result = guest.ask(wire::module_function_name::CALL, &|w| {
            wire::module_function_name::Args {
                module: Id::new(0, 1),
                index: 0,
                into: ArenaOut { address: log, bytes: 64 },
            }
            .put(w)
        })?;
        ensure!(result == INVALID_VALUE, "name to {forged:#x}: {result}");
        let free = guest.ask(wire::memory_free::CALL, &|w| {
            wire::memory_free::Args { address: DeviceAddress(forged) }.put(w)
        })?;
        ensure!(free == INVALID_VALUE, "free of {forged:#x}: {free}");
    }

    let huge = [u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 63) + 1, 1 << 48, u64::MAX / 4 + 1, 4097, 1 << 32];
    for size in huge {
        let (from, to) = (ARENA, DeviceAddress(device));
        let cases: [(u16, Put<'_>); 8] = [
            (wire::memcpy_htod::CALL, &|w| {
                wire::memcpy_htod::Args { to, from: ArenaIn { address: from, bytes: size } }.put(w)
            }),
            (wire::memcpy_dtoh::CALL, &|w| {
                wire::memcpy_dtoh::Args { to: ArenaOut { address: from, bytes: size }, from: to }.put(w)
            }),
            (wire::memcpy_dtod::CALL, &|w| wire::memcpy_dtod::Args { to, from: to, bytes: size }.put(w)),
            (wire::memcpy_2d_htod::CALL, &|w| {
                let from = ArenaRowsIn { address: from, pitch: 64, width: 16, height: size };
                wire::memcpy_2d_htod::Args { to, to_pitch: size, from }.put(w)
            }),
            (wire::memcpy_2d_htod::CALL, &|w| {
                let from = ArenaRowsIn { address: from, pitch: size, width: size, height: 2 };
                wire::memcpy_2d_htod::Args { to, to_pitch: 64, from }.put(w)
            }),
            (wire::memcpy_2d_dtoh::CALL, &|w| {
                let rows = ArenaRowsOut { address: from, pitch: size, width: 1, height: size };
                wire::memcpy_2d_dtoh::Args { to: rows, from: to, from_pitch: size }.put(w)
            }),
            (wire::memset::CALL, &|w| {
                wire::memset::Args {
                    to,
                    pitch: 0,
                    element: ElementSize::Word,
                    value: 0,
                    width: size,
                    height: 1,
                }
                .put(w)
            }),
            (wire::memset::CALL, &|w| {
                wire::memset::Args {
                    to,
                    pitch: size,
                    element: ElementSize::Byte,
                    value: 0,
                    width: 1,
                    height: size,
                }
                .put(w)
            }),
        ];
        for (number, (call, put)) in cases.into_iter().enumerate() {
            let result = guest.work(call, put)?;
            ensure!(result == INVALID_VALUE, "size {size:#x}, case {number}: {result}");
        }
    }
    // Allocations larger than any device, and windows over existing mappings.
    for bytes in [1 << 40, limits::ALLOCATION_BYTES] {
        let result = guest.ask(wire::memory_allocate::CALL, &|w| {
            wire::memory_allocate::Args { pool: 0, bytes: Size(bytes) }.put(w)
        })?;
        ensure!(result == 2, "allocating {bytes:#x}: {result}");
    }
    for base in [0, 0x7300_0000_0000, 0x7f00_0000_0000, u64::MAX << 21, WINDOW, WINDOW + 4096, ARENA] {
        let result = guest.ask(wire::window_reserve::CALL, &|w| {
            wire::window_reserve::Args { base, bytes: Size(2 << 20) }.put(w)
        })?;
        ensure!(result != 0, "a window at {base:#x}");
    }
    // The session still works.
    let result = guest.work(wire::memcpy_htod::CALL, &|w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA, bytes: 4096 } }
            .put(w)
    })?;
    ensure!(result == 0, "a lawful copy afterwards: {result}");
    let after = direct::private_kibibytes(worker)?;
    println!("worker: {before} KiB before, {after} KiB after");
    ensure!(after < before + GROWTH_KIB, "the worker grew from {before} to {after} KiB");
    drop(guest);
    scene.unharmed()
}

// Promise: C12
#[test]
fn launches_streams_and_objects_beyond_their_bounds_are_refused() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    guest.settle()?;
    let worker = scene.worker()?;
    let before = direct::private_kibibytes(worker)?;
    let function = Id::<handle::Function>::new(0, 1);
    let launch = |guest: &mut Guest, function, grid, block, parameters: &[u8], attributes: &[u8]| {
        guest.work(wire::launch::CALL, &|w| {
            wire::launch::Args {
                function,
                grid,
                block,
                shared: 0,
                cooperative: false,
                attributes: LaunchAttributes(attributes),
                parameters: Bytes(parameters),
            }
            .put(w)
        })
    };
    ensure!(launch(&mut guest, function, [1; 3], [1; 3], &[0; 12], &[])? == 0, "a lawful launch");
    for length in [0, 1, 8, 11, 13, 4096, limits::PARAMETER_BYTES] {
        let result = launch(&mut guest, function, [1; 3], [1; 3], &vec![0xff; length], &[])?;
        ensure!(result != 0, "{length} bytes of parameters");
    }
    for (grid, block) in
        [([0, 1, 1], [1; 3]), ([1; 3], [0; 3]), ([u32::MAX; 3], [1; 3]), ([1; 3], [u32::MAX; 3])]
    {
        let result = launch(&mut guest, function, grid, block, &[0; 12], &[])?;
        ensure!(result != 0, "grid {grid:?} of {block:?}");
    }
    for stale in [Id::new(0, 2), Id::new(1, 1), Id::new(limits::FUNCTIONS - 1, 1)] {
        let result = launch(&mut guest, stale, [1; 3], [1; 3], &[0; 12], &[])?;
        ensure!(result == INVALID_HANDLE, "{stale:?}: {result}");
    }
    for attributes in [1, 71, 73] {
        let result = launch(&mut guest, function, [1; 3], [1; 3], &[0; 12], &vec![0xff; attributes])?;
        ensure!(result != 0, "{attributes} bytes of attributes");
    }

    // Streams: one per slot, until the slots are used up.
    let mut streams = 1;
    for slot in 1..limits::STREAMS {
        let stream = Mint(Id::<handle::Stream>::new(slot, 1));
        let made = guest.ask(wire::stream_create::CALL, &|w| {
            wire::stream_create::Args { stream, slot, flags: 1, priority: 0 }.put(w)
        })?;
        ensure!(made == 0, "stream {slot}: {made}");
        streams += 1;
    }
    println!("{streams} streams");
    for slot in [0, 1, limits::STREAMS - 1, limits::STREAMS, u32::MAX] {
        let stream = Mint(Id::<handle::Stream>::new(0, 1));
        let made = guest.ask(wire::stream_create::CALL, &|w| {
            wire::stream_create::Args { stream, slot, flags: 1, priority: 0 }.put(w)
        })?;
        ensure!(made != 0, "a stream in slot {slot}");
    }
    // Events and contexts with used ids, and more than the limit.
    let event = |guest: &mut Guest, index| {
        let event = Mint(Id::<handle::Event>::new(index, 1));
        guest.ask(wire::event_create::CALL, &|w| wire::event_create::Args { event, flags: 0 }.put(w))
    };
    ensure!(event(&mut guest, limits::EVENTS - 1)? == 0, "the last event");
    ensure!(event(&mut guest, limits::EVENTS - 1)? != 0, "an event twice");
    let context = |guest: &mut Guest, index, device| {
        let context = Mint(Id::<handle::Context>::new(index, 1));
        guest.ask(wire::context_create::CALL, &|w| {
            wire::context_create::Args {
                context,
                device: Ordinal(device),
                flags: 0,
                primary: false,
                stream: 5,
            }
            .put(w)
        })
    };
    ensure!(context(&mut guest, 0, 0)? != 0, "a context twice");
    ensure!(context(&mut guest, 2, u32::MAX)? != 0, "a device that does not exist");
    for device in [limits::DEVICES, 1, u32::MAX] {
        let described = guest
            .ask(wire::device_info::CALL, &|w| wire::device_info::Args { device: Ordinal(device) }.put(w))?;
        ensure!(described != 0, "device {device}");
    }
    let after = direct::private_kibibytes(worker)?;
    println!("worker: {before} KiB before, {after} KiB after");
    ensure!(after < before + GROWTH_KIB, "the worker grew from {before} to {after} KiB");
    drop(guest);
    scene.unharmed()
}

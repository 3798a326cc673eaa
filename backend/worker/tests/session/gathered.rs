//! Guest memory that cannot be mapped contiguously: too many pieces, or huge pages.

use crate::{
    code::{INVALID_VALUE, OUT_OF_MEMORY},
    guest::{ARENA, Guest, memory_file},
    streams::{event, stream},
};
use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::{pread, pwrite},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{FromWorker, ToWorker};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, DeviceAddress, ElementSize},
    limits,
    session::{self, Attachment},
};
use sluice_shared_memory::{Run, socket};

const PAGE: u64 = 4096;

/// Guest memory from the guest's side, accessed through its file, because this process could not map so many pieces either.
struct Scattered {
    ram: OwnedFd,
    runs: Vec<Run>,
}

impl Scattered {
    /// Visits the parts of a range: the offset in the file, the bytes before the part, and the bytes of the part.
    fn parts(&self, at: u64, bytes: usize, mut visit: impl FnMut(u64, usize, usize)) {
        let (mut start, end) = (0, at + bytes as u64);
        for run in &self.runs {
            let (from, to) = (at.max(start), end.min(start + run.bytes));
            if from < to {
                let before = usize::try_from(from - at).unwrap();
                visit(run.offset + (from - start), before, usize::try_from(to - from).unwrap());
            }
            start += run.bytes;
        }
    }

    fn write(&self, at: u64, data: &[u8]) {
        self.parts(at, data.len(), |offset, before, part| {
            assert_eq!(pwrite(&self.ram, &data[before..before + part], offset).unwrap(), part);
        });
    }

    fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        self.parts(at, bytes, |offset, before, part| {
            assert_eq!(pread(&self.ram, &mut data[before..before + part], offset).unwrap(), part);
        });
        data
    }
}

/// Every other page of a file, out of order.
fn every_other_page(count: u64) -> Scattered {
    let ram = memory_file(2 * count * PAGE);
    // A prime, so that the steps meet every page once.
    let step = 7919;
    assert!(!count.is_multiple_of(step));
    let runs = (0..count).map(|at| Run { offset: 2 * (at * step % count) * PAGE, bytes: PAGE }).collect();
    Scattered { ram, runs }
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 7 + at / 251 + seed) % 256).unwrap()).collect()
}

fn to_device(guest: &mut Guest, device: u64, at: u64, bytes: u64) -> u64 {
    guest.work(wire::memcpy_htod::CALL, 0, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA + at, bytes } }
            .put(w)
    })
}

fn from_device(guest: &mut Guest, at: u64, device: u64, bytes: u64) -> u64 {
    guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args { to: ArenaOut { address: ARENA + at, bytes }, from: DeviceAddress(device) }
            .put(w)
    })
}

/// Copies in both directions through an arena at `ARENA`, across page ends, many times.
fn carried(guest: &mut Guest, memory: &Scattered, bytes: u64) {
    const BYTES: usize = 1 << 20;
    let length = BYTES as u64;
    let device = guest.allocate(length).unwrap();
    let far = bytes - length - 100;
    memory.write(far, &pattern(BYTES, 1));
    to_device(guest, device, far, length);
    let last = from_device(guest, 77, device, length);
    guest.wait(0, last);
    assert_eq!(memory.read(77, BYTES), pattern(BYTES, 1));
    // Complete copies are in memory at once, in every round.
    for round in 0..200 {
        memory.write(5000, &pattern(9000, round));
        to_device(guest, device, 5000, 9000);
        let last = from_device(guest, 40_000, device, 9000);
        guest.wait(0, last);
        assert_eq!(memory.read(40_000, 9000), pattern(9000, round), "round {round}");
    }
}

// Promise: V15
#[test]
fn arena_of_more_pieces_than_a_process_may_map_is_gathered() {
    const PAGES: u64 = 70_000;
    let memory = every_other_page(PAGES);
    let mut guest = Guest::start();
    guest.begin();
    guest.attach_gathered(1, ARENA, PAGE, &memory.runs, &memory.ram);
    carried(&mut guest, &memory, PAGES * PAGE);
    let between: Vec<u8> = (0..64)
        .flat_map(|page| {
            let mut bytes = [1; 64];
            pread(&memory.ram, &mut bytes, (2 * page + 1) * PAGE).unwrap();
            bytes
        })
        .collect();
    assert!(between.iter().all(|byte| *byte == 0), "neighbouring pages were written");
    let mappings = std::fs::read_to_string(format!("/proc/{}/maps", guest.worker.id())).unwrap();
    assert!(mappings.lines().count() < 1000, "{} mappings", mappings.lines().count());
}

// Promise: V15
#[test]
fn arena_in_place_stays_so_beside_a_gathered_one() {
    let mut guest = Guest::with_mapped_runs(100);
    guest.begin();
    let arena = guest.attach(1, ARENA, 1 << 20);
    let memory = every_other_page(500);
    let bytes = 500 * PAGE;
    guest.send_attach(2, ARENA + (1 << 20), bytes, &memory.runs, &memory.ram, false);
    eventually("an answer", || session::attachment(&guest.words(), 2) == Attachment::Gathered(bytes));
    let (start, across) = ((1 << 20) - 3000, 9000);
    let data = pattern(across, 3);
    arena.write(start, &data[..3000]);
    memory.write(0, &data[3000..]);
    let device = guest.allocate(1 << 20).unwrap();
    let (at, length) = (start as u64, across as u64);
    to_device(&mut guest, device, at, length);
    let last = from_device(&mut guest, at - 1000, device, length);
    guest.wait(0, last);
    assert_eq!(arena.read(start - 1000, 4000), data[..4000]);
    assert_eq!(memory.read(0, 5000), data[4000..]);

    // The device itself accesses contiguous arenas only.
    for (address, answer) in [(ARENA, 0), (ARENA + (1 << 20), INVALID_VALUE), (ARENA + at, INVALID_VALUE)] {
        let header = guest.on(wire::memset::CALL, 0);
        let (result, _) = guest.ask(header, |w| {
            wire::memset::Args {
                to: DeviceAddress(address),
                pitch: 0,
                element: ElementSize::Byte,
                value: 9,
                width: 6000,
                height: 1,
            }
            .put(w)
        });
        assert_eq!(result, answer, "{address:#x}");
    }
}

// Promise: C54
#[test]
fn host_function_finds_the_copies_before_it_in_gathered_memory() {
    const BYTES: usize = 3 * 4096;
    let memory = every_other_page(64);
    let mut guest = Guest::with_mapped_runs(10);
    guest.begin();
    guest.attach_gathered(1, ARENA, PAGE, &memory.runs, &memory.ram);
    stream(&mut guest, 0, 1);
    stream(&mut guest, 1, 2);
    let event = event(&mut guest, 0);
    let device = guest.allocate(BYTES as u64).unwrap();
    let mut latest = session::HostCall::default();
    for round in 0..200 {
        memory.write(0, &pattern(BYTES, round));
        to_device(&mut guest, device, 0, BYTES as u64);
        from_device(&mut guest, 100_000, device, BYTES as u64);
        // The function is in the stream of the copy, or in one that waits for an event behind it.
        let slot = u32::try_from(round % 2).unwrap();
        if slot == 1 {
            guest.work(wire::event_record::CALL, 0, |w| wire::event_record::Args { event }.put(w));
            guest.work(wire::stream_wait::CALL, 1, |w| wire::stream_wait::Args { event }.put(w));
        }
        let last = guest.work(wire::host_call::CALL, slot, |w| wire::host_call::Args { token: 1 }.put(w));
        eventually("the call", || session::host_call(&guest.words()) != latest);
        latest = session::host_call(&guest.words());
        assert_eq!(memory.read(100_000, BYTES), pattern(BYTES, round), "round {round}");
        session::set_host_return(&guest.words(), latest);
        guest.wait(slot, last);
    }
}

// Promise: V15
#[test]
fn private_memory_of_gathered_arenas_is_bounded_and_returned() {
    let mut guest = Guest::with_mapped_runs(0);
    guest.begin();
    let whole = guest.attach(1, ARENA, limits::BOUNCE_BYTES);
    let ram = memory_file(PAGE);
    let run = [Run { offset: 0, bytes: PAGE }];
    let beyond = ARENA + limits::BOUNCE_BYTES;
    guest.send_attach(2, beyond, PAGE, &run, &ram, false);
    eventually("refusal", || session::attachment(&guest.words(), 2) == Attachment::Refused(OUT_OF_MEMORY));
    whole.write(4000, b"across a page's end");
    let device = guest.allocate(PAGE).unwrap();
    to_device(&mut guest, device, 4000, 200);
    let last = from_device(&mut guest, limits::BOUNCE_BYTES - 200, device, 200);
    guest.wait(0, last);
    assert!(
        whole
            .read(usize::try_from(limits::BOUNCE_BYTES).unwrap() - 200, 19)
            .starts_with(b"across a page's end")
    );

    socket::send(&guest.control, &ToWorker::Detach { slot: 1 }.encode(), &[]).unwrap();
    eventually("detachment", || session::attachment(&guest.words(), 1) == Attachment::Detached);
    let header = guest.on(wire::memcpy_htod::CALL, 0);
    let (result, _) = guest.ask(header, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA, bytes: 8 } }
            .put(w)
    });
    assert_eq!(result, INVALID_VALUE, "the range is gone");
    guest.attach(3, ARENA, 1 << 20);
}

// Promise: V15
#[test]
fn windows_stay_inside_guest_memory() {
    let guest = Guest::with_mapped_runs(0);
    let ram = memory_file(100 * PAGE);
    let pages = |first: u64, count: u64| Run { offset: first * PAGE, bytes: count * PAGE };
    // Each case has the extents of its message.
    let cases: [(&[Run], Run, u64); 7] = [
        (&[pages(0, 10)], pages(10, 1), PAGE),
        (&[pages(0, 10), pages(12, 10)], pages(11, 1), PAGE),
        (&[pages(0, 10)], pages(0, 1), 16 * PAGE),
        (&[pages(0, 101)], pages(0, 1), PAGE),
        (&[pages(50, 10), pages(0, 10)], pages(0, 1), PAGE),
        (&[pages(0, 100)], pages(0, 1), 3 * PAGE),
        (&[], pages(0, 1), PAGE),
    ];
    for (slot, (extents, run, granule)) in (1..).zip(cases) {
        guest.send_attach_of(slot, ARENA, PAGE, extents, granule, &[run], &ram, false);
        let FromWorker::Attached { slot: told, error } = guest.told() else {
            panic!("the message is no answer")
        };
        assert_eq!((told, error), (slot, INVALID_VALUE), "{extents:?} {run:?} {granule:#x}");
    }
}

// Promise: V15
#[test]
fn arena_of_pieces_of_huge_pages_is_gathered() {
    const HUGE: u64 = 2 << 20;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(ram) = memfd_create("huge", flags) else {
        sluice_skip::skip("this kernel has no huge pages of 2 MiB");
        return;
    };
    ftruncate(&ram, 4 * HUGE).unwrap();
    // The first reservation of the pages shows whether the host has any.
    let whole = Run { offset: 0, bytes: 4 * HUGE };
    let mapped = sluice_shared_memory::Gathered::map(
        4 * HUGE,
        &[sluice_shared_memory::gathered::Source {
            file: rustix::fd::AsFd::as_fd(&ram),
            extents: &[whole],
            granule: HUGE,
            runs: &[whole],
        }],
        1,
    );
    let Ok(view) = mapped else {
        sluice_skip::skip("this host has no huge pages free (vm.nr_hugepages)");
        return;
    };
    let mut guest = Guest::start();
    guest.begin();
    // Pieces of three huge pages. The first piece begins at a huge page, which the kernel would map in whole.
    let pages = |first: u64, count: u64| Run { offset: first * PAGE, bytes: count * PAGE };
    let runs = [pages(512, 100), pages(0, 3), pages(700, 300), pages(1600, 200)];
    guest.attach_gathered(1, ARENA, HUGE, &runs, &ram);
    let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
    let at = |offset: u64| {
        let mut left = offset;
        let run = runs.iter().find(|run| {
            let here = left < run.bytes;
            if !here {
                left -= run.bytes;
            }
            here
        });
        usize::try_from(run.unwrap().offset + left).unwrap()
    };
    use sluice_protocol::shared::Shared as _;
    let device = guest.allocate(bytes).unwrap();
    for page in 0..bytes / PAGE {
        view.write(at(page * PAGE), &pattern(4096, usize::try_from(page).unwrap()));
    }
    let last = to_device(&mut guest, device, 0, bytes);
    guest.wait(0, last);
    for page in 0..bytes / PAGE {
        view.write(at(page * PAGE), &[0; 4096]);
    }
    let last = from_device(&mut guest, 0, device, bytes);
    guest.wait(0, last);
    for page in 0..bytes / PAGE {
        let mut got = vec![0; 4096];
        view.read(at(page * PAGE), &mut got);
        assert_eq!(got, pattern(4096, usize::try_from(page).unwrap()), "page {page}");
    }
    // Whole huge pages are mapped contiguously like other pages.
    let run = [Run { offset: 3 * HUGE, bytes: HUGE }];
    guest.send_attach_of(2, ARENA + (1 << 30), HUGE, &[whole], HUGE, &run, &ram, false);
    eventually("adoption", || session::attachment(&guest.words(), 2) == Attachment::Adopted(HUGE));
}

//! Addresses and registered host memory.

use serde_json::{Value, json};

use crate::measure::{rounded, timed};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::system::{Area, Pages};
use crate::worker::Worker;

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "reserve-fixed",
        question: "Does cuMemAddressReserve honour a given address?",
        expected: "Yes, where the process has no mapping; also for 512 GiB at 0x7e8000000000.",
        consequence: "A pointer has one value in guest and worker. An address that is not honoured makes both try another window.",
        seconds: 30,
        ask: reserve,
    },
    Question {
        name: "register-pieces",
        question: "Can cuMemHostRegister pin one range that consists of 16,000 mappings of 4 KiB each?",
        expected: "Yes, in below 100 ms.",
        consequence: "Guest pages arrive in such pieces. If it is refused, each contiguous run is registered by itself, or bulk data is staged.",
        seconds: 60,
        ask: pieces,
    },
    Question {
        name: "register-huge-pages",
        question: "Can cuMemHostRegister pin huge pages of 2 MiB, and parts of one?",
        expected: "Yes, both.",
        consequence: "Guests with huge pages need no other path. If parts are refused, registration is rounded to whole pages.",
        seconds: 30,
        ask: huge_pages,
    },
];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn reserve(step: &Step) -> Answer {
    let worker = step.worker()?;
    let spots: [(u64, &[u64]); 6] = [
        (0x7e80_0000_0000, &[2 * MIB, 64 * GIB, 512 * GIB]),
        (0x7000_0000_0000, &[2 * MIB, 64 * GIB, 512 * GIB]),
        (0x2000_0000_0000, &[2 * MIB, 64 * GIB, 512 * GIB]),
        (0x0100_0000_0000, &[2 * MIB, 64 * GIB]),
        (0x0010_0000_0000, &[2 * MIB, 16 * GIB]),
        (0x8000_0000_0000, &[2 * MIB]),
    ];
    for (at, sizes) in spots {
        for bytes in sizes {
            step.note(&format!("{at:#x}+{}MiB", bytes / MIB), place(&worker, at, *bytes))?;
        }
    }
    // A range that the process occupies itself, and one that it occupied.
    let mut area = Area::reserve(64 << 20)?;
    step.note("own_mapping", place(&worker, area.address(), 32 * MIB))?;
    let at = area.address();
    area.release()?;
    step.note("former_mapping", place(&worker, at, 32 * MIB))?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let bytes = 512 * GIB;
    let cuda = worker.cuda();
    let got = cuda.ask("cuMemAddressReserve", |driver| driver.address_reserve(0x7e80_0000_0000, bytes))?;
    let with = std::fs::read_to_string("/proc/self/maps")?;
    let lines: Vec<&str> = with.lines().filter(|line| !maps.contains(line)).take(8).collect();
    step.note("mappings_of_a_reservation", json!({ "at": format!("{got:#x}"), "lines": lines }))
}

/// The address that the driver chose, and whether it is the given one; or its refusal.
fn place(worker: &Worker, at: u64, bytes: u64) -> Value {
    let cuda = worker.cuda();
    match cuda.ask("cuMemAddressReserve", |driver| driver.address_reserve(at, bytes)) {
        Ok(got) => {
            let freed = cuda.code("cuMemAddressFree", |driver| driver.address_free(got, bytes));
            let freed = freed.unwrap_or_else(|stop| stop.to_string());
            json!({ "honoured": got == at, "got": format!("{got:#x}"), "free": freed })
        }
        Err(stop) => json!({ "refused": stop.to_string() }),
    }
}

fn pieces(step: &Step) -> Answer {
    let worker = step.worker()?;
    for count in [100, 1_000, 16_000] {
        let area = Area::pieces(count)?;
        step.note(&format!("{count}_pieces"), register(&worker, area.address(), area.bytes()))?;
    }
    let area = Area::pages(64 << 20, Pages::Small)?;
    step.note("one_mapping_of_64_mib", register(&worker, area.address(), area.bytes()))
}

/// Durations of registration and its end; or the refusal.
fn register(worker: &Worker, at: u64, bytes: u64) -> Value {
    let cuda = worker.cuda();
    let registered = timed(|| cuda.ask("cuMemHostRegister_v2", |driver| driver.host_register(at, bytes)));
    let ended = registered.and_then(|((), register)| {
        let ((), end) = timed(|| cuda.ask("cuMemHostUnregister", |driver| driver.host_unregister(at)))?;
        Ok(json!({ "bytes": bytes, "register_us": rounded(register), "unregister_us": rounded(end) }))
    });
    ended.unwrap_or_else(|stop| json!({ "bytes": bytes, "refused": stop.to_string() }))
}

fn huge_pages(step: &Step) -> Answer {
    let worker = step.worker()?;
    let area = Area::pages(32 << 20, Pages::Transparent)?;
    step.note("transparent", register(&worker, area.address(), area.bytes()))?;
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    step.note("free_huge_pages", free)?;
    if free < 2 {
        return Err(Stop::not_asked("the host has no free huge pages; transparent ones are answered"));
    }
    let area = Area::pages(4 << 20, Pages::Huge)?;
    step.note("whole", register(&worker, area.address(), area.bytes()))?;
    step.note("part", register(&worker, area.address() + MIB, MIB))
}

//! Hostile guests on the whole path: a front-end that says anything, to real `sluiced`, device and worker processes with
//! their filters on, beside a neighbour that computes without a pause and looks at every result.

#![allow(clippy::cast_possible_truncation, reason = "offsets in the memory of a 64-bit guest")]

/// The front-end of the device's own tests.
#[path = "../../backend/device/tests/common/raw.rs"]
#[allow(dead_code, unreachable_pub, reason = "each user has a part of it")]
mod raw;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use raw::{FREE, MEMORY, Raw, blob, command};
use rustix::fs::SealFlags;
use rustix::process::Signal;
use sluice_protocol::calls::{self, WIRE, wire};
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::field::{ArenaAddress, Bytes, DeviceAddress, FieldError, Mint, Name, Size, Writer};
use sluice_protocol::gpu::command::{ATTACH_BACKING, CTX_ATTACH_RESOURCE, RESOURCE_CREATE_3D, SUBMIT_3D};
use sluice_protocol::handle::{self, Id};
use sluice_protocol::limits;
use sluice_protocol::park::Parking;
use sluice_protocol::record::{HEADER_BYTES, Header, NO_REPLY, NO_STREAM};
use sluice_protocol::reply;
use sluice_protocol::ring::Producer;
use sluice_protocol::session::{self, Attachment};
use sluice_protocol::shared::Shared;
use sluice_shared_memory::mapping::Words;
use sluice_tests::direct::{self, Backend, PATIENCE};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs;

/// What the front-end gives a device to answer at once.
const SOON: Duration = PATIENCE;
const OK: u32 = 0x1100;
const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;
/// Guest-physical places of the control resource and an arena.
const CONTROL: u64 = FREE;
const PAGES: u64 = FREE + 0x40_0000;
const PAGES_BYTES: u32 = 4 << 20;
/// Where the worker maps the arena.
const ARENA: u64 = limits::WINDOW_BOUNDS.start;
const WINDOW: u64 = 0x7e80_0000_0000;
/// How much a worker may grow over any of this: what its tables and its driver keep, nothing a guest chose.
const GROWTH_KIB: u64 = 48 << 10;

const KERNEL: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n\
    .visible .entry k(.param .u64 k_param_0, .param .u32 k_param_1) { ret; }\n\0";

// ---- the scene ----

/// A backend and a neighbour on it.
struct Scene {
    backend: Backend,
    neighbour: Background,
    device: u32,
    neighbours_worker: u32,
}

fn program(name: &str) -> Result<PathBuf> {
    let programs = programs::compile_all()?;
    Ok(programs.into_iter().find(|program| program.name == name).context("no such program")?.path)
}

impl Scene {
    fn start() -> Result<Scene> {
        let backend = Backend::start(&Binaries::locate()?, None)?;
        let mut neighbour = backend.spawn("neighbour", &program("neighbour")?, &["forever"])?;
        neighbour.wait_for_line("computing", PATIENCE)?;
        let device = backend.device()?;
        let (workers, _) = backend.wait_for_workers(1)?;
        Ok(Scene { backend, neighbour, device, neighbours_worker: workers[0] })
    }

    /// A session of a front-end that keeps to no rule.
    fn guest(&self) -> Result<Guest> {
        Guest::start(self)
    }

    /// The one worker that is not the neighbour's.
    fn worker(&self) -> Result<u32> {
        let (workers, _) = self.backend.wait_for_workers(2)?;
        workers.into_iter().find(|worker| *worker != self.neighbours_worker).context("the guest's worker")
    }

    /// Nobody but the hostile guests has noticed anything.
    fn unharmed(mut self) -> Result<()> {
        let (workers, took) = self.backend.wait_for_workers(1)?;
        println!("the last hostile session was gone {took:?} after its guest");
        ensure!(workers == [self.neighbours_worker], "the neighbour's worker is another one");
        ensure!(self.backend.device()? == self.device, "the device is another one");
        let memory = direct::private_kibibytes(self.device)?;
        println!("sluice-device: {memory} KiB private resident memory");
        ensure!(memory < 16 << 10, "the device has grown to {memory} KiB");
        signal(self.neighbour.id(), Signal::USR1)?;
        let status = self.neighbour.wait(PATIENCE)?.context("the neighbour ends")?;
        ensure!(status.success(), "the neighbour: {status}\n{}", self.neighbour.printed());
        let next = self.backend.run(&program("vector_add")?, &[])?;
        ensure!(next.status.success(), "the next program: {}\n{}", next.stdout, next.stderr);
        self.backend.stop()
    }
}

// ---- the guest ----

/// The session's page within the front-end's memory.
#[derive(Clone, Copy)]
struct Page(Words);

impl Page {
    const AT: usize = CONTROL as usize;
}

impl Shared for Page {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.0.load_u32(Page::AT + at, order)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.0.store_u32(Page::AT + at, value, order);
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        self.0.swap_u32(Page::AT + at, value)
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.0.load_u64(Page::AT + at, order)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.0.store_u64(Page::AT + at, value, order);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        self.0.read(Page::AT + at, into);
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.0.write(Page::AT + at, from);
    }
    fn fence(&self) {
        self.0.fence();
    }
}

struct Guest {
    raw: Raw,
    page: Page,
    producer: Producer,
    ticket: u32,
    context: u64,
    sequence: u64,
}

/// Appends the fields of a call.
type Put<'p> = &'p dyn Fn(&mut Writer<'_>) -> Result<(), FieldError>;

impl Guest {
    fn start(scene: &Scene) -> Result<Guest> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut raw = Raw::connect(&scene.backend.socket()?);
            raw.words.write(CONTROL as usize, &[0; session::REPLIES_AT]);
            raw.open(1, 10, CONTROL);
            let page = Page(raw.words);
            while page.load_u32(session::STATE, Ordering::Acquire) == session::NEW {
                ensure!(Instant::now() < deadline, "no worker comes\n{}", scene.backend.printed());
                std::thread::sleep(Duration::from_millis(1));
            }
            if session::lost(&page).is_none() {
                let (producer, context) = (Producer::new(), 0);
                return Ok(Guest { raw, page, producer, ticket: 0, context, sequence: 0 });
            }
            // Too many sessions in a short time; a guest is told so, and may try again.
            ensure!(Instant::now() < deadline, "no session\n{}", scene.backend.printed());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn lost(&self) -> Option<u32> {
        session::lost(&self.page)
    }

    /// The session ends, with an error that says so.
    fn ends(&self, why: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(error) = self.lost() {
                ensure!(error != 0, "{why}: lost without an error");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{why}: the session lives on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn ring(&mut self) {
        if Parking::WORKER.must_wake(&self.page) {
            self.raw.doorbell(1, Doorbell::Ring);
        }
    }

    /// Publishes bytes as they are.
    fn publish(&mut self, record: &[u8]) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.producer.publish(&self.page, record).is_err() {
            ensure!(Instant::now() < deadline, "the ring stays full");
            self.ring();
        }
        self.ring();
        Ok(())
    }

    fn header(&self, call: u16) -> Header {
        let (context, reply) = (self.context, NO_REPLY);
        Header { call, reply, ticket: 0, context, stream: NO_STREAM, thread: 0, sequence: 0 }
    }

    /// A call and its CUresult.
    fn call(&mut self, header: Header, put: Put<'_>) -> Result<u32> {
        self.ticket += 1;
        let header = Header { reply: 0, ticket: self.ticket, ..header };
        let mut buffer = vec![0; limits::RECORD_BYTES];
        let record = header.build(&mut buffer, put).context("the test's own fields")?.to_vec();
        self.publish(&record)?;
        let deadline = Instant::now() + PATIENCE;
        while !reply::is_ready(&self.page, 0, self.ticket) {
            if let Some(error) = self.lost() {
                bail!("call {:#06x}: the session is lost with {error}", header.call);
            }
            ensure!(Instant::now() < deadline, "call {:#06x} is not answered", header.call);
            std::thread::yield_now();
        }
        Ok(reply::take(&self.page, 0, &mut [0; limits::REPLY_BYTES]).0)
    }

    fn ask(&mut self, call: u16, put: Put<'_>) -> Result<u32> {
        self.call(self.header(call), put)
    }

    /// Work on stream slot 0.
    fn work(&mut self, call: u16, put: Put<'_>) -> Result<u32> {
        self.sequence += 1;
        self.call(Header { stream: 0, sequence: self.sequence, ..self.header(call) }, put)
    }

    /// Everything a lawful program has: a context, an arena, device memory, a kernel of 12 parameter bytes.
    fn settle(&mut self) -> Result<u64> {
        let context = Id::<handle::Context>::new(0, 1);
        self.lawful(wire::session_hello::CALL, &|w| wire::session_hello::put(w, calls::VERSION, 1))?;
        self.lawful(wire::window_reserve::CALL, &|w| wire::window_reserve::put(w, WINDOW, Size(1 << 30)))?;
        self.lawful(wire::context_create::CALL, &|w| {
            wire::context_create::put(w, Mint(context), 0, 0, true, 0)
        })?;
        self.context = context.raw();
        ensure!(
            self.attach(20, 1, ARENA, &[(PAGES, PAGES_BYTES)])? == Attachment::Adopted(PAGES_BYTES.into())
        );
        self.raw.words.write(PAGES as usize, KERNEL);
        let module = Id::<handle::Module>::new(0, 1);
        self.lawful(wire::module_load::CALL, &|w| {
            let image = ArenaAddress(ARENA);
            wire::module_load::put(w, Mint(module), true, image, Size(4096), ArenaAddress(0), Size(0))
        })?;
        let function = Mint(Id::<handle::Function>::new(0, 1));
        self.lawful(wire::module_function::CALL, &|w| {
            wire::module_function::put(w, module, function, Name(b"k"))
        })?;
        self.lawful(wire::memory_allocate::CALL, &|w| wire::memory_allocate::put(w, Size(4096)))?;
        let mut answer = [0; limits::REPLY_BYTES];
        let (_, fields) = reply::take(&self.page, 0, &mut answer);
        let reply = wire::memory_allocate::Reply::get(fields).context("an address")?;
        Ok(reply.address)
    }

    fn lawful(&mut self, call: u16, put: Put<'_>) -> Result<()> {
        let result = self.ask(call, put)?;
        ensure!(result == 0, "lawful call {call:#06x} answers {result}");
        Ok(())
    }

    /// Makes a resource, has it attached, and waits for what becomes of it.
    fn attach(&mut self, id: u32, slot: u32, address: u64, pages: &[(u64, u32)]) -> Result<Attachment> {
        ensure!(self.raw.resource(1, id, pages) == OK, "resource {id}");
        self.attach_again(id, slot, address)
    }

    fn attach_again(&mut self, resource: u32, slot: u32, address: u64) -> Result<Attachment> {
        session::set_attachment(&self.page, slot, Attachment::Pending);
        let answer = self.raw.doorbell(1, Doorbell::Attach { resource, slot, address });
        let deadline = Instant::now() + PATIENCE;
        loop {
            match session::attachment(&self.page, slot) {
                Attachment::Pending if answer == OK || slot < limits::ATTACHMENTS => {}
                Attachment::Pending => return Ok(Attachment::Refused(answer)),
                other => return Ok(other),
            }
            ensure!(self.lost().is_none(), "attaching ends the session");
            ensure!(Instant::now() < deadline, "attaching is not answered (the command: {answer:#x})");
            std::thread::yield_now();
        }
    }
}

/// The raw record of a call with these words as fields.
fn record(header: Header, fields: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    if let Some(head) = bytes.first_chunk_mut() {
        let size = u32::try_from(HEADER_BYTES + fields.len() * 8).unwrap_or(u32::MAX);
        header.write(size, head);
    }
    bytes.extend(fields.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

// ---- what they try ----

// Promise: V4
#[test]
fn malformed_records_end_their_session() -> Result<()> {
    let scene = Scene::start()?;
    let header =
        |call| Header { call, reply: 0, ticket: 1, context: 0, stream: NO_STREAM, thread: 0, sequence: 0 };
    let hello = header(wire::session_hello::CALL);
    let sized = |size: u32| {
        let mut bytes = record(hello, &[1, 1]);
        bytes[..4].copy_from_slice(&size.to_le_bytes());
        bytes
    };
    let mut reserved = record(hello, &[1, 1]);
    reserved[7] = 1;
    let (event, stream) = (Id::<handle::Event>::new(1, 1).raw(), Id::<handle::Stream>::new(1, 1).raw());
    let mut cases: Vec<(String, Vec<u8>)> = [0, 8, 4, 57, 64, 1 << 20, u32::MAX - 7]
        .into_iter()
        .map(|size| (format!("a record that says {size} bytes"), sized(size)))
        .collect();
    cases.extend([
        ("a reserved bit".into(), reserved),
        ("an unknown call".into(), record(header(0xffff), &[])),
        ("call 0".into(), record(header(0), &[])),
        ("a reply slot that does not exist".into(), record(Header { reply: 128, ..hello }, &[1, 1])),
        ("an event's id for a stream".into(), record(header(wire::stream_destroy::CALL), &[event])),
        ("a stream's id for an event".into(), record(header(wire::event_destroy::CALL), &[stream])),
        (
            "an index beyond the kind's limit".into(),
            record(header(wire::stream_destroy::CALL), &[stream | 0xffff]),
        ),
        ("generation 0".into(), record(header(wire::stream_destroy::CALL), &[0x52 << 56])),
        (
            "a truth value of 2".into(),
            record(header(wire::context_create::CALL), &[0x51 << 56 | 1 << 32, 0, 0, 2, 0]),
        ),
        (
            "a name longer than its record".into(),
            record(header(wire::module_global::CALL), &[0x54 << 56 | 1 << 32, 1 << 20, 0]),
        ),
        (
            "a name with its end inside".into(),
            record(header(wire::module_global::CALL), &[0x54 << 56 | 1 << 32, 2, 0]),
        ),
        (
            "a log beyond its limit".into(),
            record(
                header(wire::module_load::CALL),
                &[0x54 << 56 | 1 << 32, 1, ARENA, 64, ARENA, limits::JIT_LOG_BYTES + 1],
            ),
        ),
        (
            "an allocation beyond its limit".into(),
            record(header(wire::memory_allocate::CALL), &[limits::ALLOCATION_BYTES + 1]),
        ),
    ]);
    for row in WIRE {
        // Every call is longer than nothing or shorter than this.
        let fields: &[u64] = if row.parameters.is_empty() { &[0] } else { &[] };
        cases.push((format!("{} cut short, or too long", row.name), record(header(row.id), fields)));
    }
    let count = cases.len();
    for (what, bytes) in cases {
        let mut guest = scene.guest()?;
        guest.publish(&bytes).or_else(|error| if guest.lost().is_some() { Ok(()) } else { Err(error) })?;
        guest.ends(&what)?;
    }
    for tail in [1, 4, limits::RING_BYTES + 8, u64::MAX - 7, 1 << 63] {
        let mut guest = scene.guest()?;
        guest.page.store_u64(session::RING_TAIL, tail, Ordering::Release);
        guest.ring();
        guest.ends(&format!("tail {tail:#x}"))?;
    }
    // A sequence that skips, and one that goes back.
    for sequence in [0, 2, 1000, u64::MAX] {
        let mut guest = scene.guest()?;
        guest.settle()?;
        let header = Header { stream: 0, sequence, ..guest.header(wire::event_record::CALL) };
        guest.publish(&record(header, &[event, 0]))?;
        guest.ends(&format!("sequence {sequence}"))?;
    }
    println!("{} sessions", count + 9);
    scene.unharmed()
}

// Promise: V4
#[test]
fn records_that_change_while_they_are_read_harm_only_their_session() -> Result<()> {
    let scene = Scene::start()?;
    let (mut sessions, mut calls_answered) = (0, 0);
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until || sessions < 5 {
        let mut guest = scene.guest()?;
        let device = guest.settle()?;
        sessions += 1;
        let (page, words) = (guest.page, guest.raw.words);
        let stop = AtomicBool::new(false);
        std::thread::scope(|threads| -> Result<()> {
            // Turns words of the ring and of the arena over, near where records are.
            let mutator = threads.spawn(|| {
                let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ sessions;
                while !stop.load(Ordering::Relaxed) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let tail = page.load_u64(session::RING_TAIL, Ordering::Relaxed);
                    let at = tail.wrapping_add(state >> 8 & 0x78) & (limits::RING_BYTES - 1);
                    let place = session::RING_AT + usize::try_from(at).unwrap_or(0);
                    page.store_u64(place, state.rotate_left(9) >> (state & 63), Ordering::Relaxed);
                    words.store_u64(
                        PAGES as usize + (state as usize >> 20 & 0xff8),
                        state,
                        Ordering::Relaxed,
                    );
                    std::hint::spin_loop();
                }
            });
            let mut buffer = [0; 256];
            for round in 0..2000_u32 {
                let header = Header { reply: 0, ticket: round + 1000, ..guest.header(wire::fill::CALL) };
                let put = |w: &mut Writer<'_>| wire::fill::put(w, DeviceAddress(device), 64, 4, round, 8, 8);
                let record = header.build(&mut buffer, put).context("fits")?.to_vec();
                if guest.lost().is_some() || guest.publish(&record).is_err() {
                    break;
                }
                calls_answered += 1;
            }
            stop.store(true, Ordering::Relaxed);
            mutator.join().ok().context("the mutator")
        })?;
    }
    println!("{sessions} sessions, {calls_answered} records published under a mutator");
    scene.unharmed()
}

// Promise: F6
#[test]
fn pointers_into_the_worker_and_sizes_near_overflow_are_refused() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    let device = guest.settle()?;
    let worker = scene.worker()?;
    let before = direct::private_kibibytes(worker)?;

    // Wherever the worker has anything mapped: program, heap, stack, libraries, driver memory, the session's page.
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
        let (arena, device) = (ArenaAddress(ARENA), DeviceAddress(device));
        let cases: [(u16, Put<'_>); 9] = [
            (wire::copy_to_device::CALL, &|w| wire::copy_to_device::put(w, DeviceAddress(forged), arena, 64)),
            (wire::copy_to_device::CALL, &|w| wire::copy_to_device::put(w, device, ArenaAddress(forged), 64)),
            (wire::copy_from_device::CALL, &|w| {
                wire::copy_from_device::put(w, ArenaAddress(forged), device, 64)
            }),
            (wire::copy_from_device::CALL, &|w| {
                wire::copy_from_device::put(w, arena, DeviceAddress(forged), 64)
            }),
            (wire::copy_on_device::CALL, &|w| {
                wire::copy_on_device::put(w, device, DeviceAddress(forged), 64)
            }),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 0, device.0, 64, forged, 64, 16, 4)),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 1, forged, 64, device.0, 64, 16, 4)),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 2, forged, 64, device.0, 64, 16, 4)),
            (wire::fill::CALL, &|w| wire::fill::put(w, DeviceAddress(forged), 64, 4, 7, 16, 4)),
        ];
        for (number, (call, put)) in cases.into_iter().enumerate() {
            let result = guest.work(call, put)?;
            ensure!(result == INVALID_VALUE, "{forged:#x}, case {number}: {result}");
        }
        let module = Id::<handle::Module>::new(1, 1);
        let log = ArenaAddress(forged);
        let result = guest.ask(wire::module_load::CALL, &|w| {
            wire::module_load::put(w, Mint(module), true, log, Size(64), arena, Size(64))
        })?;
        ensure!(result == INVALID_VALUE, "image at {forged:#x}: {result}");
        let result = guest.ask(wire::module_load::CALL, &|w| {
            wire::module_load::put(w, Mint(module), false, arena, Size(4096), log, Size(64))
        })?;
        ensure!(result == INVALID_VALUE, "log at {forged:#x}: {result}");
        let result = guest.ask(wire::module_function_name::CALL, &|w| {
            wire::module_function_name::put(w, Id::new(0, 1), 0, log, Size(64))
        })?;
        ensure!(result == INVALID_VALUE, "name to {forged:#x}: {result}");
        let free =
            guest.ask(wire::memory_free::CALL, &|w| wire::memory_free::put(w, DeviceAddress(forged)))?;
        ensure!(free == INVALID_VALUE, "free of {forged:#x}: {free}");
    }

    let huge = [u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 63) + 1, 1 << 48, u64::MAX / 4 + 1, 4097, 1 << 32];
    for size in huge {
        let (from, to) = (ArenaAddress(ARENA), DeviceAddress(device));
        let cases: [(u16, Put<'_>); 8] = [
            (wire::copy_to_device::CALL, &|w| wire::copy_to_device::put(w, to, from, size)),
            (wire::copy_from_device::CALL, &|w| wire::copy_from_device::put(w, from, to, size)),
            (wire::copy_on_device::CALL, &|w| wire::copy_on_device::put(w, to, to, size)),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 0, to.0, size, from.0, 64, 16, size)),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 0, to.0, 64, from.0, size, size, 2)),
            (wire::copy_rows::CALL, &|w| wire::copy_rows::put(w, 1, from.0, size, to.0, size, 1, size)),
            (wire::fill::CALL, &|w| wire::fill::put(w, to, 0, 4, 0, size, 1)),
            (wire::fill::CALL, &|w| wire::fill::put(w, to, size, 1, 0, 1, size)),
        ];
        for (number, (call, put)) in cases.into_iter().enumerate() {
            let result = guest.work(call, put)?;
            ensure!(result == INVALID_VALUE, "size {size:#x}, case {number}: {result}");
        }
    }
    // Allocations that no device has, and windows that would lie over what is there.
    for bytes in [1 << 40, limits::ALLOCATION_BYTES] {
        let result =
            guest.ask(wire::memory_allocate::CALL, &|w| wire::memory_allocate::put(w, Size(bytes)))?;
        ensure!(result == 2, "allocating {bytes:#x}: {result}");
    }
    for base in [0, 0x7d00_0000_0000, 0x7f00_0000_0000, u64::MAX << 21, WINDOW, WINDOW + 4096, ARENA] {
        let result =
            guest.ask(wire::window_reserve::CALL, &|w| wire::window_reserve::put(w, base, Size(2 << 20)))?;
        ensure!(result != 0, "a window at {base:#x}");
    }
    // The session is as good as ever.
    let result = guest.work(wire::copy_to_device::CALL, &|w| {
        wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA), 4096)
    })?;
    ensure!(result == 0, "a lawful copy afterwards: {result}");
    let after = direct::private_kibibytes(worker)?;
    println!("worker: {before} KiB before, {after} KiB after");
    ensure!(after < before + GROWTH_KIB, "the worker grew from {before} to {after} KiB");
    drop(guest);
    scene.unharmed()
}

// Promise: V11
#[test]
fn attachments_that_may_not_be_are_refused() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    guest.settle()?;
    let bounds = limits::WINDOW_BOUNDS;
    let page = PAGES + u64::from(PAGES_BYTES);
    ensure!(guest.raw.resource(1, 30, &[(page, 8192)]) == OK);
    let addresses = [
        0,
        8,
        4096,
        bounds.start - 4096,
        bounds.end,
        bounds.end - 4096,
        ARENA + u64::from(PAGES_BYTES) + 8,
        ARENA,
        ARENA + 4096,
        u64::MAX - 4095,
        u64::MAX - 8191,
        1 << 63,
        0x7fff_ffff_f000,
    ];
    for (slot, address) in (2..).zip(addresses) {
        let became = guest.attach_again(30, slot, address)?;
        ensure!(matches!(became, Attachment::Refused(_)), "at {address:#x}: {became:?}");
    }
    // Entries that are taken, that belong to the device, or that do not exist.
    let free = ARENA + (1 << 30);
    for slot in [0, 1, limits::ATTACHMENTS, u32::MAX] {
        let answer = guest.raw.doorbell(1, Doorbell::Attach { resource: 30, slot, address: free });
        ensure!(answer != OK, "slot {slot}");
    }
    // Another context's resource, one that nobody has, one that is attached already.
    ensure!(guest.raw.context(2) == OK);
    ensure!(guest.raw.resource(2, 31, &[(page + 8192, 4096)]) == OK);
    for resource in [31, 99, 0, u32::MAX, 10, 20] {
        let became = guest.attach_again(resource, 40, free)?;
        ensure!(matches!(became, Attachment::Refused(_)), "resource {resource}: {became:?}");
    }
    // A second session may use neither the first one's page nor its arena.
    for resource in [10, 20, 30] {
        ensure!(guest.raw.doorbell(2, Doorbell::Open { resource }) != OK, "resource {resource}");
    }
    // Pages that another resource has, that lie outside of memory, that are none, or that overflow.
    let pages: [(u64, u32); 7] = [
        (CONTROL, 4096),
        (PAGES, 4096),
        (MEMORY, 4096),
        (MEMORY - 4096, 8192),
        (page + (1 << 20) + 1, 4096),
        (page + (1 << 20), 100),
        (u64::MAX - 4095, 4096),
    ];
    for (id, entry) in (50..).zip(pages) {
        ensure!(guest.raw.ask(&blob(id, &[entry])) != OK, "pages {entry:x?}");
    }
    // And the entry is still good for what is allowed.
    ensure!(guest.attach_again(30, 41, free)? == Attachment::Adopted(8192));
    drop(guest);
    scene.unharmed()
}

// Promise: V5
#[test]
fn descriptors_that_lead_nowhere_are_survived() -> Result<()> {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let scene = Scene::start()?;
    let at = MEMORY - 0x1_0000;
    let chains: [&[(u64, u32, u16, u16)]; 12] = [
        // Loops of one and of two.
        &[(at, 32, NEXT, 900)],
        &[(at, 32, NEXT, 901), (at, 32, NEXT, 900)],
        // Nothing to read, nothing to write, nothing at all.
        &[(at, 0, 0, 0)],
        &[(at, 0, NEXT, 901), (at, 0, WRITE, 0)],
        &[(at, 24, 0, 0)],
        &[(at, 4096, WRITE, 0)],
        // The answer's place can only be read.
        &[(at, 24, NEXT, 901), (at + 4096, 4096, 0, 0)],
        // Outside of memory, around its end, and longer than any command.
        &[(MEMORY, 24, NEXT, 901), (MEMORY, 4096, WRITE, 0)],
        &[(u64::MAX - 8, u32::MAX, NEXT, 901), (at, 4096, WRITE, 0)],
        &[(0, u32::MAX, NEXT, 901), (at, u32::MAX, WRITE, 0)],
        // An indirect table of itself, and a descriptor beyond the table.
        &[(at, 16, INDIRECT, 0)],
        &[(at, 24, NEXT, u16::MAX)],
    ];
    for chain in chains {
        let mut raw = Raw::connect(&scene.backend.socket()?);
        raw.words.write(at as usize, &command(SUBMIT_3D, 1, &[u32::MAX, 0]));
        for (index, (address, length, flags, next)) in (900..).zip(chain) {
            raw.descriptor(index, *address, *length, *flags, *next);
        }
        raw.make_available(900);
        raw.make_available(u16::MAX);
    }
    // Commands that announce more than they bring.
    let mut raw = Raw::connect(&scene.backend.socket()?);
    for command in [
        command(SUBMIT_3D, 1, &[u32::MAX, 0]),
        command(SUBMIT_3D, 1, &[]),
        command(ATTACH_BACKING, 0, &[1, u32::MAX]),
        command(ATTACH_BACKING, 0, &[1, 1000, 0, 0, 4096, 0]),
        command(0xffff_ffff, u32::MAX, &[]),
    ] {
        let head = raw.send(&command);
        raw.soon(head);
    }
    drop(raw);
    scene.unharmed()
}

// Promise: V10
#[test]
fn a_front_end_whose_memory_can_shrink_is_refused() -> Result<()> {
    let scene = Scene::start()?;
    for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::GROW | SealFlags::SEAL] {
        let refused = Raw::with_memory(&scene.backend.socket()?, raw::memory(seals));
        ensure!(refused.is_err(), "memory with {seals:?} is accepted");
    }
    let deadline = Instant::now() + PATIENCE;
    while !scene.backend.printed().contains("can shrink") {
        ensure!(Instant::now() < deadline, "nobody says why:\n{}", scene.backend.printed());
        std::thread::sleep(Duration::from_millis(10));
    }
    scene.unharmed()
}

// Promise: V12
#[test]
fn floods_stop_at_their_limits() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    guest.settle()?;
    // Waits: only so many are withheld, the others are answered at once.
    let mut heads = std::collections::VecDeque::new();
    for _ in 0..5000 {
        heads.push_back(guest.raw.wait(1));
        while heads.len() > 200 {
            let before = heads.len();
            heads.retain(|head| guest.raw.answer(*head).is_none());
            ensure!(heads.len() < before || heads.len() <= 200 + limits::WAITERS_PER_SESSION);
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while !heads.is_empty() {
        heads.retain(|head| guest.raw.answer(*head).is_none());
        ensure!(Instant::now() < deadline, "{} waits are never answered", heads.len());
    }
    // Contexts and resources of the device.
    let mut contexts = 1;
    while guest.raw.context(100 + contexts) == OK {
        contexts += 1;
        ensure!(contexts as usize <= limits::GPU_CONTEXTS, "more than {} contexts", limits::GPU_CONTEXTS);
    }
    println!("{contexts} contexts");
    let mut resources = 2;
    while guest.raw.ask(&command(
        RESOURCE_CREATE_3D,
        0,
        &[1000 + resources, 0, 64, 1, 1, 1, 1, 1, 0, 0, 0, 0],
    )) == OK
    {
        resources += 1;
        ensure!(resources as usize <= limits::RESOURCES, "more than {} resources", limits::RESOURCES);
    }
    println!("{resources} resources");
    ensure!(guest.raw.ask(&command(CTX_ATTACH_RESOURCE, 1, &[u32::MAX, 0])) != OK);
    let ring = guest.raw.doorbell(1, Doorbell::Ring);
    ensure!(ring == OK, "the session still has its doorbell: {ring:#x}");
    drop(guest);
    // Its user may have as much again once the device has let go of it.
    let deadline = Instant::now() + PATIENCE;
    while Raw::try_connect(&scene.backend.socket()?).is_none() {
        ensure!(Instant::now() < deadline, "a guest that is gone keeps its user's contexts");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Sessions that come and go without a word.
    for _ in 0..40 {
        let mut raw = Raw::connect(&scene.backend.socket()?);
        raw.open(1, 10, CONTROL);
    }
    scene.unharmed()
}

// Promise: C12
#[test]
fn sessions_beyond_the_limit_are_refused() -> Result<()> {
    const PER_GUEST: u32 = 40;
    let scene = Scene::start()?;
    let before = direct::private_kibibytes(scene.device)?;
    let (mut opened, mut refused) = (1, 0);
    let mut guests = Vec::new();
    // Every guest has as many sessions as its memory holds pages for.
    while opened + refused <= limits::SESSIONS + 40 {
        let mut raw = Raw::connect(&scene.backend.socket()?);
        for number in 0..PER_GUEST {
            let (context, at) = (number + 10, FREE + u64::from(number) * session::BYTES as u64);
            ensure!(raw.context(context) == OK, "context {context}");
            ensure!(raw.resource(context, context, &[(at, session::BYTES as u32)]) == OK, "page {number}");
            raw.words.store_u64(at as usize + session::MAGIC_AT, session::MAGIC, Ordering::SeqCst);
            if raw.doorbell(context, Doorbell::Open { resource: context }) == OK {
                opened += 1;
                continue;
            }
            refused += 1;
            ensure!(raw.state(at) == session::LOST, "a session that is refused is not told");
        }
        guests.push(raw);
    }
    // All of them are one user's, and so is the neighbour.
    let allowed = usize::try_from(limits::USER_SESSIONS)?;
    println!("{opened} sessions of {allowed} opened, {refused} refused");
    ensure!(opened == allowed, "{opened} sessions, {allowed} are allowed");
    // The neighbour computes while workers start, as many as the rate lets through.
    std::thread::sleep(Duration::from_secs(2));
    let workers = scene.backend.processes("sluice-worker")?.len();
    let after = direct::private_kibibytes(scene.device)?;
    println!("{workers} workers meanwhile; sluice-device: {before} KiB before, {after} KiB after");
    ensure!(workers <= allowed && after < before + (16 << 10));
    drop(guests);
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
            wire::launch::put(w, function, grid, block, 0, false, Bytes(attributes), Bytes(parameters))
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

    // Streams: one per slot, and the slots end.
    let mut streams = 1;
    for slot in 1..limits::STREAMS {
        let stream = Mint(Id::<handle::Stream>::new(slot, 1));
        let made =
            guest.ask(wire::stream_create::CALL, &|w| wire::stream_create::put(w, stream, slot, 1, 0))?;
        ensure!(made == 0, "stream {slot}: {made}");
        streams += 1;
    }
    println!("{streams} streams");
    for slot in [0, 1, limits::STREAMS - 1, limits::STREAMS, u32::MAX] {
        let stream = Mint(Id::<handle::Stream>::new(0, 1));
        let made =
            guest.ask(wire::stream_create::CALL, &|w| wire::stream_create::put(w, stream, slot, 1, 0))?;
        ensure!(made != 0, "a stream in slot {slot}");
    }
    // Events and contexts with ids that are taken, and more than there may be.
    let event = |guest: &mut Guest, index| {
        let event = Mint(Id::<handle::Event>::new(index, 1));
        guest.ask(wire::event_create::CALL, &|w| wire::event_create::put(w, event, 0))
    };
    ensure!(event(&mut guest, limits::EVENTS - 1)? == 0, "the last event");
    ensure!(event(&mut guest, limits::EVENTS - 1)? != 0, "an event twice");
    let context = |guest: &mut Guest, index, device| {
        let context = Mint(Id::<handle::Context>::new(index, 1));
        guest.ask(wire::context_create::CALL, &|w| wire::context_create::put(w, context, device, 0, false, 5))
    };
    ensure!(context(&mut guest, 0, 0)? != 0, "a context twice");
    ensure!(context(&mut guest, 2, u32::MAX)? != 0, "a device that is none");
    for device in [limits::DEVICES, 1, u32::MAX] {
        let described = guest.ask(wire::device_info::CALL, &|w| wire::device_info::put(w, device))?;
        ensure!(described != 0, "device {device}");
    }
    let after = direct::private_kibibytes(worker)?;
    println!("worker: {before} KiB before, {after} KiB after");
    ensure!(after < before + GROWTH_KIB, "the worker grew from {before} to {after} KiB");
    drop(guest);
    scene.unharmed()
}

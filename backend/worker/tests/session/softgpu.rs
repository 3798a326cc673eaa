//! The same worker on the software GPU: real kernels, real faults.

use crate::{
    guest::{ARENA, Arena, Guest, Start, eventually, memory_file},
    lender::{Elsewhere, Terms},
    streams::launch,
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaAddress, DeviceAddress, Mint, Name, Size},
    handle::{Event, Function, Id, Module},
    limits,
};
use sluice_shared_memory::Run;
use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::Stdio,
};
use tempfile::TempDir;

const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 sum, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [sum];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.wide.u32 %rd4, %r5, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.s64 %rd6, %rd2, %rd4;
    add.s64 %rd7, %rd3, %rd4;
    ld.global.f32 %f1, [%rd5];
    ld.global.f32 %f2, [%rd6];
    add.f32 %f3, %f1, %f2;
    st.global.f32 [%rd7], %f3;
done:
    ret;
}

.visible .entry store(.param .u64 at)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [at];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

/// A software GPU and who lends its memory to the workers of one VM.
pub(crate) struct Device {
    lender: Elsewhere,
    driver: PathBuf,
    environment: Vec<(&'static str, OsString)>,
    _state: TempDir,
}

impl Device {
    /// A large one.
    fn new() -> Device {
        Device::with(&[], Terms { limit: u64::MAX / 2, ..Terms::default() })
    }

    /// One of 358 MiB whose fresh memory is full of a pattern.
    pub(crate) fn small(terms: Terms) -> Device {
        let variables = [
            ("SLUICE_SOFTGPU_MODEL", "A10-24"),
            ("SLUICE_SOFTGPU_SCALE", "64"),
            ("SLUICE_SOFTGPU_FILL", "0xA5"),
            ("SLUICE_SOFTGPU_CONTEXT_BYTES", "4194304"),
        ];
        Device::with(&variables, terms)
    }

    fn with(variables: &[(&'static str, &str)], terms: Terms) -> Device {
        let state = TempDir::new().unwrap();
        let driver = std::env::current_exe().unwrap().with_file_name("libsoftgpu_cuda.so");
        let mut environment = vec![("SLUICE_SOFTGPU_STATE", state.path().into())];
        environment.extend(variables.iter().map(|(name, value)| (*name, OsString::from(value))));
        let of_lender: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let lender = Elsewhere::start(&driver, &of_lender, terms);
        Device { lender, driver, environment, _state: state }
    }

    pub(crate) fn guest(&self, mapped_runs: u32, scrub_every_free: bool) -> Guest {
        self.guest_with_log(mapped_runs, scrub_every_free, Stdio::inherit())
    }

    fn guest_with_log(&self, mapped_runs: u32, scrub_every_free: bool, log: Stdio) -> Guest {
        let environment: Vec<_> =
            self.environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let mut guest = Guest::ready(Start {
            mapped_runs,
            environment: &environment,
            lenders: vec![self.lender.admit()],
            scrub_every_free,
            log,
            ..Start::on(self.driver.clone())
        });
        guest.begin();
        guest
    }
}

/// A session on a software GPU of its own, with the module loaded, and what keeps them.
struct Ready {
    guest: Guest,
    arena: Arena,
    module: Id<Module>,
    _device: Device,
}

fn ready(library: bool) -> Ready {
    ready_with(library, limits::MAPPED_RUNS)
}

/// Loads a PTX text at the start of the arena, whose second mebibyte gets the log.
pub(crate) fn load(guest: &mut Guest, arena: &Arena, text: &str, library: bool) -> (u32, Id<Module>) {
    arena.write(0, text.as_bytes());
    arena.write(text.len(), &[0]);
    let module = Id::new(0, 1);
    let (result, fields) = guest.call(wire::module_load::CALL, |w| {
        let (image, log) = (ArenaAddress(ARENA), ArenaAddress(ARENA + (1 << 20)));
        let bytes = Size(text.len() as u64 + 1);
        wire::module_load::put(w, Mint(module), library, image, bytes, log, Size(4096))
    });
    let length = wire::module_load::Reply::get(&fields).unwrap().log_length;
    let log = arena.read(1 << 20, usize::try_from(length).unwrap());
    assert!(result != 218, "{}", String::from_utf8_lossy(&log));
    (result, module)
}

fn ready_with(library: bool, mapped_runs: u32) -> Ready {
    let device = Device::new();
    let mut guest = device.guest(mapped_runs, false);
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, module) = load(&mut guest, &arena, PTX, library);
    assert_eq!(result, 0);
    Ready { guest, arena, module, _device: device }
}
#[test]
fn an_exhausted_device_refuses_and_a_dead_worker_gives_back() {
    let device = Device::new();
    let [mut one, mut two] = [(); 2].map(|()| device.guest(limits::MAPPED_RUNS, false));
    // Memory is not touched, so it costs the host nothing.
    while one.allocate(512 << 20).is_ok() {}
    while one.allocate(2 << 20).is_ok() {}
    assert_eq!(two.allocate(64 << 20), Err(2));
    assert_eq!(two.allocate(64 << 20), Err(2), "and the worker lives on");
    drop(one);
    eventually("the dead worker's memory", || two.allocate(64 << 20).is_ok());
}

fn find(
    guest: &mut Guest,
    module: Id<Module>,
    index: u32,
    name: &str,
) -> (Id<Function>, wire::module_function::Reply) {
    let id = Id::new(index, 1);
    let (result, fields) = guest.call(wire::module_function::CALL, |w| {
        wire::module_function::put(w, module, Mint(id), Name(name.as_bytes()))
    });
    assert_eq!(result, 0, "{name}");
    (id, wire::module_function::Reply::get(&fields).unwrap())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

// Promise: V15
#[test]
fn vectors_are_added() {
    const COUNT: u16 = 3000;
    // In place, and with everything gathered: control resource, image, log and copies.
    for (library, mapped_runs) in
        [(false, limits::MAPPED_RUNS), (true, limits::MAPPED_RUNS), (false, 0), (true, 0)]
    {
        let Ready { mut guest, arena, module, _device } = ready_with(library, mapped_runs);
        let (add, described) = find(&mut guest, module, 0, "add");
        assert_eq!(described.parameters.entries(), [(0, 8), (8, 8), (16, 8), (24, 4)]);
        assert_eq!(described.attributes.0[16], 28);
        let bytes = u64::from(COUNT) * 4;
        let [a, b, sum] = [(); 3].map(|()| guest.allocate(bytes).unwrap());
        let values =
            |factor: f32| (0..COUNT).flat_map(|i| (f32::from(i) * factor).to_le_bytes()).collect::<Vec<_>>();
        arena.write(1 << 20, &values(1.0));
        arena.write(2 << 20, &values(0.5));
        for (to, from) in [(a, 1_u64 << 20), (b, 2 << 20)] {
            guest.work(wire::copy_to_device::CALL, 0, |w| {
                wire::copy_to_device::put(w, DeviceAddress(to), ArenaAddress(ARENA + from), bytes)
            });
        }
        let mut parameters = [a, b, sum].map(u64::to_le_bytes).concat();
        parameters.extend(u32::from(COUNT).to_le_bytes());
        guest.work(wire::launch::CALL, 0, |w| {
            let (none, parameters) =
                (sluice_protocol::field::Bytes(&[]), sluice_protocol::field::Bytes(&parameters));
            wire::launch::put(w, add, [12, 1, 1], [256, 1, 1], 0, false, none, parameters)
        });
        let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
            wire::copy_from_device::put(w, ArenaAddress(ARENA + (3 << 20)), DeviceAddress(sum), bytes)
        });
        guest.wait(0, last);
        let expected: Vec<f32> = (0..COUNT).map(|i| f32::from(i) * 1.5).collect();
        assert_eq!(floats(&arena.read(3 << 20, usize::from(COUNT) * 4)), expected);
        assert_eq!(guest.call(wire::module_unload::CALL, |w| wire::module_unload::put(w, module)).0, 0);
    }
}

#[test]
fn a_kernel_reaches_pinned_memory_at_its_own_address() {
    let Ready { mut guest, arena, module, _device } = ready(true);
    let (store, _) = find(&mut guest, module, 0, "store");
    let sequence = launch(&mut guest, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    guest.wait(0, sequence);
    assert_eq!(arena.read(1 << 20, 4), [7, 0, 0, 0]);
}

#[test]
fn a_wild_store_is_sticky_and_only_in_its_own_session() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let Ready { guest: mut neighbour, arena, module: other, _device: _other } = ready(false);
    let (store, _) = find(&mut guest, module, 0, "store");
    let sequence = launch(&mut guest, 0, store, &0x1234_0000_u64.to_le_bytes());
    eventually("the sticky error", || guest.sticky() != 0);
    assert_eq!(guest.sticky(), 700);
    assert!(guest.completed(0) < sequence);
    let (store, _) = find(&mut neighbour, other, 0, "store");
    let sequence = launch(&mut neighbour, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    neighbour.wait(0, sequence);
    assert_eq!(arena.read(1 << 20, 4), [7, 0, 0, 0]);
}

#[test]
fn events_take_the_time_of_what_lies_between() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let (store, _) = find(&mut guest, module, 0, "store");
    let (start, end) = (Id::<Event>::new(0, 1), Id::<Event>::new(1, 1));
    for event in [start, end] {
        guest.post(wire::event_create::CALL, |w| wire::event_create::put(w, Mint(event), 0));
    }
    guest.work(wire::event_record::CALL, 0, |w| wire::event_record::put(w, start, 0));
    for _ in 0..20 {
        launch(&mut guest, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    }
    let last = guest.work(wire::event_record::CALL, 0, |w| wire::event_record::put(w, end, 0));
    guest.wait(0, last);
    let (result, fields) = guest.call(wire::event_elapsed::CALL, |w| wire::event_elapsed::put(w, start, end));
    assert_eq!(result, 0);
    let milliseconds = wire::event_elapsed::Reply::get(&fields).unwrap().milliseconds;
    assert!(milliseconds > 0.0 && milliseconds < 20_000.0, "{milliseconds}");
}

#[test]
fn memory_and_contexts_come_and_go() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let before = guest.info();
    for round in 0..20_u64 {
        let large = guest.allocate((3 << 20) + round).unwrap();
        let small = guest.allocate(1000 + round).unwrap();
        guest.work(wire::fill::CALL, 0, |w| {
            wire::fill::put(w, DeviceAddress(large), 0, 1, 5, (3 << 20) + round, 1)
        });
        let last = guest.work(wire::copy_on_device::CALL, 0, |w| {
            wire::copy_on_device::put(w, DeviceAddress(small), DeviceAddress(large), 1000)
        });
        guest.wait(0, last);
        for address in [large, small] {
            guest.post(wire::memory_free::CALL, |w| wire::memory_free::put(w, DeviceAddress(address)));
        }
    }
    assert_eq!(guest.info(), before);
    let primary = guest.context;
    let second = guest.create_context(1, 5);
    guest.context = second.raw();
    guest.allocate(1 << 20).unwrap();
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::put(w, second)).0, 0);
    guest.context = primary;
    assert_eq!(guest.info(), before);
    let first = Id::from_raw(primary).unwrap();
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::put(w, first)).0, 0);
    let (result, _) = guest.call(wire::module_function::CALL, |w| {
        wire::module_function::put(w, module, Mint(Id::new(9, 1)), Name(b"add"))
    });
    assert_eq!(result, 400, "the module went with its context");
    // The arena is pinned again, through the context that comes next.
    guest.context = guest.create_context(0, 0).raw();
    let device = guest.allocate(4096).unwrap();
    let header = guest.on(wire::copy_to_device::CALL, 0);
    let (result, _) =
        guest.ask(header, |w| wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA), 4096));
    assert_eq!(result, 0);
    guest.wait(0, header.sequence);
}

/// Prints a line, then fails an assertion.
const ASSERTS: &str = "
.version 8.0
.target sm_80
.address_size 64

.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 values);
.extern .func __assertfail(.param .b64 message, .param .b64 file, .param .b32 line, .param .b64 function, .param .b64 size);

.global .align 1 .b8 before[8] = {98, 101, 102, 111, 114, 101, 10, 0};
.global .align 1 .b8 message[6] = {120, 32, 62, 32, 48, 0};
.global .align 1 .b8 file[5] = {97, 46, 99, 117, 0};
.global .align 1 .b8 name[2] = {107, 0};

.visible .entry asserts()
{
    .reg .b64 %rd<6>;
    .reg .b32 %r<2>;
    mov.u64 %rd1, before;
    cvta.global.u64 %rd1, %rd1;
    mov.u64 %rd5, 0;
    {
    .param .b64 format;
    st.param.b64 [format+0], %rd1;
    .param .b64 values;
    st.param.b64 [values+0], %rd5;
    .param .b32 result;
    call.uni (result), vprintf, (format, values);
    ld.param.b32 %r1, [result+0];
    }
    mov.u64 %rd2, message;
    cvta.global.u64 %rd2, %rd2;
    mov.u64 %rd3, file;
    cvta.global.u64 %rd3, %rd3;
    mov.u64 %rd4, name;
    cvta.global.u64 %rd4, %rd4;
    {
    .param .b64 p0;
    st.param.b64 [p0+0], %rd2;
    .param .b64 p1;
    st.param.b64 [p1+0], %rd3;
    .param .b32 p2;
    st.param.b32 [p2+0], 7;
    .param .b64 p3;
    st.param.b64 [p3+0], %rd4;
    .param .b64 p4;
    st.param.b64 [p4+0], 1;
    call.uni __assertfail, (p0, p1, p2, p3, p4);
    }
    ret;
}
";

/// The next piece of what the driver wrote to standard error, if there is any.
fn next_report(guest: &mut Guest) -> Option<String> {
    let (result, fields) = guest.call(wire::console_read::CALL, wire::console_read::put);
    assert_eq!(result, 0);
    let read = wire::console_read::Reply::get(&fields).unwrap();
    let text = &read.text[..usize::try_from(read.length).unwrap()];
    assert!(read.error || text.is_empty(), "standard output comes first");
    (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
}

// Promise: C13
#[test]
fn the_text_of_an_assertion_and_what_was_printed_before_it_reach_the_guest() {
    let device = Device::new();
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, module) = load(&mut guest, &arena, ASSERTS, true);
    assert_eq!(result, 0);
    let (asserts, _) = find(&mut guest, module, 0, "asserts");
    launch(&mut guest, 0, asserts, &[]);
    eventually("the sticky error", || guest.sticky() != 0);
    assert_eq!(guest.sticky(), 710);
    let (result, fields) = guest.call(wire::console_read::CALL, wire::console_read::put);
    assert_eq!(result, 0, "text is fetched after a failure, too");
    let read = wire::console_read::Reply::get(&fields).unwrap();
    let text = String::from_utf8_lossy(&read.text[..usize::try_from(read.length).unwrap()]).into_owned();
    // A line of each thread of the block, before the assertions end the kernel.
    assert_eq!((read.error, text), (false, "before\n".repeat(32)));
    let reports: Vec<_> = (0..).map_while(|_| next_report(&mut guest)).collect();
    let expected: String = (0..32)
        .map(|x| format!("a.cu:7: k: block: [0,0,0], thread: [{x},0,0] Assertion `x > 0` failed.\n"))
        .collect();
    assert_eq!(reports.concat(), expected);
}

// Promise: C13
#[test]
fn the_log_of_a_worker_whose_kernels_may_print_stays_on_the_host() {
    let device = Device::new();
    let mut guest = device.guest_with_log(limits::MAPPED_RUNS, false, Stdio::piped());
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, _) = load(&mut guest, &arena, ASSERTS, true);
    assert_eq!(result, 0);
    // Not made of whole pages: refused, which is a line of the log.
    let odd = [Run { offset: 0, bytes: 100 }];
    guest.send_attach(2, ARENA + (8 << 20), 100, &odd, &memory_file(4096), false);
    let log = BufReader::new(guest.worker.stderr.take().expect("a pipe"));
    let said =
        log.lines().map(|line| line.expect("text")).find(|line| line.contains("guest memory is refused"));
    assert!(said.is_some(), "the log ended");
    assert_eq!(next_report(&mut guest), None);
}

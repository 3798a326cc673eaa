//! The same worker on the software GPU: real kernels, real faults.

use crate::{
    arbiter::{Elsewhere, Terms},
    code::{ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_PTX, OUT_OF_MEMORY},
    guest::{ARENA, Arena, Guest, Start, memory_file},
    streams::launch,
};
use sluice_kit::{
    machine::has_machine_code,
    wait::{TIMEOUT, eventually},
};
use sluice_protocol::{
    calls::wire,
    field::{
        ArenaIn, ArenaOut, ArenaText, Bytes, CarriedOptions, DeviceAddress, ElementSize, LaunchAttributes,
        Mint, Name, Size, Take,
    },
    handle::{Event, Function, Id, Module},
    jit::ReportHead,
    limits,
};
use sluice_shared_memory::Run;
use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::Stdio,
    sync::mpsc,
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

/// A software GPU and the arbiter that lends its memory to the workers of one VM.
pub(crate) struct Device {
    arbiter: Elsewhere,
    driver: PathBuf,
    environment: Vec<(&'static str, OsString)>,
    /// Operations that it takes for one stream; the workers know it.
    queue: u64,
    state: TempDir,
}

impl Device {
    /// A device with much memory.
    pub(crate) fn new() -> Device {
        Device::with(&[], Terms { limit: u64::MAX / 2, ..Terms::default() })
    }

    /// A device of 358 MiB whose fresh memory is filled with a pattern.
    pub(crate) fn small(terms: Terms) -> Device {
        let variables = [
            ("SLUICE_SOFTGPU_MODEL", "A10-24"),
            ("SLUICE_SOFTGPU_SCALE", "64"),
            ("SLUICE_SOFTGPU_FILL", "0xA5"),
            ("SLUICE_SOFTGPU_CONTEXT_BYTES", "4194304"),
        ];
        Device::with(&variables, terms)
    }

    /// A device that takes `queue` operations for one stream before it makes its caller wait.
    pub(crate) fn with_queue(queue: u64) -> Device {
        let variables = [("SLUICE_SOFTGPU_QUEUE_DEPTH", &*queue.to_string())];
        Device { queue, ..Device::with(&variables, Terms { limit: u64::MAX / 2, ..Terms::default() }) }
    }

    fn with(variables: &[(&'static str, &str)], terms: Terms) -> Device {
        let state = TempDir::new().unwrap();
        let driver = std::env::current_exe().unwrap().with_file_name("libsoftgpu_cuda.so");
        let mut environment = vec![("SLUICE_SOFTGPU_STATE", state.path().into())];
        environment.extend(variables.iter().map(|(name, value)| (*name, OsString::from(value))));
        let of_lender: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let arbiter = Elsewhere::start(&driver, &of_lender, terms);
        Device { arbiter, driver, environment, queue: limits::DRIVER_QUEUE, state }
    }

    pub(crate) fn guest(&self, mapped_runs: u32, scrub_every_free: bool) -> Guest {
        self.guest_with_log(mapped_runs, scrub_every_free, Stdio::inherit())
    }

    /// The number of times that the device's memory has these bytes, from an offset that is a multiple of 16 on. The device is as its
    /// processes left it.
    pub(crate) fn search(&self, needle: &[u8; 16]) -> usize {
        let mut folders = vec![self.state.path().to_path_buf()];
        let (mut found, mut searched) = (0, 0);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Ok(bytes) = std::fs::read(&path) {
                    searched += bytes.len();
                    found += bytes.as_chunks().0.iter().filter(|part| *part == needle).count();
                }
            }
        }
        assert!(searched > 64 << 20, "the device keeps its memory in files of its folder");
        found
    }

    fn guest_with_log(&self, mapped_runs: u32, scrub_every_free: bool, log: Stdio) -> Guest {
        let environment: Vec<_> =
            self.environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let mut guest = Guest::ready(Start {
            mapped_runs,
            driver_queue: self.queue,
            environment: &environment,
            lenders: vec![self.arbiter.admit()],
            scrub_every_free,
            log,
            ..Start::on(self.driver.clone())
        });
        guest.begin();
        guest
    }
}

/// A session on a software GPU of its own, with the module loaded.
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
    let (result, _) = guest.call(wire::module_load::CALL, |w| {
        wire::module_load::Args {
            module: Mint(module),
            library,
            image: ArenaIn { address: ARENA, bytes: text.len() as u64 + 1 },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(4096 - ReportHead::BYTES as u64),
            report: ArenaText { address: ARENA + (1 << 20), bytes: 4096 },
        }
        .put(w)
    });
    assert!(result != INVALID_PTX, "{}", String::from_utf8_lossy(&arena.read(1 << 20, 4096)));
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
fn exhausted_device_refuses_until_a_worker_dies() {
    let device = Device::new();
    let [mut one, mut two] = [(); 2].map(|()| device.guest(limits::MAPPED_RUNS, false));
    // The memory is not touched, so it costs the host nothing.
    while one.allocate(512 << 20).is_ok() {}
    while one.allocate(2 << 20).is_ok() {}
    assert_eq!(two.allocate(64 << 20), Err(OUT_OF_MEMORY));
    assert_eq!(two.allocate(64 << 20), Err(OUT_OF_MEMORY), "the worker survives");
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
        wire::module_function::Args { module, function: Mint(id), name: Name(name.as_bytes()) }.put(w)
    });
    assert_eq!(result, 0, "{name}");
    (id, wire::module_function::Reply::get(&fields).unwrap())
}

/// Loads a kernel that stores to the address in its only parameter.
pub(crate) fn store(guest: &mut Guest) -> Id<Function> {
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, module) = load(guest, &arena, PTX, false);
    assert_eq!(result, 0);
    find(guest, module, 0, "store").0
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

// Promise: V15
#[test]
fn kernel_adds_vectors_in_place_and_gathered() {
    const COUNT: u16 = 3000;
    // Once in place, and once with everything gathered: control resource, image, log and copies.
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
            guest.work(wire::memcpy_htod::CALL, 0, |w| {
                wire::memcpy_htod::Args {
                    to: DeviceAddress(to),
                    from: ArenaIn { address: ARENA + from, bytes },
                }
                .put(w)
            });
        }
        let mut parameters = [a, b, sum].map(u64::to_le_bytes).concat();
        parameters.extend(u32::from(COUNT).to_le_bytes());
        guest.work(wire::launch::CALL, 0, |w| {
            wire::launch::Args {
                function: add,
                grid: [12, 1, 1],
                block: [256, 1, 1],
                shared: 0,
                cooperative: false,
                attributes: LaunchAttributes(&[]),
                parameters: Bytes(&parameters),
            }
            .put(w)
        });
        let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
            wire::memcpy_dtoh::Args {
                to: ArenaOut { address: ARENA + (3 << 20), bytes },
                from: DeviceAddress(sum),
            }
            .put(w)
        });
        guest.wait(0, last);
        let expected: Vec<f32> = (0..COUNT).map(|i| f32::from(i) * 1.5).collect();
        assert_eq!(floats(&arena.read(3 << 20, usize::from(COUNT) * 4)), expected);
        assert_eq!(
            guest
                .call(wire::module_unload::CALL, |w| wire::module_unload::Args { module: Take(module) }
                    .put(w))
                .0,
            0
        );
    }
}

const COUNTS: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .entry count(.param .u64 at)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [at];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r1, %r1, 3;
    sub.u32 %r1, %r1, 2;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

// Promise: S96
#[test]
fn hot_kernel_of_a_session_runs_as_machine_code() {
    if !has_machine_code() {
        sluice_skip::skip("there is no machine code for this processor");
        return;
    }
    let mut device = Device::new();
    device.environment.push(("SLUICE_SOFTGPU_LOG", "1".into()));
    let mut guest = device.guest_with_log(limits::MAPPED_RUNS, false, Stdio::piped());
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, module) = load(&mut guest, &arena, COUNTS, false);
    assert_eq!(result, 0);
    let (count, _) = find(&mut guest, module, 0, "count");
    arena.write(2 << 20, &[0; 4]);
    let at = ARENA + (2 << 20);
    // A function gets machine code when it has been entered some tens of times.
    for _ in 0..200 {
        let sequence = launch(&mut guest, 0, count, &at.to_le_bytes());
        guest.wait(0, sequence);
    }
    assert_eq!(arena.read(2 << 20, 4), 200u32.to_le_bytes());
    // The pipe stays open as long as the worker lives, so a reader of a line that never comes would not return.
    let log = BufReader::new(guest.worker.stderr.take().expect("a pipe"));
    let (found, made) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = log.lines().map(|line| line.expect("text"));
        if let Some(line) = lines.find(|line| line.contains("machine code")) {
            // The test may have ended.
            _ = found.send(line);
        }
    });
    let made = made.recv_timeout(TIMEOUT).expect("the worker logs a line about machine code");
    assert!(made.starts_with("softgpu: count: machine code for "), "{made}");
    // The kernel shows the mappings of a confined process to root only.
    if rustix::process::geteuid().is_root() {
        assert!(executed_bytes(guest.worker.id()) > 0, "no page with code was executed");
    }
}

/// Bytes of its area for machine code that a worker has executed: it is mapped for that only.
fn executed_bytes(worker: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{worker}/smaps")).unwrap();
    let area = maps.split_once("r-xs").expect("an area").1;
    assert!(area.lines().next().is_some_and(|name| name.contains("/memfd:softgpu-code")), "{area}");
    let resident = area.lines().find_map(|line| line.strip_prefix("Rss:")).expect("resident memory");
    resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn kernel_accesses_pinned_memory_at_the_guests_address() {
    let Ready { mut guest, arena, module, _device } = ready(true);
    let (store, _) = find(&mut guest, module, 0, "store");
    let sequence = launch(&mut guest, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    guest.wait(0, sequence);
    assert_eq!(arena.read(1 << 20, 4), [7, 0, 0, 0]);
}

#[test]
fn wild_store_is_sticky_in_its_own_session_only() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let Ready { guest: mut neighbour, arena, module: other, _device: _other } = ready(false);
    let (store, _) = find(&mut guest, module, 0, "store");
    let sequence = launch(&mut guest, 0, store, &0x1234_0000_u64.to_le_bytes());
    eventually("the sticky error", || guest.sticky() != 0);
    assert_eq!(guest.sticky(), ILLEGAL_ADDRESS);
    assert!(guest.completed(0) < sequence);
    let (store, _) = find(&mut neighbour, other, 0, "store");
    let sequence = launch(&mut neighbour, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    neighbour.wait(0, sequence);
    assert_eq!(arena.read(1 << 20, 4), [7, 0, 0, 0]);
}

#[test]
fn events_measure_the_time_of_the_work_between_them() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let (store, _) = find(&mut guest, module, 0, "store");
    let (start, end) = (Id::<Event>::new(0, 1), Id::<Event>::new(1, 1));
    for event in [start, end] {
        guest.post(wire::event_create::CALL, |w| {
            wire::event_create::Args { event: Mint(event), flags: 0 }.put(w)
        });
    }
    guest.work(wire::event_record::CALL, 0, |w| wire::event_record::Args { event: start }.put(w));
    for _ in 0..20 {
        launch(&mut guest, 0, store, &(ARENA + (1 << 20)).to_le_bytes());
    }
    let last = guest.work(wire::event_record::CALL, 0, |w| wire::event_record::Args { event: end }.put(w));
    guest.wait(0, last);
    let (result, fields) =
        guest.call(wire::event_elapsed::CALL, |w| wire::event_elapsed::Args { start, end }.put(w));
    assert_eq!(result, 0);
    let milliseconds = wire::event_elapsed::Reply::get(&fields).unwrap().milliseconds;
    assert!(milliseconds > 0.0 && milliseconds < 20_000.0, "{milliseconds}");
}

#[test]
fn memory_and_contexts_can_be_recreated() {
    let Ready { mut guest, module, _device, .. } = ready(false);
    let before = guest.info();
    for round in 0..20_u64 {
        let large = guest.allocate((3 << 20) + round).unwrap();
        let small = guest.allocate(1000 + round).unwrap();
        guest.work(wire::memset::CALL, 0, |w| {
            wire::memset::Args {
                to: DeviceAddress(large),
                pitch: 0,
                element: ElementSize::Byte,
                value: 5,
                width: (3 << 20) + round,
                height: 1,
            }
            .put(w)
        });
        let last = guest.work(wire::memcpy_dtod::CALL, 0, |w| {
            wire::memcpy_dtod::Args { to: DeviceAddress(small), from: DeviceAddress(large), bytes: 1000 }
                .put(w)
        });
        guest.wait(0, last);
        for address in [large, small] {
            guest.post(wire::memory_free::CALL, |w| {
                wire::memory_free::Args { address: DeviceAddress(address) }.put(w)
            });
        }
    }
    assert_eq!(guest.info(), before);
    let primary = guest.session.context;
    let second = guest.create_context(1, 5);
    guest.session.context = second.raw();
    guest.allocate(1 << 20).unwrap();
    assert_eq!(
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context: second }.put(w)).0,
        0
    );
    guest.session.context = primary;
    assert_eq!(guest.info(), before);
    let first = Id::from_raw(primary).unwrap();
    assert_eq!(
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context: first }.put(w)).0,
        0
    );
    let (result, _) = guest.call(wire::module_function::CALL, |w| {
        wire::module_function::Args { module, function: Mint(Id::new(9, 1)), name: Name(b"add") }.put(w)
    });
    assert_eq!(result, INVALID_HANDLE, "the module went with its context");
    // The arena is pinned again, through the next context.
    guest.session.context = guest.create_context(0, 0).raw();
    let device = guest.allocate(4096).unwrap();
    let header = guest.on(wire::memcpy_htod::CALL, 0);
    let (result, _) = guest.ask(header, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA, bytes: 4096 } }
            .put(w)
    });
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
    let (result, fields) = guest.call(wire::console_read::CALL, |w| wire::console_read::Args {}.put(w));
    assert_eq!(result, 0);
    let read = wire::console_read::Reply::get(&fields).unwrap();
    let text = &read.text[..usize::try_from(read.length).unwrap()];
    assert!(read.error || text.is_empty(), "standard output comes first");
    (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
}

// Promise: C13
#[test]
fn guest_gets_the_text_of_an_assertion_and_the_output_before_it() {
    let device = Device::new();
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, module) = load(&mut guest, &arena, ASSERTS, true);
    assert_eq!(result, 0);
    let (asserts, _) = find(&mut guest, module, 0, "asserts");
    launch(&mut guest, 0, asserts, &[]);
    eventually("the sticky error", || guest.sticky() != 0);
    assert_eq!(guest.sticky(), 710);
    let (result, fields) = guest.call(wire::console_read::CALL, |w| wire::console_read::Args {}.put(w));
    assert_eq!(result, 0, "text can be fetched after a failure, too");
    let read = wire::console_read::Reply::get(&fields).unwrap();
    let text = String::from_utf8_lossy(&read.text[..usize::try_from(read.length).unwrap()]).into_owned();
    // One line of each thread of the block, before the assertions end the kernel.
    assert_eq!((read.error, text), (false, "before\n".repeat(32)));
    let reports: Vec<_> = (0..).map_while(|_| next_report(&mut guest)).collect();
    let expected: String = (0..32)
        .map(|x| format!("a.cu:7: k: block: [0,0,0], thread: [{x},0,0] Assertion `x > 0` failed.\n"))
        .collect();
    assert_eq!(reports.concat(), expected);
}

// Promise: C13
#[test]
fn log_of_a_worker_whose_kernels_may_print_stays_on_the_host() {
    let device = Device::new();
    let mut guest = device.guest_with_log(limits::MAPPED_RUNS, false, Stdio::piped());
    let arena = guest.attach(1, ARENA, 4 << 20);
    let (result, _) = load(&mut guest, &arena, ASSERTS, true);
    assert_eq!(result, 0);
    // An arena that is not made of whole pages is refused, which is a line of the log.
    let odd = [Run { offset: 0, bytes: 100 }];
    guest.send_attach(2, ARENA + (8 << 20), 100, &odd, &memory_file(4096), false);
    let log = BufReader::new(guest.worker.stderr.take().expect("a pipe"));
    let said =
        log.lines().map(|line| line.expect("text")).find(|line| line.contains("guest memory is refused"));
    assert!(said.is_some(), "the log ended");
    assert_eq!(next_report(&mut guest), None);
}

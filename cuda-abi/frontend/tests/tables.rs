//! The export tables, called as a C program calls them.

#![expect(unsafe_code, reason = "a table is called as a C program calls it")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use sluice_cuda_frontend::In;
use sluice_cuda_frontend::tables::{self, DeviceIdentity, Hooks, Monitor, MonitoredDevice, MonitoredProcess};

const VERSION: u32 = 13050;
const NOT_SUPPORTED: u32 = 801;
/// The device at which the driver panics.
const BUG: i32 = 99;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static FORKED: Cell<bool> = const { Cell::new(false) };
}

/// A driver with two devices. Its state belongs to the thread, so that tests are independent.
struct Driver {
    devices: [DeviceIdentity; 2],
    refused: Mutex<Vec<[u8; 16]>>,
    unsupported: Mutex<Vec<([u8; 16], usize)>>,
}

impl Hooks for Driver {
    fn ready(&self) -> Result<(), u32> {
        if FORKED.get() { Err(3) } else { Ok(()) }
    }
    fn primary_context(&self, device: i32) -> Result<usize, u32> {
        match device {
            0 | 1 => Ok(0x1000 + device.unsigned_abs() as usize),
            BUG => panic!("a bug of the driver"),
            _ => Err(101),
        }
    }
    fn current_context(&self) -> usize {
        CURRENT.get()
    }
    fn context_id(&self, context: usize) -> Result<u64, u32> {
        if context == 0xdead { Err(709) } else { Ok(context as u64 + 5) }
    }
    fn stream_id(&self, stream: u64) -> Result<u64, u32> {
        if stream == 0xdead { Err(400) } else { Ok(stream + 7) }
    }
    fn load_module(&self, image: In<u8, u32>) -> Result<usize, u32> {
        if image.address() == 0xbad { Err(200) } else { Ok(usize::try_from(image.address()).unwrap() + 1) }
    }
    fn functions(&self, module: usize) -> Result<Vec<usize>, u32> {
        if module == 0xbad { Err(400) } else { Ok(vec![module + 1, module + 2]) }
    }
    fn devices(&self) -> &[DeviceIdentity] {
        &self.devices
    }
    fn driver_version(&self) -> u32 {
        VERSION
    }
    fn refused(&self, uuid: [u8; 16]) {
        self.refused.lock().unwrap().push(uuid);
    }
    fn unsupported(&self, uuid: [u8; 16], slot: usize) {
        self.unsupported.lock().unwrap().push((uuid, slot));
    }
    fn monitor(&self) -> Option<&dyn Monitor> {
        Some(self)
    }
}

impl Monitor for Driver {
    fn devices(&self) -> Result<u32, u32> {
        Ok(2)
    }
    fn device(&self, index: u32) -> Result<MonitoredDevice, u32> {
        let identity = self.devices.get(index as usize).ok_or(101_u32)?;
        Ok(MonitoredDevice { uuid: identity.uuid, name: [0; 128] })
    }
    fn memory(&self, index: u32) -> Result<(u64, u64), u32> {
        Ok((100, u64::from(index)))
    }
    fn processes(&self, _index: u32, into: &mut [MonitoredProcess]) -> Result<u32, u32> {
        for (process, entry) in (1..=3).zip(into) {
            *entry = MonitoredProcess { process, pad: 0, bytes: 7 };
        }
        Ok(3)
    }
    fn attribute(&self, _index: u32, attribute: u32) -> Result<i32, u32> {
        i32::try_from(attribute).map_err(|_| 1)
    }
}

static DRIVER: Driver = Driver {
    devices: [
        DeviceIdentity { uuid: [1; 16], pci_domain: 0, pci_bus: 1, pci_device: 0 },
        DeviceIdentity { uuid: [2; 16], pci_domain: 0, pci_bus: 2, pci_device: 0 },
    ],
    refused: Mutex::new(Vec::new()),
    unsupported: Mutex::new(Vec::new()),
};

/// Slot `slot` of a supported table.
fn slot(uuid: [u8; 16], slot: usize) -> *const c_void {
    tables::install(&DRIVER);
    let table: *const *const c_void = tables::get(uuid).unwrap().cast();
    // SAFETY: callers stay within the sizes listed in SERVED.
    let slot = unsafe { table.add(slot) };
    // SAFETY: a slot of a table is always valid to read.
    unsafe { slot.read() }
}

/// Calls a slot with three arguments in the registers in which C passes them.
fn call<A, B, C>(uuid: [u8; 16], number: usize, a: A, b: B, c: C) -> u32 {
    // SAFETY: every slot takes at most three arguments and returns a result code.
    let function: unsafe extern "C" fn(A, B, C) -> u32 = unsafe { std::mem::transmute(slot(uuid, number)) };
    // SAFETY: the tests pass arguments of the slot's types.
    unsafe { function(a, b, c) }
}

/// (table, slots, supported slots)
const SERVED: &[([u8; 16], usize, &[usize])] = &[
    (tables::CUDART_INTERFACE, 13, &[2, 6, 12]),
    (tables::RUNTIME_CALLBACKS, 7, &[2, 6]),
    (tables::TOOLS_TLS, 4, &[2]),
    (tables::CONTEXT_STORAGE, 4, &[0, 1, 2]),
    #[cfg(feature = "cudart-handshake")]
    (tables::HANDSHAKE, 3, &[1]),
    (tables::CONTEXT_CHECKS, 15, &[2, 3]),
    (tables::TOOLS_CONTEXT, 95, &[4, 39, 51]),
    (tables::CUBLAS, 64, &[]),
    (tables::CUPTI, 64, &[]),
    (tables::MODULE_FUNCTIONS, 64, &[7]),
    (tables::MONITOR, 7, &[1, 2, 3, 4, 5, 6]),
];

#[test]
fn tables_have_one_address_and_begin_with_their_size() {
    let mut addresses = BTreeSet::new();
    for &(uuid, slots, _) in SERVED {
        assert_eq!(tables::get(uuid), tables::get(uuid));
        assert!(addresses.insert(tables::get(uuid).unwrap()));
        if uuid != tables::CONTEXT_STORAGE {
            assert_eq!(slot(uuid, 0).addr(), slots * 8);
        }
        assert!(tables::name(uuid).is_some());
    }
}

// Promise: C132
#[test]
fn unsupported_slot_returns_not_supported_writes_nothing_and_names_itself_once() {
    let mut expected = Vec::new();
    for &(uuid, slots, served) in SERVED {
        let first = usize::from(uuid != tables::CONTEXT_STORAGE);
        for number in (first..slots).filter(|number| !served.contains(number)) {
            for _ in 0..2 {
                let mut words = [7_usize; 3];
                let [a, b, c] = &mut words;
                assert_eq!(call(uuid, number, a, b, c), NOT_SUPPORTED, "{:?}[{number}]", tables::name(uuid));
                assert_eq!(words, [7; 3]);
            }
            expected.push((uuid, number));
        }
        // In a forked process, a served slot returns before it reads an argument.
        FORKED.set(true);
        for number in served {
            assert_ne!(call(uuid, *number, 0_usize, 0_usize, 0_usize), NOT_SUPPORTED);
        }
        FORKED.set(false);
    }
    assert_eq!(*DRIVER.unsupported.lock().unwrap(), expected);
}

// Promise: C135
#[test]
fn refused_table_is_reported_once() {
    tables::install(&DRIVER);
    let optional = [tables::RUNTIME_OPTIONAL, tables::NVRTC_CACHE, tables::PROFILER_TOOLS];
    for uuid in optional.into_iter().chain([[0; 16], [0xff; 16], [0x42; 16]]) {
        for _ in 0..2 {
            assert_eq!(tables::get(uuid), None);
            let reports = DRIVER.refused.lock().unwrap().iter().filter(|refused| **refused == uuid).count();
            assert_eq!(reports, 1, "{uuid:02x?}");
        }
    }
    assert!(optional.iter().all(|uuid| tables::name(*uuid).is_some()));
    assert_eq!(tables::name([0; 16]), None);
}

#[cfg(not(feature = "cudart-handshake"))]
#[test]
fn handshake_table_without_its_feature_is_refused() {
    tables::install(&DRIVER);
    assert_eq!(tables::get(tables::HANDSHAKE), None);
    assert!(DRIVER.refused.lock().unwrap().contains(&tables::HANDSHAKE));
}

#[test]
fn context_slots_return_values_of_the_driver_and_refuse_bad_arguments() {
    let mut context = 0_usize;
    assert_eq!(call(tables::CUDART_INTERFACE, 2, &raw mut context, 1_i32, 0), 0);
    assert_eq!(context, 0x1001);
    assert_eq!(call(tables::CUDART_INTERFACE, 2, &raw mut context, -1_i32, 0), 101);
    assert_eq!(call(tables::CUDART_INTERFACE, 2, ptr::null_mut::<usize>(), 0_i32, 0), 1);
    assert_eq!(context, 0x1001);
    assert_eq!(call(tables::CUDART_INTERFACE, 12, 0, 0, 0), 0);

    CURRENT.set(0xc0);
    assert_eq!(call(tables::TOOLS_TLS, 2, &raw mut context, 0, 0), 0);
    assert_eq!(context, 0xc0);

    let mut state = 9_u32;
    let mut detail: *mut c_void = ptr::without_provenance_mut(9);
    assert_eq!(call(tables::CONTEXT_CHECKS, 2, 0xc0_usize, &raw mut state, &raw mut detail), 0);
    assert_eq!((state, detail.addr()), (0, 9));
    assert_eq!(call(tables::CONTEXT_CHECKS, 3, 0, 0, 0), 0);

    let mut id = 0_u64;
    assert_eq!(call(tables::TOOLS_CONTEXT, 4, 0x20_usize, &raw mut id, 0), 0);
    assert_eq!(id, 0x25);
    assert_eq!(call(tables::TOOLS_CONTEXT, 4, 0_usize, &raw mut id, 0), 0);
    assert_eq!(id, 0xc5, "null is the current context");
    assert_eq!(call(tables::TOOLS_CONTEXT, 4, 0xdead_usize, &raw mut id, 0), 709);
    CURRENT.set(0);
    assert_eq!(call(tables::TOOLS_CONTEXT, 4, 0_usize, &raw mut id, 0), 201);
    assert_eq!(id, 0xc5);
}

// Promise: C140
#[test]
fn stream_slots_name_the_default_streams_and_refuse_those_of_other_contexts() {
    type Object = unsafe extern "C" fn(usize, u64, *mut u64, u32) -> u32;
    // SAFETY: the slot has this type.
    let object_of: Object = unsafe { std::mem::transmute(slot(tables::TOOLS_CONTEXT, 51)) };
    CURRENT.set(0xc0);
    for (stream, per_thread, expected) in
        [(0, 0, 1), (1, 0, 1), (0, 1, 2), (2, 1, 2), (0x5000, 0, 0x5000), (0x5000, 1, 0x5000)]
    {
        let (mut object, mut id) = (0, 0);
        // SAFETY: the place is valid.
        assert_eq!(unsafe { object_of(0xc0, stream, &raw mut object, per_thread) }, 0, "{stream:#x}");
        assert_eq!(object, expected, "{stream:#x}");
        assert_eq!(call(tables::TOOLS_CONTEXT, 39, 0xc0_usize, object, &raw mut id), 0);
        assert_eq!(id, expected + 7);
    }
    let mut object = 9;
    for (context, stream, expected) in [(0xc1, 0, NOT_SUPPORTED), (0xc0, 0xdead, 400), (0xc1, 0x5000, 0)] {
        object = 9;
        // SAFETY: as above.
        assert_eq!(unsafe { object_of(context, stream, &raw mut object, 0) }, expected, "{context:#x}");
        assert_eq!(object == 9, expected != 0);
    }
    assert_eq!(call(tables::TOOLS_CONTEXT, 39, 0xc1_usize, 1_u64, &raw mut object), NOT_SUPPORTED);
    // SAFETY: a null place is refused.
    assert_eq!(unsafe { object_of(0xc0, 0, ptr::null_mut(), 0) }, 1);
    CURRENT.set(0);
    // SAFETY: as above.
    assert_eq!(unsafe { object_of(0, 0, &raw mut object, 0) }, 201);
}

// Promise: C125
#[test]
fn module_slot_loads_the_image_of_an_old_runtime_and_refuses_unknown_arguments() {
    type Load = unsafe extern "C" fn(*mut usize, usize, usize, usize, u32) -> u32;
    // SAFETY: the slot has this type.
    let load: Load = unsafe { std::mem::transmute(slot(tables::CUDART_INTERFACE, 6)) };
    let mut module = 7_usize;
    for (image, third, fourth, fifth, expected) in [
        (0xbad, 0, 0, 0, 200),
        (0, 0, 0, 0, 1),
        (0x100, 1, 0, 0, NOT_SUPPORTED),
        (0x100, 0, 1, 0, NOT_SUPPORTED),
        (0x100, 0, 0, 1, NOT_SUPPORTED),
    ] {
        // SAFETY: the driver of this test reads no image.
        assert_eq!(unsafe { load(&raw mut module, image, third, fourth, fifth) }, expected, "{image:#x}");
        assert_eq!(module, 7);
    }
    // SAFETY: a null place is allowed.
    assert_eq!(unsafe { load(ptr::null_mut(), 0x100, 0, 0, 0) }, 1);
    // SAFETY: as above.
    assert_eq!(unsafe { load(&raw mut module, 0x100, 0, 0, 0) }, 0);
    assert_eq!(module, 0x101);
}

extern "C" fn visit(seen: *mut Vec<usize>, function: usize) {
    // SAFETY: the test passes its own list.
    unsafe { &mut *seen }.push(function);
}

// Promise: C127
#[test]
fn functions_of_a_module_are_visited_in_order_and_counted() {
    type Visitor = extern "C" fn(*mut Vec<usize>, usize);
    type Visit = unsafe extern "C" fn(usize, usize, Option<Visitor>, *mut Vec<usize>) -> u32;
    // SAFETY: the slot has this type.
    let enumerate: Visit = unsafe { std::mem::transmute(slot(tables::MODULE_FUNCTIONS, 7)) };
    let mut seen = Vec::new();
    for (module, visitor, expected) in
        [(0x100, Some(visit as Visitor), 2), (0xbad, Some(visit as Visitor), 0), (0x100, None, 0)]
    {
        // SAFETY: the visitor takes a pointer to this list.
        assert_eq!(unsafe { enumerate(1, module, visitor, &raw mut seen) }, expected, "{module:#x}");
    }
    assert_eq!(seen, [0x101, 0x102]);
    FORKED.set(true);
    // SAFETY: as above.
    assert_eq!(unsafe { enumerate(1, 0x100, Some(visit), &raw mut seen) }, 0);
    FORKED.set(false);
    assert_eq!(seen.len(), 2);
}

#[test]
fn panic_of_the_driver_fails_the_call_and_does_not_end_the_program() {
    let mut context = 7_usize;
    assert_eq!(call(tables::CUDART_INTERFACE, 2, &raw mut context, BUG, 0), 999);
    assert_eq!(context, 7);
}

#[test]
fn monitor_slots_report_devices_memory_and_processes() {
    let (mut devices, mut version, mut value) = (0_u32, 0_u32, 0_i32);
    assert_eq!(call(tables::MONITOR, 1, &raw mut devices, 0, 0), 0);
    assert_eq!(call(tables::MONITOR, 6, &raw mut version, 0, 0), 0);
    assert_eq!(call(tables::MONITOR, 5, 0_u32, 75_u32, &raw mut value), 0);
    assert_eq!((devices, version, value), (2, VERSION, 75));
    let mut device = MonitoredDevice { uuid: [0; 16], name: [1; 128] };
    assert_eq!(call(tables::MONITOR, 2, 1_u32, &raw mut device, 0), 0);
    assert_eq!(device.uuid, [2; 16]);
    assert_eq!(call(tables::MONITOR, 2, 2_u32, &raw mut device, 0), 101);
    let (mut total, mut used) = (0_u64, 0_u64);
    assert_eq!(call(tables::MONITOR, 3, 1_u32, &raw mut total, &raw mut used), 0);
    assert_eq!((total, used), (100, 1));
    let mut list = [MonitoredProcess::default(); 3];
    let mut count = 2_u32;
    assert_eq!(call(tables::MONITOR, 4, 0_u32, &raw mut count, list.as_mut_ptr()), 0);
    assert_eq!(count, 3, "all processes are counted");
    assert_eq!(list.map(|entry| entry.process), [1, 2, 0], "at most as many as fit");
    assert_eq!(call(tables::MONITOR, 4, 0_u32, &raw mut count, ptr::null_mut::<MonitoredProcess>()), 0);
}

#[test]
fn callback_buffers_are_zero_and_keep_their_address() {
    for (number, words) in [(2, 1024), (6, 14)] {
        let ask = || {
            let mut buffer: *mut usize = ptr::null_mut();
            let mut length = 0_usize;
            assert_eq!(call(tables::RUNTIME_CALLBACKS, number, &raw mut buffer, &raw mut length, 0), 0);
            (buffer, length)
        };
        let (buffer, length) = ask();
        assert_eq!(length, words);
        // SAFETY: the slot returns memory of that length.
        assert!(unsafe { std::slice::from_raw_parts(buffer, length) }.iter().all(|word| *word == 0));
        assert_eq!(ask(), (buffer, length));
    }
}

#[test]
fn every_slot_of_a_forked_process_returns_not_initialized() {
    FORKED.set(true);
    // One slot returns a number instead of a code.
    let all = SERVED.iter().filter(|(uuid, ..)| *uuid != tables::MODULE_FUNCTIONS);
    for &(uuid, _, served) in all {
        for &number in served {
            assert_eq!(
                call(uuid, number, 0_usize, 0_usize, 0_usize),
                3,
                "{:?}[{number}]",
                tables::name(uuid)
            );
        }
    }
    FORKED.set(false);
}

static DESTROYED: Mutex<Vec<[usize; 3]>> = Mutex::new(Vec::new());

type Destructor = unsafe extern "C" fn(usize, usize, usize);

extern "C" fn destructor(context: usize, key: usize, value: usize) {
    DESTROYED.lock().unwrap().push([context, key, value]);
    // A runtime may remove its own entry from here: it is removed already, and the store is not locked.
    assert_eq!(call(tables::CONTEXT_STORAGE, 1, context, key, 0), 400);
}

fn put(context: usize, key: usize, value: usize, destructor: Option<Destructor>) -> u32 {
    type Put = unsafe extern "C" fn(usize, usize, usize, Option<Destructor>) -> u32;
    // SAFETY: slot 0 has this type.
    let function: Put = unsafe { std::mem::transmute(slot(tables::CONTEXT_STORAGE, 0)) };
    // SAFETY: the destructor is what the slot expects.
    unsafe { function(context, key, value, destructor) }
}

fn get(context: usize, key: usize) -> Result<usize, u32> {
    let mut value = 0xabc_usize;
    match call(tables::CONTEXT_STORAGE, 2, &raw mut value, context, key) {
        0 => Ok(value),
        error => {
            assert_eq!(value, 0xabc, "nothing is written on an error");
            Err(error)
        }
    }
}

#[test]
fn context_local_storage_runs_destructors_when_its_context_ends() {
    let (one, two) = (0xa100, 0xa200);
    assert_eq!(get(one, 1), Err(400));
    assert_eq!(get(0, 1), Err(201), "no current context");
    assert_eq!(put(0, 1, 2, None), 201);

    assert_eq!(put(one, 1, 11, Some(destructor)), 0);
    assert_eq!(put(one, 2, 12, None), 0);
    assert_eq!(put(one, 3, 13, Some(destructor)), 0);
    assert_eq!(put(two, 1, 21, Some(destructor)), 0);
    assert_eq!((get(one, 1), get(two, 1), get(two, 2)), (Ok(11), Ok(21), Err(400)));

    CURRENT.set(one);
    assert_eq!((get(0, 1), get(0, 2), get(0, 9)), (Ok(11), Ok(12), Err(400)));
    assert_eq!(
        call(tables::CONTEXT_STORAGE, 1, 0_usize, 3_usize, 0),
        0,
        "delete through the current context"
    );
    assert_eq!(get(one, 3), Err(400));
    assert_eq!(call(tables::CONTEXT_STORAGE, 1, one, 3_usize, 0), 400);
    assert_eq!(call(tables::CONTEXT_STORAGE, 2, ptr::null_mut::<usize>(), one, 1_usize), 1);

    tables::context_destroyed(one);
    assert_eq!(*DESTROYED.lock().unwrap(), [[one, 1, 11]], "no destructor for a deleted or a plain entry");
    assert_eq!((get(one, 1), get(one, 2), get(two, 1)), (Err(400), Err(400), Ok(21)));
    tables::context_destroyed(one);
    tables::context_destroyed(two);
    assert_eq!(*DESTROYED.lock().unwrap(), [[one, 1, 11], [two, 1, 21]]);
}

#[cfg(feature = "cudart-handshake")]
#[test]
fn handshake_depends_on_the_facts_of_this_process() {
    use sluice_cuda_frontend::handshake::{Question, answer};

    for (version, unix_seconds) in [(13050, 1), (13051, 2), (13052, 1_800_000_000), (12092, u64::MAX)] {
        let mut words = [0_u64; 2];
        assert_eq!(call(tables::HANDSHAKE, 1, version, unix_seconds, &raw mut words), 0);
        // SAFETY: the function has no conditions.
        let thread = unsafe { libc::pthread_self() };
        let address = |uuid| tables::get(uuid).unwrap().addr() as u64;
        let question = Question {
            driver_version: VERSION,
            version,
            process: std::process::id(),
            thread: (thread & 0xffff_ffff).try_into().unwrap(),
            interface_table: address(tables::CUDART_INTERFACE),
            handshake_table: address(tables::HANDSHAKE),
            entry: slot(tables::HANDSHAKE, 1).addr() as u64,
            unix_seconds,
            devices: &DRIVER.devices,
        };
        assert_eq!(words, answer(&question));
    }
    assert_eq!(call(tables::HANDSHAKE, 1, 13052_u32, 0_u64, ptr::null_mut::<[u64; 2]>()), 1);
}

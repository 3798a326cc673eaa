//! The cost of a launch in the worker, and of sharing for a VM that is alone: one thread submits launches and observes their ends,
//! without a permit, with one that no other VM requests, and with one that another VM requests; and callgrind counts.

use crate::{
    arenas::{Attached, MappedResource},
    current::Current,
    helper::Helper,
    session::{
        ReplyTo, Session,
        objects::{ContextRef, GuestContext},
    },
    submit::{
        Operation, Payload, StreamOrder, Submitter, Work, WorkTarget,
        completion::Completion,
        fences::InFlightFences,
        host_calls::HostCalls,
        queue::SubmitQueue,
        time::{OPEN, PIECES_ALONE, PIECES_SHARED, Time},
    },
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::AsFd as _,
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_driver::{CompilerOptions, Driver, LaunchArguments};
use sluice_kit::{
    budgets::{self, DRIVER_CALLS, DRIVER_CALLS_SHARED, WORKER_LAUNCH},
    counts::{self, Counts},
};
use sluice_messages::custody::page::TELL;
use sluice_protocol::{limits, session};
use sluice_shared_memory::{Mapping, Run};
use std::{env, sync::Arc};

/// The environment of the process under callgrind: the number of launches, and its permit, if it has one.
const LAUNCHES: &str = "SLUICE_COST_LAUNCHES";
const PERMIT: &str = "SLUICE_COST_PERMIT";
/// A multiple of the launches between two markers, in each case.
const BATCH: u64 = 192;
/// System calls by which two runs of a test's program differ at most; one for each batch would be more.
const BY_OTHERS: u64 = 16;

/// Submits launches and observes their ends, with each marker.
fn launches(count: u64, permit: Option<u32>) {
    let path = env::current_exe().expect("a path").with_file_name("libsluice_null_driver.so");
    let driver = Arc::new(Driver::load(&path).expect("the driver loads"));
    driver.init().expect("the driver starts");
    let file = memfd_create("cost", MemfdFlags::CLOEXEC).expect("memfd");
    let bytes = session::BYTES as u64;
    ftruncate(&file, bytes).expect("truncate");
    let page = Mapping::scattered(0, bytes, [(file.as_fd(), Run { offset: 0, bytes })]).expect("maps");
    let wake_fd = || eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    let session = Arc::new(
        Session::new(MappedResource::in_place(page).into_pages(), wake_fd(), wake_fd()).expect("eventfd"),
    );
    let time = Arc::new(match permit {
        Some(permit) => {
            let time = Time::own();
            time.set(permit);
            time
        }
        None => Time::new(Vec::new()),
    });
    let (fences, attached) =
        (Arc::new(InFlightFences::new(limits::DRIVER_QUEUE)), Arc::new(Attached::default()));
    // Launches do not need the helper threads.
    let (helper, _inboxes) = Helper::new();
    let completion = Arc::new(Completion::new(
        Arc::clone(&driver),
        Arc::clone(&session),
        Arc::clone(&fences),
        Arc::clone(&attached),
        helper,
        Arc::clone(&time),
        Arc::new(SubmitQueue::new(Arc::clone(&time))),
    ));
    let host_calls = HostCalls::new(Arc::clone(&session), Arc::clone(&completion));
    let mut submitter = Submitter::new(
        Arc::clone(&driver),
        Arc::clone(&session),
        fences,
        Arc::clone(&completion),
        attached,
        time,
        host_calls,
    );
    let device = driver.device(0).expect("a device");
    let context = ContextRef { handle: driver.context_create(device, 0).expect("a context"), serial: 1 };
    let mut current = Current::default();
    current.set(&driver, context).expect("the context");
    let module = driver.module_load(b".version 8.0\n\0", &mut CompilerOptions::default()).expect("a module");
    let function = driver.module_function(module, c"work_p1").expect("a function");
    let target =
        WorkTarget::new(0, 0, &GuestContext { context, device: 0, primary: false }, StreamOrder::Default);
    let launch = LaunchArguments { function, grid: [1; 3], block: [32, 1, 1], shared: 0 };
    let reply = ReplyTo::nowhere(0);
    let is_shared = permit.is_some_and(|permit| permit & TELL != 0);
    let step = u64::from(if is_shared { PIECES_SHARED } else { PIECES_ALONE });
    for sequence in 1..=count {
        let work = Work { target, sequence, reply, operation: Operation::Launch(launch) };
        assert!(submitter.admits(&work), "no work is ahead of {sequence}");
        let payload = Payload { attributes: &[], parameters: &[0; 8] };
        submitter.submit(&mut current, &work, payload).expect("the driver accepts the launch");
        if sequence % step == 0 {
            assert!(completion.pass(&mut current), "a marker that is reached");
        }
    }
    submitter.mark(&mut current);
    completion.pass(&mut current);
    assert_eq!(session.completed(0), count, "all submitted work has ended");
}

/// The body of the process under callgrind.
#[test]
#[ignore = "the next test runs this in a process of its own"]
fn counted_process() {
    let count = env::var(LAUNCHES).expect("a count").parse().expect("a number");
    launches(count, env::var(PERMIT).ok().map(|permit| permit.parse().expect("a number")));
}

/// The work of a process that makes `count` launches.
fn counts(count: u64, permit: Option<u32>) -> Counts {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut counted = counts::callgrind(file.path(), None);
    counted.arg(env::current_exe().expect("a path"));
    let (_, module) = module_path!().split_once("::").expect("a crate and a module");
    counted.args(["--exact", &format!("{module}::counted_process"), "--ignored", "--test-threads=1"]);
    counted.env(LAUNCHES, count.to_string());
    if let Some(permit) = permit {
        counted.env(PERMIT, permit.to_string());
    }
    let output = counted.output().expect("valgrind starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}\n{said}");
    Counts::read(file.path()).expect("counts")
}

/// The work of some launches with their markers, until their ends are observed; and their number.
fn of_launches(permit: Option<u32>) -> (Counts, u64) {
    let (few, many) = (BATCH * 8, BATCH * 24);
    (counts(many, permit).beyond(&counts(few, permit)), many - few)
}

/// True if the count can be made here and is meaningful.
fn can_count() -> bool {
    let reason = counts::missing().or_else(|| {
        cfg!(debug_assertions).then(|| "counts are meaningful only in optimised code".to_owned())
    });
    if let Some(reason) = &reason {
        sluice_skip::skip(reason);
    }
    reason.is_none()
}

// Promise: T28
#[test]
fn launch_of_a_vm_that_is_alone_costs_few_instructions() {
    if !can_count() {
        return;
    }
    let [without, with] = [None, Some(OPEN)].map(|permit| {
        let (counts, launches) = of_launches(permit);
        counts.instructions / launches
    });
    println!("{with} instructions for a launch, {without} without sharing");
    assert!(without > 0 && with > without, "{with}, {without}");
    // One read of the permit, two of the clock, and the counters of work in flight and of its duration.
    assert!(with - without < 400, "{with} for {without}");
}

// Promise: P50
#[test]
fn launch_in_the_worker_keeps_to_its_budgets_and_makes_no_system_call_and_no_allocation() {
    if !can_count() {
        return;
    }
    let cases = [(None, DRIVER_CALLS), (Some(OPEN), DRIVER_CALLS), (Some(OPEN | TELL), DRIVER_CALLS_SHARED)];
    for (permit, driver_calls) in cases {
        let (counts, launches) = of_launches(permit);
        let (each, calls) = (counts.instructions / launches, counts.driver_calls() * 1000 / launches);
        let (system_calls, allocations) = (counts.system_calls(), counts.allocations());
        println!(
            "permit {permit:?}: {each} instructions and {calls} / 1000 calls of the driver for a launch"
        );
        println!("{launches} launches: {system_calls} system calls, {allocations} allocations");
        assert!((1000..=driver_calls).contains(&calls), "{calls} calls of the driver, budget {driver_calls}");
        assert!(system_calls.max(allocations) < BY_OTHERS, "of {launches} launches");
        if permit.is_none() {
            assert!(budgets::is_within(each, WORKER_LAUNCH), "{each} instructions, budget {WORKER_LAUNCH}");
        }
    }
}

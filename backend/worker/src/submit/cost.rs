//! The cost of sharing for a VM that is alone, in instructions: one thread submits launches and observes their ends, with and
//! without a permit to read, and callgrind counts.

use crate::{
    arenas::{Attached, MappedResource},
    current::Current,
    helper::Helper,
    session::{
        ReplyTo, Session,
        objects::{ContextRef, GuestContext},
    },
    submit::{
        Operation, Payload, StreamOrder, Submitter, Work, WorkTarget, completion::Completion,
        fences::InFlightFences, host_calls::HostCalls, time::Time,
    },
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::AsFd as _,
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_driver::{CompilerOptions, Driver, LaunchArguments};
use sluice_protocol::session;
use sluice_shared_memory::{Mapping, Run};
use std::{env, process::Command, sync::Arc};

/// The environment of the process under callgrind: the number of launches, and whether it has a permit.
const LAUNCHES: &str = "SLUICE_COST_LAUNCHES";
const PERMIT: &str = "SLUICE_COST_PERMIT";
/// Launches between two waits for completion.
const BATCH: u64 = 32;

/// Submits launches and observes their ends; no other VM uses the device.
fn launches(count: u64, permit: bool) {
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
    let time = Arc::new(if permit { Time::own() } else { Time::new(Vec::new()) });
    let (fences, attached) = (Arc::new(InFlightFences::new()), Arc::new(Attached::default()));
    // Launches do not need the helper threads.
    let (helper, _inboxes) = Helper::new();
    let completion = Arc::new(Completion::new(
        Arc::clone(&driver),
        Arc::clone(&session),
        Arc::clone(&fences),
        Arc::clone(&attached),
        helper,
        Arc::clone(&time),
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
    for sequence in 1..=count {
        let work = Work { target, sequence, reply, operation: Operation::Launch(launch) };
        assert!(submitter.admits(&work), "no work is ahead of {sequence}");
        let payload = Payload { attributes: &[], parameters: &[0; 8] };
        submitter.submit(&mut current, &work, payload).expect("the driver accepts the launch");
        if sequence % BATCH == 0 {
            submitter.mark(&mut current);
            completion.pass(&mut current);
        }
    }
    assert_eq!(session.completed(0), count - count % BATCH, "all submitted work has ended");
}

/// The body of the process under callgrind.
#[test]
#[ignore = "the next test runs this in a process of its own"]
fn counted() {
    let count = env::var(LAUNCHES).expect("a count").parse().expect("a number");
    launches(count, env::var_os(PERMIT).is_some());
}

/// Instructions of a process that makes `count` launches.
fn instructions(count: u64, permit: bool) -> u64 {
    let mut callgrind = Command::new("valgrind");
    callgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    callgrind.arg(env::current_exe().expect("a path"));
    let (_, module) = module_path!().split_once("::").expect("a crate and a module");
    callgrind.args(["--exact", &format!("{module}::counted"), "--ignored", "--test-threads=1"]);
    callgrind.env(LAUNCHES, count.to_string());
    if permit {
        callgrind.env(PERMIT, "1");
    }
    let output = callgrind.output().expect("valgrind starts");
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}\n{said}");
    collected.unwrap_or_else(|| panic!("callgrind printed no count:\n{said}"))
}

/// Instructions of one launch with its marker, until its end is observed.
fn of_a_launch(permit: bool) -> u64 {
    let (few, many) = (BATCH * 32, BATCH * 96);
    (instructions(many, permit) - instructions(few, permit)) / (many - few)
}

// Promise: T28
#[test]
fn launch_of_a_vm_that_is_alone_costs_few_instructions() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        sluice_skip::skip("no valgrind to count instructions with");
        return;
    }
    let (without, with) = (of_a_launch(false), of_a_launch(true));
    println!("{with} instructions for a launch, {without} without sharing");
    assert!(without > 0 && with > without, "{with}, {without}");
    if cfg!(debug_assertions) {
        sluice_skip::skip("the count is meaningful only in optimised code");
        return;
    }
    // One read of the permit, two of the clock, and the counters of work in flight and of its duration.
    assert!(with - without < 400, "{with} for {without}");
}

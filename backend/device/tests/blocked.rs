//! Peers that would have the device wait for them: a worker that was taken over, a front-end that is a hostile process.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

#[allow(unreachable_pub, reason = "shared by test files")]
mod common;

use common::{
    Device, eventually,
    raw::{FREE, Raw, submit},
};
use rustix::pipe::fcntl_setpipe_size;
use sluice_protocol::doorbell::Doorbell;
use vhost::VhostBackend;
use vmm_sys_util::eventfd::EventFd;

const OK: u32 = 0x1100;

// Promise: F9
#[test]
fn a_worker_cannot_hold_up_its_device() {
    let device = Device::start(&["--direct"]);
    let mut guest = Raw::connect(&device.path);
    guest.open(1, 10, FREE);
    let worker = device.give_worker();
    let begun = worker.begin();
    // As full as it can be made, by somebody who never listens.
    let filled = rustix::io::write(&begun.doorbell, &(u64::MAX - 1).to_ne_bytes());
    assert!(filled.is_err(), "a worker writes its own doorbell");
    fcntl_setpipe_size(&begun.doorbell, 4096).unwrap();
    for _ in 0..5000 {
        assert_eq!(guest.ask(&submit(1, Doorbell::Ring, 0)), OK);
    }
}

// Promise: F9
#[test]
fn a_front_end_cannot_keep_its_connection_by_its_call() {
    let device = Device::start(&["--direct"]);
    drop(Raw::connect(&device.path));
    std::thread::sleep(std::time::Duration::from_millis(300));
    let quiet = device.descriptors();
    let mut full = Vec::new();
    for _ in 0..3 {
        let mut guest = Raw::connect(&device.path);
        guest.open(1, 10, FREE);
        let worker = device.give_worker();
        let _begun = worker.begin();
        let call = EventFd::new(0).unwrap();
        call.write(u64::MAX - 1).unwrap();
        guest.frontend.set_vring_call(0, &call).unwrap();
        assert_eq!(guest.ask(&submit(1, Doorbell::Ring, 0)), OK);
        full.push(call);
        drop(guest);
        eventually("the worker is killed", || worker.ends(std::time::Duration::ZERO));
    }
    eventually("every descriptor is closed", || device.descriptors() <= quiet);
}

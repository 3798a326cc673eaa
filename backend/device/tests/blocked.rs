//! Peers that try to make the device wait: a worker that was taken over, a front-end that is a hostile process.

use crate::common::Device;
use rustix::pipe::fcntl_setpipe_size;
use sluice_kit::front_end::{FREE, FrontEnd, submit};
use sluice_kit::wait::eventually;
use sluice_protocol::doorbell::Doorbell;
use vhost::VhostBackend;
use vmm_sys_util::eventfd::EventFd;

const OK: u32 = 0x1100;

// Promise: F9
#[test]
fn worker_with_a_full_doorbell_does_not_block_the_device() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, FREE);
    let worker = device.give_worker();
    let begun = worker.begin();
    // Filled to the limit by a peer that never reads it.
    let filled = rustix::io::write(&begun.doorbell, &(u64::MAX - 1).to_ne_bytes());
    assert!(filled.is_err(), "a worker writes its own doorbell");
    fcntl_setpipe_size(&begun.doorbell, 4096).unwrap();
    for _ in 0..5000 {
        assert_eq!(guest.ask(&submit(1, Doorbell::Ring, 0)), OK);
    }
}

// Promise: F9
#[test]
fn front_end_with_a_full_call_eventfd_leaves_no_connection_behind() {
    let device = Device::start(&["--direct"]);
    drop(FrontEnd::connect(&device.path));
    std::thread::sleep(std::time::Duration::from_millis(300));
    let quiet = device.descriptors();
    let mut full = Vec::new();
    for _ in 0..3 {
        let mut guest = FrontEnd::connect(&device.path);
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

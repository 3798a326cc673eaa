//! Front-ends that cut or replace their memory while the device checks it. Each ends its own connection, and a neighbour's session
//! continues.

use crate::common::{Begun, Device, Neighbour, Worker};
use rustix::{
    fd::{AsFd as _, AsRawFd, OwnedFd},
    fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
};
use sluice_kit::{
    front_end::{FREE, FrontEnd, MEMORY, QUEUE, command, memory},
    wait::{TIMEOUT, eventually},
};
use sluice_messages::control::FromWorker;
use sluice_protocol::{
    doorbell::Doorbell, gpu::command::GET_CAPSET_INFO, limits, session, shared::Shared as _,
};
use sluice_shared_memory::residency::existing_pages;
use std::{
    sync::Barrier,
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend,
        message::{VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures},
    },
};
use vmm_sys_util::eventfd::EventFd;

const ROUNDS: u32 = 1000;
const PAGE: u64 = 4096;

fn unsealed(bytes: u64) -> OwnedFd {
    let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// Negotiates, and makes the device check memory that is cut and sealed meanwhile. Returns true if it was accepted.
fn race(device: &Device, round: u32) -> bool {
    const BYTES: u64 = 1 << 20;
    /// The reported address of this front-end's memory, which it never touches.
    const BASE: u64 = 1 << 40;
    let file = unsealed(BYTES);
    let mut frontend = Frontend::connect(&device.path, 2).unwrap();
    frontend.set_owner().unwrap();
    frontend.get_features().unwrap();
    let protocol = frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(protocol & VhostUserProtocolFeatures::REPLY_ACK).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_features(1 << 32 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: BYTES,
        userspace_addr: BASE,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let start = Barrier::new(2);
    let accepted = std::thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            // The check takes some ten microseconds, somewhere in the first few hundred.
            let until = Instant::now() + Duration::from_micros(u64::from(round % 250) * 2);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            ftruncate(&file, 0).unwrap();
            fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        });
        start.wait();
        frontend.set_mem_table(&[region]).is_ok()
    });
    if accepted {
        // The device reads the ring, which touches the cut part.
        let rings = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: BASE,
            avail_ring_addr: BASE + 0x4000,
            used_ring_addr: BASE + 0x6000,
            log_addr: None,
        };
        let kick = EventFd::new(0).unwrap();
        kick.write(1).unwrap();
        let _ = frontend.set_vring_num(0, QUEUE);
        let _ = frontend.set_vring_addr(0, &rings);
        let _ = frontend.set_vring_kick(0, &kick);
        let _ = frontend.set_vring_enable(0, true);
    }
    accepted
}

// Promise: V30
#[test]
fn guest_memory_truncated_between_two_checks_is_refused() {
    let mut device = Device::start(&["--direct"]);
    let mut neighbour = Neighbour::start(&device, FrontEnd::connect(&device.path));
    for round in 0..ROUNDS {
        let accepted = race(&device, round);
        assert!(device.is_alive(), "round {round}: the device died");
        assert!(!accepted, "round {round}: memory of no byte is accepted");
        neighbour.computes();
    }
}

/// Keeps the queue's thread busy, replaces the memory by a copy that is not sealed, and cuts that. Returns true if the copy was accepted.
fn replace(device: &Device) -> bool {
    const TABLE: u64 = 0x40_0000;
    const DESCRIPTORS: u32 = 8192;
    const CHAINS: u16 = 64;
    let mut raw = FrontEnd::connect(&device.path);
    // Chains of one long indirect table, whose descriptors each lead to the next.
    let table: Vec<u8> = (1..=DESCRIPTORS)
        .flat_map(|next| {
            let next = u64::from(next % DESCRIPTORS);
            let last = next == 0;
            [FREE, if last { 0 } else { 1 << 32 | next << 48 }]
        })
        .flat_map(u64::to_le_bytes)
        .collect();
    sluice_protocol::shared::Shared::write(&raw.words, TABLE as usize, &table);
    for head in 0..CHAINS {
        raw.descriptor(head, TABLE, DESCRIPTORS * 16, 4, 0);
    }
    // Everything that the queue needs is in the copy, too.
    let copy = unsealed(MEMORY);
    let mut rings = vec![0; 0x1_0000];
    sluice_protocol::shared::Shared::read(&raw.words, 0, &mut rings);
    rustix::io::pwrite(&copy, &rings, 0).unwrap();
    rustix::io::pwrite(&copy, &table, TABLE).unwrap();
    for head in 0..CHAINS {
        raw.make_available(head);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(2));
            ftruncate(&copy, 0).unwrap();
        });
        raw.replace(&copy).is_ok()
    })
}

// Promise: V30
#[test]
fn guest_memory_replaced_by_unsealed_memory_is_refused() {
    let mut device = Device::start(&["--direct"]);
    let mut neighbour = Neighbour::start(&device, FrontEnd::connect(&device.path));
    for round in 0..ROUNDS {
        let accepted = replace(&device);
        assert!(device.is_alive(), "round {round}: the device died");
        assert!(!accepted, "round {round}: memory that is not sealed is accepted");
        neighbour.computes();
    }
}

/// A session of a VM with an arena of 1,024 pages at `arena`.
struct Session {
    worker: Worker,
    _begun: Begun,
    at: u64,
}

impl Session {
    fn open(device: &Device, raw: &mut FrontEnd, context: u32, at: u64, arena: u64) -> Session {
        const BYTES: u64 = 1024 * PAGE;
        assert_eq!(raw.context(context), 0x1100);
        raw.open(context, context * 2, at);
        let worker = device.give_worker();
        let begun = worker.begin();
        // As the driver of a guest clears pages before it lends them.
        for page in (arena..arena + BYTES).step_by(PAGE as usize) {
            raw.words.write(page as usize, &[0; 8]);
        }
        let resource = context * 2 + 1;
        assert_eq!(raw.resource(context, resource, &[(arena, BYTES as u32)]), 0x1100);
        let attach = Doorbell::Attach { resource, slot: 1, address: limits::WINDOW_BOUNDS.start };
        assert_eq!(raw.doorbell(context, attach), 0x1100);
        // The pages stay, because a driver pins them.
        drop(worker.attach());
        worker.say(FromWorker::Attached { slot: 1, error: 0 });
        Session { worker, _begun: begun, at }
    }
}

// Promise: F94
#[test]
fn session_ends_that_keeps_pages_which_the_host_took_back_and_no_other() {
    const ARENAS: [u64; 2] = [0x200_0000, 0x300_0000];
    let file = memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    let ram = file.try_clone().unwrap();
    if existing_pages(ram.as_fd(), 0, PAGE) == Err(Errno::NOSYS) {
        return sluice_skip::skip("needs Linux 6.5");
    }
    let mut device = Device::spawn(&[]);
    let mut vmm = None;
    eventually("a connection", || {
        vmm = Frontend::connect(&device.path, 2).ok();
        vmm.is_some()
    });
    let mut raw = FrontEnd::with_frontend(vmm.unwrap(), file).unwrap();
    assert_eq!(raw.ask(&command(GET_CAPSET_INFO, 0, &[0, 0])), 0x1102);
    let hostile = Session::open(&device, &mut raw, 1, FREE, ARENAS[0]);
    let honest =
        Session::open(&device, &mut raw, 2, FREE + (session::BYTES as u64).next_multiple_of(PAGE), ARENAS[1]);
    assert!(!hostile.worker.ends(Duration::from_secs(3)), "no page is taken back yet");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&ram, hole, ARENAS[0] + 1000 * PAGE, PAGE).unwrap();
    assert!(hostile.worker.ends(TIMEOUT), "the session keeps a page that the host took back");
    eventually("the guest is told", || raw.state(hostile.at) != session::READY);
    assert!(!honest.worker.ends(Duration::from_secs(3)), "another session was ended");
    assert_eq!(raw.state(honest.at), session::READY);
    // Memory that no session uses comes and goes.
    fallocate(&ram, hole, ARENAS[1] + 1024 * PAGE, 64 * PAGE).unwrap();
    assert!(!honest.worker.ends(Duration::from_secs(3)), "unused memory counts");
    drop(raw);
    device.ends();
}

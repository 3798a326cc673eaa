//! Programs of two users on one device: the programs of one user never take the part of the other.

#![allow(unsafe_code, reason = "a thread that is another user")]

use crate::common::{Device, Neighbour};
use rustix::fs::SealFlags;
use sluice_kit::front_end::{self, FREE, FrontEnd, command};
use sluice_kit::wait::{eventually, readable};
use sluice_messages::control::FromDevice;
use sluice_protocol::{doorbell::Doorbell, gpu::command::*, limits, session, shared::Shared};
use std::{
    io::Read,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    sync::atomic::Ordering,
};
use vhost::vhost_user::Frontend;

const OK: u32 = 0x1100;
const GREEDY: u32 = 1000;
const OTHER: u32 = 1001;

/// A device that any user may connect to; `None` if the test cannot be two users.
fn start() -> Option<Device> {
    if !rustix::process::geteuid().is_root() {
        sluice_skip::skip("only root can be two users");
        return None;
    }
    let device = Device::start(&["--direct"]);
    let open = |path: &std::path::Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    };
    open(device.path.parent().unwrap());
    open(&device.path);
    Some(device)
}

/// A connection for which the kernel reports this user.
fn connect(device: &Device, user: u32) -> UnixStream {
    std::thread::scope(|scope| {
        let connected = scope.spawn(|| {
            // SAFETY: the kernel's own call, which is for the calling thread only; it ends after the connection is made.
            let set = unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) };
            assert_eq!(set, 0);
            UnixStream::connect(&device.path).unwrap()
        });
        connected.join().unwrap()
    })
}

fn program(device: &Device, user: u32) -> FrontEnd {
    try_program(device, user).expect("a device")
}

/// A program of a user; `None` if the device refuses it.
fn try_program(device: &Device, user: u32) -> Option<FrontEnd> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let frontend = Frontend::from_stream(connect(device, user), 2);
    FrontEnd::with_frontend(frontend, front_end::memory(seals)).ok()
}

/// A program of the other user that computes.
fn neighbour(device: &Device) -> Neighbour {
    let mut raw = program(device, OTHER);
    assert_eq!(raw.context(1), OK);
    Neighbour::start(device, raw)
}

/// Opens as many sessions as the device allows, at most this many; returns their number.
fn open_sessions(raw: &mut FrontEnd, most: u32) -> u32 {
    for number in 0..most {
        let (context, at) = (number + 10, FREE + u64::from(number) * session::BYTES as u64);
        assert_eq!(raw.context(context), OK);
        assert_eq!(raw.resource(context, context, &[(at, session::BYTES as u32)]), OK);
        raw.words.store_u64(at as usize + session::MAGIC_AT, session::MAGIC, Ordering::SeqCst);
        if raw.doorbell(context, Doorbell::Open { resource: context }) != OK {
            assert_eq!(raw.state(at), session::LOST, "a session that is refused is told");
            return number;
        }
    }
    most
}

/// True if the device has closed a connection.
fn is_closed(stream: &UnixStream) -> bool {
    readable(stream, std::time::Duration::ZERO) && matches!({ stream }.read(&mut [0; 16]), Ok(0) | Err(_))
}

// Promise: V32
#[test]
fn user_at_its_connection_limit_leaves_connections_to_others() {
    let Some(device) = start() else { return };
    let most = (limits::USER_CONNECTIONS + limits::USER_ARRIVALS) as usize + 40;
    let mut greedy: Vec<UnixStream> = (0..most).map(|_| connect(&device, GREEDY)).collect();
    let mut neighbour = neighbour(&device);
    neighbour.computes();
    eventually("only as many as a user may have stay", || {
        greedy.retain(|stream| !is_closed(stream));
        greedy.len() <= limits::USER_CONNECTIONS as usize
    });
    assert_eq!(greedy.len(), limits::USER_CONNECTIONS as usize);
    // A connection that ends makes room for another. A busy machine may need more for its end than the device waits.
    greedy.pop();
    eventually("room", || try_program(&device, GREEDY).is_some_and(|mut raw| raw.context(1) == OK));
    neighbour.computes();
}

// Promise: V32
#[test]
fn user_at_its_session_and_wait_limits_leaves_both_to_others() {
    let Some(device) = start() else { return };
    let mut greedy = [program(&device, GREEDY), program(&device, GREEDY)];
    let opened: Vec<u32> = greedy.iter_mut().map(|raw| open_sessions(raw, 40)).collect();
    assert_eq!(u64::from(opened.iter().sum::<u32>()), limits::USER_SESSIONS, "{opened:?}");
    for _ in 0..limits::USER_SESSIONS {
        device.wanted();
    }
    let mut neighbour = neighbour(&device);
    neighbour.computes();
    // Sleeps: as many as a user may have are withheld, and also the other user's.
    let mut sleeps = 0;
    for (raw, opened) in greedy.iter_mut().zip(opened) {
        raw.forget();
        for context in 10..10 + opened {
            for _ in 0..limits::WAITERS_PER_SESSION {
                raw.wait(context);
                sleeps += 1;
            }
        }
        // All answers without delay have come by now.
        assert_eq!(raw.ask(&command(GET_DISPLAY_INFO, 0, &[])), 0x1101);
    }
    assert!(sleeps > 2 * limits::USER_WITHHELD as usize - 1, "{sleeps}");
    let answered: usize = greedy.iter_mut().map(FrontEnd::answers).sum();
    assert!(answered >= sleeps - limits::USER_WITHHELD as usize, "{answered} of {sleeps}");
    // The wake of `begin` ends the first of its sleeps, and time may end others before this test looks.
    eventually("another user's sleep delays no neighbour", || {
        let head = neighbour.raw.wait(1);
        neighbour.computes();
        let sleeps = neighbour.raw.answer(head).is_none();
        if sleeps {
            neighbour.begun.wake();
            neighbour.raw.soon(head);
        }
        sleeps
    });
}

// Promise: V32
#[test]
fn user_at_its_resource_limit_leaves_resources_to_others() {
    let Some(device) = start() else { return };
    let mut greedy = [program(&device, GREEDY), program(&device, GREEDY)];
    let create = |id: u32| command(RESOURCE_CREATE_3D, 0, &[id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut made = 0u64;
    for raw in &mut greedy {
        let mut id = 1;
        while id <= limits::USER_RESOURCES as u32 / 2 + 100 && raw.ask(&create(id)) == OK {
            (id, made) = (id + 1, made + 1);
        }
    }
    assert_eq!(made, limits::USER_RESOURCES);
    let mut neighbour = neighbour(&device);
    assert_eq!(neighbour.raw.ask(&create(77)), OK);
    neighbour.computes();
    // Resources of an ended connection are given back.
    let [first, mut second] = greedy;
    drop(first);
    eventually("room", || second.ask(&create(1_000_000)) == OK);
}

// Promise: S20
#[test]
fn worker_request_carries_the_user_of_its_session() {
    let Some(device) = start() else { return };
    for user in [GREEDY, OTHER] {
        let mut raw = program(&device, user);
        assert_eq!(raw.context(1), OK);
        raw.open(1, 10, FREE);
        let asked = loop {
            match device.receive() {
                FromDevice::WorkerWanted { user, .. } => break user,
                FromDevice::SessionEnded { .. } => {}
            }
        };
        assert_eq!(asked, user);
    }
}

//! Devices that may access each other's memory.

use crate::{
    arbiter::FakeArbiter,
    code::{
        INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED,
    },
    guest::{Guest, Start, null_driver},
};
use sluice_protocol::{
    calls::wire,
    field::{AccessFlags, Mint, Ordinal},
    handle::{Context, Id},
    limits,
};

/// The context of the second device.
const SECOND: Id<Context> = Id::new(1, 1);

/// A guest with a context on each of two devices; that of the first is current.
fn guest(devices: &[FakeArbiter; 2]) -> Guest {
    let mut guest = Guest::ready(Start {
        lenders: devices.iter().map(FakeArbiter::admit).collect(),
        environment: &[("SLUICE_NULL_DEVICES", "2".as_ref())],
        ..Start::on(null_driver())
    });
    guest.begin();
    second_context(&mut guest);
    guest
}

fn second_context(guest: &mut Guest) {
    let call = wire::context_create::Args {
        context: Mint(SECOND),
        device: Ordinal(1),
        flags: 0,
        primary: false,
        stream: 7,
    };
    assert_eq!(guest.call(wire::context_create::CALL, |w| call.put(w)).0, 0);
}

fn enable(guest: &mut Guest, peer: Id<Context>) -> u32 {
    guest.call(wire::peer_enable::CALL, |w| wire::peer_enable::Args { peer }.put(w)).0
}

fn disable(guest: &mut Guest, peer: Id<Context>) -> u32 {
    guest.call(wire::peer_disable::CALL, |w| wire::peer_disable::Args { peer }.put(w)).0
}

fn link(guest: &mut Guest, device: u32, peer: u32) -> Result<bool, u32> {
    let call = wire::device_peer::Args { device: Ordinal(device), peer: Ordinal(peer) };
    match guest.call(wire::device_peer::CALL, |w| call.put(w)) {
        (0, fields) => Ok(wire::device_peer::Reply::get(&fields).expect("decodes").reaches),
        (failed, _) => Err(failed),
    }
}

fn pool_access(guest: &mut Guest, pool: u32, device: u32, peer: u32) -> u32 {
    let (device, peer) = (Ordinal(device), Ordinal(peer));
    let call = wire::pool_access::Args { pool, device, peer, access: AccessFlags::ReadWrite };
    guest.call(wire::pool_access::CALL, |w| call.put(w)).0
}

fn open(guest: &mut Guest, device: u32) -> u32 {
    let call = wire::ipc_open::Args { device: Ordinal(device), share: 1, offset: 0, bytes: 64 };
    guest.call(wire::ipc_open::CALL, |w| call.put(w)).0
}

// Promise: C117, C141
#[test]
fn forged_calls_about_peers_are_refused_and_the_session_continues() {
    let devices = [FakeArbiter::new(0), FakeArbiter::new(0)];
    let mut guest = guest(&devices);
    let first = Id::<Context>::from_raw(guest.session.context).unwrap();
    assert_eq!(link(&mut guest, 0, 1), Ok(true));
    for (device, peer) in [(0, 0), (0, 2), (2, 0), (u32::MAX, 1)] {
        assert_eq!(link(&mut guest, device, peer), Err(INVALID_DEVICE), "{device} {peer}");
        assert_eq!(pool_access(&mut guest, 3, device, peer), INVALID_DEVICE, "{device} {peer}");
    }
    assert_eq!(pool_access(&mut guest, 0, 1, 0), INVALID_DEVICE, "no pool");
    assert_eq!(pool_access(&mut guest, limits::POOLS, 1, 0), INVALID_VALUE, "no such pool");
    assert_eq!(pool_access(&mut guest, 20, 1, 0), 0);
    assert_eq!(pool_access(&mut guest, 20, 0, 1), INVALID_VALUE, "a pool of the other device");
    for device in [2, u32::MAX] {
        assert_eq!(open(&mut guest, device), INVALID_DEVICE, "{device}");
    }
    for device in [0, 1] {
        assert_eq!(open(&mut guest, device), INVALID_VALUE, "device {device} has no such share");
    }
    for unknown in [Id::new(2, 1), Id::new(1, 2), Id::new(limits::CONTEXTS - 1, 1)] {
        assert_eq!(enable(&mut guest, unknown), INVALID_CONTEXT);
        assert_eq!(disable(&mut guest, unknown), INVALID_CONTEXT);
    }
    assert_eq!(enable(&mut guest, first), PEER_ACCESS_UNSUPPORTED, "the same device");
    assert_eq!(disable(&mut guest, SECOND), PEER_ACCESS_NOT_ENABLED);
    guest.session.context = 0;
    assert_eq!(enable(&mut guest, SECOND), INVALID_CONTEXT, "without a context");
    guest.session.context = first.raw();
    assert_eq!(enable(&mut guest, SECOND), 0);
    assert!(guest.allocate(64).is_ok(), "the session goes on");
}

// Promise: C114
#[test]
fn access_to_a_peer_ends_with_either_context() {
    let devices = [FakeArbiter::new(0), FakeArbiter::new(0)];
    let mut guest = guest(&devices);
    for _ in 0..3 {
        assert_eq!(enable(&mut guest, SECOND), 0);
        let gone = wire::context_destroy::Args { context: SECOND };
        assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
        assert_eq!(disable(&mut guest, SECOND), INVALID_CONTEXT);
        second_context(&mut guest);
        assert_eq!(disable(&mut guest, SECOND), PEER_ACCESS_NOT_ENABLED, "a new context has none");
    }
}

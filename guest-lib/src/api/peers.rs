//! Peers: devices that can access each other's memory.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    process::{self, ProcessState},
    state::contexts::Context,
};
use core::ffi::{c_int, c_uint};
use sluice_cuda_frontend::{atomics, links};
use sluice_protocol::{calls::wire, field::Ordinal};

/// The host's answer about the link from a device to another.
type Link = wire::device_peer::Reply;

fn link(process: &ProcessState, device: c_int, peer: c_int) -> Result<Link> {
    let [device, peer] = [device, peer].map(|device| process.devices.get(device));
    let (device, peer) = (Ordinal(device?.ordinal), Ordinal(peer?.ordinal));
    process.session.sync(0, &wire::device_peer::Args { device, peer })
}

/// True if a device can access the memory of another.
pub(super) fn reaches(process: &ProcessState, device: c_int, peer: c_int) -> Result<bool> {
    Ok(device != peer && link(process, device, peer)?.reaches)
}

pub(crate) fn cuDeviceCanAccessPeer(_: Call, can: Out<c_int>, dev: c_int, peer: c_int) -> Result {
    let process = process::get()?;
    process.devices.get(dev)?;
    process.devices.get(peer)?;
    can.required()?;
    can.set(c_int::from(reaches(process, dev, peer)?))
}

/// Checks the two ends of a link.
fn ends(process: &ProcessState, from: c_int, to: c_int) -> Result {
    process.devices.get(from)?;
    process.devices.get(to)?;
    if from == to { Err(Error::INVALID_DEVICE) } else { Ok(()) }
}

pub(crate) fn cuDeviceGetP2PAttribute(
    _: Call,
    value: Out<c_int>,
    id: c_uint,
    from: c_int,
    to: c_int,
) -> Result {
    let process = process::get()?;
    ends(process, from, to)?;
    let Link { reaches, rank } = link(process, from, to)?;
    value.set(links::attribute(id, reaches, rank).ok_or(Error::INVALID_VALUE)?)
}

pub(crate) fn cuDeviceGetP2PAtomicCapabilities(
    _: Call,
    capabilities: Out<c_uint>,
    operations: In<c_uint>,
    count: c_uint,
    from: c_int,
    to: c_int,
) -> Result {
    ends(process::get()?, from, to)?;
    atomics::answer(&atomics::NONE, capabilities, operations, count, Error::INVALID_VALUE)
}

/// The current context and another one, with the id of the other.
fn pair(process: &ProcessState, context: u64) -> Result<[Context; 2]> {
    let current = process.current()?;
    let peer = process.contexts.get(context)?;
    if peer.raw == current.raw { Err(Error::INVALID_CONTEXT) } else { Ok([current, peer]) }
}

pub(crate) fn cuCtxEnablePeerAccess(_: Call, context: u64, flags: c_uint) -> Result {
    let process = process::get()?;
    process.current()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let [current, peer] = pair(process, context)?;
    process.session.sync(current.raw, &wire::peer_enable::Args { peer: peer.id()? })?;
    process.peers.enabled((current.raw, current.device), (peer.raw, peer.device));
    Ok(())
}

pub(crate) fn cuCtxDisablePeerAccess(_: Call, context: u64) -> Result {
    let process = process::get()?;
    let [current, peer] = pair(process, context)?;
    if !process.peers.is_enabled(current.raw, peer.raw) {
        return Err(Error::PEER_ACCESS_NOT_ENABLED);
    }
    process.streams.wait_all(&process.session)?;
    process.session.sync(current.raw, &wire::peer_disable::Args { peer: peer.id()? })?;
    process.peers.disabled(current.raw, peer.raw);
    Ok(())
}

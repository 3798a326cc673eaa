//! A probe: a worker without a session. With it an arbiter observes to which process the driver books lent memory, and `sluiced`
//! finds out if the driver has the abilities that each session needs.
//!
//! The probe takes one chunk as every worker does, maps it, pins host memory, and requests the next chunk. The arbiter answers a
//! probe only after it has read the inventory, so each answer covers everything before the request. The arbiter never answers the
//! second request; it ends the process.

use crate::{
    control::{RunError, start_confined},
    helper::{Control, report},
    memory::custody::{CustodyError, readable},
};
use core::time::Duration;
use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_driver::{Code, Driver, code};
use sluice_messages::{
    channel::{self, Channel},
    control::{FromWorker, NeededAbility, ToWorker, WorkerSetup},
    custody::{CustodyAnswer, CustodyRequest, Growth, UNIT},
};
use sluice_protocol::limits;
use sluice_shared_memory::{
    Mapping, Run,
    mapping::{MapError, Reservation},
};

/// Time limit for the arbiter's answers. The arbiter ends a probe long before.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The reason why a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The worker could not start.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The arbiter is gone, or violates the protocol.
    #[error(transparent)]
    Custody(#[from] CustodyError),
    /// The arbiter lends nothing.
    #[error("the arbiter refused the request: CUresult {0}")]
    Refused(Code),
    /// A call of the driver failed.
    #[error("{0} failed: CUresult {1}")]
    Driver(&'static str, Code),
    /// The driver lacks an ability that each session needs.
    #[error("the driver lacks an ability that each session needs, {0:?}: CUresult {1}")]
    Unfit(NeededAbility, Code),
}

/// Size of a page of guest memory, in bytes.
const PAGE: u64 = 4096;

fn lacks(ability: NeededAbility, call: &'static str) -> impl Fn(Code) -> ProbeError {
    move |code| match code {
        // A shortage passes, and says nothing about the driver.
        code::OUT_OF_MEMORY => ProbeError::Driver(call, code),
        _ => ProbeError::Unfit(ability, code),
    }
}

fn failed(call: &'static str) -> impl Fn(Code) -> ProbeError {
    move |code| ProbeError::Driver(call, code)
}

/// Takes a chunk from the arbiter, over a socket that arrives on `control`, and holds it until the arbiter ends the process.
///
/// # Errors
/// [`ProbeError`] if no chunk is lent.
pub fn probe(control: OwnedFd) -> Result<(), ProbeError> {
    let control = Control::new(control);
    let (setup, _): (WorkerSetup, _) = channel::receive_setup(&control).map_err(RunError::Setup)?;
    let pieces = setup.mapped_runs.clamp(1, limits::MAPPED_RUNS);
    // A session that cannot map so many pieces copies them.
    let guest_memory = scattered(pieces.into())
        .inspect_err(|error| tracing::warn!(%error, pieces, "cannot map as many pieces as a session"))
        .ok();
    let driver = start_confined(&setup, &[]).map_err(RunError::Sandbox)?.map_err(RunError::Driver)?;
    let received = control.receive().map_err(RunError::Receive)?;
    let (told, descriptors) = received.message().ok_or(RunError::Closed)?;
    let (ToWorker::Custody { device }, Ok([arbiter])) = (told, <[OwnedFd; 1]>::try_from(descriptors)) else {
        return Err(RunError::Unexpected(told).into());
    };
    let device = driver.device(device).map_err(failed("cuDeviceGet"))?;
    let arbiter = ArbiterLink { socket: Channel::new(arbiter) };
    // The arbiter's first message. A probe needs no pages: it has no quota to read and submits nothing.
    arbiter.receive()?;
    arbiter.ask(CustodyRequest::Grow { serial: 1, reason: Growth::Context as u32, bytes: 0, spent: 0 })?;
    let context = driver.primary_retain(device, 0).map_err(failed("the primary context"))?;
    driver.set_current(context).map_err(failed("cuCtxSetCurrent"))?;
    arbiter.send(CustodyRequest::Grown { serial: 1 })?;
    // The arbiter lends as much as it needs, whatever a probe requests.
    let take = |serial| CustodyRequest::Take { serial, bytes: UNIT };
    match arbiter.ask(take(2))? {
        (CustodyAnswer::Lent { bytes, .. }, Some(chunk)) => {
            use_memory(&driver, device, &chunk, bytes, guest_memory.as_ref()).inspect_err(|failed| {
                if let ProbeError::Unfit(ability, error) = *failed {
                    report(&control, FromWorker::Unfit { ability: ability as u32, error });
                }
            })?;
            report(&control, FromWorker::Fit {});
        }
        (answer, _) => return Err(CustodyError::Unexpected(answer).into()),
    }
    arbiter.ask(take(3)).map(drop)
}

/// Maps a chunk at an address of a session, so that the driver counts it as used by this process in every list, and pins memory.
fn use_memory(
    driver: &Driver,
    device: i32,
    chunk: &OwnedFd,
    bytes: u64,
    guest_memory: Option<&Mapping>,
) -> Result<(), ProbeError> {
    let import = lacks(NeededAbility::Import, "cuMemImportFromShareableHandle");
    let handle = driver.chunk_import(chunk.as_fd()).map_err(import)?;
    // An address that this process uses says nothing about the driver.
    let is_free = |base: &u64| Reservation::new(*base, bytes).is_ok();
    let bounds = limits::WINDOW_BOUNDS;
    let wanted = [bounds.end - limits::SESSION_WINDOW_BYTES, bounds.start].into_iter().find(is_free);
    let fixed = lacks(NeededAbility::FixedAddresses, "cuMemAddressReserve");
    let address = driver.address_reserve(wanted.unwrap_or(0), bytes).map_err(&fixed)?;
    if wanted.is_some_and(|wanted| wanted != address) {
        return Err(fixed(code::NOT_SUPPORTED));
    }
    driver.map(address, bytes, handle).map_err(failed("cuMemMap"))?;
    driver.allow(address, bytes, device).map_err(failed("cuMemSetAccess"))?;
    let Some(memory) = guest_memory else { return Ok(()) };
    let register = lacks(NeededAbility::Registration, "cuMemHostRegister");
    match driver.host_register(memory.base(), memory.bytes()).map_err(register) {
        // The probe goes on: the booking of the chunk is known without it.
        Err(error @ ProbeError::Driver(..)) => {
            tracing::warn!(%error, "a shortage: the driver cannot pin as many pieces as a session may have");
            Ok(())
        }
        registered => registered,
    }
}

/// A mapping of as many pieces as that of a guest whose pages are scattered. All are the same page: the kernel would merge neighbours.
fn scattered(pieces: u64) -> Result<Mapping, MapError> {
    let cannot = |error| MapError::Piece { offset: 0, bytes: PAGE, error };
    let file = memfd_create("guest memory", MemfdFlags::CLOEXEC).map_err(cannot)?;
    ftruncate(&file, PAGE).map_err(cannot)?;
    let piece = (file.as_fd(), Run { offset: 0, bytes: PAGE });
    Mapping::scattered(0, pieces * PAGE, (0..pieces).map(|_| piece))
}

/// The link to the arbiter.
struct ArbiterLink {
    socket: Channel<CustodyAnswer, CustodyRequest>,
}

impl ArbiterLink {
    fn send(&self, request: CustodyRequest) -> Result<(), CustodyError> {
        Ok(self.socket.send(&request, &[])?)
    }

    fn receive(&self) -> Result<(CustodyAnswer, Option<OwnedFd>), CustodyError> {
        if !readable(&self.socket, TIMEOUT)? {
            return Err(CustodyError::Silent(0));
        }
        let (answer, descriptors) = self.socket.receive()?.message().ok_or(CustodyError::Gone(0))?;
        Ok((answer, descriptors.into_iter().next()))
    }

    fn ask(&self, request: CustodyRequest) -> Result<(CustodyAnswer, Option<OwnedFd>), ProbeError> {
        self.send(request)?;
        match self.receive()? {
            (CustodyAnswer::Refused { error, .. }, _) => Err(ProbeError::Refused(error)),
            answer => Ok(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_memory_has_a_mapping_of_the_kernel_for_each_piece() {
        let memory = scattered(100).expect("a mapping");
        let range = memory.base()..memory.base() + memory.bytes();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
        let starts = maps.lines().filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
        assert_eq!(starts.filter(|start| range.contains(start)).count(), 100);
    }
}

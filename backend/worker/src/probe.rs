//! A probe: a worker without a session. With it an arbiter observes to which process the driver books lent memory.
//!
//! The probe takes one chunk as every worker does, maps it, and requests the next one. The arbiter answers a probe only after
//! it has read the inventory, so each answer covers everything before the request. The arbiter never answers the second
//! request; it ends the process.

use crate::{
    control::{RunError, start_confined},
    helper::Control,
    memory::custody::{CustodyError, readable},
};
use core::time::Duration;
use rustix::fd::{AsFd as _, OwnedFd};
use sluice_driver::{Code, Driver};
use sluice_messages::{
    channel::{self, Channel},
    control::{ToWorker, WorkerSetup},
    custody::{CustodyAnswer, CustodyRequest, Growth, UNIT},
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
    let driver = start_confined(&setup).map_err(RunError::Sandbox)?.map_err(RunError::Driver)?;
    let received = control.receive().map_err(RunError::Receive)?;
    let (told, descriptors) = received.message().ok_or(RunError::Closed)?;
    let (ToWorker::Custody { device }, Ok([arbiter])) = (told, <[OwnedFd; 1]>::try_from(descriptors)) else {
        return Err(RunError::Unexpected(told).into());
    };
    let device = driver.device(device).map_err(failed("cuDeviceGet"))?;
    let arbiter = ArbiterLink { socket: Channel::new(arbiter) };
    // The arbiter's first message. A probe needs no pages: it has no quota to read and submits nothing.
    arbiter.hear()?;
    arbiter.ask(CustodyRequest::Grow { serial: 1, reason: Growth::Context as u32, bytes: 0, spent: 0 })?;
    let context = driver.primary_retain(device, 0).map_err(failed("the primary context"))?;
    driver.set_current(context).map_err(failed("cuCtxSetCurrent"))?;
    arbiter.send(CustodyRequest::Grown { serial: 1 })?;
    // The arbiter lends as much as it needs, whatever a probe requests.
    let take = |serial| CustodyRequest::Take { serial, bytes: UNIT };
    match arbiter.ask(take(2))? {
        (CustodyAnswer::Lent { bytes, .. }, Some(chunk)) => map(&driver, device, &chunk, bytes)?,
        (answer, _) => return Err(CustodyError::Unexpected(answer).into()),
    }
    arbiter.ask(take(3)).map(drop)
}

/// Maps a chunk, so that the driver counts it as used by this process in every list.
fn map(driver: &Driver, device: i32, chunk: &OwnedFd, bytes: u64) -> Result<(), ProbeError> {
    let handle = driver.chunk_import(chunk.as_fd()).map_err(failed("cuMemImportFromShareableHandle"))?;
    let address = driver.address_reserve(0, bytes).map_err(failed("cuMemAddressReserve"))?;
    driver.map(address, bytes, handle).map_err(failed("cuMemMap"))?;
    driver.allow(address, bytes, device).map_err(failed("cuMemSetAccess"))
}

/// The link to the arbiter.
struct ArbiterLink {
    socket: Channel<CustodyAnswer, CustodyRequest>,
}

impl ArbiterLink {
    fn send(&self, request: CustodyRequest) -> Result<(), CustodyError> {
        Ok(self.socket.send(&request, &[])?)
    }

    fn hear(&self) -> Result<(CustodyAnswer, Option<OwnedFd>), CustodyError> {
        if !readable(&self.socket, TIMEOUT)? {
            return Err(CustodyError::Silent(0));
        }
        let (answer, descriptors) = self.socket.receive()?.message().ok_or(CustodyError::Gone(0))?;
        Ok((answer, descriptors.into_iter().next()))
    }

    fn ask(&self, request: CustodyRequest) -> Result<(CustodyAnswer, Option<OwnedFd>), ProbeError> {
        self.send(request)?;
        match self.hear()? {
            (CustodyAnswer::Refused { error, .. }, _) => Err(ProbeError::Refused(error)),
            answer => Ok(answer),
        }
    }
}

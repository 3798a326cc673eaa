//! A probe: a worker without a session, which shows an arbiter to which process the driver books lent memory.
//!
//! It takes one chunk as every worker does, maps it, and requests the next one. The arbiter answers a probe only after a look
//! at the inventory, so each answer covers everything that came before the request. It never answers the second request, but
//! ends the process.

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
    custody::{Answer, Growth, Request, UNIT},
};

/// How long the arbiter's answers may take. It ends a probe long before.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a probe has shown nothing.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// It cannot begin.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The arbiter is gone, or breaks the protocol.
    #[error(transparent)]
    Custody(#[from] CustodyError),
    /// The arbiter gives nothing.
    #[error("the arbiter refuses: CUresult {0}")]
    Refused(Code),
    /// The driver fails.
    #[error("{0}: CUresult {1}")]
    Driver(&'static str, Code),
}

fn failed(call: &'static str) -> impl Fn(Code) -> ProbeError {
    move |code| ProbeError::Driver(call, code)
}

/// Has memory lent to this process, over a socket that comes over `control`, until the arbiter ends it.
///
/// # Errors
/// [`ProbeError`] when nothing is lent.
pub fn probe(control: OwnedFd) -> Result<(), ProbeError> {
    let control = Control::new(control);
    let (setup, _): (WorkerSetup, _) = channel::receive_setup(&control).map_err(RunError::Setup)?;
    let driver = start_confined(&setup).map_err(RunError::Sandbox)?.map_err(RunError::Driver)?;
    let received = control.receive().map_err(RunError::Receive)?;
    let (told, descriptors) = received.message().ok_or(RunError::Closed)?;
    let (ToWorker::Custody { device }, Ok([lender])) = (told, <[OwnedFd; 1]>::try_from(descriptors)) else {
        return Err(RunError::Unexpected(told).into());
    };
    let device = driver.device(device).map_err(failed("cuDeviceGet"))?;
    let lender = Lender { socket: Channel::new(lender) };
    // Its first word. A probe needs no pages: it has no quota to look at and submits nothing.
    lender.hear()?;
    lender.ask(Request::Grow { serial: 1, reason: Growth::Context as u32, bytes: 0, left: 0 })?;
    let context = driver.primary_retain(device, 0).map_err(failed("the primary context"))?;
    driver.set_current(context).map_err(failed("cuCtxSetCurrent"))?;
    lender.tell(Request::Grown { serial: 1 })?;
    // The arbiter lends what suffices, whatever a probe asks for.
    let take = |serial| Request::Take { serial, bytes: UNIT };
    match lender.ask(take(2))? {
        (Answer::Lent { bytes, .. }, Some(chunk)) => map(&driver, device, &chunk, bytes)?,
        (answer, _) => return Err(CustodyError::Unexpected(answer).into()),
    }
    lender.ask(take(3)).map(drop)
}

/// Maps a chunk, so that the driver counts it as used here in every way there is.
fn map(driver: &Driver, device: i32, chunk: &OwnedFd, bytes: u64) -> Result<(), ProbeError> {
    let handle = driver.chunk_import(chunk.as_fd()).map_err(failed("cuMemImportFromShareableHandle"))?;
    let address = driver.address_reserve(0, bytes).map_err(failed("cuMemAddressReserve"))?;
    driver.map(address, bytes, handle).map_err(failed("cuMemMap"))?;
    driver.allow(address, bytes, device).map_err(failed("cuMemSetAccess"))
}

/// The arbiter.
struct Lender {
    socket: Channel<Answer, Request>,
}

impl Lender {
    fn tell(&self, request: Request) -> Result<(), CustodyError> {
        Ok(self.socket.send(&request, &[])?)
    }

    fn hear(&self) -> Result<(Answer, Option<OwnedFd>), CustodyError> {
        if !readable(&self.socket, PATIENCE)? {
            return Err(CustodyError::Silent(0));
        }
        let (answer, descriptors) = self.socket.receive()?.message().ok_or(CustodyError::Gone(0))?;
        Ok((answer, descriptors.into_iter().next()))
    }

    fn ask(&self, request: Request) -> Result<(Answer, Option<OwnedFd>), ProbeError> {
        self.tell(request)?;
        match self.hear()? {
            (Answer::Refused { error, .. }, _) => Err(ProbeError::Refused(error)),
            answer => Ok(answer),
        }
    }
}

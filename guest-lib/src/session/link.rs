//! The session page, the transport beside it, and the check that the session is not over.

use crate::{
    error::{Error, Result},
    log,
    transport::{Transport, TransportError},
};
use sluice_protocol::session as layout;
use sluice_shared_memory::{Reservation, mapping::Words};

/// Shared by the callers and the waker thread.
pub(crate) struct SessionLink {
    pub(crate) words: Words,
    pub(crate) transport: Box<dyn Transport>,
    /// Keeps the control resource mapped for the life of the process.
    _control: Reservation,
}

impl SessionLink {
    /// A link whose control resource is mapped over the whole reservation.
    pub(crate) fn new(control: Reservation, transport: Box<dyn Transport>) -> SessionLink {
        SessionLink { words: control_words(&control), transport, _control: control }
    }

    /// Ends the session after the transport to the device has failed: later answers are unknown, so every wait ends, too.
    pub(crate) fn lose(&self, error: &TransportError) -> Error {
        if layout::lost(&self.words).is_none() {
            log::error(format_args!("cannot reach the device any more: {error}"));
            layout::set_lost(&self.words, Error::DEVICE_UNAVAILABLE.0);
        }
        self.alive().err().unwrap_or(Error::DEVICE_UNAVAILABLE)
    }

    /// An error if the session is over.
    pub(crate) fn alive(&self) -> Result {
        match layout::lost(&self.words) {
            None => Ok(()),
            Some(0) => Err(Error::DEVICE_UNAVAILABLE),
            Some(code) => Err(Error(code)),
        }
    }
}

#[expect(unsafe_code, reason = "access to the control resource")]
fn control_words(control: &Reservation) -> Words {
    #[expect(clippy::cast_possible_truncation, reason = "an address of this process")]
    let base = control.base() as usize;
    // SAFETY: the resource is mapped over the whole reservation, which the session keeps for the life of the process.
    unsafe { Words::new(base, layout::BYTES) }
}

//! Ranges of addresses that are the same in the program, in its worker and on devices.

use crate::{
    error::{Error, Result},
    log,
};
use sluice_protocol::limits;
use sluice_shared_memory::Reservation;

/// Reserves addresses for host memory: 64 GiB at the start of the window bounds, or a smaller or higher range.
pub(crate) fn reserve() -> Result<Reservation> {
    let bounds = limits::WINDOW_BOUNDS;
    let half = (bounds.end - bounds.start) / 2;
    let found = (0..4).flat_map(|shift| {
        let bytes = limits::SESSION_BYTES >> shift;
        (0..half / bytes).map(move |place| (bounds.start + place * bytes, bytes))
    });
    for (base, bytes) in found {
        if let Ok(reservation) = Reservation::new(base, bytes) {
            return Ok(reservation);
        }
    }
    log::error(format_args!("no range of addresses is free for host memory in {bounds:#x?}"));
    Err(Error::OUT_OF_MEMORY)
}

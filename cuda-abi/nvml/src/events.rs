//! Event sets, which wait for errors of several GPUs at once.

use crate::layout::{DeviceHandle, EVENT_XID, EventData, EventSetHandle, NO_INSTANCE};
use crate::session::LibrarySession;
use crate::status::{Result, Status};
use std::os::fd::AsRawFd as _;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

impl LibrarySession {
    /// Adds a GPU's errors to a set.
    pub(crate) fn register(&self, device: DeviceHandle, kinds: u64, set: EventSetHandle) -> Result {
        let (_, gpu) = self.gpu(device)?;
        let set = self.sets.get(set)?;
        if kinds & !EVENT_XID != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        if kinds == 0 {
            return Ok(());
        }
        let watch = gpu.watch()?;
        set.lock().unwrap_or_else(PoisonError::into_inner).push((device, watch));
        Ok(())
    }

    /// Waits for the next event of a set.
    pub(crate) fn wait(&self, set: EventSetHandle, limit: Duration) -> Result<EventData> {
        let set = self.sets.get(set)?;
        let mut watches = set.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + limit;
        loop {
            for (device, watch) in watches.iter_mut() {
                if let Some(xid) = watch.next()? {
                    return Ok(EventData {
                        device: *device,
                        kind: EVENT_XID,
                        data: xid.number,
                        gpu_instance: xid.instance.map_or(NO_INSTANCE, |(gpu, _)| gpu),
                        compute_instance: xid.instance.map_or(NO_INSTANCE, |(_, compute)| compute),
                    });
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Status::TIMEOUT);
            }
            let mut polled: Vec<_> = watches
                .iter()
                .map(|(_, watch)| libc::pollfd {
                    fd: watch.descriptor().as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                })
                .collect();
            wait_readable(&mut polled, left)?;
        }
    }
}

/// Waits until a descriptor is readable, or for the given time; a signal ends the wait early.
fn wait_readable(polled: &mut [libc::pollfd], left: Duration) -> Result {
    #![expect(unsafe_code, reason = "poll")]
    let milliseconds = i32::try_from(left.as_millis().max(1)).unwrap_or(i32::MAX);
    // SAFETY: the list is valid, and has the given length.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
    let interrupted = || std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
    if ready >= 0 || interrupted() { Ok(()) } else { Err(Status::UNKNOWN) }
}

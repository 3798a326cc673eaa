//! The transport in a virtual machine: the kernel's stock `virtio_gpu` driver, reached through an unprivileged render node.
//!
//! The session calls it by [`Transport`]. It owns the render node and the resources made through it. It must never need
//! a privilege.
//!
//! The device features that the VMM passes on decide the [`Mode`]: the way to make memory, to ring the doorbell, and to sleep.
//! Outside of FULL mode any answer to any process ends every wait, which the contract of a wait permits. This driver does not
//! return errors of the device: the attach table shows if a resource is usable.
//!
//! In 2D there are no contexts. The session is the control resource, the first that is made; every other resource carries the
//! session's nonce in its first page until the device has read it, and no other process knows the nonce.

use super::{
    held::HeldDescriptor,
    interface::{Token, Transport, TransportError, TransportResource},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd as _, OwnedFd},
    fs::{Mode as Permissions, OFlags},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};
pub use sluice_guest_node::Mode;
use sluice_guest_node::{DeviceKind, MadeResource, Node};
use sluice_protocol::{
    calls,
    doorbell::Doorbell,
    gpu::{self, Purpose},
    limits,
    session::{self, Nonce},
    shared::Shared as _,
};
use sluice_shared_memory::{Reservation, mapping::Words};
use std::{
    sync::{Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// Render nodes have these minor numbers.
const NODES: core::ops::Range<u32> = 128..192;
/// The ring of doorbells without an answer.
const DOORBELL_RING: u32 = 0;
/// The ring whose fences are waits: a fence ends earlier waits of its own ring only.
const WAIT_RING: u32 = 1;

/// The state of a mode beside the node.
#[derive(Debug)]
enum ModeState {
    Full,
    Legacy,
    Flat {
        nonce: Nonce,
        /// Handle of the control resource.
        control: OnceLock<u32>,
    },
}

/// A session's connection through a render node.
#[derive(Debug)]
pub struct Drm {
    node: HeldDescriptor,
    way: ModeState,
    /// The descriptor of a wait that has not ended.
    pending: Mutex<Option<HeldDescriptor>>,
}

impl Drm {
    /// Opens the first render node that is a Sluice device, in the wanted mode or in the best one that it supports.
    ///
    /// # Errors
    /// [`TransportError::NoDevice`] when there is none, [`TransportError::Denied`] when one may not be opened,
    /// [`TransportError::Version`] when its host has another version, [`TransportError::Mode`] when it does not support the wanted
    /// mode.
    pub fn open(wanted: Option<Mode>) -> Result<Drm, TransportError> {
        let mut unusable = None;
        for number in NODES {
            let path = format!("/dev/dri/renderD{number}");
            match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Permissions::empty()) {
                Ok(node) => match Node::new(node.as_fd()).kind() {
                    DeviceKind::Sluice { version: calls::VERSION, abilities } => {
                        return Drm::start(node, choose(wanted, Mode::of(abilities))?);
                    }
                    // This error is more useful than that of a node which may not be opened.
                    DeviceKind::Sluice { version, .. } => unusable = Some(TransportError::Version(version)),
                    DeviceKind::OtherVirtio | DeviceKind::Other => {}
                },
                Err(error @ (Errno::ACCESS | Errno::PERM)) => {
                    unusable.get_or_insert(TransportError::Denied { path, error });
                }
                Err(_) => {}
            }
        }
        Err(unusable.unwrap_or(TransportError::NoDevice))
    }

    fn start(node: OwnedFd, mode: Mode) -> Result<Drm, TransportError> {
        let node = HeldDescriptor::new(node)
            .map_err(|error| TransportError::System { what: "the render node", error })?;
        let way = match mode {
            Mode::Full => {
                call(&node, |node| node.start_context(WAIT_RING + 1))?;
                ModeState::Full
            }
            Mode::Legacy => ModeState::Legacy,
            Mode::Flat => ModeState::Flat { nonce: random_nonce()?, control: OnceLock::new() },
        };
        Ok(Drm { node, way, pending: Mutex::new(None) })
    }

    fn call<T>(&self, ioctl: impl FnOnce(Node<'_>) -> Result<T, Errno>) -> Result<T, TransportError> {
        call(&self.node, ioctl)
    }

    fn make(&self, bytes: u64) -> Result<MadeResource, TransportError> {
        self.call(|node| match &self.way {
            ModeState::Full => node.create_blob(bytes),
            ModeState::Legacy => node.create_3d(bytes),
            ModeState::Flat { .. } => node.create_2d(Purpose::Memory.encode(), bytes),
        })
    }

    fn map(&self, handle: u32, reservation: &Reservation, at: u64, bytes: u64) -> Result<(), TransportError> {
        let offset = self.call(|node| node.offset(handle))?;
        Ok(reservation.map(at, self.node.get()?, offset, bytes)?)
    }

    /// A descriptor that becomes readable when the session is woken.
    fn fall_asleep(&self) -> Result<Option<OwnedFd>, TransportError> {
        let wait = Doorbell::Wait.encode();
        match &self.way {
            ModeState::Full => self.call(|node| node.execute(&wait, Some(WAIT_RING), true)),
            ModeState::Legacy => self.call(|node| node.execute(&wait, None, true)),
            ModeState::Flat { nonce, .. } => {
                let token = Purpose::Token { key: nonce.key() };
                let made = self.call(|node| node.create_2d(token.encode(), gpu::PAGE))?;
                let exported = self.call(|node| node.export(made.handle));
                // The descriptor keeps the token; closing it releases the token.
                self.call(|node| node.close(made.handle))?;
                exported.map(Some)
            }
        }
    }
}

/// Calls the driver through a descriptor, after a check that the program has not replaced it.
fn call<T>(
    node: &HeldDescriptor,
    ioctl: impl FnOnce(Node<'_>) -> Result<T, Errno>,
) -> Result<T, TransportError> {
    let file = node.get()?;
    ioctl(Node::new(file.as_fd())).map_err(|error| match error {
        // The device was unplugged, or the kernel gave it up.
        Errno::NODEV | Errno::IO => TransportError::Lost,
        error => TransportError::System { what: "the virtio_gpu driver", error },
    })
}

fn choose(wanted: Option<Mode>, had: &[Mode]) -> Result<Mode, TransportError> {
    let best = had.first().copied().ok_or(TransportError::NoDevice)?;
    match wanted {
        None => Ok(best),
        Some(wanted) if had.contains(&wanted) => Ok(wanted),
        Some(wanted) => Err(TransportError::Mode { wanted, best }),
    }
}

fn random_nonce() -> Result<Nonce, TransportError> {
    let mut bytes = [0; Nonce::BYTES];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| TransportError::System { what: "random numbers", error })?;
    let whole = Nonce::new(bytes).filter(|_| filled == Nonce::BYTES);
    whole.ok_or(TransportError::System { what: "random numbers", error: Errno::IO })
}

/// Writes the nonce to the resource that was just mapped at `at`.
#[expect(unsafe_code, reason = "writing to a resource")]
fn mark(at: u64, nonce: &Nonce) {
    #[expect(clippy::cast_possible_truncation, reason = "an address of this process, a small number")]
    let (base, page) = (at as usize, gpu::PAGE as usize);
    // SAFETY: the caller has just mapped at least a page there, to which no other code has a reference yet.
    let words = unsafe { Words::new(base, page) };
    words.write(session::NONCE_AT, nonce.bytes());
}

impl Transport for Drm {
    fn create(
        &self,
        reservation: &Reservation,
        at: u64,
        bytes: u64,
    ) -> Result<TransportResource, TransportError> {
        if bytes == 0 || !bytes.is_multiple_of(gpu::PAGE) || bytes > limits::RESOURCE_BYTES {
            return Err(TransportError::Size(bytes));
        }
        let MadeResource { handle, id } = self.make(bytes)?;
        if let Err(error) = self.map(handle, reservation, at, bytes) {
            // The first error is the one to report.
            let _ = self.call(|node| node.close(handle));
            return Err(error);
        }
        if let ModeState::Flat { nonce, control } = &self.way {
            mark(at, nonce);
            control.get_or_init(|| handle);
        }
        Ok(TransportResource { id, token: Token::Handle(handle) })
    }

    fn file_pages(&self, resource: &TransportResource) -> Result<Option<(OwnedFd, u64)>, TransportError> {
        let Token::Handle(handle) = resource.token else { return Ok(None) };
        let offset = self.call(|node| node.offset(handle))?;
        let file = rustix::io::fcntl_dupfd_cloexec(self.node.get()?, 0)
            .map_err(|error| TransportError::System { what: "a second descriptor", error })?;
        Ok(Some((file, offset)))
    }

    fn destroy(&self, resource: TransportResource) -> Result<(), TransportError> {
        let Token::Handle(handle) = resource.token else { return Err(TransportError::Lost) };
        self.call(|node| node.close(handle))
    }

    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError> {
        match &self.way {
            ModeState::Full => {
                self.call(|node| node.execute(&doorbell.encode(), Some(DOORBELL_RING), false)).map(drop)
            }
            ModeState::Legacy => self.call(|node| node.execute(&doorbell.encode(), None, false)).map(drop),
            ModeState::Flat { control, .. } => match (doorbell.numbers(), control.get()) {
                (Some(numbers), Some(control)) => self.call(|node| node.transfer(*control, numbers)),
                // There is no session to ring for, or to wait for.
                _ => Err(TransportError::Lost),
            },
        }
    }

    fn wait(&self, timeout: Duration) -> Result<(), TransportError> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.is_none() {
            let Some(asleep) = self.fall_asleep()? else { return Ok(()) };
            let asleep = HeldDescriptor::new(asleep)
                .map_err(|error| TransportError::System { what: "a fence", error })?;
            *pending = Some(asleep);
        }
        let started = Instant::now();
        loop {
            let Some(asleep) = pending.as_ref() else { return Ok(()) };
            let left = timeout.saturating_sub(started.elapsed());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let Ok(fd) = asleep.get() else {
                // The program closed it. The next wait creates another.
                *pending = None;
                return Ok(());
            };
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                // An unplugged device signals nothing; only a call detects it.
                Ok(0) => return self.call(|node| node.is_there()),
                Ok(_) => {
                    *pending = None;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(TransportError::System { what: "poll", error }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_guest_node::Abilities;

    #[test]
    fn open_without_a_render_node_finds_no_device() {
        if !std::path::Path::new("/dev/dri").exists() {
            assert!(matches!(Drm::open(None), Err(TransportError::NoDevice)));
        }
    }

    // Promise: V17
    #[test]
    fn best_mode_is_taken_and_a_mode_beyond_the_driver_is_refused() {
        let modes = |three_d, blobs, contexts| Mode::of(Abilities { three_d, blobs, contexts });
        let cases: [(&[Mode], Mode, &[Mode]); 5] = [
            (modes(true, true, true), Mode::Full, &[Mode::Flat]),
            (modes(true, true, false), Mode::Legacy, &[Mode::Full, Mode::Flat]),
            (modes(true, false, true), Mode::Legacy, &[Mode::Full, Mode::Flat]),
            (modes(true, false, false), Mode::Legacy, &[Mode::Full, Mode::Flat]),
            (modes(false, true, true), Mode::Flat, &[Mode::Full, Mode::Legacy]),
        ];
        for (had, best, refused) in cases {
            assert!(matches!(choose(None, had), Ok(mode) if mode == best));
            for wanted in [Mode::Full, Mode::Legacy, Mode::Flat] {
                let chosen = choose(Some(wanted), had);
                if refused.contains(&wanted) {
                    let error = chosen.expect_err("the driver cannot").to_string();
                    assert!(
                        error.contains(&format!("SLUICE_TRANSPORT={wanted}"))
                            && error.contains(&best.to_string())
                    );
                } else {
                    assert!(matches!(chosen, Ok(mode) if mode == wanted));
                }
            }
        }
    }
}

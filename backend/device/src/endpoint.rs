//! The vhost-user end: features, configuration space, and the drain of the queues.

use crate::{
    chain::Buffer,
    device::Device,
    memory::{MemoryError, MemorySnapshot},
    poller::PollEvent,
    vring::Vring,
    workers::ProgramSignals,
};
use rustix::{
    fd::{AsFd, OwnedFd},
    io::Errno,
};
use sluice_protocol::gpu;
use sluice_runtime::limited;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vhost::vhost_user::{
    Backend, GpuBackend,
    message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures},
};
use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use vm_memory::GuestMemoryMmap;

/// Number of the control queue.
const CONTROL: u16 = 0;
/// Number of queues of a virtio-gpu device.
pub const QUEUES: u16 = 2;
/// Number of slots of a queue.
pub const QUEUE_SLOTS: u16 = 1024;
/// Commands handled before other events get a turn.
const COMMANDS_PER_ROUND: usize = 256;
/// Time for handling commands before other events get a turn: a chain may be long.
const ROUND: Duration = Duration::from_millis(2);
/// Time for which a stopping queue waits for workers to give back guest pages.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The set of features that the device offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceMode {
    /// All features; the VMM removes those that it does not support.
    Full,
    /// The features that stock QEMU leaves.
    Legacy,
    /// No 3D features, as stock Cloud Hypervisor leaves.
    #[value(name = "2d")]
    Flat,
}

/// Feature bits that QEMU's device lets a guest acknowledge even if they were not offered. They are always offered, because the
/// connection would end if the guest acknowledged one that was not.
const UNMASKED: u64 = 1 << 24 | 1 << 27 | 1 << 40;

impl DeviceMode {
    /// The feature bits to offer.
    #[must_use]
    pub const fn features(self) -> u64 {
        let ring = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        let gpu = match self {
            DeviceMode::Full => 1 << gpu::F_VIRGL | 1 << gpu::F_RESOURCE_BLOB | 1 << gpu::F_CONTEXT_INIT,
            DeviceMode::Legacy => 1 << gpu::F_VIRGL,
            DeviceMode::Flat => 0,
        };
        ring | gpu | UNMASKED | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }
}

/// The vhost-user end of one connection.
#[derive(Debug)]
pub struct Endpoint {
    mode: DeviceMode,
    scanouts: u32,
    /// Held while waiting for the state, so that two threads take turns: the queue's, which comes back at once, and
    /// the one for the front-end's messages.
    turn: Mutex<()>,
    state: Mutex<EndpointState>,
}

struct EndpointState {
    device: Device,
    buffer: Buffer,
    /// The control queue, once it has moved; withheld answers are returned through it.
    vring: Option<Vring>,
    /// Index of the control queue when it was stopped.
    stopped_at: Option<u16>,
    /// Kept open without use, because a VMM that cannot hand this over ends the connection.
    gpu: Option<GpuBackend>,
    requests: Option<Backend>,
}

impl core::fmt::Debug for EndpointState {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("EndpointState")
            .field("device", &self.device)
            .field("stopped_at", &self.stopped_at)
            .field("gpu", &self.gpu.is_some())
            .field("requests", &self.requests.is_some())
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Creates an endpoint around a device.
    #[must_use]
    pub fn new(device: Device, mode: DeviceMode, scanouts: u32) -> Endpoint {
        let state = EndpointState {
            device,
            buffer: Buffer::default(),
            vring: None,
            stopped_at: None,
            gpu: None,
            requests: None,
        };
        Endpoint { mode, scanouts, turn: Mutex::new(()), state: Mutex::new(state) }
    }

    /// Ends the connection and all its sessions.
    pub fn disconnect(&self) {
        let mut state = self.state();
        let counters = state.device.counters;
        tracing::debug!(?counters, "a connection has ended");
        state.device.disconnect();
        state.vring = None;
    }

    /// The descriptor for the loop to watch; it reports it with [`Endpoint::events`].
    ///
    /// # Errors
    /// The kernel's, for instance if there are no descriptors left.
    pub fn poller(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(self.state().device.poller.descriptor().as_fd(), 3)
    }

    fn state(&self) -> MutexGuard<'_, EndpointState> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Panics are caught inside, before they poison the lock; if one escapes, continuing is still better than dying.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EndpointState {
    /// Runs `act` and counts its panic instead of ending the thread: a front-end would lose its device.
    fn guarded<T>(&mut self, act: impl FnOnce(&mut EndpointState) -> T) -> Option<T> {
        let done = catch_unwind(AssertUnwindSafe(|| act(self)));
        if done.is_err() {
            self.device.counters.panics = self.device.counters.panics.wrapping_add(1);
        }
        done.ok()
    }

    /// Handles a kick of the control queue, or commands left from the last round.
    fn control(&mut self, vring: &Vring) {
        // A kick that was in flight when the queue was stopped.
        if !vring.is_ready() {
            return;
        }
        if self.vring.is_none() || self.stopped_at.is_some() {
            self.started(vring);
        }
        // One snapshot for the whole round: the checked memory, which no front-end changes.
        let Some(memory) = self.device.memory().cloned() else { return };
        let began = Instant::now();
        for _ in 0..COMMANDS_PER_ROUND {
            // Errors: the queue is being removed, or its indices are invalid; either way there is no command to take.
            let _ = vring.disable_notification(&memory);
            if self.drain(vring, &memory, began) {
                self.return_answers();
                self.device.poller.again();
                return;
            }
            self.return_answers();
            if !vring.enable_notification(&memory).unwrap_or(false) {
                return;
            }
        }
        self.device.poller.again();
    }

    /// Takes commands; `true` if there may be more.
    fn drain(&mut self, vring: &Vring, memory: &MemorySnapshot, began: Instant) -> bool {
        for _ in 0..COMMANDS_PER_ROUND {
            let chain = match vring.take(memory) {
                Ok(chain) => chain,
                Err(error) => {
                    limited!(info, %error, "cannot read the control queue");
                    return false;
                }
            };
            let Some(chain) = chain else { return false };
            self.one(memory, chain);
            if began.elapsed() >= ROUND {
                break;
            }
        }
        true
    }

    fn one<M>(&mut self, memory: &GuestMemoryMmap<()>, chain: virtio_queue::DescriptorChain<M>)
    where
        M: core::ops::Deref<Target = GuestMemoryMmap<()>>,
    {
        let (copied, place) = self.buffer.copy(memory, chain);
        let (device, buffer) = (&mut self.device, &self.buffer);
        let handled = catch_unwind(AssertUnwindSafe(|| device.command(copied, buffer.command(), place)));
        if handled.is_err() {
            let recovered = catch_unwind(AssertUnwindSafe(|| device.panicked(buffer.command(), place)));
            if recovered.is_err() {
                tracing::error!("cannot end a session after a panic");
            }
        }
    }

    /// The control queue moves for the first time since its set-up or stop.
    fn started(&mut self, vring: &Vring) {
        let (base, slots) = (vring.next_available(), vring.size());
        // It starts at 0 although it was further: a new driver. Otherwise it is a resume.
        if self.stopped_at.take().is_some_and(|at| at != 0 && base == 0) {
            self.device.restart();
        }
        self.device.set_queue_size(slots);
        self.vring = Some(vring.clone());
    }

    /// Handles all events of the poller.
    fn events(&mut self) {
        let mut events = Vec::new();
        if let Err(error) = self.device.poller.wait(Duration::ZERO, &mut events) {
            limited!(error, %error, "cannot wait for events");
        }
        let mut again = false;
        for event in events {
            again |= event == PollEvent::Again;
            let device = &mut self.device;
            if catch_unwind(AssertUnwindSafe(|| device.event(event))).is_err() {
                self.device.counters.panics = self.device.counters.panics.wrapping_add(1);
            }
        }
        self.return_answers();
        if again && let Some(vring) = self.vring.clone() {
            self.control(&vring);
        }
    }

    /// Returns answers to the guest, all with one interrupt.
    fn return_answers(&mut self) {
        let answers = self.device.take_answers();
        let (Some(memory), Some(vring)) = (self.device.memory(), &self.vring) else { return };
        if answers.is_empty() {
            return;
        }
        for answer in &answers {
            let written = answer.place.write(memory, answer.bytes());
            if let Err(error) = vring.add_used(memory, answer.place.head(), written) {
                limited!(info, %error, "cannot return an answer to the guest");
            }
        }
        if vring.needs_notification(memory).unwrap_or(true)
            && let Err(error) = vring.signal()
        {
            limited!(info, %error, "cannot interrupt the guest");
        }
        self.device.recycle(answers);
    }

    /// Cursor commands have no answer and no effect: every scanout is disabled.
    fn cursor(&self, vring: &Vring) {
        let Some(memory) = self.device.memory() else { return };
        let mut used = false;
        for _ in 0..COMMANDS_PER_ROUND {
            let Ok(Some(chain)) = vring.take(memory) else { break };
            used |= vring.add_used(memory, chain.head_index(), 0).is_ok();
        }
        if used {
            // A guest without this interrupt finds its descriptors at its next look.
            let _ = vring.signal();
        }
        let _ = vring.enable_notification(memory);
    }
}

/// Handlers of the front-end's messages.
impl Endpoint {
    /// The feature bits to offer.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.mode.features()
    }

    /// Sets the features that the front-end accepted.
    pub fn acknowledge(&self, features: u64) {
        tracing::debug!(features = format_args!("{features:#x}"), "the front-end has acknowledged features");
        self.state().device.set_driver_features(features);
    }

    /// The features of the vhost-user protocol.
    #[must_use]
    pub fn protocol_features() -> VhostUserProtocolFeatures {
        // Without INFLIGHT_SHMFD: this device keeps no state in flight.
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
    }

    /// Removes all state of a driver.
    pub fn reset(&self) {
        let mut state = self.state();
        state.guarded(|state| state.device.restart());
    }

    /// Reads the configuration space.
    #[must_use]
    pub fn configuration(&self, offset: u32, size: u32) -> Vec<u8> {
        // Never fails, because a VMM ends the connection on an error. Bytes beyond the structure read as zero.
        let size = usize::try_from(size).unwrap_or(0).min(4096);
        let mut bytes = vec![0; size];
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let known = gpu::configuration(self.scanouts);
        for (to, from) in bytes.iter_mut().zip(known.get(offset..).unwrap_or_default()) {
            *to = *from;
        }
        bytes
    }

    /// Checks new guest memory and uses it from then on; if it is refused, the device has none. No byte of it is read or
    /// written before the check.
    ///
    /// # Errors
    /// [`MemoryError`] if the memory is refused.
    pub fn set_memory(&self, memory: &MemorySnapshot) -> Result<(), MemoryError> {
        let mut state = self.state();
        // A panic meanwhile leaves sessions without their memory, so the memory is refused.
        let set = state.guarded(|state| state.device.set_memory(Arc::clone(memory)));
        set.unwrap_or(Err(MemoryError::Unchecked)).inspect_err(|error| {
            // A front-end that is a process may try any number of times.
            limited!(error, %error, "guest memory is refused");
        })
    }

    /// True if the front-end is a program.
    #[must_use]
    pub fn serves_program(&self) -> bool {
        self.state().device.serves_program()
    }

    /// Sets a program's own signals, for its session.
    pub fn set_program_signals(&self, signals: ProgramSignals) {
        self.state().device.set_program_signals(signals);
    }

    /// Keeps the back channel open.
    pub fn keep_requests(&self, backend: Backend) {
        self.state().requests = Some(backend);
    }

    /// Keeps the display's socket open.
    pub fn keep_display(&self, socket: GpuBackend) {
        self.state().gpu = Some(socket);
    }

    /// Stops a queue.
    pub fn stop(&self, index: u16) {
        if index != CONTROL {
            return;
        }
        let mut state = self.state();
        let Some(vring) = state.vring.clone() else { return };
        state.guarded(|state| {
            state.device.stop(STOP_TIMEOUT);
            state.return_answers();
        });
        state.stopped_at = Some(vring.next_available());
        // Answers that become due from now on are dropped: the ring belongs to the front-end again.
        state.vring = None;
    }

    /// Handles a kick of a queue.
    pub fn kicked(&self, index: u16, vring: &Vring) {
        self.state().guarded(|state| match index {
            CONTROL => state.control(vring),
            gpu::CURSOR_QUEUE => state.cursor(vring),
            _ => {}
        });
    }

    /// Handles events of the poller.
    pub fn events(&self) {
        self.state().guarded(EndpointState::events);
    }
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        reason = "a test"
    )]
    use super::*;
    use crate::{link::Link, memory::MemoryPolicy};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use sluice_protocol::{doorbell::Doorbell, gpu::command, session};
    use std::fs::File;
    use virtio_queue::{
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vm_memory::{Bytes, FileOffset, GuestAddress};

    const COMMANDS: u64 = 0x10_0000;
    const ANSWERS: u64 = 0x11_0000;
    const PAGES: u64 = 0x20_0000;

    fn command(kind: u32, context: u32, words: &[u32]) -> Vec<u8> {
        let header = [kind, 0, 0, 0, context, 0];
        header.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
    }

    fn endpoint() -> (Endpoint, MemorySnapshot) {
        let file: File =
            memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap().into();
        ftruncate(&file, 0x40_0000).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let part = (GuestAddress(0), 0x40_0000, Some(FileOffset::new(file, 0)));
        let memory = MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files([part]).unwrap());
        let device = Device::new(MemoryPolicy::Sealed, Arc::new(Link::new(true).unwrap())).unwrap();
        let endpoint = Endpoint::new(device, DeviceMode::Full, 1);
        endpoint.set_memory(&memory).unwrap();
        (endpoint, memory)
    }

    /// Lets the endpoint handle these commands in one kick; returns the type words of the answers.
    fn kick(endpoint: &Endpoint, memory: &MemorySnapshot, commands: &[Vec<u8>]) -> Vec<u32> {
        let guest = &**memory;
        let mock = MockSplitQueue::new(guest, 64);
        for (index, command) in (0u16..).zip(commands) {
            let at = 256 * u64::from(index);
            let length = u32::try_from(command.len()).unwrap();
            guest.write_slice(command, GuestAddress(COMMANDS + at)).unwrap();
            let descriptors = [
                Descriptor::new(COMMANDS + at, length, 1, 2 * index + 1),
                Descriptor::new(ANSWERS + at, 256, 2, 0),
            ];
            for (offset, descriptor) in (0u16..).zip(descriptors) {
                mock.desc_table().store(2 * index + offset, RawDescriptor::from(descriptor)).unwrap();
            }
            mock.avail().ring().ref_at(usize::from(index)).unwrap().store(2 * index);
        }
        mock.avail().idx().store(u16::try_from(commands.len()).unwrap());
        mock.used().idx().store(0);
        let vring = Vring::new(64).unwrap();
        let (descriptors, available, used) = (mock.desc_table_addr(), mock.avail_addr(), mock.used_addr());
        vring.set_addresses(guest, descriptors.0, available.0, used.0).unwrap();
        vring.set_size(64);
        vring.set_ready(true);
        vring.set_enabled(true);
        endpoint.state().vring = None;
        endpoint.kicked(CONTROL, &vring);
        // Slow commands take several rounds, as the panics that are printed here do.
        for _ in commands {
            endpoint.events();
        }
        let answered = usize::from(mock.used().idx().load());
        (0..answered)
            .map(|index| {
                let head = mock.used().ring().ref_at(index).unwrap().load().id();
                guest.read_obj(GuestAddress(ANSWERS + 128 * u64::from(head))).unwrap()
            })
            .collect()
    }

    #[test]
    fn panic_in_a_command_ends_only_the_session_of_its_context() {
        let (endpoint, memory) = endpoint();
        let control = |context: u32, resource: u32, at: u64| {
            let mut words = vec![resource, 1, 1, 1, 0, 0, 0, 0];
            words.extend([u32::try_from(at).unwrap(), 0, u32::try_from(session::BYTES).unwrap(), 0]);
            memory.write_obj(session::MAGIC, GuestAddress(at)).unwrap();
            let mut open = command(command::SUBMIT_3D, context, &[32, 0]);
            open.extend(Doorbell::Open { resource }.encode());
            [
                command(command::CTX_CREATE, context, &[0, 0]),
                command(command::RESOURCE_CREATE_BLOB, 0, &words),
                command(command::CTX_ATTACH_RESOURCE, context, &[resource, 0]),
                open,
            ]
        };
        assert_eq!(kick(&endpoint, &memory, &control(1, 10, PAGES)), [0x1100; 4]);

        endpoint.state().device.cursed = Some(1);
        let ring = |context: u32| {
            let mut ring = command(command::SUBMIT_3D, context, &[32, 0]);
            ring.extend(Doorbell::Ring.encode());
            ring
        };
        let commands =
            [command(command::CTX_CREATE, 2, &[0, 0]), ring(1), command(command::CTX_DESTROY, 2, &[])];
        assert_eq!(kick(&endpoint, &memory, &commands), [0x1100, 0x1200, 0x1100]);
        assert_eq!(endpoint.state().device.counters.panics, 1);
        let state: u32 = memory.read_obj(GuestAddress(PAGES + session::STATE as u64)).unwrap();
        assert_eq!(state, session::LOST);
        endpoint.state().device.cursed = None;
        assert_eq!(
            kick(&endpoint, &memory, &[ring(1)]),
            [0x1100],
            "the context lives on, its session is over"
        );
    }

    #[test]
    fn configuration_read_beyond_its_end_gives_zeros_and_is_bounded() {
        let (endpoint, _) = endpoint();
        assert_eq!(endpoint.configuration(0, 16), gpu::configuration(1));
        assert_eq!(endpoint.configuration(8, 8), gpu::configuration(1)[8..]);
        assert_eq!(endpoint.configuration(12, 20), [&[1, 0, 0, 0][..], &[0; 16]].concat());
        assert_eq!(endpoint.configuration(u32::MAX, 4), [0; 4]);
        assert!(endpoint.configuration(0, u32::MAX).len() <= 4096);
    }

    #[test]
    fn offered_features_are_those_that_each_mode_supports() {
        let full = DeviceMode::Full.features();
        for bit in [0, 3, 4, 24, 27, 28, 29, 30, 32, 40] {
            assert_ne!(full & 1 << bit, 0, "bit {bit}");
        }
        for bit in [33, 35, 38] {
            assert_eq!(full & 1 << bit, 0, "bit {bit}");
        }
        assert_eq!(full & !DeviceMode::Legacy.features(), 1 << 3 | 1 << 4);
        assert_eq!(full & !DeviceMode::Flat.features(), 1 | 1 << 3 | 1 << 4);
        let protocol = Endpoint::protocol_features();
        assert!(!protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        assert!(
            protocol.contains(VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::BACKEND_REQ)
        );
    }

    #[test]
    fn memory_that_can_shrink_is_refused_and_not_used() {
        let (endpoint, _) = endpoint();
        let file: File = memfd_create(c"ram", MemfdFlags::CLOEXEC).unwrap().into();
        ftruncate(&file, 0x1000).unwrap();
        let part = (GuestAddress(0), 0x1000, Some(FileOffset::new(file, 0)));
        let memory = MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files([part]).unwrap());
        assert_eq!(endpoint.set_memory(&memory), Err(MemoryError::Shrinkable(0)));
        assert!(endpoint.state().device.memory().is_none());
    }
}

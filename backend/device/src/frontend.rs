//! One front-end: the state that its messages set, and the thread that serves its queues.
//!
//! New guest memory is checked before any other module gets it. Queues have no memory of their own, so a front-end that
//! replaces its memory, or whose memory is refused, never makes this process touch an unchecked page.

use crate::{
    endpoint::{Endpoint, QUEUE_SLOTS, QUEUES},
    memory::MemorySnapshot,
    vring::{self, Vring},
    workers::ProgramSignals,
};
use core::sync::atomic::{AtomicBool, Ordering};
use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, epoll, eventfd},
    fd::OwnedFd,
    io::Errno,
};
use sluice_protocol::gpu::CURSOR_QUEUE;
use sluice_runtime::limited;
use std::{
    fs::File,
    io,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};
use vhost::{
    VhostUserMemoryRegionBase,
    vhost_user::{
        Backend, BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
        message::{
            VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
            VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
            VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
            VhostUserVringAddrFlags, VhostUserVringState,
        },
    },
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// The loop's token for the device's poller; queues have their numbers as tokens.
const POLLER: u16 = QUEUES;
/// The token for the eventfd that signals a change of the queues that may be served, or the end.
const CHANGED: u16 = QUEUES + 1;
/// Events taken at once.
const EVENTS: usize = 16;

/// The reason why a connection ended, other than the front-end leaving.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// There are no descriptors left.
    #[error("cannot set up a connection: {0}")]
    System(#[from] Errno),
    /// The queues cannot be made.
    #[error("cannot create a queue: {0}")]
    Queue(#[from] virtio_queue::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// A message was malformed or refused.
    #[error("vhost-user: {0}")]
    Message(Error),
    /// A handler panicked.
    #[error("the handler of a message panicked")]
    Panic,
}

/// Serves one front-end until it leaves or breaks the rules.
///
/// # Errors
/// [`FrontendError`] with the reason for the end.
pub fn serve(stream: UnixStream, endpoint: &Arc<Endpoint>) -> core::result::Result<(), FrontendError> {
    let queues = Arc::new(Queues::new(endpoint)?);
    let served = {
        let (queues, endpoint) = (Arc::clone(&queues), Arc::clone(endpoint));
        std::thread::Builder::new().name("queues".into()).spawn(move || queues.serve(&endpoint))
    };
    let served = served.map_err(FrontendError::Thread)?;
    let frontend = Frontend::new(Arc::clone(endpoint), Arc::clone(&queues));
    let mut requests = BackendReqHandler::from_stream(stream, Arc::new(Mutex::new(frontend)));
    let ended = catch_unwind(AssertUnwindSafe(|| {
        loop {
            if let Err(error) = requests.handle_request() {
                return error;
            }
        }
    }));
    // The front-end sees the end now, before the clean-up.
    drop(requests);
    queues.end();
    if served.join().is_err() {
        tracing::error!("the queue thread of a connection panicked");
    }
    endpoint.disconnect();
    // Last, because waiters for the end of this connection wait for the pipe in it.
    drop(queues);
    match ended {
        // The normal ends of a front-end.
        Ok(Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_)) => Ok(()),
        Ok(error) => Err(FrontendError::Message(error)),
        Err(_) => Err(FrontendError::Panic),
    }
}

/// The queues of a front-end, and the descriptors that wake their thread.
#[derive(Debug)]
struct Queues {
    vrings: [Vring; QUEUES as usize],
    epoll: OwnedFd,
    changed: OwnedFd,
    over: AtomicBool,
    /// Kept open because the epoll watches it.
    _poller: OwnedFd,
}

impl Queues {
    fn new(endpoint: &Endpoint) -> core::result::Result<Queues, FrontendError> {
        let poller = endpoint.poller()?;
        let queues = Queues {
            vrings: [Vring::new(QUEUE_SLOTS)?, Vring::new(QUEUE_SLOTS)?],
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            changed: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            over: AtomicBool::new(false),
            _poller: poller,
        };
        let watch = |fd: &OwnedFd, event: u16| {
            let data = epoll::EventData::new_u64(event.into());
            epoll::add(&queues.epoll, fd, data, epoll::EventFlags::IN)
        };
        watch(&queues._poller, POLLER)?;
        watch(&queues.changed, CHANGED)?;
        Ok(queues)
    }

    fn change(&self) {
        // EAGAIN means that the counter is full, so the event is pending already.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// Ends the thread.
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.change();
    }

    fn unwatch(&self, vring: &Vring) {
        if let Some(kick) = vring.kick() {
            // ENOENT is the only possible error: it was not watched, which is the goal.
            let _ = epoll::delete(&self.epoll, &kick);
        }
    }

    /// Watches the kick of a queue only if the queue may be served.
    fn watch(&self, index: u16, vring: &Vring) -> core::result::Result<(), Errno> {
        let Some(kick) = vring.kick() else { return Ok(()) };
        if !vring.is_ready() || !vring.is_enabled() {
            self.unwatch(vring);
            return Ok(());
        }
        let data = epoll::EventData::new_u64(index.into());
        match epoll::add(&self.epoll, &kick, data, epoll::EventFlags::IN) {
            // The thread may have taken an earlier kick while the queue could not be served.
            Ok(()) => self.change(),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn serve(&self, endpoint: &Endpoint) {
        let mut events = Vec::with_capacity(EVENTS);
        while !self.over.load(Ordering::Acquire) {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for the queues of a connection");
                    return;
                }
            }
            for event in &events {
                let data = event.data;
                self.happened(u16::try_from(data.u64()).unwrap_or(CHANGED), endpoint);
            }
        }
    }

    fn happened(&self, event: u16, endpoint: &Endpoint) {
        match self.vrings.get(usize::from(event)) {
            Some(vring) => {
                if let Err(error) = vring.read_kick() {
                    limited!(info, %error, "cannot read a kick");
                    self.unwatch(vring);
                }
                self.kicked(event, vring, endpoint);
            }
            None if event == POLLER => endpoint.events(),
            None => {
                // AGAIN: it was read already.
                let _ = rustix::io::read(&self.changed, &mut [0; 8]);
                for (index, vring) in (0..).zip(&self.vrings) {
                    self.kicked(index, vring, endpoint);
                }
            }
        }
    }

    fn kicked(&self, index: u16, vring: &Vring, endpoint: &Endpoint) {
        if vring.is_enabled() && !self.over.load(Ordering::Acquire) {
            endpoint.kicked(index, vring);
        }
    }
}

/// A memory region with its address in the front-end and in the guest.
#[derive(Clone, Copy, Debug)]
struct Region {
    user: u64,
    guest: u64,
    bytes: u64,
}

/// State set by the front-end's messages.
struct Frontend {
    endpoint: Arc<Endpoint>,
    queues: Arc<Queues>,
    owned: bool,
    features: u64,
    protocol: u64,
    regions: Vec<Region>,
    memory: MemorySnapshot,
    /// A program's doorbell, until its wake comes.
    doorbell: Option<OwnedFd>,
}

fn failed(error: impl Into<Box<dyn core::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

/// Takes a program's descriptor for its worker, which reads or writes it: only an eventfd.
fn signal(file: File) -> Result<OwnedFd> {
    if vring::is_eventfd(&file) { Ok(file.into()) } else { Err(failed("a signal that is not an eventfd")) }
}

fn unserved<T>() -> Result<T> {
    Err(Error::InvalidOperation("not offered"))
}

impl Frontend {
    fn new(endpoint: Arc<Endpoint>, queues: Arc<Queues>) -> Frontend {
        Frontend {
            endpoint,
            queues,
            owned: false,
            features: 0,
            protocol: 0,
            regions: Vec::new(),
            memory: MemorySnapshot::new(GuestMemoryMmap::new()),
            doorbell: None,
        }
    }

    /// True if the descriptors of this queue are the signals of a program.
    fn is_signals(&self, index: u16) -> bool {
        index == CURSOR_QUEUE && self.endpoint.serves_program()
    }

    fn vring(&self, index: u32) -> Result<(u16, &Vring)> {
        let index = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let vring = self.queues.vrings.get(usize::from(index)).ok_or(Error::InvalidParam)?;
        Ok((index, vring))
    }

    /// Enables or disables all queues.
    fn enable_all(&self, enabled: bool) -> Result<()> {
        for (index, vring) in (0..).zip(&self.queues.vrings) {
            vring.set_enabled(enabled);
            self.queues.watch(index, vring).map_err(failed)?;
        }
        Ok(())
    }

    /// A queue starts when it gets a kick.
    fn start(&self, index: u16, vring: &Vring) -> Result<()> {
        if vring.kick().is_some() {
            vring.set_ready(true);
            self.queues.watch(index, vring).map_err(failed)?;
        }
        Ok(())
    }

    /// The guest address for an address of the front-end.
    fn guest_address(&self, user: u64) -> Result<u64> {
        let found = self.regions.iter().find_map(|region| {
            let inside = user.checked_sub(region.user).filter(|inside| *inside < region.bytes)?;
            region.guest.checked_add(inside)
        });
        found.ok_or_else(|| failed("an address that is not in the memory table"))
    }
}

impl VhostUserBackendReqHandlerMut for Frontend {
    fn set_owner(&mut self) -> Result<()> {
        if core::mem::replace(&mut self.owned, true) {
            return Err(Error::InvalidOperation("already claimed"));
        }
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        (self.owned, self.features, self.protocol) = (false, 0, 0);
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.enable_all(false)?;
        self.features = 0;
        self.endpoint.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.endpoint.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.endpoint.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        for vring in &self.queues.vrings {
            vring.set_event_index(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        }
        self.endpoint.acknowledge(features);
        // A front-end without this feature has no message that enables a queue.
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.enable_all(true)?;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        if postcopy_listening.is_some() {
            return unserved();
        }
        self.regions.clear();
        self.memory = MemorySnapshot::new(GuestMemoryMmap::new());
        let mut regions = Vec::new();
        let mut parts = Vec::new();
        for (region, file) in table.iter().zip(files) {
            let guest = region.guest_phys_addr;
            let mapped = GuestRegionMmap::new(region.mmap_region(file)?, GuestAddress(guest));
            parts.push(mapped.ok_or(Error::InvalidParam)?);
            regions.push(Region { user: region.user_addr, guest, bytes: region.memory_size });
        }
        let memory = MemorySnapshot::new(GuestMemoryMmap::from_regions(parts).map_err(failed)?);
        self.endpoint.set_memory(&memory).map_err(failed)?;
        (self.regions, self.memory) = (regions, memory);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let slots = u16::try_from(num).ok().filter(|slots| (1..=QUEUE_SLOTS).contains(slots));
        self.vring(index)?.1.set_size(slots.ok_or(Error::InvalidParam)?);
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let [descriptors, available, used] =
            [descriptor, available, used].map(|address| self.guest_address(address));
        let set = self.vring(index)?.1.set_addresses(&self.memory, descriptors?, available?, used?);
        set.map_err(|_| Error::InvalidParam)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        // The upper half is for packed rings, which are not offered.
        self.vring(index)?.1.set_next_available(u16::try_from(base & 0xffff).unwrap_or(0));
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let (number, vring) = self.vring(index)?;
        vring.set_ready(false);
        self.queues.unwatch(vring);
        self.endpoint.stop(number);
        let next = vring.next_available();
        vring.set_kick(None);
        vring.set_call(None);
        Ok(VhostUserVringState::new(index, u32::from(next)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let (index, vring) = self.vring(index.into())?;
        if self.is_signals(index) {
            self.doorbell = file.map(signal).transpose()?;
            return Ok(());
        }
        // The front-end has the old one, too, so the epoll would continue to watch it.
        self.queues.unwatch(vring);
        vring.set_kick(file);
        self.start(index, vring)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let (index, vring) = self.vring(index.into())?;
        if self.is_signals(index) {
            let wake = file.map(signal).transpose()?;
            if let (Some(doorbell), Some(wake)) = (self.doorbell.take(), wake) {
                self.endpoint.set_program_signals(ProgramSignals { doorbell, wake });
            }
            return Ok(());
        }
        vring.set_call(file);
        self.start(index, vring)
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.vring(index.into())?.1.set_pipe(file);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(Endpoint::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(QUEUES.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let feature = VhostUserVirtioFeatures::PROTOCOL_FEATURES;
        if self.features & feature.bits() == 0 {
            return Err(Error::InactiveFeature(feature));
        }
        let (index, vring) = self.vring(index)?;
        vring.set_enabled(enable);
        self.queues.watch(index, vring).map_err(failed)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Ok(self.endpoint.configuration(offset, size))
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // Only `events_clear` can be written, and there are no events.
        Ok(())
    }

    fn set_backend_req_fd(&mut self, backend: Backend) {
        let offered = VhostUserProtocolFeatures::REPLY_ACK;
        backend.set_reply_ack_flag(self.protocol & offered.bits() != 0);
        self.endpoint.keep_requests(backend);
    }

    fn set_gpu_socket(&mut self, display: GpuBackend) -> Result<()> {
        self.endpoint.keep_display(display);
        Ok(())
    }

    fn get_shared_object(&mut self, _object: VhostUserSharedMsg) -> Result<File> {
        unserved()
    }

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unserved()
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        unserved()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        unserved()
    }

    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        unserved()
    }

    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        unserved()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        unserved()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unserved()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unserved()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        unserved()
    }
}

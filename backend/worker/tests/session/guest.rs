//! Plays the device and the shim of one session, in this process, against a real worker.

use crate::arbiter::FakeArbiter;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_kit::{
    guest::{Answer, FakeGuest, record},
    wait::{TIMEOUT, eventually, readable},
};
use sluice_messages::control::{self, FromWorker, ToWorker, WorkerSetup, codec};
use sluice_protocol::{
    calls::{self, wire},
    field::{FieldError, Mint, Ordinal, Size, Writer},
    handle::{Context, Id},
    limits,
    record::Header,
    ring::Producer,
    session::{self, Attachment},
    shared::Shared,
};
use sluice_shared_memory::{Mapping, Run, mapping::Words, socket};
use std::{
    ffi::OsStr,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::Ordering,
};

/// First address at which the tests attach arenas.
pub(crate) const ARENA: u64 = limits::WINDOW_BOUNDS.start;
/// The device window of the tests.
pub(crate) const WINDOW: u64 = limits::WINDOW_BOUNDS.start + (512 << 30);

/// The null driver, which cargo has built beside this test.
pub(crate) fn null_driver() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let driver = test.with_file_name("libsluice_null_driver.so");
    assert!(driver.exists(), "{} is built with this test", driver.display());
    driver
}

/// A memory file of guest RAM.
pub(crate) fn memory_file(bytes: u64) -> OwnedFd {
    let file = memfd_create("guest-ram", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&file, bytes).expect("truncate");
    file
}

/// The descriptor of a list of runs, in the device's format.
pub(crate) fn runs_file(runs: &[Run]) -> OwnedFd {
    let mut bytes = Vec::new();
    runs.iter().for_each(|run| run.push(&mut bytes));
    let file = memfd_create("runs", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::io::write(&file, &bytes).expect("write");
    file
}

/// An arena from the guest's side.
pub(crate) struct Arena {
    mapping: Mapping,
}

impl Arena {
    pub(crate) fn words(&self) -> Words {
        self.mapping.words()
    }

    pub(crate) fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.words().read(at, &mut into);
        into
    }

    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        self.words().write(at, from);
    }
}

/// A guest process and its device.
pub(crate) struct Guest {
    pub(crate) worker: Child,
    pub(crate) control: OwnedFd,
    page: Mapping,
    /// The file of the session's page.
    page_file: OwnedFd,
    doorbell: OwnedFd,
    pub(crate) wake: OwnedFd,
    pub(crate) session: FakeGuest<Words>,
    mapped_runs: u32,
}

/// The parameters of a worker's start.
pub(crate) struct Start<'a> {
    pub(crate) driver: PathBuf,
    pub(crate) mapped_runs: u32,
    pub(crate) driver_queue: u64,
    pub(crate) environment: &'a [(&'a str, &'a OsStr)],
    /// The worker's ends of custody sockets, device by device.
    pub(crate) lenders: Vec<OwnedFd>,
    pub(crate) scrub_every_free: bool,
    /// The UUID of the only device that the driver may show.
    pub(crate) identity: Option<[u8; 16]>,
    /// The peer that uses the next version.
    pub(crate) foreign: Option<Peer>,
    /// The worker's standard error.
    pub(crate) log: Stdio,
    /// The memory of a fixed arena at [`ARENA`], which the worker receives before the session's page.
    pub(crate) fixed_arena: Option<&'a OwnedFd>,
}

/// A peer of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Daemon,
    Device,
    Shim,
}

impl Start<'_> {
    /// Starts on a driver with the usual parameters and without devices.
    pub(crate) fn on(driver: PathBuf) -> Self {
        let (mapped_runs, driver_queue, lenders) = (limits::MAPPED_RUNS, limits::DRIVER_QUEUE, Vec::new());
        let (scrub_every_free, identity, foreign) = (false, None, None);
        let (environment, log) = (&[][..], Stdio::inherit());
        let fixed_arena = None;
        Start {
            driver,
            mapped_runs,
            driver_queue,
            environment,
            lenders,
            scrub_every_free,
            identity,
            foreign,
            log,
            fixed_arena,
        }
    }
}

impl Guest {
    /// A worker on the null driver, ready.
    pub(crate) fn start() -> Guest {
        Guest::with_quota(0)
    }

    /// A worker on the null driver with a quota.
    pub(crate) fn with_quota(memory: u64) -> Guest {
        Guest::of(&FakeArbiter::new(memory))
    }

    /// A worker on the null driver, of the arbiter's VM.
    pub(crate) fn of(arbiter: &FakeArbiter) -> Guest {
        Guest::ready(Start { lenders: vec![arbiter.admit()], ..Start::on(null_driver()) })
    }

    /// A worker on the null driver that maps at most `mapped_runs` runs of guest pages one by one.
    pub(crate) fn with_mapped_runs(mapped_runs: u32) -> Guest {
        let lenders = vec![FakeArbiter::new(0).admit()];
        Guest::ready(Start { mapped_runs, lenders, ..Start::on(null_driver()) })
    }

    /// A worker with these parameters, ready.
    pub(crate) fn ready(start: Start<'_>) -> Guest {
        let guest = Guest::launched(start);
        eventually("READY", || guest.state() == session::READY);
        guest
    }

    /// A worker that may not become ready.
    pub(crate) fn launched(start: Start<'_>) -> Guest {
        let (ours, theirs) = socket::pair().expect("socket pair");
        let worker = Command::new(env!("CARGO_BIN_EXE_sluice-worker"))
            .args(["--control-fd", "0"])
            .envs(start.environment.iter().copied())
            .stdin(Stdio::from(theirs))
            .stderr(start.log)
            .spawn()
            .expect("the worker starts");
        let setup = WorkerSetup {
            vm: 1,
            session: 1,
            driver: start.driver.into_os_string().into_string().expect("UTF-8"),
            mapped_runs: start.mapped_runs,
            driver_queue: start.driver_queue,
            devices: u32::try_from(start.lenders.len()).expect("few"),
            scrub_every_free: start.scrub_every_free,
            identity: start.identity,
        };
        let next = |peer| u32::from(start.foreign == Some(peer));
        let mut setup = codec::encode(&setup).expect("encodes");
        setup[..4].copy_from_slice(&(control::VERSION + next(Peer::Daemon)).to_le_bytes());
        socket::send(&ours, &setup, &[]).expect("setup");
        for (device, arbiter) in (0..).zip(start.lenders) {
            let custody = ToWorker::Custody { device };
            socket::send(&ours, &custody.encode(), &[arbiter.as_fd()]).expect("custody");
        }
        let (doorbell, wake) = (
            eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd"),
            eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd"),
        );
        let begin = ToWorker::Begin { session: 1, version: control::VERSION + next(Peer::Device) };
        socket::send(&ours, &begin.encode(), &[doorbell.as_fd(), wake.as_fd()]).expect("begin");

        // The page lies scattered in guest memory: its second half first.
        let bytes = session::BYTES as u64;
        let half = (bytes / 2).next_multiple_of(4096);
        let ram = memory_file(bytes);
        let runs = [Run { offset: bytes - half, bytes: half }, Run { offset: 0, bytes: bytes - half }];
        let page = Mapping::scattered(0, bytes, runs.iter().map(|run| (ram.as_fd(), *run))).expect("maps");
        let magic = if start.foreign == Some(Peer::Shim) {
            session::magic(session::VERSION + 1)
        } else {
            session::MAGIC
        };
        page.words().store_u64(session::MAGIC_AT, magic, Ordering::Release);
        let session = FakeGuest::new(page.words());
        let guest = Guest {
            worker,
            control: ours,
            page,
            page_file: ram,
            doorbell,
            wake,
            session,
            mapped_runs: start.mapped_runs,
        };
        if let Some(arena) = start.fixed_arena {
            let bytes = u64::try_from(rustix::fs::fstat(arena).expect("stat").st_size).expect("a size");
            let run = Run { offset: 0, bytes };
            guest.send_attach(session::FIXED_ARENA_SLOT, ARENA, bytes, &[run], arena, false);
        }
        guest.send_attach(0, 0, bytes, &runs, &guest.page_file, false);
        guest
    }

    pub(crate) fn words(&self) -> Words {
        self.page.words()
    }

    pub(crate) fn producer(&mut self) -> &mut Producer {
        &mut self.session.producer
    }

    pub(crate) fn state(&self) -> u32 {
        self.session.state()
    }

    pub(crate) fn sticky(&self) -> u32 {
        self.words().load_u32(session::STICKY, Ordering::Acquire)
    }

    /// The number of posts that failed without breaking their context, and the code of the last one.
    pub(crate) fn late_error(&self, index: u32) -> (u32, u32) {
        let error = session::late_error(&self.words(), index);
        (error.count, error.code)
    }

    pub(crate) fn completed(&self, slot: u32) -> u64 {
        session::completed(&self.words(), slot)
    }

    pub(crate) fn send_attach(
        &self,
        slot: u32,
        address: u64,
        bytes: u64,
        runs: &[Run],
        ram: &OwnedFd,
        more: bool,
    ) {
        let size = u64::try_from(rustix::fs::fstat(ram).expect("stat").st_size).expect("a size");
        let extent = Run { offset: 0, bytes: size };
        self.send_attach_of(slot, address, bytes, &[extent], 4096, runs, ram, more);
    }

    /// Sends an attachment as the device does for a file of which only some parts are guest memory.
    #[expect(clippy::too_many_arguments, reason = "the message has these fields")]
    pub(crate) fn send_attach_of(
        &self,
        slot: u32,
        address: u64,
        bytes: u64,
        extents: &[Run],
        granule: u64,
        runs: &[Run],
        ram: &OwnedFd,
        more: bool,
    ) {
        let list = runs_file(&[extents, runs].concat());
        let count = |list: &[Run]| u32::try_from(list.len()).expect("few");
        let (runs, extents) = (count(runs), count(extents));
        let message = ToWorker::Attach { slot, address, bytes, runs, extents, granule, more };
        socket::send(&self.control, &message.encode(), &[list.as_fd(), ram.as_fd()]).expect("attach");
    }

    /// Attaches fresh memory at `address`, in place unless this worker maps no runs.
    pub(crate) fn attach(&self, slot: u32, address: u64, bytes: u64) -> Arena {
        let ram = memory_file(bytes);
        let run = Run { offset: 0, bytes };
        self.send_attach(slot, address, bytes, &[run], &ram, false);
        let due =
            if self.mapped_runs == 0 { Attachment::Gathered(bytes) } else { Attachment::Adopted(bytes) };
        eventually("adoption", || session::attachment(&self.words(), slot) == due);
        self.seen(&ram, run)
    }

    /// The guest's view of pages that it shares.
    pub(crate) fn seen(&self, ram: &OwnedFd, run: Run) -> Arena {
        Arena { mapping: Mapping::scattered(0, run.bytes, [(ram.as_fd(), run)]).expect("maps") }
    }

    /// Attaches pages of `ram` that the worker must gather.
    pub(crate) fn attach_gathered(&self, slot: u32, address: u64, granule: u64, runs: &[Run], ram: &OwnedFd) {
        let bytes = runs.iter().map(|run| run.bytes).sum();
        let size = u64::try_from(rustix::fs::fstat(ram).expect("stat").st_size).expect("a size");
        let extent = Run { offset: 0, bytes: size };
        self.send_attach_of(slot, address, bytes, &[extent], granule, runs, ram, false);
        eventually("an answer", || session::attachment(&self.words(), slot) != Attachment::Pending);
        assert_eq!(session::attachment(&self.words(), slot), Attachment::Gathered(bytes));
    }

    /// The worker's next message to the device, except for the adoption of the control resource.
    pub(crate) fn told(&self) -> FromWorker {
        loop {
            assert!(readable(&self.control, TIMEOUT), "the worker sends nothing");
            let mut buffer = [0; 128];
            let (message, _) =
                socket::receive(&self.control, &mut buffer).expect("receive").expect("a message");
            let told = FromWorker::decode(message).expect("decodes");
            if told != (FromWorker::Attached { slot: 0, error: 0 }) {
                return told;
            }
        }
    }

    /// Signals the doorbell if the dispatcher sleeps; returns `true` if it did.
    pub(crate) fn ring(&self) -> bool {
        let sleeps = self.session.must_ring();
        if sleeps {
            rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).expect("doorbell");
        }
        sleeps
    }

    /// Cuts off the session's page and signals the doorbell. From then on this process, too, ends if it accesses the page.
    pub(crate) fn cut_page(&self) {
        ftruncate(&self.page_file, 0).expect("truncate");
        rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).expect("doorbell");
    }

    /// Publishes bytes as a record and signals the doorbell.
    pub(crate) fn publish(&mut self, record: &[u8]) {
        eventually("room in the ring", || self.session.publish(record));
        self.ring();
    }

    /// Publishes a call without the doorbell.
    pub(crate) fn put(
        &mut self,
        header: Header,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) {
        let record = record(header, put);
        eventually("room in the ring", || self.session.publish(&record));
    }

    pub(crate) fn header(&self, call: u16) -> Header {
        self.session.header(call)
    }

    /// The header of the next work on a stream.
    pub(crate) fn on(&mut self, call: u16, slot: u32) -> Header {
        self.session.on(call, slot)
    }

    /// Posts a call that has no stream.
    pub(crate) fn post(&mut self, call: u16, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) {
        let header = self.header(call);
        self.put(header, put);
        self.ring();
    }

    /// Posts work and returns its sequence.
    pub(crate) fn work(
        &mut self,
        call: u16,
        slot: u32,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> u64 {
        let header = self.on(call, slot);
        self.put(header, put);
        self.ring();
        header.sequence
    }

    /// Calls and waits for the answer.
    pub(crate) fn call(
        &mut self,
        call: u16,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> Answer {
        let header = self.header(call);
        self.ask(header, put)
    }

    /// Sends any call with a reply slot and waits for the answer.
    pub(crate) fn ask(
        &mut self,
        header: Header,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> Answer {
        let header = self.session.answered(header);
        self.put(header, put);
        self.ring();
        self.answer(header.ticket)
    }

    /// Waits for an answer.
    pub(crate) fn answer(&self, ticket: u32) -> Answer {
        let mut answer = None;
        eventually("the answer", || {
            answer = self.session.answer(ticket);
            answer.is_some() || self.state() == session::LOST
        });
        assert_ne!(self.state(), session::LOST, "the session was lost");
        answer.expect("just seen")
    }

    /// Waits until a stream has reached a sequence.
    pub(crate) fn wait(&self, slot: u32, sequence: u64) {
        eventually("completion", || self.completed(slot) >= sequence || self.sticky() != 0);
        assert_eq!(self.sticky(), 0, "work failed");
    }

    /// Hello, a window, the primary context with its default stream in slot 0.
    pub(crate) fn begin(&mut self) {
        let hello = self.call(wire::session_hello::CALL, |w| {
            wire::session_hello::Args { version: calls::VERSION, process: 42 }.put(w)
        });
        assert_eq!(hello.0, 0);
        let window = self.call(wire::window_reserve::CALL, |w| {
            wire::window_reserve::Args { base: WINDOW, bytes: Size(64 << 30) }.put(w)
        });
        assert_eq!(window.0, 0);
        let context = self.create_context(0, 0);
        self.session.context = context.raw();
    }

    /// Creates context `index` with its default stream in a slot.
    pub(crate) fn create_context(&mut self, index: u32, slot: u32) -> Id<Context> {
        let id = Id::<Context>::new(index, 1);
        let primary = index == 0;
        let (result, _) = self.call(wire::context_create::CALL, |w| {
            wire::context_create::Args {
                context: Mint(id),
                device: Ordinal(0),
                flags: 0,
                primary,
                stream: slot,
            }
            .put(w)
        });
        assert_eq!(result, 0, "context");
        id
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64, u32> {
        match self.call(wire::memory_allocate::CALL, |w| {
            wire::memory_allocate::Args { pool: 0, bytes: Size(bytes) }.put(w)
        }) {
            (0, fields) => Ok(wire::memory_allocate::Reply::get(&fields).expect("decodes").address),
            (failed, _) => Err(failed),
        }
    }

    /// Free and total bytes.
    pub(crate) fn info(&mut self) -> (u64, u64) {
        let (result, fields) =
            self.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w));
        assert_eq!(result, 0);
        let reply = wire::device_memory::Reply::get(&fields).expect("decodes");
        (reply.free, reply.total)
    }

    /// The device disconnects.
    pub(crate) fn hang_up(&mut self) {
        let (unconnected, _) = socket::pair().expect("socket pair");
        self.control = unconnected;
    }

    /// Waits until the worker has ended.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the worker's end", || {
            status = self.worker.try_wait().expect("wait");
            status.is_some()
        });
        status.expect("just seen")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The worker has ended already if the test waited for it.
        let _ = self.worker.kill();
        let _ = self.worker.wait();
    }
}

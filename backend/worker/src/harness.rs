//! A dispatcher without a process, for unit tests and for fuzzing. Helpers and feeder are real threads; the driver is any
//! library that the caller names; the guest's page and one arena lie in this process.

use crate::{
    arenas::{Attached, Mapped},
    dispatch::{Dispatcher, Shared},
    helper::{Control, Helper, Tools, jobs::MemoryJob, notice::Notices},
    memory::{Memory, Windows, helper::MemoryHelper, provision::Provision},
    modules::ModuleHelper,
    session::Session,
    submit::{
        Submitter,
        completion::Completion,
        lanes::Lanes,
        queue::Gate,
        time::{OPEN, Time},
    },
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_driver::Driver;
#[cfg(fuzzing)]
use sluice_protocol::handle;
use sluice_protocol::{limits, session, shared::Shared as _};
use sluice_shared_memory::{Mapping, Run, mapping::Words, socket};
use std::{
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

/// Bytes of the arena.
pub const ARENA_BYTES: u64 = 1 << 20;

/// What lies at the start of the arena: a PTX image without functions.
pub const IMAGE: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n\0";

/// A dispatcher and what it needs. Its threads stay when it is dropped.
pub struct Harness {
    dispatcher: Dispatcher,
    answer: Box<[u8; limits::REPLY_BYTES]>,
    session: Arc<Session>,
    gate: Arc<Gate>,
    /// Where the arena lies.
    pub arena: u64,
    arena_words: Words,
    page_words: Words,
    /// The device's end; the messages in it are not read.
    _control: OwnedFd,
}

impl core::fmt::Debug for Harness {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Harness")
    }
}

fn memory(at: u64, bytes: u64) -> Mapping {
    let file = memfd_create("harness", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&file, bytes).expect("truncate");
    Mapping::scattered(at, bytes, [(file.as_fd(), Run { offset: 0, bytes })]).expect("maps")
}

impl Harness {
    /// A session on the driver at `path`. Each needs address space of its own: `place` is below 64.
    ///
    /// # Panics
    /// When the driver does not load or memory runs out: there is nothing to test then.
    #[must_use]
    pub fn new(path: &Path, place: u64) -> Harness {
        let driver = Arc::new(Driver::load(path).expect("the driver loads"));
        driver.init().expect("the driver starts");
        let bell = || eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let page = memory(0, session::BYTES as u64);
        let page_words = page.words();
        let page = Mapped::in_place(page).into_pages();
        let session = Arc::new(Session::new(page, bell(), bell()).expect("eventfd"));
        let attached = Arc::new(Attached::default());
        let lanes = Arc::new(Lanes::new());
        let (helper, inboxes) = Helper::new();
        let time = Arc::new(Time::own());
        let completion = Completion::new(
            Arc::clone(&driver),
            Arc::clone(&session),
            Arc::clone(&lanes),
            Arc::clone(&attached),
            helper.clone(),
            Arc::clone(&time),
        );
        let completion = Arc::new(completion);
        let gate = Arc::new(Gate::new(Arc::clone(&time)));
        let provision = Provision::own(&driver, 1 << 30).expect("the driver answers");
        let notices = Arc::new(Notices::default());
        let (control, peer) = socket::pair().expect("socket pair");
        let mut device_memory = Memory::new(provision.source(), Windows::new(Arc::clone(&driver)));
        device_memory.mapper().scrub_every_free();
        let device_memory = Arc::new(Mutex::new(device_memory));
        let tools = Tools {
            driver: Arc::clone(&driver),
            session: Arc::clone(&session),
            notices: Arc::clone(&notices),
            helper: helper.clone(),
            provision: provision.clone(),
            heaps: Arc::default(),
        };
        let memory_helper = MemoryHelper::new(
            tools.clone(),
            Arc::clone(&device_memory),
            Arc::new(Control::new(control)),
            Arc::clone(&attached),
        );
        let module_helper = ModuleHelper::new(tools);
        let submitter = Submitter::new(
            Arc::clone(&driver),
            Arc::clone(&session),
            lanes,
            Arc::clone(&completion),
            attached,
            Arc::clone(&time),
        );
        thread::spawn(move || memory_helper.run(&inboxes.memory));
        thread::spawn(move || module_helper.run(&inboxes.modules));
        let looking = Arc::clone(&completion);
        thread::spawn(move || looking.run(2));
        let feeding = (Arc::clone(&gate), Arc::clone(&driver), Arc::clone(&session), helper.clone());
        let feeder_provision = provision.clone();
        thread::spawn(move || feeding.0.feed(&feeding.1, &feeding.2, &feeding.3, &feeder_provision));

        let arena = limits::WINDOW_BOUNDS.start + place * (1 << 30);
        let mapping = memory(arena, ARENA_BYTES);
        let arena_words = mapping.words();
        arena_words.write(0, IMAGE);
        helper.memory(MemoryJob::Adopt { slot: 1, mapped: Mapped::in_place(mapping) });
        let shared = Shared {
            driver,
            session: Arc::clone(&session),
            notices,
            completion,
            gate: Arc::clone(&gate),
            time,
            provision,
            memory: device_memory,
            helper,
        };
        Harness {
            dispatcher: Dispatcher::new(shared, submitter, 2),
            answer: Box::new([0; limits::REPLY_BYTES]),
            session,
            gate,
            arena,
            arena_words,
            page_words,
            _control: peer,
        }
    }

    /// The session's page.
    #[must_use]
    pub fn words(&self) -> Words {
        self.page_words
    }

    /// One record, as the dispatcher takes it off the ring.
    ///
    /// # Errors
    /// Why the session would end.
    pub fn record(&mut self, record: &[u8]) -> Result<(), String> {
        self.dispatcher.record(record, &mut self.answer).map_err(|violation| violation.to_string())
    }

    /// What the dispatcher does when the ring is empty.
    pub fn ring_is_empty(&mut self) -> bool {
        self.dispatcher.ring_is_empty()
    }

    /// Whether the dispatcher submits what comes next itself.
    #[cfg(test)]
    pub(crate) fn nothing_waits(&mut self) -> bool {
        self.dispatcher.nothing_waits()
    }

    /// Writes a word of the arena.
    pub fn store(&self, at: u64, value: u32) {
        use sluice_protocol::shared::Shared as _;
        let at = usize::try_from(at).expect("an offset of the arena");
        self.arena_words.store_u32(at, value, core::sync::atomic::Ordering::Release);
    }

    /// Puts the image back that lay at the start of the arena.
    pub fn restore(&self) {
        self.arena_words.write(0, IMAGE);
    }

    /// Whether no posted work has failed; after that nothing is done any more.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.session.sticky().is_none()
    }

    /// The sequence that is due on a stream slot.
    #[must_use]
    pub fn next_sequence(&self, slot: u32) -> u64 {
        self.dispatcher.last_sequence(slot).wrapping_add(1)
    }

    /// The modules and contexts there are, to be unloaded and destroyed.
    #[cfg(fuzzing)]
    #[must_use]
    pub fn live(&self) -> (Vec<handle::Id<handle::Module>>, Vec<handle::Id<handle::Context>>) {
        self.dispatcher.live()
    }

    /// Opens or closes the permit's gate.
    pub fn permit(&self, open: bool) {
        self.gate.time().set(if open { OPEN } else { 0 });
    }

    /// The permit's gate.
    #[cfg(test)]
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }
}

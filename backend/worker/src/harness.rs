//! A dispatcher without a process, for unit tests and for fuzzing. Helpers and submitter are real threads; the driver is any
//! library that the caller names; the guest's page and one arena lie in this process.

use crate::{
    arenas::{Attached, MappedResource},
    dispatch::{Dispatcher, SharedState},
    helper::{Control, Helper, jobs::MemoryJob, notice::Notices},
    memory::{Memory, Windows, helper::MemoryHelper, memory_source::MemorySource, tools::Tools},
    modules::ModuleHelper,
    session::Session,
    submit::{
        Submitter,
        completion::Completion,
        fences::InFlightFences,
        host_calls::HostCalls,
        queue::SubmitQueue,
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

/// The content at the start of the arena: a PTX image without functions.
pub const IMAGE: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n\0";

/// A dispatcher with its session and threads. Its threads continue when it is dropped.
pub struct Harness {
    dispatcher: Dispatcher,
    answer: Box<[u8; limits::REPLY_BYTES]>,
    session: Arc<Session>,
    submit_queue: Arc<SubmitQueue>,
    /// The address of the arena.
    pub arena: u64,
    arena_words: Words,
    page_words: Words,
    /// The device's end of the control socket; its messages are not read.
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
    /// Makes a session on the driver at `path`. Each needs its own range of addresses: `place` is below 64.
    ///
    /// # Panics
    /// If the driver does not load or memory runs out: then nothing can be tested.
    #[must_use]
    pub fn new(path: &Path, place: u64) -> Harness {
        let driver = Arc::new(Driver::load(path).expect("the driver loads"));
        driver.init().expect("the driver starts");
        let wake_fd = || eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let page = memory(0, session::BYTES as u64);
        let page_words = page.words();
        let page = MappedResource::in_place(page).into_pages();
        let session = Arc::new(Session::new(page, wake_fd(), wake_fd()).expect("eventfd"));
        let attached = Arc::new(Attached::default());
        let fences = Arc::new(InFlightFences::new(limits::DRIVER_QUEUE));
        let (helper, inboxes) = Helper::new();
        let time = Arc::new(Time::own());
        let submit_queue = Arc::new(SubmitQueue::new(Arc::clone(&time)));
        let completion = Completion::new(
            Arc::clone(&driver),
            Arc::clone(&session),
            Arc::clone(&fences),
            Arc::clone(&attached),
            helper.clone(),
            Arc::clone(&time),
            Arc::clone(&submit_queue),
        );
        let completion = Arc::new(completion);
        let memory_source = MemorySource::own(&driver, 1 << 30).expect("the driver answers");
        let notices = Arc::new(Notices::default());
        let (control, peer) = socket::pair().expect("socket pair");
        let mut device_memory = Memory::new(memory_source.source(), Windows::new(Arc::clone(&driver)));
        device_memory.mapper().scrub_every_free();
        let device_memory = Arc::new(Mutex::new(device_memory));
        let tools = Tools {
            driver: Arc::clone(&driver),
            session: Arc::clone(&session),
            notices: Arc::clone(&notices),
            helper: helper.clone(),
            memory_source: memory_source.clone(),
            heaps: Arc::default(),
        };
        let memory_helper = MemoryHelper::new(
            tools.clone(),
            Arc::clone(&device_memory),
            Arc::new(Control::new(control)),
            Arc::clone(&attached),
        );
        let module_helper = ModuleHelper::new(tools, Arc::clone(&completion));
        let host_calls = HostCalls::new(Arc::clone(&session), Arc::clone(&completion));
        let submitter = Submitter::new(
            Arc::clone(&driver),
            Arc::clone(&session),
            fences,
            Arc::clone(&completion),
            attached,
            Arc::clone(&time),
            Arc::clone(&host_calls),
        );
        thread::spawn(move || memory_helper.run(&inboxes.memory));
        thread::spawn(move || module_helper.run(&inboxes.modules));
        let looking = Arc::clone(&completion);
        thread::spawn(move || looking.run(2));
        let queue = (Arc::clone(&submit_queue), Arc::clone(&driver), Arc::clone(&session), helper.clone());
        let submitter_source = memory_source.clone();
        thread::spawn(move || queue.0.submit_queued(&queue.1, &queue.2, &queue.3, &submitter_source));

        let arena = limits::WINDOW_BOUNDS.start + place * (1 << 30);
        let mapping = memory(arena, ARENA_BYTES);
        let arena_words = mapping.words();
        arena_words.write(0, IMAGE);
        helper.memory(MemoryJob::Adopt { slot: 1, mapped: MappedResource::in_place(mapping) });
        let shared = SharedState {
            driver,
            session: Arc::clone(&session),
            notices,
            completion,
            submit_queue: Arc::clone(&submit_queue),
            host_calls,
            time,
            memory_source,
            memory: device_memory,
            helper,
        };
        Harness {
            dispatcher: Dispatcher::new(shared, submitter, 2),
            answer: Box::new([0; limits::REPLY_BYTES]),
            session,
            submit_queue,
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

    /// Executes one record as from the ring.
    ///
    /// # Errors
    /// The violation that would end the session.
    pub fn record(&mut self, record: &[u8]) -> Result<(), String> {
        self.dispatcher.record(record, &mut self.answer).map_err(|violation| violation.to_string())
    }

    /// Does the dispatcher's work for a ring that stays empty.
    pub fn ring_is_empty(&mut self) -> bool {
        self.dispatcher.mark_all()
    }

    /// Does the dispatcher's work for a ring that is empty for a moment.
    #[cfg(test)]
    pub(crate) fn ring_pauses(&mut self) -> bool {
        let busy = self.dispatcher.mark_due();
        self.dispatcher.announce();
        busy
    }

    /// True if the dispatcher submits the next work itself.
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

    /// The arena's memory.
    #[cfg(fuzzing)]
    #[must_use]
    pub fn arena_words(&self) -> Words {
        self.arena_words
    }

    /// Restores the image at the start of the arena.
    pub fn restore(&self) {
        self.arena_words.write(0, IMAGE);
    }

    /// True if no posted work has failed; after a failure nothing is executed any more.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.session.sticky().is_none()
    }

    /// The next sequence of a stream slot.
    #[must_use]
    pub fn next_sequence(&self, slot: u32) -> u64 {
        self.dispatcher.last_sequence(slot).wrapping_add(1)
    }

    /// The live modules and contexts, to be unloaded and destroyed.
    #[cfg(fuzzing)]
    #[must_use]
    pub fn live(&self) -> (Vec<handle::Id<handle::Module>>, Vec<handle::Id<handle::Context>>) {
        self.dispatcher.live()
    }

    /// Opens or closes the permit.
    pub fn permit(&self, open: bool) {
        self.submit_queue.time().set(if open { OPEN } else { 0 });
    }

    /// The submit queue, which has the permit.
    #[cfg(test)]
    pub(crate) fn submit_queue(&self) -> &SubmitQueue {
        &self.submit_queue
    }
}

//! The control thread: it sets the worker up, maps the resources that the device names, and ends the process when the device
//! goes.

use crate::{
    arenas::{AttachError, Attached, Counts, Incoming, MappedResource},
    dispatch::{Dispatcher, SharedState},
    helper::{
        Control, Helper,
        jobs::MemoryJob,
        notice::{Notice, Notices},
        report,
    },
    memory::{
        Memory, Windows,
        custody::{Custody, CustodyError},
        helper::MemoryHelper,
        memory_source::MemorySource,
        tools::Tools,
    },
    modules::ModuleHelper,
    session::{Session, exit::exit},
    submit::{
        Submitter,
        completion::Completion,
        fences::InFlightFences,
        host_calls::HostCalls,
        queue::SubmitQueue,
        time::{Time, TimeAccounting},
    },
};
use core::sync::atomic::Ordering;
use rustix::{fd::OwnedFd, io::Errno};
use sluice_driver::{Driver, DriverError, code};
use sluice_messages::{
    channel::{self, ReceiveError, Received, SetupError},
    control::{FromWorker, ToWorker, WorkerSetup, codec},
};
use sluice_protocol::{
    gpu, limits,
    session::{self, Attachment},
    shared::Shared as _,
};
use sluice_runtime::limited;
use sluice_sandbox::{DriverList, DriverListError, Role, SandboxError};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

/// The reason why the worker ends before it served the session.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// The setup could not be received.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The control socket failed, or carried a malformed message.
    #[error("control socket: {0}")]
    Receive(#[from] ReceiveError),
    /// The device closed the socket before the session began.
    #[error("the control socket closed before the session began")]
    Closed,
    /// A message out of order.
    #[error("unexpected message {0:?}")]
    Unexpected(ToWorker),
    /// The control resource cannot be used.
    #[error("control resource: {0}")]
    Attach(#[from] AttachError),
    /// The control resource is too small, or no shim wrote it.
    #[error("the control resource holds no session")]
    NotASession,
    /// The shim is of another version.
    #[error("the shim uses session layout {0}, this worker {ours}", ours = session::VERSION)]
    Layout(u16),
    /// The driver could not be loaded or started.
    #[error(transparent)]
    Driver(#[from] StartError),
    /// The process could not enter its sandbox.
    #[error("cannot enter the filter: {0}")]
    Sandbox(#[from] SandboxError),
}

impl RunError {
    /// True if the versions of the shim and the worker differ.
    const fn is_of_versions(&self) -> bool {
        matches!(
            self,
            RunError::Receive(ReceiveError::Version(_))
                | RunError::Layout(_)
                | RunError::Setup(SetupError::Codec(codec::CodecError::Version(_)))
        )
    }
}

/// Serves one session over `control`. Returns only if the session could not begin; otherwise the process ends with the session.
///
/// # Errors
/// [`RunError`] if the session did not begin.
pub fn run(control: OwnedFd) -> Result<(), RunError> {
    let control = Arc::new(Control::new(control));
    let ended = serve(&control);
    if let Err(error) = &ended
        && error.is_of_versions()
    {
        refuse(&control);
    }
    ended
}

/// Makes the device tell the guest that versions differ, and waits until the device closes the socket, because the device sends
/// nothing to the guest for a worker that is gone. The message means the same in every version.
fn refuse(control: &Control) {
    report(control, FromWorker::Attached { slot: 0, error: code::SYSTEM_DRIVER_MISMATCH });
    loop {
        match control.receive() {
            Ok(Received::Closed | Received::Empty) | Err(ReceiveError::Failed(_)) => return,
            // The content of its messages no longer matters.
            Ok(Received::Message(..)) | Err(_) => {}
        }
    }
}

fn serve(control: &Arc<Control>) -> Result<(), RunError> {
    let (setup, _): (WorkerSetup, _) = channel::receive_setup(&**control)?;
    let span = tracing::info_span!("worker", vm = setup.vm, session = setup.session);
    let _entered = span.enter();
    // Threads inherit the slack. The completion thread sleeps for microseconds, which the default slack would double.
    rustix::thread::set_current_timer_slack(core::num::NonZeroU64::new(1000))?;
    // The driver is slow to start, and no other process waits for this thread until the guest's page comes.
    let further = sluice_sandbox::further_libraries(Path::new(&setup.driver));
    let driver = start_confined(&setup, &further)?;
    let arbiter_sockets = arbiter_sockets(control, setup.devices)?;
    let (doorbell, wake) = begin(control)?;
    let most = usize::try_from(setup.mapped_runs).unwrap_or(usize::MAX);
    let attached = Arc::new(Attached::default());
    let mut incoming = IncomingResources { attached: Arc::clone(&attached), most, incoming: None };
    let (page, first) = first_resources(control, &mut incoming)?;
    let became = page.pages().attachment();
    let session = Arc::new(Session::new(page.into_pages(), doorbell, wake)?);
    let driver = match driver {
        Ok(driver) => driver,
        Err(error) => {
            tracing::error!(%error, "cannot start the driver; the session is refused");
            session.lose(code::DEVICE_UNAVAILABLE, 1)
        }
    };
    let memory_source = match Custody::new(Arc::clone(&driver), arbiter_sockets) {
        Ok(custody) => MemorySource::Lent(Arc::new(custody)),
        Err(error) => {
            tracing::error!(%error, "no arbiter lends device memory; the session is refused");
            let versions = matches!(error, CustodyError::Receive(ReceiveError::Version(_)));
            session.lose(if versions { code::SYSTEM_DRIVER_MISMATCH } else { code::DEVICE_UNAVAILABLE }, 1)
        }
    };
    let (helper, notices) = match start(control, &session, driver, memory_source, &setup, &attached) {
        Ok(started) => started,
        Err(error) => {
            tracing::error!(%error, "cannot serve the session");
            session.lose(code::DEVICE_UNAVAILABLE, 1)
        }
    };
    session.set_attachment(0, became);
    report(control, FromWorker::Attached { slot: 0, error: 0 });
    let attachments = Attachments { control: Arc::clone(control), session, helper, notices, incoming };
    for (slot, mapped) in first {
        attachments.adopt(slot, mapped);
    }
    attachments.session.set_ready();
    attachments.serve()
}

/// The reason why a driver cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No filter fits the driver.
    #[error(transparent)]
    List(#[from] DriverListError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Starts the driver in the sandbox of workers, and loads its `further` libraries.
pub(crate) fn start_confined(
    setup: &WorkerSetup,
    further: &[PathBuf],
) -> Result<Result<Arc<Driver>, StartError>, SandboxError> {
    let list = DriverList::of_library(Path::new(&setup.driver));
    // From here on this process can start no process and inspect none; it has read nothing of a guest yet.
    sluice_sandbox::enter(Role::Worker(*list.as_ref().unwrap_or(&DriverList::Software)))?;
    let list = match list {
        Ok(list) => list,
        Err(error) => return Ok(Err(error.into())),
    };
    let driver = start_driver(setup, further);
    if driver.is_ok() && list == DriverList::Software {
        // It has all it needs. NVIDIA's driver opens its devices again for every context.
        sluice_sandbox::enter(Role::WorkerSettled)?;
    }
    Ok(driver.map_err(StartError::from))
}

/// Starts the driver. Beside that, loads the `further` libraries, so that a session of a guest opens none.
fn start_driver(setup: &WorkerSetup, further: &[PathBuf]) -> Result<Arc<Driver>, DriverError> {
    let driver = Driver::load(Path::new(&setup.driver))?;
    let load = || {
        for error in sluice_driver::load_further(further) {
            tracing::warn!(%error, "the driver lacks a library");
        }
    };
    // A driver's start mostly waits for the kernel.
    thread::scope(|scope| {
        let beside = thread::Builder::new().name("libraries".to_owned());
        if further.is_empty() || beside.spawn_scoped(scope, load).is_err() {
            load();
        }
        driver.init()
    })
    .map_err(DriverError::Init)?;
    driver.confirm(setup.identity)?;
    Ok(Arc::new(driver))
}

/// The sockets to the arbiters of all devices, which come before any message about the session.
fn arbiter_sockets(control: &Control, devices: u32) -> Result<Vec<OwnedFd>, RunError> {
    let next = |ordinal| {
        let (message, descriptors) = control.receive()?.message().ok_or(RunError::Closed)?;
        match (message, <[OwnedFd; 1]>::try_from(descriptors)) {
            (ToWorker::Custody { device }, Ok([socket])) if device == ordinal => Ok(socket),
            (message, _) => Err(RunError::Unexpected(message)),
        }
    };
    (0..devices.min(limits::DEVICES)).map(next).collect()
}

/// The doorbell and the eventfd that wakes the guest.
fn begin(control: &Control) -> Result<(OwnedFd, OwnedFd), RunError> {
    let (message, descriptors) = control.receive()?.message().ok_or(RunError::Closed)?;
    match (message, <[OwnedFd; 2]>::try_from(descriptors)) {
        (ToWorker::Begin { .. }, Ok([doorbell, wake])) => Ok((doorbell, wake)),
        (message, _) => Err(RunError::Unexpected(message)),
    }
}

/// A resource that the device has sent, by its entry.
type SentResource = (u32, Result<MappedResource, AttachError>);

/// Receives the session's page, and the resources that the device sends before it: a fixed arena. Nothing here reads memory of
/// the guest before the page is mapped, which is when all descriptors of these resources are closed.
fn first_resources(
    control: &Control,
    incoming: &mut IncomingResources,
) -> Result<(MappedResource, Vec<SentResource>), RunError> {
    let mut first = Vec::new();
    loop {
        let (message, descriptors) = control.receive()?.message().ok_or(RunError::Closed)?;
        let ToWorker::Attach { slot, address, bytes, runs, extents, granule, more } = message else {
            return Err(RunError::Unexpected(message));
        };
        let counts = Counts { runs, extents, granule };
        match incoming.take(slot, address, bytes, counts, more, descriptors) {
            None => {}
            Some((0, mapped)) => return Ok((session_page(mapped?)?, first)),
            Some(resource) if first.len() < FIRST_RESOURCES => first.push(resource),
            Some(_) => return Err(RunError::Unexpected(message)),
        }
    }
}

/// Checks that a control resource holds a session.
fn session_page(mapped: MappedResource) -> Result<MappedResource, RunError> {
    let pages = mapped.pages();
    if pages.bytes() < gpu::PAGE {
        return Err(RunError::NotASession);
    }
    match session::version(pages.load_u64(session::MAGIC_AT, Ordering::Acquire)) {
        Some(session::VERSION) if pages.bytes() >= session::BYTES as u64 => Ok(mapped),
        Some(session::VERSION) | None => Err(RunError::NotASession),
        Some(theirs) => Err(RunError::Layout(theirs)),
    }
}

/// Resources that a device may send before the control resource: a session has one fixed arena.
const FIRST_RESOURCES: usize = 1;

fn take_part(incoming: &mut Incoming, counts: Counts, descriptors: Vec<OwnedFd>) -> Result<(), AttachError> {
    match <[OwnedFd; 2]>::try_from(descriptors) {
        Ok([list, file]) => incoming.push(counts, &list, file),
        Err(_) => Err(AttachError::Parts(incoming.slot())),
    }
}

/// Starts every thread except this one.
fn start(
    control: &Arc<Control>,
    session: &Arc<Session>,
    driver: Arc<Driver>,
    memory_source: MemorySource,
    setup: &WorkerSetup,
    attached: &Arc<Attached>,
) -> Result<(Helper, Arc<Notices>), std::io::Error> {
    let cpus = thread::available_parallelism().map_or(1, core::num::NonZero::get);
    let notices = Arc::new(Notices::default());
    let fences = Arc::new(InFlightFences::new(setup.driver_queue));
    let (helper, inboxes) = Helper::new();
    let accounts = memory_source.custody().map_or_else(Vec::new, |custody| custody.time_accounts());
    let account = |(page, report, wake_fd)| TimeAccounting::new(page, report, Some(wake_fd));
    let time = Arc::new(Time::new(accounts.into_iter().map(account).collect()));
    let submit_queue = Arc::new(SubmitQueue::new(Arc::clone(&time)));
    let completion = Arc::new(Completion::new(
        Arc::clone(&driver),
        Arc::clone(session),
        Arc::clone(&fences),
        Arc::clone(attached),
        helper.clone(),
        Arc::clone(&time),
        Arc::clone(&submit_queue),
    ));

    let mut memory = Memory::new(memory_source.source(), Windows::new(Arc::clone(&driver)));
    if setup.scrub_every_free {
        memory.mapper().scrub_every_free();
    }
    let memory = Arc::new(Mutex::new(memory));
    let tools = Tools {
        driver: Arc::clone(&driver),
        session: Arc::clone(session),
        notices: Arc::clone(&notices),
        helper: helper.clone(),
        memory_source: memory_source.clone(),
        heaps: Arc::default(),
    };
    let memory_helper =
        MemoryHelper::new(tools.clone(), Arc::clone(&memory), Arc::clone(control), Arc::clone(attached));
    spawn("memory", session, move || memory_helper.run(&inboxes.memory))?;
    if let Some(custody) = memory_source.custody() {
        let (custody, listening, recalled) = (Arc::clone(custody), Arc::clone(session), helper.clone());
        spawn("custody", session, move || custody.listen(&listening, || recalled.tend_idle()))?;
    }
    let modules = ModuleHelper::new(tools, Arc::clone(&completion));
    spawn("modules", session, move || modules.run(&inboxes.modules))?;
    let looking = Arc::clone(&completion);
    spawn("completion", session, move || looking.run(cpus))?;
    let (queue, submitter_driver, submitter_session) =
        (Arc::clone(&submit_queue), Arc::clone(&driver), Arc::clone(session));
    let (submitter_helper, submitter_source) = (helper.clone(), memory_source.clone());
    spawn("submitter", session, move || {
        queue.submit_queued(&submitter_driver, &submitter_session, &submitter_helper, &submitter_source);
    })?;
    let host_calls = HostCalls::new(Arc::clone(session), Arc::clone(&completion));
    let submitter = Submitter::new(
        Arc::clone(&driver),
        Arc::clone(session),
        fences,
        Arc::clone(&completion),
        Arc::clone(attached),
        Arc::clone(&time),
        Arc::clone(&host_calls),
    );
    let shared = SharedState {
        driver,
        session: Arc::clone(session),
        notices: Arc::clone(&notices),
        completion,
        submit_queue,
        host_calls,
        time,
        memory_source,
        memory,
        helper: helper.clone(),
    };
    let dispatcher = Dispatcher::new(shared, submitter, cpus);
    spawn("dispatcher", session, move || dispatcher.run())?;
    Ok((helper, notices))
}

/// Starts a thread; a panic in it ends the session, not just the thread.
fn spawn<R>(
    name: &str,
    session: &Arc<Session>,
    body: impl FnOnce() -> R + Send + 'static,
) -> Result<(), std::io::Error> {
    let session = Arc::clone(session);
    let span = tracing::Span::current();
    let guarded = move || {
        let _entered = span.enter();
        // Nothing of the thread's state is used after a panic: the process ends.
        let ended = catch_unwind(AssertUnwindSafe(body));
        tracing::error!(panicked = ended.is_err(), "a thread of the worker ended");
        session.lose(code::UNKNOWN, 1)
    };
    thread::Builder::new().name(name.to_owned()).spawn(guarded).map(|_| ())
}

/// The guest's attached pages.
struct Attachments {
    control: Arc<Control>,
    session: Arc<Session>,
    helper: Helper,
    notices: Arc<Notices>,
    incoming: IncomingResources,
}

/// Resources as the device sends them, each in one or more messages.
struct IncomingResources {
    attached: Arc<Attached>,
    /// Runs the session may map one by one.
    most: usize,
    /// An attachment whose last message has not come yet.
    incoming: Option<Incoming>,
}

impl IncomingResources {
    /// Takes one message of an attachment. After the last one, or a bad one, returns the entry with the mapped pages; the
    /// descriptors are closed.
    fn take(
        &mut self,
        slot: u32,
        address: u64,
        bytes: u64,
        counts: Counts,
        more: bool,
        descriptors: Vec<OwnedFd>,
    ) -> Option<SentResource> {
        let mut result = match self.incoming.take() {
            Some(incoming) if incoming.slot() == slot => Ok(incoming),
            Some(_) => Err(AttachError::Parts(slot)),
            None => {
                let mapped = self.attached.total_without(slot).ok_or(AttachError::Parts(slot));
                mapped.and_then(|mapped| Incoming::new(slot, address, bytes, mapped, self.most))
            }
        };
        if let Ok(incoming) = &mut result
            && let Err(error) = take_part(incoming, counts, descriptors)
        {
            result = Err(error);
        }
        if more && let Ok(incoming) = result {
            self.incoming = Some(incoming);
            return None;
        }
        let mapped = result.and_then(Incoming::map);
        if let Ok(mapped) = &mapped {
            self.attached.insert(slot, mapped.extent());
        }
        Some((slot, mapped))
    }
}

impl Attachments {
    fn serve(mut self) -> Result<(), RunError> {
        loop {
            match self.control.receive() {
                Ok(Received::Message(
                    ToWorker::Attach { slot, address, bytes, runs, extents, granule, more },
                    fds,
                )) => {
                    let counts = Counts { runs, extents, granule };
                    if let Some((slot, mapped)) = self.incoming.take(slot, address, bytes, counts, more, fds)
                    {
                        self.adopt(slot, mapped);
                    }
                }
                Ok(Received::Message(ToWorker::Detach { slot }, _)) => {
                    self.notices.push(Notice::DetachWanted { slot });
                    // The dispatcher may be asleep.
                    self.session.wake_dispatcher();
                }
                Ok(Received::Message(unexpected, _)) => {
                    let error = RunError::Unexpected(unexpected);
                    tracing::error!(%error, "the device sent an unexpected message");
                    self.session.lose(code::DEVICE_UNAVAILABLE, 1)
                }
                Ok(Received::Closed | Received::Empty) => {
                    tracing::info!("the device closed the control socket; the session ends");
                    exit(0)
                }
                Err(error) => {
                    tracing::error!(%error, "cannot receive on the control socket");
                    self.session.lose(code::DEVICE_UNAVAILABLE, 1)
                }
            }
        }
    }

    /// Queues mapped pages to be pinned, or refuses them.
    fn adopt(&self, slot: u32, mapped: Result<MappedResource, AttachError>) {
        match mapped {
            Ok(mapped) => self.helper.memory(MemoryJob::Adopt { slot, mapped }),
            Err(error) => {
                limited!(warn, slot, %error, "guest memory is refused");
                // The device must know before the guest does, which may use the entry again at once.
                report(&self.control, FromWorker::Attached { slot, error: error.code() });
                if slot < limits::ATTACHMENTS {
                    self.session.set_attachment(slot, Attachment::Refused(error.code()));
                }
            }
        }
    }
}

//! The launcher's client in `sluiced`: it starts the launcher when needed, or connects to one that is a service of its own, and sends
//! it one request at a time.
//!
//! An answer belongs to a request by its order alone. So a launcher that does not answer in time, or answers nonsense, is
//! killed, and a new one is started with the next request; from one that is a service this daemon disconnects, and the service manager
//! ends it if it hangs. An exchange of request and answer always completes, even if its caller
//! is gone: an abandoned exchange would cost the launcher, and under a supervisor every process that it started.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read as _, Seek as _},
    os::fd::OwnedFd,
    process::Stdio,
    rc::{Rc, Weak},
    time::{Duration, Instant},
};

use rustix::fd::{AsFd as _, BorrowedFd};
use sluice_messages::control::{FromLauncher, LaunchRefusal, ToLauncher, ToWorker, WorkerSetup, codec};
use sluice_runtime::{
    child_log,
    process::{Identity, kill},
};
use sluice_shared_memory::socket;
use tokio::{
    process::Command,
    sync::{Mutex, OwnedMutexGuard, oneshot},
    task::spawn_local,
    time::{sleep, timeout},
};

use super::{
    command::{arguments, fingerprint},
    fd_store::{FdStore, VARIABLES},
    process::LaunchedProcess,
    running::{ANSWER, END, Found, LaunchError, LauncherAnswer, LauncherProcess, Running, Started, follow},
    service,
};
use crate::{
    async_fd::watch,
    channel::Channel,
    configuration::{Configuration, LAUNCHER},
    priority::PriorityLock,
    records::state::adoption::{Adoption, LauncherRecord, ReloadError},
    time_limit::answer_within,
};

/// The name of its socket in the fd store.
const NAME: &str = "launcher";
/// The name of the read end of its log in the fd store.
const LOG_NAME: &str = "launcher-log";
/// Time limit for a launcher that does not answer, or for processes that do not end.
const OPENED: Duration = Duration::from_secs(30);
/// Time between two tries.
const AGAIN: Duration = Duration::from_millis(50);

/// Sends a new worker its setup: it starts its driver. This message and those of [`send_arbiters`] are few and find an empty
/// socket, so they cannot block.
pub(crate) fn set_up_worker(worker: &OwnedFd, setup: &WorkerSetup) -> io::Result<()> {
    Ok(socket::send(worker, &codec::encode(setup).map_err(io::Error::other)?, &[])?)
}

/// Sends a worker a socket to the arbiter of each of its devices, by ordinal.
pub(crate) fn send_arbiters<'a>(
    worker: &OwnedFd,
    arbiters: impl IntoIterator<Item = (u32, BorrowedFd<'a>)>,
) -> io::Result<()> {
    for (device, arbiter) in arbiters {
        socket::send(worker, &ToWorker::Custody { device }.encode(), &[arbiter])?;
    }
    Ok(())
}

/// The launcher.
#[derive(Debug)]
pub(crate) struct Launching {
    configuration: Rc<Configuration>,
    /// The supervisor's socket, for the launcher to watch.
    lifeline: Option<OwnedFd>,
    fd_store: Rc<FdStore>,
    adoption: Rc<Adoption>,
    running: PriorityLock<Option<Running>>,
    /// By VM with sessions that wait for the launcher: the lock that lets one of them queue at a time.
    session_queues: RefCell<BTreeMap<u32, Rc<Mutex<()>>>>,
    /// The process id of the last launcher that was started or adopted, also while it is busy.
    process: Cell<Option<u32>>,
    /// The kernel's list of its children.
    children: RefCell<Option<File>>,
    workers: RefCell<Workers>,
}

/// Workers that were started and may still run: a new launcher receives the list, so that it leaves them alone.
#[derive(Debug, Default)]
struct Workers {
    /// With their processes, which belong to their sessions, except those of the last daemon that are not adopted yet.
    all: BTreeMap<Identity, Option<Weak<LaunchedProcess>>>,
    /// The number of workers at which ended ones are removed.
    look_at: usize,
}

impl Workers {
    fn add(&mut self, worker: Identity, process: Option<Weak<LaunchedProcess>>) {
        if self.all.len() >= self.look_at {
            self.forget_ended();
            // The limit doubles, so that the cost per start is constant, however many workers there are.
            self.look_at = self.all.len().saturating_mul(2).max(64);
        }
        self.all.insert(worker, process);
    }

    fn forget_ended(&mut self) {
        self.all.retain(|_, process| may_live(process.as_ref()));
    }
}

/// False if a worker has ended. One that has lost its session is the launcher's alone.
fn may_live(process: Option<&Weak<LaunchedProcess>>) -> bool {
    process.is_none_or(|process| process.upgrade().is_some_and(|process| !process.is_gone()))
}

impl Launching {
    pub(crate) fn new(
        configuration: Rc<Configuration>,
        lifeline: Option<OwnedFd>,
        fd_store: Rc<FdStore>,
        adoption: Rc<Adoption>,
    ) -> Self {
        let workers = RefCell::default();
        Self {
            configuration,
            lifeline,
            fd_store,
            adoption,
            running: PriorityLock::new(None),
            session_queues: RefCell::default(),
            process: Cell::new(None),
            children: RefCell::default(),
            workers,
        }
    }

    /// Prepares to adopt the processes of the last daemon; returns true if there are any. Adopts its launcher, too, if that may
    /// start the same as one of this daemon; otherwise another launcher follows, and the processes that the first one started
    /// continue. Processes that it started in answer to the last daemon are ended, because no daemon knows them.
    ///
    /// # Errors
    /// If a process runs that this daemon cannot adopt. No process has been ended.
    pub(crate) async fn adopt(&self) -> Result<bool, ReloadError> {
        if !self.fd_store.has_processes() {
            return Ok(false);
        }
        self.adoption.can_follow(&self.configuration)?;
        let record = {
            let before = self.adoption.before();
            let workers = before.devices.values().flat_map(|device| device.sessions.values());
            workers.for_each(|(_, worker)| self.workers.borrow_mut().add(*worker, None));
            before.launcher.clone()
        };
        if let (Some(record), Some(socket)) = (record, self.fd_store.take(NAME)) {
            match self.adopt_launcher(&record, socket).await {
                Ok(launcher) => {
                    tracing::info!(process = record.process.process, "adopted the launcher");
                    self.adoption.note(|all| all.launcher = Some(record));
                    self.present(&launcher, None);
                    *self.running.lock().await = Some(launcher);
                    return Ok(true);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot adopt the launcher; another is started, and running processes continue without a log")
                }
            }
        }
        self.fd_store.forget(NAME);
        self.fd_store.forget(LOG_NAME);
        Ok(true)
    }

    /// Connects to a launcher that is a service of its own: without it this daemon could adopt nothing.
    pub(crate) async fn connect(&self) -> Result<(), LaunchError> {
        let mut running = self.running.lock().await;
        if self.configuration.launcher.is_some() && running.is_none() {
            *running = Some(self.launch().await?);
        }
        Ok(())
    }

    async fn adopt_launcher(&self, record: &LauncherRecord, socket: OwnedFd) -> io::Result<Running> {
        let number = record.process.process;
        let pidfd = record.process.open().ok_or_else(|| io::Error::other("the last one has ended"))?;
        let log = self.fd_store.take(LOG_NAME).map(|log| spawn_local(follow(log, number)));
        let process = LauncherProcess::Adopted(number, watch(pidfd)?);
        let mut running = Running { process, channel: Channel::new(socket)?, log };
        if record.arguments != arguments(&self.configuration) {
            running.channel.shut();
            running.process.end().await?;
            return Err(io::Error::other("the last one has another configuration"));
        }
        let settle = async {
            running.channel.send(&ToLauncher::Settle {}, &[]).await?;
            loop {
                let Some((message, descriptors)) = running.channel.receive().await? else {
                    return Err(io::Error::other("the last one has ended"));
                };
                match message {
                    FromLauncher::Settled {} => return Ok(()),
                    // The process's socket is first, its pidfd second.
                    FromLauncher::Started { .. } => {
                        let mut descriptors = descriptors.into_iter();
                        let socket = descriptors.next();
                        descriptors.next().into_iter().for_each(|pidfd| kill(pidfd.as_fd()));
                        socket.into_iter().for_each(|socket| self.fd_store.discard_orphan(socket));
                    }
                    FromLauncher::Failed { .. }
                    | FromLauncher::Refused { .. }
                    | FromLauncher::Found { .. }
                    | FromLauncher::Attached { .. } => {}
                }
            }
        };
        answer_within(ANSWER, settle).await.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))?;
        Ok(running)
    }

    /// The store that keeps sockets for the next daemon.
    pub(crate) fn fd_store(&self) -> &FdStore {
        &self.fd_store
    }

    /// The record of the processes at the other ends of these sockets.
    pub(crate) fn adoption(&self) -> &Adoption {
        &self.adoption
    }

    /// Requests the start of a process. Workers of sessions are started after everything else, and those of different VMs in
    /// turn.
    pub(crate) async fn start(self: &Rc<Self>, request: ToLauncher) -> Result<Started, LaunchError> {
        let answer = match request {
            ToLauncher::StartWorker { vm, .. } => {
                let queue = self.session_queue(vm);
                let _first_of_vm = queue.lock().await;
                self.request(self.running.lock_behind().await, request).await
            }
            _ => self.request(self.running.lock().await, request).await,
        };
        match answer? {
            LauncherAnswer::Started(started) => Ok(started),
            LauncherAnswer::Found(_) | LauncherAnswer::Settled => Err(LaunchError::Malformed),
        }
    }

    /// Finds a process by its number, if the launcher has started it, or keeps it.
    pub(crate) async fn find(self: &Rc<Self>, process: u32) -> Result<Option<Found>, LaunchError> {
        match self.request(self.running.lock().await, ToLauncher::Find { process }).await {
            Ok(LauncherAnswer::Found(found)) => Ok(Some(found)),
            Ok(LauncherAnswer::Started(_) | LauncherAnswer::Settled) => Err(LaunchError::Malformed),
            // It has ended, or is another's.
            Err(LaunchError::Refused(LaunchRefusal::NoProcess)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens a process that this or an earlier daemon requested, if it still lives. While the launcher does not answer this is unknown,
    /// so the question is repeated, but not for ever.
    pub(crate) async fn open(self: &Rc<Self>, identity: Identity) -> Option<Rc<LaunchedProcess>> {
        let known = self.workers.borrow().all.get(&identity).and_then(|known| known.as_ref()?.upgrade());
        if let Some(known) = known {
            return Some(known).filter(|known| !known.is_gone());
        }
        let start = Instant::now();
        let opened = loop {
            match self.open_once(identity).await {
                Ok(opened) => break opened,
                Err(error) if start.elapsed() < OPENED => {
                    tracing::warn!(process = identity.process, %error, "cannot open a process; trying again");
                    sleep(AGAIN).await;
                }
                Err(error) => {
                    tracing::error!(process = identity.process, %error, "cannot open a process");
                    return None;
                }
            }
        };
        let mut workers = self.workers.borrow_mut();
        match &opened {
            Some(process) => {
                if let Some(known) = workers.all.get_mut(&identity) {
                    *known = Some(Rc::downgrade(process));
                }
            }
            None => _ = workers.all.remove(&identity),
        }
        opened
    }

    async fn open_once(
        self: &Rc<Self>,
        identity: Identity,
    ) -> Result<Option<Rc<LaunchedProcess>>, LaunchError> {
        // Only a launcher that is a service of its own has rights that this daemon lacks.
        if self.configuration.launcher.is_some() {
            let found = self.find(identity.process).await?.map(|found| found.process);
            return Ok(found.filter(|process| process.identity() == identity));
        }
        let open = |pidfd| LaunchedProcess::new(identity, pidfd, None).map(Rc::new);
        Ok(identity.open().map(open).transpose()?)
    }

    /// Ends all processes of a launcher that is a service of its own, of which this daemon adopts none, and waits until they are gone.
    pub(crate) async fn end_all(self: &Rc<Self>) -> Result<(), LaunchError> {
        if self.configuration.launcher.is_none() {
            return Ok(());
        }
        self.request(self.running.lock().await, ToLauncher::EndAll {}).await?;
        let start = Instant::now();
        while !self.children().is_empty() {
            if start.elapsed() >= OPENED {
                tracing::error!("processes of an earlier sluiced were killed and still exist");
                break;
            }
            sleep(AGAIN).await;
        }
        Ok(())
    }

    /// Removes the sockets of a VM that has ended.
    pub(crate) async fn remove_sockets(self: &Rc<Self>, vm: u32) -> Result<(), LaunchError> {
        self.request(self.running.lock().await, ToLauncher::RemoveSockets { vm }).await.map(drop)
    }

    fn session_queue(&self, vm: u32) -> Rc<Mutex<()>> {
        let mut queues = self.session_queues.borrow_mut();
        // A queue with no other reference is empty.
        queues.retain(|_, queue| Rc::strong_count(queue) > 1);
        Rc::clone(queues.entry(vm).or_default())
    }

    async fn request(
        self: &Rc<Self>,
        running: OwnedMutexGuard<Option<Running>>,
        request: ToLauncher,
    ) -> Result<LauncherAnswer, LaunchError> {
        let (sender, answer) = oneshot::channel();
        let launching = Rc::clone(self);
        // A task of its own, which no caller aborts.
        spawn_local(async move {
            if let Err(Ok(LauncherAnswer::Started(unwanted))) =
                sender.send(launching.exchange(running, request).await)
            {
                unwanted.process.kill();
            }
        });
        // The sender is dropped only if the task panics, and the launcher with it.
        answer.await.unwrap_or(Err(LaunchError::Gone))
    }

    async fn exchange(
        &self,
        mut running: OwnedMutexGuard<Option<Running>>,
        request: ToLauncher,
    ) -> Result<LauncherAnswer, LaunchError> {
        let (launcher, known) = match running.take() {
            Some(launcher) => (launcher, true),
            None => (self.launch().await?, false),
        };
        let (launcher, answer) = match launcher.ask(request).await {
            // It has died since the last request, for a reason unrelated to this one.
            Err(LaunchError::Gone) if known => {
                tracing::error!("the launcher has died; starting another");
                let launcher = self.launch().await?;
                let answer = launcher.ask(request).await;
                (launcher, answer)
            }
            answer => (launcher, answer),
        };
        let answer = answer.and_then(|answer| LauncherAnswer::read(request, answer));
        if let (ToLauncher::StartWorker { .. }, Ok(LauncherAnswer::Started(started))) = (&request, &answer) {
            // Before another start can find the launcher dead and start one that ends unknown workers.
            let process = Rc::downgrade(&started.process);
            self.workers.borrow_mut().add(started.process.identity(), Some(process));
        }
        *running = self.keep(launcher, &answer);
        answer
    }

    /// Keeps a launcher that has answered, and drops another.
    fn keep<T>(&self, launcher: Running, answer: &Result<T, LaunchError>) -> Option<Running> {
        match answer {
            Ok(_) | Err(LaunchError::Refused(_) | LaunchError::Failed(_)) => Some(launcher),
            Err(error) => {
                tracing::error!(%error, "dropping the launcher");
                self.process.set(None);
                *self.children.borrow_mut() = None;
                None
            }
        }
    }

    /// Process id of the launcher, if one runs.
    pub(crate) fn process(&self) -> Option<u32> {
        self.process.get()
    }

    /// Notes the present launcher. `children` is the kernel's list of its children, if it has passed it.
    fn present(&self, launcher: &Running, children: Option<File>) {
        let process = launcher.process.id();
        self.process.set(process);
        let open = |process: u32| File::open(format!("/proc/{process}/task/{process}/children")).ok();
        *self.children.borrow_mut() = children.or_else(|| process.and_then(open));
    }

    /// Process ids of all processes that may be workers, including those of dead launchers: whatever a worker does, it stays a
    /// child of its launcher, or among the processes that launchers have reported.
    pub(crate) fn perhaps_workers(&self) -> BTreeSet<u32> {
        let told = self.workers.borrow();
        let told = told.all.iter().filter(|(_, process)| may_live(process.as_ref()));
        told.map(|(worker, _)| worker.process).chain(self.children()).collect()
    }

    /// The children of the launcher.
    fn children(&self) -> Vec<u32> {
        let mut text = String::new();
        if let Some(list) = self.children.borrow_mut().as_mut() {
            // A launcher that has ended has none.
            _ = list.rewind().and_then(|()| list.read_to_string(&mut text));
        }
        text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    }

    /// Ends the launcher.
    pub(crate) async fn end(&self) {
        if let Some(Running { mut process, channel, log }) = self.running.lock().await.take() {
            self.process.set(None);
            self.fd_store.forget(NAME);
            self.fd_store.forget(LOG_NAME);
            // Closed also for the service manager, which may keep it, too.
            channel.shut();
            drop(channel);
            if let Err(error) = process.end().await {
                tracing::error!(%error, "cannot end the launcher");
            }
            // The rest of its log, and of its children's.
            if let Some(log) = log
                && timeout(END, log).await.is_err()
            {
                tracing::warn!("the launcher's log did not end in time");
            }
        }
    }

    async fn launch(&self) -> Result<Running, LaunchError> {
        if let Some(path) = &self.configuration.launcher {
            let attached = service::attach(path, fingerprint(&self.configuration)).await?;
            let service::Attached { launcher, children, fresh } = attached;
            if fresh {
                self.name_workers(&launcher.channel).await?;
            }
            self.present(&launcher, Some(children));
            return Ok(launcher);
        }
        let (ours, theirs) = socket::pair().map_err(io::Error::from)?;
        let (log, its_log) = child_log::launcher_pipe()?;
        let program = self.configuration.libexec.join(LAUNCHER);
        let arguments = arguments(&self.configuration);
        let mut command = Command::new(&program);
        command.args(&arguments);
        VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::from(its_log));
        if let Some(lifeline) = &self.lifeline {
            command.arg("--supervised").stdout(Stdio::from(lifeline.try_clone()?));
        }
        // A launcher that is given up must not answer later. Its children live on, unless there is a supervisor.
        command.kill_on_drop(true);
        let process = command
            .spawn()
            .map_err(|error| LaunchError::NoLauncher { program: program.display().to_string(), error })?;
        // The reader finds the end of the log when no copy of the write end is left.
        drop(command);
        self.fd_store.keep(NAME, ours.as_fd());
        self.fd_store.keep(LOG_NAME, log.as_fd());
        let number = process.id().unwrap_or_default();
        if let Some(process) = process.id().and_then(Identity::of) {
            self.adoption.note(|all| all.launcher = Some(LauncherRecord { process, arguments }));
        }
        let channel = Channel::new(ours)?;
        let log = Some(spawn_local(follow(log, number)));
        let launcher = Running { process: LauncherProcess::Own(process), channel, log };
        self.name_workers(&launcher.channel).await?;
        self.present(&launcher, None);
        Ok(launcher)
    }

    /// Sends a new launcher the list of workers of earlier launchers that continue.
    async fn name_workers(&self, channel: &Channel<FromLauncher, ToLauncher>) -> Result<(), LaunchError> {
        answer_within(ANSWER, self.send_workers(channel)).await.unwrap_or(Err(LaunchError::Late))
    }

    async fn send_workers(&self, channel: &Channel<FromLauncher, ToLauncher>) -> Result<(), LaunchError> {
        let workers = {
            let mut workers = self.workers.borrow_mut();
            workers.forget_ended();
            workers.all.keys().copied().collect::<Vec<_>>()
        };
        let named = workers
            .into_iter()
            .map(|Identity { process, started }| ToLauncher::KeepWorker { process, started });
        for message in named.chain([ToLauncher::Sweep {}]) {
            match channel.send(&message, &[]).await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(LaunchError::Gone),
                result => result?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! The main function of `sluiced`: it starts, serves and ends everything in order.

use std::{
    cell::{Cell, RefCell},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    signal::unix::{SignalKind, signal},
    sync::{Mutex, mpsc::unbounded_channel, watch as stop_signal},
    task::{JoinHandle, JoinSet, LocalSet},
    time::timeout,
};

use sluice_runtime::process::{Identity, kill};

use crate::{
    api::mailbox::mailbox,
    api::places::{Bounds, RequestPlaces, Users},
    api::{self, Api},
    async_fd::{gone, watch},
    caller::Directory,
    configuration::Configuration,
    handover::fd_store::FdStore,
    handover::launching::Launching,
    placement::placer::{self, Placer},
    placement::survey::survey,
    priority::PriorityLock,
    records::audit_log::AuditLog,
    records::journal::Journal,
    records::state::{
        adoption::{self, Adoption},
        checkpoint::Checkpoint,
        objects::Objects,
    },
    records::usage::UsageRecords,
    registry::{self, Registry, placing, sampling},
    units::balancing::Balance,
    units::inventory::Inventory,
    units::set::Units,
    units::unit::{self, UnitError},
    vms::unit_events::UnitEvents,
    vms::{context::VmContext, orphans, set::VmSet, vm},
};

/// Limits of concurrent followers of events.
pub(crate) const FOLLOWERS: Bounds = Bounds { all: 64, others: 48, each: 16 };
/// Time limit for writing state to a disk before the daemon ends.
const LEAVE: Duration = Duration::from_secs(20);
/// Time limit for the arbiters of an earlier daemon to end.
const LEFT_OVER: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT, or until the supervisor's socket closes, or, under a supervisor, a VM cannot be served.
///
/// # Errors
/// The reason why it could not start, or could not continue.
pub fn run(configuration: Configuration, supervisor: Option<OwnedFd>) -> Result<()> {
    let fd_store = FdStore::new().context("cannot take over the passed descriptors")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut scratch = configuration.scratch.clone();
    scratch.extend(configuration.ephemeral.then(|| configuration.runtime_dir.clone()));
    let result = LocalSet::new().block_on(&runtime, serve(configuration, supervisor, fd_store));
    for directory in scratch {
        match std::fs::remove_dir_all(&directory) {
            // The supervisor has removed it already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("cannot remove {}: {error}", directory.display()),
            Ok(()) => {}
        }
    }
    result
}

/// Checks that a daemon with this configuration could adopt the running processes; changes nothing.
///
/// # Errors
/// The reason why it could not.
pub fn check_reload(configuration: &Configuration) -> Result<()> {
    adoption::check(configuration).context("the reload is refused")
}

async fn serve(configuration: Configuration, supervisor: Option<OwnedFd>, fd_store: FdStore) -> Result<()> {
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut handed_over = signal(SignalKind::user_defined1())?;
    let configuration = Rc::new(configuration);
    make_directory(&configuration.runtime_dir)?;
    if let Some(gid) = configuration.vm_socket_gid {
        let_through(&configuration.runtime_dir, gid)?;
    }
    let directory = Rc::new(Directory::new(configuration.access.clone()));
    // Passed by the service manager, which then owns the path, or created here.
    let mut made = Vec::new();
    let mut listen = |name, path: &Path| match fd_store.take(name) {
        Some(socket) => api::serve::adopt(socket),
        None => {
            made.push(path.to_owned());
            api::serve::listen(path, directory.is_shared())
        }
    };
    let api_listener = listen("api", &configuration.api)?;
    let reading_listener = listen("api-read", &configuration.api_read)?;
    let lifeline = supervisor.as_ref().map(OwnedFd::try_clone).transpose()?;
    let fd_store = Rc::new(fd_store);
    // Processes under a supervisor end with it.
    let kept = fd_store.keeps() && supervisor.is_none();
    let adoption = Rc::new(Adoption::open(&configuration.runtime_dir, kept));
    let launching = Rc::new(Launching::new(
        Rc::clone(&configuration),
        lifeline,
        Rc::clone(&fd_store),
        Rc::clone(&adoption),
    ));

    make_directory(&configuration.state_dir)?;
    let checkpoint = Rc::new(Checkpoint::open(&configuration.state_dir)?);
    let configured = Objects::configured(&configuration);
    let (vms, projects) = registry::identities(&[&configured, &*checkpoint.objects()]);
    let usage = Rc::new(UsageRecords::open(&configuration.state_dir, &vms, &projects)?);
    make_directory(&configuration.log_directory)?;
    let audit_log = AuditLog::open(&configuration.log_directory, configuration.audit_log_size)
        .context("cannot open the audit log")?;
    let journal = Arc::new(Journal::open(&configuration.log_directory));
    if let Some(why) = checkpoint.recovered() {
        journal.note(
            "state-recovered",
            None,
            format!("the last checkpoint was unreadable, and the one before it is used: {why}"),
        );
    }
    if let Some(changed) = checkpoint.changed_meaning() {
        journal.note("state-changed-meaning", None, changed);
    }
    if !launching.adopt().await.context("cannot adopt the running processes")? {
        adoption.give_up();
    }
    end_left_over(&checkpoint, &launching).await;
    if !configuration.scrub {
        tracing::error!("SCRUBBING IS OFF: A TENANT CAN READ MEMORY OF THE PREVIOUS ONE. FOR TESTS ONLY");
    }

    // Units end after the VMs that use them.
    let (stop_units, stopping_units) = stop_signal::channel(false);
    let (event_sender, events) = unbounded_channel();
    let mut beneath: JoinSet<Result<(), UnitError>> = JoinSet::new();
    let inventory =
        configuration.nvml.is_some().then(|| Inventory::new(Rc::clone(&launching), event_sender.clone()));
    if let Some(inventory) = &inventory {
        let (inventory, stop) = (Rc::clone(inventory), stopping_units.clone());
        beneath.spawn_local(async move {
            inventory.serve(stop).await;
            Ok(())
        });
    }
    let found = survey(&configuration, inventory.as_deref()).await;
    let units = Rc::new(Units::default());
    let placer = Placer::new(
        placer::Parts {
            configuration: Rc::clone(&configuration),
            launching: Rc::clone(&launching),
            inventory: inventory.clone(),
            checkpoint: Rc::clone(&checkpoint),
            event_sender: event_sender.clone(),
            journal: Arc::clone(&journal),
            units: Rc::clone(&units),
        },
        found,
    );
    for unit in placer.whole_units() {
        units.serve(unit, &mut beneath, &stopping_units, supervisor.is_some());
    }
    placer.adopt().await;

    let (failures, mut failed) = unbounded_channel();
    let context = VmContext {
        configuration: Rc::clone(&configuration),
        launching: Rc::clone(&launching),
        units: Rc::clone(&units),
        checkpoint: Rc::clone(&checkpoint),
        event_sender: event_sender.clone(),
        journal: Arc::clone(&journal),
    };
    let vm_set = VmSet::new(context, failures);
    let unit_events = UnitEvents::new(
        Rc::clone(&units),
        Rc::clone(&vm_set),
        Rc::clone(&checkpoint),
        configuration.fence,
        Arc::clone(&journal),
        !adoption.before().arbiters.is_empty(),
    );
    let registry = Rc::new(Registry {
        configuration: Rc::clone(&configuration),
        launching: Rc::clone(&launching),
        inventory: inventory.clone(),
        units: Rc::clone(&units),
        placer,
        vm_set: Rc::clone(&vm_set),
        unit_events: Rc::clone(&unit_events),
        checkpoint: Rc::clone(&checkpoint),
        journal: Arc::clone(&journal),
        usage: Rc::clone(&usage),
        audit_log,
        event_sender,
        ready: Cell::new(false),
        configured,
        begun: RefCell::default(),
        balance: Balance::default(),
        changing: PriorityLock::default(),
        emptying: Mutex::default(),
        locks: RefCell::default(),
    });
    let keeping = tokio::task::spawn_local(Rc::clone(&checkpoint).keep());
    let deciding = tokio::task::spawn_local(Rc::clone(&unit_events).serve(events, registry.limits()));
    let auditing = tokio::task::spawn_local(orphans::serve(
        Rc::clone(&launching),
        Rc::clone(&vm_set),
        Rc::clone(&unit_events),
    ));
    let living = tokio::task::spawn_local({
        let fd_store = Rc::clone(&fd_store);
        async move { fd_store.live().await }
    });
    let sampling = tokio::task::spawn_local(sampling::serve(Rc::clone(&registry)));
    let supervised = supervisor.is_some();
    if supervised {
        registry.end_supervised().await;
    }
    registry.restore().await;
    end_strangers(&launching, &vm_set);
    let placing = tokio::task::spawn_local(placing::serve(Rc::clone(&registry)));

    let (mailbox, works) = mailbox();
    let mut answering = vec![tokio::task::spawn_local(works.serve(Rc::clone(&registry)))];
    let router = api::router(Api {
        mailbox,
        journal,
        followers: RequestPlaces::new(FOLLOWERS),
        refusals: Arc::default(),
    });
    let users = Rc::new(Users::default());
    for (listener, reading) in [(api_listener, false), (reading_listener, true)] {
        let serve =
            api::serve::serve(listener, router.clone(), Rc::clone(&directory), Rc::clone(&users), reading);
        answering.push(tokio::task::spawn_local(serve));
    }

    let mut supervisor = supervisor.map(Supervisor::new).transpose()?;
    let mut all_there = std::pin::pin!(registry.all_there());
    let mut failure = None;
    let mut leaving = false;
    loop {
        tokio::select! {
            served = &mut all_there, if !registry.ready.get() => {
                if served == 0 && vm_set.has_failed() {
                    failure = failed.recv().await;
                    break;
                }
                registry.ready.set(true);
                // Everything that can be adopted is adopted.
                fd_store.drop_rest();
                fd_store.ready();
                tracing::info!("ready: {served} VMs");
                if let Some(supervisor) = &mut supervisor {
                    supervisor.say_ready().await?;
                }
            }
            Some(error) = failed.recv(), if registry.ready.get() || supervisor.is_some() => {
                // A supervisor runs one VM, which has no device now; a host may have other VMs, and get more.
                if supervisor.is_some() {
                    failure = Some(error);
                    break;
                }
                tracing::error!("{error:#}");
            }
            Some(ended) = beneath.join_next() => {
                let error = match ended {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => anyhow::Error::from(error),
                    Err(panic) => anyhow::Error::from(panic),
                };
                // A unit gives up only under a supervisor.
                failure = Some(error);
                break;
            }
            () = closed(&mut supervisor) => { tracing::info!("the supervisor has ended"); break }
            _ = handed_over.recv(), if kept => { leaving = true; break }
            _ = terminated.recv() => break,
            _ = interrupted.recv() => break,
        }
    }

    if leaving {
        // No process is ended, and none notices: the next daemon continues from the state written here.
        let write = async {
            registry.sample().await;
            registry.journal.settled().await;
            checkpoint.written().await
        };
        if let Err(error) = timeout(LEAVE, write).await.map_err(io::Error::from).flatten() {
            tracing::error!("cannot write the state for the next daemon: {error}");
        }
        std::process::exit(0);
    }
    fd_store.stopping();
    answering.iter().for_each(JoinHandle::abort);
    for socket in &made {
        if let Err(error) = std::fs::remove_file(socket) {
            tracing::warn!("cannot remove {}: {error}", socket.display());
        }
    }
    sampling.abort();
    placing.abort();
    registry.sample().await;
    if supervised {
        registry.end_supervised().await;
    }
    vm_set.end().await;
    units.end().await;
    stop_units.send_replace(true);
    while let Some(ended) = beneath.join_next().await {
        if let Err(error) = ended.map_err(anyhow::Error::from).and_then(|ended| Ok(ended?)) {
            tracing::error!("{error:#}");
        }
    }
    living.abort();
    deciding.abort();
    auditing.abort();
    launching.end().await;
    if let Err(error) = adoption.finish() {
        tracing::warn!("cannot remove the record of processes: {error}");
    }
    keeping.abort();
    if timeout(LEAVE, registry.journal.settled()).await.is_err() {
        tracing::error!("the last events are lost: they were not written in {LEAVE:?}");
    }
    match checkpoint.finish().await {
        // The usage of a supervisor's VMs is billed to no tenant.
        Ok(true) if supervised => {
            let audit_log = registry.audit_log.forget().await;
            let usage = usage.forget().await;
            if let Err(error) =
                audit_log.and(usage).and_then(|()| registry.journal.forget(&configuration.log_directory))
            {
                tracing::warn!("cannot remove the usage figures: {error}");
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!("cannot remove the checkpoint: {error}"),
    }
    failure.map_or(Ok(()), Err)
}

fn make_directory(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot create the directory {}", path.display()))
}

/// Lets a group access the entries of a directory, if not all users can already. The group cannot list the directory.
fn let_through(path: &Path, gid: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let open = || {
        let mode = std::fs::metadata(path)?.permissions().mode();
        if mode & 0o001 == 0 {
            std::os::unix::fs::chown(path, None, Some(gid))?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & 0o7707 | 0o010))?;
        }
        Ok::<_, io::Error>(())
    };
    open().with_context(|| format!("cannot give group {gid}, of vm-socket-gid, access to {}", path.display()))
}

/// Ends arbiters of a killed daemon: no process can send to them any more, and they hold their units' memory.
async fn end_left_over(checkpoint: &Checkpoint, launching: &Launching) {
    let adoptable = |unit: u32, arbiter: Identity| {
        let record = launching.adoption().before().arbiters.get(&unit).cloned();
        let lends = record.is_some_and(|record| record.process == arbiter && record.lends.is_some());
        lends && launching.fd_store().has(&unit::socket_name(unit))
    };
    for (unit, arbiter) in checkpoint.arbiters() {
        if adoptable(unit, arbiter) {
            continue;
        }
        let Some(pidfd) = arbiter.open() else { continue };
        tracing::warn!("killing an arbiter of an earlier sluiced: process {}", arbiter.process);
        kill(pidfd.as_fd());
        let gone = async {
            gone(&watch(pidfd)?).await;
            Ok::<(), io::Error>(())
        };
        match timeout(LEFT_OVER, gone).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("cannot watch process {}: {error}", arbiter.process),
            Err(_) => tracing::error!("process {} was killed and still exists", arbiter.process),
        }
    }
}

/// Ends the devices of deleted VMs, and the workers of their sessions.
fn end_strangers(launching: &Launching, vm_set: &VmSet) {
    let devices: Vec<u32> = launching.adoption().before().devices.keys().copied().collect();
    for vm in devices.into_iter().filter(|vm| vm_set.get(*vm).is_none()) {
        let Some(device) = launching.adoption().take_device(vm) else { continue };
        tracing::warn!("killing the device of the deleted VM {vm}: process {}", device.process.process);
        let workers = device.sessions.values().map(|(_, worker)| *worker);
        for pidfd in workers.chain([device.process]).filter_map(Identity::open) {
            kill(pidfd.as_fd());
        }
        launching.fd_store().forget(&vm::socket_name(vm));
    }
}

/// The other end of standard input: `sluice run` or `sluice host`.
struct Supervisor {
    stream: tokio::net::UnixStream,
}

impl Supervisor {
    fn new(socket: OwnedFd) -> Result<Self> {
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        let stream =
            tokio::net::UnixStream::from_std(stream).context("standard input is not a stream socket")?;
        Ok(Self { stream })
    }

    async fn say_ready(&mut self) -> Result<()> {
        // The socket is empty, so it has room for a few bytes.
        match self.stream.write_all(b"ready\n").await {
            Ok(()) => Ok(()),
            // The next turn of the loop finds its end.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error).context("cannot send to the supervisor"),
        }
    }
}

/// Returns when the supervisor is gone; never if there is none.
async fn closed(supervisor: &mut Option<Supervisor>) {
    let Some(supervisor) = supervisor else { return std::future::pending().await };
    let mut bytes = [0; 16];
    // The supervisor sends nothing: a read returns its end, or bytes to be ignored.
    while matches!(supervisor.stream.read(&mut bytes).await, Ok(1..)) {}
}

//! `sluiced` itself: it starts, serves and ends everything in order.

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
    io::AsyncReadExt as _,
    signal::unix::{SignalKind, signal},
    sync::{Mutex, mpsc::unbounded_channel, watch as stop_signal},
    task::{JoinHandle, JoinSet, LocalSet},
    time::timeout,
};

use sluice_runtime::process::{Identity, kill};

use crate::{
    api::bridge::bridge,
    api::places::{Bounds, Places, Users},
    api::{self, Api},
    caller::Directory,
    configuration::Configuration,
    handover::keeper::Keeper,
    handover::launching::Launching,
    handover::watched::{gone, watch},
    placement::placer::{self, Placer},
    placement::placing,
    priority::PriorityLock,
    records::journal::Journal,
    records::state::{
        adoption::{self, Adoption},
        checkpoint::Checkpoint,
        objects::Objects,
    },
    records::trail::Trail,
    records::usage::Usage,
    registry::{self, Registry},
    units::balancing::Balance,
    units::custodian::Custodian,
    units::inventory::Inventory,
    units::sampling,
    units::set::Units,
    units::unit::{self, UnitError},
    vms::{audit, vm},
    vms::{context::Context, roster::Roster},
};

/// Clients that may follow events at once.
pub(crate) const FOLLOWERS: Bounds = Bounds { all: 64, others: 48, each: 16 };
/// How long a disk may take before this daemon goes without having written everything.
const LEAVE: Duration = Duration::from_secs(20);
/// How long arbiters of an earlier daemon may take to go away.
const LEFT_OVER: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT, or until the supervisor's socket closes, or, under a supervisor, a VM cannot be served.
///
/// # Errors
/// What kept it from starting, or from going on.
pub fn run(configuration: Configuration, supervisor: Option<OwnedFd>) -> Result<()> {
    let keeper = Keeper::new().context("cannot take over what was passed to this process")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut scratch = configuration.scratch.clone();
    scratch.extend(configuration.ephemeral.then(|| configuration.runtime_dir.clone()));
    let result = LocalSet::new().block_on(&runtime, serve(configuration, supervisor, keeper));
    for directory in scratch {
        match std::fs::remove_dir_all(&directory) {
            // The supervisor was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("{} stays behind: {error}", directory.display()),
            Ok(()) => {}
        }
    }
    result
}

/// Says whether a daemon with this configuration could go on with what runs; nothing is changed.
///
/// # Errors
/// Why it could not.
pub fn check_reload(configuration: &Configuration) -> Result<()> {
    adoption::check(configuration).context("a reload is refused")
}

async fn serve(configuration: Configuration, supervisor: Option<OwnedFd>, keeper: Keeper) -> Result<()> {
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut handed_over = signal(SignalKind::user_defined1())?;
    let configuration = Rc::new(configuration);
    make_directory(&configuration.runtime_dir)?;
    if let Some(gid) = configuration.vm_socket_gid {
        let_through(&configuration.runtime_dir, gid)?;
    }
    let directory = Rc::new(Directory::new(configuration.access.clone()));
    // Passed by who started this process, whose it is then, or made.
    let mut made = Vec::new();
    let mut listen = |name, path: &Path| match keeper.take(name) {
        Some(socket) => api::serve::adopt(socket),
        None => {
            made.push(path.to_owned());
            api::serve::listen(path, directory.is_shared())
        }
    };
    let api_listener = listen("api", &configuration.api)?;
    let reading_listener = listen("api-read", &configuration.api_read)?;
    let lifeline = supervisor.as_ref().map(OwnedFd::try_clone).transpose()?;
    let keeper = Rc::new(keeper);
    // What a supervisor has started ends with it.
    let kept = keeper.keeps() && supervisor.is_none();
    let adoption = Rc::new(Adoption::open(&configuration.runtime_dir, kept));
    let launching = Rc::new(Launching::new(
        Rc::clone(&configuration),
        lifeline,
        Rc::clone(&keeper),
        Rc::clone(&adoption),
    ));

    make_directory(&configuration.state_dir)?;
    let checkpoint = Rc::new(Checkpoint::open(&configuration.state_dir)?);
    let configured = Objects::configured(&configuration);
    let (vms, projects) = registry::identities(&[&configured, &*checkpoint.objects()]);
    let usage = Rc::new(Usage::open(&configuration.state_dir, &vms, &projects)?);
    make_directory(&configuration.log_directory)?;
    let trail = Trail::open(&configuration.log_directory, configuration.audit_log_size)
        .context("cannot open the audit log")?;
    let journal = Arc::new(Journal::open(&configuration.log_directory));
    if let Some(why) = checkpoint.recovered() {
        journal.note("state-recovered", None, format!("the last checkpoint cannot be understood: {why}"));
    }
    if let Some(changed) = checkpoint.changed_meaning() {
        journal.note("state-changed-meaning", None, changed);
    }
    if !launching.adopt().await.context("cannot go on with what runs")? {
        adoption.give_up();
    }
    end_left_over(&checkpoint, &launching).await;
    if !configuration.scrub {
        tracing::error!("SCRUBBING IS OFF: WHAT ONE TENANT LEAVES BEHIND REACHES THE NEXT. FOR TESTS ONLY");
    }

    // Those whom VMs rest upon end after them.
    let (stop_units, stopping_units) = stop_signal::channel(false);
    let (notices, noticed) = unbounded_channel();
    let mut beneath: JoinSet<Result<(), UnitError>> = JoinSet::new();
    let inventory =
        configuration.nvml.is_some().then(|| Inventory::new(Rc::clone(&launching), notices.clone()));
    if let Some(inventory) = &inventory {
        let (inventory, stop) = (Rc::clone(inventory), stopping_units.clone());
        beneath.spawn_local(async move {
            inventory.serve(stop).await;
            Ok(())
        });
    }
    let found = placer::survey(&configuration, inventory.as_deref()).await;
    let units = Rc::new(Units::default());
    let placer = Placer::new(
        placer::Parts {
            configuration: Rc::clone(&configuration),
            launching: Rc::clone(&launching),
            inventory: inventory.clone(),
            checkpoint: Rc::clone(&checkpoint),
            notices: notices.clone(),
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
    let context = Context {
        configuration: Rc::clone(&configuration),
        launching: Rc::clone(&launching),
        units: Rc::clone(&units),
        checkpoint: Rc::clone(&checkpoint),
        notices: notices.clone(),
        journal: Arc::clone(&journal),
    };
    let roster = Roster::new(context, failures);
    let custodian = Custodian::new(
        Rc::clone(&units),
        Rc::clone(&roster),
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
        roster: Rc::clone(&roster),
        custodian: Rc::clone(&custodian),
        checkpoint: Rc::clone(&checkpoint),
        journal: Arc::clone(&journal),
        usage: Rc::clone(&usage),
        trail,
        notices,
        ready: Cell::new(false),
        configured,
        begun: RefCell::default(),
        balance: Balance::default(),
        changing: PriorityLock::default(),
        emptying: Mutex::default(),
        locks: RefCell::default(),
    });
    let keeping = tokio::task::spawn_local(Rc::clone(&checkpoint).keep());
    let deciding = tokio::task::spawn_local(Rc::clone(&custodian).serve(noticed, registry.limits()));
    let auditing = tokio::task::spawn_local(audit::serve(
        Rc::clone(&launching),
        Rc::clone(&roster),
        Rc::clone(&custodian),
    ));
    let living = tokio::task::spawn_local({
        let keeper = Rc::clone(&keeper);
        async move { keeper.live().await }
    });
    let sampling = tokio::task::spawn_local(sampling::serve(Rc::clone(&registry)));
    registry.restore().await;
    end_strangers(&launching, &roster);
    let placing = tokio::task::spawn_local(placing::serve(Rc::clone(&registry)));

    let (bridge, works) = bridge();
    let mut answering = vec![tokio::task::spawn_local(works.serve(Rc::clone(&registry)))];
    let router =
        api::router(Api { bridge, journal, followers: Places::new(FOLLOWERS), refusals: Arc::default() });
    let users = Rc::new(Users::default());
    for (listener, reading) in [(api_listener, false), (reading_listener, true)] {
        let serve =
            api::serve::serve(listener, router.clone(), Rc::clone(&directory), Rc::clone(&users), reading);
        answering.push(tokio::task::spawn_local(serve));
    }

    let supervised = supervisor.is_some();
    let mut supervisor = supervisor.map(Supervisor::new).transpose()?;
    let mut all_there = std::pin::pin!(registry.all_there());
    let mut failure = None;
    let mut leaving = false;
    loop {
        tokio::select! {
            served = &mut all_there, if !registry.ready.get() => {
                if served == 0 && roster.has_failed() {
                    failure = failed.recv().await;
                    break;
                }
                registry.ready.set(true);
                // Everything that could be adopted is.
                keeper.drop_rest();
                keeper.ready();
                tracing::info!("ready: {served} VMs");
                if let Some(supervisor) = &mut supervisor {
                    supervisor.say_ready()?;
                }
            }
            Some(error) = failed.recv(), if registry.ready.get() || supervisor.is_some() => {
                // A supervisor runs one thing, which is now without its device; a host may have other VMs, and gets more.
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
                // Only under a supervisor does one give up.
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
        // Nothing is ended, and nothing notices: the next daemon goes on, where this one has written that it stands.
        let write = async {
            registry.sample().await;
            registry.journal.settled().await;
            checkpoint.written().await
        };
        if let Err(error) = timeout(LEAVE, write).await.map_err(io::Error::from).flatten() {
            tracing::error!("the next daemon does not know all that this one does: {error}");
        }
        std::process::exit(0);
    }
    keeper.stopping();
    answering.iter().for_each(JoinHandle::abort);
    for socket in &made {
        if let Err(error) = std::fs::remove_file(socket) {
            tracing::warn!("{} stays behind: {error}", socket.display());
        }
    }
    sampling.abort();
    placing.abort();
    registry.sample().await;
    roster.end().await;
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
        tracing::warn!("the record of processes stays behind: {error}");
    }
    keeping.abort();
    if timeout(LEAVE, registry.journal.settled()).await.is_err() {
        tracing::error!("the last events are lost: {LEAVE:?} were not enough to write them");
    }
    match checkpoint.finish().await {
        // A supervisor's VMs are nobody's to be billed for.
        Ok(true) if supervised => {
            let trail = registry.trail.forget().await;
            let usage = usage.forget().await;
            if let Err(error) =
                trail.and(usage).and_then(|()| registry.journal.forget(&configuration.log_directory))
            {
                tracing::warn!("figures stay behind: {error}");
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!("the checkpoint stays behind: {error}"),
    }
    failure.map_or(Ok(()), Err)
}

fn make_directory(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot make the directory {}", path.display()))
}

/// Lets a group reach what lies in a directory, if not everybody can already. It cannot list it.
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
    open().with_context(|| format!("cannot let group {gid}, of vm-socket-gid, into {}", path.display()))
}

/// Ends arbiters of a daemon that was killed: nobody can talk to them any more, and they hold their units' memory.
async fn end_left_over(checkpoint: &Checkpoint, launching: &Launching) {
    let adoptable = |unit: u32, arbiter: Identity| {
        let record = launching.adoption().before().arbiters.get(&unit).cloned();
        let lends = record.is_some_and(|record| record.process == arbiter && record.lends.is_some());
        lends && launching.keeper().has(&unit::socket_name(unit))
    };
    for (unit, arbiter) in checkpoint.arbiters() {
        if adoptable(unit, arbiter) {
            continue;
        }
        let Some(pidfd) = arbiter.open() else { continue };
        tracing::warn!("an arbiter of an earlier sluiced is ended: process {}", arbiter.process);
        kill(pidfd.as_fd());
        let gone = async {
            gone(&watch(pidfd)?).await;
            Ok::<(), io::Error>(())
        };
        match timeout(LEFT_OVER, gone).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("cannot watch process {}: {error}", arbiter.process),
            Err(_) => tracing::error!("process {} was killed and is still there", arbiter.process),
        }
    }
}

/// Ends devices, and the workers of their sessions, of VMs that are no more.
fn end_strangers(launching: &Launching, roster: &Roster) {
    let devices: Vec<u32> = launching.adoption().before().devices.keys().copied().collect();
    for vm in devices.into_iter().filter(|vm| roster.get(*vm).is_none()) {
        let Some(device) = launching.adoption().take_device(vm) else { continue };
        tracing::warn!(
            "the device of VM {vm}, which is no more, is ended: process {}",
            device.process.process
        );
        let workers = device.sessions.values().map(|(_, worker)| *worker);
        for pidfd in workers.chain([device.process]).filter_map(Identity::open) {
            kill(pidfd.as_fd());
        }
        launching.keeper().forget(&vm::socket_name(vm));
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
        let stream = tokio::net::UnixStream::from_std(stream)
            .context("the supervisor's end is not a stream socket")?;
        Ok(Self { stream })
    }

    fn say_ready(&mut self) -> Result<()> {
        // A few bytes in an empty socket.
        match self.stream.try_write(b"ready\n") {
            Ok(_) => Ok(()),
            // Seen as its end by the next turn of the loop.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error).context("cannot tell the supervisor"),
        }
    }
}

/// Returns when the supervisor is gone; never when there is none.
async fn closed(supervisor: &mut Option<Supervisor>) {
    let Some(supervisor) = supervisor else { return std::future::pending().await };
    let mut bytes = [0; 16];
    // It says nothing: what comes is its end, or is not for us.
    while matches!(supervisor.stream.read(&mut bytes).await, Ok(1..)) {}
}

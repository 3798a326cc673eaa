//! The start: records are opened, the processes of the last daemon adopted or ended, and all tasks begun.

use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use sluice_runtime::closer::Closers;
use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    sync::{Mutex, mpsc::unbounded_channel, watch},
    task::{AbortHandle, JoinSet, spawn_local},
};

use super::{Daemon, Signals, Tasks, leftover, supervisor::Supervisor};
use crate::{
    api::{
        self, Api,
        mailbox::mailbox,
        places::{FOLLOWERS, RequestPlaces, Users},
    },
    caller::Directory,
    configuration::Configuration,
    handover::{fd_store::FdStore, launching::Launching},
    placement::{
        placer::{self, Placer},
        survey::survey,
    },
    priority::PriorityLock,
    records::{
        audit_log::AuditLog,
        journal::Journal,
        state::{adoption::Adoption, checkpoint::Checkpoint},
        unit_event::UnitEventSender,
        usage::UsageRecords,
    },
    registry::{self, Registry, placing, sampling},
    units::{balancing::Balance, inventory::Inventory, set::Units, unit::UnitError},
    vms::{context::VmContext, orphans, set::VmSet, unit_events::UnitEvents},
};

impl Daemon {
    /// Starts everything. When this returns, the API is served, and devices are starting.
    pub(super) async fn start(
        configuration: Configuration,
        supervisor: Option<OwnedFd>,
        fd_store: FdStore,
        closers: Closers,
    ) -> Result<Self> {
        let signals = Signals::new()?;
        let configuration = Rc::new(configuration);
        let supervised = supervisor.is_some();
        make_directory(&configuration.runtime_dir)?;
        if let Some(gid) = configuration.vm_socket_gid {
            let_through(&configuration.runtime_dir, gid)?;
        }
        let directory = Rc::new(Directory::new(configuration.access.clone()));
        let listeners = Listeners::open(&configuration, &fd_store, &directory)?;
        let lifeline = supervisor.as_ref().map(OwnedFd::try_clone).transpose()?;
        // Processes under a supervisor end with it.
        let keeps = fd_store.keeps() && !supervised;
        let adoption = Rc::new(Adoption::open(&configuration.runtime_dir, keeps));
        let fd_store = Rc::new(fd_store);
        let launching = Rc::new(Launching::new(
            Rc::clone(&configuration),
            lifeline,
            Rc::clone(&fd_store),
            Rc::clone(&adoption),
        ));
        let records = Records::open(&configuration)?;
        let adopts = launching.adopt().await.context("cannot adopt the running processes")?;
        launching.connect().await?;
        if !adopts {
            adoption.give_up();
            launching.end_all().await.context("cannot end the processes of an earlier sluiced")?;
        }
        leftover::end_unknown_arbiters(&records.checkpoint, &launching).await;
        if !configuration.scrub {
            tracing::error!("SCRUBBING IS OFF: A TENANT CAN READ MEMORY OF THE PREVIOUS ONE. FOR TESTS ONLY");
        }

        if configuration.share_with_host_memory_access {
            tracing::warn!(
                "share-with-host-memory-access is on: where kernels reach host memory, a guest can take its worker over, and VMs share units all the same"
            );
        }

        let (event_sender, events) = unbounded_channel();
        let layer = UnitLayer::start(&configuration, &launching, &records, &event_sender, supervised).await;
        let UnitLayer { inventory, units, placer, tasks: unit_tasks, stop: stop_units } = layer;
        let (failure_sender, failures) = unbounded_channel();
        let checkpoint = Rc::clone(&records.checkpoint);
        let journal = Arc::clone(&records.journal);
        let context = VmContext {
            configuration: Rc::clone(&configuration),
            launching: Rc::clone(&launching),
            units: Rc::clone(&units),
            checkpoint: Rc::clone(&checkpoint),
            event_sender: event_sender.clone(),
            journal: Arc::clone(&journal),
            closers,
        };
        let vm_set = VmSet::new(context, failure_sender);
        let unit_events = UnitEvents::new(
            Rc::clone(&units),
            Rc::clone(&vm_set),
            Rc::clone(&checkpoint),
            configuration.fence,
            Arc::clone(&journal),
            !adoption.before().arbiters.is_empty(),
        );
        let registry = Rc::new(Registry {
            configuration,
            launching: Rc::clone(&launching),
            inventory,
            units,
            placer,
            vm_set: Rc::clone(&vm_set),
            unit_events: Rc::clone(&unit_events),
            checkpoint: Rc::clone(&checkpoint),
            journal,
            usage: records.usage,
            audit_log: records.audit_log,
            event_sender,
            ready: Cell::new(false),
            begun: RefCell::default(),
            balance: Balance::default(),
            changing: PriorityLock::default(),
            emptying: Mutex::default(),
            locks: RefCell::default(),
        });
        let checkpoint = spawn_local(checkpoint.keep()).abort_handle();
        let handler = Rc::clone(&unit_events).serve(events, registry.limits());
        let handler = spawn_local(handler).abort_handle();
        let orphans = orphans::serve(Rc::clone(&launching), Rc::clone(&vm_set), unit_events);
        let orphans = spawn_local(orphans).abort_handle();
        let watchdog = spawn_local(async move { fd_store.live().await }).abort_handle();
        let sampling = spawn_local(sampling::serve(Rc::clone(&registry))).abort_handle();
        if supervised {
            registry.end_supervised().await;
        }
        registry.restore().await;
        leftover::end_unknown_devices(&launching, &vm_set).await;
        let placing = spawn_local(placing::serve(Rc::clone(&registry))).abort_handle();
        let sockets = listeners.created.clone();
        let api = listeners.serve(&registry, &directory);
        let supervisor = supervisor.map(Supervisor::new).transpose()?;
        let tasks = Tasks { api, sampling, placing, watchdog, unit_events: handler, orphans, checkpoint };
        Ok(Self { registry, signals, supervisor, keeps, sockets, unit_tasks, stop_units, failures, tasks })
    }
}

impl Signals {
    fn new() -> Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hand_over = signal(SignalKind::user_defined1())?;
        Ok(Self { terminate, interrupt, hand_over })
    }
}

/// The listening sockets of the API.
struct Listeners {
    api: UnixListener,
    reading: UnixListener,
    /// The paths of those that this daemon created. A service manager owns the path of a socket that it passes.
    created: Vec<PathBuf>,
}

impl Listeners {
    fn open(configuration: &Configuration, fd_store: &FdStore, directory: &Directory) -> Result<Self> {
        let mut created = Vec::new();
        let mut listen = |name, path: &Path| match fd_store.take(name) {
            Some(socket) => api::serve::adopt(socket),
            None => {
                created.push(path.to_owned());
                api::serve::listen(path, directory.is_shared())
            }
        };
        let api = listen("api", &configuration.api)?;
        let reading = listen("api-read", &configuration.api_read)?;
        Ok(Self { api, reading, created })
    }

    /// Serves the API.
    fn serve(self, registry: &Rc<Registry>, directory: &Rc<Directory>) -> Vec<AbortHandle> {
        let (mailbox, jobs) = mailbox();
        let mut tasks = vec![spawn_local(jobs.serve(Rc::clone(registry))).abort_handle()];
        let router = api::router(Api {
            mailbox,
            journal: Arc::clone(&registry.journal),
            followers: RequestPlaces::new(FOLLOWERS),
            refusals: Arc::default(),
        });
        let users = Rc::new(Users::default());
        for (listener, reading) in [(self.api, false), (self.reading, true)] {
            let (directory, users) = (Rc::clone(directory), Rc::clone(&users));
            let serve = api::serve::serve(listener, router.clone(), directory, users, reading);
            tasks.push(spawn_local(serve).abort_handle());
        }
        tasks
    }
}

/// Everything that outlives a request, on disk.
struct Records {
    checkpoint: Rc<Checkpoint>,
    usage: Rc<UsageRecords>,
    audit_log: AuditLog,
    journal: Arc<Journal>,
}

impl Records {
    fn open(configuration: &Configuration) -> Result<Self> {
        make_directory(&configuration.state_dir)?;
        let checkpoint = Rc::new(Checkpoint::open(&configuration.state_dir)?);
        let (vms, projects) = registry::identities(&checkpoint.objects());
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
        Ok(Self { checkpoint, usage, audit_log, journal })
    }
}

/// The inventory, the units, and the placement on them. They end after the VMs that use them.
struct UnitLayer {
    inventory: Option<Rc<Inventory>>,
    units: Rc<Units>,
    placer: Rc<Placer>,
    tasks: JoinSet<Result<(), UnitError>>,
    stop: watch::Sender<bool>,
}

impl UnitLayer {
    async fn start(
        configuration: &Rc<Configuration>,
        launching: &Rc<Launching>,
        records: &Records,
        event_sender: &UnitEventSender,
        supervised: bool,
    ) -> Self {
        let (stop, stopping) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let inventory =
            configuration.nvml.is_some().then(|| Inventory::new(Rc::clone(launching), event_sender.clone()));
        if let Some(inventory) = &inventory {
            let (inventory, stopping) = (Rc::clone(inventory), stopping.clone());
            tasks.spawn_local(async move {
                inventory.serve(stopping).await;
                Ok(())
            });
        }
        let found = survey(configuration, inventory.as_deref()).await;
        let units = Rc::new(Units::default());
        let parts = placer::Parts {
            configuration: Rc::clone(configuration),
            launching: Rc::clone(launching),
            inventory: inventory.clone(),
            checkpoint: Rc::clone(&records.checkpoint),
            event_sender: event_sender.clone(),
            journal: Arc::clone(&records.journal),
            units: Rc::clone(&units),
        };
        let placer = Placer::new(parts, found);
        for unit in placer.whole_units() {
            units.serve(unit, &mut tasks, &stopping, supervised);
        }
        placer.adopt().await;
        Self { inventory, units, placer, tasks, stop }
    }
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

//! The main function of `sluiced`: it starts, serves and ends everything in order.
//!
//! [`Daemon::start`] opens the records, adopts the processes of the last daemon and begins every task. [`Daemon::run`] serves
//! until there is a reason to end. Then [`Daemon::end`] ends everything in the reverse order, or [`Daemon::leave`] leaves all
//! processes to the next daemon. The program calls it. It owns the order of starts and ends, and decides nothing about a VM or a unit.

mod end;
mod leftover;
mod run;
mod start;
mod supervisor;

use std::{io, os::fd::OwnedFd, path::PathBuf, rc::Rc};

use anyhow::{Context as _, Error, Result};
use sluice_runtime::closer::Closers;
use tokio::{
    signal::unix::Signal,
    sync::{mpsc::UnboundedReceiver, watch},
    task::{AbortHandle, JoinSet, LocalSet},
};

use self::{run::Ending, supervisor::Supervisor};
use crate::{
    configuration::Configuration,
    handover::{command, fd_store::FdStore},
    records::state::adoption,
    registry::Registry,
    units::unit::UnitError,
};

/// Everything that runs in this process.
struct Daemon {
    registry: Rc<Registry>,
    signals: Signals,
    supervisor: Option<Supervisor>,
    /// True if the service manager keeps the sockets of processes for the next daemon.
    keeps: bool,
    /// The sockets of the API that this daemon created.
    sockets: Vec<PathBuf>,
    /// The tasks of the inventory and of the units.
    unit_tasks: JoinSet<Result<(), UnitError>>,
    stop_units: watch::Sender<bool>,
    /// Receives the error of a VM that cannot be served.
    failures: UnboundedReceiver<Error>,
    tasks: Tasks,
}

/// The signals that end this process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// SIGUSR1: another daemon follows.
    hand_over: Signal,
}

/// The tasks that run until they are aborted.
struct Tasks {
    /// The API: its listeners, and the jobs of its handlers.
    api: Vec<AbortHandle>,
    sampling: AbortHandle,
    placing: AbortHandle,
    watchdog: AbortHandle,
    unit_events: AbortHandle,
    orphans: AbortHandle,
    checkpoint: AbortHandle,
}

/// Most threads that close descriptors of devices, one for each VM whose close has not ended. The service may have 1024 threads, and the
/// event loop has 512 at most for work that waits for disks.
const CLOSING_THREADS: usize = 256;

/// Runs until SIGTERM or SIGINT, or until the supervisor's socket closes, or, under a supervisor, a VM cannot be served.
///
/// # Errors
/// The reason why it could not start, or could not continue.
pub fn run(configuration: Configuration, supervisor: Option<OwnedFd>) -> Result<()> {
    let closers = Closers::new(CLOSING_THREADS);
    let fd_store = FdStore::new(closers.clone()).context("cannot take over the passed descriptors")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut scratch = configuration.scratch.clone();
    scratch.extend(configuration.ephemeral.then(|| configuration.runtime_dir.clone()));
    let result = LocalSet::new().block_on(&runtime, serve(configuration, supervisor, fd_store, closers));
    for directory in scratch {
        match std::fs::remove_dir_all(&directory) {
            // The supervisor has removed it already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %directory.display(), %error, "cannot remove a temporary directory");
            }
            Ok(()) => {}
        }
    }
    result
}

/// Replaces this process by the launcher of this configuration, as a service of its own. Returns only the reason why it cannot.
#[must_use]
pub fn become_launcher(configuration: &Configuration) -> Error {
    command::become_launcher(configuration).into()
}

/// Checks that a daemon with this configuration could adopt the running processes; changes nothing.
///
/// # Errors
/// The reason why it could not.
pub fn check_reload(configuration: &Configuration) -> Result<()> {
    adoption::check(configuration).context("the reload is refused")
}

async fn serve(
    configuration: Configuration,
    supervisor: Option<OwnedFd>,
    fd_store: FdStore,
    closers: Closers,
) -> Result<()> {
    let mut daemon = Daemon::start(configuration, supervisor, fd_store, closers).await?;
    match daemon.run().await? {
        Ending::HandOver => daemon.leave().await,
        Ending::Stop => daemon.end().await,
        Ending::Failure(error) => {
            daemon.end().await;
            return Err(error);
        }
    }
    Ok(())
}

//! The time between start and end: the daemon becomes ready, and waits for a reason to end.

use anyhow::{Error, Result};

use super::{Daemon, supervisor};

/// The reason for the end.
pub(super) enum Ending {
    /// A signal, or the end of the supervisor.
    Stop,
    /// This daemon cannot continue.
    Failure(Error),
    /// Another daemon follows.
    HandOver,
}

impl Daemon {
    /// Serves until there is a reason to end.
    pub(super) async fn run(&mut self) -> Result<Ending> {
        let registry = std::rc::Rc::clone(&self.registry);
        let mut all_there = std::pin::pin!(registry.all_there());
        loop {
            tokio::select! {
                served = &mut all_there, if !registry.ready.get() => {
                    if served == 0 && registry.vm_set.has_failed() {
                        return Ok(self.failures.recv().await.map_or(Ending::Stop, Ending::Failure));
                    }
                    registry.ready.set(true);
                    // Everything that can be adopted is adopted.
                    registry.launching.fd_store().drop_rest();
                    registry.launching.fd_store().ready();
                    tracing::info!(vms = served, "sluiced is ready");
                    if let Some(supervisor) = &mut self.supervisor {
                        supervisor.say_ready().await?;
                    }
                }
                Some(error) = self.failures.recv(), if registry.ready.get() || self.supervisor.is_some() => {
                    // A supervisor runs one VM, which has no device now; a host may have other VMs, and get more.
                    if self.supervisor.is_some() {
                        return Ok(Ending::Failure(error));
                    }
                    tracing::error!(error = %format_args!("{error:#}"), "a VM cannot be served");
                }
                Some(ended) = self.unit_tasks.join_next() => {
                    match ended {
                        Ok(Ok(())) => {}
                        // A unit gives up only under a supervisor.
                        Ok(Err(error)) => return Ok(Ending::Failure(error.into())),
                        Err(panic) => return Ok(Ending::Failure(panic.into())),
                    }
                }
                () = supervisor::closed(&mut self.supervisor) => {
                    tracing::info!("the supervisor has ended");
                    return Ok(Ending::Stop);
                }
                _ = self.signals.hand_over.recv(), if self.keeps => return Ok(Ending::HandOver),
                _ = self.signals.terminate.recv() => return Ok(Ending::Stop),
                _ = self.signals.interrupt.recv() => return Ok(Ending::Stop),
            }
        }
    }
}

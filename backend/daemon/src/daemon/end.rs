//! The end of the daemon: of everything, or of this process alone.

use std::{io, time::Duration};

use tokio::{task::AbortHandle, time::timeout};

use super::Daemon;

/// Time limit for writing state to a disk before the daemon ends.
const WRITE: Duration = Duration::from_secs(20);

impl Daemon {
    /// Ends this process alone: no other process is ended, and none notices. The next daemon continues from the state written
    /// here.
    pub(super) async fn leave(self) -> ! {
        let write = async {
            self.registry.sample().await;
            self.registry.journal.settled().await;
            self.registry.checkpoint.written().await
        };
        if let Err(error) = timeout(WRITE, write).await.map_err(io::Error::from).flatten() {
            tracing::error!(%error, "cannot write the state for the next daemon");
        }
        std::process::exit(0);
    }

    /// Ends everything: first the requests, then the VMs, then the units that they use, then the launcher.
    pub(super) async fn end(mut self) {
        let registry = self.registry;
        registry.launching.fd_store().stopping();
        self.tasks.api.iter().for_each(AbortHandle::abort);
        for socket in &self.sockets {
            if let Err(error) = std::fs::remove_file(socket) {
                tracing::warn!(path = %socket.display(), %error, "cannot remove a socket of the API");
            }
        }
        self.tasks.sampling.abort();
        self.tasks.placing.abort();
        registry.sample().await;
        let supervised = self.supervisor.is_some();
        if supervised {
            registry.end_supervised().await;
        }
        registry.vm_set.end().await;
        registry.units.end().await;
        self.stop_units.send_replace(true);
        while let Some(ended) = self.unit_tasks.join_next().await {
            if let Err(error) = ended.map_err(anyhow::Error::from).and_then(|ended| Ok(ended?)) {
                tracing::error!(error = %format_args!("{error:#}"), "a unit ended with an error");
            }
        }
        self.tasks.watchdog.abort();
        self.tasks.unit_events.abort();
        self.tasks.orphans.abort();
        registry.launching.end().await;
        if let Err(error) = registry.launching.adoption().finish() {
            tracing::warn!(%error, "cannot remove the record of processes");
        }
        self.tasks.checkpoint.abort();
        if timeout(WRITE, registry.journal.settled()).await.is_err() {
            tracing::error!("the last events are lost: they could not be written in time");
        }
        match registry.checkpoint.finish().await {
            // The usage of a supervisor's VMs is billed to no tenant.
            Ok(true) if supervised => {
                let audit_log = registry.audit_log.forget().await;
                let usage = registry.usage.forget().await;
                let events = |()| registry.journal.forget(&registry.configuration.log_directory);
                if let Err(error) = audit_log.and(usage).and_then(events) {
                    tracing::warn!(%error, "cannot remove the records of a supervisor's VMs");
                }
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "cannot remove the checkpoint"),
        }
    }
}

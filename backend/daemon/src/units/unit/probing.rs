//! Probes: processes that show whether the driver can serve sessions, and whether it reports the memory of each process.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use sluice_messages::{
    channel::{Channel, Received},
    control::{Figures, FromWorker, HostAccess, NeededAbility, ToArbiter, ToLauncher, ToWorker, WorkerSetup},
};
use sluice_runtime::rate::TokenBucket;
use sluice_shared_memory::socket;
use tokio::time::{sleep, timeout};

use super::Unit;
use crate::{
    handover::{
        launching::{send_arbiters, set_up_worker},
        process::KillOnDrop,
    },
    records::unit_event::UnitEvent,
};

/// Time limit for a probe; its arbiter ends it earlier.
const PROBE: Duration = Duration::from_secs(20);
/// Time after the unit's start for which a placement waits for the result of a probe.
const PROBED: Duration = Duration::from_secs(5);
/// Time after the unit's start for which a placement waits for the first report of its arbiter.
const REPORTED: Duration = Duration::from_secs(15);
/// Burst of probes, if one has shown nothing, and probes per second in the long run.
const PROBES: (u32, f64) = (3, 1.0 / 30.0);
/// Probes of an adopted unit that may show nothing, for instance because all memory is lent, before it stays as the last daemon left it.
const ADOPTED_PROBES: u32 = 3;
/// Time between two probes: by then the arbiter has taken back the lent memory.
const NEXT_PROBE: Duration = Duration::from_secs(2);

impl Unit {
    /// True if growth is charged to its VM by the driver's bytes per process. The arbiter of a whole device finds out soon
    /// after its start if that is possible; until then it is not.
    pub(crate) fn has_figures(&self) -> bool {
        self.place.is_whole() && *self.figures.borrow() == Some(Figures::Used)
    }

    /// Records if an arbiter uses the driver's figures. That they cannot be used is reported once, even after restarts.
    pub(super) fn set_figures(&self, figures: Figures) {
        let before = self.figures.send_replace(Some(figures));
        if figures == Figures::Unknown && matches!(before, Some(Figures::Used | Figures::Unused)) {
            self.unknown_since.set(Instant::now());
        }
        if figures == Figures::Unknown || !self.place.is_whole() {
            return;
        }
        let measured = figures == Figures::Used;
        if self.checkpoint.set_measured(self.number, measured) && !measured {
            // The receiver is gone while the daemon ends.
            _ = self.event_sender.send(UnitEvent::Unmeasured { unit: self.number });
        }
    }

    /// The host memory that kernels on the unit reach; `None` until its arbiter has reported it.
    pub(crate) fn host_access(&self) -> Option<HostAccess> {
        *self.host_access.borrow()
    }

    /// Records the host memory that kernels on the unit reach. An event reports any, once for each start of the arbiter or daemon.
    pub(super) fn set_host_access(&self, access: HostAccess) {
        let before = self.host_access.send_replace(Some(access));
        if access != HostAccess::None && before != Some(access) {
            let shared = self.configuration.share_with_host_memory_access;
            // The receiver is gone while the daemon ends.
            _ = self.event_sender.send(UnitEvent::HostAccess { unit: self.number, access, shared });
        }
    }

    /// Waits until its arbiter has reported the host memory that kernels reach, but no longer than [`REPORTED`] after its start.
    pub(crate) async fn host_access_known(&self) {
        let mut access = self.host_access.subscribe();
        let known = access.wait_for(Option::is_some);
        _ = timeout(REPORTED.saturating_sub(self.unknown_since.get().elapsed()), known).await;
    }

    /// Waits until its arbiter has reported the host memory that kernels reach, and until a probe has shown its results, but for
    /// the latter no longer than [`PROBED`] after the unit began to find out.
    pub(crate) async fn probed(&self) {
        self.host_access_known().await;
        let (mut figures, mut served) = (self.figures.subscribe(), self.serves_sessions.subscribe());
        let known = async {
            if self.is_probed_for_figures() {
                let known =
                    |figures: &Option<Figures>| matches!(figures, Some(Figures::Used | Figures::Unused));
                _ = figures.wait_for(known).await;
            } else if self.inventory.is_some() {
                _ = served.wait_for(|served| *served).await;
            }
        };
        tokio::pin!(known);
        loop {
            // A probe that has shown nothing begins the time anew.
            let left = PROBED.saturating_sub(self.unknown_since.get().elapsed());
            if left.is_zero() || timeout(left, &mut known).await.is_ok() {
                return;
            }
        }
    }

    /// True if probes find out about the driver's figures. A part of a device has none, and without an inventory they cannot be
    /// queried.
    fn is_probed_for_figures(&self) -> bool {
        self.place.is_whole() && self.inventory.is_some()
    }

    /// Starts a probe whenever the arbiter does not know if it can use the driver's figures, and on a part of a device until one
    /// has found no fault of the driver. No caller waits for it.
    pub(super) async fn probe_driver(&self) {
        // Without an inventory it is unknown when a probe's memory is free again, and no other process would get it.
        if self.inventory.is_none() {
            return std::future::pending().await;
        }
        if self.adopted.get() {
            self.probe_adopted().await;
        }
        let wanted = if self.is_probed_for_figures() { Figures::Unknown } else { Figures::Unused };
        let mut figures = self.figures.subscribe();
        let mut probes = TokenBucket::new(PROBES.1, PROBES.0, Instant::now());
        let mut was_quarantined = false;
        while figures.wait_for(|figures| *figures == Some(wanted)).await.is_ok() {
            if *self.serves_sessions.borrow() && !self.is_probed_for_figures() {
                return std::future::pending().await;
            }
            if self.checkpoint.quarantine(self.number).is_some() {
                was_quarantined = true;
                sleep(NEXT_PROBE).await;
                continue;
            }
            if core::mem::take(&mut was_quarantined) {
                self.unknown_since.set(Instant::now());
            }
            if let Err(wait) = probes.take(Instant::now()) {
                sleep(wait).await;
                continue;
            }
            if let Err(error) = self.probe_once().await {
                tracing::warn!(unit = self.number, %error, "cannot run a probe");
            }
            // Requests the result.
            self.describe().await;
            sleep(NEXT_PROBE).await;
        }
    }

    /// Probes the driver for new sessions of a unit that the last daemon probed: since then the driver or the configuration may have
    /// changed. No session waits for it.
    async fn probe_adopted(&self) {
        let mut probes = TokenBucket::new(PROBES.1, PROBES.0, Instant::now());
        let mut unclear = 0;
        while unclear < ADOPTED_PROBES {
            if self.checkpoint.quarantine(self.number).is_some() {
                sleep(NEXT_PROBE).await;
                continue;
            }
            if let Err(wait) = probes.take(Instant::now()) {
                sleep(wait).await;
                continue;
            }
            match self.probe_once().await {
                Ok(()) if self.lacking.get().is_none() => {
                    let unit = self.number;
                    return tracing::info!(unit, "a probe of the adopted unit found no fault of the driver");
                }
                Ok(()) => {}
                Err(error) => {
                    unclear += 1;
                    tracing::info!(unit = self.number, %error, "a probe of an adopted unit shows nothing");
                }
            }
            sleep(NEXT_PROBE).await;
        }
    }

    /// Makes the arbiter lend memory to a probe process, and waits for the end of the process.
    async fn probe_once(&self) -> io::Result<()> {
        let request = ToLauncher::StartProbe { unit: self.number, visible: self.place.visible };
        let started = self.launching.start(request).await.map_err(io::Error::other)?;
        let probe = KillOnDrop(started.process);
        let setup = WorkerSetup {
            vm: 0,
            session: 0,
            driver: self.configuration.driver.clone(),
            mapped_runs: self.configuration.mapped_runs,
            driver_queue: self.configuration.driver_queue,
            devices: 1,
            scrub_every_free: false,
            identity: self.place.visible.uuid(),
        };
        let (custody, theirs) = socket::pair()?;
        set_up_worker(&started.socket, &setup)?;
        send_arbiters(&started.socket, [(self.place.ordinal(), custody.as_fd())])?;
        let cgroup_kill = probe.0.cgroup_kill().map(OwnedFd::try_clone).transpose()?;
        let message = ToArbiter::Prober { process: probe.0.number(), grouped: cgroup_kill.is_some() };
        let mut descriptors = vec![theirs, probe.0.pidfd().try_clone()?];
        descriptors.extend(cgroup_kill);
        let posted = self.running.borrow().as_ref().is_some_and(|queue| queue.post(message, descriptors));
        if !posted {
            return Err(io::Error::other("the arbiter is gone"));
        }
        if timeout(PROBE, probe.0.gone()).await.is_err() {
            return Err(io::Error::other("the probe does not end"));
        }
        self.read_report(started.socket)
    }

    /// Reads the report about the driver of a probe that has ended. Two probes in a row must report the same, because a single
    /// failure of a call may pass.
    fn read_report(&self, socket: OwnedFd) -> io::Result<()> {
        // The launcher may still have a copy of the other end.
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = Channel::<FromWorker, ToWorker>::new(socket);
        let report = match socket.receive().map_err(io::Error::other)? {
            Received::Message(FromWorker::Unfit { ability, error }, _) => {
                let ability = NeededAbility::from_number(ability);
                Some((ability.ok_or_else(|| io::Error::other("the probe names no ability"))?, error))
            }
            Received::Message(FromWorker::Fit {}, _) => None,
            _ => return Err(io::Error::other("the probe ended before it had used lent memory")),
        };
        let before = self.lacking.replace(report);
        self.serves_sessions.send_replace(report.is_none());
        if report.is_some() {
            self.unknown_since.set(Instant::now());
        }
        if let Some((ability, error)) = report
            && before == report
        {
            // The receiver is gone while the daemon ends.
            _ = self.event_sender.send(UnitEvent::Unfit { unit: self.number, ability, error });
        }
        Ok(())
    }
}

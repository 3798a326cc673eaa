//! The requests of `sluiced`, and their answers.

use std::{os::fd::OwnedFd, time::Instant};

use rustix::fd::AsFd as _;
use sluice_messages::{
    channel::{ReceiveError, Received},
    control::{FromLauncher, LaunchRefusal, ToLauncher},
    inventory::Visible,
    launch::Fingerprint,
};
use sluice_runtime::process::{Identity, kill};

use super::{
    Launcher,
    cgroup::Cgroups,
    children::DeviceSpec,
    ending::FoundProcess,
    error::{LauncherError, RequestError},
    role::ChildRole,
    starting::StartedChild,
};

/// An answer, with its descriptors.
type Answer = (FromLauncher, Vec<OwnedFd>);

impl Launcher {
    /// Handles one request.
    pub(super) fn serve(&mut self) -> Result<(), LauncherError> {
        let Some(control) = &self.control else { return Ok(()) };
        let request = match control.receive() {
            Ok(Received::Message(request, _)) => Ok(request),
            Ok(Received::Empty) => return Ok(()),
            Ok(Received::Closed) => {
                self.hang_up();
                return Ok(());
            }
            Err(ReceiveError::Failed(error)) => return Err(LauncherError::Receive(error)),
            Err(error) => Err(error),
        };
        let answer = match request {
            Ok(request) if self.admits(&request) => self.handle(request),
            Ok(request) => {
                self.complain(&format_args!("{request:?} is not allowed now"));
                self.hang_up_on_client();
                return Ok(());
            }
            Err(error) => {
                self.complain(&error);
                Err(LaunchRefusal::BadRequest.into())
            }
        };
        match answer {
            Ok(Some(answer)) => self.send(answer),
            Ok(None) => {}
            Err(RequestError::Refused(refusal)) => {
                self.send((FromLauncher::Refused { refusal }, Vec::new()));
            }
            Err(RequestError::Failed(error)) => {
                let error = error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs();
                self.send((FromLauncher::Failed { error }, Vec::new()));
            }
        }
        if self.is_over() {
            self.hang_up();
        }
        Ok(())
    }

    /// Carries out a request. Some have no answer.
    fn handle(&mut self, request: ToLauncher) -> Result<Option<Answer>, RequestError> {
        let settled = || Some((FromLauncher::Settled {}, Vec::new()));
        let (role, spec, visible) = match request {
            ToLauncher::StartDevice { vm, scanouts, direct, fixed_arena } => {
                let spec = self.device_spec(vm, scanouts, direct, fixed_arena)?;
                (ChildRole::Device(vm), spec, Visible::Host)
            }
            ToLauncher::StartWorker { vm, session: _, visible } => {
                self.check_number(vm)?;
                (ChildRole::Worker(vm), DeviceSpec::default(), visible)
            }
            ToLauncher::StartArbiter { unit, visible } => {
                (ChildRole::Arbiter(unit), DeviceSpec::default(), visible)
            }
            ToLauncher::StartProbe { unit, visible } => {
                (ChildRole::Probe(unit), DeviceSpec::default(), visible)
            }
            ToLauncher::StartInventory {} => (ChildRole::Inventory, DeviceSpec::default(), Visible::Host),
            ToLauncher::Attach { configuration } => {
                return self.attach(Fingerprint(configuration)).map(Some);
            }
            ToLauncher::Settle {} => {
                // systemd may have started this `sluiced` in the cgroup directory itself.
                self.cgroups.iter_mut().for_each(Cgroups::settle);
                return Ok(settled());
            }
            ToLauncher::Find { process } => return self.find(process).map(|found| Some(found.into())),
            ToLauncher::RemoveSockets { vm } => return self.remove_sockets(vm).map(|()| settled()),
            ToLauncher::EndAll {} => {
                self.end_all()?;
                return Ok(settled());
            }
            ToLauncher::KeepWorker { process, started } => {
                self.keep(Identity { process, started });
                return Ok(None);
            }
            ToLauncher::Sweep {} => {
                self.sweep();
                self.swept = true;
                return Ok(None);
            }
        };
        let started = self.start(role, spec, visible)?;
        let StartedChild { socket, identity: Identity { process, started }, pidfd, cgroup_kill } = started;
        let answer = FromLauncher::Started { process, started, grouped: cgroup_kill.is_some() };
        Ok(Some((answer, [socket, pidfd].into_iter().chain(cgroup_kill).collect())))
    }

    /// Sends an answer. A client of a service that does not receive it loses its connection.
    fn send(&mut self, (answer, descriptors): Answer) {
        let Some(control) = &self.control else { return };
        let borrowed: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
        let Err(error) = control.send(&answer, &borrowed) else { return };
        self.complain(&error);
        if let (FromLauncher::Started { .. }, Some(pidfd)) = (answer, descriptors.get(1)) {
            // No process received the new one, which would wait for ever on a socket that is about to close.
            kill(pidfd.as_fd());
        }
        self.hang_up_on_client();
    }

    /// Logs that the exchange with `sluiced` failed, at a limited rate.
    fn complain(&mut self, error: &dyn std::fmt::Display) {
        if self.complaints.take(Instant::now()).is_ok() {
            tracing::error!(%error, "cannot serve a request of sluiced");
        }
    }
}

impl From<FoundProcess> for Answer {
    fn from(found: FoundProcess) -> Self {
        let FoundProcess { identity, pidfd, worker, cgroup_kill } = found;
        let answer =
            FromLauncher::Found { started: identity.started, worker, grouped: cgroup_kill.is_some() };
        (answer, [pidfd].into_iter().chain(cgroup_kill).collect())
    }
}

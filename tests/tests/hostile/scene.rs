//! A backend, and a neighbour on it.

use super::guest::Guest;
use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::direct::{self, Backend, TIMEOUT};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs::program;

/// A backend and a neighbour on it.
pub(super) struct Scene {
    pub(super) backend: Backend,
    pub(super) neighbour: Background,
    pub(super) device: u32,
    pub(super) neighbours_worker: u32,
}

impl Scene {
    pub(super) fn start() -> Result<Scene> {
        let backend = Backend::start(&Binaries::locate()?, None)?;
        let mut neighbour = backend.spawn("neighbour", &program("neighbour")?, &["forever"])?;
        neighbour.wait_for_line("computing", TIMEOUT)?;
        let device = backend.device()?;
        let (workers, _) = backend.wait_for_workers(1)?;
        Ok(Scene { backend, neighbour, device, neighbours_worker: workers[0] })
    }

    /// A session of a front-end that breaks all rules.
    pub(super) fn guest(&self) -> Result<Guest> {
        Guest::start(self)
    }

    /// The only worker that is not the neighbour's.
    pub(super) fn worker(&self) -> Result<u32> {
        let (workers, _) = self.backend.wait_for_workers(2)?;
        workers.into_iter().find(|worker| *worker != self.neighbours_worker).context("the guest's worker")
    }

    /// Checks that only the hostile guests were affected.
    pub(super) fn unharmed(mut self) -> Result<()> {
        let (workers, took) = self.backend.wait_for_workers(1)?;
        println!("the last hostile session was gone {took:?} after its guest");
        ensure!(workers == [self.neighbours_worker], "the neighbour's worker is another one");
        ensure!(self.backend.device()? == self.device, "the device is another one");
        let memory = direct::private_kibibytes(self.device)?;
        println!("sluice-device: {memory} KiB private resident memory");
        ensure!(memory < 16 << 10, "the device has grown to {memory} KiB");
        signal(self.neighbour.id(), Signal::USR1)?;
        let status = self.neighbour.wait(TIMEOUT)?.context("the neighbour ends")?;
        ensure!(status.success(), "the neighbour: {status}\n{}", self.neighbour.printed());
        let next = self.backend.run(&program("vector_add")?, &[])?;
        ensure!(next.status.success(), "the next program: {}\n{}", next.stdout, next.stderr);
        self.backend.stop()
    }
}

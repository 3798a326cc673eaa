//! A played launcher: the other end of the launcher's socket, and a process in its place.

use std::process::{Child, Command};

use rustix::fd::AsFd as _;
use sluice_messages::inventory::Visible;
use sluice_runtime::closer::Closers;
use tokio::task::{LocalSet, yield_now};

use super::*;
use crate::{async_fd::gone, configuration::Arguments};

struct Played {
    launching: Rc<Launching>,
    channel: Channel<ToLauncher, FromLauncher>,
    launcher: Child,
    _directory: tempfile::TempDir,
}

/// A process that waits for its end.
fn sleeper() -> Child {
    Command::new("sleep").arg("600").spawn().expect("a process")
}

fn pidfd(process: &Child) -> OwnedFd {
    Identity::of(process.id()).and_then(Identity::open).expect("a process")
}

impl Played {
    async fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let arguments = Arguments {
            runtime_dir: Some(directory.path().to_owned()),
            driver: Some("/dev/null".into()),
            ..Arguments::default()
        };
        let configuration = Rc::new(Configuration::load(arguments).expect("a configuration"));
        let fd_store = Rc::new(FdStore::new(Closers::new(1)).expect("no descriptors"));
        let adoption = Rc::new(Adoption::open(directory.path(), false));
        let launching = Rc::new(Launching::new(configuration, None, fd_store, adoption));
        let (ours, theirs) = socket::pair().expect("a pair");
        let launcher = sleeper();
        let process = LauncherProcess::Adopted(launcher.id(), watch(pidfd(&launcher)).expect("a process"));
        let channel = Channel::new(ours).expect("a socket");
        *launching.running.lock().await = Some(Running { process, channel, log: None });
        let channel = Channel::new(theirs).expect("a socket");
        Self { launching, channel, launcher, _directory: directory }
    }

    async fn request(&self) -> ToLauncher {
        self.channel.receive().await.expect("a request").expect("a daemon").0
    }

    /// Answers a request with a process.
    async fn answer(&self, process: &Child) {
        let (socket, _) = socket::pair().expect("a pair");
        let pidfd = pidfd(process);
        let identity = Identity::of(process.id()).expect("a process");
        let Identity { process, started } = identity;
        let message = FromLauncher::Started { process, started, grouped: false };
        self.channel.send(&message, &[socket.as_fd(), pidfd.as_fd()]).await.expect("sent");
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        // It may have ended already.
        _ = self.launcher.kill();
        _ = self.launcher.wait();
    }
}

fn device(vm: u32) -> ToLauncher {
    ToLauncher::StartDevice { vm, scanouts: 0, direct: false, fixed_arena: 0 }
}

fn worker(vm: u32, session: u32) -> ToLauncher {
    ToLauncher::StartWorker { vm, session, visible: Visible::Host }
}

// Promise: F74
#[tokio::test(start_paused = true)]
async fn caller_that_gives_up_costs_no_launcher_and_its_process_is_ended() {
    let test = async {
        let mut played = Played::new().await;
        let (mut unwanted, mut wanted) = (sleeper(), sleeper());
        let end_of_unwanted = watch(pidfd(&unwanted)).expect("a process");
        let launching = Rc::clone(&played.launching);
        let caller = spawn_local(async move { launching.start(device(1)).await.map(drop) });
        assert_eq!(played.request().await, device(1));
        caller.abort();
        assert!(caller.await.is_err_and(|error| error.is_cancelled()));
        // The next request waits for the answer to the abandoned one.
        let launching = Rc::clone(&played.launching);
        let next = spawn_local(async move { launching.start(device(2)).await });
        yield_now().await;
        assert!(played.launcher.try_wait().expect("a status").is_none(), "the launcher was killed");
        played.answer(&unwanted).await;
        assert_eq!(played.request().await, device(2));
        played.answer(&wanted).await;
        let started = next.await.expect("a task").expect("an answer");
        assert_eq!(started.process.number(), wanted.id(), "the answers are confused");
        gone(&end_of_unwanted).await;
        assert!(played.launcher.try_wait().expect("a status").is_none(), "the launcher was killed");
        for child in [&mut unwanted, &mut wanted] {
            // The first was killed by the daemon.
            _ = child.kill();
            child.wait().expect("ended");
        }
    };
    LocalSet::new().run_until(test).await;
}

// Promise: A52, F87
#[tokio::test]
async fn device_starts_before_waiting_sessions_and_vms_start_sessions_in_turn() {
    let test = async {
        let played = Played::new().await;
        let mut process = sleeper();
        let begin = |request| {
            let launching = Rc::clone(&played.launching);
            spawn_local(async move { launching.start(request).await.map(drop) })
        };
        let mut tasks: Vec<_> = (0..64).map(|session| begin(worker(1, session))).collect();
        yield_now().await;
        tasks.push(begin(worker(2, 0)));
        tasks.push(begin(device(3)));
        let mut order = Vec::new();
        for _ in 0..tasks.len() {
            order.push(played.request().await);
            played.answer(&process).await;
        }
        for task in tasks {
            task.await.expect("a task").expect("an answer");
        }
        let place = |wanted| order.iter().position(|request| *request == wanted).expect("a request");
        assert!(place(device(3)) <= 2, "the device is number {}", place(device(3)));
        assert!(place(worker(2, 0)) <= 3, "the other VM is number {}", place(worker(2, 0)));
        let sessions = order.iter().filter_map(|request| match request {
            ToLauncher::StartWorker { vm: 1, session, .. } => Some(*session),
            _ => None,
        });
        assert!(sessions.is_sorted(), "{order:?}");
        process.kill().expect("killed");
        process.wait().expect("ended");
    };
    LocalSet::new().run_until(test).await;
}

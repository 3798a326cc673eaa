//! `sluiced` itself: everything started, served and ended in order.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    rc::Rc,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::AsyncReadExt as _,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::{JoinSet, LocalSet},
};

use crate::{
    configuration::Configuration,
    launching::Launching,
    status,
    vm::{Vm, VmError},
};

/// Runs until SIGTERM or SIGINT, or until the supervisor's socket closes, or, under a supervisor, a VM cannot be served.
///
/// # Errors
/// What kept it from starting, or from going on.
pub fn run(configuration: Configuration, supervisor: Option<OwnedFd>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let directory = configuration.ephemeral.then(|| configuration.runtime_dir.clone());
    let result = LocalSet::new().block_on(&runtime, serve(configuration, supervisor));
    if let Some(directory) = directory {
        match std::fs::remove_dir_all(&directory) {
            // The supervisor was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("{} stays behind: {error}", directory.display()),
            Ok(()) => {}
        }
    }
    result
}

async fn serve(configuration: Configuration, supervisor: Option<OwnedFd>) -> Result<()> {
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let configuration = Rc::new(configuration);
    make_directory(&configuration.runtime_dir)?;
    let listener = status::listen(&configuration.control)?;
    let lifeline = supervisor.as_ref().map(OwnedFd::try_clone).transpose()?;
    let launching = Rc::new(Launching::new(Rc::clone(&configuration), lifeline));

    let (stop, stopping) = watch::channel(false);
    let (ready_sender, mut ready) = tokio::sync::mpsc::unbounded_channel();
    let mut serving: JoinSet<Result<(), VmError>> = JoinSet::new();
    let mut vms = Vec::with_capacity(configuration.vms.len());
    for &spec in &configuration.vms {
        let vm = Vm::new(spec, Rc::clone(&configuration), Rc::clone(&launching));
        vms.push(Rc::clone(&vm));
        let ready = ready_sender.clone();
        // The receiver counts; when it is gone already, the daemon is ending.
        serving.spawn_local(vm.serve(stopping.clone(), move || _ = ready.send(())));
    }
    drop(ready_sender);
    let status = {
        let launching = Rc::clone(&launching);
        move || describe(&launching, &vms)
    };
    let answering = tokio::task::spawn_local(status::serve(listener, status));

    let mut supervisor = supervisor.map(Supervisor::new).transpose()?;
    let mut waiting = configuration.vms.len();
    let mut failure = None;
    loop {
        tokio::select! {
            Some(()) = ready.recv() => {
                waiting -= 1;
                if waiting == 0 {
                    tracing::info!("ready: {} VMs", configuration.vms.len());
                    if let Some(supervisor) = &mut supervisor {
                        supervisor.say_ready()?;
                    }
                }
            }
            Some(ended) = serving.join_next() => {
                let error = match ended {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => anyhow::Error::from(error),
                    Err(panic) => anyhow::Error::from(panic),
                };
                // A supervisor runs one thing, which is now without its device; a host may have other VMs.
                if supervisor.is_some() || serving.is_empty() {
                    failure = Some(error);
                    break;
                }
                tracing::error!("{error:#}");
            }
            () = closed(&mut supervisor) => { tracing::info!("the supervisor has ended"); break }
            _ = terminated.recv() => break,
            _ = interrupted.recv() => break,
        }
    }

    answering.abort();
    if let Err(error) = std::fs::remove_file(&configuration.control) {
        tracing::warn!("{} stays behind: {error}", configuration.control.display());
    }
    stop.send_replace(true);
    while let Some(ended) = serving.join_next().await {
        if let Err(error) = ended.map_err(anyhow::Error::from).and_then(|ended| Ok(ended?)) {
            tracing::error!("{error:#}");
        }
    }
    launching.end().await;
    failure.map_or(Ok(()), Err)
}

fn make_directory(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot make the runtime directory {}", path.display()))
}

fn describe(launching: &Launching, vms: &[Rc<Vm>]) -> String {
    serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "process": std::process::id(),
        "launcher": launching.process(),
        "vms": vms.iter().map(|vm| vm.status()).collect::<Vec<_>>(),
    })
    .to_string()
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

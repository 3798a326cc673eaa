//! Connections of the management API: who may connect, and how much a client may take.
//!
//! A client is bounded in what it sends (a body of 64 KiB), in the time it takes to send a request or to take an answer, and
//! in the number of its connections. One that is slow or dead holds up nobody but itself.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use axum::Router;
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::spawn_local,
    time::{Instant, Sleep, sleep},
};
use tower_service::Service as _;

use super::peer::{Caller, Directory};

/// Connections at once; more wait in the listen queue.
const CONNECTIONS: usize = 256;
/// Connections of one user who is not an administrator.
const CONNECTIONS_PER_USER: usize = 32;
/// How long a client may take to send the head of a request, or be silent between two.
const HEAD: Duration = Duration::from_secs(10);
/// How long a client may take none of an answer.
const TAKE: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Lines of a request's head.
const HEADERS: usize = 64;

/// Listens at a path. What a killed `sluiced` left there is replaced.
///
/// # Errors
/// When another `sluiced` answers there, or the kernel refuses.
pub(crate) fn listen(path: &Path, shared: bool) -> Result<UnixListener> {
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => bail!("another sluiced is running: it answers at {}", path.display()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
        }
        Err(_) => {}
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("cannot listen at {}", path.display()))?;
    // Whoever connects is looked at; where nobody else has a role, nobody else need connect.
    let mode = if shared { 0o666 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot open {} to others", path.display()))?;
    Ok(listener)
}

/// Takes over a socket that listens already.
///
/// # Errors
/// When it is none.
pub(crate) fn adopt(socket: std::os::fd::OwnedFd) -> Result<UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener).context("what was passed as the API's socket is none")
}

/// Connections by user.
#[derive(Debug, Default)]
struct Users(RefCell<BTreeMap<u32, usize>>);

/// One of them.
struct Entered {
    users: Rc<Users>,
    uid: u32,
}

impl Users {
    fn enter(self: &Rc<Self>, caller: &Caller) -> Option<Entered> {
        let mut users = self.0.borrow_mut();
        let count = users.entry(caller.uid).or_insert(0);
        if *count >= CONNECTIONS_PER_USER && caller.may_administer().is_err() {
            return None;
        }
        *count += 1;
        Some(Entered { users: Rc::clone(self), uid: caller.uid })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut users = self.users.0.borrow_mut();
        if let Some(count) = users.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.uid);
            }
        }
    }
}

/// Serves clients of a socket, for ever.
pub(crate) async fn serve(listener: UnixListener, router: Router, directory: Rc<Directory>, reading: bool) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let users = Rc::new(Users::default());
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: a pause, or this loop would do nothing else.
                tracing::warn!("cannot accept a client: {error}");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let caller = match directory.caller(&stream, reading) {
            Ok(caller) => caller,
            Err(error) => {
                tracing::warn!("cannot tell who a client is: {error}");
                continue;
            }
        };
        let Some(entered) = users.enter(&caller) else {
            tracing::debug!("user {} has too many connections", caller.uid);
            continue;
        };
        let router = router.clone();
        spawn_local(async move {
            if let Err(error) = converse(stream, router, caller).await {
                tracing::debug!("a client of the management API: {error}");
            }
            drop((entered, permit));
        });
    }
}

async fn converse(stream: UnixStream, router: Router, caller: Caller) -> Result<(), hyper::Error> {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(caller.clone());
        // A router is always ready.
        router.clone().call(request)
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(Patient::new(stream)), service)
        .await
}

/// A stream that fails when nothing of what is written is taken for too long.
struct Patient {
    stream: UnixStream,
    /// Runs while something waits to be taken.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    const fn new(stream: UnixStream) -> Self {
        Self { stream, waiting: None }
    }

    fn judge<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = None;
            return result;
        }
        let waiting =
            self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + TAKE)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, result)
    }
}

//! Connections of the management API: the right to connect, and the limits of a client.
//!
//! A client is bounded in the bytes it sends (a body of 64 KiB), in the time it takes to send a request or to take a response,
//! and in the number of its connections. A slow or dead client delays only itself.

use std::{
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
use sluice_api::{Code, Error};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::spawn_local,
    time::{Instant, Sleep, sleep, timeout},
};
use tower_service::Service as _;

use super::error::status;
use super::places::{Bounds, Places, User, Users};
use crate::caller::{Caller, Directory, no_role};

/// Connections at once.
const CONNECTIONS: Bounds = Bounds { all: 256, others: 192, each: 32 };
/// Connections that wait to be accepted. More wait one by one, each client for its own, so a client that asks for a thousand
/// connections does not put them before everybody's.
const WAITING: i32 = 32;
/// Clients without a role that are told so at the same time; more are refused without being read.
const STRANGERS: usize = 16;
/// How long it may take to tell one.
const STRANGER: Duration = Duration::from_secs(1);
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

/// What is said to a client for whom there is no place, before its request is read.
fn refusal(error: Error) -> Vec<u8> {
    let status = status(error.code);
    // A code and words can be written.
    let body = serde_json::to_string(&error).unwrap_or_default();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Serves clients of a socket, for ever.
pub(crate) async fn serve(
    listener: UnixListener,
    router: Router,
    directory: Rc<Directory>,
    users: Rc<Users>,
    reading: bool,
) {
    if let Err(error) = rustix::net::listen(&listener, WAITING) {
        tracing::warn!("clients that flood the management API may hold up others: {error}");
    }
    let places = Places::new(CONNECTIONS);
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
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
                tracing::debug!("cannot tell who a client is: {error}");
                continue;
            }
        };
        let router = router.clone();
        if !caller.is_known() {
            // It is told so, in places that no user with a role wants.
            match Arc::clone(&strangers).try_acquire_owned() {
                Ok(place) => {
                    let user = users.of(&caller);
                    spawn_local(async move {
                        let told = timeout(STRANGER, converse(stream, router, caller, user)).await;
                        tracing::debug!("a client without a role: {told:?}");
                        drop(place);
                    });
                }
                Err(_) => refuse(&stream, no_role()),
            }
            continue;
        }
        let Some(place) = places.enter(&caller) else {
            tracing::debug!("there is no place for another connection of user {}", caller.uid);
            refuse(&stream, Error::new(Code::Unavailable, "too many connections"));
            continue;
        };
        let user = users.of(&caller);
        spawn_local(async move {
            if let Err(error) = converse(stream, router, caller, user).await {
                tracing::debug!("a client of the management API: {error}");
            }
            drop(place);
        });
    }
}

fn refuse(stream: &UnixStream, error: Error) {
    // A new connection takes as much at once; a client that does not listen loses it.
    _ = stream.try_write(&refusal(error));
}

async fn converse(
    stream: UnixStream,
    router: Router,
    caller: Caller,
    user: Arc<User>,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(caller.clone());
        request.extensions_mut().insert(Arc::clone(&user));
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

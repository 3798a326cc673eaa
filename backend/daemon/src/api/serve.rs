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
use super::places::{Bounds, RequestPlaces, User, Users};
use crate::caller::{Caller, Directory, no_role};

/// Limits of concurrent connections.
const CONNECTIONS: Bounds = Bounds { all: 256, others: 192, each: 32 };
/// Backlog of connections to be accepted. Further clients wait in `connect`, each for one connection, so a client that opens a
/// thousand connections does not get ahead of all others.
const WAITING: i32 = 32;
/// Limit of concurrent refusals to clients without a role; further ones are closed without being read.
const REFUSALS: usize = 16;
/// Time limit for such a refusal.
const REFUSAL: Duration = Duration::from_secs(1);
/// Time limit for the head of a request, and for silence between two requests.
const HEAD: Duration = Duration::from_secs(10);
/// Time for which a client may take no byte of an answer.
const TAKE: Duration = Duration::from_secs(10);
/// Limit of a request's head, in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// Limit of a request's head, in lines.
const HEADERS: usize = 64;

/// Listens at a path. Replaces the socket of a killed `sluiced`.
///
/// # Errors
/// If another `sluiced` answers there, or a system call fails.
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
    // Every caller's role is checked; if no other user has a role, no other user may connect.
    let mode = if shared { 0o666 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    Ok(listener)
}

/// Takes over a listening socket.
///
/// # Errors
/// If the descriptor is not such a socket.
pub(crate) fn adopt(socket: std::os::fd::OwnedFd) -> Result<UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener).context("the socket passed for the API is not a listening one")
}

/// The response to a client without a place, before its request is read.
fn refusal(error: Error) -> Vec<u8> {
    let status = status(error.code);
    // A code and a string can always be written.
    let body = serde_json::to_string(&error).unwrap_or_default();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Serves the clients of a socket, for ever.
pub(crate) async fn serve(
    listener: UnixListener,
    router: Router,
    directory: Rc<Directory>,
    users: Rc<Users>,
    reading: bool,
) {
    if let Err(error) = rustix::net::listen(&listener, WAITING) {
        tracing::warn!(%error, "cannot limit the backlog of the management API; a client may delay others");
    }
    let places = RequestPlaces::new(CONNECTIONS);
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most likely there are no descriptors left: a pause, so that this loop does not spin.
                tracing::warn!(%error, "cannot accept a client");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let caller = match directory.caller(&stream, reading) {
            Ok(caller) => caller,
            Err(error) => {
                tracing::debug!(%error, "cannot identify a client");
                continue;
            }
        };
        let router = router.clone();
        if !caller.is_known() {
            // The client gets a refusal, in places apart from those of users with a role.
            match Arc::clone(&refusals).try_acquire_owned() {
                Ok(place) => {
                    let user = users.of(&caller);
                    spawn_local(async move {
                        let refused = timeout(REFUSAL, serve_connection(stream, router, caller, user)).await;
                        tracing::debug!(result = ?refused, "refused a client without a role");
                        drop(place);
                    });
                }
                Err(_) => refuse(&stream, no_role()),
            }
            continue;
        }
        let Some(place) = places.enter(&caller) else {
            tracing::debug!(uid = caller.uid, "refused a connection: the user has too many");
            refuse(&stream, Error::new(Code::Unavailable, "too many connections"));
            continue;
        };
        let user = users.of(&caller);
        spawn_local(async move {
            if let Err(error) = serve_connection(stream, router, caller, user).await {
                tracing::debug!(%error, "a connection of the management API failed");
            }
            drop(place);
        });
    }
}

fn refuse(stream: &UnixStream, error: Error) {
    // The buffer of a new connection takes all of it at once; a client that does not read loses it.
    _ = stream.try_write(&refusal(error));
}

async fn serve_connection(
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

/// A stream that fails if the peer takes no written byte for too long.
struct Patient {
    stream: UnixStream,
    /// Runs while written bytes wait for the peer.
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

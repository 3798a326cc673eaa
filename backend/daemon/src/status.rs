//! The daemon's listening control socket: a line `status` is answered with one line of JSON.
//!
//! Only the user who runs `sluiced` can connect. A client gets one question, of bounded length, in bounded time.

use std::{
    future::Future, io, os::unix::fs::PermissionsExt as _, path::Path, pin::Pin, rc::Rc, time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};

/// Bytes of a question.
const QUESTION: u64 = 512;
/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer may take to be made and taken.
const ANSWER: Duration = Duration::from_secs(30);
/// Clients at once; more wait in the listen queue.
const CLIENTS: usize = 16;

/// Listens at `path`. What a killed `sluiced` left there is replaced.
///
/// # Errors
/// When another `sluiced` answers there, or the kernel refuses.
pub fn listen(path: &Path) -> Result<UnixListener> {
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => bail!("another sluiced is running: it answers at {}", path.display()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
        }
        Err(_) => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot restrict {}", path.display()))?;
    Ok(listener)
}

/// What answers a question.
pub type Answer = Pin<Box<dyn Future<Output = String>>>;

/// Answers clients with what `respond` says to their questions, for ever.
pub async fn serve(listener: UnixListener, respond: impl Fn(String) -> Answer + 'static) {
    let respond = Rc::new(respond);
    let clients = std::sync::Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(permit) = std::sync::Arc::clone(&clients).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let respond = Rc::clone(&respond);
                tokio::task::spawn_local(async move {
                    match answer(stream, &*respond).await {
                        Ok(()) => {}
                        Err(error) => tracing::debug!("a client of the control socket: {error}"),
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: a pause, or this loop would do nothing else.
                tracing::warn!("cannot accept a client: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, respond: &dyn Fn(String) -> Answer) -> io::Result<()> {
    let question = timeout(PATIENCE, read_question(&mut stream)).await??;
    let answer = async {
        let mut line = respond(question).await;
        line.push('\n');
        stream.write_all(line.as_bytes()).await
    };
    timeout(ANSWER, answer).await?
}

async fn read_question(stream: &mut UnixStream) -> io::Result<String> {
    let mut question = Vec::new();
    let mut byte = [0];
    while u64::try_from(question.len()).is_ok_and(|length| length < QUESTION) {
        if stream.read(&mut byte).await? == 0 || byte == *b"\n" {
            break;
        }
        question.extend(byte);
    }
    Ok(String::from_utf8_lossy(&question).into_owned())
}

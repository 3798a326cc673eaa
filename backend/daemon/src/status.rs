//! The daemon's listening control socket: a line `status` is answered with one line of JSON.
//!
//! Only the user who runs `sluiced` can connect. A client gets one question, of bounded length, in bounded time.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path, rc::Rc, time::Duration};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};

/// Bytes of a question.
const QUESTION: u64 = 64;
/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(5);
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

/// Answers clients with what `status` says, for ever.
pub async fn serve(listener: UnixListener, status: impl Fn() -> String + 'static) {
    let status = Rc::new(status);
    let clients = std::sync::Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(permit) = std::sync::Arc::clone(&clients).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let status = Rc::clone(&status);
                tokio::task::spawn_local(async move {
                    match timeout(PATIENCE, answer(stream, &*status)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => tracing::debug!("a client of the control socket: {error}"),
                        Err(_) => tracing::debug!("a client of the control socket took too long"),
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

async fn answer(mut stream: UnixStream, status: &dyn Fn() -> String) -> io::Result<()> {
    let mut question = Vec::new();
    let mut byte = [0];
    while u64::try_from(question.len()).is_ok_and(|length| length < QUESTION) {
        if stream.read(&mut byte).await? == 0 || byte == *b"\n" {
            break;
        }
        question.extend(byte);
    }
    let mut line = match question.as_slice() {
        b"status" => status(),
        _ => r#"{"error":"unknown question"}"#.to_owned(),
    };
    line.push('\n');
    stream.write_all(line.as_bytes()).await
}

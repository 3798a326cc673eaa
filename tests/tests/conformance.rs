//! The management API against its own description: requests made from it by schemathesis, valid and invalid, alone and upon each
//! other's results, to the real `sluiced` on the software GPU.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{output_of, run, tail};
use sluice_tests::tenants::{Options, Tenants};
use sluice_tests::wheels;

const SCHEMATHESIS: &str = "schemathesis==4.32.5";
const DOWNLOAD: Duration = Duration::from_secs(300);
const RUN: Duration = Duration::from_secs(900);
/// Cases per operation and phase: a thousand requests in all for every change, more than four thousand in the full tier.
const EXAMPLES: [&str; 2] = ["15", "250"];

/// The client from PyPI with all it needs, in the cache; an error when it is neither there nor can be had.
fn schemathesis() -> Result<PathBuf> {
    let _lock = paths::cache_lock("schemathesis")?;
    let folder = paths::cache()?.join("schemathesis");
    let stamp = folder.join("complete");
    if fs::read_to_string(&stamp).is_ok_and(|have| have == SCHEMATHESIS) {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut pip = Command::new(wheels::python()?);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]);
    output_of(pip.arg(&folder).arg(SCHEMATHESIS), DOWNLOAD)?;
    fs::write(stamp, SCHEMATHESIS)?;
    Ok(folder)
}

/// The client knows no Unix sockets. Returns the port of this machine at which the API answers, too.
fn forward(socket: PathBuf) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // A test that is over has no API any more.
            let Ok(api) = UnixStream::connect(&socket) else { continue };
            drop(std::thread::spawn(move || join(&client, &api)));
        }
    });
    Ok(port)
}

fn join(client: &TcpStream, api: &UnixStream) {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Whichever side has ended, the other is told; what was lost with it, the client reports.
            let _ = io::copy(&mut { client }, &mut { api });
            let _ = api.shutdown(Shutdown::Write);
        });
        let _ = io::copy(&mut { api }, &mut { client });
        let _ = client.shutdown(Shutdown::Both);
    });
}

// Promise: A10
#[test]
fn requests_made_from_the_description_are_answered_as_described() -> Result<()> {
    let client = match schemathesis() {
        Ok(client) => client,
        Err(error) => {
            println!("SKIP: schemathesis cannot be had: {error:#}");
            return Ok(());
        }
    };
    let mut options = Options::with_limits(128, &[0]);
    options.arguments = ["--vm-numbers", "1000:200"].map(str::to_owned).to_vec();
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let port = forward(tenants.folder().join("run/api.sock"))?;
    let full = std::env::var("SLUICE_TIER").is_ok_and(|tier| tier == "full");
    let mut test = Command::new(wheels::python()?);
    test.args(["-m", "schemathesis.cli", "run"]).arg(paths::workspace().join("docs/openapi.json"));
    test.args(["--url", &format!("http://127.0.0.1:{port}"), "--max-examples", EXAMPLES[usize::from(full)]]);
    if !full {
        // What every change must pass is the same for every change; the full tier looks for what is new.
        test.args(["--seed", "1"]);
    }
    // An answer without an end is followed elsewhere.
    test.args(["--exclude-path", "/v1/events", "--request-timeout", "30", "--no-color"]);
    test.current_dir(tenants.folder()).env("PYTHONPATH", &client).env("PYTHONDONTWRITEBYTECODE", "1");
    let finished = run(&mut test, RUN)?;
    let said = format!("{}\n{}", tail(&finished.stdout, 120), tail(&tenants.printed(), 20));
    ensure!(finished.status.success(), "{said}");
    println!("{}", summary(&finished.stdout));
    still_well(tenants.folder()).context(said)
}

/// What it says of itself at the end.
fn summary(text: &str) -> String {
    text.lines()
        .filter(|line| line.contains("generated") || line.contains("Tested:"))
        .collect::<Vec<_>>()
        .join("; ")
}

/// The daemon answers as before.
fn still_well(folder: &Path) -> Result<()> {
    use std::io::{Read as _, Write as _};
    let mut stream = UnixStream::connect(folder.join("run/api.sock"))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: sluice\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    ensure!(text.starts_with("HTTP/1.1 200"), "{text}");
    Ok(())
}

//! The management API against its own description: requests generated from it by schemathesis, valid and invalid, alone and based
//! on each other's results, to the real `sluiced` on the software GPU.

use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{output_of, run, tail};
use sluice_tests::tenants::{Options, Tenants};
use sluice_tests::wheels;

const SCHEMATHESIS: &str = "schemathesis==4.32.5";
const DOWNLOAD: Duration = Duration::from_secs(300);
const RUN: Duration = Duration::from_secs(900);
/// Cases per operation and phase, for every change.
const EXAMPLES: &str = "15";
const FULL_EXAMPLES: &str = "250";
/// Minimum number of requests in the full tier.
const REQUESTS: u64 = 10_000;
/// Maximum number of rounds for that: one has four thousand requests or more.
const ROUNDS: u32 = 4;

/// The client from PyPI with its dependencies, in the cache; an error if it is neither there nor available.
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

/// Forwards a port of this machine to the API, because the client cannot use Unix sockets; returns the port.
fn forward(socket: PathBuf) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // After the end of a test its API is gone.
            let Ok(api) = UnixStream::connect(&socket) else { continue };
            drop(std::thread::spawn(move || join(&client, &api)));
        }
    });
    Ok(port)
}

fn join(client: &TcpStream, api: &UnixStream) {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Each side gets the end of the other; the client reports lost answers.
            let _ = io::copy(&mut { client }, &mut { api });
            let _ = api.shutdown(Shutdown::Write);
        });
        let _ = io::copy(&mut { api }, &mut { client });
        let _ = client.shutdown(Shutdown::Both);
    });
}

/// A thousand requests, the same for every change.
// Promise: A10
#[test]
fn requests_generated_from_openapi_are_answered_as_described() -> Result<()> {
    let Some(client) = client() else { return Ok(()) };
    round(&client, 1, EXAMPLES).map(drop)
}

/// Ten thousand requests or more, different in each run.
// Promise: A10
#[test]
#[ignore = "for the full tier"]
fn ten_thousand_generated_requests_are_answered_as_described() -> Result<()> {
    let Some(client) = client() else { return Ok(()) };
    if let Ok(seed) = std::env::var("SLUICE_SEED") {
        return round(&client, seed.parse().context("SLUICE_SEED is a number")?, FULL_EXAMPLES).map(drop);
    }
    let mut requests = 0;
    for _ in 0..ROUNDS {
        let seed = random();
        // A round can be repeated by its seed.
        requests += round(&client, seed, FULL_EXAMPLES).with_context(|| format!("SLUICE_SEED={seed}"))?;
        if requests >= REQUESTS {
            println!("{requests} requests");
            return Ok(());
        }
    }
    bail!("{requests} requests in {ROUNDS} rounds are not {REQUESTS}")
}

/// The client; `None` if it is not available, which is reported as a skip.
fn client() -> Option<PathBuf> {
    schemathesis()
        .inspect_err(|error| sluice_skip::skip(&format!("schemathesis is not available: {error:#}")))
        .ok()
}

/// A random number: the library seeds its hash tables with one.
fn random() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().build_hasher().finish().to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

/// Sends requests generated from one seed to a daemon of their own; returns their number.
fn round(client: &Path, seed: u32, examples: &str) -> Result<u64> {
    let mut options = Options::with_limits(128, &[0]);
    options.arguments = ["--vm-numbers", "1:200"].map(str::to_owned).to_vec();
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let port = forward(tenants.folder().join("run/api.sock"))?;
    let mut test = Command::new(wheels::python()?);
    test.args(["-m", "schemathesis.cli", "run"]).arg(paths::workspace().join("docs/openapi.json"));
    test.args(["--url", &format!("http://127.0.0.1:{port}"), "--seed", &seed.to_string()]);
    test.args(["--max-examples", examples]);
    // Other tests cover the event stream, whose answer has no end.
    test.args(["--exclude-path", "/v1/events", "--request-timeout", "30", "--no-color"]);
    test.current_dir(tenants.folder()).env("PYTHONPATH", client).env("PYTHONDONTWRITEBYTECODE", "1");
    let finished = run(&mut test, RUN)?;
    let said = format!("{}\n{}", tail(&finished.stdout, 120), tail(&tenants.printed(), 20));
    ensure!(finished.status.success(), "{said}");
    println!("seed {seed}: {}", summary(&finished.stdout));
    still_well(tenants.folder()).with_context(|| said.clone())?;
    generated(&finished.stdout).context(said)
}

/// The number of generated requests, from the client's last lines.
fn generated(text: &str) -> Option<u64> {
    let line = text.lines().rev().find(|line| line.contains(" generated"))?;
    let before = line.split(" generated").next()?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The client's summary in its last lines.
fn summary(text: &str) -> String {
    text.lines()
        .filter(|line| line.contains("generated") || line.contains("Tested:"))
        .collect::<Vec<_>>()
        .join("; ")
}

/// Checks that the daemon still answers.
fn still_well(folder: &Path) -> Result<()> {
    sluice_api::client::Client::at(folder.join("run/api.sock")).health()?;
    Ok(())
}

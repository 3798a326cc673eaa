//! The measured rows, one by one.

use crate::{
    Row,
    cuda::{Cuda, Kernel, Pinned},
    measure::{Samples, higher, lower},
    peer::{Eventfds, PingPong, Tcp},
};
use anyhow::{Context as _, Result, ensure};
use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Number of rounds of row and yardstick.
const ROUNDS: usize = 15;
/// Number of launches in one round of a rate.
const LAUNCHES: u32 = 20_000;

/// The kernel of the launch rows: three 64-bit parameters. The null driver ignores the code; the software GPU's driver must
/// accept it.
const IMAGE: &core::ffi::CStr = c".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry bench(.param .u64 a, .param .u64 b, .param .u64 c)\n{\n ret;\n}\n";

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(filter: &[String]) -> Result<Vec<Row>> {
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    let cuda = Cuda::load()?;
    cuda.initialise()?;
    cuda.use_device()?;
    let mut rows = Vec::new();
    if wanted("call/sync") {
        rows.push(call_sync(&cuda)?);
    }
    if wanted("call/vs-tcp") {
        rows.push(call_sync_vs_tcp(&cuda)?);
    }
    if wanted("call/post-launch") {
        rows.push(launch_cost(&cuda)?);
    }
    if wanted("call/post-rate") {
        rows.push(launch_rate(&cuda)?);
    }
    if wanted("module/load") {
        rows.push(module_load(&cuda)?);
    }
    for size in [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20] {
        for pinned in [false, true] {
            let name = |direction: &str| {
                format!("copy/{direction}/{}/{}", if pinned { "pinned" } else { "pageable" }, text(size))
            };
            let names = [name("htod"), name("dtoh")];
            if names.iter().any(|name| wanted(name)) {
                rows.extend(copies(&cuda, size, pinned, &names)?.into_iter().filter(|row| wanted(&row.name)));
            }
        }
    }
    if wanted("doorbell/idle") {
        rows.push(doorbell_idle(&cuda)?);
    }
    if wanted("wake/idle") {
        rows.push(wake_idle(&cuda)?);
    }
    if wanted("session/start") {
        rows.push(session_start()?);
    }
    Ok(rows)
}

fn text(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{}MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{}KiB", bytes >> 10),
        bytes => format!("{bytes}B"),
    }
}

fn call_sync(cuda: &Cuda) -> Result<Row> {
    let mut peer = PingPong::start()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for round in 0..ROUNDS {
        // In the first calls of a round the other side is asleep or on another processor.
        (0..500).try_for_each(|_| cuda.memory_info().map(drop))?;
        own.time(2000, || assert!(cuda.memory_info().is_ok(), "call failed in round {round}"));
        (0..500).for_each(|_| peer.turn());
        yardstick.time(2000, || peer.turn());
    }
    Ok(lower("call/sync", "us", 1e-3, &own, "ping-pong", &yardstick))
}

fn call_sync_vs_tcp(cuda: &Cuda) -> Result<Row> {
    let mut peer = Tcp::start()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        (0..500).try_for_each(|_| cuda.memory_info().map(drop))?;
        own.time(1000, || assert!(cuda.memory_info().is_ok(), "call failed"));
        (0..100).try_for_each(|_| peer.turn())?;
        yardstick.time(1000, || assert!(peer.turn().is_ok(), "the TCP peer is gone"));
    }
    Ok(lower("call/vs-tcp", "us", 1e-3, &own, "TCP loopback", &yardstick))
}

/// The caller's cost of a launch, a few at a time so that the queue never fills.
fn launch_cost(cuda: &Cuda) -> Result<Row> {
    let kernel = cuda.kernel(IMAGE, c"bench")?;
    cuda.launch(kernel, &mut [1, 2, 3])?;
    cuda.synchronise()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    let mut peer = PingPong::start()?;
    for _ in 0..ROUNDS {
        for _ in 0..50 {
            burst(cuda, kernel, 64, &mut own)?;
            cuda.synchronise()?;
        }
        let start = Instant::now();
        (0..LAUNCHES).for_each(|_| peer.turn());
        yardstick.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(LAUNCHES));
    }
    Ok(lower("call/post-launch", "us", 1e-3, &own, "ping-pong", &yardstick))
}

/// Launches per second, until the last is complete.
fn launch_rate(cuda: &Cuda) -> Result<Row> {
    let kernel = cuda.kernel(IMAGE, c"bench")?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    let mut peer = PingPong::start()?;
    let rate = |start: Instant| f64::from(LAUNCHES) / start.elapsed().as_secs_f64();
    for _ in 0..ROUNDS {
        cuda.synchronise()?;
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            cuda.launch(kernel, &mut [1, 2, 3])?;
        }
        cuda.synchronise()?;
        own.push(rate(start));
        let start = Instant::now();
        (0..LAUNCHES).for_each(|_| peer.turn());
        yardstick.push(rate(start));
    }
    Ok(higher("call/post-rate", "1/s", &own, "ping-pong", &yardstick))
}

fn burst(cuda: &Cuda, kernel: Kernel, launches: u32, cost: &mut Samples) -> Result<()> {
    let start = Instant::now();
    for _ in 0..launches {
        cuda.launch(kernel, &mut [1, 2, 3])?;
    }
    cost.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(launches));
    Ok(())
}

/// The time to load a module of 300 bytes, repeatedly; it is unloaded each time. A helper thread of the worker does both, so a
/// wake-up of a thread is the yardstick.
fn module_load(cuda: &Cuda) -> Result<Row> {
    const LOADS: usize = 200;
    let image = [IMAGE.to_bytes(), b"// ", &[b'-'; 175], b"\0"].concat();
    ensure!(image.len() == 300, "{} bytes", image.len());
    let image = core::ffi::CStr::from_bytes_with_nul(&image)?;
    let peer = Eventfds::start()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for round in 0..=ROUNDS {
        for _ in 0..LOADS {
            let start = Instant::now();
            let module = cuda.load_image(image)?;
            let elapsed = start.elapsed();
            cuda.unload(module)?;
            // The first loads open files and allocate memory of the driver.
            if round > 0 {
                own.push(elapsed.as_secs_f64() * 1e9);
            }
        }
        yardstick.time(LOADS, || assert!(peer.turn().is_ok(), "the peer is gone"));
    }
    Ok(lower("module/load", "us", 1e-3, &own, "eventfd wake", &yardstick))
}

/// Fills with bytes that no page deduplication or zero detection can shorten.
fn fill(bytes: &mut [u8], seed: u64) {
    let mut state = seed | 1;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

/// The kind of host memory for a row.
enum Host<'a> {
    Pageable(Vec<u8>),
    Pinned(Pinned<'a>),
}

impl Host<'_> {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Host::Pageable(bytes) => bytes,
            Host::Pinned(pinned) => pinned.bytes(),
        }
    }
}

fn copies(cuda: &Cuda, size: usize, pinned: bool, names: &[String; 2]) -> Result<Vec<Row>> {
    let device = cuda.allocate(size)?;
    let mut host = if pinned { Host::Pinned(cuda.pin(size)?) } else { Host::Pageable(vec![0; size]) };
    fill(host.bytes(), size as u64);
    let original = host.bytes().to_vec();
    let mut other = vec![1; size];
    // Small copies are repeated within a sample, large ones are few.
    let times = ((4 << 20) / size).clamp(1, 500);
    let [mut inwards, mut outwards, mut memcpy] = [(); 3].map(|()| Samples::default());
    let rounds = if size > 64 << 20 { 5 } else { ROUNDS };
    for _ in 0..rounds {
        inwards.time(times, || assert!(cuda.copy_in(device, host.bytes()).is_ok(), "copy failed"));
        memcpy.time(times, || other.copy_from_slice(std::hint::black_box(&original)));
        outwards.time(times, || assert!(cuda.copy_out(host.bytes(), device).is_ok(), "copy failed"));
        memcpy.time(times, || other.copy_from_slice(std::hint::black_box(&original)));
    }
    ensure!(host.bytes() == original, "{size} bytes came back changed");
    drop(host);
    cuda.free(device)?;
    let row = |name: &str, own: &Samples| {
        if size < 16 << 20 {
            return lower(name, "us", 1e-3, own, "memcpy", &memcpy);
        }
        let rate = |samples: &Samples| samples.rates(size);
        higher(name, "GB/s", &rate(own), "memcpy", &rate(&memcpy))
    };
    Ok(vec![row(&names[0], &inwards), row(&names[1], &outwards)])
}

/// The caller's cost of a launch for a sleeping worker: it rings the doorbell and does not wait.
fn doorbell_idle(cuda: &Cuda) -> Result<Row> {
    let kernel = cuda.kernel(IMAGE, c"bench")?;
    let peer = Eventfds::start()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS * 6 {
        cuda.synchronise()?;
        std::thread::sleep(Duration::from_millis(20));
        own.time(1, || assert!(cuda.launch(kernel, &mut [1, 2, 3]).is_ok(), "launch failed"));
        std::thread::sleep(Duration::from_millis(20));
        yardstick.time(1, || assert!(peer.turn().is_ok(), "the peer is gone"));
    }
    cuda.synchronise()?;
    Ok(lower("doorbell/idle", "us", 1e-3, &own, "eventfd wake", &yardstick))
}

/// A call to a sleeping worker, against a process woken by eventfd.
fn wake_idle(cuda: &Cuda) -> Result<Row> {
    let peer = Eventfds::start()?;
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS * 6 {
        std::thread::sleep(Duration::from_millis(20));
        own.time(1, || assert!(cuda.memory_info().is_ok(), "call failed"));
        std::thread::sleep(Duration::from_millis(20));
        yardstick.time(1, || assert!(peer.turn().is_ok(), "the peer is gone"));
    }
    Ok(lower("wake/idle", "us", 1e-3, &own, "eventfd wake", &yardstick))
}

/// The time of `cuInit` in a new process until it has a session, against the start of a process that does nothing.
fn session_start() -> Result<Row> {
    let (mut own, mut yardstick) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        let output = Command::new(std::env::current_exe()?).arg("start").stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "a new process could not start a session: {}", output.status);
        own.push(String::from_utf8_lossy(&output.stdout).trim().parse().context("nanoseconds")?);
        yardstick.time(1, || {
            assert!(Command::new("true").status().is_ok_and(|status| status.success()), "cannot start true")
        });
    }
    Ok(lower("session/start", "ms", 1e-6, &own, "process start", &yardstick))
}

/// The measured process of `session/start`.
pub(crate) fn print_session_start() -> Result<()> {
    let cuda = Cuda::load()?;
    let start = Instant::now();
    cuda.initialise()?;
    println!("{}", start.elapsed().as_nanos());
    Ok(())
}

/// The process whose launches a test counts: `cuLaunchKernel` is called so often, when all that a first launch needs is there. It ends
/// when its input ends.
pub(crate) fn launch(number: u32) -> Result<()> {
    let cuda = Cuda::load()?;
    cuda.initialise()?;
    cuda.use_device()?;
    let kernel = cuda.kernel(IMAGE, c"bench")?;
    for _ in 0..2 {
        cuda.launch_by_the_other_name(kernel, &mut [1, 2, 3])?;
    }
    cuda.synchronise()?;
    for _ in 0..number {
        cuda.launch(kernel, &mut [1, 2, 3])?;
    }
    cuda.synchronise()?;
    println!("launched");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context("waiting for the end of the input")?;
    Ok(())
}

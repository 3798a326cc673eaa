//! The rows of calls, launches, copies and wake-ups, one by one.

use crate::{
    cuda::{Cuda, IMAGE, KERNEL, Pinned},
    gaps,
    measure::{Rounds, Samples, is_wanted, warm_up},
    peer::{Eventfds, PingPong, Ring, Tcp},
    program, threads, waits,
};
use anyhow::{Context as _, Result, ensure};
use sluice_tests::performance::Measured;
use std::{
    ffi::CString,
    time::{Duration, Instant},
};

/// Number of rounds of row and yardstick.
const ROUNDS: usize = 15;
/// Number of launches in one round of a rate.
const LAUNCHES: u32 = 20_000;

/// Number of 64-bit words in the largest parameter: 4 KiB.
const MANY: usize = 512;

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(filter: &[String]) -> Result<Vec<Measured>> {
    type Measure = fn(&Cuda, &str) -> Result<Measured>;
    const SINGLE: [(&str, Measure); 12] = [
        ("call/sync", call_sync),
        ("call/vs-tcp", call_sync_vs_tcp),
        ("call/helper", call_helper),
        ("call/post-launch", launch_cost),
        ("call/launch-4KiB", large_launch),
        ("call/post-rate", launch_rate),
        ("call/cached/device-attribute", cached),
        ("call/cached/context", cached),
        ("call/cached/function", cached),
        ("call/stream-query", stream_query),
        ("module/load", module_load),
        ("doorbell/idle", doorbell_idle),
    ];
    let wanted = |name: &str| is_wanted(filter, name);
    let cuda = Cuda::on_device()?;
    let mut rows = Vec::new();
    for (name, measure) in SINGLE {
        if wanted(name) {
            rows.push(measure(&cuda, name)?);
        }
    }
    if wanted("wake/idle") {
        rows.push(wake_idle(&cuda, "wake/idle")?);
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
    rows.extend(gaps::measure_all(&cuda, filter)?);
    rows.extend(threads::measure_all(&cuda, filter)?);
    rows.extend(waits::measure_all(&cuda, filter)?);
    rows.extend(program::timed(&cuda, filter)?);
    Ok(rows)
}

fn text(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{}MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{}KiB", bytes >> 10),
        bytes => format!("{bytes}B"),
    }
}

/// Calls, against a ping-pong of two processes. In the first calls of a round the other side is asleep or on another processor.
fn against_ping_pong(name: &str, times: usize, call: impl Fn() -> Result<()>) -> Result<Measured> {
    let mut peer = PingPong::start()?;
    let own = |samples: &mut Samples| {
        (0..500).try_for_each(|_| call())?;
        samples.time(times, &call)
    };
    Rounds::take(ROUNDS, own, |samples| peer.turns(samples, times))?.row(name)
}

fn call_sync(cuda: &Cuda, name: &str) -> Result<Measured> {
    against_ping_pong(name, 2000, || cuda.memory_info().map(drop))
}

fn call_sync_vs_tcp(cuda: &Cuda, name: &str) -> Result<Measured> {
    let mut peer = Tcp::start()?;
    let own = |samples: &mut Samples| {
        (0..500).try_for_each(|_| cuda.memory_info().map(drop))?;
        samples.time(1000, || cuda.memory_info().map(drop))
    };
    let yardstick = |samples: &mut Samples| {
        (0..100).try_for_each(|_| peer.turn())?;
        samples.time(1000, || peer.turn())
    };
    Rounds::take(ROUNDS, own, yardstick)?.row(name)
}

fn call_helper(cuda: &Cuda, name: &str) -> Result<Measured> {
    let peer = Eventfds::start()?;
    let own = |samples: &mut Samples| {
        cuda.stack_limit()?;
        samples.time(200, || cuda.stack_limit().map(drop))
    };
    Rounds::take(ROUNDS, own, |samples| samples.time(200, || peer.turn()))?.row(name)
}

/// A query that the library answers.
fn cached(cuda: &Cuda, name: &str) -> Result<Measured> {
    /// Calls in a sample: one call is shorter than a reading of the clock.
    const TOGETHER: u32 = 100;
    let module = cuda.load_image(IMAGE)?;
    let call = || match name {
        "call/cached/device-attribute" => cuda.warp_size().map(drop),
        "call/cached/context" => cuda.current_context().map(drop),
        _ => cuda.kernel_of(module, KERNEL).map(drop),
    };
    call()?;
    let rounds = Rounds::alone(ROUNDS, |samples| samples.time_together(50, TOGETHER, call))?;
    cuda.unload(module)?;
    rounds.row(name)
}

fn stream_query(cuda: &Cuda, name: &str) -> Result<Measured> {
    let stream = cuda.stream()?;
    let row = against_ping_pong(name, 2000, || cuda.query_stream(stream))?;
    cuda.destroy_stream(stream)?;
    Ok(row)
}

/// The mean cost of a launch for the caller, 64 at a time so that the queue never fills.
fn burst(cuda: &Cuda, samples: &mut Samples, launch: impl Fn() -> Result<()>) -> Result<()> {
    samples.time_together(1, 64, launch)?;
    cuda.synchronise()
}

fn launch_cost(cuda: &Cuda, name: &str) -> Result<Measured> {
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    cuda.launch(kernel, &mut [1, 2, 3])?;
    cuda.synchronise()?;
    let mut peer = PingPong::start()?;
    let own = |samples: &mut Samples| {
        (0..50).try_for_each(|_| burst(cuda, samples, || cuda.launch(kernel, &mut [1, 2, 3])))
    };
    Rounds::take(ROUNDS, own, |samples| peer.turns(samples, 3200))?.row(name)
}

fn large_launch(cuda: &Cuda, name: &str) -> Result<Measured> {
    // The null driver takes the size of the parameter from the name.
    let kernel = cuda.kernel(IMAGE, c"large_b4096")?;
    let (from, mut to) = (vec![7u8; MANY * 8], vec![0u8; MANY * 8]);
    let own = |samples: &mut Samples| {
        // The queue has room for a few.
        for _ in 0..200 {
            samples.time(4, || cuda.launch(kernel, &mut [[7u64; MANY]]))?;
            cuda.synchronise()?;
        }
        Ok(())
    };
    let yardstick = |samples: &mut Samples| {
        samples.time(800, || {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
            Ok(())
        })
    };
    Rounds::take(ROUNDS, own, yardstick)?.row(name)
}

/// Launches per second, until the last is complete.
fn launch_rate(cuda: &Cuda, name: &str) -> Result<Measured> {
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    let mut peer = Ring::start()?;
    let rate = |elapsed: Duration| f64::from(LAUNCHES) / elapsed.as_secs_f64();
    let own = |samples: &mut Samples| {
        cuda.synchronise()?;
        let start = Instant::now();
        (0..LAUNCHES).try_for_each(|_| cuda.launch(kernel, &mut [1, 2, 3]))?;
        cuda.synchronise()?;
        samples.push(rate(start.elapsed()));
        Ok(())
    };
    let yardstick = |samples: &mut Samples| {
        samples.push(rate(peer.post(LAUNCHES)?));
        Ok(())
    };
    Rounds::take(ROUNDS, own, yardstick)?.row(name)
}

/// The time to load a module of 300 bytes, repeatedly; it is unloaded each time. A helper thread of the worker does both, so a
/// wake-up of a thread is the yardstick.
fn module_load(cuda: &Cuda, name: &str) -> Result<Measured> {
    const LOADS: usize = 200;
    let mut image = IMAGE.to_bytes().to_vec();
    image.extend(b"// ");
    image.resize(299, b'-');
    image.push(0);
    let image = core::ffi::CStr::from_bytes_with_nul(&image)?;
    // The first loads open files and allocate memory of the driver.
    (0..LOADS).try_for_each(|_| cuda.unload(cuda.load_image(image)?))?;
    let peer = Eventfds::start()?;
    let own = |samples: &mut Samples| {
        for _ in 0..LOADS {
            let mut module = 0;
            samples.time(1, || {
                module = cuda.load_image(image)?;
                Ok(())
            })?;
            cuda.unload(module)?;
        }
        Ok(())
    };
    Rounds::take(ROUNDS, own, |samples| samples.time(LOADS, || peer.turn()))?.row(name)
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

fn copies(cuda: &Cuda, size: usize, pinned: bool, names: &[String; 2]) -> Result<Vec<Measured>> {
    let device = cuda.allocate(size)?;
    let mut host = if pinned { Host::Pinned(cuda.pin(size)?) } else { Host::Pageable(vec![0; size]) };
    fill(host.bytes(), size as u64);
    let original = host.bytes().to_vec();
    let mut other = vec![1; size];
    // Small copies are repeated within a sample, large ones are few.
    let times = ((4 << 20) / size).clamp(1, 500);
    // A copy within the processor's cache is shorter than a reading of the clock.
    let together = u32::try_from((64 << 10) / size)?.clamp(1, 100);
    let mut memcpy = |samples: &mut Samples| {
        samples.time_together(times, together, || {
            other.copy_from_slice(std::hint::black_box(&original));
            std::hint::black_box(&other);
            Ok(())
        })
    };
    let number = if size > 64 << 20 { 5 } else { ROUNDS };
    let mut measure = |mut copy: Box<dyn FnMut() -> Result<()> + '_>| {
        let own = |samples: &mut Samples| {
            warm_up(&mut copy)?;
            samples.time(times, &mut copy)
        };
        let yardstick = |samples: &mut Samples| {
            memcpy(&mut Samples::default())?;
            memcpy(samples)
        };
        Rounds::take(number, own, yardstick)
    };
    let inwards = measure(Box::new(|| cuda.copy_in(device, host.bytes())))?;
    let outwards = measure(Box::new(|| cuda.copy_out(host.bytes(), device)))?;
    ensure!(host.bytes() == original, "{size} bytes came back changed");
    drop(host);
    cuda.free(device)?;
    let row = |name: &str, rounds: &Rounds| match size < 16 << 20 {
        true => rounds.row(name),
        false => rounds.map(|samples| samples.rates(size)).row(name),
    };
    Ok(vec![row(&names[0], &inwards)?, row(&names[1], &outwards)?])
}

/// Pause after which a worker sleeps.
const IDLE: Duration = Duration::from_millis(20);

/// Single samples, each after a pause, and a process woken by eventfd after the same pause.
fn after_pauses(name: &str, mut own: impl FnMut() -> Result<()>) -> Result<Measured> {
    let peer = Eventfds::start()?;
    let pauses = |samples: &mut Samples, body: &mut dyn FnMut() -> Result<()>| {
        for _ in 0..6 {
            std::thread::sleep(IDLE);
            samples.time(1, &mut *body)?;
        }
        Ok(())
    };
    Rounds::take(ROUNDS, |samples| pauses(samples, &mut own), |samples| pauses(samples, &mut || peer.turn()))?
        .row(name)
}

/// The caller's cost of a launch for a sleeping worker: it rings the doorbell and does not wait.
fn doorbell_idle(cuda: &Cuda, name: &str) -> Result<Measured> {
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    let row = after_pauses(name, || cuda.launch(kernel, &mut [1, 2, 3]))?;
    cuda.synchronise()?;
    Ok(row)
}

/// A call to a sleeping worker, against a process woken by eventfd.
fn wake_idle(cuda: &Cuda, name: &str) -> Result<Measured> {
    after_pauses(name, || cuda.memory_info().map(drop))
}

/// The process whose launches a test counts: `cuLaunchKernel` is called so often, when all that a first launch needs is there. It ends
/// when its input ends.
pub(crate) fn launch(number: u32) -> Result<()> {
    let cuda = Cuda::on_device()?;
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
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

/// Launches a kernel of the null driver whose failure comes late, and waits twice; then the same with a kernel that runs. Prints a line for
/// each call: its error, or "done".
pub(crate) fn launch_failing(name: &str) -> Result<()> {
    let cuda = Cuda::on_device()?;
    let failing = cuda.kernel(IMAGE, &CString::new(name)?)?;
    let good = cuda.kernel(IMAGE, KERNEL)?;
    let mut word = cuda.pin(8)?;
    word.bytes().fill(0);
    for kernel in [failing, good] {
        let launched = cuda.launch(kernel, &mut [word.address(), 2, 3]);
        // A kernel that waits for the word goes on.
        word.bytes().fill(1);
        for result in [launched, cuda.synchronise(), cuda.synchronise()] {
            println!("{}", result.map_or_else(|error| error.to_string(), |()| "done".to_owned()));
        }
    }
    Ok(())
}

//! Depth of the launch queue, copies that wait for kernels, and time slices between processes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::driver::HostSpan;
use crate::kernels::Image;
use crate::measure::{median, rounded};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::system::{Area, Flag, Pages};
use crate::worker::Command;

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "launch-queue-depth",
        question: "How many empty launches does a stream accept behind a running kernel before one blocks?",
        expected: "About 1,000.",
        consequence: "Credits per stream stay below it, so that the driver never blocks a worker's submitter.",
        seconds: 40,
        ask: queue_depth,
    },
    Question {
        name: "copies-behind-a-kernel",
        question: "From which size on does a synchronous copy of pageable memory wait for a kernel of its stream?",
        expected: "One of more than 64 KiB waits, a shorter one does not.",
        consequence: "A copy of up to 64 KiB returns once it is staged, and a longer one is complete then. Other answers change that size.",
        seconds: 20,
        ask: copies_behind_a_kernel,
    },
    Question {
        name: "time-slices",
        question: "How long are the time slices between two processes that both compute?",
        expected: "About 1 to 2 ms each, in equal shares.",
        consequence: "The overlap on overrun relies on them. If a long kernel is not preempted, latency beside it is its whole length.",
        seconds: 40,
        ask: slices,
    },
];

fn queue_depth(step: &Step) -> Answer {
    const BOUND: u32 = 5_000;
    let mut worker = step.worker()?;
    let spin = worker.function(Image::Work, c"spin")?;
    let empty = worker.function(Image::Work, c"empty")?;
    let flag = Flag::new();
    let cuda = worker.cuda();
    cuda.ask("cuMemHostRegister_v2", |driver| driver.host_register(flag.address(), flag.bytes()))?;
    let context = cuda.ask("cuDevicePrimaryCtxRetain", |driver| driver.primary_retain(worker.device, 0))?;
    let stream = cuda.ask("cuStreamCreateWithPriority", |driver| driver.cuStreamCreateWithPriority(1, 0))?;
    // The kernel ends by itself if this process fails to end it.
    worker.launch_on(stream, spin, [1, 1, 0], &[flag.address(), 15_000_000_000])?;
    let (accepted, ended) = (AtomicU32::new(0), AtomicBool::new(false));
    let (blocked, launched) = thread::scope(|scope| {
        let launches = scope.spawn(|| -> Answer {
            let result = cuda.ask("cuCtxSetCurrent", |driver| driver.set_current(context)).and_then(|()| {
                (0..BOUND).try_for_each(|_| {
                    worker.launch_on(stream, empty, [1, 1, 0], &[])?;
                    accepted.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
            });
            ended.store(true, Ordering::Release);
            result
        });
        let blocked = stalls(&accepted, &ended);
        flag.raise();
        let joined = launches.join().unwrap_or_else(|_| Err(Stop::failed("the launching thread panicked")));
        (blocked, joined)
    });
    step.note("bound", BOUND)?;
    step.note("accepted_before_block", blocked)?;
    step.note("blocks", blocked < BOUND)?;
    launched?;
    cuda.ask("cuStreamSynchronize", |driver| driver.cuStreamSynchronize(stream))?;
    step.note("all_complete", accepted.load(Ordering::Relaxed) == BOUND)
}

/// Waits until no launch was accepted for a second, or all were, or ten seconds are over. Returns the number by then.
fn stalls(accepted: &AtomicU32, ended: &AtomicBool) -> u32 {
    let start = Instant::now();
    let (mut count, mut since) = (0, start);
    while !ended.load(Ordering::Acquire) && start.elapsed() < Duration::from_secs(10) {
        let now = accepted.load(Ordering::Relaxed);
        if now != count {
            (count, since) = (now, Instant::now());
        } else if since.elapsed() > Duration::from_secs(1) {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    accepted.load(Ordering::Relaxed)
}

fn copies_behind_a_kernel(step: &Step) -> Answer {
    const NANOSECONDS: u64 = 200_000_000;
    let mut worker = step.worker()?;
    let spin = worker.function(Image::Work, c"spin")?;
    let cuda = worker.cuda();
    // The kernel ends by its limit.
    let never = worker.zeroed(4)?;
    for kibibytes in [4_usize, 64, 68, 1024] {
        let area = Area::pages(kibibytes << 10, Pages::Small)?;
        let device = cuda.allocate(kibibytes << 10)?;
        // The first copy touches the pages, and the first launch loads the kernel.
        cuda.copy_in(device, HostSpan::from(&area))?;
        worker.launch(spin, [1, 1, 0], &[never, 1])?;
        cuda.synchronize()?;
        worker.launch(spin, [1, 1, 0], &[never, NANOSECONDS])?;
        let start = Instant::now();
        cuda.copy_in(device, HostSpan::from(&area))?;
        step.note(
            &format!("waits_with_{kibibytes}_kib"),
            start.elapsed() > Duration::from_nanos(NANOSECONDS / 2),
        )?;
        cuda.synchronize()?;
    }
    Ok(())
}

fn slices(step: &Step) -> Answer {
    const MILLISECONDS: u64 = 1_000;
    let peers = [step.peer()?, step.peer()?];
    for peer in &peers {
        peer.ask(Command::Start)?;
        // The first run loads the module.
        peer.ask(Command::Sample { milliseconds: 1 })?;
    }
    let alone = [peers[0].ask(Command::Sample { milliseconds: 300 })?];
    for peer in &peers {
        peer.tell(Command::Sample { milliseconds: MILLISECONDS })?;
    }
    let both = [peers[0].answer()?.0, peers[1].answer()?.0];
    for (key, samples) in [("alone", alone.iter()), ("first", both[..1].iter()), ("second", both[1..].iter())]
    {
        for sample in samples {
            let numbers: Vec<u64> = serde_json::from_value(sample.clone())?;
            step.note(key, times(&numbers))?;
        }
    }
    Ok(())
}

/// Runs and pauses of a kernel from its samples: number of pauses, first and last look, pairs of a pause's start and end.
fn times(samples: &[u64]) -> serde_json::Value {
    let [seen, first, last, pairs @ ..] = samples else { return json!("no samples") };
    let mut runs = Vec::new();
    let mut pauses = Vec::new();
    let mut from = *first;
    let milliseconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    for pair in pairs.as_chunks::<2>().0.iter().take_while(|pair| pair[0] != 0) {
        runs.push(milliseconds(from, pair[0]));
        pauses.push(milliseconds(pair[0], pair[1]));
        from = pair[1];
    }
    // If there was no room for all pauses, the figures end with the last one that was written down.
    let last = if *seen > pauses.len() as u64 { from } else { *last };
    runs.push(milliseconds(from, last));
    let total = milliseconds(*first, last);
    let ran: f64 = runs.iter().sum();
    let longest = pauses.iter().copied().fold(0.0, f64::max);
    json!({
        "first_ns": first, "last_ns": last, "pauses": seen,
        "share": if total > 0.0 { rounded(ran / total) } else { 0.0 },
        "run_ms_median": rounded(median(&mut runs)),
        "pause_ms_median": rounded(median(&mut pauses)), "pause_ms_longest": rounded(longest),
    })
}

#[cfg(test)]
mod tests {
    use super::times;

    #[test]
    fn pauses_are_taken_out_of_the_share() {
        let million = 1_000_000;
        let samples = [1, 100 * million, 104 * million, 101 * million, 103 * million, 0, 0];
        let times = times(&samples);
        assert_eq!(times["share"], 0.5);
        assert_eq!(times["pause_ms_median"], 2.0);
        assert_eq!(times["run_ms_median"], 1.0);
    }
}

//! The phase `bench`: the cost of calls natively and through Sluice, in turns, so that other load of the machine hits both.
//!
//! The runner calls its steps as any other. Each keeps a process on the driver and one in a VM, and asks them for measurements one after
//! the other. The arbiter leaves a part of the GPU's memory to the process beside it.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::host::{Host, Side, vm};
use crate::kernels::Image;
use crate::measure::{milliseconds, rounded};
use crate::nvml::Nvml;
use crate::rows::{self, Aim, Row, number};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::worker::{Command, Peer};

/// Name of the phase.
pub(crate) const PHASE: &str = "bench";

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "bench-launches",
        question: "What does a launch cost its caller, alone and with its end, and how many complete per second?",
        expected: "The launch costs less than natively; with its end it costs some microseconds more; the rate is as natively.",
        consequence: "Many small kernels are the worst case of every framework. A slow launch is a slow guest.",
        seconds: 60,
        ask: launches,
    },
    Question {
        name: "bench-calls",
        question: "What does a call cost that the worker answers?",
        expected: "As much as natively, or less: two messages through shared memory.",
        consequence: "Frameworks ask for free memory and properties often.",
        seconds: 45,
        ask: calls,
    },
    Question {
        name: "bench-copies",
        question: "How fast are copies from and to pinned and pageable memory, against the PCIe link?",
        expected: "Pinned as natively, because the driver reads guest memory in place; pageable half as fast or faster.",
        consequence: "A slow copy of pinned memory is one that takes a way through another buffer.",
        seconds: 90,
        ask: copies,
    },
    Question {
        name: "bench-memory",
        question: "What do allocations and frees cost, by size?",
        expected: "Small ones as natively; large ones take chunks of the arbiter, some milliseconds for 512 MiB.",
        consequence: "The number of chunks that workers keep follows from it.",
        seconds: 75,
        ask: memory,
    },
    Question {
        name: "bench-start",
        question: "How long does a program take from its start to its context, and to its first kernel?",
        expected: "As natively, and some milliseconds for the worker.",
        consequence: "Short programs pay it each time.",
        seconds: 75,
        ask: start,
    },
];

/// A process on each side.
struct Pair {
    host: Host,
    native: Peer,
    remoted: Peer,
}

/// Parts of the GPU's memory of which the arbiter leaves one to the process beside it: enough for a context, for copies, and for
/// allocations. The arbiter clears that part, too, whenever a worker ends.
const CONTEXT: u64 = 64;
const COPY: u64 = 6;
const ALLOCATION: u64 = 3;
/// Longest time for which the arbiter has the memory of the process beside it, while it clears that.
const CLEARING: Duration = Duration::from_secs(20);

impl Pair {
    /// Starts both; the process beside Sluice has one of so many parts of the memory.
    fn start(step: &Step, parts: u64) -> Answer<Pair> {
        let peer = step.peer()?;
        let settings = format!("reserve = \"{}MiB\"\n", (peer.number(Command::Total)? / parts) >> 20);
        peer.end()?;
        let host = Host::start_with(step, &[vm()], &[], &settings)?;
        let (native, remoted) = (host.peer(None)?, host.peer(Some(1))?);
        let pair = Pair { host, native, remoted };
        for side in Side::BOTH {
            pair.ask(side, Command::Start)?;
        }
        Ok(pair)
    }

    /// Asks one side.
    fn ask(&self, side: Side, command: Command) -> Answer<Value> {
        with_memory(side, || self.peer(side).ask(command))
    }

    const fn peer(&self, side: Side) -> &Peer {
        match side {
            Side::Native => &self.native,
            Side::Remoted => &self.remoted,
        }
    }

    /// The figures of some keys by side, of so many rounds. The first round, which touches pages and loads code, does not count.
    fn rounds<const KEYS: usize>(
        &self,
        rounds: u32,
        command: Command,
        keys: [&str; KEYS],
    ) -> Answer<[[Vec<f64>; 2]; KEYS]> {
        let mut figures = [(); KEYS].map(|()| [Vec::new(), Vec::new()]);
        for round in 0..=rounds {
            for (place, side) in Side::BOTH.into_iter().enumerate() {
                let answer = self.ask(side, command)?;
                if round > 0 {
                    add(&mut figures, place, &answer, keys)?;
                }
            }
        }
        Ok(figures)
    }

    fn stop(self) -> Answer {
        self.native.end()?;
        self.remoted.end()?;
        self.host.stop()
    }
}

/// Measures on one side. The process beside Sluice tries again while the arbiter clears the memory that is left to it.
fn with_memory<T>(side: Side, mut measure: impl FnMut() -> Answer<T>) -> Answer<T> {
    const PAUSE: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    loop {
        match (side, measure()) {
            (Side::Native, Err(Stop::Refused { code: Some(code), .. }))
                if code == "CUDA_ERROR_OUT_OF_MEMORY" && begun.elapsed() < CLEARING =>
            {
                thread::sleep(PAUSE);
            }
            (_, answer) => return answer,
        }
    }
}

fn add<const KEYS: usize>(
    figures: &mut [[Vec<f64>; 2]; KEYS],
    side: usize,
    answer: &Value,
    keys: [&str; KEYS],
) -> Answer {
    for (figures, key) in figures.iter_mut().zip(keys) {
        figures[side].push(number(answer, key)?);
    }
    Ok(())
}

fn launches(step: &Step) -> Answer {
    let pair = Pair::start(step, CONTEXT)?;
    let command = Command::Launches { times: step.rounds(20_000, 4_000) };
    let keys = ["launch_us", "launch_and_wait_us", "launches_per_second"];
    let [cost, end, rate] = pair.rounds(step.rounds(9, 3), command, keys)?;
    let rows = [
        // The aim of docs/performance.md.
        Row::new("launch", "us", &cost[0], &cost[1], Aim::Remoted(0.0, 0.5)),
        Row::new("launch and wait for its end", "us", &end[0], &end[1], Aim::None),
        Row::new("launches until the last is complete", "1/s", &rate[0], &rate[1], Aim::RatioAtLeast(0.9)),
    ];
    rows::note(step, &rows)?;
    pair.stop()
}

fn calls(step: &Step) -> Answer {
    let pair = Pair::start(step, CONTEXT)?;
    let rounds = step.rounds(9, 3);
    let [median, p99] = pair.rounds(rounds, Command::Calls { times: 2_000 }, ["us", "p99_us"])?;
    let [load] = pair.rounds(rounds, Command::Loads { times: 10 }, ["load_us"])?;
    let rows = [
        Row::new("cuMemGetInfo", "us", &median[0], &median[1], Aim::None),
        Row::new("cuMemGetInfo, p99", "us", &p99[0], &p99[1], Aim::None),
        Row::new("load of a small module", "us", &load[0], &load[1], Aim::None),
    ];
    rows::note(step, &rows)?;
    pair.stop()
}

/// Sizes of copies with their words.
const COPIES: [(&str, u64); 5] = [
    ("4 KiB", 4 << 10),
    ("64 KiB", 64 << 10),
    ("1 MiB", 1 << 20),
    ("16 MiB", 16 << 20),
    ("256 MiB", 256 << 20),
];
/// From this size on, copies are shown as rates.
const RATES: u64 = 16 << 20;

fn copies(step: &Step) -> Answer {
    let link = Nvml::open(step.libraries().nvml.as_deref()).and_then(|nvml| nvml.pcie());
    let limit = link.as_ref().ok().and_then(|(generation, lanes)| link_rate(*generation, *lanes));
    let words = |(generation, lanes)| json!({ "generation": generation, "lanes": lanes, "gigabytes_per_second": limit });
    step.note_result("pcie", link.map(words))?;
    let pair = Pair::start(step, COPY)?;
    let mut rows = Vec::new();
    for (word, bytes) in COPIES {
        for pinned in [true, false] {
            let times = u32::try_from((64 << 20) / bytes).unwrap_or(1).clamp(2, 200);
            let command = Command::Copies { bytes, pinned, times };
            let directions = pair.rounds(step.rounds(5, 1), command, ["in_us", "out_us"])?;
            for (direction, times) in ["to", "from"].into_iter().zip(directions) {
                let kind = if pinned { "pinned" } else { "pageable" };
                let name = format!("copy {direction} the device, {kind}, {word}");
                rows.push(row_of_copy(name, bytes, pinned, &times));
            }
        }
        rows::note(step, &rows)?;
    }
    if let Some(limit) = limit {
        // The part of the link that the largest copies of pinned memory use, natively and remoted.
        let largest = rows.iter().filter(|row| row.name().contains("pinned, 256 MiB"));
        let parts: Vec<_> = largest
            .map(|row| json!({ "row": row.name(), "parts": row.figures().map(|figure| figure.map(|rate| rounded(rate / limit))) }))
            .collect();
        step.note("part_of_link", parts)?;
    }
    pair.stop()
}

/// A row of times by side, in microseconds: of rates if the copy is large.
fn row_of_copy(name: String, bytes: u64, pinned: bool, times: &[Vec<f64>; 2]) -> Row {
    if bytes < RATES {
        return Row::new(name, "us", &times[0], &times[1], Aim::None);
    }
    let rates =
        times.each_ref().map(|times| times.iter().map(|us| bytes as f64 / us / 1e3).collect::<Vec<_>>());
    // The aims of docs/performance.md.
    let aim = Aim::RatioAtLeast(if pinned { 0.95 } else { 0.45 });
    Row::new(name, "GB/s", &rates[0], &rates[1], aim)
}

/// Gigabytes per second of a PCIe link, after its encoding.
fn link_rate(generation: u32, lanes: u32) -> Option<f64> {
    let of_lane = match generation {
        1 => 0.25,
        2 => 0.5,
        3 => 0.985,
        4 => 1.969,
        5 => 3.938,
        6 => 7.563,
        _ => return None,
    };
    Some(rounded(of_lane * f64::from(lanes)))
}

fn memory(step: &Step) -> Answer {
    const SIZES: [(&str, u64); 5] = [
        ("1 KiB", 1 << 10),
        ("1 MiB", 1 << 20),
        ("2 MiB", 2 << 20),
        ("32 MiB", 32 << 20),
        ("512 MiB", 512 << 20),
    ];
    let pair = Pair::start(step, ALLOCATION)?;
    let mut rows = Vec::new();
    for (word, bytes) in SIZES {
        let times = u32::try_from((64 << 20) / bytes).unwrap_or(u32::MAX).clamp(4, 200);
        let command = Command::Allocations { bytes, times };
        let [allocate, free] = pair.rounds(step.rounds(5, 1), command, ["allocate_us", "free_us"])?;
        rows.push(Row::new(format!("allocate {word}"), "us", &allocate[0], &allocate[1], Aim::None));
        rows.push(Row::new(format!("free {word}"), "us", &free[0], &free[1], Aim::None));
        rows::note(step, &rows)?;
    }
    pair.stop()
}

fn start(step: &Step) -> Answer {
    let pair = Pair::start(step, CONTEXT)?;
    let [mut context, mut kernel] = [(); 2].map(|()| [Vec::new(), Vec::new()]);
    for _ in 0..step.rounds(9, 3) {
        for (place, side) in Side::BOTH.into_iter().enumerate() {
            let [to_context, to_kernel] = with_memory(side, || {
                let begun = Instant::now();
                let peer = pair.host.peer((side == Side::Remoted).then_some(1))?;
                peer.ask(Command::Start)?;
                let to_context = milliseconds(begun.elapsed());
                peer.ask(Command::Load { image: Image::Small })?;
                let to_kernel = milliseconds(begun.elapsed());
                peer.end()?;
                Ok([to_context, to_kernel])
            })?;
            context[place].push(to_context);
            kernel[place].push(to_kernel);
        }
    }
    let rows = [
        Row::new("start of a process to its context", "ms", &context[0], &context[1], Aim::None),
        Row::new(
            "start of a process to the end of its first kernel",
            "ms",
            &kernel[0],
            &kernel[1],
            Aim::None,
        ),
    ];
    rows::note(step, &rows)?;
    pair.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_has_the_rate_of_its_generation_and_lanes() {
        assert_eq!(link_rate(5, 16), Some(63.01));
        assert_eq!(link_rate(3, 8), Some(7.88));
        assert_eq!(link_rate(9, 16), None);
    }

    #[test]
    fn large_copies_are_rates() {
        let times = [vec![1e4], vec![2e4]];
        let row = row_of_copy("a".into(), 256 << 20, true, &times);
        assert_eq!(row.figures(), [Some(26.84), Some(13.42)]);
        assert_eq!(row_of_copy("a".into(), 4096, true, &times).figures(), [Some(1e4), Some(2e4)]);
    }
}

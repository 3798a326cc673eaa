//! The phase `time`: programs that always have more work, beside each other on one GPU: as processes of the driver, and as VMs of Sluice.
//!
//! The runner calls its steps as any other. Kernels are measured by their work and not by the clock: while another process has its turn,
//! the clock goes on. Natively and through Sluice are measured one after the other, because the arbiter holds all memory.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use sluice_api::v1::{TimeShareRequest, VmRequest};

use crate::host::{Host, vm};
use crate::measure::{median, rounded};
use crate::rows::{self, Aim, Row, number};
use crate::running::Running;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::worker::{Command, Peer};

/// Name of the phase.
pub(crate) const PHASE: &str = "time";

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "time-shares",
        question: "Do two programs that always have more work get their shares, and is time lost?",
        expected: "Natively and with equal weights half each; with weights 1 and 3 one and three quarters; together as much as one alone.",
        consequence: "If the weights are not followed, the driver's slices decide; if time is lost, turns must be longer.",
        seconds: 90,
        ask: shares,
    },
    Question {
        name: "time-latency",
        question: "How long does an empty kernel take beside a program whose kernels take 200 ms?",
        expected: "A few slices of the driver, not the length of the kernel, natively and through Sluice.",
        consequence: "If it is the kernel's length, the driver does not take a kernel back, and only an instance of its own bounds the latency.",
        seconds: 75,
        ask: latency,
    },
    Question {
        name: "time-cap",
        question: "Does a VM with a cap of a quarter keep to it when no other VM wants the time?",
        expected: "At most 0.35 of the time is charged, and about a quarter of the kernels are run.",
        consequence: "If it has more, caps cannot be sold on this driver.",
        seconds: 60,
        ask: cap,
    },
    Question {
        name: "time-many-programs",
        question: "Does a VM with eight programs get more of the GPU than a VM with one?",
        expected: "Natively eight processes get eight times as much as one; through Sluice both VMs are charged the same.",
        consequence: "If it gets more, a tenant gains by starting processes.",
        seconds: 75,
        ask: many,
    },
];

/// Steps that a short run leaves out.
pub(crate) const LONG: &[&str] = &["time-cap", "time-many-programs"];

/// Kernels in flight of a program that always has more work.
const DEPTH: &str = "8";
/// Duration of its kernels alone, in milliseconds.
const KERNEL: f64 = 1.5;
/// Duration of long kernels alone, in milliseconds.
const LONG_KERNEL: f64 = 200.0;
/// The software GPU gives each process one thread, so that kernels of two processes compete; other drivers do not know the variable.
const VARIABLES: [(&str, &str); 1] = [("SLUICE_SOFTGPU_THREADS", "1")];

/// Duration of a measurement: some hundred kernels, and many times the interval at which the program prints their number.
const WINDOW: Duration = Duration::from_millis(800);

/// Number of measurements.
fn repeats(step: &Step) -> u32 {
    step.rounds(2, 1)
}

/// A host for these VMs.
fn host(step: &Step, shares: &[TimeShareRequest]) -> Answer<Host> {
    let vms: Vec<VmRequest> = shares.iter().map(|time| VmRequest { time: *time, ..vm() }).collect();
    Host::start_with(step, &vms, &VARIABLES, "")
}

/// A program that always has more work, with kernels of so many rounds.
fn busy(host: &Host, vm: Option<u32>, rounds: u64, depth: &str) -> Answer<Running> {
    let mut programs = many_busy(host, &[vm], rounds, depth)?;
    programs.pop().ok_or_else(|| Stop::failed("no program"))
}

/// As [`busy`], one program for each of these VMs. They start together, because the start of a driver takes its time.
fn many_busy(host: &Host, vms: &[Option<u32>], rounds: u64, depth: &str) -> Answer<Vec<Running>> {
    let start = |vm: &Option<u32>| host.spawn_with(*vm, "busy", &[&rounds.to_string(), depth], &VARIABLES);
    let programs = vms.iter().map(start).collect::<Answer<Vec<_>>>()?;
    programs.iter().try_for_each(|program| program.line(&["done "]).map(drop))?;
    Ok(programs)
}

/// Kernels that a program completed; at first it counts those that it does not wait for, below 0.
fn done(program: &Running) -> Answer<u64> {
    let text = program.last("done ").ok_or_else(|| Stop::failed("the program does not compute"))?;
    Ok(text.parse::<i64>().unwrap_or(0).max(0).unsigned_abs())
}

/// Kernels that programs complete meanwhile.
fn progress(programs: &[&Running], time: Duration) -> Answer<Vec<f64>> {
    let read = || programs.iter().map(|program| done(program)).collect::<Answer<Vec<u64>>>();
    let before = read()?;
    thread::sleep(time);
    Ok(read()?.into_iter().zip(before).map(|(after, before)| after.saturating_sub(before) as f64).collect())
}

/// Rounds of a kernel that takes a time alone, by a measurement on the driver.
fn calibrated(step: &Step, milliseconds: f64) -> Answer<u64> {
    let host = Host::without_daemon(step)?;
    let mut rounds = 50_000;
    // The first measurement may be of kernels so short that their launches take longer.
    for _ in 0..2 {
        let program = busy(&host, None, rounds, DEPTH)?;
        let time = Duration::from_millis(300);
        let kernels = progress(&[&program], time)?.iter().sum::<f64>().max(1.0);
        rounds = scaled(rounds, KERNEL, time.as_secs_f64() * 1e3 / kernels);
    }
    let rounds = scaled(rounds, milliseconds, KERNEL);
    step.note("rounds_of_a_kernel", rounds)?;
    Ok(rounds)
}

/// The rounds for a wanted time if `rounds` take `took`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of rounds, which is clamped"
)]
fn scaled(rounds: u64, wanted: f64, took: f64) -> u64 {
    ((rounds as f64 * wanted / took) as u64).clamp(1_000, u64::from(u32::MAX))
}

/// Progress of two VMs and the seconds that they are charged meanwhile, and the time of the measurement.
struct Measured {
    kernels: Vec<f64>,
    charged: [f64; 2],
    seconds: f64,
}

fn measured(host: &Host, programs: &[&Running], time: Duration) -> Answer<Measured> {
    let charged = || Ok::<_, Stop>([host.charged_seconds(1)?, host.charged_seconds(2)?]);
    let (before, start) = (charged()?, Instant::now());
    let kernels = progress(programs, time)?;
    let after = charged()?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Measured { kernels, charged: [after[0] - before[0], after[1] - before[1]], seconds })
}

fn weight(weight: u32) -> TimeShareRequest {
    TimeShareRequest { weight: Some(weight), ..TimeShareRequest::default() }
}

fn shares(step: &Step) -> Answer {
    let rounds = calibrated(step, KERNEL)?;
    let mut figures = Figures::default();
    {
        let host = Host::without_daemon(step)?;
        let one = busy(&host, None, rounds, DEPTH)?;
        for _ in 0..repeats(step) {
            figures.native_rate.push(progress(&[&one], WINDOW)?[0]);
        }
        let two = busy(&host, None, rounds, DEPTH)?;
        for _ in 0..repeats(step) {
            figures.native(&progress(&[&one, &two], WINDOW)?);
        }
    }
    for weights in [[100, 100], [100, 300]] {
        let is_weighted = weights[1] == 300;
        let host = host(step, &weights.map(weight))?;
        let one = busy(&host, Some(1), rounds, DEPTH)?;
        for _ in 0..if is_weighted { 0 } else { repeats(step) } {
            figures.rate.push(progress(&[&one], WINDOW)?[0]);
        }
        let two = busy(&host, Some(2), rounds, DEPTH)?;
        for _ in 0..repeats(step) {
            figures.remoted(is_weighted, &measured(&host, &[&one, &two], WINDOW)?);
        }
        rows::note(step, &figures.rows())?;
        drop((one, two));
        host.stop()?;
    }
    Ok(())
}

/// Figures of `time-shares` by round.
#[derive(Debug, Default)]
struct Figures {
    native_share: Vec<f64>,
    native_throughput: Vec<f64>,
    native_rate: Vec<f64>,
    rate: Vec<f64>,
    share: Vec<f64>,
    throughput: Vec<f64>,
    charged: Vec<f64>,
    weighted_charge: Vec<f64>,
    weighted_kernels: Vec<f64>,
}

impl Figures {
    /// Two programs beside each other, after one alone.
    fn native(&mut self, both: &[f64]) {
        let [first, second] = both else { return };
        self.native_share.push(first / (first + second).max(1.0));
        self.native_throughput.push((first + second) / median(&mut self.native_rate).max(1.0));
    }

    fn remoted(&mut self, is_weighted: bool, both: &Measured) {
        let [first, second] = both.kernels[..] else { return };
        let [charged, other] = both.charged;
        if is_weighted {
            self.weighted_charge.push(other / charged.max(1e-9));
            self.weighted_kernels.push(second / first.max(1.0));
            return;
        }
        self.share.push(first / (first + second).max(1.0));
        self.throughput.push((first + second) / median(&mut self.rate).max(1.0));
        self.charged.push((charged + other) / both.seconds);
    }

    fn rows(&self) -> Vec<Row> {
        vec![
            Row::new("kernels alone", "per window", &self.native_rate, &self.rate, Aim::RatioAtLeast(0.9)),
            Row::new(
                "share of the first of two equal ones",
                "of the kernels",
                &self.native_share,
                &self.share,
                Aim::Remoted(0.4, 0.6),
            ),
            Row::new(
                "kernels together by alone",
                "",
                &self.native_throughput,
                &self.throughput,
                Aim::Remoted(0.9, 1.25),
            ),
            Row::new("charged together", "of the time", &[], &self.charged, Aim::Remoted(0.7, 1.2)),
            Row::new(
                "charge of weight 3 by weight 1",
                "",
                &[],
                &self.weighted_charge,
                Aim::Remoted(2.0, 4.5),
            ),
            Row::new(
                "kernels of weight 3 by weight 1",
                "",
                &[],
                &self.weighted_kernels,
                Aim::Remoted(2.0, 4.5),
            ),
        ]
    }
}

/// Latencies of an empty kernel in a process: alone, and beside long kernels.
fn latencies(
    step: &Step,
    prober: &Peer,
    neighbour: impl FnOnce() -> Answer<Running>,
) -> Answer<[serde_json::Value; 2]> {
    let milliseconds = step.rounds(1_200, 800).into();
    // The first measurement loads the code.
    prober.ask(Command::Latency { milliseconds: 50 })?;
    let alone = prober.ask(Command::Latency { milliseconds })?;
    let _neighbour = neighbour()?;
    Ok([alone, prober.ask(Command::Latency { milliseconds })?])
}

fn latency(step: &Step) -> Answer {
    let rounds = calibrated(step, LONG_KERNEL)?;
    let native = {
        let host = Host::without_daemon(step)?;
        let prober = host.peer(None)?;
        latencies(step, &prober, || busy(&host, None, rounds, "2"))?
    };
    step.note("native", json!({ "alone": native[0], "beside": native[1] }))?;
    let host = host(step, &[weight(100), weight(100)])?;
    let prober = host.peer(Some(2))?;
    let remoted = latencies(step, &prober, || busy(&host, Some(1), rounds, "2"))?;
    step.note("remoted", json!({ "alone": remoted[0], "beside": remoted[1] }))?;
    let mut rows = Vec::new();
    for (place, word) in ["alone", "beside kernels of 200 ms"].into_iter().enumerate() {
        for (key, name) in [("median_ms", "median"), ("p99_ms", "p99"), ("largest_ms", "longest")] {
            let [native, remoted] = [&native, &remoted].map(|side| number(&side[place], key));
            // The bound that the simulation of turns and slices keeps.
            let aim = if (place, key) == (1, "p99_ms") { Aim::Remoted(0.0, 10.0) } else { Aim::None };
            rows.push(Row::new(
                format!("{name} of an empty kernel {word}"),
                "ms",
                &[native?],
                &[remoted?],
                aim,
            ));
        }
    }
    rows::note(step, &rows)?;
    prober.end()?;
    host.stop()
}

fn cap(step: &Step) -> Answer {
    let rounds = calibrated(step, KERNEL)?;
    let capped = TimeShareRequest { cap_permille: Some(250), ..TimeShareRequest::default() };
    let host = host(step, &[capped, weight(100)])?;
    let (mut charged, mut kernels) = (Vec::new(), Vec::new());
    let whole = {
        let free = busy(&host, Some(2), rounds, DEPTH)?;
        progress(&[&free], 2 * WINDOW)?[0]
    };
    let program = busy(&host, Some(1), rounds, DEPTH)?;
    for _ in 0..repeats(step) {
        let part = measured(&host, &[&program], 2 * WINDOW)?;
        charged.push(part.charged[0] / part.seconds);
        kernels.push(part.kernels[0] / whole.max(1.0));
    }
    let rows = [
        Row::new("charged under a cap of a quarter", "of the time", &[], &charged, Aim::Remoted(0.0, 0.35)),
        Row::new("kernels under it by those without", "", &[], &kernels, Aim::Remoted(0.0, 0.5)),
    ];
    rows::note(step, &rows)?;
    drop(program);
    host.stop()
}

fn many(step: &Step) -> Answer {
    const MANY: usize = 8;
    let rounds = calibrated(step, KERNEL)?;
    let compare = |host: &Host, vms: [Option<u32>; 2]| -> Answer<Vec<Running>> {
        let places: Vec<_> = [vms[0]].into_iter().chain([vms[1]; MANY]).collect();
        many_busy(host, &places, rounds, DEPTH)
    };
    let by_one = |kernels: &[f64]| kernels.iter().skip(1).sum::<f64>() / kernels[0].max(1.0);
    let mut native = Vec::new();
    {
        let host = Host::without_daemon(step)?;
        let programs = compare(&host, [None, None])?;
        for _ in 0..repeats(step) {
            native.push(by_one(&progress(&programs.iter().collect::<Vec<_>>(), WINDOW)?));
        }
    }
    let host = host(step, &[weight(100), weight(100)])?;
    let programs = compare(&host, [Some(1), Some(2)])?;
    let (mut remoted, mut charges) = (Vec::new(), Vec::new());
    for _ in 0..repeats(step) {
        let measured = measured(&host, &programs.iter().collect::<Vec<_>>(), WINDOW)?;
        remoted.push(by_one(&measured.kernels));
        charges.push(measured.charged[1] / measured.charged[0].max(1e-9));
    }
    step.note("charges", charges.iter().map(|charge| rounded(*charge)).collect::<Vec<_>>())?;
    let rows = [
        Row::new(
            "charge of eight programs by that of one",
            "",
            &[],
            &[median(&mut charges)],
            Aim::Remoted(0.5, 2.0),
        ),
        Row::new("kernels of eight programs by those of one", "", &native, &remoted, Aim::Remoted(0.0, 7.0)),
    ];
    rows::note(step, &rows)?;
    drop(programs);
    host.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_the_measured_time() {
        assert_eq!(scaled(50_000, 1.5, 3.0), 25_000);
        assert_eq!(scaled(50_000, 200.0, 1.5), 6_666_666);
        assert_eq!(scaled(50_000, 1.5, 1e9), 1_000);
        assert_eq!(scaled(u64::from(u32::MAX), 200.0, 1.5), u64::from(u32::MAX));
    }

    #[test]
    fn shares_and_throughput_are_of_the_kernels() {
        let mut figures = Figures::default();
        figures.native_rate.push(400.0);
        figures.native(&[100.0, 300.0]);
        let measured = |kernels: Vec<f64>, charged| Measured { kernels, charged, seconds: 2.0 };
        figures.rate.push(400.0);
        figures.remoted(false, &measured(vec![200.0, 200.0], [1.0, 0.9]));
        figures.remoted(true, &measured(vec![100.0, 300.0], [0.5, 1.5]));
        assert_eq!((figures.native_share[0], figures.native_throughput[0]), (0.25, 1.0));
        assert_eq!((figures.share[0], figures.throughput[0], figures.charged[0]), (0.5, 1.0, 0.95));
        assert_eq!((figures.weighted_charge[0], figures.weighted_kernels[0]), (3.0, 3.0));
    }
}

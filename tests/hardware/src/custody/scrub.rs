//! The rate at which custody clears memory.

use std::time::{Duration, Instant};

use serde_json::json;
use sluice_arbiter::unit::{OpenUnit, Piece};
use sluice_messages::control::Verify;

use super::{FIRST, broken, held};
use crate::host::{Host, vm};
use crate::measure::{median, milliseconds, rounded};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};

pub(super) const QUESTIONS: &[Question] = &[Question {
    name: "scrub-rate",
    question: "How fast does custody clear memory and read samples back, against the driver's fill alone?",
    expected: "At least 0.8 of the rate of the fill.",
    consequence: "Slow clearing delays the next owner: memory that is not clean is not lent.",
    seconds: 60,
    ask,
}];

/// Least ratio of the rates.
const AIM: f64 = 0.8;
/// Bytes that are left to the driver.
const RESERVE: u64 = 256 << 20;

fn ask(step: &Step) -> Answer {
    /// Bytes of the program's memory in a short run.
    const LITTLE: &str = "268435456";
    let rounds = step.rounds(5, 3);
    // Through all processes: from the kill of a program that holds all memory, or little in a short run, until all is clean.
    // The end of the driver in its worker is a part of it.
    let host = Host::start(step, &[vm()])?;
    let mut times = Vec::new();
    let mut lent = 0;
    for _ in 0..step.rounds(2, 1) {
        let most: &[&str] = if step.is_short() { &[LITTLE] } else { &[] };
        let mut guard = host.spawn(Some(FIRST), "guard", most)?;
        guard.line(&["holding"])?;
        lent = host.charge(FIRST)?.lent;
        let start = Instant::now();
        guard.kill()?;
        host.wait("all memory is clean", |host| {
            let unit = host.unit()?;
            Ok(unit.lent_bytes + unit.dirty_bytes == 0)
        })?;
        times.push(milliseconds(start.elapsed()));
    }
    step.note("from_kill_to_clean", json!({ "bytes": lent, "median_ms": rounded(median(&mut times)) }))?;
    host.stop()?;

    // This process holds the memory until its end, so it comes last.
    let (bytes, rates) = of_arbiter(step, rounds)?;
    step.note("bytes", bytes)?;
    step.note("fill_gigabytes_per_second", rounded(rates.fill))?;
    step.note("scrub_gigabytes_per_second", rounded(rates.scrub))?;
    step.note("ratio", rounded(rates.scrub / rates.fill))?;
    step.note("aim", AIM)?;
    held(step)
}

/// Rates in gigabytes per second.
struct Rates {
    fill: f64,
    scrub: f64,
}

/// The arbiter's own code in this process, on all free memory.
fn of_arbiter(step: &Step, rounds: u32) -> Answer<(u64, Rates)> {
    let refused = |code| Stop::refused("a call of the arbiter", code);
    let mut unit = OpenUnit::open(&step.libraries().driver, 0, None)
        .map_err(|error| Stop::failed(format!("the arbiter's unit does not open: {error:#}")))?;
    unit.enter().map_err(refused)?;
    let pieces = unit.take_free(RESERVE, u64::MAX).map_err(refused)?.pieces;
    let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
    let (mut fills, mut scrubs) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        for (verify, rates) in [(true, &mut scrubs), (false, &mut fills)] {
            let start = Instant::now();
            pieces
                .iter()
                .try_for_each(|piece| unit.clear(piece))
                .and_then(|()| unit.wait())
                .map_err(refused)?;
            if verify && !unit.verify(&pieces, Verify::Sampled).map_err(refused)?.iter().all(|clean| *clean) {
                return Err(broken("cleared memory is not zero"));
            }
            // Pages are touched for the first time in the first round.
            if round > 0 {
                rates.push(gigabytes_per_second(bytes, start.elapsed()));
            }
        }
    }
    Ok((bytes, Rates { fill: median(&mut fills), scrub: median(&mut scrubs) }))
}

fn gigabytes_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

//! Programs and workers that are killed, and fences, beside a neighbour that checks every result.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sluice_api::v1::FenceStep;

use super::{FIRST, SECOND, broken, held};
use crate::host::{Charge, Host, vm};
use crate::measure::{median, milliseconds, rounded};
use crate::running::Running;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};

/// Longest time until nothing is charged to a VM whose programs ended, and of a fence.
const AIM: Duration = Duration::from_secs(1);

pub(super) const QUESTIONS: &[Question] = &[
    Question {
        name: "fence-hung-kernel",
        question: "How long does a fence of a VM take whose kernel never ends, and does the neighbour compute on?",
        expected: "Below 1 s until all is taken and clean; the neighbour's results are right; the VM computes again after it is readmitted.",
        consequence: "If the driver does not end the kernel with its process, the fence waits for it, and the unit must be reset.",
        seconds: 75,
        ask: |step| fence(step, "hang", &[]),
    },
    Question {
        name: "kills",
        question: "Does a VM get all its memory back when its programs and workers are killed, and does the neighbour compute on?",
        expected: "Nothing is charged 1 s after each kill; the neighbour's results are right.",
        consequence: "If the driver keeps memory of killed processes longer, quotas stay used up for that time.",
        seconds: 75,
        ask: kills,
    },
    Question {
        name: "fence-idle",
        question: "How long does a fence of a VM take that computes nothing?",
        expected: "Below 1 s.",
        consequence: "A slow end of a context delays each fence.",
        seconds: 60,
        ask: |step| fence(step, "hold", &["1000"]),
    },
];

/// A neighbour that computes until it is told to end.
fn neighbour(host: &Host) -> Answer<Running> {
    let neighbour = host.spawn(Some(SECOND), "neighbour", &["forever"])?;
    neighbour.line(&["computing"])?;
    Ok(neighbour)
}

/// Ends the neighbour, whose results must have been right.
fn finish(mut neighbour: Running) -> Answer {
    neighbour.signal(Signal::USR1)?;
    neighbour.pass().map_err(|stop| broken(format!("the neighbour: {stop}")))
}

/// Notes durations with their aim.
fn note_times(step: &Step, key: &str, times: &[Duration]) -> Answer {
    let mut sorted: Vec<f64> = times.iter().map(|time| rounded(milliseconds(*time))).collect();
    let median = median(&mut sorted);
    step.note(
        key,
        json!({ "median_ms": median, "longest_ms": sorted.last(), "count": sorted.len(), "aim_ms": milliseconds(AIM) }),
    )
}

fn kills(step: &Step) -> Answer {
    let host = Host::start(step, &[vm(), vm()])?;
    let neighbour = neighbour(&host)?;
    for (key, of_worker) in [("after_kill_of_program", false), ("after_kill_of_worker", true)] {
        let mut times = Vec::new();
        for _ in 0..step.rounds(10, 3) {
            let mut victim = host.spawn(Some(FIRST), "hold", &["1000"])?;
            victim.line(&["holding"])?;
            if of_worker {
                for worker in host.workers(FIRST)? {
                    let worker = i32::try_from(worker).ok().and_then(Pid::from_raw);
                    kill_process(worker.ok_or_else(|| Stop::failed("no process"))?, Signal::KILL)?;
                }
            } else {
                victim.kill()?;
            }
            times.push(
                host.wait("nothing is charged to the VM", |host| Ok(host.charge(FIRST)?.is_nothing()))?,
            );
            victim.kill()?;
        }
        note_times(step, key, &times)?;
        if let Some(long) = times.iter().find(|time| **time > AIM) {
            step.note(&format!("{key}_is_late"), format!("{:.0} ms", milliseconds(*long)))?;
        }
    }
    finish(neighbour)?;
    host.settled()?;
    host.stop()?;
    held(step)
}

fn fence(step: &Step, program: &str, arguments: &[&str]) -> Answer {
    let host = Host::start(step, &[vm(), vm()])?;
    let neighbour = neighbour(&host)?;
    let mut times = Vec::new();
    for _ in 0..step.rounds(5, 2) {
        let mut victim = host.spawn(Some(FIRST), program, arguments)?;
        victim.line(&["holding"])?;
        let start = Instant::now();
        let fenced = host.fence(FIRST)?;
        times.push(start.elapsed());
        if fenced.fence.step != FenceStep::Quarantined || !fenced.fence.clean {
            return Err(broken(format!("after the fence the VM is {}", json!(fenced.fence))));
        }
        let charge = host.charge(FIRST)?;
        if (Charge { driver: 0, ..charge }) != Charge::default() {
            return Err(broken(format!("after the fence the VM has {charge:?}")));
        }
        victim.kill()?;
        host.readmit(FIRST)?;
        host.spawn(Some(FIRST), "vector_add", &[])?.pass()?;
    }
    note_times(step, "fence", &times)?;
    step.note("within_aim", times.iter().all(|time| *time <= AIM))?;
    finish(neighbour)?;
    host.settled()?;
    host.stop()?;
    held(step)
}

//! Known ways out of a quota: the program `escape` beside a neighbour that computes, and the charge of its VM meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use sluice_kit::escape::judge;

use super::{FIRST, SECOND, broken, held};
use crate::host::{Host, vm, vm_with};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::system;

/// Contexts that the quota holds. Little more: one way needs a kernel whose local memory is larger than the quota.
const CONTEXTS: u64 = 4;
/// The same for the way that starts nine processes.
const CONTEXTS_OF_PROCESSES: u64 = 16;
/// Smallest quota.
const LEAST: u64 = 64 << 20;
/// Single bytes that one way allocates.
const BYTES: &str = "60000";

pub(super) const QUESTIONS: &[Question] = &[
    way("escape-linear", "Does linear memory end at the quota, to a chunk?"),
    way("escape-vmm", "Is memory of the virtual-memory API charged as long as it lasts?"),
    way("escape-processes", "Do eight processes of a VM share its quota?"),
    way("escape-threads", "Do sixteen threads at once stay within the quota?"),
    way("escape-limits", "Do limits and contexts stay within the quota?"),
    way("escape-local", "Is local memory beyond the quota refused, and does the stream go on?"),
    way("escape-modules", "Do modules with large variables stay within the quota?"),
    way("escape-pools", "Do pools end at the quota?"),
    way("escape-ipc", "Is memory that two processes have open charged once, and until the last?"),
    way("escape-frees", "Do frees of invalid addresses change no charge?"),
    way("escape-tiny", "Are allocations of one byte charged their real size?"),
    way("escape-deepbind", "Has a second copy of the library the same quota?"),
    way("escape-managed", "Does managed memory end at the quota?"),
    way("escape-graphs", "Does the memory of graphs stay within the quota?"),
    way("escape-arrays", "Do arrays and mipmaps stay within the quota?"),
];

const fn way(name: &'static str, question: &'static str) -> Question {
    Question {
        name,
        question,
        expected: "The VM never has a byte more than its quota, and each step of the way has its expected result.",
        consequence: "A VM that gets more takes memory that is sold to another.",
        seconds: 75,
        ask,
    }
}

fn ask(step: &Step) -> Answer {
    let name = step.name();
    let way = name.strip_prefix("escape-").unwrap_or(name);
    let host = Host::start(step, &[vm(), vm()])?;
    let mut neighbour = host.spawn(Some(SECOND), "neighbour", &["forever"])?;
    neighbour.line(&["computing"])?;
    // The neighbour has one context: its size decides the quota.
    let context = host.charge(SECOND)?.driver;
    let contexts = if way == "processes" { CONTEXTS_OF_PROCESSES } else { CONTEXTS };
    let quota = quota_for(contexts, context);
    step.note("context_bytes", context)?;
    step.note("quota", quota)?;
    if way == "managed" && system::available_memory().unwrap_or(0) < 6 * quota {
        return Err(Stop::not_asked("the host has too little free memory for twice the quota"));
    }
    host.put(FIRST, &vm_with(quota))?;

    let size = quota.to_string();
    let arguments: Vec<&str> = [way, &size].into_iter().chain((way == "tiny").then_some(BYTES)).collect();
    let mut program = host.spawn(Some(FIRST), "escape", &arguments)?;
    let over = AtomicBool::new(false);
    let (passed, most) = thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&host, &over));
        let passed = program.pass();
        over.store(true, Ordering::Relaxed);
        (passed, watcher.join().unwrap_or_else(|_| Err(Stop::failed("the watching thread panicked"))))
    });
    let most = most?;
    step.note("charged_at_most", json!({ "all": most.all, "driver": most.driver, "looks": most.looks }))?;
    if most.all > quota {
        return Err(broken(format!("{} bytes were charged at once, with a quota of {quota}", most.all)));
    }
    passed?;
    judge(way, quota, most.driver, &program.printed()).map_err(broken)?;
    neighbour.signal(Signal::USR1)?;
    neighbour.pass().map_err(|stop| broken(format!("the neighbour: {stop}")))?;
    host.settled()?;
    host.stop()?;
    held(step)
}

/// A quota for so many contexts of this size.
fn quota_for(contexts: u64, context: u64) -> u64 {
    (contexts * context).next_multiple_of(LEAST).max(LEAST)
}

/// The most that the first VM was charged.
#[derive(Debug, Default)]
struct Most {
    all: u64,
    driver: u64,
    looks: u32,
}

fn watch(host: &Host, over: &AtomicBool) -> Answer<Most> {
    let mut most = Most::default();
    while !over.load(Ordering::Relaxed) {
        let charge = host.charge(FIRST)?;
        most.all = most.all.max(charge.lent + charge.driver);
        most.driver = most.driver.max(charge.driver);
        most.looks += 1;
        thread::sleep(Duration::from_millis(2));
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use sluice_kit::escape::CHUNK;

    use super::*;

    #[test]
    fn quota_holds_all_contexts_and_is_whole_chunks() {
        assert_eq!(quota_for(CONTEXTS, 0), LEAST);
        assert_eq!(quota_for(CONTEXTS, 4 << 20), LEAST);
        let large = quota_for(CONTEXTS, 530 << 20);
        assert!(large >= CONTEXTS * (530 << 20) && large.is_multiple_of(CHUNK));
        // A thread of the kernel with much local memory has 32 KiB of it, and an H200 has 132 multiprocessors of 2,048 threads.
        assert!(large < 132 * 2048 * (32 << 10));
    }

    #[test]
    fn each_way_of_the_table_is_a_step() {
        for (way, _) in sluice_kit::escape::TABLE {
            assert!(QUESTIONS.iter().any(|question| question.name == format!("escape-{way}")), "{way}");
        }
        assert_eq!(QUESTIONS.len(), sluice_kit::escape::TABLE.len());
    }
}

//! Memory that the driver takes for itself.

use serde_json::json;

use crate::kernels::Image;
use crate::step::{Question, Step};
use crate::stop::Answer;
use crate::worker::{Command, Peer, Worker};

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "memory-of-context",
        question: "How much device memory does a context take?",
        expected: "250 to 500 MiB each, the same for each process.",
        consequence: "A VM's quota must hold it, and it sets the reserve that an arbiter keeps for starts.",
        seconds: 60,
        ask: contexts,
    },
    Question {
        name: "memory-of-module",
        question: "How much device memory does a module take beyond its globals?",
        expected: "2 MiB or less for a small one; its globals, rounded up, for a large one. It comes back at unload or at the end.",
        consequence: "A grant for a load is this figure plus the globals that the image declares.",
        seconds: 60,
        ask: modules,
    },
    Question {
        name: "memory-of-stack-limit",
        question: "How much device memory does a raised stack limit take?",
        expected: "The limit times all resident threads: 2,048 per multiprocessor.",
        consequence: "The limit is clamped, and charged before it is raised.",
        seconds: 60,
        ask: stacks,
    },
];

/// Bytes by which free memory fell since `before`.
fn taken(observer: &Worker, before: u64) -> Answer<i64> {
    Ok(before.cast_signed() - observer.settled()?.cast_signed())
}

fn contexts(step: &Step) -> Answer {
    let observer = step.worker()?;
    let mut peers: Vec<Peer> = Vec::new();
    for number in 1..=3 {
        let before = observer.settled()?;
        let peer = step.peer()?;
        peer.ask(Command::Start)?;
        step.note(&format!("context_{number}"), taken(&observer, before)?)?;
        peers.push(peer);
    }
    let before = observer.settled()?;
    if let Some(peer) = peers.pop() {
        peer.end()?;
    }
    step.note("given_back_at_end", -taken(&observer, before)?)
}

fn modules(step: &Step) -> Answer {
    let observer = step.worker()?;
    let peer = step.peer()?;
    peer.ask(Command::Start)?;
    for (key, image, globals) in [("small", Image::Small, 4 << 10), ("large", Image::Large, 64 << 20)] {
        let before = observer.settled()?;
        peer.ask(Command::Load { image })?;
        let loaded = taken(&observer, before)?;
        peer.ask(Command::Unload { image })?;
        let kept = taken(&observer, before)?;
        step.note(key, json!({ "globals": globals, "taken": loaded, "kept_after_unload": kept }))?;
    }
    Ok(())
}

fn stacks(step: &Step) -> Answer {
    let observer = step.worker()?;
    let peer = step.peer()?;
    peer.ask(Command::Start)?;
    let before = observer.settled()?;
    let limits = [("1_kib", 1), ("4_kib", 4), ("16_kib", 16), ("64_kib", 64), ("1_kib_again", 1)];
    for (key, kib) in limits {
        let set = peer.ask(Command::Stack { bytes: kib << 10 });
        step.note_result(key, set.and_then(|_| taken(&observer, before)))?;
    }
    const MULTIPROCESSORS: u32 = 16;
    step.note("multiprocessors", observer.attribute(MULTIPROCESSORS)?)
}

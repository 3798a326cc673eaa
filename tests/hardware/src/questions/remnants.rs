//! Values that one process leaves and another may find.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::kernels::Scratch;
use crate::step::{Question, Step};
use crate::stop::Answer;
use crate::worker::Command;

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "remnants-in-chunks",
        question: "Does fresh memory carry values of a process that was killed?",
        expected: "No: the driver clears pages before it gives them out again.",
        consequence: "Custody scrubs in any case. If remnants are found, the driver's own share must be swept, too.",
        seconds: 60,
        ask: chunks,
    },
    Question {
        name: "remnants-in-shared-memory",
        question: "Does shared memory carry values of another process?",
        expected: "Not known; nothing documents it.",
        consequence: "If it does, VMs of different owners must not share a unit in time without a sweep kernel between them.",
        seconds: 60,
        ask: |step| scratch(step, Scratch::Shared),
    },
    Question {
        name: "remnants-in-local-memory",
        question: "Does local memory carry values of another process?",
        expected: "No: it is device memory that the driver cleared.",
        consequence: "If it does, the driver's share is swept before a unit serves another organisation.",
        seconds: 60,
        ask: |step| scratch(step, Scratch::Local),
    },
    Question {
        name: "remnants-in-registers",
        question: "Do registers that a kernel never wrote carry values of another process?",
        expected: "Not known; nothing documents it. Without a hit in the control nothing is shown.",
        consequence: "As for shared memory.",
        seconds: 60,
        ask: |step| scratch(step, Scratch::Registers),
    },
];

/// A value that no earlier run left.
fn value() -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
    (now.wrapping_mul(0x9e37_79b1) ^ std::process::id().rotate_left(16)) | 0x8000_0001
}

fn chunks(step: &Step) -> Answer {
    let value = value();
    let writer = step.peer()?;
    writer.ask(Command::Start)?;
    let bytes = (512 << 20).min(writer.number(Command::Free)? / 8) & !((2 << 20) - 1);
    writer.ask(Command::Create { bytes })?;
    writer.ask(Command::Map)?;
    writer.ask(Command::Fill { value })?;
    // The control: the same search finds the value where it is.
    let control = writer.ask(Command::Count { value })?;
    writer.end()?;
    step.note("bytes_left", bytes)?;
    let control_hits = control.get(0).and_then(Value::as_u64).unwrap_or(0);
    step.note("control", control)?;
    let reader = step.peer()?;
    let found = reader.ask(Command::Search { value, seconds: 25 })?;
    conclude(step, control_hits, 0, &[&found])?;
    step.note("after_end", found)
}

fn scratch(step: &Step, scratch: Scratch) -> Answer {
    const LOOKS: u32 = 5;
    let value = value();
    let writer = step.peer()?;
    writer.ask(Command::Leave { scratch, value })?;
    // The control: the same search in the process that left the value.
    let control = writer.ask(Command::Look { scratch, value })?;
    let control_hits = hits(&control);
    step.note("control", control)?;
    let reader = step.peer()?;
    // A value that nothing left must not be found. This look also loads the reader's module while the writer rests.
    let stray = reader.ask(Command::Look { scratch, value: value.rotate_left(7) ^ 0x0f0f })?;
    let stray_hits = hits(&stray);
    step.note("control_of_a_value_never_left", stray)?;
    let mut beside = Vec::new();
    for _ in 0..LOOKS {
        writer.tell(Command::Leave { scratch, value })?;
        beside.push(reader.ask(Command::Look { scratch, value })?);
        writer.answer()?;
    }
    step.note("beside_the_writer", &beside)?;
    writer.ask(Command::Leave { scratch, value })?;
    let at_rest = reader.ask(Command::Look { scratch, value })?;
    step.note("writer_at_rest", &at_rest)?;
    writer.ask(Command::Leave { scratch, value })?;
    writer.end()?;
    let after = reader.ask(Command::Look { scratch, value })?;
    step.note("after_end", &after)?;
    let late = step.peer()?.ask(Command::Look { scratch, value })?;
    step.note("in_new_process", &late)?;
    let found: Vec<&Value> = beside.iter().chain([&at_rest, &after, &late]).collect();
    conclude(step, control_hits, stray_hits, &found)
}

fn hits(found: &Value) -> u64 {
    found.get("words_with_value").and_then(Value::as_u64).unwrap_or(0)
}

/// A search shows something only if it finds a value that is there, and none that is not.
fn conclude(step: &Step, control_hits: u64, stray_hits: u64, found: &[&Value]) -> Answer {
    let remnants: u64 = found.iter().map(|found| hits(found)).sum();
    let words = match (remnants, control_hits, stray_hits) {
        (.., 1..) => "void: a value that nothing left was found",
        (0, 0, _) => "void: the control found nothing",
        (0, ..) => "no remnants",
        _ => "remnants",
    };
    step.note("conclusion", words)
}

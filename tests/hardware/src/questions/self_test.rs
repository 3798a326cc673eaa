//! Steps that end badly, for tests of the frame.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::system;

pub(crate) const QUESTIONS: &[Question] = &[
    question("self-test-answers", 60, |step| step.note("number", 42)),
    question("self-test-hangs", 20, |step| {
        step.note("before", true)?;
        // A child that outlives the step if only the step is killed.
        let child = Command::new("sleep").arg("600").stdout(Stdio::inherit()).spawn()?;
        step.note("child", child.id())?;
        sleep()
    }),
    question("self-test-crashes", 60, |step| {
        step.note("before", true)?;
        system::crash();
        Ok(())
    }),
    question("self-test-ends-early", 60, |_| std::process::exit(3)),
    question("self-test-lingers", 60, |step| {
        step.note("number", 43)?;
        println!("{}", serde_json::json!({ "end": "answered" }));
        sleep()
    }),
    question("self-test-is-refused", 60, |step| step.cuda()?.ask("cuNoSuchCall", |_| Err::<(), _>(801))),
    question("self-test-fails", 60, |_| Err(Stop::failed("as it must"))),
    question("self-test-goes-on", 60, |step| step.note("number", 44)),
    question("self-test-waits", 600, |_| sleep()),
];

/// Bytes that a step writes at most, on a disk that is large enough.
const MOST: usize = 64 << 20;

pub(crate) const WITH_FOLDER: &[Question] = &[question("self-test-fills-its-disk", 60, |step| {
    let file = step.temporary()?.join("large");
    eprintln!("{} gets {MOST} bytes", file.display());
    Ok(std::fs::write(file, vec![1; MOST])?)
})];

const fn question(name: &'static str, seconds: u32, ask: fn(&Step) -> Answer) -> Question {
    Question { name, question: "Does the frame hold?", expected: "Yes.", consequence: "None.", seconds, ask }
}

fn sleep() -> Answer {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

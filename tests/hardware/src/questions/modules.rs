//! Modules and symbols of the driver.

use serde_json::json;

use crate::kernels::Image;
use crate::step::{Question, Step};
use crate::stop::Answer;
use crate::worker::{Command, Worker};

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "global-address-on-reload",
        question: "Does a module's global keep its address after unload and reload?",
        expected: "Often, but not if another module was loaded in between.",
        consequence: "A guest that reloads must ask again. A cache of symbol addresses ends with its module.",
        seconds: 30,
        ask: reload,
    },
    Question {
        name: "checkpoint-symbols",
        question: "Does the driver have the cuCheckpoint calls, and do they answer for this process?",
        expected: "Yes, from driver 570.",
        consequence: "Idle VMs can be moved out of device memory without a tool of their own.",
        seconds: 20,
        ask: checkpoint,
    },
];

fn reload(step: &Step) -> Answer {
    let mut worker = step.worker()?;
    let mut addresses = Vec::new();
    for _ in 0..4 {
        addresses.push(address(&mut worker, Image::Small)?);
        worker.ask(Command::Unload { image: Image::Small })?;
    }
    step.note("addresses", hexadecimal(&addresses))?;
    step.note("kept", addresses.iter().all(|address| *address == addresses[0]))?;
    let first = address(&mut worker, Image::Small)?;
    worker.ask(Command::Unload { image: Image::Small })?;
    let between = address(&mut worker, Image::Large)?;
    let second = address(&mut worker, Image::Small)?;
    step.note("with_another_between", hexadecimal(&[first, between, second]))?;
    step.note("kept_with_another_between", first == second)
}

/// Loads a module and takes the address of its global.
fn address(worker: &mut Worker, image: Image) -> Answer<u64> {
    let module = worker.module(image)?;
    let global =
        worker.cuda().ask("cuModuleGetGlobal_v2", |driver| driver.module_global(module, c"table"))?;
    Ok(global.0)
}

fn hexadecimal(addresses: &[u64]) -> Vec<String> {
    addresses.iter().map(|address| format!("{address:#x}")).collect()
}

fn checkpoint(step: &Step) -> Answer {
    const CALLS: [&str; 6] = [
        "cuCheckpointProcessGetState",
        "cuCheckpointProcessGetRestoreThreadId",
        "cuCheckpointProcessLock",
        "cuCheckpointProcessCheckpoint",
        "cuCheckpointProcessRestore",
        "cuCheckpointProcessUnlock",
    ];
    let worker = step.worker()?;
    let present: Vec<&str> = CALLS.into_iter().filter(|call| worker.cuda().has(call)).collect();
    step.note("present", json!(present))?;
    let process = i32::try_from(std::process::id()).unwrap_or(0);
    step.note("state", worker.cuda().checkpoint_state(process)?)
}

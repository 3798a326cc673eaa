//! The phase `programs`: each CUDA program of the bundle, natively on the driver and remoted through Sluice.
//!
//! The runner calls its steps as any other. A step owns the two runs of one program, one after the other; it changes nothing
//! but files in its temporary folder.

mod compare;
pub(crate) mod start;

use serde_json::json;

use crate::bundle::Bundle;
use crate::host::Side;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use start::Started;

/// Name of the phase.
pub(crate) const PHASE: &str = "programs";

/// A step for each file `tests/programs/NAME.cu`.
pub(crate) const QUESTIONS: &[Question] = &[
    program("device_query", "Properties of the device."),
    program("vector_add", "The sum of two vectors."),
    program("matmul_tiled", "A matrix product with tiles in shared memory."),
    program("reduction", "Sum and maximum with shuffles, shared memory and atomics."),
    program("histogram", "Atomics and compare-and-swap."),
    program("symbols", "Constant and global variables."),
    program("statics", "Large variables on the device."),
    program("memory", "Allocations, fills, and copies of every shape."),
    program("streams", "Streams, events and pinned memory."),
    program("stream_values", "Streams that wait for values in memory, and write them."),
    program("context_events", "Events of all work of a context, and contexts that wait."),
    program("green_contexts", "Groups of multiprocessors, and green contexts that compute with them."),
    program("staging", "Copies of pinned and pageable memory in several streams."),
    program("host_functions", "Functions of the program in the order of streams."),
    program("graphs", "Graphs: captured, described, changed, and refused."),
    program(
        "graph_work",
        "Graphs: events of nodes, a thousand nodes, pinned memory, and launches in two streams.",
    ),
    program("graph_host", "Graphs with functions of the program, launched in several streams and threads."),
    program("graph_copies", "Graphs with copies from and to pageable memory, also of arrays."),
    program("graph_conditional", "Graphs whose kernels choose, repeat and skip a part."),
    program("graph_memory", "Graphs that allocate and free memory."),
    program("threads", "Several host threads."),
    program("crowd", "200 host threads that capture, launch and free together."),
    program("driver_api", "The driver interface without the runtime."),
    program("errors", "Refused calls, and a sticky fault in a child."),
    program("environment", "Variables that users set for the driver."),
    program("refusals", "Calls that the driver refuses at once, with their codes."),
    program("accepted", "Arguments that the driver takes beyond its header, with their effects."),
    program("management", "NVML, as a monitor uses it."),
    program("print", "Output of kernels."),
    program("assertion", "A failed assertion in a child."),
    program("batches", "Batches of copies, copies with attributes and between contexts."),
    program("textures", "Arrays, textures and surfaces, and the references of the driver interface."),
    program("launches", "Launches with events, attributes of streams, launches of the oldest form."),
    program("linker", "Links of PTX, logs and options of the compiler."),
    program("pools", "Memory in the order of streams, and pools."),
    program("virtual_memory", "Physical memory, reserved addresses and mappings."),
    program("managed", "Managed memory, if the device offers it."),
    program("managed_variables", "Variables of the program that host and kernels access in turns."),
    program("zero_copy", "Host memory that kernels reach in place."),
    program("registered", "Memory of the program that it registers."),
    program("lifetimes", "Objects that end before their work does."),
    program("held", "Streams that wait for events of others."),
    program("exits", "Every way for a process to end."),
    program("offspring", "Processes that begin and end in the middle of work."),
    program("ipc_events", "Events that two processes share."),
    program("ipc_pools", "Memory of pools that two processes share."),
    program("ipc", "Device memory that two processes share."),
    program("peers", "Two devices that reach each other's memory, if the machine has two."),
    program("mandelbrot", "A picture."),
    program("neighbour", "Results that no other process may change."),
    program("hold", "A context and memory, held until the end."),
    program("quota", "The short form of a program that takes all memory."),
    program("remnant", "The short form of a program that searches memory for a tag."),
    program("sleepers", "The short form of a program with many waiting threads."),
    program("bereft", "The short form of a program that loses its worker."),
];

const fn program(name: &'static str, question: &'static str) -> Question {
    Question {
        name,
        question,
        expected: "The same output and exit status natively and remoted.",
        consequence: "A difference is a fault of Sluice, or of the program.",
        // Longer than Sluice waits for a unit that lends no memory, so that its message is in the log.
        seconds: 75,
        ask,
    }
}

/// Runs the program of a step on both sides, and compares.
fn ask(step: &Step) -> Answer {
    let bundle = Bundle::beside_program()?;
    let path = bundle.programs.join(step.name());
    if !path.exists() {
        return Err(Stop::not_asked(format!("the bundle has no program {}", step.name())));
    }
    let run = |side: Side| -> Answer<Started> {
        let started = start::run(&bundle, step, &path, side)?;
        // The note is written before the other side starts, so that a side that hangs does not cost the other's result.
        step.note(side.name(), &started.end)?;
        started.stdout.whole(side)?;
        Ok(started)
    };
    let (native, remoted) = (run(Side::Native)?, run(Side::Remoted)?);
    let same_end = native.end.exit == remoted.end.exit && native.end.signal == remoted.end.signal;
    let difference = compare::first_difference(&native.stdout.bytes, &remoted.stdout.bytes);
    step.note("equal", same_end && difference.is_none())?;
    step.note("passed", native.passed() && remoted.passed())?;
    if let Some(difference) = &difference {
        step.note("difference", json!(difference))?;
        return Err(Stop::failed(difference.to_string()));
    }
    if !same_end {
        return Err(Stop::failed(format!(
            "natively {}, remoted {}",
            native.end.words(),
            remoted.end.words()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_every_program_of_the_folder_once() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../programs");
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let sources = entries.filter(|path| path.extension().is_some_and(|extension| extension == "cu"));
        let mut names: Vec<String> =
            sources.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        let mut listed: Vec<&str> = QUESTIONS.iter().map(|question| question.name).collect();
        listed.sort_unstable();
        assert_eq!(names, listed);
    }
}

//! Costs of the calls on which custody and completion rest.

use std::os::fd::AsFd as _;

use serde_json::{Value, json};

use crate::kernels::Image;
use crate::measure::{summary, timed};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::worker::{Command, Peer, Worker};

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "cost-of-chunks",
        question: "What do create, export, import, map, set-access, unmap and release cost for 2, 32 and 512 MiB?",
        expected: "Each below 1 ms for 32 MiB; create and set-access grow with the size.",
        consequence: "The chunk classes and the number of cached chunks follow from it: an expensive call is made seldom, for larger chunks.",
        seconds: 60,
        ask: chunks,
    },
    Question {
        name: "cost-of-calls",
        question: "What do an event record, an event query, a host function and a stream write cost per call?",
        expected: "Record and stream write 1 to 3 us, query below 1 us, host function 3 us or more.",
        consequence: "Markers of completion use the cheapest of them that adds no order between streams.",
        seconds: 30,
        ask: calls,
    },
];

const MIB: u64 = 1 << 20;

fn chunks(step: &Step) -> Answer {
    let mut worker = step.worker()?;
    let peer = step.peer()?;
    peer.ask(Command::Start)?;
    for (class, rounds) in [(2, 25), (32, 15), (512, 7)] {
        let key = format!("{class}_mib");
        if worker.memory()?.0 < 2 * class * MIB {
            step.note(&key, "does not fit into free memory")?;
            continue;
        }
        step.note(&key, class_cost(&worker, class * MIB, rounds)?)?;
        let imports = import_cost(&mut worker, &peer, class * MIB)?;
        step.note(&format!("{key}_in_other_process"), imports)?;
    }
    Ok(())
}

/// Import and map in another process, with the messages to it; a message without a call is the figure to subtract.
fn import_cost(worker: &mut Worker, peer: &Peer, bytes: u64) -> Answer<Value> {
    const ROUNDS: u32 = 9;
    let (mut imports, mut maps, mut messages) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        worker.ask(Command::Create { bytes })?;
        let (_, descriptor) = worker.obey(Command::Export, None)?;
        let descriptor = descriptor.ok_or_else(|| Stop::failed("an export without a descriptor"))?;
        messages.push(timed(|| peer.ask(Command::Start))?.1);
        imports.push(timed(|| peer.import(&descriptor, bytes))?.1);
        maps.push(timed(|| peer.ask(Command::Map))?.1);
        peer.ask(Command::Unmap)?;
        peer.ask(Command::Release)?;
        worker.ask(Command::Release)?;
    }
    Ok(json!({
        "import": summary(&mut imports),
        "reserve_map_and_set_access": summary(&mut maps),
        "message": summary(&mut messages),
    }))
}

fn class_cost(worker: &Worker, bytes: u64, rounds: u32) -> Answer<Value> {
    let cuda = worker.cuda();
    let device = worker.device;
    let mut names: Vec<(&str, Vec<f64>)> = Vec::new();
    for _ in 0..rounds {
        let mut note = |name: &'static str, took: f64| match names.iter_mut().find(|(of, _)| *of == name) {
            Some((_, figures)) => figures.push(took),
            None => names.push((name, vec![took])),
        };
        let (handle, took) = timed(|| cuda.ask("cuMemCreate", |driver| driver.chunk_create(bytes, device)))?;
        note("create", took);
        let (descriptor, took) =
            timed(|| cuda.ask("cuMemExportToShareableHandle", |driver| driver.chunk_export(handle)))?;
        note("export", took);
        let call = "cuMemImportFromShareableHandle";
        let (imported, took) = timed(|| cuda.ask(call, |driver| driver.chunk_import(descriptor.as_fd())))?;
        note("import_in_same_process", took);
        let (at, took) =
            timed(|| cuda.ask("cuMemAddressReserve", |driver| driver.address_reserve(0, bytes)))?;
        note("reserve", took);
        note("map", timed(|| cuda.ask("cuMemMap", |driver| driver.map(at, bytes, imported)))?.1);
        note("set_access", timed(|| cuda.ask("cuMemSetAccess", |driver| driver.allow(at, bytes, device)))?.1);
        note("unmap", timed(|| cuda.ask("cuMemUnmap", |driver| driver.unmap(at, bytes)))?.1);
        note(
            "address_free",
            timed(|| cuda.ask("cuMemAddressFree", |driver| driver.address_free(at, bytes)))?.1,
        );
        note(
            "release_of_import",
            timed(|| cuda.ask("cuMemRelease", |driver| driver.cuMemRelease(imported)))?.1,
        );
        drop(descriptor);
        note("release", timed(|| cuda.ask("cuMemRelease", |driver| driver.cuMemRelease(handle)))?.1);
    }
    Ok(names.into_iter().map(|(name, mut figures)| (name.to_owned(), summary(&mut figures))).collect())
}

fn calls(step: &Step) -> Answer {
    const BATCHES: u32 = 40;
    const BATCH: u32 = 50;
    let mut worker = step.worker()?;
    let empty = worker.function(Image::Work, c"empty")?;
    let word = worker.zeroed(8)?;
    let cuda = worker.cuda();
    let stream = cuda.ask("cuStreamCreateWithPriority", |driver| driver.cuStreamCreateWithPriority(1, 0))?;
    /// Without timing, as the worker's markers.
    const NO_TIMING: u32 = 2;
    let event = cuda.ask("cuEventCreate", |driver| driver.cuEventCreate(NO_TIMING))?;
    let per_call = |key: &str, call: &dyn Fn() -> Answer| -> Answer {
        let measure = || -> Answer<Value> {
            call()?;
            let mut figures = Vec::new();
            for _ in 0..BATCHES {
                let ((), took) = timed(|| (0..BATCH).try_for_each(|_| call()))?;
                figures.push(took / f64::from(BATCH));
                cuda.ask("cuStreamSynchronize", |driver| driver.cuStreamSynchronize(stream))?;
            }
            Ok(summary(&mut figures))
        };
        step.note_result(key, measure())
    };
    per_call("launch", &|| worker.launch_on(stream, empty, [1, 1, 0], &[]))?;
    per_call("event_record", &|| cuda.ask("cuEventRecord", |driver| driver.cuEventRecord(event, stream)))?;
    per_call("event_query", &|| cuda.ask("cuEventQuery", |driver| driver.event_done(event)).map(drop))?;
    per_call("host_function", &|| cuda.launch_host(stream))?;
    per_call("stream_write", &|| {
        let written = cuda.write_value(stream, word, 1, 0)?;
        written.map_err(|code| Stop::refused("cuStreamWriteValue32_v2", code))
    })?;
    per_call("free_memory", &|| worker.memory().map(drop))?;
    step.note("calls", json!(BATCHES * BATCH))
}

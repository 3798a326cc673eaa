//! Results of calls with unusual arguments, which the guest's library must answer alike.

use serde_json::{Value, json};

use crate::driver::Tensor;
use crate::step::{Question, Step};
use crate::stop::{Answer, name};
use crate::worker::Worker;

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "tensor-map-codes",
        question: "Which results has cuTensorMapEncodeTiled without a context, with rank 0, and with a misaligned address?",
        expected: "CUDA_ERROR_INVALID_VALUE for each wrong argument; without a context it works.",
        consequence: "The guest's library encodes the map's checks by itself and returns the same results.",
        seconds: 20,
        ask: tensor_maps,
    },
    Question {
        name: "stream-flag-codes",
        question: "Which results have unknown flags of stream writes, event waits and event records?",
        expected: "CUDA_ERROR_INVALID_VALUE.",
        consequence: "The guest's library returns them at once, without a round trip.",
        seconds: 20,
        ask: flags,
    },
];

/// `CU_TENSOR_MAP_DATA_TYPE_UINT32`.
const WORDS: u32 = 2;

fn tensor_maps(step: &Step) -> Answer {
    let cuda = step.cuda()?;
    let plain = Tensor { rank: 2, address: 0x1000, format: WORDS };
    step.note("before_init", cuda.tensor_map(plain)?)?;
    cuda.ask("cuInit", |driver| driver.init())?;
    step.note("without_context", cuda.tensor_map(plain)?)?;
    let worker = Worker::start(cuda)?;
    let address = worker.zeroed(1 << 20)?;
    let plain = Tensor { address, ..plain };
    let cases = [
        ("plain", plain),
        ("rank_0", Tensor { rank: 0, ..plain }),
        ("rank_1", Tensor { rank: 1, ..plain }),
        ("rank_5", Tensor { rank: 5, ..plain }),
        ("address_0", Tensor { address: 0, ..plain }),
        ("address_not_of_device", Tensor { address: 0x1000, ..plain }),
        ("address_plus_1", Tensor { address: address + 1, ..plain }),
        ("address_plus_8", Tensor { address: address + 8, ..plain }),
        ("format_99", Tensor { format: 99, ..plain }),
    ];
    for (key, tensor) in cases {
        step.note(key, worker.cuda().tensor_map(tensor)?)?;
    }
    Ok(())
}

fn flags(step: &Step) -> Answer {
    const FLAGS: [u32; 6] = [0, 1, 2, 4, 0x100, 0x8000_0000];
    let worker = step.worker()?;
    let cuda = worker.cuda();
    let word = worker.zeroed(8)?;
    let stream = cuda.ask("cuStreamCreateWithPriority", |driver| driver.cuStreamCreateWithPriority(1, 0))?;
    let event = cuda.ask("cuEventCreate", |driver| driver.cuEventCreate(2))?;
    cuda.ask("cuEventRecord", |driver| driver.cuEventRecord(event, stream))?;
    let table = |call: &dyn Fn(u32) -> Answer<String>| -> Answer<Value> {
        let row = |flags: &u32| Ok((format!("{flags:#x}"), json!(call(*flags)?)));
        FLAGS.iter().map(row).collect()
    };
    let code = |result: Result<(), u32>| name(result.err().unwrap_or(0));
    let write = |flags| Ok(code(cuda.write_value(stream, word, 1, flags)?));
    step.note_result("cuStreamWriteValue32", table(&write))?;
    let wait = |flags| Ok(code(cuda.wait_event(stream, event, flags)?));
    step.note_result("cuStreamWaitEvent", table(&wait))?;
    let record = |flags| Ok(code(cuda.record_event(event, stream, flags)?));
    step.note_result("cuEventRecordWithFlags", table(&record))?;
    step.note("afterwards", cuda.code("cuStreamSynchronize", |driver| driver.cuStreamSynchronize(stream))?)
}

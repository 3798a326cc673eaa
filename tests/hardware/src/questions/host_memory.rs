//! Access of kernels to host memory that Sluice never lent (HMM, ATS).

use serde_json::{Value, json};

use crate::kernels::Image;
use crate::step::{Question, Step};
use crate::stop::Answer;
use crate::system;
use crate::worker::{Command, Peer};

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "pageable-attributes",
        question: "Do attributes 88 and 100 say that kernels reach pageable memory, or use the host's page tables?",
        expected: "88 may be 1 (HMM of the open kernel modules); 100 is 0 without a coherent link.",
        consequence: "With either, sharing between VMs is refused at start-up unless it is configured in so many words.",
        seconds: 20,
        ask: attributes,
    },
    Question {
        name: "write-own-stack",
        question: "Can a kernel write the stack of its own process?",
        expected: "No: error 700, if attribute 88 is 0; yes, if it is 1.",
        consequence: "If it can although attribute 88 is 0, the attribute is no guard, and a kernel of a guest takes its worker over.",
        seconds: 20,
        ask: write_stack,
    },
    Question {
        name: "hmm-off-per-process",
        question: "Does an environment variable leave HMM off for one process?",
        expected: "None is documented; the candidates change nothing.",
        consequence: "If one does, the launcher sets it for workers, and the refusal at start-up can be lifted.",
        seconds: 60,
        ask: per_process,
    },
];

const PAGEABLE_ACCESS: u32 = 88;
const HOST_PAGE_TABLES: u32 = 100;

/// Attributes beside the two: managed memory, concurrent managed access, direct access from the host, unified addresses.
const OTHERS: [(&str, u32); 4] = [
    ("managed", 83),
    ("concurrent_managed", 89),
    ("direct_managed_from_host", 101),
    ("unified_addresses", 41),
];

fn attributes(step: &Step) -> Answer {
    let worker = step.worker()?;
    step.note_result("pageable_memory_access", worker.attribute(PAGEABLE_ACCESS))?;
    step.note_result("uses_host_page_tables", worker.attribute(HOST_PAGE_TABLES))?;
    for (name, number) in OTHERS {
        step.note_result(name, worker.attribute(number))?;
    }
    // The parameter says if the kernel's module could use HMM at all.
    let file = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm";
    let parameter = std::fs::read_to_string(file).map(|text| text.trim().to_owned());
    step.note("uvm_disable_hmm", parameter.unwrap_or_else(|error| format!("not readable: {error}")))
}

fn write_stack(step: &Step) -> Answer {
    const MARK: u32 = 0x5c1c_e003;
    let mut worker = step.worker()?;
    step.note_result("pageable_memory_access", worker.attribute(PAGEABLE_ACCESS))?;
    let poke = worker.function(Image::Work, c"poke")?;
    let target = system::Word::new();
    worker.launch(poke, [1, 1, 0], &[target.address(), MARK.into()])?;
    let code = worker.cuda().code("cuStreamSynchronize", |driver| driver.cuStreamSynchronize(0))?;
    step.note("result", code)?;
    step.note("written", target.read() == MARK)
}

fn per_process(step: &Step) -> Answer {
    let candidates: [(&str, &str); 6] = [
        ("CUDA_DISABLE_HMM", "1"),
        ("CUDA_DISABLE_UVM_HMM", "1"),
        ("CUDA_UVM_DISABLE_HMM", "1"),
        ("CUDA_DISABLE_PAGEABLE_MEMORY_ACCESS", "1"),
        ("CUDA_DISABLE_UNIFIED_MEMORY", "1"),
        ("CUDA_MANAGED_FORCE_DEVICE_ALLOC", "1"),
    ];
    step.note("none", attribute(step, None)?)?;
    for (variable, value) in candidates {
        step.note(variable, attribute(step, Some((variable, value)))?)?;
    }
    Ok(())
}

/// Attribute 88 in a process with this environment.
fn attribute(step: &Step, variable: Option<(&str, &str)>) -> Answer<Value> {
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg("worker").args(step.libraries().arguments()).envs(variable);
    let peer = Peer::spawn(&mut command)?;
    Ok(peer
        .ask(Command::Attribute { number: PAGEABLE_ACCESS })
        .unwrap_or_else(|stop| json!(stop.to_string())))
}

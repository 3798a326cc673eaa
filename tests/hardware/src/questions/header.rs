//! The facts of the header line.

use crate::nvml::Nvml;
use crate::step::{Question, Step};
use crate::stop::Answer;

/// Name of the step.
pub(crate) const NAME: &str = "header";

pub(crate) const QUESTIONS: &[Question] = &[Question {
    name: NAME,
    question: "Which driver and GPU are these?",
    expected: "An H200 with driver 580.",
    consequence: "The answers hold for this driver and GPU.",
    seconds: 30,
    ask: facts,
}];

fn facts(step: &Step) -> Answer {
    match Nvml::open(step.libraries().nvml.as_deref()) {
        Ok(nvml) => {
            step.note_result("driver_version", nvml.driver_version())?;
            step.note_result("divided", nvml.divided())?;
            step.note_result("memory_used", nvml.memory().map(|memory| memory.used))?;
        }
        Err(stop) => step.note_result("nvml_failed", Err::<(), _>(stop))?,
    }
    let cuda = step.cuda()?;
    cuda.ask("cuInit", |driver| driver.init())?;
    step.note_result("cuda_version", cuda.ask("cuDriverGetVersion", |driver| driver.version()))?;
    step.note_result("devices", cuda.ask("cuDeviceGetCount", |driver| driver.device_count()))?;
    let device = cuda.ask("cuDeviceGet", |driver| driver.device(0))?;
    let name = cuda.ask("cuDeviceGetName", |driver| driver.device_name(device))?;
    let name: String = name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
    step.note("gpu", name)?;
    step.note_result("memory", cuda.ask("cuDeviceTotalMem_v2", |driver| driver.device_memory(device)))
}

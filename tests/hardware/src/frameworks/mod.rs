//! The phase `frameworks`: clients in Python, natively and in a VM with a quota: the same results, the time of each step, the calls that
//! Sluice refused, and the memory that the framework sees. Then both run once more in a shorter form, with a library between client and
//! driver that counts and times each call.
//!
//! The runner calls its steps as any other. A step owns the two runs of one client of the folder `clients`; the machine has the packages,
//! and a client whose package is missing says so.

mod output;
mod trace;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::host::{Host, Side, vm, vm_with};
use crate::libraries;
use crate::measure::rounded;
use crate::rows::{self, Aim, Row};
use crate::running::{Running, words};
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use output::{Output, differences};
use trace::Trace;

/// Name of the phase.
pub(crate) const PHASE: &str = "frameworks";

/// A step for each client.
pub(crate) const QUESTIONS: &[Question] = &[
    client("driver_client", "The driver's interface from Python, without any package.", 45),
    client(
        "torch_client",
        "PyTorch: products, attention, gradients, streams, graphs, a small GPT, the end of memory.",
        200,
    ),
    client("torch_compile_client", "PyTorch's compiler.", 300),
    client("triton_client", "Triton: kernels that it compiles.", 120),
    client("jax_client", "JAX: compiled functions, gradients, a training step.", 150),
    client("cupy_client", "CuPy: arrays, kernels that it compiles, the end of memory.", 120),
    client("numba_client", "numba: kernels that it compiles from Python.", 100),
    client("cuda_python_client", "cuda-python: the driver's interface and NVRTC.", 60),
];

/// Most lines of a side about calls that Sluice refused.
const REFUSALS: usize = 40;
/// Most bytes of a client's messages that go to the log.
const MESSAGES: u64 = 64 << 10;
/// Places of the interpreter where `PATH` does not lead to it.
const INTERPRETERS: [&str; 4] =
    ["/usr/bin/python3", "/usr/local/bin/python3", "/opt/conda/bin/python3", "/opt/venv/bin/python3"];
/// Variable that names another interpreter.
const INTERPRETER: &str = "SLUICE_HARDWARE_PYTHON";

const fn client(name: &'static str, question: &'static str, seconds: u32) -> Question {
    Question {
        name,
        question,
        expected: "The same results natively and remoted, nearly the same times, and the quota as the device's memory.",
        consequence: "A difference is a fault of Sluice; a call that is refused is one that the framework needs.",
        seconds,
        ask,
    }
}

fn ask(step: &Step) -> Answer {
    let python = interpreter()?;
    step.note("python", python.display().to_string())?;
    let beside = Host::without_daemon(step)?;
    let native = run(step, &beside, &python, Side::Native)?;
    if let Some(reason) = native.skip {
        return Err(Stop::not_asked(reason));
    }
    if !native.done {
        return Err(Stop::failed("the client did not reach its end natively: see the log"));
    }
    if native.results() == 0 {
        let reason = native.errors.values().next().map_or("it has no result", String::as_str);
        return Err(Stop::not_asked(format!("no part of the client runs natively: {reason}")));
    }
    let trace = traced(step, &beside, &python, Side::Native);
    let host = Host::start(step, &[vm()])?;
    // Half of the unit: another total than natively, so that the framework shows which it sees.
    let quota = (host.unit()?.total_bytes / 2) & !((2 << 20) - 1);
    host.delete(1)?;
    host.put(1, &vm_with(quota))?;
    let remoted = run(step, &host, &python, Side::Remoted)?;
    let found = differences(&native, &remoted);
    step.note("equal", found.is_empty() && remoted.done)?;
    step.note("compared", native.results())?;
    if native.memory.is_some() {
        step.note(
            "quota",
            json!({ "set": quota, "seen": remoted.total_memory(), "native": native.total_memory() }),
        )?;
    }
    let rows: Vec<_> = native
        .times
        .iter()
        .map(|(name, ms)| {
            let remoted: Vec<f64> = remoted.times.get(name).copied().into_iter().collect();
            Row::new(name, "ms", &[*ms], &remoted, Aim::RatioAtMost(1.1))
        })
        .collect();
    rows::note(step, &rows)?;
    if !remoted.library.iter().all(|path| path.contains("libsluice_guest")) || remoted.library.is_empty() {
        return Err(Stop::failed(format!("the remoted client used {:?} and not Sluice", remoted.library)));
    }
    if let Some(reason) = remoted.skip {
        return Err(Stop::failed(format!("the client runs natively and not remoted: {reason}")));
    }
    if !found.is_empty() {
        step.note("differences", &found)?;
        return Err(Stop::failed(format!("{} differences, the first: {}", found.len(), found[0])));
    }
    if !remoted.done {
        return Err(Stop::failed("the client did not reach its end remoted: see the log"));
    }
    if remoted.total_memory().is_some_and(|total| total != quota) {
        return Err(Stop::failed(format!(
            "the framework sees {:?} bytes with a quota of {quota}",
            remoted.total_memory()
        )));
    }
    let compared =
        trace.and_then(|native| Ok(trace::compared(&native, &traced(step, &host, &python, Side::Remoted)?)));
    // A client that does not run under the tracer has its results all the same.
    step.note("trace", compared.unwrap_or_else(|stop| json!({ "not_traced": stop.to_string() })))?;
    host.stop()
}

/// The interpreter, if this machine has one.
fn interpreter() -> Answer<PathBuf> {
    let named = std::env::var_os(INTERPRETER).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("python3"));
    let mut all = named.into_iter().chain(in_path).chain(INTERPRETERS.map(PathBuf::from));
    let found = all.find(|path| path.is_absolute() && path.is_file());
    found.ok_or_else(|| Stop::not_asked("this machine has no python3"))
}

/// The command of a client on one side, with a folder for its files.
fn command(step: &Step, host: &Host, python: &Path, side: Side, folder: &str) -> Answer<(Command, PathBuf)> {
    let script = host.bundle().clients.join(step.name()).with_extension("py");
    if !script.exists() {
        return Err(Stop::not_asked(format!("the bundle has no client {}", step.name())));
    }
    let temporary = step.temporary()?.join(folder);
    std::fs::create_dir_all(&temporary)?;
    let mut command = host.command((side == Side::Remoted).then_some(1), python);
    command.arg(&script);
    environment(&mut command, &temporary, libraries::is_software_gpu(&step.libraries().driver));
    Ok((command, temporary))
}

/// Runs a client to its end. Returns its output, its end in words, and its messages.
fn run_to_end(name: &str, command: &Command, temporary: &Path) -> Answer<(Output, String, String)> {
    let messages = temporary.join("messages");
    let mut client = Running::start_with(name, command, File::create(&messages)?.into())?;
    // The step's own limit is shorter than this one.
    let status = client.end_within(Duration::from_secs(600))?;
    let mut text = Vec::new();
    File::open(&messages)?.take(MESSAGES).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    eprintln!("{text}");
    Ok((Output::read(&client.printed()), words(status), text))
}

/// Runs a client on one side, and notes what it printed.
fn run(step: &Step, host: &Host, python: &Path, side: Side) -> Answer<Output> {
    let (command, temporary) = command(step, host, python, side, side.name())?;
    let begun = Instant::now();
    let name = format!("{} ({})", step.name(), side.name());
    let (output, end, messages) = run_to_end(&name, &command, &temporary)?;
    step.note(
        side.name(),
        json!({
            "end": end, "seconds": rounded(begun.elapsed().as_secs_f64()), "versions": output.versions,
            "library": output.library, "memory": output.memory, "errors": output.errors, "notes": output.notes,
            "refused_calls": refusals(&messages),
        }),
    )?;
    Ok(output)
}

/// Runs a client once more with the tracer between it and the library of its side.
fn traced(step: &Step, host: &Host, python: &Path, side: Side) -> Answer<Trace> {
    /// Repetitions of each step.
    const REPEATS: &str = "3";
    let tracer = host.bundle().program("libsluice_tracer.so");
    if !tracer.exists() {
        return Err(Stop::not_asked("the bundle has no tracer"));
    }
    let (mut command, temporary) = command(step, host, python, side, &format!("{}-traced", side.name()))?;
    let (file, libraries) = (temporary.join("trace.jsonl"), temporary.join("lib"));
    std::fs::create_dir_all(&libraries)?;
    for name in ["libcuda.so.1", "libcuda.so"] {
        symlink(&tracer, libraries.join(name))?;
    }
    let before = command.get_envs().find(|(name, _)| *name == "LD_LIBRARY_PATH").and_then(|(_, value)| value);
    let search = [libraries.as_os_str(), before.unwrap_or_default()].join(OsStr::new(":"));
    command.env("LD_LIBRARY_PATH", search);
    command.env("SLUICE_TRACED", host.libraries(side).join("libcuda.so.1")).env("SLUICE_TRACE", &file);
    command.env("SLUICE_CLIENT_REPEATS", REPEATS);
    let (output, end, _) =
        run_to_end(&format!("{} ({}, traced)", step.name(), side.name()), &command, &temporary)?;
    match output.done {
        true => Trace::read(&file),
        false => Err(Stop::failed(format!("{} with the tracer: {end}", side.name()))),
    }
}

/// Caches of compiled code go to the step's folder, and a framework takes only the memory that it uses.
fn environment(command: &mut Command, temporary: &Path, is_software: bool) {
    for name in
        ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"]
    {
        command.env(name, temporary.join(name));
    }
    command.env("TMPDIR", temporary).env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
    command.env("XLA_PYTHON_CLIENT_PREALLOCATE", "false").env("TF_CPP_MIN_LOG_LEVEL", "2");
    if is_software {
        // It has no machine code, and runs no libraries of compiled kernels.
        command.env("CUPY_COMPILE_WITH_PTX", "1").env("CUPY_ACCELERATORS", "");
    }
}

/// The messages of Sluice's library about calls that it refused.
fn refusals(messages: &str) -> Vec<&str> {
    let mut refused: Vec<&str> = messages.lines().filter_map(|line| line.strip_prefix("sluice: ")).collect();
    refused.sort_unstable();
    refused.dedup();
    refused.truncate(REFUSALS);
    refused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_of_the_folder_is_a_step() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/clients");
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(".py")?.to_owned()))
            .filter(|name| name != "report")
            .collect();
        names.sort();
        let mut listed: Vec<_> = QUESTIONS.iter().map(|question| question.name).collect();
        listed.sort_unstable();
        assert_eq!(names, listed);
    }

    #[test]
    fn refusals_are_the_lines_of_the_library_each_once() {
        let messages = "Traceback\nsluice: cuX is not supported yet\nother\nsluice: cuA\nsluice: cuX is not supported yet\n";
        assert_eq!(refusals(messages), ["cuA", "cuX is not supported yet"]);
    }
}

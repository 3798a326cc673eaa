//! Tests of the frame, of the comparison of programs, and of steps that must fail; and a rehearsal on the software GPU.

mod bundle;
mod frame;
mod programs;
mod rehearsal;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
// So that cargo builds the library for the bundle.
use sluice_tracer as _;

/// The program under test.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-hardware"));
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// The folder of the software GPU's libraries: that of `SLUICE_SOFTGPU`, or the one above the test binary's.
fn software_gpu() -> Option<PathBuf> {
    let built = || std::env::current_exe().ok()?.parent()?.parent().map(Path::to_path_buf);
    let folder = std::env::var_os("SLUICE_SOFTGPU").map(PathBuf::from).or_else(built)?;
    let complete = ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"].iter().all(|name| folder.join(name).exists());
    complete.then_some(folder)
}

/// The lines of the results; each must be whole JSON, except one that a kill cut off at the end.
fn results(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out.join("results.jsonl")).expect("results");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// The result of a step.
fn step<'a>(results: &'a [Value], name: &str) -> &'a Value {
    results.iter().find(|line| line["name"] == name).unwrap_or_else(|| panic!("no result of {name}"))
}

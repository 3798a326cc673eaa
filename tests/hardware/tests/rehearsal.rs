//! All questions to the software GPU.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::{program, results, software_gpu, step};

/// Runs on a software GPU of its own.
fn rehearse(libraries: &Path, out: &Path, arguments: &[&str]) -> Output {
    let device = tempfile::tempdir_in("/dev/shm").expect("a folder for a device");
    program()
        .arg("run")
        .arg(out)
        .arg("--driver")
        .arg(libraries.join("libsoftgpu_cuda.so"))
        .arg("--nvml")
        .arg(libraries.join("libsoftgpu_nvml.so"))
        .args(arguments)
        .env("SLUICE_SOFTGPU_STATE", device.path())
        .env("SLUICE_SOFTGPU_SCALE", "64")
        .env("SLUICE_SOFTGPU_MODEL", "H200-141")
        .env("SLUICE_SOFTGPU_DEVICES", "1")
        .output()
        .expect("the program")
}

#[test]
fn questions_to_software_gpu_are_answered_or_refused() {
    let Some(libraries) = software_gpu() else {
        return sluice_skip::skip(
            "the software GPU is not built: set SLUICE_SOFTGPU to the folder of its libraries",
        );
    };
    let out = tempfile::tempdir().expect("a folder");
    let output = rehearse(&libraries, out.path(), &[]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    let results = results(out.path());
    assert_eq!(results[0]["kind"], "header");
    assert_eq!(results[0]["gpu"], "NVIDIA H200");
    assert_eq!(results[0]["software_gpu"], true);
    for key in ["date", "driver_version", "kernel", "memory", "commit"] {
        assert!(!results[0][key].is_null(), "the header has no {key}");
    }
    let steps: Vec<&Value> = results.iter().filter(|line| line["kind"] == "step").collect();
    assert!(steps.len() > 20);
    for step in &steps {
        for key in ["name", "question", "expected", "consequence", "outcome"] {
            assert!(step[key].is_string(), "{key} of {step}");
        }
        let outcome = step["outcome"].as_str().expect("an outcome");
        assert!(["answered", "refused", "not-asked"].contains(&outcome), "{step}");
        assert!(outcome != "answered" || step["answer"].as_object().is_some_and(|answer| !answer.is_empty()));
    }
    let answer = |name: &str| &step(&results, name)["answer"];
    assert_eq!(answer("export-between-processes")["importer_reads_owner"], true);
    assert_eq!(answer("export-between-processes")["owner_reads_importer"], true);
    assert_eq!(answer("write-own-stack")["written"], false);
    assert_eq!(answer("write-own-stack")["result"], "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(answer("tensor-map-codes")["plain"], "CUDA_SUCCESS");
    assert_eq!(answer("launch-queue-depth")["all_complete"], true);
    // The memory of the software GPU stays dirty, so each search has something to find.
    for name in ["remnants-in-chunks", "remnants-in-shared-memory", "remnants-in-local-memory"] {
        assert_eq!(answer(name)["conclusion"], "remnants", "{name}");
    }
    let freed = answer("free-after-last-unmap");
    assert_eq!(freed["free_after_importer_releases"], 0);
    assert!(freed["free_after_owner_releases"].as_i64().expect("a figure") < 0);
    let files = answer("system-calls")["load"]["files"].as_array().expect("files");
    assert!(files.iter().any(|file| file.as_str().is_some_and(|file| file.ends_with("libsoftgpu_cuda.so"))));
    assert_eq!(results.last().expect("a verdict")["orderly"], true);
    assert!(std::fs::read_dir(out.path()).expect("files").count() <= 8);
}

#[test]
fn call_that_the_driver_lacks_is_refused_by_its_symbol() {
    let Some(libraries) = software_gpu() else {
        return sluice_skip::skip(
            "the software GPU is not built: set SLUICE_SOFTGPU to the folder of its libraries",
        );
    };
    let out = tempfile::tempdir().expect("a folder");
    let output =
        rehearse(&libraries, out.path(), &["--phase", "self-test", "--step", "self-test-is-refused"]);
    assert!(output.status.success());
    let results = results(out.path());
    let step = step(&results, "self-test-is-refused");
    assert_eq!(step["outcome"], "refused");
    assert_eq!(step["reason"], "symbol cuNoSuchCall is absent");
}

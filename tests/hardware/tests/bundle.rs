//! Steps that need a bundle, on the software GPU: a broken promise and another result must fail their step. `xtask` rehearses the packed
//! bundle with all phases.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;
use sluice_kit::processes::make_program;
use sluice_tests::paths::{Binaries, HOST_PROGRAMS};
use sluice_tests::programs;
use tempfile::TempDir;

use crate::{results, step};

/// A bundle of this build, with a device of its own.
struct Bundle {
    folder: TempDir,
    device: TempDir,
    binaries: Binaries,
}

impl Bundle {
    /// Links the programs of this build. `None` if a part is missing, which is said.
    fn new() -> Option<Bundle> {
        Bundle::made().inspect_err(|error| sluice_skip::skip(&format!("{error:#}"))).ok()
    }

    fn made() -> Result<Bundle> {
        let binaries = Binaries::locate()?;
        let folder = tempfile::tempdir().context("a folder")?;
        for name in ["bin", "programs"] {
            fs::create_dir(folder.path().join(name))?;
        }
        let own = Path::new(env!("CARGO_BIN_EXE_sluice-hardware"));
        make_program(own, &folder.path().join("sluice-hardware"));
        let libraries = ["libsluice_guest.so", "libsluice_guest_nvml.so", "libsluice_tracer.so"];
        for name in HOST_PROGRAMS.into_iter().chain(libraries) {
            symlink(binaries.get(name)?, folder.path().join("bin").join(name))?;
        }
        for program in programs::compile_all()?.into_iter().chain(programs::compile_hostile()?) {
            symlink(program.path, folder.path().join("programs").join(program.name))?;
        }
        let clients = concat!(env!("CARGO_MANIFEST_DIR"), "/clients");
        symlink(clients, folder.path().join("clients"))?;
        let device = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
        Ok(Bundle { folder, device, binaries })
    }

    /// The lines of a run of these steps.
    fn run(&self, steps: &[&str], variables: &[(&str, &str)]) -> Result<Vec<Value>> {
        let out = self.folder.path().join("out");
        let mut command = Command::new(self.folder.path().join("sluice-hardware"));
        command.arg("run").arg(&out).arg("--short");
        command.arg("--driver").arg(self.binaries.get("libsoftgpu_cuda.so")?);
        command.arg("--nvml").arg(self.binaries.get("libsoftgpu_nvml.so")?);
        steps.iter().for_each(|step| {
            command.args(["--step", step]);
        });
        command.env("SLUICE_SOFTGPU_STATE", self.device.path()).env("SLUICE_SOFTGPU_SCALE", "256");
        command.env("SLUICE_SOFTGPU_MODEL", "H200-141").env("SLUICE_SOFTGPU_DEVICES", "1");
        command.env_remove("LD_LIBRARY_PATH").envs(variables.iter().copied());
        command.output().context("the program")?;
        Ok(results(&out))
    }

    /// Replaces the folder of clients by one with this client.
    fn replace_client(&self, name: &str, change: impl FnOnce(String) -> String) -> Result<()> {
        let clients = self.folder.path().join("clients");
        let own = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/clients"));
        fs::remove_file(&clients)?;
        fs::create_dir(&clients)?;
        fs::copy(own.join("report.py"), clients.join("report.py"))?;
        let text = fs::read_to_string(own.join(name))?;
        Ok(fs::write(clients.join(name), change(text))?)
    }
}

#[test]
fn pattern_that_another_vm_finds_fails_the_step() -> Result<()> {
    let Some(bundle) = Bundle::new() else { return Ok(()) };
    // The daemon of the step inherits it: as if custody did not scrub.
    let lines = bundle.run(&["canary-kill-program"], &[("SLUICE_UNSAFE_NO_SCRUB", "1")])?;
    let step = step(&lines, "canary-kill-program");
    assert_eq!(step["outcome"], "failed", "{step}");
    let reason = step["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("the promise is broken: another VM found"), "{reason}");
    // A context that started meanwhile may have taken the memory of one kind.
    assert!(!step["answer"]["hits"].as_object().expect("hits").is_empty(), "{step}");
    assert!(step["answer"]["verdict"].is_null());
    Ok(())
}

#[test]
fn client_without_package_computes_the_same_and_sees_its_quota() -> Result<()> {
    let Some(bundle) = Bundle::new() else { return Ok(()) };
    let lines = bundle.run(&["driver_client"], &[])?;
    let step = step(&lines, "driver_client");
    if step["outcome"] == "not-asked" {
        sluice_skip::skip(step["reason"].as_str().unwrap_or_default());
        return Ok(());
    }
    assert_eq!(step["outcome"], "answered", "{step}");
    let answer = &step["answer"];
    assert_eq!((&answer["equal"], &answer["quota"]["seen"]), (&true.into(), &answer["quota"]["set"]));
    assert_ne!(answer["quota"]["native"], answer["quota"]["set"]);
    assert!(answer["compared"].as_u64().expect("a number") >= 5, "{answer}");
    assert!(answer["rows"][0]["ratio"].is_number(), "{answer}");
    // The same calls on both sides, and the refusal that the client provokes on both is no difference.
    let trace = &answer["trace"];
    assert!(trace["functions"].as_u64().is_some_and(|count| count > 8), "{trace}");
    assert_eq!(trace["refused"], serde_json::json!([]), "{trace}");
    let slower = trace["slower"].as_array().expect("functions");
    assert!(slower.iter().any(|line| line["function"] == "cuInit"), "{trace}");
    Ok(())
}

#[test]
fn client_with_another_result_fails_its_step() -> Result<()> {
    let Some(bundle) = Bundle::new() else { return Ok(()) };
    bundle.replace_client("driver_client.py", |text| {
        let other = "import os\nreport.result(\"side\", os.environ.get(\"SLUICE_TRANSPORT\", \"native\"))\nreport.done()\n";
        text.replace("report.done()\n", other)
    })?;
    let lines = bundle.run(&["driver_client"], &[])?;
    let step = step(&lines, "driver_client");
    if step["outcome"] == "not-asked" {
        sluice_skip::skip(step["reason"].as_str().unwrap_or_default());
        return Ok(());
    }
    assert_eq!(step["outcome"], "failed", "{step}");
    let expected = serde_json::json!([{ "result": "side", "native": "native", "remoted": "direct" }]);
    assert_eq!((&step["answer"]["equal"], &step["answer"]["differences"]), (&false.into(), &expected));
    Ok(())
}

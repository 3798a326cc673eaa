#![expect(unsafe_code, reason = "a library is loaded, and two functions of it are called")]

//! The checks of the host's GPU driver.

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use sluice_api::v1::HostMemoryAccess;
use sluice_sandbox::DriverList;

use super::{Finding, Verdict};

/// Time limit for a program of the driver.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The oldest supported driver: CUDA 12.0.
const LEAST: i32 = 12_000;

/// The library that programs load without Sluice.
pub(super) const USUAL: &str = "libcuda.so.1";
/// The software GPU, which needs no kernel module.
const SOFTWARE: &str = "libsoftgpu_cuda.so";

/// Checks the named driver, or else the configured one, or else the system's.
pub(super) fn look(named: Option<&Path>, configured: Option<&Path>) -> Vec<Finding> {
    let library = named.or(configured).unwrap_or(Path::new(USUAL));
    // The service cannot run without its configured driver; without another one, `sluice run` may still work.
    let missing = if Some(library) == configured { Verdict::Bad } else { Verdict::Poor };
    let mut findings = vec![loads(library, missing)];
    if is_software(library) {
        return findings;
    }
    let Some(version) = fs::read_to_string("/proc/driver/nvidia/version").ok() else {
        let advice = "load the driver's kernel module, or compute on the software GPU with `sluice run` and `sluice host`";
        findings.push(Finding::new(
            "kernel module",
            Verdict::Poor,
            "the nvidia module is not loaded",
            advice,
        ));
        return findings;
    };
    findings.push(Finding::good("kernel module", version.lines().next().unwrap_or_default()));
    findings.push(lists(library));
    findings.push(host_memory());
    findings.extend(cards());
    findings
}

/// Loads the driver and returns `VERSION RESULT`: its CUDA version, and the result of `cuInit`.
pub(super) fn load(library: &Path) -> Result<String> {
    // SAFETY: loading runs the library's initializers; the user named the driver, and this process does nothing else.
    let library = unsafe { libloading::Library::new(library) }?;
    // SAFETY: the type is that of the CUDA driver API.
    let init: libloading::Symbol<'_, unsafe extern "C" fn(u32) -> i32> = unsafe { library.get(b"cuInit") }?;
    // SAFETY: likewise.
    let version: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
        unsafe { library.get(b"cuDriverGetVersion") }?;
    let mut number = 0;
    // SAFETY: a pointer to a number that it fills.
    let asked = unsafe { version(&raw mut number) };
    anyhow::ensure!(asked == 0, "cuDriverGetVersion fails with {asked}");
    // SAFETY: 0 is the only defined flag.
    let started = unsafe { init(0) };
    Ok(format!("{number} {started}\n"))
}

fn is_software(library: &Path) -> bool {
    library.file_name().is_some_and(|name| name == SOFTWARE)
}

fn loads(library: &Path, missing: Verdict) -> Finding {
    const NAME: &str = "driver";
    let shown = library.display();
    let said = env::current_exe().context("the sluice program is gone").and_then(|program| {
        let mut command = Command::new(program);
        command.args(["doctor", "--load", "--driver"]).arg(library);
        // A software GPU makes its device when it starts: a temporary one here, not that of the service.
        let device = is_software(library).then(|| tempfile::tempdir_in("/dev/shm")).transpose()?;
        command.envs(device.iter().map(|device| ("SLUICE_SOFTGPU_STATE", device.path())));
        output(&mut command)
    });
    let said = match said {
        Ok(said) => said,
        Err(error) => {
            let advice = "install NVIDIA's driver, or name another with --driver";
            return Finding::new(NAME, missing, format!("{shown} does not load: {error:#}"), advice);
        }
    };
    judge(&shown.to_string(), &said)
}

/// Rates the answer of the process that loaded the driver.
fn judge(library: &str, said: &str) -> Finding {
    const NAME: &str = "driver";
    let mut numbers = said.split_whitespace().map(|word| word.parse::<i32>().ok());
    let (Some(version), Some(started)) = (numbers.next().flatten(), numbers.next().flatten()) else {
        return Finding::new(NAME, Verdict::Unknown, format!("cannot parse the answer of {library}"), "");
    };
    let found = format!("{library}, CUDA {}.{}", version / 1000, version % 1000 / 10);
    if started != 0 {
        let advice = "look at the kernel's log (dmesg) for NVRM; 100 means no device, 803 that library and module differ in version";
        return Finding::new(
            NAME,
            Verdict::Bad,
            format!("{found}; it does not start: error {started}"),
            advice,
        );
    }
    if version < LEAST {
        return Finding::new(NAME, Verdict::Bad, found, "CUDA 12.0 or newer is needed");
    }
    Finding::good(NAME, found)
}

/// Checks that the processes of Sluice have a list of requests and files for the driver; they load no other one.
fn lists(library: &Path) -> Finding {
    const NAME: &str = "list of the driver";
    match DriverList::of_library(library) {
        Ok(DriverList::Nvidia(branch)) => Finding::good(NAME, format!("that of branch {branch}")),
        Ok(DriverList::Software) => Finding::good(NAME, "that of a driver without a device"),
        Err(error) => {
            let advice = "install a driver of a branch that has a list: no process of Sluice loads this one";
            Finding::new(NAME, Verdict::Bad, error.to_string(), advice)
        }
    }
}

const HOST_MEMORY: &str = "HMM and ATS";
const HMM_OFF: &str = "options nvidia_uvm uvm_disable_hmm=1 in a file of /etc/modprobe.d or /usr/lib/modprobe.d (sluice-host \
    installs /usr/lib/modprobe.d/sluice.conf), and reload the module while no program uses CUDA: rmmod nvidia_uvm && modprobe \
    nvidia_uvm; until then kernels of a guest can read and write all memory of their worker, and a unit serves one VM at a time, \
    unless share-with-host-memory-access is configured";

/// Checks if kernels could reach memory of the worker's process that was not given to the guest.
fn host_memory() -> Finding {
    let parameter = |name: &str| {
        fs::read_to_string(format!("/sys/module/nvidia_uvm/parameters/{name}"))
            .ok()
            .map(|text| text.trim().to_owned())
    };
    rate_parameters(parameter("uvm_disable_hmm").as_deref(), parameter("uvm_ats_mode").as_deref())
}

/// Rates the parameters of the module nvidia_uvm.
fn rate_parameters(hmm_disabled: Option<&str>, ats_mode: Option<&str>) -> Finding {
    match (hmm_disabled, ats_mode) {
        (Some("Y" | "1"), None | Some("0")) => Finding::good(HOST_MEMORY, "off"),
        (Some("Y" | "1"), Some(mode)) => Finding::new(
            HOST_MEMORY,
            Verdict::Unknown,
            format!("HMM is off, ATS mode is {mode}"),
            "ATS matters if CPU and GPU share an address space: then a unit serves one VM at a time; uvm_ats_mode=0 switches it off",
        ),
        (Some(_), _) => {
            Finding::new(HOST_MEMORY, Verdict::Poor, "HMM is on, if the kernel supports it", HMM_OFF)
        }
        (None, _) => Finding::new(HOST_MEMORY, Verdict::Unknown, "nvidia_uvm is not loaded", HMM_OFF),
    }
}

/// Checks the report of a unit's arbiter: if kernels reach host memory, VMs share the unit only if that is configured.
pub(super) fn rate_host_access(unit: u32, access: Option<HostMemoryAccess>) -> Option<Finding> {
    let (how, advice) = match access? {
        HostMemoryAccess::None => return None,
        HostMemoryAccess::Pageable => ("HMM, attribute 88", HMM_OFF),
        HostMemoryAccess::HostPageTables => (
            "the host's page tables, attribute 100",
            "use a VM of its own for each unit; uvm_ats_mode=0 of the module nvidia_uvm switches ATS off",
        ),
    };
    let found = format!("unit {unit}: kernels can reach all host memory of their worker ({how})");
    Some(Finding::new(HOST_MEMORY, Verdict::Poor, found, advice))
}

/// Checks each GPU with the driver's own tool.
fn cards() -> Vec<Finding> {
    let mut command = Command::new("nvidia-smi");
    command.args([
        "--format=csv,noheader",
        "--query-gpu=index,name,ecc.mode.current,persistence_mode,compute_mode,mig.mode.current",
    ]);
    match output(&mut command) {
        Ok(text) => text.lines().flat_map(card).collect(),
        Err(error) => {
            let advice = "ECC, persistence and compute mode were not checked";
            vec![Finding::new("ECC", Verdict::Unknown, format!("nvidia-smi: {error:#}"), advice)]
        }
    }
}

/// Rates a line of nvidia-smi.
fn card(line: &str) -> Vec<Finding> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [index, name, ecc, persistence, compute, mig] = fields[..] else {
        return vec![Finding::new(
            "GPU",
            Verdict::Unknown,
            format!("unexpected line of nvidia-smi: {line:?}"),
            "",
        )];
    };
    let gpu = format!("GPU {index}, {name}");
    let judge = |what, found: &str, good: bool, verdict, advice: &str| {
        let found = format!("{gpu}: {found}");
        if good { Finding::good(what, found) } else { Finding::new(what, verdict, found, advice) }
    };
    vec![
        judge(
            "ECC",
            ecc,
            ecc == "Enabled",
            Verdict::Poor,
            "nvidia-smi -e 1 and a reset: without ECC, errors in memory are silent",
        ),
        judge(
            "persistence",
            persistence,
            persistence == "Enabled",
            Verdict::Poor,
            "run nvidia-persistenced: without it, the first session waits for the driver",
        ),
        judge(
            "compute mode",
            compute,
            compute == "Default",
            Verdict::Bad,
            "nvidia-smi -c 0: arbiter and workers share the GPU",
        ),
        Finding::good("MIG", format!("{gpu}: {mig}")),
    ]
}

/// Standard output of a program, within the time limit.
fn output(command: &mut Command) -> Result<String> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let deadline = Instant::now() + TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("no answer in {TIMEOUT:?}");
        }
        thread::sleep(Duration::from_millis(20));
    }
    // The output is a few lines, which fit into the pipe.
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{} {}", output.status, said.lines().last().unwrap_or_default());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: A21
    #[test]
    fn driver_that_does_not_start_or_is_too_old_is_bad() {
        let verdict = |said| judge("libcuda.so.1", said).verdict;
        assert_eq!(verdict("13040 0\n"), Verdict::Good);
        assert_eq!(verdict("13040 803\n"), Verdict::Bad);
        assert_eq!(verdict("11080 0\n"), Verdict::Bad);
        assert_eq!(verdict("what\n"), Verdict::Unknown);
        assert!(judge("x", "13040 0").found.contains("CUDA 13.4"));
    }

    // Promise: A21, F110
    #[test]
    fn driver_of_a_branch_without_a_list_is_bad_and_the_branches_are_named() {
        let place = tempfile::tempdir().expect("a folder");
        let rated = |name: &str| {
            let library = place.path().join(name);
            fs::write(&library, "").expect("written");
            lists(&library)
        };
        let unknown = rated("libcuda.so.999.10.01");
        assert_eq!(unknown.verdict, Verdict::Bad);
        for words in ["999.10.01", "no list", "535, 550", "595"] {
            assert!(unknown.found.contains(words), "{}", unknown.found);
        }
        let known = rated("libcuda.so.580.95.05");
        assert_eq!((known.verdict, &*known.found), (Verdict::Good, "that of branch 580"));
    }

    // Promise: A21
    #[test]
    fn driver_with_hmm_is_poor_and_the_advice_names_the_option_and_the_rule() {
        let hmm = rate_parameters(Some("N"), Some("1"));
        assert_eq!(hmm.verdict, Verdict::Poor);
        for words in ["uvm_disable_hmm=1", "rmmod nvidia_uvm && modprobe nvidia_uvm", "one VM at a time"] {
            assert!(hmm.advice.contains(words), "{}", hmm.advice);
        }
        assert_eq!(rate_parameters(Some("Y"), Some("0")).verdict, Verdict::Good);
        assert_eq!(rate_parameters(Some("Y"), Some("1")).verdict, Verdict::Unknown);
        assert_eq!(rate_parameters(None, None).verdict, Verdict::Unknown);

        let rated = |access| rate_host_access(3, Some(access));
        assert!(rated(HostMemoryAccess::None).is_none() && rate_host_access(3, None).is_none());
        let pageable = rated(HostMemoryAccess::Pageable).expect("a finding");
        assert_eq!((pageable.verdict, &pageable.advice), (Verdict::Poor, &hmm.advice));
        let tables = rated(HostMemoryAccess::HostPageTables).expect("a finding");
        assert!(
            tables.found.contains("unit 3") && tables.found.contains("attribute 100"),
            "{}",
            tables.found
        );
    }

    // Promise: A21
    #[test]
    fn gpu_in_exclusive_compute_mode_is_bad() {
        let verdicts = |line| card(line).iter().map(|finding| finding.verdict).collect::<Vec<_>>();
        use Verdict::{Bad, Good, Poor, Unknown};
        assert_eq!(verdicts("0, NVIDIA H200, Enabled, Enabled, Default, Disabled"), [Good, Good, Good, Good]);
        assert_eq!(
            verdicts("0, NVIDIA X, [N/A], Disabled, Exclusive_Process, [N/A]"),
            [Poor, Poor, Bad, Good]
        );
        assert_eq!(verdicts("No devices were found"), [Unknown]);
    }
}

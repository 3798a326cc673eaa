//! The driver that programs find, and its start.

use std::path::Path;

use anyhow::Result;

use super::{Finding, Verdict};
use crate::loader::{self, FoundDriver, LIBRARIES, LINE};

const LIBRARY: &str = "libcuda.so.1";
const START: &str = "start";

/// Checks the driver.
pub(super) fn look() -> Vec<Finding> {
    let mut findings = judge(&loader::find(), loader::is_on(), Path::new(LIBRARIES).exists());
    findings.extend(kernel_module(Path::new("/proc/driver/nvidia/version").exists()));
    findings
}

/// The findings that follow from an attempt to load the driver.
fn judge(found: &Result<FoundDriver>, on: Option<bool>, installed: bool) -> Vec<Finding> {
    let found = match found {
        Ok(found) => found,
        // The loader's message for a file that does not exist.
        Err(error) if !format!("{error:#}").contains("cannot open shared object file") => {
            return vec![Finding::new(
                START,
                Verdict::Bad,
                format!("{error:#}"),
                "is the host's sluiced running? `SLUICE_LOG=info sluice-guest load` shows how far it comes",
            )];
        }
        Err(error) => {
            let advice = match (installed, on) {
                (false, _) => "install the package sluice-guest",
                (true, Some(true)) => "`ldconfig` as root: the loader's cache may be older than the package",
                (true, _) => "`sluice-guest enable` as root puts Sluice's libraries in the loader's path",
            };
            return vec![Finding::new(
                LIBRARY,
                Verdict::Bad,
                format!("programs find no driver: {error:#}"),
                advice,
            )];
        }
    };
    let path = found.path.display();
    if !found.ours {
        let advice = match on {
            Some(false) => {
                "Sluice's libraries are switched off here: `sluice-guest enable` as root".to_owned()
            }
            Some(true) => format!(
                "another driver comes first, by LD_LIBRARY_PATH or a file before {LINE}: take it away, or start programs with \
                 LD_LIBRARY_PATH={LIBRARIES}"
            ),
            None => "install the package sluice-guest".to_owned(),
        };
        return vec![Finding::new(
            LIBRARY,
            Verdict::Bad,
            format!("programs find {path}, which is not Sluice's"),
            advice,
        )];
    }
    let mut findings = vec![Finding::good(LIBRARY, format!("programs find {path}, Sluice's"))];
    // The library's own message is nearer to the cause than the error code.
    let said = found.said.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
    findings.push(match found.started {
        Ok(0) => Finding::new(START, Verdict::Bad, "it starts and finds no device", "is CUDA_VISIBLE_DEVICES set?"),
        Ok(devices) => Finding::good(START, format!("it starts and finds {devices} devices")),
        Err(error) => Finding::new(
            START,
            Verdict::Bad,
            format!("cuInit fails with {error}{said}"),
            "see above; where all of that is good, the host has refused: `sluice show VM` and `sluice events` there say why \
             (a fenced VM, no memory left, guest memory that is not shared and sealed)",
        ),
    });
    findings
}

/// A GPU of this guest beside Sluice's.
fn kernel_module(there: bool) -> Option<Finding> {
    there.then(|| {
        let advice = "this guest has a GPU of its own; programs use that one after `sluice-guest disable`";
        Finding::new("NVIDIA's kernel module", Verdict::Poor, "it is loaded as well", advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(ours: bool, started: Result<i64, i64>) -> Result<FoundDriver> {
        Ok(FoundDriver {
            path: "/usr/lib/libcuda.so.1".into(),
            ours,
            started,
            said: "sluice: the reason".to_owned(),
        })
    }

    fn one(findings: &[Finding], name: &str) -> (Verdict, String) {
        let finding = findings.iter().find(|finding| finding.name == name);
        let finding = finding.unwrap_or_else(|| panic!("nothing about {name}: {findings:?}"));
        (finding.verdict, format!("{} / {}", finding.found, finding.advice))
    }

    // Promise: G21
    #[test]
    fn shadowing_driver_is_distinguished_from_a_missing_one() {
        let none = || Err(anyhow::anyhow!("libcuda.so.1: cannot open shared object file"));
        for (found, on, installed, says) in [
            (none(), None, false, "install the package"),
            (none(), Some(true), true, "ldconfig"),
            (none(), Some(false), true, "sluice-guest enable"),
            (found(false, Ok(1)), Some(false), true, "switched off"),
            (found(false, Ok(1)), Some(true), true, "another driver comes first"),
            (found(false, Ok(1)), None, false, "install the package"),
        ] {
            let (verdict, text) = one(&judge(&found, on, installed), LIBRARY);
            assert!(verdict == Verdict::Bad && text.contains(says), "{says}: {text}");
        }
    }

    // Promise: G21
    #[test]
    fn driver_that_fails_to_start_is_reported_with_its_message() {
        let (verdict, text) = one(&judge(&found(true, Err(999)), Some(true), true), START);
        assert!(verdict == Verdict::Bad && text.contains("999: sluice: the reason"), "{text}");
        let (verdict, text) = one(&judge(&found(true, Ok(0)), Some(true), true), START);
        assert!(verdict == Verdict::Bad && text.contains("no device"), "{text}");
        let (verdict, _) = one(&judge(&found(true, Ok(1)), Some(true), true), START);
        assert_eq!(verdict, Verdict::Good);
    }

    #[test]
    fn gpu_of_the_guest_is_reported() {
        assert_eq!(kernel_module(false), None);
        assert_eq!(kernel_module(true).unwrap().verdict, Verdict::Poor);
    }
}

//! `sluice doctor`: a check of whether this host can serve VMs and programs through Sluice, with advice if it cannot.
//!
//! The command line calls it. It owns the list of checks and their advice. It changes nothing. A library that may crash is loaded by a process of its own.

mod cgroups;
mod driver;
mod kernel;

use std::path::PathBuf;

use anyhow::{Result, bail};
use rustix::process::Resource;
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_api::{
    client::Client,
    v1::{Host, UnitState},
};

use crate::{
    api::{Api, plain, print},
    files,
    look::readiness,
    table::{Table, text},
};

/// The configuration file of the package.
const CONFIGURATION: &str = "/etc/sluice/sluiced.toml";

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    api: Api,
    /// CUDA driver library [default: that of sluiced, or of its configuration, or libcuda.so.1]
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
    /// Load the driver, describe it, and exit; internal
    #[arg(long, hide = true)]
    load: bool,
}

/// The rating of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Good,
    /// Sluice works, but slower or less safely than it could.
    Poor,
    /// Sluice does not work.
    Bad,
    /// The check could not be made.
    Unknown,
}

/// The result of one check.
#[derive(Clone, Debug)]
pub(super) struct Finding {
    name: &'static str,
    verdict: Verdict,
    found: String,
    /// A remedy; empty if none is needed.
    advice: String,
}

impl Finding {
    pub(super) fn good(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Good, found: found.into(), advice: String::new() }
    }

    pub(super) fn new(
        name: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { name, verdict, found: found.into(), advice: advice.into() }
    }
}

/// Makes all checks; fails if one is bad.
pub(crate) fn doctor(arguments: &Arguments) -> Result<()> {
    let named = arguments.driver.clone();
    if arguments.load {
        return print(&driver::load(&named.unwrap_or_else(|| driver::USUAL.into()))?);
    }
    let host = arguments.api.ask(Client::host).map_err(|error| error.to_string());
    let mut findings = vec![programs()];
    findings.extend(kernel::look());
    findings.extend(cgroups::look(host.as_ref().ok()));
    findings.extend(driver::look(named.as_deref(), configured(host.as_ref().ok()).as_deref()));
    findings.extend(limits(host.as_ref().ok()));
    findings.extend(privilege(host.as_ref().ok()));
    findings.extend(daemon(&arguments.api, &host));
    show(&findings, arguments.api.json)?;
    let bad = findings.iter().filter(|finding| finding.verdict == Verdict::Bad).count();
    if bad > 0 {
        bail!("{bad} of {} checks failed", findings.len());
    }
    Ok(())
}

fn show(findings: &[Finding], as_json: bool) -> Result<()> {
    let word = |verdict| match verdict {
        Verdict::Good => "good",
        Verdict::Poor => "poor",
        Verdict::Bad => "BAD",
        Verdict::Unknown => "unknown",
    };
    if as_json {
        let all: Vec<Value> = findings
            .iter()
            .map(|finding| {
                json!({ "name": finding.name, "verdict": word(finding.verdict).to_lowercase(),
                    "found": finding.found, "advice": finding.advice })
            })
            .collect();
        return print(&(serde_json::to_string_pretty(&json!({ "findings": all }))? + "\n"));
    }
    let mut table = Table::new(&["WHAT", "VERDICT", "FOUND"]);
    for finding in findings {
        table.row([finding.name.to_owned(), word(finding.verdict).to_owned(), plain(&finding.found)]);
        if !finding.advice.is_empty() {
            table.row([String::new(), String::new(), format!("→ {}", finding.advice)]);
        }
    }
    print(&table.to_string())
}

/// Checks that Sluice's programs are installed.
fn programs() -> Finding {
    const NAME: &str = "programs";
    let found = files::daemon().and_then(|path| files::SHIM.find().map(|_| path));
    match found {
        Ok(path) => Finding::good(NAME, format!("{} and its programs", path.display())),
        Err(error) => Finding::new(NAME, Verdict::Bad, "incomplete", format!("{error:#}").replace('\n', ";")),
    }
}

/// The driver that the service computes on: from the daemon if it runs, else from its configuration.
fn configured(host: Option<&Host>) -> Option<PathBuf> {
    /// The part of the configuration that the check needs.
    #[derive(Deserialize)]
    struct CheckedConfiguration {
        driver: Option<PathBuf>,
    }
    if let Some(host) = host {
        return Some(host.driver.clone().into());
    }
    let text = std::fs::read_to_string(CONFIGURATION).ok()?;
    toml::from_str::<CheckedConfiguration>(&text).ok()?.driver
}

/// Limits of the launcher, above which those of workers and arbiters cannot be; of this shell if sluiced does not run.
fn limits(host: Option<&Host>) -> Vec<Finding> {
    const FILES: u64 = 65_536;
    const NAMES: [&str; 2] = ["open files", "locked memory"];
    let of = host.and_then(|host| {
        let text = std::fs::read_to_string(format!("/proc/{}/limits", launcher_of(host))).ok()?;
        Some((limit_of(&text, "Max open files")?, limit_of(&text, "Max locked memory")?))
    });
    let own = |resource| rustix::process::getrlimit(resource).current.unwrap_or(u64::MAX);
    let (whose, (files, locked)) = match of {
        Some(limits) => ("Sluice", limits),
        None => ("this shell", (own(Resource::Nofile), own(Resource::Memlock))),
    };
    let files = if files >= FILES {
        Finding::good(NAMES[0], format!("{files} ({whose})"))
    } else {
        let advice = format!(
            "LimitNOFILE={FILES} in the service: every session and every chunk on loan is a descriptor"
        );
        Finding::new(NAMES[0], Verdict::Poor, format!("{files} ({whose})"), advice)
    };
    let locked = if locked == u64::MAX {
        Finding::good(NAMES[1], format!("unlimited ({whose})"))
    } else {
        let advice = "LimitMEMLOCK=infinity in the service: guest memory is pinned for copies; Sluice's own `pinned` quota bounds it";
        Finding::new(NAMES[1], Verdict::Poor, format!("{} KiB ({whose})", locked >> 10), advice)
    };
    vec![files, locked]
}

/// The process that starts the others.
fn launcher_of(host: &Host) -> u32 {
    host.launcher_process.unwrap_or(host.process)
}

/// Checks that `sluiced`, which reads requests of tenants, is not root.
fn privilege(host: Option<&Host>) -> Option<Finding> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host?.process)).ok()?;
    Some(rate_privilege(&status))
}

/// Rates a file `status` of the kernel.
fn rate_privilege(status: &str) -> Finding {
    const NAME: &str = "user of sluiced";
    let value = |name| status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next();
    match (value("Uid:"), value("CapEff:")) {
        (Some("0"), _) => {
            let advice = "use the packaged services sluiced and sluice-launcher, or --launcher: a flaw in the management API opens the host to the API's clients";
            Finding::new(NAME, Verdict::Poor, "root", advice)
        }
        (Some(user), Some("0000000000000000")) => {
            Finding::good(NAME, format!("{user}, without capabilities"))
        }
        (Some(user), capabilities) => {
            let found = format!("{user}, with the capabilities {}", capabilities.unwrap_or("?"));
            Finding::new(
                NAME,
                Verdict::Poor,
                found,
                "remove AmbientCapabilities= from its unit: it needs none",
            )
        }
        (None, _) => Finding::new(NAME, Verdict::Unknown, "it cannot be read", ""),
    }
}

/// A soft limit in the kernel's list.
fn limit_of(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let soft = rest.split_whitespace().next()?;
    if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() }
}

/// The state that the daemon reports.
fn daemon(api: &Api, host: &Result<Host, String>) -> Vec<Finding> {
    const NAME: &str = "sluiced";
    let host = match host {
        Ok(host) => host,
        Err(error) => {
            let first = error.lines().next().unwrap_or_default();
            let advice = "start it, or name its socket with --socket; the checks that need it were skipped";
            return vec![Finding::new(NAME, Verdict::Unknown, first, advice)];
        }
    };
    let mut findings = vec![match readiness(api) {
        Ok((true, _)) => Finding::good(NAME, format!("version {}, ready", text(&host.version))),
        Ok((false, why)) => Finding::new(
            NAME,
            Verdict::Bad,
            format!("not ready: {}", why.join("; ")),
            "see docs/operations.md, SluiceNotReady",
        ),
        Err(error) => Finding::new(NAME, Verdict::Bad, format!("{error:#}"), "see its log"),
    }];
    findings.push(if host.scrub {
        Finding::good("scrub policy", "memory is cleared between owners")
    } else {
        let advice = "remove SLUICE_UNSAFE_NO_SCRUB: a tenant can read memory of the previous one";
        Finding::new("scrub policy", Verdict::Bad, "SCRUBBING IS OFF", advice)
    });
    if let Some(why) = &host.recovered {
        let advice = "compare `sluice list` with the records of the control plane";
        findings.push(Finding::new(
            "state",
            Verdict::Poor,
            format!("the last checkpoint was not used: {why}"),
            advice,
        ));
    }
    if let Ok(units) = api.ask(Client::units) {
        for unit in &units.units {
            findings.extend(driver::rate_host_access(unit.unit, unit.host_memory_access));
            let name = format!("unit {} is {}", unit.unit, unit.state);
            findings.push(match unit.state {
                UnitState::Lending => Finding::good("unit", name),
                UnitState::Quarantined => {
                    let reason = text(&unit.reason);
                    Finding::new(
                        "unit",
                        Verdict::Bad,
                        format!("{name}: {reason}"),
                        "see docs/operations.md, SluiceUnitQuarantined",
                    )
                }
                _ => Finding::new(
                    "unit",
                    Verdict::Poor,
                    name,
                    "wait until its memory is clean; see the log if that takes minutes",
                ),
            });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: F95
    #[test]
    fn sluiced_that_is_root_or_has_capabilities_is_poor() {
        let rate = |user: &str, capabilities: &str| {
            let status = format!("Name:\tsluiced\nUid:\t{user}\t0\t0\t0\nCapEff:\t{capabilities}\n");
            rate_privilege(&status).verdict
        };
        assert_eq!(rate("999", "0000000000000000"), Verdict::Good);
        assert_eq!(rate("0", "0000000000000000"), Verdict::Poor);
        assert_eq!(rate("999", "00000000000000c0"), Verdict::Poor);
        assert_eq!(rate_privilege("").verdict, Verdict::Unknown);
    }

    #[test]
    fn soft_limits_are_read_from_the_limits_file_of_the_kernel() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max locked memory         unlimited            unlimited            bytes\n\
                    Max open files            1024                 524288               files\n";
        assert_eq!(limit_of(text, "Max open files"), Some(1024));
        assert_eq!(limit_of(text, "Max locked memory"), Some(u64::MAX));
        assert_eq!(limit_of(text, "Max processes"), None);
    }
}

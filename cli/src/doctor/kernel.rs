//! The checks of the kernel's features and settings.

use std::{fs, io};

use ::landlock::{ABI, Access as _, AccessFs, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _};

use super::{Finding, Verdict};

/// Mappings of one process: a worker may map each run of a guest's pages separately.
const MAPPINGS: u64 = 262_144;

/// Checks the kernel.
pub(super) fn look() -> Vec<Finding> {
    let mut findings = vec![version(), kvm(), mappings(), sandbox(), namespaces(), landlock(), overcommit()];
    findings.push(iommu());
    findings
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn version() -> Finding {
    const NAME: &str = "kernel";
    const LEAST: (u32, u32) = (5, 14);
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) if (major, minor) >= LEAST => Finding::good(NAME, release),
        (Some(_), Some(_)) => {
            let advice =
                format!("{}.{} or newer is needed: pidfds, memfd seals, cgroup.kill", LEAST.0, LEAST.1);
            Finding::new(NAME, Verdict::Bad, release, advice)
        }
        _ => Finding::new(NAME, Verdict::Unknown, "the version cannot be read", ""),
    }
}

fn kvm() -> Finding {
    const NAME: &str = "KVM";
    match fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Finding::good(NAME, "/dev/kvm can be used"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Finding::new(
            NAME,
            Verdict::Poor,
            "/dev/kvm: permission denied",
            "add the user of the VMMs to the group kvm",
        ),
        Err(error) => {
            let advice = "switch virtualization on in the firmware and load kvm_intel or kvm_amd; without KVM, VMs are slow";
            Finding::new(NAME, Verdict::Poor, format!("/dev/kvm: {error}"), advice)
        }
    }
}

fn mappings() -> Finding {
    const NAME: &str = "vm.max_map_count";
    match read("/proc/sys/vm/max_map_count").and_then(|text| text.parse::<u64>().ok()) {
        Some(count) if count >= MAPPINGS => Finding::good(NAME, count.to_string()),
        Some(count) => {
            let advice = format!(
                "sysctl vm.max_map_count={MAPPINGS}: beyond it, pages of a fragmented guest are copied"
            );
            Finding::new(NAME, Verdict::Poor, count.to_string(), advice)
        }
        None => Finding::new(NAME, Verdict::Unknown, "the setting cannot be read", ""),
    }
}

fn sandbox() -> Finding {
    const NAME: &str = "seccomp";
    let actions = read("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "kill_process") {
        Finding::good(NAME, "filters can end a process")
    } else {
        let advice = "use a kernel with CONFIG_SECCOMP_FILTER: devices and workers run behind a filter";
        Finding::new(NAME, Verdict::Bad, "no filters", advice)
    }
}

/// Settings that forbid user namespaces, with the value that does.
const FORBIDDING: [(&str, &str); 3] = [
    ("user/max_user_namespaces", "0"),
    ("kernel/unprivileged_userns_clone", "0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),
];

fn namespaces() -> Finding {
    const NAME: &str = "user namespaces";
    let forbids =
        |(setting, value): &(&str, &str)| read(&format!("/proc/sys/{setting}")).as_deref() == Some(value);
    if let Some((setting, value)) = FORBIDDING.iter().find(|pair| forbids(pair)) {
        let name = setting.replace('/', ".");
        let is = format!("forbidden by {name}={value}");
        let advice = format!(
            "change {name}, or permit them for sluice-launcher: without them workers see the host's network and files"
        );
        return Finding::new(NAME, Verdict::Poor, is, advice);
    }
    if fs::exists("/proc/self/ns/user").unwrap_or(false) {
        Finding::good(NAME, "each worker can have a root, a network and IPC objects of its own")
    } else {
        let advice = "use a kernel with CONFIG_USER_NS: without it workers see the host's network and files";
        Finding::new(NAME, Verdict::Poor, "not in this kernel", advice)
    }
}

fn landlock() -> Finding {
    const NAME: &str = "Landlock";
    // Rules that are never entered. The list of security modules says less: it is in a file system that containers do not mount.
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .and_then(Ruleset::create);
    match rules {
        Ok(_) => Finding::good(NAME, "processes can be confined to a list of files"),
        Err(error) => {
            let advice = "start a kernel that has Landlock with landlock in lsm=, and let a container's filter permit it: without it only namespaces and users confine processes";
            Finding::new(NAME, Verdict::Poor, format!("off: {error}"), advice)
        }
    }
}

fn overcommit() -> Finding {
    const NAME: &str = "vm.overcommit_memory";
    match read("/proc/sys/vm/overcommit_memory").as_deref() {
        Some("2") => {
            let advice =
                "sysctl vm.overcommit_memory=0: drivers reserve address space as large as all GPUs' memory";
            Finding::new(NAME, Verdict::Poor, "2: strict", advice)
        }
        Some(mode) => Finding::good(NAME, mode),
        None => Finding::new(NAME, Verdict::Unknown, "the setting cannot be read", ""),
    }
}

fn iommu() -> Finding {
    let count = fs::read_dir("/sys/class/iommu").map_or(0, Iterator::count);
    let is = if count > 0 { "on" } else { "off" };
    Finding::good("IOMMU", format!("{is}; not needed: the GPU stays with the host's driver"))
}

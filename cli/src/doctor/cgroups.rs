//! The checks of cgroups, by which VMs get limits on the host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use sluice_api::v1::Host;

use super::{Finding, Verdict, launcher_of};

/// The root of all cgroups of version 2.
const ROOT: &str = "/sys/fs/cgroup";
/// Controllers of a VM's limits: of memory, threads, processor time and huge pages.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "hugetlb"];
/// The group of the launcher in the directory with the groups of VMs.
const DAEMON: &str = "daemon";

/// Checks the host's cgroups, and those of the launcher if it runs.
pub(super) fn look(host: Option<&Host>) -> Vec<Finding> {
    let mut findings = vec![of_host(Path::new(ROOT))];
    if let Some(host) = host
        && let Ok(own) = fs::read_to_string(format!("/proc/{}/cgroup", launcher_of(host)))
    {
        findings.push(of_vms(Path::new(ROOT), &own));
    }
    findings
}

fn of_host(root: &Path) -> Finding {
    const NAME: &str = "cgroups";
    let Ok(offered) = fs::read_to_string(root.join("cgroup.controllers")) else {
        let advice = "boot with systemd.unified_cgroup_hierarchy=1: without cgroup v2, VMs have no limits, and workers cannot be users of their own";
        return Finding::new(NAME, Verdict::Poor, "not version 2", advice);
    };
    match missing(&offered) {
        missing if missing.is_empty() => Finding::good(NAME, "version 2"),
        missing => {
            let advice = "use a kernel with these controllers, and remove cgroup_disable= from its command line: VMs have no such limits";
            Finding::new(NAME, Verdict::Poor, format!("version 2, without {}", missing.join(", ")), advice)
        }
    }
}

/// Checks the directory of the launcher, of which `own` is the file `cgroup`.
fn of_vms(root: &Path, own: &str) -> Finding {
    const NAME: &str = "limits of VMs";
    let advice = "set cgroup in sluiced.toml or --cgroup in both units, and the same path as SLUICE_RELEASED_CGROUP in the launcher's unit, which needs Delegate=yes, DelegateSubgroup=daemon and ExecStopPost= as packaged";
    let Some(directory) = directory_of_vms(root, own) else {
        return Finding::new(NAME, Verdict::Poor, "none: the launcher is in no group for it alone", advice);
    };
    let enabled = fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap_or_default();
    match missing(&enabled) {
        missing if missing.is_empty() => Finding::good(NAME, CONTROLLERS.join(", ")),
        missing => Finding::new(NAME, Verdict::Poor, format!("without {}", missing.join(", ")), advice),
    }
}

/// The directory with the groups of VMs.
fn directory_of_vms(root: &Path, own: &str) -> Option<PathBuf> {
    let group = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let parent = Path::new(group).parent().filter(|_| Path::new(group).ends_with(DAEMON))?;
    Some(root.join(parent))
}

/// Controllers that are not in a list.
fn missing(list: &str) -> Vec<&'static str> {
    let all = |controller: &&str| !list.split_whitespace().any(|listed| listed == *controller);
    CONTROLLERS.into_iter().filter(all).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: F86
    #[test]
    fn missing_controllers_are_named_with_advice() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path();
        assert_eq!(of_host(path).found, "not version 2");
        fs::write(path.join("cgroup.controllers"), "cpuset cpu io memory hugetlb pids rdma")
            .expect("written");
        assert_eq!(of_host(path).verdict, Verdict::Good);
        fs::write(path.join("cgroup.controllers"), "cpuset cpu pids").expect("written");
        let found = of_host(path);
        assert_eq!(
            (found.verdict, found.found.as_str()),
            (Verdict::Poor, "version 2, without memory, hugetlb")
        );
        assert!(!found.advice.is_empty());

        let own = "4:memory:/x\n0::/system.slice/sluiced.service/daemon\n";
        let directory = path.join("system.slice/sluiced.service");
        fs::create_dir_all(&directory).expect("a directory");
        assert_eq!(of_vms(path, own).found, "without memory, pids, cpu, hugetlb");
        fs::write(directory.join("cgroup.subtree_control"), "cpu hugetlb memory pids\n").expect("written");
        assert_eq!(of_vms(path, own).verdict, Verdict::Good);
        for elsewhere in ["0::/user.slice/x\n", "0::/\n", "4:memory:/daemon\n"] {
            assert_eq!(of_vms(path, elsewhere).verdict, Verdict::Poor, "{elsewhere:?}");
        }
    }
}

//! The filters permit no call of Sluice's own code that no process makes: the calls of a host's processes are followed while it serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::process::Signal;
use sluice_api::v1::VmRequest;
use sluice_kit::front_end::{FREE, FrontEnd};
use sluice_kit::trace::{self, Call};
use sluice_protocol::{limits, session};
use sluice_sandbox::{DriverList, FilterProfile, Role, Rule};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::management;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Finished, kill, run, signal};
use sluice_tests::programs::{self, passed};
use sluice_tests::tenants::{Options, Tenants};

/// The VM of programs.
const DIRECT: u32 = 1;
/// The VM of a VMM, and of guests without shared memory.
const VIRTUAL: u32 = 2;

/// Rules that another test uses, by role and call, with that test.
const ELSEWHERE: [(&str, libc::c_long, &str); 7] = [
    ("arbiter", libc::SYS_pidfd_send_signal, "custody::malformed_custody_messages_end_the_worker"),
    ("arbiter", libc::SYS_ppoll, "filters::refused_call_of_a_driver_leaves_one_line"),
    ("device", libc::SYS_shutdown, "filters::standard_streams_are_neither_shut_down_nor_changed"),
    ("device", libc::SYS_getsockopt, "filters::process_that_reads_peer_credentials_is_killed"),
    ("device", SYS_CACHESTAT, "memory::session_ends_that_keeps_pages_which_the_host_took_back_and_no_other"),
    ("device of programs", libc::SYS_pipe2, "direct::signals_of_a_program_are_eventfds_and_for_one_session"),
    ("device of programs", libc::SYS_fallocate, "vsock::programs_print_the_same_without_shared_memory"),
];
/// The number of cachestat(2), which `libc` does not name yet.
const SYS_CACHESTAT: libc::c_long = 451;

/// The own rules of a role, and those that a call has matched.
struct Rules {
    all: Vec<Rule>,
    used: BTreeSet<usize>,
}

/// The calls of all processes of a launcher.
struct Followed {
    roles: BTreeMap<&'static str, Rules>,
    /// Filters that a process of a program has entered.
    filters: BTreeMap<(u32, PathBuf), u32>,
}

impl Followed {
    fn new() -> Self {
        let list = DriverList::Software;
        let roles = [
            ("device", Role::Device),
            ("device of programs", Role::DirectDevice),
            ("worker", Role::Worker(list)),
            ("arbiter", Role::Arbiter(list)),
        ];
        let rules = |role: Role| match role.profile() {
            FilterProfile::Allow(list) => Rules { all: list.ours, used: BTreeSet::new() },
            FilterProfile::Deny(all) => Rules { all, used: BTreeSet::new() },
        };
        let roles = roles.into_iter().map(|(name, role)| (name, rules(role))).collect();
        Self { roles, filters: BTreeMap::new() }
    }

    /// Notes a call, if its process is in a filter of its role.
    fn note(&mut self, call: Call) -> Option<()> {
        let status = fs::read_to_string(format!("/proc/{}/status", call.thread)).ok()?;
        let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
        let program = fs::read_link(format!("/proc/{process}/exe")).ok()?;
        let role = match program.file_name()?.to_str()? {
            "sluice-worker" => "worker",
            "sluice-arbiter" => "arbiter",
            "sluice-device" => {
                let arguments = fs::read(format!("/proc/{process}/cmdline")).ok()?;
                let is_direct = arguments.split(|byte| *byte == 0).any(|argument| argument == b"--direct");
                if is_direct { "device of programs" } else { "device" }
            }
            _ => return None,
        };
        let filters = self.filters.entry((process, program)).or_default();
        if *filters > 0 {
            let rules = self.roles.get_mut(role)?;
            let matched = |rule: &Rule| rule.matches(call.number, &call.arguments);
            rules.used.extend(rules.all.iter().position(matched));
        }
        *filters += u32::from(call.number == libc::SYS_seccomp.cast_unsigned());
        Some(())
    }

    /// The rules that no call has matched, with their reasons, by role.
    fn unused(&self) -> Vec<String> {
        let of = |(role, rules): (&&'static str, &Rules)| {
            let elsewhere =
                |rule: &Rule| ELSEWHERE.iter().any(|(of, call, _)| of == role && *call == rule.call);
            let unused =
                rules.all.iter().enumerate().filter(|(number, rule)| {
                    !rules.used.contains(number) && !rule.is_rare() && !elsewhere(rule)
                });
            unused.map(|(_, rule)| format!("{role}: call {}: {}", rule.call, rule.why)).collect::<Vec<_>>()
        };
        self.roles.iter().flat_map(of).collect()
    }
}

/// Runs a program over the socket for guests without shared memory.
fn run_streamed(tenants: &Tenants, name: &str) -> Result<Finished> {
    let socket = tenants.folder().join(format!("run/vm-{VIRTUAL}.vsock_{}", limits::STREAM_PORT));
    let mut command = tenants.command(VIRTUAL, &programs::program(name)?, &[]);
    command.env("SLUICE_TRANSPORT", "vsock").env("SLUICE_SOCKET", socket);
    run(&mut command, TIMEOUT)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(start.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// All that processes of a host do from their start to their end.
fn serve(tenants: Tenants) -> Result<()> {
    // The first arbiter was not followed from its start.
    let first = tenants.arbiter(0)?;
    kill(first);
    wait_until("another arbiter", || Ok(tenants.arbiter(0).is_ok_and(|arbiter| arbiter != first)))?;
    tenants.wait_for_unit(|unit| unit.is_some_and(|unit| unit.clean > 0))?;
    let vm = |direct| VmRequest { direct, memory_bytes: Some(64 << 20), ..VmRequest::default() };
    let vms = [(DIRECT, vm(true)), (VIRTUAL, vm(false))];
    management::make_vms(&tenants.folder().join("run/api.sock"), &vms)?;
    for name in ["vector_add", "print"] {
        passed(&tenants.run(DIRECT, &programs::program(name)?, &[])?).with_context(|| name)?;
    }
    passed(&run_streamed(&tenants, "vector_add")?)?;
    // A VMM, whose guest has a session and an arena.
    let mut vmm = FrontEnd::connect(&tenants.socket(VIRTUAL));
    vmm.open(1, 1, FREE);
    wait_until("the session of a guest", || Ok(vmm.state(FREE) == session::READY))?;
    let hold = programs::program("hold")?;
    let holding = tenants.spawn(DIRECT, "hold", &hold, &["600"])?;
    wait_until("a worker of each VM", || {
        Ok(!tenants.workers(DIRECT)?.is_empty() && !tenants.workers(VIRTUAL)?.is_empty())
    })?;
    // Waits that are interrupted go on.
    for name in ["sluice-device", "sluice-worker", "sluice-arbiter"] {
        for process in tenants.processes(name)? {
            signal(process, Signal::STOP)?;
            signal(process, Signal::CONT)?;
        }
    }
    passed(&tenants.run(DIRECT, &programs::program("vector_add")?, &[])?)?;
    // A device ends the workers of a fenced VM.
    tenants.fence(DIRECT)?;
    drop((holding, vmm));
    tenants.stop()
}

// Promise: F101
#[test]
fn each_own_rule_of_device_worker_and_arbiter_is_used() -> Result<()> {
    let binaries = Binaries::locate()?;
    let tenants = Tenants::start(&binaries, &Options::with_limits(192, &[]))?;
    let launcher = *tenants.processes("sluice-launcher")?.first().context("a launcher")?;
    let (tell, told) = mpsc::channel();
    let followed = thread::scope(|scope| -> Result<Option<Followed>> {
        let tracer = scope.spawn(move || -> Result<Followed> {
            let mut followed = Followed::new();
            tell.send(trace::seize(launcher)).ok();
            trace::follow(|call| {
                // A process may end meanwhile.
                _ = followed.note(call);
            })?;
            Ok(followed)
        });
        if let Err(error) = told.recv()? {
            sluice_skip::skip(&format!("the launcher cannot be traced: {error}"));
            tenants.stop()?;
            return Ok(None);
        }
        let served = serve(tenants);
        let followed = tracer.join().map_err(|_| anyhow!("the tracer panicked"))?;
        served.and(followed).map(Some)
    })?;
    let unused = followed.map_or_else(Vec::new, |followed| followed.unused());
    ensure!(unused.is_empty(), "rules that no call has matched:\n{}", unused.join("\n"));
    Ok(())
}

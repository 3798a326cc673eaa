//! Several units: one device of each VM for every GPU of the host, each with an arbiter and limits of its own.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_api::v1::{OwnerRequest, Placement, ProjectRequest};
use sluice_kit::wait::until;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::holder::Holder;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{kill, run, tail};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants, Unit};
use sluice_tests::{host, oracle};

const MIB: u64 = 1 << 20;
const UNITS: usize = GPUS.len();
const GPUS: [u32; 2] = [0, 1];
/// Quota of the first VM on each unit.
const QUOTA: u64 = 32 * MIB;
const DEVICE_MIB: u64 = 192;

struct Stage {
    tenants: Tenants,
    program: PathBuf,
    /// The units without use.
    before: Vec<Unit>,
}

impl Stage {
    fn set() -> Result<Self> {
        Self::set_with(|_| Ok(()))
    }

    fn set_with(configure: impl FnOnce(&mut Options) -> Result<()>) -> Result<Self> {
        let mut options = Options::with_limits(DEVICE_MIB, &[QUOTA / MIB, 0]);
        // Headroom for the driver's share, so that programs can hold all of the quota.
        options.vms[0].1.share.headroom_bytes = Some(8 * MIB);
        for (_, vm) in &mut options.vms {
            vm.placement = Some(Placement { gpus: GPUS.to_vec(), ..Placement::default() });
        }
        options.environment = vec![("SLUICE_SOFTGPU_DEVICES".to_owned(), UNITS.to_string())];
        configure(&mut options)?;
        let tenants = Tenants::start(&Binaries::locate()?, &options)?;
        let stage = Self { tenants, program: programs::hostile("units")?, before: Vec::new() };
        let before = stage.settled()?;
        Ok(Self { before, ..stage })
    }

    /// Waits until every unit is as wanted.
    fn wait_for(&self, wanted: impl Fn(usize, Unit) -> bool) -> Result<Vec<Unit>> {
        let start = Instant::now();
        loop {
            let units = (0..UNITS)
                .map(|number| Ok(self.tenants.unit_of(number)?.filter(|unit| wanted(number, *unit))))
                .collect::<Result<Option<Vec<_>>>>()?;
            if let Some(units) = units {
                return Ok(units);
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "{}\n{}",
                self.tenants.look("/v1/units")?,
                tail(&self.tenants.printed(), 40)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until no VM has memory of a unit.
    fn settled(&self) -> Result<Vec<Unit>> {
        self.wait_for(|_, unit| unit.clean > 0 && unit.lent + unit.dirty + unit.headroom == 0)
    }

    /// Waits until every unit is as before: a restarted arbiter takes memory as its driver frees it.
    fn as_before(&self) -> Result<()> {
        self.wait_for(|number, unit| self.before.get(number) == Some(&unit)).map(drop)
    }

    /// A program of the first VM that takes these bytes of each unit.
    fn holder(&self, bytes: [u64; UNITS]) -> Result<Holder> {
        let numbers = [&[QUOTA], bytes.as_slice()].concat().iter().map(u64::to_string).collect::<Vec<_>>();
        let words: Vec<&str> = numbers.iter().map(String::as_str).collect();
        let mut command = self.tenants.command(1, &self.program, &words);
        let mut holder = Holder::start(&mut command)?;
        holder.expect("holding").with_context(|| tail(&self.tenants.printed(), 40))?;
        Ok(holder)
    }

    /// Waits until a VM is lent so much on each unit: a report may be late.
    fn lends(&self, vm: u32, wanted: [u64; UNITS]) -> Result<()> {
        let lent = || -> Result<Vec<u64>> {
            (0..UNITS).map(|unit| Ok(self.tenants.charge_on(vm, unit)?.lent)).collect()
        };
        let lent = until(lent, |lent| lent.as_ref().is_ok_and(|lent| *lent == wanted))?;
        ensure!(lent == wanted, "VM {vm} is lent {lent:?}, not {wanted:?}");
        Ok(())
    }

    /// Runs a program of a VM that may see only one unit.
    fn on(&self, unit: usize, vm: u32, program: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = self.tenants.command(vm, program, arguments);
        command.env("CUDA_VISIBLE_DEVICES", unit.to_string());
        let finished = run(&mut command, TIMEOUT)?;
        ensure!(finished.status.success(), "{}\n{}\n{}", finished.status, finished.stdout, finished.stderr);
        Ok(finished.stdout)
    }
}

/// Waits until a call of a program fails.
fn fails(holder: &mut Holder) -> Result<()> {
    ensure!(until(|| holder.look().is_err(), |failed| *failed), "it goes on");
    Ok(())
}

/// Driver, management library and ledger report the same for each, to the byte.
// Promise: Q62
#[test]
fn vm_has_its_quota_on_each_unit() -> Result<()> {
    let stage = Stage::set()?;
    let mut both = stage.holder([QUOTA, QUOTA])?;
    both.look()?;
    stage.lends(1, [QUOTA, QUOTA])?;
    stage.lends(2, [0, 0])?;
    both.end()?;
    let mut second = stage.holder([0, QUOTA / 2])?;
    second.look()?;
    // The memory of the first program may still be on its way back.
    stage.tenants.wait_for_charge(1, |charge| charge.lent == 0)?;
    let lent = || stage.tenants.charge_on(1, 1).map(|charge| charge.lent);
    let is_half = |lent: &u64| (QUOTA / 2..=QUOTA).contains(lent);
    let lent = until(lent, |lent| lent.as_ref().is_ok_and(is_half))?;
    ensure!(is_half(&lent), "{lent}");
    second.end()?;
    stage.as_before()?;
    stage.tenants.stop()
}

// Promise: F40, Q26
#[test]
fn fence_and_worker_death_free_the_memory_of_a_vm_on_each_unit() -> Result<()> {
    let stage = Stage::set()?;
    for fence in [true, false] {
        let mut both = stage.holder([QUOTA, QUOTA])?;
        both.look()?;
        if fence {
            stage.tenants.fence(1)?;
            stage.lends(1, [0, 0])?;
        } else {
            stage.tenants.workers(1)?.into_iter().for_each(kill);
        }
        fails(&mut both).context("without a worker")?;
        stage.as_before()?;
        stage.lends(1, [0, 0])?;
        if fence {
            stage.tenants.readmit(1)?;
        }
    }
    stage.tenants.stop()
}

/// In any division among the units, and also after a later change of the division.
// Promise: Q25, Q40
#[test]
fn project_limit_holds_over_all_units_together() -> Result<()> {
    // A context and its margin on each unit, on this device.
    const SHARE: u64 = 4 * MIB;
    const LIMIT: u64 = QUOTA + QUOTA / 2 + UNITS as u64 * SHARE;
    let stage = Stage::set_with(|options| {
        let owner = OwnerRequest { memory_bytes: LIMIT, vms: None, limits: None };
        options.projects = vec![("shop".to_owned(), ProjectRequest { owner, organisation: None })];
        options.vms[0].1.project = Some("shop".to_owned());
        // A VM outside of the project, and without a quota, would get no place beside the project's.
        options.vms[1].1.memory_bytes = Some(QUOTA);
        Ok(())
    })?;
    for division in [[QUOTA, QUOTA / 2], [QUOTA / 2, QUOTA]] {
        let mut within = stage.holder(division)?;
        within.look()?;
        stage.lends(1, division)?;
        within.end()?;
        let beyond = stage.holder(division.map(|bytes| bytes.max(QUOTA / 2 + 2 * MIB)));
        let refused = beyond.err().context("more than the limit was got")?;
        ensure!(format!("{refused:#}").contains("cuMemAlloc_v2: 2"), "{refused:#}");
        stage.settled()?;
    }
    stage.tenants.stop()
}

/// The death ends the sessions with a device of its unit. The other unit keeps its memory, which need not be taken anew.
// Promise: Q62
#[test]
fn dead_arbiter_leaves_the_other_unit_unchanged() -> Result<()> {
    let stage = Stage::set()?;
    let mut both = stage.holder([QUOTA, QUOTA])?;
    both.look()?;
    let (dying, other) = (stage.tenants.arbiter(0)?, stage.tenants.arbiter(1)?);
    kill(dying);
    fails(&mut both).context("without an arbiter")?;
    stage.as_before()?;
    ensure!(stage.tenants.arbiter(0)? != dying && stage.tenants.arbiter(1)? == other, "{other}");
    let mut next = stage.holder([QUOTA, QUOTA])?;
    next.look()?;
    stage.lends(1, [QUOTA, QUOTA])?;
    next.end()?;
    stage.as_before()?;
    stage.tenants.stop()
}

// Promise: S60
#[test]
fn canary_of_one_vm_is_not_found_by_another_on_the_second_unit() -> Result<()> {
    let stage = Stage::set()?;
    let [write, read] = ["canary_write", "canary_read"].map(programs::hostile);
    stage.on(1, 1, &write?, &["large", "exit", "1"])?;
    let found = stage.on(1, 2, &read?, &[])?;
    ensure!(found.ends_with("\nhits 0\n"), "{found}");
    stage.settled()?;
    stage.tenants.stop()
}

/// On GPUs that reach each other's memory, and on those that do not: every call, and the kernels.
// Promise: C114, C115, C141
#[test]
fn program_of_two_gpus_prints_the_same_natively_and_remoted() -> Result<()> {
    let binaries = Binaries::locate()?;
    let program = programs::program("peers")?;
    for lacks in [None, Some(("SLUICE_SOFTGPU_LACKS", "peer-access"))] {
        let mut device = vec![("SLUICE_SOFTGPU_DEVICES", "2")];
        device.extend(lacks);
        let (native, calls) = oracle::traced(|trace| {
            let device = device.iter().map(|(name, value)| (*name, Path::new(value)));
            let environment: Vec<_> = device.chain([(oracle::VARIABLE, trace)]).collect();
            host::run_native_with(&binaries, &program, &[], &environment, TIMEOUT)
        })?;
        programs::passed(&native)?;
        let reached = native.stdout.contains("access: 1 1, to itself: 0\n");
        ensure!(reached == lacks.is_none(), "{}", native.stdout);
        let stage = Stage::set_with(|options| {
            options.environment = owned(&device);
            Ok(())
        })?;
        let (remoted, remoted_calls) = oracle::traced(|trace| {
            run(stage.tenants.command(1, &program, &[]).env(oracle::VARIABLE, trace), TIMEOUT)
        })?;
        ensure!(
            native.stdout == remoted.stdout && remoted.status == native.status,
            "natively\n{}\nremoted\n{}\n{}",
            native.stdout,
            remoted.stdout,
            remoted.stderr
        );
        if let Some(difference) = oracle::first_difference(&calls, &remoted_calls) {
            return Err(difference.into());
        }
        stage.as_before()?;
        stage.tenants.stop()?;
    }
    Ok(())
}

fn owned(variables: &[(&str, &str)]) -> Vec<(String, String)> {
    variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The peers of one VM find its pattern on each other, while kernels and calls of another VM, with peers on the same GPUs, reach nothing of
/// it: not by its addresses, and not by new memory after its end.
// Promise: C116
#[test]
fn peers_of_one_vm_reach_no_memory_of_another() -> Result<()> {
    let stage = Stage::set()?;
    let program = programs::hostile("peer_memory")?;
    let mut holder = Holder::start(&mut stage.tenants.command(1, &program, &["hold"]))?;
    let addresses = holder.line()?;
    holder.look()?;
    let words: Vec<&str> = ["seek"].into_iter().chain(addresses.split(' ')).collect();
    let sought = run(&mut stage.tenants.command(2, &program, &words), TIMEOUT)?;
    ensure!(
        sought.status.success() && sought.stdout.ends_with("\nhits 0\n"),
        "{}\n{}",
        sought.stdout,
        sought.stderr
    );
    holder.look()?;
    holder.end()?;
    stage.settled()?;
    let read = programs::hostile("canary_read")?;
    for unit in 0..UNITS {
        let found = stage.on(unit, 2, &read, &[])?;
        ensure!(found.ends_with("\nhits 0\n"), "{found}");
    }
    stage.tenants.stop()
}

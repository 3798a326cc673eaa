//! A hostile process of a guest beside another.

use std::fs;
use std::time::Duration;

use super::stage::{HOSTILE, Stage, TIMEOUT, newer, passed};
use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::debian::Series;
use sluice_tests::process;
use sluice_tests::vm::Machine;
use sluice_tests::way::{Mode, Way};

// Promise: V4, V5, V11, V12
#[test]
fn hostile_guest_process_harms_no_neighbour() -> Result<()> {
    attacker_harms_no_neighbour(&Way::stock(Mode::Legacy))
}

// Promise: V12, V16
#[test]
#[ignore = "for the full tier"]
fn hostile_guest_process_without_contexts_harms_no_neighbour() -> Result<()> {
    attacker_harms_no_neighbour(&Way::stock(Mode::Flat))
}

// Promise: V11
#[test]
#[ignore = "for the full tier"]
fn hostile_guest_process_with_blobs_and_contexts_harms_no_neighbour() -> Result<()> {
    newer(Mode::Full, Series::V6_12)?.map_or(Ok(()), |way| attacker_harms_no_neighbour(&way))
}

fn attacker_harms_no_neighbour(way: &Way) -> Result<()> {
    let name = format!("hostile-{}", way.mode);
    let machine = Machine { cpus: 2, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, Series::V6_12, (&[], &[]), |_| Ok(()))?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    let device = stage.device()?;
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", TIMEOUT)?;
    stage.part("two attackers", |stage| {
        let attackers = ["1", "2"].map(|seed| stage.spawn(&[HOSTILE, seed, "10"]));
        stage.same_as_natively("vector_add", &["20000", "5"])?;
        for attacker in attackers {
            let ended = attacker?.wait()?;
            println!("{}", process::tail(&ended.stderr, 8));
            ensure!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
        }
        Ok(())
    })?;
    stage.part("an attacker that is killed", |stage| {
        let attacker = stage.spawn(&[HOSTILE, "3", "1000000"])?;
        attacker.wait_for_output("attacking", TIMEOUT)?;
        std::thread::sleep(Duration::from_secs(3));
        attacker.signal(Signal::KILL)?;
        let ended = attacker.wait()?;
        ensure!(ended.signal == Some(9), "{ended:?}");
        Ok(())
    })?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour")?;
    ensure!(stage.device()? == device, "the device is another process");
    let log = fs::read_to_string(stage.host.folder().join("test.log"))?;
    ensure!(!log.contains("panicked"), "{log}");
    stage.part("nothing is left and a new program passes", |stage| {
        stage.holds_no_more_than(&before)?;
        stage.works()
    })?;
    stage.power_off()
}

//! The speed of scrubbing, compared with the fastest clearing of the device.

use crate::{MIB, host::driver};
use sluice_arbiter::unit::{OpenUnit, Piece};
use sluice_kit::figures::median;
use sluice_messages::control::Verify;
use std::{
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Not a test: a process with a software GPU of its own.
#[test]
#[ignore = "the body of a process"]
fn measuring_process() {
    let mut unit = OpenUnit::open(&driver(), 0, None).unwrap();
    unit.enter().unwrap();
    let pieces = unit.take_free(8 * MIB, u64::MAX).unwrap().pieces;
    let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
    let clear = |unit: &OpenUnit| {
        pieces.iter().for_each(|piece| unit.clear(piece).unwrap());
        unit.wait().unwrap();
    };
    // Alternating, so that other load of the machine affects both alike.
    let (mut memset, mut scrub) = (Vec::new(), Vec::new());
    for _ in 0..25 {
        let started = Instant::now();
        clear(&unit);
        memset.push(started.elapsed());
        let started = Instant::now();
        clear(&unit);
        assert!(unit.verify(&pieces, Verify::Sampled).unwrap().iter().all(|clean| *clean));
        scrub.push(started.elapsed());
    }
    let (memset, scrub) = (median(&memset), median(&scrub));
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    let share = memset.as_secs_f64() / scrub.as_secs_f64();
    println!(
        "scrub of {} MiB: {:.2} GB/s with samples read back, memset {:.2} GB/s: {:.0} %",
        bytes / MIB,
        rate(scrub),
        rate(memset),
        share * 100.0
    );
    assert!(share > 0.7, "{share}");
}

// Promise: S5
#[test]
fn scrub_reaches_70_percent_of_the_memset_rate() {
    let state = TempDir::new_in("/dev/shm").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "figures::measuring_process", "--ignored", "--nocapture"])
        .env("SLUICE_SOFTGPU_STATE", state.path().join("gpu"))
        .env("SLUICE_SOFTGPU_MODEL", "A10-24")
        .env("SLUICE_SOFTGPU_SCALE", "64")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{}", text.lines().find(|line| line.starts_with("scrub of")).unwrap_or("no figure"));
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

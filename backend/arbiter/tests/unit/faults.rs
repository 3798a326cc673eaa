//! A driver that fails or hangs, and the reaction of its unit.

use crate::{
    MIB,
    host::{Host, Options, null_driver},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{ArbiterEvent, ToArbiter};

fn host() -> Host {
    let environment = vec![("SLUICE_NULL_MEMORY_MIB", "128".to_owned())];
    Host::with(Options { driver: null_driver(), environment, ..Options::default() })
}

/// Plays a fault, and leaves a chunk to scrub.
fn scrub_with(host: &Host, fault: &str) {
    host.vm(1, 0);
    let worker = host.worker(1);
    assert!(worker.take(2 * MIB).is_ok());
    host.play(fault);
    worker.kill();
}

// Promise: F81
#[test]
fn driver_that_hangs_while_it_scrubs_ends_the_arbiter() {
    let mut host = host();
    scrub_with(&host, "sync-blocks");
    let (status, events) = host.ends();
    assert!(!status.success());
    assert!(events.contains(&ArbiterEvent::ProbeFailed), "{events:?}");
}

// Promise: F81
#[test]
fn driver_that_fails_every_scrub_ends_the_arbiter() {
    let mut host = host();
    scrub_with(&host, "sync-fails");
    let (status, events) = host.ends();
    assert!(!status.success());
    assert!(events.contains(&ArbiterEvent::ProbeFailed), "{events:?}");
}

// Promise: F81
#[test]
fn driver_that_fails_to_report_free_memory_ends_the_arbiter() {
    let mut host = host();
    host.play("info-fails");
    let (status, events) = host.ends();
    assert!(!status.success());
    assert!(events.contains(&ArbiterEvent::ProbeFailed), "{events:?}");
}

// Promise: F81
#[test]
fn driver_that_fails_once_while_memory_is_taken_loses_no_memory() {
    let mut whole = host();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fault");
    std::fs::write(&file, "info-fails-once").unwrap();
    let environment = vec![
        ("SLUICE_NULL_MEMORY_MIB", "128".to_owned()),
        ("SLUICE_NULL_FAULTS", file.display().to_string()),
    ];
    let mut host = Host::with(Options { driver: null_driver(), environment, ..Options::default() });
    let all = whole.unit()[0];
    assert!(all > 64 * MIB);
    eventually("all memory is in custody", || host.unit()[0] == all);
    host.assert_sound();
}

// Promise: F80
#[test]
fn device_probe_of_a_working_device_changes_nothing() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    assert!(worker.take(2 * MIB).is_ok());
    // A wait for memory of the device that is longer than a probe finds all of it again.
    for _ in 0..20 {
        host.send(ToArbiter::Probe {}, &[]);
        assert!(worker.take(2 * MIB).is_ok());
    }
    assert!(!host.saw(ArbiterEvent::ProbeFailed));
    worker.kill();
    eventually("its memory is back", || host.describe(1) == ([0; 3], 0));
    host.assert_sound();
}

// Promise: F80
#[test]
fn device_probe_of_a_failing_device_is_reported() {
    let mut host = host();
    host.play("sync-fails");
    host.send(ToArbiter::Probe {}, &[]);
    let (_, events) = host.ends();
    assert!(events.contains(&ArbiterEvent::ProbeFailed), "{events:?}");
}

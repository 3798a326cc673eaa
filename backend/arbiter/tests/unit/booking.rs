//! Probes: they show to which process the driver books lent memory.

use crate::{
    MIB,
    host::{DriverBooking, Host, Options},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{Figures, ToArbiter};
use sluice_shared_memory::socket;
use std::os::fd::AsFd as _;

/// The remains of probes, in bytes and processes.
fn is_gone(host: &mut Host) -> bool {
    host.describe(0) == ([0, 0, 0], 0)
}

// Promise: Q66
#[test]
fn booking_probe_finds_how_the_driver_books_memory_before_any_vm() {
    for (books, figures) in [
        (DriverBooking::Owner, Figures::Used),
        (DriverBooking::Importer, Figures::Used),
        (DriverBooking::Both, Figures::Used),
        (DriverBooking::Nowhere, Figures::Unused),
        (DriverBooking::Absent, Figures::Unused),
    ] {
        let mut host = Host::start();
        assert_eq!(host.figures(), Figures::Unknown);
        let scrubs = host.log().len();
        assert_eq!(host.measured(books), figures, "{books:?}");
        assert!(books == DriverBooking::Absent || host.log().len() > scrubs, "what it was lent is scrubbed");
        host.assert_sound();
    }
}

// Promise: Q66
#[test]
fn booking_probe_that_dies_gives_no_result_and_the_next_one_does() {
    let mut host = Host::start();
    let probe = host.prober();
    assert_eq!(probe.ask("begin"), "0 0");
    assert!(probe.take(2 * MIB).is_ok());
    assert_eq!(host.describe(0).0[0], 32 * MIB);
    let mut second = host.prober();
    eventually("one at a time", || second.is_killed());
    probe.kill();
    eventually("its end", || is_gone(&mut host));
    assert_eq!(host.figures(), Figures::Unknown);
    assert_eq!(host.probe(DriverBooking::Both), Figures::Used);
    // The figures are known; another probe only shows that it can use a chunk.
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    assert_eq!(worker.ask("begin"), "0 0");
    eventually("the last probe is gone", || is_gone(&mut host));
    let mut another = host.prober();
    assert_eq!(another.ask("begin"), "0 0");
    assert!(another.take(2 * MIB).is_ok());
    assert_eq!(host.describe(0).0[0], 2 * MIB);
    another.say(&format!("take {}", 2 * MIB));
    eventually("its end", || another.is_killed());
    eventually("its memory is back", || is_gone(&mut host));
    assert!(worker.take(32 * MIB).is_ok(), "a VM that was there has its quota");
    assert_eq!(host.figures(), Figures::Used);
    host.assert_sound();
}

// Promise: Q66
#[test]
fn booking_probe_that_hangs_is_killed_and_delays_no_vm() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    // A busy machine may need more than the probe's time for a start. A VM that waited for the probe would do so each time.
    let mut worker = None;
    let waits = (0..5).all(|_| {
        worker = None;
        eventually("the last worker is gone", || host.describe(1) == ([0; 3], 0));
        let mut hangs = host.prober();
        let started = worker.insert(host.worker(1));
        assert_eq!(started.ask("begin"), "0 0");
        assert!(started.take(32 * MIB).is_ok());
        let lives = !hangs.is_killed();
        eventually("the probe's end", || hangs.is_killed());
        !lives
    });
    assert!(!waits, "the VM had to wait");
    assert_eq!(host.figures(), Figures::Unknown);
    assert_eq!(host.describe(1).0[1], host.driver_share(), "what was granted is charged");
    eventually("its end is seen", || is_gone(&mut host));
    assert_eq!(host.probe(DriverBooking::Importer), Figures::Used);
    host.assert_sound();
}

// Promise: Q66
#[test]
fn booking_probe_is_killed_when_the_inventory_does_not_answer() {
    let mut host = Host::with(Options { inventory: false, ..Options::default() });
    let mut unasked = host.prober();
    eventually("there is no inventory to look at", || unasked.is_killed());
    let (silent, theirs) = socket::pair().unwrap();
    host.send(ToArbiter::Inventory {}, &[theirs.as_fd()]);
    let mut probe = host.prober();
    assert_eq!(probe.ask("begin"), "0 0");
    probe.say(&format!("take {}", 2 * MIB));
    eventually("its end", || probe.is_killed());
    assert_eq!(host.figures(), Figures::Unknown);
    host.attach_inventory();
    drop(silent);
    eventually("its end is seen", || is_gone(&mut host));
    assert_eq!(host.probe(DriverBooking::Owner), Figures::Used);
}

// Promise: Q66
#[test]
fn figures_that_disappear_cause_another_booking_probe() {
    let mut host = Host::start();
    assert_eq!(host.probe(DriverBooking::Both), Figures::Used);
    host.listed.lock().unwrap().books = DriverBooking::Absent;
    eventually("it is seen", || host.figures() == Figures::Unknown);
    eventually("the last probe is gone", || is_gone(&mut host));
    assert_eq!(host.probe(DriverBooking::Absent), Figures::Unused);
}

// Promise: Q66
#[test]
fn mig_instance_needs_no_booking_probe() {
    let options = Options { instance: Some((9, 0, true)), ..Options::default() };
    let mut host = Host::with(options);
    assert_eq!(host.figures(), Figures::Unused);
    let mut needless = host.prober();
    eventually("its end", || needless.is_killed());
    assert_eq!(host.figures(), Figures::Unused);
}

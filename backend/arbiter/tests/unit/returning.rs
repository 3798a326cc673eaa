//! Memory of earlier processes that the driver gives back only after an arbiter has started.

use crate::{
    MIB,
    host::{Host, Options},
};
use sluice_kit::wait::eventually;

// Promise: F85
#[test]
fn arbiter_that_starts_before_memory_is_free_takes_it_once_it_is() {
    let mut first = Host::start();
    let whole = first.bytes;
    // The next arbiter of the unit starts while this one still has its memory.
    let mut environment = first.environment().to_vec();
    environment.push(("SLUICE_SOFTGPU_LATE_FREE", "400".to_owned()));
    let mut host = Host::with(Options { environment, ..Options::default() });
    assert!(host.bytes < whole, "{} of {whole}", host.bytes);
    host.vm(1, 0);
    let worker = host.worker(1);
    assert_eq!(worker.take(2 * MIB), Err(2), "the first arbiter has all memory");

    first.arbiter.kill().unwrap();
    first.arbiter.wait().unwrap();
    eventually("all memory", || host.unit()[0] == whole && host.bytes == whole);
    assert_eq!(worker.info(), (whole, whole), "the quota of a VM without a limit is all memory");
    assert_eq!(worker.ask("begin"), "0 0");
    let left = whole - host.driver_share();
    assert_eq!(worker.take_in_all(left), left);
    worker.kill();
    eventually("it is clean again", || host.unit()[2] == whole);
    host.assert_sound();
}

//! The totals of work that workers report.

use crate::host::Host;
use sluice_kit::wait::eventually;

const MIB: u64 = 1 << 20;

// Promise: T30
#[test]
fn work_reported_by_workers_is_summed_bounded_and_kept() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (one, two) = (host.worker(1), host.worker(1));
    assert_eq!(host.work(1), [0; 4]);
    one.ask("did 1 2 3 4");
    two.ask("did 10 20 30 40");
    assert_eq!(host.work(1), [11, 22, 33, 44]);
    assert_eq!(host.work(2), [0; 4]);
    // Its last report counts, although it was not queried while it lived.
    one.ask("did 5 6 7 8");
    one.kill();
    eventually("it is gone", || host.describe(1).1 == 1);
    assert_eq!(host.work(1), [15, 26, 37, 48]);
    let endless = u64::MAX;
    two.ask(&format!("did {endless} {endless} {endless} {endless}"));
    let counted = host.work(1);
    assert!(counted.iter().all(|figure| *figure > 48 && *figure < u64::MAX / 2), "{counted:?}");
    two.ask("did 0 0 0 0");
    assert_eq!(host.work(1), counted, "nothing is taken back");
    host.assert_sound();
}

//! The order in which the host ends processes when memory is short.

use std::fs;

/// The file with the adjustment of this process, which its children inherit.
const FILE: &str = "/proc/self/oom_score_adj";
/// The adjustment of a worker: half of the memory of the host, or of its VM's limit. A worker ends before the device of its
/// VM, before the VMM of a neighbour, and before all processes that serve several VMs.
const WORKER: i32 = 500;

/// Runs `start`, whose new process ends before others when memory is short.
pub(crate) fn ended_first<T>(start: impl FnOnce() -> T) -> T {
    let own = fs::read_to_string(FILE).ok().and_then(|text| text.trim().parse::<i32>().ok());
    let Some(own) = own.filter(|own| *own < WORKER) else { return start() };
    write(WORKER);
    let started = start();
    // The kernel permits this without a privilege: the value was that of this process before.
    write(own);
    started
}

fn write(adjustment: i32) {
    if let Err(error) = fs::write(FILE, adjustment.to_string()) {
        tracing::warn!(adjustment, %error, "cannot set the order in which processes end when memory is short");
    }
}

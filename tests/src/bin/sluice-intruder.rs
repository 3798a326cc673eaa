//! A process of any role that was taken over and whose filters are lifted: it is started in place of a device, a worker, an arbiter or
//! an inventory. It gets the things that it tries to reach over its control socket, and answers with the names of those that it reached.

#![expect(unsafe_code, reason = "adopts the control socket by its number")]

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use anyhow::{Context as _, Result};
use sluice_shared_memory::socket;
use sluice_tests::reach::{ATTEMPTS, ATTEMPTS_WITHOUT_ANY_FILTER, INTRUDER_BYTES, Targets};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == "--control-fd").context("no --control-fd")?;
    let number: RawFd = arguments.get(at + 1).context("a number is missing")?.parse()?;
    // SAFETY: the launcher passes it open, and no other code here uses it.
    let control = unsafe { OwnedFd::from_raw_fd(number) };
    let mut bytes = vec![0; INTRUDER_BYTES];
    while let Some((message, _)) = socket::receive(&control, &mut bytes)? {
        let targets: Targets = serde_json::from_slice(message)?;
        let all = ATTEMPTS.into_iter().chain(ATTEMPTS_WITHOUT_ANY_FILTER);
        let reached: Vec<&str> =
            all.filter(|(_, attempt)| attempt(&targets).is_ok()).map(|(name, _)| name).collect();
        socket::send(&control, &serde_json::to_vec(&reached)?, &[])?;
    }
    Ok(())
}

//! The command line of the launcher.

use std::{os::unix::process::CommandExt as _, process::Command};

use sha2::{Digest as _, Sha256};
use sluice_messages::{
    control,
    launch::{Fingerprint, SocketMode},
};
use sluice_protocol::limits;

use super::running::LaunchError;
use crate::configuration::{ARBITER, Configuration, DEVICE, INVENTORY, LAUNCHER, WORKER};

/// The command line of the launcher, which defines the processes that it may start.
pub(super) fn arguments(configuration: &Configuration) -> Vec<String> {
    let path = |path: &std::path::Path| path.display().to_string();
    let program = |name: &str| path(&configuration.libexec.join(name));
    let mut arguments = vec!["--device".to_owned(), program(DEVICE)];
    arguments.extend(["--worker".to_owned(), program(WORKER)]);
    arguments.extend(["--driver".to_owned(), configuration.driver.clone()]);
    arguments.extend(["--arbiter".to_owned(), program(ARBITER)]);
    arguments.extend(["--units".to_owned(), limits::UNITS.to_string()]);
    // The version of the messages of the launcher and all that it starts; one of another version is neither used nor
    // adopted.
    arguments.extend(["--messages".to_owned(), control::VERSION.to_string()]);
    arguments.extend(["--inventory".to_owned(), program(INVENTORY)]);
    if let Some(nvml) = &configuration.nvml {
        arguments.extend(["--nvml".to_owned(), path(nvml)]);
    }
    arguments.extend(["--socket-dir".to_owned(), path(&configuration.runtime_dir)]);
    if let Some(gid) = configuration.vm_socket_gid {
        arguments.extend(["--socket-gid".to_owned(), gid.to_string()]);
    }
    if configuration.vm_socket_mode != SocketMode::default() {
        arguments.extend(["--socket-mode".to_owned(), configuration.vm_socket_mode.to_string()]);
    }
    if configuration.trust_vmm_memory {
        arguments.push("--trust-vmm-memory".to_owned());
    }
    arguments.extend(["--vm-numbers".to_owned(), configuration.vm_numbers.to_string()]);
    if let Some(uids) = configuration.worker_uids {
        arguments.extend(["--worker-uids".to_owned(), uids.to_string()]);
    }
    if let Some(cgroup) = &configuration.cgroup {
        arguments.extend(["--cgroup".to_owned(), path(cgroup)]);
        arguments.extend(configuration.vm_limits.options());
    }
    arguments
}

/// Replaces this process by the launcher of a configuration, as a service of its own. Returns only the reason why it cannot.
pub(crate) fn become_launcher(configuration: &Configuration) -> LaunchError {
    let program = configuration.libexec.join(LAUNCHER);
    let mut command = Command::new(&program);
    command.args(arguments(configuration));
    command.arg("--service").arg(fingerprint(configuration).to_string());
    let error = command.exec();
    LaunchError::NoLauncher { program: program.display().to_string(), error }
}

/// A value that differs if the launcher's command line or its version differs.
pub(super) fn fingerprint(configuration: &Configuration) -> Fingerprint {
    let mut hash = Sha256::new();
    for argument in arguments(configuration).iter().map(String::as_str).chain([env!("CARGO_PKG_VERSION")]) {
        hash.update(argument.len().to_le_bytes());
        hash.update(argument);
    }
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(hash.finalize()).for_each(|(byte, hashed)| *byte = hashed);
    Fingerprint(bytes)
}

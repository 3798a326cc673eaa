//! `sluiced`: see [`sluice_daemon::daemon`].

use std::{os::fd::AsFd as _, process::ExitCode};

use anyhow::Context as _;
use clap::Parser as _;
use sluice_daemon::{
    configuration::{Arguments, Configuration},
    daemon,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            sluice_runtime::log::say(format_args!("sluiced: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let check_reload = arguments.check_reload;
    let configuration = Configuration::load(arguments)?;
    if check_reload {
        return daemon::check_reload(&configuration);
    }
    sluice_runtime::log::start()?;
    // A worker that was taken over may be of the same user, and with a hardware driver it can open files: not our memory.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .context("cannot be made undumpable")?;
    let supervisor = configuration
        .supervised
        .then(|| std::io::stdin().as_fd().try_clone_to_owned().context("cannot take over standard input"))
        .transpose()?;
    daemon::run(configuration, supervisor)
}

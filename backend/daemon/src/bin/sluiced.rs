//! `sluiced`: the program of [`sluice_daemon::daemon`].

use std::{io::Write as _, os::fd::AsFd as _, process::ExitCode};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use sluice_daemon::{
    api,
    configuration::{Arguments, Configuration, Description},
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
    if let Some(form) = arguments.describe {
        return describe(form);
    }
    let (check_reload, run_launcher) = (arguments.check_reload, arguments.run_launcher);
    let configuration = Configuration::load(arguments)?;
    configuration.require_programs()?;
    if check_reload {
        return daemon::check_reload(&configuration);
    }
    if run_launcher {
        return Err(daemon::become_launcher(&configuration));
    }
    sluice_runtime::log::start()?;
    // An adopted worker may run as the same user, and with a hardware driver it can open files; it must not open this process's
    // memory.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .context("cannot make the process undumpable")?;
    let supervisor = configuration
        .supervised
        .then(|| std::io::stdin().as_fd().try_clone_to_owned().context("cannot take over standard input"))
        .transpose()?;
    daemon::run(configuration, supervisor)
}

fn describe(form: Description) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    match form {
        Description::Manual => {
            clap_mangen::Man::new(Arguments::command()).section("8").render(&mut output)?;
        }
        Description::Openapi => output.write_all(api::openapi()?.as_bytes())?,
    }
    Ok(output.flush()?)
}

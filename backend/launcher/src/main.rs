//! `sluice-launcher`: the program of the library [`sluice_launcher`].

use std::os::fd::AsFd as _;

use anyhow::Context as _;
use clap::Parser as _;
use sluice_launcher::{Arguments, ClientSocket, Launcher};

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    sluice_runtime::log::start()?;
    let own = |descriptor: std::os::fd::BorrowedFd<'_>| {
        descriptor.try_clone_to_owned().context("cannot take over a socket")
    };
    let socket = own(std::io::stdin().as_fd())?;
    let client = match arguments.service {
        Some(configuration) => ClientSocket::Listening(socket, configuration),
        None => ClientSocket::Connected(socket),
    };
    let lifeline = arguments.supervised.then(|| own(std::io::stdout().as_fd())).transpose()?;
    let launcher = Launcher::new(arguments, client, lifeline)?;
    sluice_sandbox::enter(sluice_sandbox::Role::Launcher)?;
    Ok(launcher.run()?)
}

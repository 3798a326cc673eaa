//! `cargo xtask oracle`: runs a program natively and remoted, and names the first call that differs.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;
use sluice_tests::{host, oracle, process};

use crate::cargo::build_release;

/// Run a program natively on the software GPU and remoted, and compare its calls of the driver.
#[derive(Debug, Args)]
pub(crate) struct OracleOptions {
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    words: Vec<OsString>,
}

/// Compares; false if a call differs.
pub(crate) fn run(options: &OracleOptions) -> Result<bool> {
    let sluice = build_release()?.get("sluice")?;
    let device = host::own_device()?;
    let run = |native: bool| {
        oracle::traced(|trace| {
            let mut command = Command::new(&sluice);
            command.arg("run").args(native.then_some("--native")).arg("--").args(&options.words);
            if native {
                command.env("SLUICE_SOFTGPU_STATE", device.path());
            }
            command.env(oracle::VARIABLE, trace);
            command.status().with_context(|| format!("starting {}", process::display(&command)))
        })
    };
    let (native_end, native) = run(true)?;
    let (remoted_end, remoted) = run(false)?;
    println!(
        "natively {} calls, {native_end}; remoted {} calls, {remoted_end}",
        native.calls(),
        remoted.calls()
    );
    match oracle::first_difference(&native, &remoted) {
        None => println!("no call differs"),
        Some(difference) => {
            println!("{difference}");
            return Ok(false);
        }
    }
    Ok(native_end == remoted_end)
}

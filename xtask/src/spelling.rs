//! The spelling of everything in the tree, by `typos` with the rules of `typos.toml`.

use std::process::Command;

use anyhow::Result;
use sluice_tests::{paths, wheels};

/// The wheel on PyPI that contains the program.
const WHEEL: &str = "typos==1.52.0";

/// The command that checks the tree; its wheel is downloaded the first time.
pub(crate) fn check() -> Result<Command> {
    let folder = wheels::install("typos", "the spelling checker typos", &[WHEEL])?;
    let mut check = Command::new(folder.join("bin/typos"));
    check.args(["--format", "brief", "--color", "never", "--force-exclude"]).current_dir(paths::workspace());
    Ok(check)
}

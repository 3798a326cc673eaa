//! The vendor's assembler and that of the software GPU give the same verdict on mutants of PTX.

use anyhow::{Result, ensure};
use sluice_tests::mutants;
use sluice_tests::paths::Binaries;
use sluice_tests::toolchain::Toolkit;

/// Mutants of this test; `cargo xtask mutants` compares more.
const COUNT: u64 = 200;
/// Least part of them with the same verdict.
const AGREEMENT: f64 = 0.99;

// Promise: S86
#[test]
fn assemblers_agree_on_mutants() -> Result<()> {
    let vendor = match Toolkit::fetch() {
        Ok(toolkit) => toolkit.assembler(),
        Err(error) => {
            sluice_skip::skip(&format!("there is no assembler of the vendor: {error:#}"));
            return Ok(());
        }
    };
    let found = mutants::compare(&vendor, &Binaries::locate()?.get("softgpu-ptxas")?, 0..COUNT)?;
    ensure!(found.count == COUNT && found.valid > COUNT / 20, "{} of {} are valid", found.valid, found.count);
    ensure!(found.agreement() >= AGREEMENT, "{:.3}: {:#?}", found.agreement(), found.differences);
    Ok(())
}

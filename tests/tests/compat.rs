//! Parts of the tests that public clients bring: each test passes natively and remoted, or fails both ways for a listed cause.

use anyhow::{Context as _, Result, bail};
use sluice_tests::compat::{self, clients, expectations::Expectations};
use sluice_tests::paths::Binaries;

fn check(name: &str) -> Result<()> {
    let installed = match compat::install(clients::client(name)?) {
        Ok(installed) => installed,
        Err(error) if compat::is_unreachable(&error) => {
            sluice_skip::skip(&format!(
                "{name} is not in the cache, and the index of packages cannot be reached"
            ));
            return Ok(());
        }
        Err(error) => return Err(error).with_context(|| format!("installing {name}")),
    };
    let faults = compat::check(installed, &Binaries::locate()?)?;
    if !faults.is_empty() {
        bail!("{} faults of {name}:\n{}", faults.len(), faults.join("\n"));
    }
    Ok(())
}

// Promise: C111
#[test]
fn warp_computes_the_same_natively_and_remoted() -> Result<()> {
    check("warp")
}

// Promise: C111
#[test]
fn tinygrad_computes_the_same_natively_and_remoted() -> Result<()> {
    check("tinygrad")
}

// Promise: C111
#[test]
fn taichi_computes_the_same_natively_and_remoted() -> Result<()> {
    check("taichi")
}

// Promise: C111
#[test]
fn numba_computes_the_same_natively_and_remoted() -> Result<()> {
    check("numba-cuda")
}

// Promise: C111
#[test]
fn openmm_computes_the_same_natively_and_remoted() -> Result<()> {
    check("openmm")
}

// Promise: C111
#[test]
fn cuda_bindings_compute_the_same_natively_and_remoted() -> Result<()> {
    check("cuda-bindings")
}

// Promise: C111
#[test]
fn every_client_of_the_data_has_a_test_here() -> Result<()> {
    let mut named = Expectations::load()?.clients().into_iter().map(str::to_owned).collect::<Vec<_>>();
    named.sort();
    assert_eq!(named, ["cuda-bindings", "numba-cuda", "openmm", "taichi", "tinygrad", "warp"]);
    Ok(())
}

//! `cargo xtask package`: packages for hosts and guests, into `target/packages`.

use anyhow::Result;
use clap::Args;
use sluice_tests::packages::{self, Package};

use crate::cargo::{build_release, release, target_folder};
use crate::runner;

/// Build packages: Debian packages for hosts and guests, an RPM package and a tarball for guests.
#[derive(Debug, Args)]
pub(crate) struct PackageOptions {
    /// Use existing builds, and for guests the host's build, with the glibc that it needs: faster, and not for
    /// distribution.
    #[arg(long)]
    quick: bool,
}

/// Builds the packages.
pub(crate) fn run(options: &PackageOptions) -> Result<bool> {
    packages::ensure_tools()?;
    let target = target_folder()?;
    let host = if options.quick { release()? } else { build_release()? };
    let guest = if options.quick { host.clone() } else { packages::portable(&host)? };
    let packages = packages::make(&host, &guest, &target.join("packages"))?;
    for package in packages.all() {
        println!("{}", runner::shown(&package));
    }
    println!();
    println!("on a host:   apt install {}", runner::shown(&packages.deb(Package::Host)));
    println!("on a guest:  apt install {}", runner::shown(&packages.deb(Package::Guest)));
    Ok(true)
}

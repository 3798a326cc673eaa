//! The bundle: everything that `sluice-hardware` needs on a machine without toolchain and network.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use sluice_tests::packages;
use sluice_tests::paths::{self, Binaries, HOST_PROGRAMS};
use sluice_tests::process::output_of;
use sluice_tests::programs;

use crate::cargo::{build_release, release, target_folder};
use crate::runner;
use crate::test;

/// Largest bundle in bytes.
const MOST: u64 = 48 << 20;
/// Time limit for the removal of symbols from a file.
const STRIP: Duration = Duration::from_secs(60);

/// The program that runs the bundle, in the bundle's own folder.
pub(super) const PROGRAM: &str = "sluice-hardware";
/// Libraries in the folder `bin`, beside the programs of a host: those of a guest, and the tracer of calls.
const GUEST: [&str; 3] = ["libsluice_guest.so", "libsluice_guest_nvml.so", "libsluice_tracer.so"];
/// Libraries in the folder `softgpu`. They are not beside `sluice`, which would take them if no driver is named.
pub(super) const SOFTGPU: [&str; 2] = ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"];

/// Options for a pack.
#[derive(Debug, Args)]
pub(crate) struct PackOptions {
    /// Use the existing builds.
    #[arg(long)]
    quick: bool,
}

/// A bundle that was packed.
#[derive(Debug)]
pub(super) struct Packed {
    /// Its folder.
    pub(super) folder: PathBuf,
    /// Its size.
    pub(super) bytes: u64,
    /// Number of its CUDA programs that check themselves.
    pub(super) programs: usize,
}

/// Packs the bundle and prints how to use it.
pub(super) fn run(options: &PackOptions) -> Result<bool> {
    build(options)?;
    println!("run it there:  ./{PROGRAM} run OUT");
    println!("then here:     cargo xtask hardware report OUT/results.jsonl");
    Ok(true)
}

/// Builds everything, unless the options say otherwise, and packs it into `target/hardware`.
pub(super) fn build(options: &PackOptions) -> Result<Packed> {
    let binaries = if options.quick { release()? } else { build_release()? };
    let folder = target_folder()?.join("hardware");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing the old {}", folder.display()))?;
    }
    let mut commit = test::commit()?;
    if options.quick {
        commit.push_str(", with existing builds");
    }
    let packed = fill(&binaries, &folder, &commit)?;
    println!(
        "{}: {:.1} MiB, {} programs",
        runner::shown(&packed.folder),
        packed.bytes as f64 / f64::from(1 << 20),
        packed.programs
    );
    Ok(packed)
}

/// The files of a build that a bundle takes: folder in the bundle, and name.
pub(super) fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    let bin = HOST_PROGRAMS.into_iter().chain(GUEST).map(|name| ("bin", name));
    [("", PROGRAM)].into_iter().chain(bin).chain(SOFTGPU.map(|name| ("softgpu", name)))
}

/// Fills a new folder with a bundle of these builds, which are of this commit.
pub(super) fn fill(binaries: &Binaries, folder: &Path, commit: &str) -> Result<Packed> {
    for part in ["bin", "softgpu", "programs", "clients"] {
        let part = folder.join(part);
        fs::create_dir_all(&part).with_context(|| format!("creating {}", part.display()))?;
    }
    let mut copies = Vec::new();
    for (part, name) in files() {
        copies.push((binaries.get(name)?, folder.join(part).join(name)));
    }
    let programs::BundledPrograms { programs, hostile, runtime } = programs::compile_for_bundle()?;
    let name = runtime.file_name().context("the runtime has a name")?;
    copies.push((runtime.clone(), folder.join("programs").join(name)));
    for program in programs.iter().chain(&hostile) {
        copies.push((program.path.clone(), folder.join("programs").join(&program.name)));
    }
    let mut glibc = packages::Version::default();
    for (from, to) in &copies {
        output_of(Command::new("strip").arg("-o").arg(to).arg(from), STRIP)?;
        glibc = glibc.max(packages::needed(to)?);
    }
    let clients = paths::workspace().join("tests/hardware/clients");
    for entry in fs::read_dir(&clients).with_context(|| format!("reading {}", clients.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            let name = path.file_name().context("a client has a name")?;
            fs::copy(&path, folder.join("clients").join(name))
                .with_context(|| format!("copying {}", path.display()))?;
        }
    }
    fs::write(folder.join("commit.txt"), format!("{commit}\n")).context("writing the commit")?;
    fs::write(folder.join("README.txt"), readme(commit, glibc)).context("writing the README")?;
    let bytes = checked(sizes(folder)?, MOST)?;
    Ok(Packed { folder: folder.to_owned(), bytes, programs: programs.len() })
}

/// The sizes of all files of a folder, with their names.
fn sizes(folder: &Path) -> Result<Vec<(u64, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sizes(&path)?);
        } else {
            found.push((
                fs::metadata(&path)?.len(),
                path.file_name().unwrap_or_default().display().to_string(),
            ));
        }
    }
    Ok(found)
}

/// The sum of the sizes; an error that names the largest files if it is above the limit.
fn checked(mut sizes: Vec<(u64, String)>, most: u64) -> Result<u64> {
    let sum = sizes.iter().map(|(bytes, _)| bytes).sum();
    sizes.sort();
    let largest: Vec<String> =
        sizes.iter().rev().take(5).map(|(bytes, name)| format!("{name} {} KiB", bytes >> 10)).collect();
    ensure!(
        sum <= most,
        "the bundle has {} KiB, and at most {} KiB are permitted; its largest files: {}",
        sum >> 10,
        most >> 10,
        largest.join(", ")
    );
    Ok(sum)
}

fn readme(commit: &str, glibc: packages::Version) -> String {
    format!(
        "Sluice on a real GPU, commit {commit}\n\n\
         Run this on a machine with an NVIDIA GPU and its driver, as root or as a plain user:\n\n    \
         ./{PROGRAM} run OUT\n\n\
         It takes at most 45 minutes (see --minutes), prints one line per step, and writes OUT/results.jsonl and OUT/log.txt. Bring both back.\n\
         It changes no setting of the GPU, and leaves no process and no file outside of OUT, also if Ctrl-C or a lost connection\n\
         ends it; only SIGKILL makes it leave a folder sluice-hardware-* in /tmp. Run it on an idle GPU.\n\
         It needs Linux 5.3, glibc {glibc}, libgcc_s.so.1, libstdc++.so.6 and NVIDIA's driver: no network, no compiler, no other tool.\n\n\
         ./{PROGRAM} run OUT --phase questions   asks the open questions of the design only\n\
         ./{PROGRAM} run OUT --phase programs    compares the CUDA programs only\n\
         ./{PROGRAM} run OUT --phase custody     attacks quotas, scrubbing and fences\n\
         ./{PROGRAM} run OUT --phase time        measures shares of the GPU's time, and latency\n\
         ./{PROGRAM} run OUT --phase bench       measures calls, launches, copies, allocations and starts\n\
         ./{PROGRAM} run OUT --phase frameworks  runs PyTorch, Triton, JAX, CuPy and numba, if they are installed\n\
         ./{PROGRAM} list                        lists all steps with their limits\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundle_above_the_limit_is_refused_with_its_largest_files() {
        let sizes = || vec![(1 << 20, "small".to_owned()), (3 << 20, "large".to_owned())];
        assert_eq!(checked(sizes(), 4 << 20).unwrap(), 4 << 20);
        let error = checked(sizes(), (4 << 20) - 1).unwrap_err().to_string();
        assert!(error.contains("4096 KiB") && error.contains("large 3072 KiB, small 1024 KiB"), "{error}");
    }

    #[test]
    fn readme_has_the_command_and_the_requirements() {
        let text = readme("abc", packages::Version(2, 34));
        for part in ["\n    ./sluice-hardware run OUT\n", "glibc 2.34,", "libgcc_s.so.1", "libstdc++.so.6"] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}

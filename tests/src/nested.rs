//! Programs in a virtual machine of a VMM that needs KVM. The VMM runs, with the host's side of Sluice, in a virtual machine of
//! QEMU whose emulated processor has the virtualization that KVM needs.

use std::path::PathBuf;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, Result, ensure};

use crate::debian::{Kernel, Series};
use crate::host::run_native;
use crate::image::Image;
use crate::matrix::{self, Place};
use crate::paths::{Binaries, HOST_PROGRAMS};
use crate::process;
use crate::programs::{self, Program};
use crate::virtual_socket::UNIFIED;
use crate::vm::{Accelerator, Guest, GuestCommand, Machine};

/// The kernel series of both guests.
pub const SERIES: Series = Series::V6_12;
/// Long, because all is emulated twice.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Programs of the inner guest: calls, copies, streams, errors.
const PROGRAMS: [&str; 6] = ["vector_add", "memory", "streams", "reduction", "errors", "matmul_tiled"];
/// The libraries beside the programs of the host.
const DRIVER: [&str; 2] = ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"];

/// A VMM, and the script that starts it.
#[derive(Debug)]
pub struct Vmm<'a> {
    /// Its name in the outer guest's path; `--version` prints its version.
    pub name: &'a str,
    /// It and further programs on this machine, by their names in the outer guest's path.
    pub programs: &'a [(&'a str, PathBuf)],
    /// A script that starts it with `/boot/vmlinuz` and `/boot/initrd` and prints the inner guest's console. The sockets of the one VM
    /// are `/run/vm/vm-1.sock` and `/run/vm/vm-1.vsock`.
    pub script: &'a str,
    /// The inner guest's kernel, in the form that it boots.
    pub kernel: Vec<u8>,
    /// Further files of the outer guest.
    pub files: &'a [(&'a str, Vec<u8>)],
    /// Values of `SLUICE_TRANSPORT`, one of which has to work in the inner guest, the best first.
    pub ways: &'a [&'a str],
    /// The command that ends the inner guest.
    pub end: &'a str,
}

/// The result of a run.
#[derive(Debug)]
pub struct Ran {
    /// The first of the ways that worked.
    pub way: String,
    /// The version that the VMM prints.
    pub version: String,
}

/// The programs of a VMM: the one that a variable names, and helpers beside it, named as in the archive of a release, where all have
/// the version in their names. If one is missing, the test is skipped and the place noted with the reason.
///
/// # Errors
/// When the variable names no file, or the note cannot be written.
pub fn find<'a>(
    place: &Place,
    variable: &str,
    name: &'a str,
    helpers: &[&'a str],
) -> Result<Option<Vec<(&'a str, PathBuf)>>> {
    let Some(program) = env::var_os(variable).map(PathBuf::from) else {
        sluice_skip::skip(&format!("not run: no binary ({variable} names one)"));
        matrix::not_run(place.clone(), "no binary")?;
        return Ok(None);
    };
    let own = program.file_name().and_then(|name| name.to_str());
    let own = own.with_context(|| format!("{variable} has no name"))?;
    let mut programs = vec![(name, program.clone())];
    for helper in helpers {
        let path = program.with_file_name(own.replace(name, helper));
        if !path.exists() || path == program {
            sluice_skip::skip(&format!("not run: no {helper} at {}", path.display()));
            matrix::not_run(place.clone(), &format!("no binary of the {helper}"))?;
            return Ok(None);
        }
        programs.push((helper, path));
    }
    Ok(Some(programs))
}

/// Boots both guests, and runs programs in the inner one, which must print the same as natively.
///
/// # Errors
/// When they do not, or a guest does not start.
pub fn run(vmm: &Vmm<'_>, inner: &Kernel) -> Result<Ran> {
    let binaries = Binaries::locate()?;
    let programs: Vec<Program> = programs::compile_all()?
        .into_iter()
        .filter(|program| PROGRAMS.contains(&program.name.as_str()))
        .collect();
    ensure!(programs.len() == PROGRAMS.len(), "not all of {PROGRAMS:?} are programs");

    let outer = Kernel::fetch_with(SERIES, &["kvm_amd"])?;
    let image = outer_image(&outer, inner, &binaries, &programs, vmm)?;
    let machine = Machine {
        memory_mib: 3072,
        cpus: 2,
        nested: true,
        accelerator: Some(Accelerator::Tcg),
        ..Machine::new(vmm.name)
    };
    let guest = Guest::boot(&machine, &outer, &image)?;
    let root = |script: &str| GuestCommand::script(script).user("root").limit(TIMEOUT);
    let host = guest.start(&root("exec /usr/libexec/sluice/sluice host --dir /run/vm --trust-vmm-memory"))?;
    host.wait_for_output("vhost-user socket:", TIMEOUT)?;
    let version = guest.start(&root(&format!("{} --version", vmm.name)))?.wait()?.expect_success()?;
    let ended = guest.start(&root(vmm.script))?.wait()?;
    let said = || process::tail(&ended.stdout, 60);
    let console = ended.stdout.replace('\r', "");
    let way = vmm.ways.iter().find(|way| console.contains(&format!("== way {way}\n")));
    let way = way.with_context(|| format!("the inner guest has no device:\n{}\n{}", said(), ended.stderr))?;
    for program in &programs {
        let native = run_native(&binaries, &program.path, &[], TIMEOUT)?;
        let printed = between(&console, &program.name)
            .with_context(|| format!("{} did not end in the inner guest:\n{}", program.name, said()))?;
        let expected = match *way {
            "vsock" => native.stdout.replace(UNIFIED.0, UNIFIED.1),
            _ => native.stdout,
        };
        ensure!(printed == expected, "{}: natively\n{expected}\nthere\n{printed}", program.name);
    }
    guest.power_off()?;
    let version = version.stdout.lines().next().unwrap_or_default().trim().to_owned();
    Ok(Ran { way: (*way).to_owned(), version })
}

/// The output of a program, if it ended with 0.
fn between<'a>(console: &'a str, program: &str) -> Option<&'a str> {
    let (_, after) = console.split_once(&format!("== {program} begins\n"))?;
    Some(after.split_once(&format!("== {program} ended with 0\n"))?.0)
}

/// The guest of QEMU, with the host's side, the VMM, and the inner guest's files.
fn outer_image(
    outer: &Kernel,
    inner: &Kernel,
    binaries: &Binaries,
    programs: &[Program],
    vmm: &Vmm<'_>,
) -> Result<Image> {
    let mut image = Image::new(outer, binaries)?;
    for file in HOST_PROGRAMS.into_iter().chain(DRIVER) {
        image.program(&binaries.get(file)?, &format!("usr/libexec/sluice/{file}"))?;
    }
    for (name, program) in vmm.programs {
        image.program(program, &format!("usr/local/bin/{name}"))?;
    }
    image.file("boot/vmlinuz", 0o644, vmm.kernel.clone());
    for (path, contents) in vmm.files {
        image.file(path, 0o644, contents.clone());
    }
    let initramfs = tempfile::NamedTempFile::new().context("a file for the inner image")?;
    inner_image(inner, binaries, programs, vmm)?.write(initramfs.path())?;
    image.file("boot/initrd", 0o644, fs::read(initramfs.path()).context("reading the inner image")?);
    Ok(image)
}

/// The guest of the VMM. It has only a console, so it runs the programs by itself, prints their output, and ends.
fn inner_image(kernel: &Kernel, binaries: &Binaries, programs: &[Program], vmm: &Vmm<'_>) -> Result<Image> {
    let mut image = Image::with_sluice(kernel, binaries, programs)?;
    let mut script = String::from("#!/bin/sh\nexport PATH=/usr/local/bin:/usr/bin\n");
    for way in vmm.ways {
        script.push_str(&format!(
            "su cuda -c 'SLUICE_TRANSPORT={way} vector_add' > /dev/null 2>&1 && echo '== way {way}'\n"
        ));
    }
    for program in programs {
        let name = &program.name;
        script.push_str(&format!(
            "echo '== {name} begins'; su cuda -c '{name} 2> /dev/null'; echo \"== {name} ended with $?\"\n"
        ));
    }
    script.push_str(&format!("{}\n", vmm.end));
    image.file("etc/alone", 0o755, script.into_bytes());
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_a_program_is_found_on_a_console() {
        let console = "boot\n== a begins\none\ntwo\n== a ended with 0\n== b begins\n== b ended with 1\n";
        assert_eq!(between(console, "a"), Some("one\ntwo\n"));
        assert_eq!(between(console, "b"), None);
        assert_eq!(between(console, "c"), None);
    }
}

//! The files of `vmm-configs`: each boots a VM as it is shipped, but for what is the user's own.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::debian::{self, Kernel, Series};
use sluice_tests::host::Host;
use sluice_tests::image::Image;
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{output_of, run};
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::{Gpu, Guest, Machine};

const QUICK: Duration = Duration::from_secs(60);
/// A daemon of libvirt's, and a guest under software emulation.
const DOMAIN: Duration = Duration::from_secs(600);

fn shipped(name: &str) -> Result<String> {
    let path = paths::workspace().join("vmm-configs").join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// A file with the user's own values: each must be there to be replaced.
fn filled(mut text: String, values: &[(&str, &str)]) -> Result<String> {
    for (placeholder, value) in values {
        ensure!(text.contains(placeholder), "the file says nothing of {placeholder:?}");
        text = text.replace(placeholder, value);
    }
    Ok(text)
}

fn vector_add() -> Result<Vec<Program>> {
    let mut programs = programs::compile_all()?;
    programs.retain(|program| program.name == "vector_add");
    Ok(programs)
}

// Promise: V40
#[test]
#[ignore = "for the full tier"]
fn qemu_boots_with_the_shipped_file() -> Result<()> {
    let binaries = Binaries::locate()?;
    let host = Host::start(&binaries, Series::V6_12, None)?;
    let kernel = Kernel::fetch(Series::V6_12)?;
    let image = Image::with_sluice(&kernel, &binaries, &vector_add()?)?;
    let socket = host.socket().display().to_string();
    let text =
        filled(shipped("qemu-legacy.cfg")?, &[("/run/sluice/vm1/vm-1.sock", &socket), ("\"4G\"", "\"1G\"")])?;
    let file = host.folder().join("qemu.cfg");
    fs::write(&file, text)?;
    let arguments = ["-readconfig", &file.display().to_string(), "-m", "1G"].map(str::to_owned);
    let machine = Machine { gpu: Gpu::Arguments(arguments.to_vec()), ..Machine::new("readconfig") };
    let guest = Guest::boot(&machine, &kernel, &image)?;
    let ran = guest.run("vector_add")?.expect_success()?;
    ensure!(ran.stdout.contains("PASS"), "{}", ran.stdout);
    guest.kill()?;
    host.stop()?;
    Ok(())
}

// Promise: V41
#[test]
fn libvirts_own_schema_accepts_the_shipped_domain() -> Result<()> {
    let mut validate = Command::new("virt-xml-validate");
    validate.arg(paths::workspace().join("vmm-configs/libvirt.xml")).arg("domain");
    match validate.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("SKIP: virt-xml-validate (Debian package libvirt-clients) is not installed");
            Ok(())
        }
        _ => output_of(&mut validate, QUICK).map(drop),
    }
}

/// Runs as root in name spaces of its own, so that nothing of the host's libvirt is touched and nothing is left: a daemon with its
/// folders on a tmpfs, which starts a domain and waits until that is off.
const LIBVIRT: &str = r#"set -e
for folder in /run/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
    mkdir -p $folder && mount -t tmpfs -o mode=755 tmpfs $folder
done
mkdir -p /var/lib/libvirt/qemu /run/libvirt/qemu
cat > $0/qemu.conf <<END
user = "root"
group = "root"
security_driver = "none"
stdio_handler = "file"
remember_owner = 0
namespaces = []
cgroup_controllers = []
END
mount --bind $0/qemu.conf /etc/libvirt/qemu.conf
libvirtd & daemon=$!
for i in $(seq 100); do virsh --connect qemu:///system version > /dev/null 2>&1 && break; sleep 0.2; done
virsh --connect qemu:///system define $0/domain.xml
virsh --connect qemu:///system start web-1
virsh --connect qemu:///system domstate web-1
for i in $(seq 500); do
    [ "$(virsh --connect qemu:///system domstate web-1)" = "running" ] || break
    sleep 1
done
cat /var/log/libvirt/qemu/web-1.log | tail -20
kill $daemon; wait $daemon || true
"#;

/// Instead of the agent: computes, says on the console what came of it, and switches off.
const ONCE: &str = "#!/bin/sh\nexport PATH=/usr/local/bin:/usr/bin:/bin\n\
                    su cuda -s /bin/sh -c vector_add > /dev/console 2>&1\npoweroff -f\n";

// Promise: V41
#[test]
#[ignore = "for the full tier"]
fn virsh_starts_the_shipped_domain_and_it_computes() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: a libvirtd of its own needs root");
        return Ok(());
    }
    debian::ensure(&[
        "libvirt-clients",
        "libvirt-daemon",
        "libvirt-daemon-driver-qemu",
        "libvirt-daemon-system",
    ])?;
    let binaries = Binaries::locate()?;
    let host = Host::start(&binaries, Series::V6_12, None)?;
    let kernel = Kernel::fetch(Series::V6_12)?;
    let mut image = Image::with_sluice(&kernel, &binaries, &vector_add()?)?;
    image.file("etc/agent", 0o755, ONCE.into());
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name).display().to_string();
    image.write(Path::new(&at("initrd")))?;
    let boot = format!(
        "hvm</type><kernel>{}</kernel><initrd>{}</initrd><cmdline>console=ttyS0 quiet panic=-1</cmdline>",
        kernel.image.display(),
        at("initrd")
    );
    let devices = format!(
        "<serial type='file'><source path='{}'/><target port='0'/></serial>\
         <channel type='unix'><source mode='bind' path='{}'/><target type='virtio' name='sluice.agent'/></channel>",
        at("console"),
        at("agent")
    );
    let domain = filled(
        shipped("libvirt.xml")?,
        &[
            ("type='kvm'", "type='qemu'"),
            ("unit='GiB'>4<", "unit='GiB'>1<"),
            ("<cpu mode='host-passthrough'/>", "<cpu mode='maximum'/>"),
            ("hvm</type>", &boot),
            ("<!-- disks, networks and consoles as usual -->", &devices),
            ("/run/sluice/vm-1000.sock", &host.socket().display().to_string()),
        ],
    )?;
    fs::write(at("domain.xml"), domain)?;
    let mut validate = Command::new("virt-xml-validate");
    output_of(validate.args([&at("domain.xml"), "domain"]), QUICK)?;
    let mut libvirt = Command::new("unshare");
    libvirt
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", LIBVIRT])
        .arg(folder.path());
    let finished = run(&mut libvirt, DOMAIN)?;
    let console = fs::read_to_string(at("console")).unwrap_or_default();
    ensure!(
        console.contains("PASS"),
        "{}\n{}\n{}\n{console}",
        finished.status,
        finished.stdout,
        finished.stderr
    );
    host.stop()?;
    Ok(())
}

//! The files of `vmm-configs`: each boots a VM as shipped, except for the user's own values.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_kit::processes::make_script;
use sluice_tests::debian::{self, Kernel, Series};
use sluice_tests::host::Host;
use sluice_tests::image::Image;
use sluice_tests::managed::{Host as HostOfMany, Options};
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{output_of, run};
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::{Gpu, Guest, Machine};

const QUICK: Duration = Duration::from_secs(60);
/// Time limit for a daemon of libvirt and a guest under software emulation.
const DOMAIN: Duration = Duration::from_secs(600);

fn shipped(name: &str) -> Result<String> {
    let path = paths::workspace().join("vmm-configs").join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// A file with the user's own values; each placeholder must exist.
fn filled(mut text: String, values: &[(&str, &str)]) -> Result<String> {
    for (placeholder, value) in values {
        ensure!(text.contains(placeholder), "the file has no {placeholder:?}");
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

/// Packages of `virt-xml-validate`, with one that it only recommends.
const VALIDATE: [&str; 2] = ["libvirt-clients", "libxml2-utils"];

// Promise: V41
#[test]
fn libvirts_own_schema_accepts_the_shipped_domain() -> Result<()> {
    debian::ensure(&VALIDATE)?;
    let mut validate = Command::new("virt-xml-validate");
    validate.arg(paths::workspace().join("vmm-configs/libvirt.xml")).arg("domain");
    output_of(&mut validate, QUICK).map(drop)
}

/// Runs as root in namespaces of its own, so that the host's libvirt is untouched and no file remains: a daemon with its folders
/// on a tmpfs, which starts a domain and waits until that is off.
const LIBVIRT: &str = r#"set -e
for folder in /run/libvirt /etc/libvirt/qemu /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
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

/// In place of the agent: computes, prints the result on the console, and switches off.
const ONCE: &str = "#!/bin/sh\nexport PATH=/usr/local/bin:/usr/bin:/bin\n\
                    su cuda -s /bin/sh -c vector_add > /dev/console 2>&1\npoweroff -f\n";

// Promise: V41
#[test]
#[ignore = "for the full tier"]
fn virsh_starts_the_shipped_domain_and_it_computes() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        sluice_skip::skip("a libvirtd of its own needs root");
        return Ok(());
    }
    let daemon = ["libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-daemon-system"];
    debian::ensure(&[&VALIDATE[..], &daemon].concat())?;
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

/// The management API's answer for a VM of 4 GiB, with the paths of the shipped files.
fn said_by_the_api() -> Result<Value> {
    let host = HostOfMany::start(&Options::default())?;
    let vm =
        host.put_with("web-1", json!({ "guest_memory_bytes": 4_u64 << 30, "memory_bytes": 64 << 20 }))?;
    let socket = vm["connect"]["socket"].as_str().context("a socket")?;
    let stem = socket.strip_suffix(".sock").context("a socket's name")?;
    let connect = serde_json::from_str(&vm["connect"].to_string().replace(stem, "/run/sluice/vm-1000"))?;
    host.stop()?;
    Ok(connect)
}

/// The value of a `name=value` pair in a comma-separated list; commas in brackets do not separate.
fn value<'a>(argument: &'a str, name: &str) -> Result<&'a str> {
    let (_, rest) =
        argument.split_once(&format!("{name}=")).with_context(|| format!("no {name} in {argument}"))?;
    let end = if rest.starts_with('[') { rest.find(']').map(|end| end + 1) } else { rest.find(',') };
    Ok(&rest[..end.unwrap_or(rest.len())])
}

/// A value that is a number, or a list of numbers.
fn number(argument: &str, name: &str) -> Result<Value> {
    serde_json::from_str(value(argument, name)?).with_context(|| format!("{name} in {argument}"))
}

// Promise: V42
#[test]
fn shipped_vmm_files_match_the_connect_answer_of_the_api() -> Result<()> {
    let connect = said_by_the_api()?;
    let words = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|word| Some(word.as_str()?.to_owned())).collect()
    };
    let api = words(&connect["cloud_hypervisor"]);

    // The script, with a program that prints its arguments.
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("cloud-hypervisor");
    make_script(&program, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n");
    let mut script = Command::new("sh");
    script.arg(paths::workspace().join("vmm-configs/cloud-hypervisor.sh")).arg("--kernel");
    script.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
    let given = output_of(&mut script, QUICK)?;
    let given: Vec<&str> = given.lines().collect();
    ensure!(given[..api.len()] == api && given[api.len()..] == ["--kernel"], "{given:?} {api:?}");

    let body: Value = serde_json::from_str(&shipped("cloud-hypervisor.json")?)?;
    let [_, memory, _, device] = &api[..] else { anyhow::bail!("{api:?}") };
    ensure!(body["memory"]["size"] == number(memory, "size")?, "{body} {memory}");
    ensure!(body["memory"]["shared"] == true && value(memory, "shared")? == "on", "{body} {memory}");
    let gpu = &body["generic_vhost_user"][0];
    ensure!(gpu["socket"] == value(device, "socket")?, "{gpu} {device}");
    ensure!(gpu["device_type"] == number(device, "device_type")?, "{gpu} {device}");
    ensure!(gpu["queue_sizes"] == number(device, "queue_sizes")?, "{gpu} {device}");

    let vsock: Value = serde_json::from_str(&shipped("cloud-hypervisor-vsock.json")?)?;
    let api = words(&connect["vsock"]["cloud_hypervisor"]);
    let shown = format!(
        "cid={},socket={}",
        vsock["vsock"]["cid"],
        vsock["vsock"]["socket"].as_str().unwrap_or_default()
    );
    ensure!(api == ["--vsock", &shown], "{vsock} {api:?}");

    let firecracker: Value = serde_json::from_str(&shipped("firecracker-vsock.json")?)?;
    ensure!(firecracker == connect["vsock"]["firecracker"], "{firecracker} {}", connect["vsock"]);
    Ok(())
}

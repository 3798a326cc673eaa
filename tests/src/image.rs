//! The guest's root file system: an initramfs of Debian's busybox, C library and kernel modules, the agent, and the
//! programs under test. Written anew for every boot, in milliseconds, without root.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::debian::{self, Kernel};
use crate::paths::Binaries;
use crate::process::{output_of, run};
use crate::programs::Program;
use crate::python::Python;

/// The ordinary user of programs; member of `render`, owner of no file.
pub const USER: &str = "cuda";

const INIT: &str = include_str!("../guest/init");
const INITTAB: &str = "::respawn:/etc/agent\n";
const AGENT: &str = "#!/bin/sh\nexport PATH=/usr/local/bin:/usr/bin\nexec /usr/bin/sluice-guest-agent \"$(cat /run/agent-port)\"\n";
/// The agent's service for guests with systemd. It starts last, so an answer means that the system has booted.
const AGENT_SERVICE: &str = "[Unit]\nDescription=Agent of the tests\nAfter=systemd-udev-settle.service\n\
                             Wants=systemd-udev-settle.service\n\
                             [Service]\nExecStart=/usr/local/bin/sluice-guest-agent /dev/virtio-ports/sluice.agent\n\
                             Type=idle\nStandardError=journal+console\nRestart=on-failure\n";
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\ncuda:x:1000:1000::/home/cuda:/bin/sh\n\
                      other:x:1001:1001::/home/other:/bin/sh\n";
const GROUP: &str = "root:x:0:\nvideo:x:44:\nrender:x:104:cuda\ncuda:x:1000:\nother:x:1001:\n";
const HOSTS: &str = "127.0.0.1 localhost guest\n";

/// Folder of shared libraries, as in Debian; the C library searches it without a cache file.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

enum Node {
    Folder { mode: u32, owner: u32 },
    File { mode: u32, contents: Vec<u8> },
    Link { target: String },
}

/// A root file system being put together. Paths are relative to the guest's root, without a leading slash.
pub struct Image {
    // Sorted, so that a folder comes before its contents.
    nodes: BTreeMap<String, Node>,
}

impl Image {
    /// A system that boots `kernel` and runs the agent of the tests, without any file of Sluice.
    ///
    /// # Errors
    /// When busybox, the agent or a module cannot be read.
    pub fn new(kernel: &Kernel, binaries: &Binaries) -> Result<Self> {
        let mut image = Self { nodes: BTreeMap::new() };
        for folder in
            ["dev", "etc", "modules", "proc", "root", "run", "sys", "usr/bin", "usr/local/bin", "usr/lib64"]
        {
            image.folder(folder, 0o755, 0);
        }
        image.folder(LIBRARIES, 0o755, 0);
        image.folder("tmp", 0o1777, 0);
        image.folder("home/cuda", 0o755, 1000);
        image.folder("home/other", 0o755, 1001);
        for name in ["bin", "lib", "lib64"] {
            image.link(name, &format!("usr/{name}"));
        }
        image.link("sbin", "usr/bin");
        image.link("usr/sbin", "bin");
        image.copy(Path::new("/bin/busybox"), "usr/bin/busybox", 0o755)?;
        image.link("usr/bin/sh", "busybox");
        for (path, mode, text) in [
            ("init", 0o755, INIT),
            ("etc/inittab", 0o644, INITTAB),
            ("etc/agent", 0o755, AGENT),
            ("etc/passwd", 0o644, PASSWD),
            ("etc/group", 0o644, GROUP),
            ("etc/hosts", 0o644, HOSTS),
        ] {
            image.file(path, mode, text.as_bytes().to_vec());
        }
        let mut order = String::new();
        for module in &kernel.modules {
            let name = module.file_name().and_then(|name| name.to_str()).context("a module has a name")?;
            image.copy(module, &format!("modules/{name}"), 0o644)?;
            order.push_str(name);
            order.push('\n');
        }
        image.file("modules/order", 0o644, order.into_bytes());
        image.program(&binaries.get("sluice-guest-agent")?, "usr/bin/sluice-guest-agent")?;
        Ok(image)
    }

    /// A fresh Debian with systemd, which loads modules and sets up devices itself, with the agent of the tests. It has no file of
    /// Sluice; `programs` are in the path.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn debian(kernel: &Kernel, binaries: &Binaries, programs: &[Program]) -> Result<Self> {
        let mut image = Self { nodes: BTreeMap::new() };
        image.tree(&debian::system()?, "")?;
        image.link("init", "usr/lib/systemd/systemd");
        // Laid out as in the kernel's package, so that udev finds the modules of a device.
        let work = tempfile::tempdir().context("a folder for modules")?;
        let modules = work.path().join("lib/modules").join(&kernel.version).join("kernel");
        fs::create_dir_all(&modules)?;
        for module in &kernel.modules {
            fs::copy(module, modules.join(module.file_name().context("a module has a name")?))?;
        }
        let mut index = Command::new("/sbin/depmod");
        index.arg("--basedir").arg(work.path()).arg(&kernel.version);
        output_of(&mut index, Duration::from_secs(60))?;
        image.tree(&work.path().join("lib/modules"), "usr/lib/modules")?;
        for (name, line) in [
            ("passwd", "cuda:x:1000:1000::/home/cuda:/bin/sh\n"),
            ("group", "cuda:x:1000:\n"),
            ("shadow", "cuda:*:19000:0:99999:7:::\n"),
        ] {
            image.append(&format!("etc/{name}"), line)?;
        }
        image.folder("home/cuda", 0o755, 1000);
        image.file("etc/hostname", 0o644, b"debian\n".to_vec());
        image.file("etc/systemd/system/sluice-test-agent.service", 0o644, AGENT_SERVICE.into());
        let wanted = "etc/systemd/system/multi-user.target.wants/sluice-test-agent.service";
        image.link(wanted, "/etc/systemd/system/sluice-test-agent.service");
        image.program(&binaries.get("sluice-guest-agent")?, "usr/local/bin/sluice-guest-agent")?;
        for program in programs {
            image.program(&program.path, &format!("usr/local/bin/{}", program.name))?;
        }
        Ok(image)
    }

    /// Appends to a text file.
    fn append(&mut self, path: &str, text: &str) -> Result<()> {
        let node = self.nodes.get_mut(path).with_context(|| format!("there is no {path}"))?;
        let Node::File { contents, .. } = node else { anyhow::bail!("{path} is no file") };
        contents.extend_from_slice(text.as_bytes());
        Ok(())
    }

    /// Adds a file of the host, unchanged.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn add(&mut self, from: &Path, to: &str) -> Result<()> {
        self.copy(from, to, 0o644)
    }

    /// As [`Image::new`], with the guest's part of Sluice, and `programs` in the path.
    ///
    /// # Errors
    /// When a part has not been built.
    pub fn with_sluice(kernel: &Kernel, binaries: &Binaries, programs: &[Program]) -> Result<Self> {
        let mut image = Self::new(kernel, binaries)?;
        for (file, name) in
            [("libsluice_guest.so", "libcuda.so.1"), ("libsluice_guest_nvml.so", "libnvidia-ml.so.1")]
        {
            image.program(&binaries.get(file)?, &format!("{LIBRARIES}/{name}"))?;
        }
        for program in programs {
            image.program(&program.path, &format!("usr/local/bin/{}", program.name))?;
        }
        Ok(image)
    }

    /// Adds an empty folder.
    fn folder(&mut self, path: &str, mode: u32, owner: u32) {
        self.parents(path);
        self.nodes.insert(path.to_owned(), Node::Folder { mode, owner });
    }

    /// Adds a file that belongs to root.
    pub fn file(&mut self, path: &str, mode: u32, contents: Vec<u8>) {
        self.parents(path);
        self.nodes.insert(path.to_owned(), Node::File { mode, contents });
    }

    fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.nodes.insert(path.to_owned(), Node::Link { target: target.to_owned() });
    }

    fn copy(&mut self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let contents = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        self.file(to, mode, contents);
        Ok(())
    }

    fn parents(&mut self, path: &str) {
        let mut end = 0;
        while let Some(slash) = path[end..].find('/') {
            end += slash;
            let parent = path[..end].to_owned();
            self.nodes.entry(parent).or_insert(Node::Folder { mode: 0o755, owner: 0 });
            end += 1;
        }
    }

    /// Adds a program and the shared libraries it was linked to.
    ///
    /// # Errors
    /// When it or one of them cannot be read.
    pub fn program(&mut self, from: &Path, to: &str) -> Result<()> {
        self.stripped(from, to, 0o755)?;
        self.libraries_of(from, &[])
    }

    /// Adds the shared libraries a program was linked to, if they are missing.
    fn libraries_of(&mut self, program: &Path, search_first: &[PathBuf]) -> Result<()> {
        for library in linked_libraries(program, search_first)? {
            let name = library.file_name().and_then(|name| name.to_str()).context("a library has a name")?;
            let to = if name.starts_with("ld-linux") {
                format!("usr/lib64/{name}")
            } else {
                format!("{LIBRARIES}/{name}")
            };
            if !self.nodes.contains_key(&to) {
                self.copy(&library, &to, 0o755)?;
            }
        }
        Ok(())
    }

    /// Adds a Python.
    ///
    /// # Errors
    /// When a file of it cannot be read.
    pub fn python(&mut self, python: &Python) -> Result<()> {
        self.tree(python.root(), "")?;
        self.link("usr/bin/python3", "python3.11");
        let interpreter = python.root().join(Python::INTERPRETER);
        self.libraries_of(&interpreter, &python.libraries())?;
        // Empty libraries of old C libraries, which have become part of one file; packages still link them.
        for stub in ["libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1"] {
            let (host, guest) =
                (Path::new("/lib/x86_64-linux-gnu").join(stub), format!("{LIBRARIES}/{stub}"));
            if host.exists() && !self.nodes.contains_key(&guest) {
                self.copy(&host, &guest, 0o755)?;
            }
        }
        Ok(())
    }

    /// Adds the contents of a folder of the host to one of the guest, the root for "".
    fn tree(&mut self, from: &Path, to: &str) -> Result<()> {
        for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
            let (entry, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
            let name = entry.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
            let about = fs::symlink_metadata(&path)?;
            let inside = match to {
                // Only this folder of the guest may be a link: see `new`.
                "" if name == "lib" && about.is_dir() => "usr/lib".to_owned(),
                "" => name.to_owned(),
                to => format!("{to}/{name}"),
            };
            let mode = about.permissions().mode() & 0o7777;
            if about.is_dir() {
                self.nodes.entry(inside.clone()).or_insert(Node::Folder { mode, owner: 0 });
                self.tree(&path, &inside)?;
            } else if about.is_symlink() {
                let target = fs::read_link(&path)?;
                self.link(&inside, target.to_str().with_context(|| format!("{}", path.display()))?);
            } else {
                self.copy(&path, &inside, mode)?;
            }
        }
        Ok(())
    }

    /// Adds a file without debug information, which would be most of the image.
    fn stripped(&mut self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let work = tempfile::NamedTempFile::new().context("creating a temporary file")?;
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").arg(work.path()).arg(from);
        output_of(&mut strip, Duration::from_secs(60))?;
        self.copy(work.path(), to, mode)
    }

    /// Writes the image as an uncompressed archive, which a guest under software emulation unpacks fastest.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, to: &Path) -> Result<()> {
        let mut archive = Vec::new();
        for (index, (path, node)) in self.nodes.iter().enumerate() {
            let (mode, owner, contents): (u32, u32, &[u8]) = match node {
                Node::Folder { mode, owner } => (0o040_000 | mode, *owner, &[]),
                Node::File { mode, contents } => (0o100_000 | mode, 0, contents),
                Node::Link { target } => (0o120_777, 0, target.as_bytes()),
            };
            write_entry(&mut archive, index, path, mode, owner, contents)?;
        }
        write_entry(&mut archive, 0, "TRAILER!!!", 0, 0, &[])?;
        fs::write(to, archive).with_context(|| format!("writing {}", to.display()))
    }
}

/// One entry of a cpio archive in the "newc" format, the only one the kernel reads.
fn write_entry(
    archive: &mut Vec<u8>,
    inode: usize,
    path: &str,
    mode: u32,
    owner: u32,
    contents: &[u8],
) -> Result<()> {
    ensure!(contents.len() < 1 << 31, "{path} is too large for an initramfs");
    let name_size = path.len() + 1;
    let size = contents.len();
    write!(archive, "070701{inode:08X}{mode:08X}{owner:08X}{owner:08X}{:08X}{:08X}{size:08X}", 1, 0)?;
    write!(archive, "{:08X}{:08X}{:08X}{:08X}{name_size:08X}{:08X}", 0, 0, 0, 0, 0)?;
    archive.extend_from_slice(path.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(contents);
    archive.resize(archive.len().next_multiple_of(4), 0);
    Ok(())
}

/// The libraries that `ldd` lists, the loader included.
fn linked_libraries(program: &Path, search_first: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut ldd = Command::new("ldd");
    if !search_first.is_empty() {
        ldd.env("LD_LIBRARY_PATH", std::env::join_paths(search_first)?);
    }
    let finished = run(ldd.arg(program), Duration::from_secs(30))?;
    if finished.stdout.contains("statically linked") || finished.stderr.contains("not a dynamic executable") {
        return Ok(Vec::new());
    }
    ensure!(finished.status.success(), "ldd {}: {}", program.display(), finished.stderr);
    ensure!(
        !finished.stdout.contains("not found"),
        "{} misses a library:\n{}",
        program.display(),
        finished.stdout
    );
    Ok(libraries_in(&finished.stdout))
}

fn libraries_in(ldd: &str) -> Vec<PathBuf> {
    ldd.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_their_entries() {
        let mut image = Image { nodes: BTreeMap::new() };
        image.file("a/b/c", 0o644, b"contents".to_vec());
        image.folder("a/b", 0o1777, 5);
        let order: Vec<&str> = image.nodes.keys().map(String::as_str).collect();
        assert_eq!(order, ["a", "a/b", "a/b/c"]);
        assert!(matches!(image.nodes["a/b"], Node::Folder { mode: 0o1777, owner: 5 }));
    }

    #[test]
    fn entries_are_aligned() {
        let mut archive = Vec::new();
        write_entry(&mut archive, 1, "ab", 0o100_644, 0, b"xyz").unwrap();
        // A head of 110 bytes, "ab" and a zero, filled up to 116; three bytes of contents, filled up to 120.
        assert_eq!(archive.len(), 120);
        assert!(archive.starts_with(b"07070100000001000081A4"));
    }

    #[test]
    fn output_of_ldd_is_parsed() {
        let text = "\tlinux-vdso.so.1 (0x00007ff)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(
            libraries_in(text),
            [PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"), PathBuf::from("/lib64/ld-linux-x86-64.so.2")]
        );
    }
}

#![expect(unsafe_code, reason = "a library is loaded, and three functions of it are called")]

//! The driver library that programs find, and the line of the loader's configuration that decides it.
//!
//! The libraries lie in a directory of their own. A file in `/etc/ld.so.conf.d` names it, and sorts before those of other
//! packages, so that another installed driver stays unchanged in its place.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// The directory of the libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/sluice-guest";
/// The file that names it to the loader.
pub(crate) const LINE: &str = "/etc/ld.so.conf.d/0000-sluice.conf";
/// A text in every driver of Sluice, and in no other: the name of a setting.
const OURS: &[u8] = b"SLUICE_TRANSPORT";
/// The longest start of a driver. Sluice's waits half of that for the host, and then reports an error itself.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Puts the line in force, or out of force.
pub(crate) fn switch(on: bool) -> Result<()> {
    let text = fs::read_to_string(LINE).with_context(|| format!("{LINE} cannot be read"))?;
    let changed = switched(&text, on)?;
    if changed != text {
        replace(Path::new(LINE), &changed).with_context(|| format!("{LINE} cannot be written (root can)"))?;
    }
    let status = Command::new("/sbin/ldconfig").status().context("ldconfig cannot be run")?;
    ensure!(status.success(), "ldconfig fails: {status}");
    println!("programs that start from now on find {}", if on { "Sluice's libraries" } else { "others" });
    Ok(())
}

/// Replaces the content of a file as a whole: the loader never reads half a line.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    // The loader reads only files that end in `.conf`.
    let new = path.with_extension("conf.new");
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(fs::metadata(path)?.permissions())?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().inspect_err(|_| _ = fs::remove_file(&new))
}

fn switched(text: &str, on: bool) -> Result<String> {
    let mut found = false;
    let lines: Vec<String> = text
        .lines()
        .map(|line| {
            if line.trim_start_matches(['#', ' ']) != LIBRARIES {
                return line.to_owned();
            }
            found = true;
            if on { LIBRARIES.to_owned() } else { format!("# {LIBRARIES}") }
        })
        .collect();
    if !found {
        bail!("{LINE} has no line with {LIBRARIES}: reinstall the package");
    }
    Ok(lines.join("\n") + "\n")
}

/// True if the line is in force; `None` if there is no such file.
pub(crate) fn is_on() -> Option<bool> {
    let text = fs::read_to_string(LINE).ok()?;
    Some(text.lines().any(|line| line.trim() == LIBRARIES))
}

/// The driver that a program with CUDA finds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FoundDriver {
    pub(crate) path: PathBuf,
    /// True if it is Sluice's.
    pub(crate) ours: bool,
    /// The number of devices after `cuInit`, or its error.
    pub(crate) started: Result<i64, i64>,
    /// Its messages.
    pub(crate) said: String,
}

/// Starts the driver in a process of its own, which may crash or hang.
///
/// # Errors
/// The reason for which it cannot be loaded.
pub(crate) fn find() -> Result<FoundDriver> {
    let program = std::env::current_exe().context("this program is gone")?;
    let mut child = Command::new(program)
        .arg("load")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start this program")?;
    let begun = Instant::now();
    while child.try_wait().context("cannot wait for the driver's process")?.is_none() {
        if begun.elapsed() > TIMEOUT {
            child.kill().context("cannot kill the driver's process")?;
            child.wait().context("cannot wait for the driver's process")?;
            bail!("libcuda.so.1 hangs: it has not started within {} s", TIMEOUT.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().context("cannot wait for the driver's process")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if !output.status.success() {
        let last = said.lines().last().unwrap_or_default();
        bail!("{}", if last.is_empty() { format!("ended by {}", output.status) } else { last.to_owned() });
    }
    read(&output.stdout, said).context("cannot parse the report of the driver's process")
}

fn read(answer: &[u8], said: String) -> Option<FoundDriver> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let path = PathBuf::from(answer["path"].as_str()?);
    let number = |name: &str| answer[name].as_i64();
    let started = match number("error")? {
        0 => Ok(number("devices")?),
        error => Err(error),
    };
    Some(FoundDriver { ours: is_ours(&path), path, started, said })
}

/// True if a driver library is Sluice's, in any directory.
pub(crate) fn is_ours(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| memchr::memmem::find(&bytes, OURS).is_some())
}

/// Loads the driver as any program does, and prints the result.
pub(crate) fn load() -> Result<()> {
    // SAFETY: loading runs the library's initializers; it is the driver of this system, in a process of its own.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }?;
    let path = mapped().context("libcuda.so.1 is loaded but not mapped")?;
    // SAFETY: the type is that of the CUDA driver API.
    let init: libloading::Symbol<'_, unsafe extern "C" fn(u32) -> i32> = unsafe { library.get(b"cuInit") }?;
    // SAFETY: as above.
    let count: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
        unsafe { library.get(b"cuDeviceGetCount") }?;
    // SAFETY: 0 is the only valid flag.
    let mut error = unsafe { init(0) };
    let mut devices = 0;
    if error == 0 {
        // SAFETY: a pointer to a number that it fills.
        error = unsafe { count(&raw mut devices) };
    }
    println!("{}", json!({ "path": path, "error": error, "devices": devices }));
    Ok(())
}

/// The file behind this process' libcuda.
fn mapped() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().filter_map(|line| line.split_once('/')).map(|(_, path)| format!("/{path}")).find(|path| {
        path.rsplit('/')
            .next()
            .is_some_and(|name| name.starts_with("libcuda.so") || name.starts_with("libsluice_guest"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# About it.\n/usr/lib/sluice-guest\n";

    // Promise: G20
    #[test]
    fn switching_off_and_on_restores_the_line() {
        let off = switched(TEXT, false).unwrap();
        assert_eq!(off, "# About it.\n# /usr/lib/sluice-guest\n");
        assert_eq!(switched(&off, false).unwrap(), off);
        assert_eq!(switched(&off, true).unwrap(), TEXT);
        assert!(switched("/usr/lib/other\n", true).is_err());
    }

    // Promise: G20
    #[test]
    fn replaced_file_is_never_read_in_part() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0000-sluice.conf");
        assert!(replace(&path, TEXT).is_err(), "there is no file whose mode it takes");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        fs::write(&path, "before\n").unwrap();
        let reader = File::open(&path).unwrap();
        replace(&path, TEXT).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), TEXT);
        assert_eq!(io::read_to_string(reader).unwrap(), "before\n", "an open file keeps the old text");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn report_of_the_process_is_parsed() {
        let said = || "sluice: a message".to_owned();
        let found = read(br#"{"path": "/none", "error": 0, "devices": 2}"#, said()).unwrap();
        assert_eq!((found.started, found.ours), (Ok(2), false));
        let found = read(br#"{"path": "/none", "error": 100, "devices": 0}"#, said()).unwrap();
        assert_eq!((found.started, found.said), (Err(100), said()));
        assert!(read(b"{}", said()).is_none());
        assert!(read(b"[", said()).is_none());
    }
}

//! The devices of one run: in a folder of their own in memory, which goes with the run.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FlockOperation, flock};
use softgpu_device::{Config, MODELS, Model, PAGE_BYTES};
use tempfile::TempDir;

/// Beginning of the names of folders.
const PREFIX: &str = "softgpu-run-";

#[derive(Debug, clap::Args)]
pub(crate) struct DeviceOptions {
    /// GPU to imitate; --help lists the models [default: SLUICE-141]
    #[arg(long, value_name = "MODEL", value_parser = model)]
    model: Option<&'static Model>,
    /// Memory of each device, for instance 4GiB [default: a 64th of the model's]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,
    /// Number of devices [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    devices: Option<u32>,
    /// Directory of devices that outlive the program, and that runs with the same directory share; it should be on a tmpfs
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

fn model(key: &str) -> Result<&'static Model, String> {
    let known = || MODELS.iter().map(|model| model.key).collect::<Vec<_>>().join(", ");
    Model::find(key).ok_or_else(|| format!("expected one of {}", known()))
}

/// Parses a size: a number of bytes, or of a unit that follows.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|sign: char| sign.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        "TiB" | "T" => 40,
        _ => return Err("expected a unit of B, KiB, MiB, GiB or TiB".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "expected a number with a unit, as in 4GiB".to_owned())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "the size is out of range".to_owned())
}

/// The folder of one run. Dropping it removes it, with the devices in it.
pub(crate) struct RunFolder {
    folder: TempDir,
    /// Locked as long as this process lives, so that a later run can tell a folder of a killed run.
    _lock: File,
    variables: Vec<(&'static str, OsString)>,
}

impl RunFolder {
    /// Makes the folder, and removes those that killed runs of this user left.
    pub(crate) fn make(options: &DeviceOptions) -> Result<Self> {
        let config = Config::from_environment().context("bad configuration of the software GPU")?;
        // Without devices of its own it holds links only.
        let temporary = std::env::temp_dir();
        let parent = if config.private { config.state.parent() } else { Some(temporary.as_path()) };
        let parent = parent.context("the software GPU has no directory")?;
        sweep(parent);
        let (folder, lock) = locked_folder(parent)?;

        let mut variables: Vec<(&'static str, OsString)> = Vec::new();
        match &options.state {
            Some(state) => {
                let state = std::path::absolute(state).context("--state")?;
                variables.push(("SLUICE_SOFTGPU_STATE", state.into()));
            }
            None if config.private => {
                variables.push(("SLUICE_SOFTGPU_STATE", folder.path().join("state").into()));
            }
            None => {}
        }
        if let Some(model) = options.model {
            variables.push(("SLUICE_SOFTGPU_MODEL", model.key.into()));
        }
        if let Some(devices) = options.devices {
            variables.push(("SLUICE_SOFTGPU_DEVICES", devices.to_string().into()));
        }
        if let Some(bytes) = options.memory {
            let model = options.model.or(config.model).unwrap_or(&MODELS[0]);
            let scale = model.scale_for(bytes);
            let most = model.pages(1).saturating_mul(PAGE_BYTES) >> 20;
            ensure!(scale.is_some(), "a {} has no more than {most}MiB: --memory exceeds that", model.key);
            variables.extend(scale.map(|scale| ("SLUICE_SOFTGPU_SCALE", scale.to_string().into())));
        }
        Ok(Self { folder, _lock: lock, variables })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Variables by which the driver finds its devices.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, &OsString)> {
        self.variables.iter().map(|(name, value)| (*name, value))
    }
}

/// Makes a folder and locks it.
fn locked_folder(parent: &Path) -> Result<(TempDir, File)> {
    loop {
        let folder = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .context("cannot make a directory for the software GPU")?;
        // A run that starts at the same time may take the new folder for that of a killed run.
        let Ok(lock) = File::open(folder.path()) else { continue };
        flock(&lock, FlockOperation::LockExclusive)
            .context("cannot lock the directory of the software GPU")?;
        if folder.path().is_dir() {
            return Ok((folder, lock));
        }
    }
}

/// Removes the folders of killed runs: those of which no process holds the lock. Others' folders cannot be opened, and anything else
/// with such a name stays.
fn sweep(parent: &Path) {
    let mut directory = OpenOptions::new();
    // The parent is everyone's: another user's pipe must not block this, and a link must not lead elsewhere.
    directory.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_NONBLOCK);
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(folder) = directory.open(entry.path()) else { continue };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Another run may be faster, and a later one tries again.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("4096"), Ok(4096));
        for wrong in ["", "GiB", "4 GiB", "-1", "4GB", "99999999999TiB", "0"] {
            assert!(bytes(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn models_are_found_in_any_case_and_unknown_ones_refused_with_a_list() {
        assert_eq!(model("h100-80").map(|model| model.key), Ok("H100-80"));
        assert!(model("GTX").unwrap_err().contains("T4-16"));
    }
}

//! The folders of the bundle beside this program, which `cargo xtask hardware pack` fills.

use std::path::PathBuf;

use crate::stop::{Answer, Stop};

/// Paths of a complete bundle.
#[derive(Debug)]
pub(crate) struct Bundle {
    /// Folder of Sluice's programs and libraries.
    binaries: PathBuf,
    /// Folder of the CUDA programs.
    pub(crate) programs: PathBuf,
    /// Folder of the Python programs.
    pub(crate) clients: PathBuf,
}

impl Bundle {
    /// The bundle of this program. Without one, a step that needs it is not asked.
    pub(crate) fn beside_program() -> Answer<Bundle> {
        let own = std::env::current_exe()?;
        let folder = own.parent().ok_or_else(|| Stop::failed("the path of this program has no folder"))?;
        let bundle = Bundle {
            binaries: folder.join("bin"),
            programs: folder.join("programs"),
            clients: folder.join("clients"),
        };
        for path in [&bundle.program("sluice"), &bundle.programs] {
            if !path.exists() {
                let reason = format!("no bundle lies beside this program: {} is missing", path.display());
                return Err(Stop::not_asked(reason));
            }
        }
        Ok(bundle)
    }

    /// A program of Sluice by its name; without a name, the folder of all.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.binaries.join(name)
    }

    /// The library that programs load in place of the driver.
    pub(crate) fn library(&self) -> PathBuf {
        self.binaries.join("libsluice_guest.so")
    }

    /// The library that programs load in place of NVML.
    pub(crate) fn management_library(&self) -> PathBuf {
        self.binaries.join("libsluice_guest_nvml.so")
    }
}

/// The commit from which the bundle was packed.
pub(crate) fn commit() -> Option<String> {
    let text = std::fs::read_to_string(std::env::current_exe().ok()?.with_file_name("commit.txt")).ok()?;
    Some(text.trim().to_owned())
}

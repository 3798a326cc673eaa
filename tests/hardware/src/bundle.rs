//! The folders of the bundle beside this program, which `cargo xtask hardware pack` fills.

use std::path::PathBuf;

use crate::stop::{Answer, Stop};

/// Paths of a complete bundle.
#[derive(Debug)]
pub(crate) struct Bundle {
    /// The command line tool of Sluice, with the other programs and libraries beside it.
    pub(crate) sluice: PathBuf,
    /// Folder of the CUDA programs.
    pub(crate) programs: PathBuf,
}

impl Bundle {
    /// The bundle of this program. Without one, a step that needs it is not asked.
    pub(crate) fn beside_program() -> Answer<Bundle> {
        let own = std::env::current_exe()?;
        let folder = own.parent().ok_or_else(|| Stop::failed("the path of this program has no folder"))?;
        let bundle = Bundle { sluice: folder.join("bin/sluice"), programs: folder.join("programs") };
        for path in [&bundle.sluice, &bundle.programs] {
            if !path.exists() {
                let reason = format!("no bundle lies beside this program: {} is missing", path.display());
                return Err(Stop::not_asked(reason));
            }
        }
        Ok(bundle)
    }
}

/// The commit from which the bundle was packed.
pub(crate) fn commit() -> Option<String> {
    let text = std::fs::read_to_string(std::env::current_exe().ok()?.with_file_name("commit.txt")).ok()?;
    Some(text.trim().to_owned())
}

//! The Rust sources of the project, for checks that read them as text.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Passes every source file below `root` to `each`: its path from there, and its text. Hidden and target folders are left out.
pub(crate) fn for_each(root: &Path, mut each: impl FnMut(&Path, &str)) -> Result<()> {
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && !name.starts_with("target") {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
                each(path.strip_prefix(root).unwrap_or(&path), &text);
            }
        }
    }
    Ok(())
}

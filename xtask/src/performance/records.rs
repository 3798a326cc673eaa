//! The committed records: the last run without VMs, and the last one in VMs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sluice_tests::paths;
use sluice_tests::performance::{BenchRun, Measured};

/// The last run of each kind.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Records {
    /// The rows without a VM.
    pub(super) bench: Option<BenchRun>,
    /// The rows in VMs.
    pub(super) machines: Option<BenchRun>,
}

impl Records {
    /// The committed records.
    pub(super) fn read() -> Result<Self> {
        let file = file();
        match fs::read_to_string(&file) {
            Ok(text) => serde_json::from_str(&text).with_context(|| format!("reading {}", file.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
        }
    }

    /// Replaces the run of a kind by the one in a file, which `sluice-bench` wrote.
    pub(super) fn replace(&mut self, file: &Path, in_machines: bool) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let run = serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
        *(if in_machines { &mut self.machines } else { &mut self.bench }) = Some(run);
        Ok(())
    }

    pub(super) fn write(&self) -> Result<()> {
        let kinds = [("bench", &self.bench), ("machines", &self.machines)];
        let runs = kinds.iter().filter_map(|(kind, run)| Some((kind, run.as_ref()?)));
        let runs =
            runs.map(|(kind, run)| Ok(format!("\"{kind}\":{}", run.json()?))).collect::<Result<Vec<_>>>()?;
        let text = format!("{{\n{}\n}}\n", runs.join(",\n"));
        fs::write(file(), text).with_context(|| format!("writing {}", file().display()))
    }

    /// A row by its name, of the run that has it.
    pub(super) fn row(&self, name: &str) -> Option<&Measured> {
        let runs = [&self.bench, &self.machines].into_iter().flatten();
        runs.flat_map(|run| &run.rows).find(|row| row.name == name)
    }
}

fn file() -> PathBuf {
    paths::workspace().join("docs/performance.json")
}

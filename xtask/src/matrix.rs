//! `cargo xtask matrix`: collects the notes of tests in virtual machines, from which `cargo xtask docs` makes the page.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use sluice_tests::matrix::{self, Cell, Outcome};
use sluice_tests::paths;

use crate::runner;

fn file() -> PathBuf {
    paths::workspace().join("docs/support-matrix.json")
}

/// The cells of the committed file.
fn kept() -> Result<Vec<Cell>> {
    let file = file();
    match fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("reading {}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}

/// Merges the notes of the tests into the committed cells; a newer note replaces an older one. The page follows from them.
pub(crate) fn run() -> Result<()> {
    let noted = matrix::noted(&matrix::notes())?;
    println!("{} cells were noted by tests since the last clean build", noted.len());
    let cells = matrix::merge(kept()?, noted);
    let mut text = serde_json::to_string_pretty(&cells)?;
    text.push('\n');
    fs::write(file(), text).with_context(|| format!("writing {}", file().display()))?;
    println!("wrote {}", runner::shown(&file()));
    Ok(())
}

pub(crate) fn page() -> Result<String> {
    Ok(written(&kept()?))
}

fn written(cells: &[Cell]) -> String {
    let mut text = "<!-- Generated from what tests noted by `cargo xtask matrix`. Do not edit. -->\n\n\
         # Support matrix\n\n\
         The *transport*, the way of a guest's library to its device, follows from the device's features that the VMM passes on \
         and from the guest's kernel; the library finds out by itself. **Ran** means that the programs of `tests/programs` \
         printed the same as natively, in a virtual machine that a test booted, on that day and with these versions.\n\n\
         | transport | VMM, device | guest kernel | result |\n|---|---|---|---|\n"
        .to_owned();
    for Cell { place, day, outcome } in cells {
        let result = match outcome {
            Outcome::Ran { vmm, .. } if vmm.is_empty() => format!("**ran** {day}"),
            Outcome::Ran { vmm, kernel } => format!("**ran** {day}: {vmm}, {kernel}"),
            Outcome::NotRun { reason } => format!("not run {day}: {reason}"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| {} | {} | {} | {result} |", place.transport, place.vmm, place.kernel);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_tests::matrix::Place;

    #[test]
    fn every_matrix_cell_has_a_line_with_its_outcome() {
        let cell = |kernel: &str, outcome| Cell {
            place: Place::new("2D", "QEMU, `device`", kernel),
            day: "2026-11-20".to_owned(),
            outcome,
        };
        let ran = Outcome::Ran { vmm: "10.0.2".to_owned(), kernel: "6.12.95".to_owned() };
        let text = written(&[
            cell("Debian, 6.12", ran),
            cell("Debian, 6.1", Outcome::NotRun { reason: "no binary".to_owned() }),
        ]);
        assert!(text.ends_with(
            "|---|---|---|---|\n\
             | 2D | QEMU, `device` | Debian, 6.12 | **ran** 2026-11-20: 10.0.2, 6.12.95 |\n\
             | 2D | QEMU, `device` | Debian, 6.1 | not run 2026-11-20: no binary |\n"
        ));
    }
}

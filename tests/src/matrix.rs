//! Results by transport, VMM and guest kernel, from the tests in virtual machines.
//!
//! A test notes a cell when it has succeeded, or the reason why it could not run. `cargo xtask matrix` collects the notes into
//! `docs/support-matrix.json`, from which the page is generated.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::paths;

/// The subject of a cell. Versions are not part of it: a later one replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The library's way to the device: FULL, LEGACY, 2D, DIRECT, VSOCK.
    pub transport: String,
    /// The VMM of the guest, with the device that it offers.
    pub vmm: String,
    /// The guest's kernel.
    pub kernel: String,
}

impl Place {
    /// Makes a place.
    #[must_use]
    pub fn new(transport: &str, vmm: &str, kernel: &str) -> Self {
        Self { transport: transport.to_owned(), vmm: vmm.to_owned(), kernel: kernel.to_owned() }
    }
}

/// The result of a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Programs ran and printed the same as natively.
    Ran {
        /// Version of the VMM; empty if there is none.
        vmm: String,
        /// Version of the guest's kernel; empty if there is no guest.
        kernel: String,
    },
    /// No program ran.
    NotRun {
        /// The reason why no program ran.
        reason: String,
    },
}

/// A cell of the matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// The subject.
    #[serde(flatten)]
    pub place: Place,
    /// The day, in the form 2026-11-20.
    pub day: String,
    /// The result.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Notes that programs ran.
///
/// # Errors
/// When the note cannot be written.
pub fn ran(place: Place, vmm: &str, kernel: &str) -> Result<()> {
    note(place, Outcome::Ran { vmm: vmm.to_owned(), kernel: kernel.to_owned() })
}

/// Notes the reason why no program could run.
///
/// # Errors
/// When the note cannot be written.
pub fn not_run(place: Place, reason: &str) -> Result<()> {
    note(place, Outcome::NotRun { reason: reason.to_owned() })
}

fn note(place: Place, outcome: Outcome) -> Result<()> {
    let folder = notes();
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    // One file per cell, so that parallel tests do not collide.
    let text = format!("{}-{}-{}", place.transport, place.vmm, place.kernel);
    let name: String = text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let cell = Cell { place, day: today(), outcome };
    let file = folder.join(name).with_extension("json");
    fs::write(&file, serde_json::to_string_pretty(&cell)?)
        .with_context(|| format!("writing {}", file.display()))
}

/// The folder of notes.
#[must_use]
pub fn notes() -> PathBuf {
    paths::workspace().join("target/support-matrix")
}

/// The notes in a folder; none if it is not there.
///
/// # Errors
/// When one cannot be read.
pub fn noted(folder: &Path) -> Result<Vec<Cell>> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
    };
    entries.map(|entry| read(entry?.path())).collect()
}

/// Adds new cells to old ones, or replaces them. A cell that could not run today does not replace one that ran.
#[must_use]
pub fn merge(old: Vec<Cell>, new: Vec<Cell>) -> Vec<Cell> {
    let mut cells: BTreeMap<Place, Cell> = old.into_iter().map(|cell| (cell.place.clone(), cell)).collect();
    for cell in new {
        let ran = |cell: &Cell| matches!(cell.outcome, Outcome::Ran { .. });
        let stays = cells.get(&cell.place).is_some_and(|old| ran(old) && !ran(&cell));
        if !stays {
            cells.insert(cell.place.clone(), cell);
        }
    }
    cells.into_values().collect()
}

/// This day in UTC, in the form of [`Cell::day`].
#[must_use]
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    day(seconds / 86_400)
}

/// A day by its number since 1970, in the Gregorian calendar.
fn day(number: u64) -> String {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, number);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < days {
            break;
        }
        left -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(kernel: &str, day: &str, ran: bool) -> Cell {
        let outcome = if ran {
            Outcome::Ran { vmm: "1".to_owned(), kernel: "2".to_owned() }
        } else {
            Outcome::NotRun { reason: "no binary".to_owned() }
        };
        Cell { place: Place::new("2D", "VMM", kernel), day: day.to_owned(), outcome }
    }

    #[test]
    fn day_numbers_give_dates() {
        for (number, date) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_777, "2026-11-20"),
            (20_818, "2026-12-31"),
        ] {
            assert_eq!(day(number), date);
        }
    }

    #[test]
    fn result_of_a_cell_stays_until_it_runs_again() {
        let old = vec![cell("a", "2026-01-01", true), cell("b", "2026-01-01", false)];
        let new = vec![
            cell("a", "2026-02-02", false),
            cell("b", "2026-02-02", true),
            cell("c", "2026-02-02", false),
        ];
        let merged = merge(old, new.clone());
        assert_eq!(merged[0], cell("a", "2026-01-01", true));
        assert_eq!(merged[1..], new[1..]);
        let again = merge(merged, vec![cell("a", "2026-03-03", true)]);
        assert_eq!(again[0].day, "2026-03-03");
    }

    #[test]
    fn cells_are_read_as_they_are_written() {
        for ran in [true, false] {
            let cell = cell("a", "2026-01-01", ran);
            assert_eq!(serde_json::from_str::<Cell>(&serde_json::to_string(&cell).unwrap()).unwrap(), cell);
        }
    }
}

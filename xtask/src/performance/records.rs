//! The committed records: the last run without VMs, and the last one in VMs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use sluice_tests::paths;
use sluice_tests::performance::table::{RowKind, TABLE, kind};
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
        self.take(run, in_machines)
    }

    /// Takes a complete run: one without VMs has every row of the table, one in VMs every row of the record that it replaces.
    fn take(&mut self, run: BenchRun, in_machines: bool) -> Result<()> {
        check(&run)?;
        let old = if in_machines { &mut self.machines } else { &mut self.bench };
        let mut missing: Vec<String> = if in_machines {
            old.iter().flat_map(|run| &run.rows).map(|row| row.name.clone()).collect()
        } else {
            TABLE.iter().flat_map(RowKind::all).collect()
        };
        // A row that the table has lost is not missed.
        missing.retain(|name| kind(name).is_some() && run.rows.iter().all(|row| row.name != *name));
        ensure!(
            missing.is_empty(),
            "the record stays, because the run has not measured {}",
            missing.join(", ")
        );
        *old = Some(run);
        Ok(())
    }

    /// Refuses rows that the table does not have, or has in another unit.
    pub(super) fn check(&self) -> Result<()> {
        [&self.bench, &self.machines].into_iter().flatten().try_for_each(check)
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

fn check(run: &BenchRun) -> Result<()> {
    for Measured { name, unit, .. } in &run.rows {
        let kind = kind(name).with_context(|| format!("{name} of the record is not in the table of rows"))?;
        ensure!(unit == kind.unit, "{name} is recorded in {unit}, and in the table in {}", kind.unit);
    }
    Ok(())
}

fn file() -> PathBuf {
    paths::workspace().join("docs/performance.json")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use sluice_tests::performance::Machine;

    /// A machine of a record.
    pub(in crate::performance) fn machine() -> Machine {
        Machine {
            date: "2027-01-02".to_owned(),
            commit: "abc".to_owned(),
            kernel: "6.18".to_owned(),
            processor: "a processor".to_owned(),
            processors: 2,
            load: 0.04,
        }
    }

    fn run(names: impl IntoIterator<Item = String>) -> BenchRun {
        let row = |name: String| {
            let unit = kind(&name).map_or("us", |kind| kind.unit).to_owned();
            Measured { name, unit, value: 1.0, p99: 1.0, p999: 1.0, yardstick: None }
        };
        BenchRun { machine: machine(), seconds: 1.0, rows: names.into_iter().map(row).collect() }
    }

    #[test]
    fn run_without_a_row_of_the_table_does_not_replace_the_record() {
        let mut records = Records::default();
        let names: Vec<String> = TABLE.iter().flat_map(RowKind::all).collect();
        let error = records.take(run(names.iter().skip(1).cloned()), false).unwrap_err();
        assert!(error.to_string().ends_with(&names[0]) && records.bench.is_none(), "{error}");
        records.take(run(names), false).unwrap();
        assert!(records.bench.is_some());
    }

    #[test]
    fn run_without_a_transport_of_the_record_does_not_replace_it() {
        let names = |ways: &[&str]| run(ways.iter().map(|way| format!("vm/{way}/call/sync")));
        let mut records = Records::default();
        records.take(names(&["2d", "vsock"]), true).unwrap();
        let error = records.take(names(&["2d"]), true).unwrap_err();
        assert!(error.to_string().ends_with("vm/vsock/call/sync"), "{error}");
        assert_eq!(records.machines.as_ref().map(|run| run.rows.len()), Some(2));
        records.take(names(&["2d", "vsock", "blob"]), true).unwrap();
        assert_eq!(records.machines.map(|run| run.rows.len()), Some(3));
    }

    #[test]
    fn row_outside_of_the_table_and_row_in_another_unit_are_refused() {
        let mut records = Records { bench: Some(run(["call/none".to_owned()])), machines: None };
        assert!(records.check().unwrap_err().to_string().contains("not in the table"));
        let mut other = run(["call/sync".to_owned()]);
        other.rows[0].unit = "ms".to_owned();
        records = Records { bench: None, machines: Some(other) };
        assert!(records.check().unwrap_err().to_string().contains("recorded in ms"));
    }
}

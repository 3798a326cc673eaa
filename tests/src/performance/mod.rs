//! Records of benchmark runs: `sluice-bench` and the software GPU's engine write them, `cargo xtask bench --report` makes a page of them.
//!
//! It owns the format of records and never measures. The meaning of each row stands in [`table`] alone; a record has figures, and the machine that they are from.

pub mod table;

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{matrix, paths};

/// A row with its figures, in its unit. Of the figures of a yardstick there are none if the row has no yardstick.
///
/// A round of a row in a VM is a run of the whole row there, of which only the figures leave the VM: its figures are the medians of those
/// of the rounds, p99 and p99.9 too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The row's name, which [`table::kind`] knows.
    pub name: String,
    /// The unit of all figures but the ratios.
    pub unit: String,
    /// The median of the rounds' medians.
    pub value: f64,
    /// The figure that 99 % of the samples do not exceed; of rates, the one that they exceed.
    pub p99: f64,
    /// The same for 99.9 %.
    pub p999: f64,
    /// The peer that was measured in turns with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yardstick: Option<Yardstick>,
}

/// The figures of a yardstick.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Yardstick {
    /// Its name.
    pub name: String,
    /// As those of the row.
    pub value: f64,
    /// As those of the row.
    pub p99: f64,
    /// As those of the row.
    pub p999: f64,
    /// The median of the rounds' ratios, each of the row's median and the yardstick's.
    pub ratio: f64,
    /// The first quartile of these ratios.
    pub ratio_low: f64,
    /// The third quartile.
    pub ratio_high: f64,
}

/// The machine of a run, and its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The day, in UTC.
    pub date: String,
    /// The commit that was measured; it ends in `+` if files differed from it.
    pub commit: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Name of the processor.
    pub processor: String,
    /// Number of processors.
    pub processors: usize,
    /// Mean number of runnable processes in the last minute, when the run began.
    pub load: f64,
}

/// One run of one benchmark program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchRun {
    /// The machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Duration of the run, in seconds.
    pub seconds: f64,
    /// Its rows.
    pub rows: Vec<Measured>,
}

impl Machine {
    /// This machine, now.
    ///
    /// # Errors
    /// When a file of `/proc` cannot be read, or `git` does not know the commit.
    pub fn now() -> Result<Self> {
        let read = |file: &str| fs::read_to_string(file).with_context(|| format!("reading {file}"));
        let processors = read("/proc/cpuinfo")?;
        let name = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let load = read("/proc/loadavg")?;
        Ok(Self {
            date: matrix::today(),
            commit: commit()?,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            processor: name.map_or("unknown", |(_, name)| name).to_owned(),
            processors: std::thread::available_parallelism()?.get(),
            load: load.split(' ').next().context("a load")?.parse().context("a load")?,
        })
    }
}

/// The commit of this tree. Files that a report writes do not count as changes.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").arg("-C").arg(paths::workspace()).args(arguments).output()?;
        ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    let changed = git(&["status", "--porcelain", "--", ".", ":!docs/performance*"])?;
    Ok(git(&["rev-parse", "--short=12", "HEAD"])? + if changed.is_empty() { "" } else { "+" })
}

impl BenchRun {
    /// The record as JSON, a line for each row, so that a difference of two records shows the rows.
    ///
    /// # Errors
    /// When a figure is no number.
    pub fn json(&self) -> Result<String> {
        let mut rows = Vec::new();
        for row in &self.rows {
            ensure!(row.is_finite(), "{} has a figure that is no number: {row:?}", row.name);
            rows.push(serde_json::to_string(&row.rounded())?);
        }
        let mut head = serde_json::to_value(&self.machine)?;
        head["seconds"] = rounded(self.seconds).into();
        let head = head.to_string();
        let head = head.trim_end_matches('}');
        Ok(format!("{head},\"rows\":[\n{}\n]}}", rows.join(",\n")))
    }
}

impl Measured {
    fn is_finite(&self) -> bool {
        let other = |yardstick: &Yardstick| {
            let Yardstick { name: _, value, p99, p999, ratio, ratio_low, ratio_high } = yardstick;
            [value, p99, p999, ratio, ratio_low, ratio_high].iter().all(|figure| figure.is_finite())
        };
        [self.value, self.p99, self.p999].iter().all(|figure| figure.is_finite())
            && self.yardstick.as_ref().is_none_or(other)
    }

    /// The row with four significant digits.
    fn rounded(&self) -> Self {
        let mut row = self.clone();
        for figure in [&mut row.value, &mut row.p99, &mut row.p999] {
            *figure = rounded(*figure);
        }
        if let Some(yardstick) = &mut row.yardstick {
            let Yardstick { name: _, value, p99, p999, ratio, ratio_low, ratio_high } = yardstick;
            for figure in [value, p99, p999, ratio, ratio_low, ratio_high] {
                *figure = rounded(*figure);
            }
        }
        row
    }
}

/// A figure with four significant digits.
#[must_use]
pub fn rounded(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().unwrap_or(figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(value: f64) -> BenchRun {
        let machine = Machine {
            date: "2027-01-02".to_owned(),
            commit: "abc+".to_owned(),
            kernel: "6.18".to_owned(),
            processor: "a".to_owned(),
            processors: 2,
            load: 0.5,
        };
        let row = |name: &str, yardstick| Measured {
            name: name.to_owned(),
            unit: "us".to_owned(),
            value,
            p99: 2.0,
            p999: 3.0,
            yardstick,
        };
        let yardstick = Yardstick {
            name: "b".to_owned(),
            value: 1.0,
            p99: 1.0,
            p999: 1.0,
            ratio: 2.0,
            ratio_low: 1.5,
            ratio_high: 2.5,
        };
        BenchRun { machine, seconds: 1.0, rows: vec![row("x", None), row("y", Some(yardstick))] }
    }

    #[test]
    fn record_has_a_line_for_each_row_and_reads_back_the_same() {
        let text = run(0.5).json().unwrap();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert_eq!(serde_json::from_str::<BenchRun>(&text).unwrap(), run(0.5));
    }

    #[test]
    fn record_without_a_figure_is_refused() {
        assert!(run(f64::NAN).json().unwrap_err().to_string().contains("x has a figure"));
    }

    #[test]
    fn figures_keep_four_digits() {
        assert_eq!([rounded(0.012_345_6), rounded(123_456.0), rounded(0.0)], [0.012_35, 123_500.0, 0.0]);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::now().unwrap();
        assert!(machine.processors > 0 && !machine.kernel.is_empty() && machine.commit.len() >= 12);
    }
}

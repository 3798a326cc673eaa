//! What calls cost in virtual machines, on each way to the device, beside what they cost without a machine.
//!
//! The guest's program is the one that measures without a machine, too, on the same driver that does nothing. Both are started in
//! turns, so that whatever else the host does hits both.

use crate::Row;
use anyhow::{Context as _, Result, ensure};
use sluice_tests::{
    debian::{Kernel, Series},
    host::Host,
    image::Image,
    paths::Binaries,
    process,
    vm::{Guest, GuestCommand, Machine},
    way::{Mode, Way},
};
use std::{path::Path, time::Duration};

/// Rows that say what a way is like: both sides awake, a worker that sleeps, and data.
const ROWS: [&str; 6] =
    ["call/sync", "call/post-launch", "doorbell/", "wake/", "pageable/16MiB", "pinned/16MiB"];
/// Turns of machine and no machine.
const ROUNDS: usize = 3;
/// For one turn in a machine whose processor is emulated.
const LIMIT: Duration = Duration::from_secs(600);
const SERIES: Series = Series::V6_12;

/// The rows of every way that can be had here.
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let filter = if filter.is_empty() { ROWS.map(str::to_owned).to_vec() } else { filter.to_vec() };
    let mut rows = Vec::new();
    for way in [Ok(Way::stock(Mode::Legacy)), Ok(Way::stock(Mode::Flat)), Way::newer(Mode::Full)] {
        match way {
            Ok(way) => rows.extend(of(&way, binaries, me, &filter)?),
            Err(error) => eprintln!("not measured: no QEMU that passes everything on: {error:#}"),
        }
    }
    Ok(rows)
}

/// The rows of one way, as ratios to those without a machine.
fn of(way: &Way, binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let kernel = Kernel::fetch(SERIES)?;
    let mut image = Image::with_sluice(&kernel, binaries, &[])?;
    image.program(me, "usr/local/bin/sluice-bench")?;
    let driver = binaries.get("libsluice_null_driver.so")?.display().to_string();
    let environment: Vec<_> = way.environment().into_iter().collect();
    let host = Host::start_with(binaries, SERIES, &["--driver", &driver], &environment)?;
    let name = format!("bench-{}", way.mode);
    let machine = way.machine(Machine { cpus: 2, memory_mib: 2048, ..Machine::new(&name) }, host.socket());
    let guest = Guest::boot(&machine, &kernel, &image)
        .with_context(|| format!("the host's side said:\n{}", process::tail(&host.printed(), 30)))?;
    eprintln!("{} in a VM ({}, {})", way.mode, kernel.version, guest.accelerator().name());
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        outside.push(crate::without_a_machine(binaries, me, filter)?);
        inside.push(in_machine(&guest, filter)?);
    }
    guest.power_off()?;
    ensure!(host.stop()?.success(), "the host's side does not end well");
    inside.first().into_iter().flatten().map(|row| compare(way.mode, row, &inside, &outside)).collect()
}

fn in_machine(guest: &Guest, filter: &[String]) -> Result<Vec<Row>> {
    const FILE: &str = "/tmp/rows";
    let mut words = vec!["sluice-bench", "client", FILE];
    words.extend(filter.iter().map(String::as_str));
    guest.start(&GuestCommand::program(&words).limit(LIMIT))?.wait()?.expect_success()?;
    let text = guest.run(&format!("cat {FILE}"))?.expect_success()?.stdout;
    serde_json::from_str(&text).with_context(|| format!("the guest's rows:\n{text}"))
}

/// A row of a machine: medians of the turns.
fn compare(mode: Mode, row: &Row, inside: &[Vec<Row>], outside: &[Vec<Row>]) -> Result<Row> {
    let of = |turns: &[Vec<Row>], figure: fn(&Row) -> f64| {
        let same = turns.iter().flatten().filter(|other| other.name == row.name);
        let mut figures: Vec<f64> = same.map(figure).collect();
        figures.sort_by(f64::total_cmp);
        figures.get(figures.len() / 2).copied().with_context(|| format!("no {} was measured", row.name))
    };
    let (value, baseline_value) = (of(inside, |row| row.value)?, of(outside, |row| row.value)?);
    Ok(Row {
        name: format!("vm/{mode}/{}", row.name),
        value,
        p99: of(inside, |row| row.p99)?,
        baseline: "without a VM".to_owned(),
        baseline_value,
        ratio: value / baseline_value,
        ..row.clone()
    })
}

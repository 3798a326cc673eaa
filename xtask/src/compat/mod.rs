//! `cargo xtask compat`: the tests of public clients, natively on the software GPU and remoted.
//!
//! The command calls it. It owns the page of clients; the runs themselves are those of `sluice_tests::compat`. It never judges a client's
//! result: a fault is a difference between the two runs.

pub(crate) mod page;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use sluice_tests::compat::clients::{CLIENTS, CompatClient, client};
use sluice_tests::compat::expectations::Expectations;
use sluice_tests::compat::results::{OutcomeCounts, count, only_remoted};
use sluice_tests::compat::{self, CompatRunner};
use sluice_tests::matrix::today;
use sluice_tests::paths::Binaries;

use crate::cargo::build_release;
use page::ClientRow;

/// Failures that are printed for each client.
const PRINTED: usize = 50;

/// Run tests of public clients natively and remoted.
#[derive(Debug, Args)]
pub(crate) struct CompatOptions {
    /// Names of clients; all of them if none is given.
    names: Vec<String>,
    /// List the clients and their usual times.
    #[arg(long)]
    list: bool,
    /// Run only files of tests whose name, with that of their folder, contains this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run again although there are results.
    #[arg(long)]
    fresh: bool,
    /// Write the figures into docs/clients.json, from which `cargo xtask docs` makes a page.
    #[arg(long)]
    record: bool,
}

/// Runs clients; false if a test fails remoted alone.
pub(crate) fn run(options: &CompatOptions) -> Result<bool> {
    if options.list {
        for client in CLIENTS {
            println!("{:<14} {:>4} min  {}", client.name, client.minutes, client.packages.join(" "));
        }
        return Ok(true);
    }
    options.names.iter().try_for_each(|name| client(name).map(drop)).context("see --list")?;
    let binaries = match std::env::var_os("SLUICE_BINARIES") {
        Some(folder) => Binaries::at(folder.into()),
        None => build_release()?,
    };
    let chosen = |client: &&CompatClient| {
        options.names.is_empty() || options.names.iter().any(|name| name == client.name)
    };
    let mut good = true;
    for client in CLIENTS.iter().filter(chosen) {
        good &= run_client(client, &binaries, options).with_context(|| client.name)?;
    }
    Ok(good)
}

fn run_client(client: &'static CompatClient, binaries: &Binaries, options: &CompatOptions) -> Result<bool> {
    let results = compat::results_of(client)?;
    if options.fresh && results.exists() {
        std::fs::remove_dir_all(&results).with_context(|| format!("removing {}", results.display()))?;
    }
    let runner = CompatRunner::new(compat::install(client)?, binaries)?;
    let mut batches = runner.batches()?;
    let all_files = batches.len();
    batches.retain(|batch| {
        let place = batch.file.parent().and_then(Path::parent).unwrap_or(&batch.file);
        let name = batch.file.strip_prefix(place).unwrap_or(&batch.file).to_string_lossy();
        options.only.is_empty() || options.only.iter().any(|text| name.contains(text.as_str()))
    });
    ensure!(!batches.is_empty(), "no file of tests matches");
    let expectations = Expectations::load()?;
    let (mut all, mut differences) = ([OutcomeCounts::default(), OutcomeCounts::default()], Vec::new());
    let (mut causes, mut unknown) = (BTreeMap::<String, usize>::new(), Vec::new());
    for (index, batch) in batches.iter().enumerate() {
        let started = Instant::now();
        let outcomes = runner.run(batch)?;
        let mut found = only_remoted(&outcomes.native, &outcomes.remoted);
        // A listed failure that comes in some runs only may pass natively and fail remoted.
        found.retain(|(test, _)| match expectations.cause(client.name, test) {
            Some(cause) => {
                *causes.entry(cause.to_owned()).or_default() += 1;
                false
            }
            None => true,
        });
        let [native, remoted] = [&outcomes.native, &outcomes.remoted].map(count);
        println!(
            "[{}/{}] {}: natively {native}; remoted {remoted}; {:.0} s{}",
            index + 1,
            batches.len(),
            batch.file.file_stem().unwrap_or_default().display(),
            started.elapsed().as_secs_f64(),
            if found.is_empty() { "" } else { "  DIFFERENT" }
        );
        for (sum, one) in all.iter_mut().zip([native, remoted]) {
            *sum += one;
        }
        differences.extend(found.into_iter().map(|(test, reason)| format!("{test}: {reason}")));
        for (test, cause) in expectations.causes(client.name, &outcomes.native) {
            match cause {
                Some(cause) => *causes.entry(cause.to_owned()).or_default() += 1,
                None => unknown.push(format!("{test}: {}", outcomes.native[test].1)),
            }
        }
    }
    let [native, remoted] = all;
    println!("{}: natively {native}; remoted {remoted}", client.name);
    for (cause, count) in &causes {
        println!("{}: {count} tests fail natively: {cause}", client.name);
    }
    show(&format!("{}: {} tests fail natively without a known cause", client.name, unknown.len()), &unknown);
    show(&format!("{}: {} tests fail remoted only", client.name, differences.len()), &differences);
    if options.record {
        page::record(ClientRow {
            client: client.name.to_owned(),
            day: today(),
            files: batches.len(),
            all_files,
            native,
            remoted,
            remoted_only: differences.len(),
            causes,
            unknown: unknown.len(),
        })?;
    }
    Ok(differences.is_empty())
}

fn show(title: &str, lines: &[String]) {
    println!("{title}");
    for line in lines.iter().take(PRINTED) {
        println!("  {line}");
    }
    if lines.len() > PRINTED {
        println!("  and {} more", lines.len() - PRINTED);
    }
}

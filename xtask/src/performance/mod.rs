//! `cargo xtask bench --report`: `docs/performance.md` from the records of runs.
//!
//! The command and the stage `docs` call it. It owns the page and its plots, and never measures.
//! The records lie in `docs/performance.json`. The page is a template with tables, plots and figures put in by the names of rows, so no
//! figure is written by hand, and the stage `docs` of the tests compares the page with template and records.

mod page;
mod plot;
mod plots;
mod records;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use sluice_tests::paths;

use crate::runner;
use records::Records;

/// The page and its plots, by their paths, as the records have them.
pub(crate) fn pages() -> Result<Vec<(PathBuf, String)>> {
    let records = Records::read()?;
    let docs = paths::workspace().join("docs");
    let mut pages = vec![(docs.join("performance.md"), page::page(page::TEMPLATE, &records)?)];
    for (name, picture) in plots::all(&records) {
        pages.push((docs.join(format!("performance/{name}.svg")), picture));
    }
    Ok(pages)
}

/// Takes the run in a file, which `sluice-bench` wrote, in the place of the last one of its kind, and writes the page anew. A run that
/// lacks rows, as without a program that a row needs, is refused.
pub(crate) fn report(run: &Path, in_machines: bool) -> Result<()> {
    let mut records = Records::read()?;
    records.replace(run, in_machines)?;
    records.write()?;
    for (path, text) in pages()? {
        fs::create_dir_all(path.parent().context("a page lies in a folder")?)?;
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", runner::shown(&path));
    }
    Ok(())
}

//! `cargo xtask docs`: pages that are generated from the code, so that they always agree with it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use sluice_protocol::calls::{C, Parameter, VERSION, WIRE, WireRow};
use sluice_tests::paths;

use crate::cargo::cargo;
use crate::compat::page as clients;
use crate::{api_page, coverage, matrix, performance, runner, softgpu_page};

/// Write the generated pages of docs/, and the generated tables of softgpu/README.md.
#[derive(Debug, Default, Args)]
pub(crate) struct DocsOptions {
    /// Write nothing; fail if a page is out of date.
    #[arg(long)]
    check: bool,
}

struct Page {
    path: PathBuf,
    text: String,
}

/// Writes the pages, or compares them.
pub(crate) fn run(options: &DocsOptions) -> Result<bool> {
    if options.check {
        let stale = stale(None)?;
        for page in &stale {
            println!("{page} is out of date; `cargo xtask docs` writes it");
        }
        return Ok(stale.is_empty());
    }
    for page in pages(None)? {
        fs::create_dir_all(page.path.parent().context("a page lies in a folder")?)?;
        fs::write(&page.path, page.text).with_context(|| format!("writing {}", page.path.display()))?;
        println!("wrote {}", runner::shown(&page.path));
    }
    Ok(true)
}

/// The pages that differ from the code. `sluiced` is the daemon of this tree, if it is built.
pub(crate) fn stale(sluiced: Option<&Path>) -> Result<Vec<String>> {
    let mut stale = Vec::new();
    for page in pages(sluiced)? {
        let there = match fs::read_to_string(&page.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("reading {}", page.path.display())),
        };
        if there != page.text {
            stale.push(runner::shown(&page.path));
        }
    }
    Ok(stale)
}

fn pages(sluiced: Option<&Path>) -> Result<Vec<Page>> {
    let docs = paths::workspace().join("docs");
    let openapi = openapi(sluiced)?;
    let api = api_page::page(&serde_json::from_str(&openapi)?);
    let page = |name, text| Page { path: docs.join(name), text };
    let performance = performance::pages()?.into_iter().map(|(path, text)| Page { path, text });
    let mut pages = vec![
        page("protocol.md", protocol()),
        page("openapi.json", openapi),
        page("api.md", api),
        page("support-matrix.md", matrix::page()?),
        page("clients.md", clients::page()?),
        page("cuda-coverage.md", coverage::page()?),
        Page { path: softgpu_page::path(), text: softgpu_page::page()? },
    ];
    pages.extend(performance);
    Ok(pages)
}

/// The description of the management API, printed by the daemon. Unless the daemon is there, it is built only for that, so that
/// `cargo xtask` itself stays small.
fn openapi(sluiced: Option<&Path>) -> Result<String> {
    let mut command = sluiced.map_or_else(
        || {
            let mut run = cargo();
            run.args(["run", "--quiet", "--release", "--package", "sluice-daemon", "--bin", "sluiced", "--"]);
            run
        },
        Command::new,
    );
    let output = command.args(["--describe", "openapi"]).stderr(Stdio::inherit()).output();
    let output = output.context("describing the management API")?;
    ensure!(output.status.success(), "sluiced --describe openapi: {}", output.status);
    String::from_utf8(output.stdout).context("the description of the management API")
}

fn protocol() -> String {
    let mut text = format!(
        "<!-- Generated from protocol/src/calls.rs by `cargo xtask docs`. Do not edit. -->\n\n\
         # The calls between a guest and its worker\n\n\
         Version {VERSION} of the records; {} calls cross, {} functions of the driver are listed.\n\n\
         A `post` is not answered: it is complete when its stream's sequence says so. A `work` is a post for whose end the \
         guest waits at once if its environment asks that launches block. A `sync` is answered in a reply slot, and so is a \
         `wait`, behind all posted work. Ids are stable and never reused. The kinds of parameters are types \
         of `protocol/src/field.rs`, which check what they decode.\n\n\
         ## Calls that cross\n",
        WIRE.len(),
        C.len()
    );
    let mut rows: Vec<&WireRow> = WIRE.iter().collect();
    rows.sort_by_key(|row| row.id);
    for row in rows {
        wire_row(&mut text, row);
    }
    text.push_str(
        "\n## Functions of the driver\n\n\
         `local` is answered in the guest, `hand` uses the calls above, `scalar` does so with handles and numbers alone, `forward` only makes one of them, `contextless` does so \
         without a context, `driver` is for the \
         worker alone. *Since* is the CUDA version in which the function appeared.\n\n\
         | id | since | class | function | with the thread's own default stream |\n|---|---|---|---|---|\n",
    );
    for row in C {
        let twins = row.per_thread.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let (major, minor) = (row.since / 1000, row.since % 1000 / 10);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {:#06x} | {major}.{minor} | {} | `{}` | {twins} |",
            row.id, row.class, row.name
        );
    }
    text
}

fn wire_row(text: &mut String, row: &WireRow) {
    let _ = writeln!(text, "\n### {:#06x} `{}` ({})\n", row.id, row.name, row.class);
    for line in row.doc {
        // Links are for rustdoc.
        let _ = writeln!(text, "{}", line.trim().replace("[`", "`").replace("`]", "`"));
    }
    for (what, parameters) in [("takes", row.parameters), ("answers", row.results)] {
        if !parameters.is_empty() {
            let _ = writeln!(text, "\n- {what}: {}", list(parameters));
        }
    }
}

fn list(parameters: &[Parameter]) -> String {
    let one = |parameter: &Parameter| {
        // The compiler spaces and wraps types as it likes; a page must not depend on that.
        let mut kind = parameter.kind.split_whitespace().collect::<Vec<_>>().join(" ");
        for (loose, tight) in [(" :: ", "::"), (" < ", "<"), ("< ", "<"), (" >", ">"), ("{ ", ""), (" }", "")]
        {
            kind = kind.replace(loose, tight);
        }
        format!("`{}: {kind}`", parameter.name)
    };
    parameters.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_configuration_is_in_the_table_of_operations() {
        let read = |file| fs::read_to_string(paths::workspace().join(file)).unwrap();
        let code = read("backend/daemon/src/configuration.rs");
        let (_, fields) = code.split_once("struct File {").unwrap();
        let (fields, _) = fields.split_once('}').unwrap();
        let settings: Vec<String> = fields
            .lines()
            .filter_map(|line| Some(line.trim().split_once(':')?.0.replace('_', "-")))
            .collect();
        assert!(settings.len() > 20, "{settings:?}");
        let page = read("docs/operations.md");
        for setting in settings {
            let forms = [format!("`{setting}`"), format!("`[{setting}]`"), format!("`[[{setting}]]`")];
            let in_table = |line: &str| line.starts_with('|') && forms.iter().any(|form| line.contains(form));
            assert!(page.lines().any(in_table), "{setting}");
        }
    }

    #[test]
    fn every_call_and_every_function_is_on_the_page() {
        let page = protocol();
        for row in WIRE {
            assert!(page.contains(&format!("### {:#06x} `{}` ({})", row.id, row.name, row.class)));
        }
        for row in C {
            assert!(
                page.contains(&format!("| {:#06x} |", row.id))
                    && page.contains(&format!("| `{}` |", row.name))
            );
        }
    }
}

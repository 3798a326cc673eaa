//! The page: the template with its directives replaced. A directive stands in double braces:
//!
//! - `{{run bench}}`: a sentence on machine, commit and duration of a run;
//! - `{{rows NAME…}}`: a table of the rows whose names begin so, and their meanings;
//! - `{{grid NAME…}}`: a table of families of rows, with a column for each part of the names;
//! - `{{machines}}`: a table of the rows in VMs, with a column for each transport;
//! - `{{plot NAME}}`: a picture;
//! - `{{budgets}}`: a table of the counts that tests hold;
//! - `{{value NAME}}`, `{{p99 NAME}}`, `{{other NAME}}`, `{{ratio NAME}}`: a figure of a row or of its yardstick.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};
use sluice_kit::budgets;
use sluice_tests::performance::table::{Aim, RowKind, TABLE, kind};
use sluice_tests::performance::{BenchRun, Measured, rounded};

use super::plots;
use super::records::Records;

pub(super) const TEMPLATE: &str = include_str!("template.md");

/// A cell without a figure.
const NONE: &str = "–";

/// The page of a template.
pub(super) fn page(template: &str, records: &Records) -> Result<String> {
    records.check()?;
    let mut text = "<!-- Generated from xtask/src/performance/template.md and docs/performance.json by `cargo xtask bench --report`. \
         Do not edit. -->\n\n"
        .to_owned();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (directive, after) = after.split_once("}}").context("a directive has no end")?;
        text.push_str(before);
        text.push_str(&replaced(directive, records).with_context(|| format!("{{{{{directive}}}}}"))?);
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

fn replaced(directive: &str, records: &Records) -> Result<String> {
    let mut words = directive.split_whitespace();
    let verb = words.next().context("an empty directive")?;
    let names: Vec<&str> = words.collect();
    Ok(match (verb, &names[..]) {
        ("run", ["bench"]) => run(records.bench.as_ref()),
        ("run", ["machines"]) => run(records.machines.as_ref()),
        ("rows", [_, ..]) => rows(&kinds(&names)?, records),
        ("grid", [_, ..]) => grid(&kinds(&names)?, records)?,
        ("machines", []) => machines(records.machines.as_ref()),
        ("plot", [name]) => {
            format!("![{}](performance/{name}.svg)", plots::title(name).context("no such plot")?)
        }
        ("budgets", []) => counts(),
        ("value" | "p99" | "other" | "ratio", [name]) => figure(verb, name, records)?,
        _ => bail!("no such directive"),
    })
}

/// The kinds whose names begin with one of these texts, in the order of the texts.
fn kinds(names: &[&str]) -> Result<Vec<&'static RowKind>> {
    let mut found = Vec::new();
    for name in names {
        let before = found.len();
        found.extend(TABLE.iter().filter(|kind| kind.names.starts_with(name)));
        ensure!(found.len() > before, "no row's name begins with {name}");
    }
    Ok(found)
}

fn run(run: Option<&BenchRun>) -> String {
    let Some(BenchRun { machine, seconds, .. }) = run else { return "No run is recorded.".to_owned() };
    format!(
        "Measured on {} at commit `{}`: {}, {} processors, Linux {}, {:.1} runnable processes at the start. The run took {:.0} minutes.",
        machine.date,
        machine.commit,
        machine.processor,
        machine.processors,
        machine.kernel,
        machine.load,
        (seconds / 60.0).ceil()
    )
}

/// The meanings of kinds, as a list.
fn meanings(kinds: &[&RowKind]) -> String {
    kinds.iter().map(|kind| format!("- `{}`: {}\n", kind.names, kind.meaning)).collect()
}

fn rows(kinds: &[&RowKind], records: &Records) -> String {
    let mut text =
        "| row | value | p99 | p99.9 | yardstick | its value | its p99 | its p99.9 | ratio | aim |\n\
         |---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for kind in kinds {
        for name in kind.all() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| `{name}` | {} |", cells(kind, records.row(&name)).join(" | "));
        }
    }
    format!("{text}\n{}", meanings(kinds).trim_end())
}

fn cells(kind: &RowKind, row: Option<&Measured>) -> [String; 9] {
    let none = || NONE.to_owned();
    let Some(row) = row else {
        let mut cells = [(); 9].map(|()| none());
        cells[0] = "not measured".to_owned();
        return cells;
    };
    let show = |figure| shown(figure, kind.unit);
    let [own, p99, p999] = [row.value, row.p99, row.p999].map(show);
    let aim = aim(kind, row);
    let Some(other) = &row.yardstick else {
        return [own, p99, p999, none(), none(), none(), none(), none(), aim];
    };
    let ratio = format!("{} ({} to {})", plain(other.ratio), plain(other.ratio_low), plain(other.ratio_high));
    let [value, other_p99, other_p999] = [other.value, other.p99, other.p999].map(show);
    [own, p99, p999, other.name.clone(), value, other_p99, other_p999, ratio, aim]
}

/// The aim, and a mark if the row misses it.
fn aim(kind: &RowKind, row: &Measured) -> String {
    let sign = if kind.is_rate() { "≥" } else { "≤" };
    let text = match kind.aim {
        Aim::Unset => return NONE.to_owned(),
        Aim::Value(bound) => format!("{sign} {}", shown(bound, kind.unit)),
        Aim::Ratio(bound) => format!("{sign} {} × yardstick", plain(bound)),
    };
    let ratio = row.yardstick.as_ref().map(|other| other.ratio);
    match kind.aim.is_kept(kind.is_rate(), row.value, ratio) {
        Some(false) => format!("**missed:** {text}"),
        _ => text,
    }
}

fn grid(kinds: &[&RowKind], records: &Records) -> Result<String> {
    let parts = |kind: &RowKind| -> Vec<String> {
        kind.all().filter_map(|name| Some(name.rsplit_once('/')?.1.to_owned())).collect()
    };
    let columns = parts(kinds.first().context("a kind")?);
    ensure!(kinds.iter().all(|kind| parts(kind) == columns), "the families have different parts");
    let mut text =
        format!("| median, p99 | {} |\n|---|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for kind in kinds {
        let cell = |name: String| match records.row(&name) {
            None => NONE.to_owned(),
            Some(row) if row.value.to_bits() == row.p99.to_bits() => shown(row.value, kind.unit),
            Some(row) => format!("{}, {}", shown(row.value, kind.unit), shown(row.p99, kind.unit)),
        };
        let family = kind.names.split("/{").next().unwrap_or(kind.names);
        let _ = writeln!(text, "| `{family}` | {} |", kind.all().map(cell).collect::<Vec<_>>().join(" | "));
    }
    Ok(format!("{text}\n{}", meanings(kinds).trim_end()))
}

/// The rows in VMs: a line for each row, and the median for each transport.
fn machines(run: Option<&BenchRun>) -> String {
    let Some(run) = run else { return "`cargo xtask bench --report --vm` measures them.".to_owned() };
    let split = |row: &'_ Measured| {
        let (way, name) = row.name.strip_prefix("vm/")?.split_once('/')?;
        Some((way.to_owned(), name.to_owned()))
    };
    let all: Vec<_> = run.rows.iter().filter_map(|row| Some((split(row)?, row))).collect();
    let ways: BTreeSet<&str> = all.iter().map(|((way, _), _)| way.as_str()).collect();
    let names: BTreeSet<&str> = all.iter().map(|((_, name), _)| name.as_str()).collect();
    let heads: Vec<_> =
        ways.iter().map(|way| format!("{}, without a VM, ratio", way.to_uppercase())).collect();
    let mut text = format!("| row | {} |\n|---|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
    for name in names {
        let cell = |way: &&str| {
            let row = all.iter().find(|((of, own), _)| of == way && own == name).map(|(_, row)| row);
            let figures = row.and_then(|row| Some((row, row.yardstick.as_ref()?, kind(&row.name)?)));
            figures.map_or(NONE.to_owned(), |(row, other, kind)| {
                let [own, without] = [row.value, other.value].map(|figure| shown(figure, kind.unit));
                format!("{own}, {without}, {}", plain(other.ratio))
            })
        };
        let _ = writeln!(text, "| `{name}` | {} |", ways.iter().map(cell).collect::<Vec<_>>().join(" | "));
    }
    text.trim_end().to_owned()
}

fn counts() -> String {
    let mut text = "| budget | count | meaning |\n|---|---|---|\n".to_owned();
    for (name, count, meaning) in budgets::ALL {
        let _ = writeln!(text, "| `{name}` | {} | {} |", grouped(*count), meaning.trim());
    }
    text.trim_end().to_owned()
}

fn figure(verb: &str, name: &str, records: &Records) -> Result<String> {
    let kind = kind(name).context("no such row")?;
    let Some(row) = records.row(name) else { return Ok("(not measured)".to_owned()) };
    let other = || row.yardstick.as_ref().context("the row has no yardstick");
    Ok(match verb {
        "value" => shown(row.value, kind.unit),
        "p99" => shown(row.p99, kind.unit),
        "other" => shown(other()?.value, kind.unit),
        _ => plain(other()?.ratio),
    })
}

/// A figure with its unit, as people write it.
fn shown(figure: f64, unit: &str) -> String {
    let (figure, unit) = match unit {
        "us" if figure >= 1e3 => (figure / 1e3, " ms"),
        "us" if figure < 0.1 => (figure * 1e3, " ns"),
        "us" => (figure, " µs"),
        "ms" if figure >= 1e3 => (figure / 1e3, " s"),
        "1/s" if figure >= 1e6 => (figure / 1e6, " million/s"),
        "count" => (figure, ""),
        "count/s" => (figure, "/s"),
        "% core" => (figure, " % of a core"),
        unit => return format!("{} {unit}", plain(figure)),
    };
    format!("{}{unit}", plain(figure))
}

/// A number with up to three significant digits.
fn plain(figure: f64) -> String {
    let figure = if figure >= 1e3 { figure.round() } else { rounded(figure) };
    match figure {
        figure if figure >= 1e3 => {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a rounded positive figure"
            )]
            let whole = figure as u64;
            grouped(whole)
        }
        figure if figure >= 100.0 => format!("{figure:.0}"),
        figure if figure >= 10.0 => format!("{figure:.1}"),
        figure if figure >= 1.0 => format!("{figure:.2}"),
        0.0 => "0".to_owned(),
        figure => {
            let digits = if figure >= 0.1 { 2 } else { 3 };
            format!("{figure:.digits$}")
        }
    }
}

/// A number with its thousands apart.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::performance::records::tests::machine;
    use sluice_tests::performance::Yardstick;

    fn records() -> Records {
        let row = |name: &str, value, yardstick| Measured {
            name: name.to_owned(),
            unit: "us".to_owned(),
            value,
            p99: 3.5,
            p999: 120.0,
            yardstick,
        };
        let yardstick = |ratio| {
            let name = "ping-pong".to_owned();
            Some(Yardstick { name, value: 0.1, p99: 0.2, p999: 0.3, ratio, ratio_low: 2.0, ratio_high: 9.0 })
        };
        let run = |rows| Some(BenchRun { machine: machine(), seconds: 61.0, rows });
        Records {
            bench: run(vec![row("call/sync", 0.5, yardstick(5.0)), row("gap/call/1ms", 20.0, None)]),
            machines: run(vec![row("vm/2d/call/sync", 1.5, yardstick(15.0))]),
        }
    }

    #[test]
    fn directives_are_replaced_by_figures_of_the_records() {
        let text = page(
            "a {{run bench}}\n{{rows call/sync call/vs}}\n{{grid gap/}}\n{{machines}}\n{{value call/sync}} {{ratio call/sync}}\n",
            &records(),
        )
        .unwrap();
        for part in [
            "a Measured on 2027-01-02 at commit `abc`: a processor, 2 processors, Linux 6.18, 0.0 runnable processes at the start. The run took 2 minutes.\n",
            "| `call/sync` | 0.50 µs | 3.50 µs | 120 µs | ping-pong | 0.10 µs | 0.20 µs | 0.30 µs | 5.00 (2.00 to 9.00) | **missed:** ≤ 4.00 × yardstick |\n",
            "| `call/vs-tcp` | not measured | – |",
            "| `gap/call` | – | – | – | – | – | – | 20.0 µs, 3.50 µs | – | – |\n",
            "| row | 2D, without a VM, ratio |\n|---|---|\n| `call/sync` | 1.50 µs, 0.10 µs, 15.0 |\n",
            "0.50 µs 5.00\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn record_in_another_unit_makes_no_page() {
        let mut records = records();
        if let Some(run) = &mut records.bench {
            run.rows[0].unit = "ms".to_owned();
        }
        assert!(page("{{value call/sync}}", &records).is_err());
    }

    #[test]
    fn directive_without_sense_is_refused() {
        for template in
            ["{{rows nothing/}}", "{{value nothing}}", "{{plot nothing}}", "{{x}}", "{{}}", "{{rows call/"]
        {
            assert!(page(template, &records()).is_err(), "{template}");
        }
    }

    #[test]
    fn template_has_every_row_and_no_figure_of_its_own() {
        let empty = Records { bench: None, machines: None };
        let page = page(TEMPLATE, &empty).unwrap();
        for kind in TABLE {
            assert!(page.contains(kind.names), "{} is not on the page", kind.names);
        }
        let units = [" µs", " ms", " GB/s", "/s ", " million"];
        for line in TEMPLATE.lines() {
            for unit in units {
                for (place, _) in line.match_indices(unit) {
                    let figure = line[..place].ends_with(|letter: char| letter.is_ascii_digit());
                    assert!(!figure, "a figure by hand: {line}");
                }
            }
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.0, 0.0123, 0.5, 1.234, 12.34, 123.4, 12_345.6].map(plain),
            ["0", "0.012", "0.50", "1.23", "12.3", "123", "12,346"]
        );
        assert_eq!(shown(0.02, "us"), "20.0 ns");
        assert_eq!(shown(2.5e6, "1/s"), "2.50 million/s");
        assert_eq!(shown(12.0, "GB/s"), "12.0 GB/s");
    }
}

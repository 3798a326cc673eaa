//! The plots of the page: each names its rows.

use sluice_tests::performance::Measured;
use sluice_tests::performance::table::{RowKind, TABLE};

use super::plot::{Bar, Bars, Lines, Scale};
use super::records::Records;

/// The figure of a row that a line shows.
type Figure = fn(&Measured) -> f64;

/// Draws a plot with this title.
type Draw = fn(&'static str, &Records) -> String;

/// The plots, each with the name of its file and its title.
const PLOTS: [(&str, &str, Draw); 6] = [
    ("gap-sweep", "Launch and call after a gap, in microseconds", gaps),
    ("threads", "Launches in a second, by the number of threads", threads),
    ("copies", "Speed of copies, memcpy = 1", copies),
    ("vms", "Calls of many VMs, 100 a second each: microseconds for a call", vms),
    ("vms-idle", "Idle sessions of many VMs", idle_vms),
    ("steps", "A launch with its end, and the start of a session, step by step", steps),
];

/// The title of a plot.
pub(super) fn title(name: &str) -> Option<&'static str> {
    PLOTS.iter().find(|(own, ..)| *own == name).map(|(_, title, _)| *title)
}

/// All plots with their names.
pub(super) fn all(records: &Records) -> impl Iterator<Item = (&'static str, String)> {
    PLOTS.into_iter().map(|(name, title, draw)| (name, draw(title, records)))
}

/// The names of the rows of families, and the parts in which they differ.
fn families(names: &str) -> impl Iterator<Item = (String, String)> {
    let kinds = TABLE.iter().filter(move |kind| kind.names.starts_with(names)).flat_map(RowKind::all);
    kinds.map(|name| (name.rsplit('/').next().unwrap_or_default().to_owned(), name))
}

fn categories(names: &str) -> Vec<String> {
    families(names).map(|(part, _)| part).collect()
}

/// A line of the rows whose names begin so.
fn line(
    name: &'static str,
    rows: &str,
    records: &Records,
    figure: Figure,
) -> (&'static str, Vec<Option<f64>>) {
    (name, families(rows).map(|(_, row)| records.row(&row).map(figure)).collect())
}

fn value(row: &Measured) -> f64 {
    row.value
}

fn p99(row: &Measured) -> f64 {
    row.p99
}

/// The speed of a row as a part of the yardstick's: the ratio of rates, the reciprocal of the ratio of times.
fn speed(row: &Measured) -> f64 {
    let ratio = row.yardstick.as_ref().map_or(f64::NAN, |other| other.ratio);
    if row.unit == "GB/s" { ratio } else { ratio.recip() }
}

fn gaps(title: &'static str, records: &Records) -> String {
    let lines = vec![
        line("a call, median", "gap/call/", records, value),
        line("a call, p99", "gap/call/", records, p99),
        line("a launch, median", "gap/launch/", records, value),
        line("a launch, p99", "gap/launch/", records, p99),
    ];
    let categories = categories("gap/call/");
    Lines {
        title,
        across: "the program computes for this time before",
        categories,
        scale: Scale::Logarithmic,
        lines,
    }
    .svg()
}

fn threads(title: &'static str, records: &Records) -> String {
    let lines = vec![
        line("each thread with a stream of its own", "threads/own/", records, value),
        line("all threads on one stream", "threads/one/", records, value),
    ];
    let categories = categories("threads/own/");
    Lines { title, across: "threads", categories, scale: Scale::Linear, lines }.svg()
}

fn copies(title: &'static str, records: &Records) -> String {
    let lines = vec![
        line("pinned, to the device", "copy/htod/pinned/", records, speed),
        line("pinned, from the device", "copy/dtoh/pinned/", records, speed),
        line("pageable, to the device", "copy/htod/pageable/", records, speed),
        line("pageable, from the device", "copy/dtoh/pageable/", records, speed),
    ];
    let categories = categories("copy/htod/pinned/");
    Lines { title, across: "bytes of a copy", categories, scale: Scale::Logarithmic, lines }.svg()
}

fn vms(title: &'static str, records: &Records) -> String {
    let lines = vec![
        line("time of a call, median", "scale/call/", records, value),
        line("time of a call, p99", "scale/call/", records, p99),
        line("processor time of all processes", "scale/cpu-per-call/", records, value),
    ];
    let categories = categories("scale/call/");
    Lines { title, across: "VMs", categories, scale: Scale::Logarithmic, lines }.svg()
}

fn idle_vms(title: &'static str, records: &Records) -> String {
    let lines = vec![
        line("processor time of all processes, in percent of a core", "scale/idle-cpu/", records, value),
        line("context switches of all processes, in each second", "scale/idle-switches/", records, value),
    ];
    let categories = categories("scale/idle-cpu/");
    Lines { title, across: "VMs with a session", categories, scale: Scale::Logarithmic, lines }.svg()
}

fn steps(title: &'static str, records: &Records) -> String {
    let bar = |name, unit, rows| {
        let parts = families(rows).filter_map(|(part, row)| Some((part, records.row(&row)?.value)));
        Bar { name, unit, parts: parts.collect() }
    };
    let bars = vec![
        bar("a launch and its end, the worker polls", "µs", "step/awake/"),
        bar("a launch and its end, the worker sleeps", "µs", "step/asleep/"),
        bar("from the start of a program to the end of its first kernel", "ms", "session/step/"),
    ];
    Bars { title, bars }.svg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_a_point_for_each_category() {
        for (families, others) in [
            ("gap/call/", &["gap/launch/"][..]),
            ("threads/own/", &["threads/one/"]),
            ("copy/htod/pinned/", &["copy/dtoh/pinned/", "copy/htod/pageable/", "copy/dtoh/pageable/"]),
            ("scale/call/", &["scale/cpu-per-call/"]),
            ("scale/idle-cpu/", &["scale/idle-switches/"]),
        ] {
            assert!(!categories(families).is_empty(), "{families}");
            for other in others {
                assert_eq!(categories(families), categories(other));
            }
        }
    }
}

//! The codes of `tests/programs/refusals.cu`, compared with those that a real driver gave.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::host;
use sluice_tests::paths::{Binaries, workspace};
use sluice_tests::programs::{passed, program};

/// The codes of NVIDIA's driver 580.159.04 on an H100, up to the row behind which the device had faulted.
const RECORDED: &str = "docs/hardware/2026-11-27-h100-580/refusals-native.txt";

/// Rows that differ from the recording, by their call and argument, under the reason. Later rows of one call and argument have
/// their number behind the argument. The list may only become shorter: a drop-in library must return what the driver returns.
const DIFFERENT: &[(&str, &[(&str, &str)])] = &[
    (
        "the attribute is of a later CUDA than the recorded driver",
        &[
            ("cuFuncGetAttribute", "updates by the device"),
            ("cuFuncGetAttribute", "the mode of shared memory"),
        ],
    ),
    (
        "the layout of NVIDIA's descriptors is not public, so the software GPU has its own; on the H100, Sluice gave the driver's",
        &[("cuTensorMapEncodeTiled", "checksum of the descriptor")],
    ),
    (
        "arrays of sparse memory are not served, as attribute 112 says",
        &[("cuArray3DCreate_v2", "a sparse array")],
    ),
    (
        "the worker names no address to its driver that is not memory of its session",
        &[("cuTexObjectCreate", "nowhere")],
    ),
    (
        "the driver read a link that it had freed, so its code is no rule",
        &[("cuLinkComplete", "a link that was destroyed")],
    ),
    (
        "the driver gave one code for every argument, so it refused the stream: null, which its documentation allows, unless a call that \
         failed before had left another handle in the variable",
        &[
            ("cuMemcpyPeerAsync", "null context"),
            ("cuMemcpyPeerAsync", "to nowhere"),
            ("cuMemcpy3DPeerAsync", "null context"),
            ("cuMemcpy3DPeerAsync", "to nowhere"),
        ],
    ),
];

/// The answers by call and argument. A call may have several rows with one argument, so the second has ` (2)` behind it.
fn answers(output: &str) -> BTreeMap<(&str, String), &str> {
    let (mut rows, mut counts) = (BTreeMap::new(), BTreeMap::new());
    for line in output.lines() {
        // The columns are padded with spaces, and an answer may be of several words.
        if let Some((call, rest)) = line.split_once(' ')
            && let Some((argument, answer)) = rest.trim_start().rsplit_once("  ")
        {
            let argument = argument.trim_end();
            let count = counts.entry((call, argument)).or_insert(0);
            *count += 1;
            let numbered = if *count == 1 { argument.to_owned() } else { format!("{argument} ({count})") };
            rows.insert((call, numbered), answer.trim_start());
        }
    }
    rows
}

// Promise: C131, C133, C136, C137
#[test]
fn refused_calls_have_the_codes_recorded_from_a_real_driver() -> Result<()> {
    let recorded = fs::read_to_string(workspace().join(RECORDED)).context(RECORDED)?;
    let recorded = answers(&recorded);
    let rows = DIFFERENT.iter().flat_map(|(_, rows)| *rows);
    let excepted: BTreeSet<(&str, String)> =
        rows.map(|(call, argument)| (*call, (*argument).to_owned())).collect();
    let (binaries, program) = (Binaries::locate()?, program("refusals")?);
    for finished in [
        host::run_native(&binaries, &program, &[], TIMEOUT)?,
        host::run_direct(&binaries, &program, &[], TIMEOUT)?,
    ] {
        passed(&finished)?;
        let given = answers(&finished.stdout);
        let mut different = BTreeSet::new();
        for (row, real) in &recorded {
            let ours = given.get(row).with_context(|| format!("no row {row:?}"))?;
            // A crash is no rule, nor is a function that only later drivers have.
            if !matches!(*real, "crashes" | "no symbol of the driver") && real != ours {
                different.insert(row.clone());
            }
        }
        let new: Vec<_> = different.difference(&excepted).collect();
        let mended: Vec<_> = excepted.difference(&different).collect();
        ensure!(new.is_empty(), "other codes than the real driver's: {new:?}");
        ensure!(mended.is_empty(), "remove from the exceptions, which agree now: {mended:?}");
    }
    Ok(())
}

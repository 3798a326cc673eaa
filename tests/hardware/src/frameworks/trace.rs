//! The calls of a client to the driver, as `libsluice_tracer.so` wrote them, and the comparison of both sides.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::measure::rounded;
use crate::stop::{Answer, name};

/// Most functions of a list.
const MOST: usize = 25;

/// A line of the file.
#[derive(Debug, Deserialize)]
struct Line {
    name: String,
    count: u64,
    ns: u64,
    longest_ns: u64,
    /// Numbers of results other than success.
    results: BTreeMap<String, u64>,
}

/// The calls of a process and its children, by function.
#[derive(Debug, Default)]
pub(super) struct Trace(BTreeMap<String, Line>);

impl Trace {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Answer<Trace> {
        Ok(Trace::of(&std::fs::read_to_string(path)?))
    }

    /// The lines of a text; half lines, which a killed process leaves, are left out.
    fn of(text: &str) -> Trace {
        let mut calls = BTreeMap::<String, Line>::new();
        for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
            match calls.get_mut(&line.name) {
                None => _ = calls.insert(line.name.clone(), line),
                Some(sum) => {
                    sum.count += line.count;
                    sum.ns += line.ns;
                    sum.longest_ns = sum.longest_ns.max(line.longest_ns);
                    for (code, count) in line.results {
                        *sum.results.entry(code).or_default() += count;
                    }
                }
            }
        }
        Trace(calls)
    }

    fn results(&self, function: &str, code: &str) -> u64 {
        self.0.get(function).and_then(|line| line.results.get(code)).copied().unwrap_or(0)
    }
}

/// The functions that cost most time more than natively, and results other than success that come more often than natively.
pub(super) fn compared(native: &Trace, remoted: &Trace) -> Value {
    let mut slower: Vec<(u64, Value)> = remoted
        .0
        .values()
        .filter_map(|line| {
            let of_native = native.0.get(&line.name);
            let more = line.ns.checked_sub(of_native.map_or(0, |line| line.ns)).filter(|more| *more > 0)?;
            Some((
                more,
                json!({ "function": line.name, "native": shown(of_native), "remoted": shown(Some(line)) }),
            ))
        })
        .collect();
    slower.sort_by_key(|(more, _)| std::cmp::Reverse(*more));
    let slower: Vec<Value> = slower.into_iter().take(MOST).map(|(_, line)| line).collect();
    let refused: Vec<Value> = remoted
        .0
        .values()
        .flat_map(|line| line.results.iter().map(|(code, count)| (&line.name, code, *count)))
        .filter_map(|(function, code, count)| {
            let of_native = native.results(function, code);
            let word = code.parse().map_or_else(|_| code.clone(), name);
            (count > of_native).then(
                || json!({ "function": function, "result": word, "native": of_native, "remoted": count }),
            )
        })
        .take(MOST)
        .collect();
    json!({ "functions": remoted.0.len(), "slower": slower, "refused": refused })
}

/// Calls, their mean and the longest, in microseconds.
fn shown(line: Option<&Line>) -> Value {
    line.map_or(Value::Null, |line| {
        let mean = rounded(line.ns as f64 / 1e3 / line.count.max(1) as f64);
        json!({ "calls": line.count, "mean_us": mean, "longest_us": rounded(line.longest_ns as f64 / 1e3) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, count: u64, ns: u64, results: &str) -> String {
        format!(
            "{{\"name\":\"{name}\",\"count\":{count},\"ns\":{ns},\"longest_ns\":{ns},\"results\":{results}}}\n"
        )
    }

    #[test]
    fn processes_of_a_client_are_added_and_half_lines_left_out() {
        let text = [
            line("cuA", 2, 100, "{\"1\":1}"),
            line("cuA", 3, 300, "{\"1\":2,\"801\":1}"),
            "{\"na".to_owned(),
        ];
        let trace = Trace::of(&text.concat());
        let sum = &trace.0["cuA"];
        assert_eq!((trace.0.len(), sum.count, sum.ns, sum.longest_ns), (1, 5, 400, 300));
        assert_eq!(
            (trace.results("cuA", "1"), trace.results("cuA", "801"), trace.results("cuB", "1")),
            (3, 1, 0)
        );
    }

    #[test]
    fn slower_functions_and_further_refusals_are_listed() {
        let native =
            Trace::of(&[line("cuA", 2, 4_000, "{\"600\":5}"), line("cuFast", 1, 900, "{}")].concat());
        let remoted = [
            line("cuA", 2, 8_000, "{\"600\":4,\"801\":1}"),
            line("cuFast", 1, 800, "{}"),
            line("cuNew", 1, 50_000, "{}"),
        ];
        let compared = compared(&native, &Trace::of(&remoted.concat()));
        let slower = compared["slower"].as_array().unwrap();
        assert_eq!(
            (slower.len(), &slower[0]["function"], &slower[1]["function"]),
            (2, &"cuNew".into(), &"cuA".into())
        );
        assert_eq!(slower[1]["native"]["mean_us"], 2.0);
        assert_eq!(slower[1]["remoted"]["mean_us"], 4.0);
        assert!(slower[0]["native"].is_null());
        let expected =
            json!([{ "function": "cuA", "result": "CUDA_ERROR_NOT_SUPPORTED", "native": 0, "remoted": 1 }]);
        assert_eq!(compared["refused"], expected);
    }
}

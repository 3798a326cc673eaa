//! The output of a client in Python: lines of JSON, as `clients/report.py` describes them, and the comparison of two outputs.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

/// The output of a client.
#[derive(Debug, Default, Serialize)]
pub(super) struct Output {
    /// Versions of its packages.
    pub(super) versions: Map<String, Value>,
    /// Paths of the driver's library in the process.
    pub(super) library: Vec<String>,
    /// Free and all bytes of the device, as the framework sees them.
    pub(super) memory: Option<Value>,
    /// Median milliseconds of a step, by its name.
    pub(super) times: BTreeMap<String, f64>,
    /// Parts that raised an error, with the error.
    pub(super) errors: BTreeMap<String, String>,
    /// Figures that are not compared.
    pub(super) notes: Map<String, Value>,
    /// Compared values, each with its tolerance.
    #[serde(skip)]
    results: BTreeMap<String, (Value, f64)>,
    /// The reason why the client cannot run.
    #[serde(skip)]
    pub(super) skip: Option<String>,
    /// True if all parts had their turn.
    pub(super) done: bool,
}

impl Output {
    /// Reads the lines. Others, which packages print, are left out.
    pub(super) fn read(printed: &str) -> Output {
        let mut output = Output::default();
        for line in printed.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok()) {
            output.add(&line);
        }
        output
    }

    fn add(&mut self, line: &Map<String, Value>) {
        let text = |key: &str| line.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| line.get(key).and_then(Value::as_f64);
        let value = || line.get("value").cloned().unwrap_or_default();
        if let Some(name) = text("result") {
            self.results.insert(name, (value(), number("tolerance").unwrap_or(0.0)));
        } else if let (Some(name), Some(ms)) = (text("time"), number("ms")) {
            self.times.insert(name, ms);
        } else if let Some(name) = text("note") {
            self.notes.insert(name, value());
        } else if let Some(name) = text("error") {
            self.errors.insert(name, text("reason").unwrap_or_default());
        } else if let Some(reason) = text("skip") {
            self.skip = Some(reason);
        } else if let Some(Value::Object(versions)) = line.get("versions") {
            self.versions.extend(versions.clone());
        } else if let Some(Value::Array(paths)) = line.get("library") {
            self.library.extend(paths.iter().filter_map(Value::as_str).map(str::to_owned));
        } else if let Some(memory) = line.get("memory") {
            self.memory = Some(memory.clone());
        } else if line.get("done").is_some() {
            self.done = true;
        }
    }

    /// Number of compared values.
    pub(super) fn results(&self) -> usize {
        self.results.len()
    }

    /// All bytes of the device, as the framework sees them.
    pub(super) fn total_memory(&self) -> Option<u64> {
        self.memory.as_ref()?.get("total")?.as_u64()
    }
}

/// The differences of an output from that of the native run: values, and parts that raised an error on one side only.
pub(super) fn differences(native: &Output, remoted: &Output) -> Vec<Value> {
    let mut found = Vec::new();
    for (name, reason) in &remoted.errors {
        if !native.errors.contains_key(name) {
            found.push(json!({ "part": name, "native": "no error", "remoted": reason }));
        }
    }
    for (name, reason) in &native.errors {
        if !remoted.errors.contains_key(name) {
            found.push(json!({ "part": name, "native": reason, "remoted": "no error" }));
        }
    }
    for (name, (value, tolerance)) in &native.results {
        match remoted.results.get(name) {
            Some((other, _)) if same(value, other, *tolerance) => {}
            Some((other, _)) => found.push(json!({ "result": name, "native": value, "remoted": other })),
            // A part with an error is in the list already.
            None if !remoted.errors.is_empty() => {}
            None => found.push(json!({ "result": name, "native": value, "remoted": Value::Null })),
        }
    }
    found
}

/// True if two values are the same: numbers up to a part of the larger one, or of one if both are smaller.
fn same(one: &Value, other: &Value, tolerance: f64) -> bool {
    match (one, other) {
        (Value::Array(one), Value::Array(other)) => {
            // The elements of a list are of one size, so small ones are compared with the largest.
            let size = [one, other]
                .into_iter()
                .flatten()
                .filter_map(Value::as_f64)
                .fold(0.0, |most: f64, value| most.max(value.abs()));
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| match (one.as_f64(), other.as_f64()) {
                    (Some(one), Some(other)) => {
                        (one - other).abs() <= tolerance * size.max(f64::MIN_POSITIVE)
                    }
                    _ => one == other,
                })
        }
        _ => match (one.as_f64(), other.as_f64()) {
            (Some(one), Some(other)) => (one - other).abs() <= tolerance * one.abs().max(other.abs()),
            _ => one == other,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NATIVE: &str = "a package prints this\n\
        {\"versions\": {\"p\": \"1\"}}\n\
        {\"memory\": {\"free\": 1, \"total\": 64}}\n\
        {\"result\": \"sum\", \"value\": [1.0, 100.0], \"tolerance\": 0.001}\n\
        {\"result\": \"name\", \"value\": \"H200\", \"tolerance\": 0.0}\n\
        {\"time\": \"sum\", \"ms\": 0.5}\n\
        {\"error\": \"compile\", \"reason\": \"no compiler\"}\n\
        {\"library\": [\"/x/libcuda.so.1\"]}\n{\"done\": true}\n";

    #[test]
    fn lines_are_read_and_others_left_out() {
        let output = Output::read(NATIVE);
        assert_eq!((output.total_memory(), output.results(), output.done), (Some(64), 2, true));
        assert_eq!((output.times["sum"], output.errors["compile"].as_str()), (0.5, "no compiler"));
        assert_eq!(output.library, ["/x/libcuda.so.1"]);
        assert_eq!(Output::read("{\"skip\": \"no package\"}\n").skip.as_deref(), Some("no package"));
    }

    #[test]
    fn values_within_their_tolerance_and_errors_of_both_sides_are_no_difference() {
        let native = Output::read(NATIVE);
        assert_eq!(
            differences(&native, &Output::read(&NATIVE.replace("100.0", "100.05"))),
            Vec::<Value>::new()
        );
        let other = differences(&native, &Output::read(&NATIVE.replace("100.0", "100.5")));
        assert_eq!(other.len(), 1);
        assert_eq!(other[0]["result"], "sum");
        assert_eq!(differences(&native, &Output::read(&NATIVE.replace("H200", "H100"))).len(), 1);
    }

    #[test]
    fn part_that_fails_on_one_side_or_is_missing_is_a_difference() {
        let native = Output::read(NATIVE);
        let fails = NATIVE.replace("\"compile\"", "\"another\"");
        let found = differences(&native, &Output::read(&fails));
        assert_eq!(found.len(), 2, "{found:?}");
        let missing: String = NATIVE
            .lines()
            .filter(|line| !line.contains("\"name\"") && !line.contains("error"))
            .map(|line| format!("{line}\n"))
            .collect();
        let found = differences(&native, &Output::read(&missing));
        assert!(found.iter().any(|difference| difference["result"] == "name"), "{found:?}");
    }

    #[test]
    fn numbers_are_compared_with_the_larger_one() {
        assert!(same(&json!(0.0), &json!(0.0), 0.0) && same(&json!(100), &json!(100.0), 0.0));
        assert!(same(&json!(100.0), &json!(101.0), 0.01) && !same(&json!(100.0), &json!(102.0), 0.01));
        assert!(same(&json!([100.0, 0.0]), &json!([100.0, 0.5]), 0.01));
        assert!(!same(&json!([1.0]), &json!([1.0, 1.0]), 0.01) && !same(&json!(true), &json!(false), 1.0));
        assert!(!same(&json!([1.0]), &json!([null]), 0.01));
    }
}

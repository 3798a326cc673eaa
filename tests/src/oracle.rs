//! The differential oracle: one program natively and remoted, both traced, compared call by call.
//!
//! Both drop-in libraries write the same trace (`SLUICE_TRACE`). Here the calls of a process are compared per thread: the function, its
//! code, and the values that it stored. Handles and addresses differ between runs, so a native one stands for the remoted one with which it
//! appeared first; the call that creates anew rebinds it. Times, free memory and polls that may go either way are left out ([`TIMES`], [`POLLS`]).

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use sluice_cuda_abi::attributes::guest_mask;

/// The variable that names the file of a trace.
pub const VARIABLE: &str = "SLUICE_TRACE";
/// Functions whose results depend on time or on the free memory of the machine.
const TIMES: &[&str] = &["cuMemGetInfo", "cuDeviceTotalMem", "cuEventElapsedTime", "cuMemPoolGetAttribute"];
/// Functions that ask whether work is complete.
const POLLS: &[&str] = &["cuStreamQuery", "cuEventQuery"];
/// The management library of a guest takes a table of the driver, which is no call of the program.
const PRIVATE: &str = "cuGetExportTable";
/// Look-ups that need no context. After a fault a guest's host answers nothing any more, so they fail there with the error of the fault.
const WITHOUT_CONTEXT: &[&str] = &["cuLibraryGetKernel"];
/// Errors of faults, which break a context.
const FAULTS: &[u64] = &[700, 702, 709, 710, 714, 715, 716, 717, 718, 719];
const SUCCESS: u64 = 0;
const NOT_READY: u64 = 600;

/// The calls of one run.
#[derive(Debug, Default)]
pub struct Trace {
    processes: Vec<Process>,
}

/// The threads of a process, each with its calls; the main thread is the first.
type Process = Vec<Vec<Call>>;

/// A call of a program.
#[derive(Debug, Clone, PartialEq)]
struct Call {
    name: String,
    start: f64,
    arguments: Vec<(String, Value)>,
    /// Its code, if it ended.
    code: Option<u64>,
    /// Stored values by the position of their parameter.
    results: BTreeMap<usize, Value>,
}

/// The first difference between two runs.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("process {process}, thread {thread}, call {call}: {reason}\nnatively {native}\nremoted  {remoted}")]
pub struct Difference {
    /// Number of the process, in the order of first calls.
    pub process: usize,
    /// Number of the thread in it.
    pub thread: usize,
    /// Number of the call in it.
    pub call: usize,
    /// The kind of the difference.
    pub reason: String,
    /// The native call.
    pub native: String,
    /// The remoted call.
    pub remoted: String,
}

/// An event of the file.
#[derive(serde::Deserialize)]
struct Event {
    name: String,
    ph: String,
    ts: f64,
    pid: i64,
    tid: i64,
    args: Pairs,
}

/// The members of an object in their order.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Pairs;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl Trace {
    /// Reads the files of a folder, one for each process.
    ///
    /// # Errors
    /// When a file cannot be read, or has a line that is not an event.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut processes: Vec<Process> = Vec::new();
        for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = entry?.path();
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            processes.push(parse(&text).with_context(|| format!("the trace {}", path.display()))?);
        }
        processes.retain(|process| !process.is_empty());
        processes.sort_by(|one, other| start(&one[0]).total_cmp(&start(&other[0])));
        Ok(Self { processes })
    }

    /// Number of calls.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.processes.iter().flatten().map(Vec::len).sum()
    }
}

fn start(thread: &[Call]) -> f64 {
    thread.first().map_or(f64::INFINITY, |call| call.start)
}

/// Reads the events of a process.
fn parse(text: &str) -> Result<Process> {
    let mut threads: BTreeMap<i64, Vec<Call>> = BTreeMap::new();
    let mut open: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    let mut main = 0;
    for line in text.lines().map(|line| line.trim().trim_end_matches(',')) {
        if line.is_empty() || line == "[" || line == "]" {
            continue;
        }
        let event: Event = serde_json::from_str(line).with_context(|| line.to_owned())?;
        main = event.pid;
        let calls = threads.entry(event.tid).or_default();
        let open = open.entry(event.tid).or_default();
        if event.ph == "B" {
            open.push(calls.len());
            let results = BTreeMap::new();
            let Event { name, ts, args: Pairs(arguments), .. } = event;
            calls.push(Call { name, start: ts, arguments, code: None, results });
            continue;
        }
        let call = open.pop().and_then(|index| calls.get_mut(index)).context("an end without a begin")?;
        for (name, value) in event.args.0 {
            if name == "code" {
                call.code = value.as_u64();
            } else if let Some(name) = name.strip_prefix('*') {
                let index = call.arguments.iter().position(|(argument, _)| argument == name);
                call.results.insert(index.context("a result without a parameter")?, value);
            }
        }
    }
    let mut threads: Vec<(bool, Vec<Call>)> =
        threads.into_iter().map(|(thread, calls)| (thread != main, calls)).collect();
    threads.sort_by(|one, other| one.0.cmp(&other.0).then(start(&one.1).total_cmp(&start(&other.1))));
    Ok(threads.into_iter().map(|(_, calls)| calls).filter(|calls| !calls.is_empty()).collect())
}

impl Call {
    fn is(&self, functions: &[&str]) -> bool {
        functions.iter().any(|function| self.name.starts_with(function))
    }

    /// True for a call that is not compared: its outcome depends on time alone, or the program did not make it.
    fn is_left_out(&self) -> bool {
        self.name == PRIVATE || self.is(POLLS) && matches!(self.code, Some(SUCCESS | NOT_READY))
    }

    /// True if a fault before explains the other code of the remoted call.
    fn fails_after_fault(&self, remoted: &Call) -> bool {
        self.is(WITHOUT_CONTEXT)
            && self.code == Some(SUCCESS)
            && remoted.code.is_some_and(|code| FAULTS.contains(&code))
    }

    /// The mask of the attribute that the call reads, if guests have one.
    fn mask(&self) -> Option<i64> {
        let attribute = self.arguments.get(1).and_then(|(_, value)| value.as_i64());
        let attribute = attribute.filter(|_| self.name == "cuDeviceGetAttribute")?;
        guest_mask(i32::try_from(attribute).ok()?).map(i64::from)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.name)?;
        for (index, (name, value)) in self.arguments.iter().enumerate() {
            write!(f, "{}{name}: {value}", if index > 0 { ", " } else { "" })?;
            if let Some(result) = self.results.get(&index) {
                write!(f, " = {result}")?;
            }
        }
        match self.code {
            Some(code) => write!(f, ") -> {code}"),
            None => f.write_str(") did not end"),
        }
    }
}

/// The first difference of a run from the native one, in the order of the native calls.
#[must_use]
pub fn first_difference(native: &Trace, remoted: &Trace) -> Option<Difference> {
    let mut differences = Vec::new();
    for (number, (one, other)) in pairs(&native.processes, &remoted.processes, |process| {
        process.iter().map(|thread| names(thread)).collect::<Vec<_>>()
    })
    .into_iter()
    .enumerate()
    {
        let nothing = Process::new();
        let (one, other) = (one.unwrap_or(&nothing), other.unwrap_or(&nothing));
        let mut known = BTreeMap::new();
        let threads = pairs(one, other, |thread| names(thread));
        let race = |(one, other): &(Option<&Vec<Call>>, Option<&Vec<Call>>)| {
            one.map(|calls| names(calls)) != other.map(|calls| names(calls))
        };
        // A runtime starts in the thread that is the first to need it; then only the calls of all threads together are the same.
        if one.len() > 1 && threads.iter().any(race) {
            differences.extend(compare_counts(number, one, other));
            continue;
        }
        for (thread, (one, other)) in threads.into_iter().enumerate() {
            let (one, other) = (one.map_or(&[][..], Vec::as_slice), other.map_or(&[][..], Vec::as_slice));
            if let Some((at, difference)) = compare_threads(one, other, &mut known) {
                differences.push((at, Difference { process: number, thread, ..difference }));
            }
        }
    }
    differences.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    differences.into_iter().next().map(|(_, difference)| difference)
}

/// Compares how often the threads of a process together got each code from each function.
fn compare_counts(process: usize, native: &Process, remoted: &Process) -> Option<(f64, Difference)> {
    let count = |process: &Process| {
        let mut counts: BTreeMap<(String, Option<u64>), usize> = BTreeMap::new();
        for call in process.iter().flatten().filter(|call| !call.is_left_out()) {
            *counts.entry((call.name.clone(), call.code)).or_default() += 1;
        }
        counts
    };
    let (one, other) = (count(native), count(remoted));
    let key = one.keys().chain(other.keys()).find(|key| one.get(*key) != other.get(*key))?;
    let (name, code) = key;
    let text = |counts: &BTreeMap<_, usize>| {
        format!("{} calls of {name} with {code:?}", counts.get(key).copied().unwrap_or(0))
    };
    let reason = "another number of calls in all threads together".to_owned();
    let (native, remoted) = (text(&one), text(&other));
    Some((0.0, Difference { process, thread: 0, call: 0, reason, native, remoted }))
}

fn names(thread: &[Call]) -> Vec<&str> {
    thread.iter().filter(|call| !call.is_left_out()).map(|call| call.name.as_str()).collect()
}

/// Pairs the parts of two runs: the first ones, then parts with the same key, then the rest in their order.
fn pairs<'a, T, K: PartialEq>(
    native: &'a [T],
    remoted: &'a [T],
    key: impl Fn(&'a T) -> K,
) -> Vec<(Option<&'a T>, Option<&'a T>)> {
    let mut left: Vec<&T> = remoted.iter().collect();
    let mut found: Vec<(Option<&T>, Option<&T>)> = Vec::new();
    for (index, one) in native.iter().enumerate() {
        let same = left.iter().position(|other| index == 0 || key(other) == key(one));
        found.push((Some(one), same.map(|at| left.remove(at))));
    }
    for pair in found.iter_mut().filter(|pair| pair.1.is_none()) {
        if !left.is_empty() {
            pair.1 = Some(left.remove(0));
        }
    }
    found.extend(left.into_iter().map(|other| (None, Some(other))));
    found
}

/// The first difference of two threads, with the time of the native call.
fn compare_threads(
    native: &[Call],
    remoted: &[Call],
    known: &mut BTreeMap<u64, u64>,
) -> Option<(f64, Difference)> {
    let native: Vec<&Call> = native.iter().filter(|call| !call.is_left_out()).collect();
    let remoted: Vec<&Call> = remoted.iter().filter(|call| !call.is_left_out()).collect();
    let found = |call, reason: &str, native: Option<&&Call>, remoted: Option<&&Call>| {
        let text = |call: Option<&&Call>| call.map_or_else(|| "no call".to_owned(), |call| call.to_string());
        let (native, remoted, reason) = (text(native), text(remoted), reason.to_owned());
        Difference { process: 0, thread: 0, call, reason, native, remoted }
    };
    for (index, (one, other)) in native.iter().zip(&remoted).enumerate() {
        // The rest follows from the fault.
        if one.fails_after_fault(other) {
            return None;
        }
        // A process may end while its last call is under way.
        let last = index + 1 == native.len() && index + 1 == remoted.len();
        let ended = one.code.is_none() || other.code.is_none();
        if last && ended && one.name == other.name {
            return None;
        }
        if let Some(reason) = compare_calls(one, other, known) {
            return Some((one.start, found(index, reason, Some(one), Some(other))));
        }
    }
    let at = native.len().min(remoted.len());
    let time = native.get(at).or_else(|| native.last()).map_or(0.0, |call| call.start);
    match (native.get(at), remoted.get(at)) {
        (None, None) => None,
        (one @ Some(_), other) => Some((time, found(at, "the remoted thread makes fewer calls", one, other))),
        (one, other) => Some((time, found(at, "the remoted thread makes more calls", one, other))),
    }
}

fn compare_calls(native: &Call, remoted: &Call, known: &mut BTreeMap<u64, u64>) -> Option<&'static str> {
    if native.name != remoted.name {
        return Some("another function");
    }
    if native.code != remoted.code {
        return Some("another result");
    }
    if native.is(TIMES) {
        return None;
    }
    if let Some(mask) = native.mask() {
        let value = remoted.results.get(&0).and_then(Value::as_i64);
        return value.is_some_and(|value| value != mask).then_some("not the value of a masked attribute");
    }
    for (index, one) in &native.results {
        let Some(other) = remoted.results.get(index) else { continue };
        if one == other {
            continue;
        }
        match (word(one), word(other)) {
            // The guest's library declares numbers as numbers, and everything that may be a handle or an address as a word.
            (Some(one), Some(value)) if other.is_string() => {
                let before = known.insert(one, value);
                if native.name.contains("Get") && before.is_some_and(|before| before != value) {
                    return Some("another handle or address than before");
                }
            }
            (Some(one), Some(other)) if one == other => {}
            _ => return Some("another value"),
        }
    }
    None
}

/// A number, or a word in hexadecimal digits.
fn word(value: &Value) -> Option<u64> {
    match value {
        Value::String(text) => u64::from_str_radix(text.strip_prefix("0x")?, 16).ok(),
        _ => value.as_u64(),
    }
}

/// Gives `run` the value of `SLUICE_TRACE` for a run, and reads the trace afterwards.
///
/// # Errors
/// Those of `run`, and when the trace cannot be read.
pub fn traced<R>(run: impl FnOnce(&Path) -> Result<R>) -> Result<(R, Trace)> {
    let folder = tempfile::tempdir().context("a folder for a trace")?;
    let result = run(&folder.path().join("%p.json"))?;
    Ok((result, Trace::read(folder.path())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call as two events of thread `thread` of process 1.
    fn call(thread: u32, time: u32, name: &str, arguments: &str, results: &str) -> String {
        let event = |phase, time, args| {
            format!(
                r#"{{"name":"{name}","ph":"{phase}","ts":{time}.5,"pid":1,"tid":{thread},"args":{{{args}}}}},"#
            )
        };
        format!("{}\n{}\n", event("B", time, arguments), event("E", time + 1, results))
    }

    fn trace(calls: &[String]) -> Trace {
        Trace { processes: vec![parse(&format!("[\n{}", calls.concat())).unwrap()] }
    }

    fn difference(native: &[String], remoted: &[String]) -> Option<String> {
        first_difference(&trace(native), &trace(remoted)).map(|difference| difference.reason)
    }

    // Promise: C102
    #[test]
    fn first_difference_is_named_and_handles_may_differ() {
        let allocate = |time, place: &str| {
            call(
                1,
                time,
                "cuMemAlloc_v2",
                r#""dptr":"0x1","bytes":8"#,
                &format!(r#""code":0,"*dptr":"{place}""#),
            )
        };
        let current = |place: &str| {
            call(1, 9, "cuCtxGetCurrent", r#""pctx":"0x1""#, &format!(r#""code":0,"*pctx":"{place}""#))
        };
        let count = |count: u32, code: u32| {
            call(1, 20, "cuDeviceGetCount", r#""count":"0x1""#, &format!(r#""code":{code},"*count":{count}"#))
        };
        assert_eq!(difference(&[allocate(0, "0x70")], &[allocate(0, "0x90")]), None);
        let same = [allocate(0, "0x70"), current("0x70")];
        assert_eq!(difference(&same, &[allocate(0, "0x90"), current("0x90")]), None);
        let other = "another handle or address than before";
        assert_eq!(difference(&same, &[allocate(0, "0x90"), current("0xa0")]).as_deref(), Some(other));
        // Memory that was freed natively has the same address again.
        let again = [allocate(0, "0x70"), allocate(3, "0x70")];
        assert_eq!(difference(&again, &[allocate(0, "0x90"), allocate(3, "0xa0")]), None);

        assert_eq!(difference(&[count(1, 0)], &[count(2, 0)]).as_deref(), Some("another value"));
        assert_eq!(difference(&[count(1, 0)], &[count(1, 3)]).as_deref(), Some("another result"));
        let names = difference(&[count(1, 0), current("0x1")], &[current("0x1"), count(1, 0)]);
        assert_eq!(names.as_deref(), Some("another function"));
        let fewer = difference(&[count(1, 0), count(1, 0)], &[count(1, 0)]);
        assert_eq!(fewer.as_deref(), Some("the remoted thread makes fewer calls"));
        let more = difference(&[count(1, 0)], &[count(1, 0), count(1, 0)]);
        assert_eq!(more.as_deref(), Some("the remoted thread makes more calls"));
        // A process that ends during its last call is judged by its exit status.
        let unfinished = || format!("{}\n", count(1, 0).lines().next().unwrap());
        assert_eq!(difference(&[count(1, 0)], &[unfinished()]), None);
        let fewer = difference(&[count(1, 0), current("0x1")], &[unfinished()]);
        assert_eq!(fewer.as_deref(), Some("another result"));
    }

    // Promise: C102
    #[test]
    fn polls_and_the_order_of_threads_make_no_difference() {
        let poll =
            |code: u32| call(1, 5, "cuStreamQuery", r#""h_stream":"0x1""#, &format!(r#""code":{code}"#));
        let name = |thread, time, name: &str| call(thread, time, name, "", r#""code":0"#);
        assert_eq!(difference(&[poll(600), poll(600), poll(0)], &[poll(0)]), None);
        assert_eq!(
            difference(&[poll(0)], &[poll(700)]).as_deref(),
            Some("the remoted thread makes more calls"),
            "an error is no poll"
        );
        let native = [name(1, 0, "cuInit"), name(2, 1, "cuCtxCreate"), name(3, 2, "cuCtxDestroy")];
        let remoted = [name(1, 0, "cuInit"), name(7, 1, "cuCtxDestroy"), name(9, 2, "cuCtxCreate")];
        assert_eq!(difference(&native, &remoted), None);
    }

    // Promise: C102
    #[test]
    fn threads_that_race_make_the_same_calls_together() {
        let name =
            |thread, time, name: &str, code: u32| call(thread, time, name, "", &format!(r#""code":{code}"#));
        let native = [
            name(1, 0, "cuInit", 0),
            name(2, 1, "cuModuleLoadData", 0),
            name(2, 3, "cuLaunchKernel", 0),
            name(3, 4, "cuLaunchKernel", 0),
        ];
        let mut remoted = [
            name(1, 0, "cuInit", 0),
            name(2, 1, "cuLaunchKernel", 0),
            name(2, 3, "cuModuleLoadData", 0),
            name(3, 4, "cuLaunchKernel", 0),
        ];
        assert_eq!(difference(&native, &remoted), None);
        remoted[3] = name(3, 4, "cuLaunchKernel", 1);
        let counted = "another number of calls in all threads together";
        assert_eq!(difference(&native, &remoted).as_deref(), Some(counted));
    }

    // Promise: C102
    #[test]
    fn library_is_silent_after_a_fault() {
        let look = |name: &str, code: u32| call(1, 0, name, "", &format!(r#""code":{code}"#));
        assert_eq!(difference(&[look("cuLibraryGetKernel", 0)], &[look("cuLibraryGetKernel", 700)]), None);
        assert!(difference(&[look("cuLibraryGetKernel", 0)], &[look("cuLibraryGetKernel", 1)]).is_some());
        assert!(difference(&[look("cuMemAlloc_v2", 0)], &[look("cuMemAlloc_v2", 700)]).is_some());
    }

    // Promise: C102
    #[test]
    fn masked_attribute_must_have_the_value_of_its_mask() {
        let read = |attribute: u32, value: i32| {
            let arguments = format!(r#""pi":"0x1","attrib":{attribute},"dev":0"#);
            call(1, 0, "cuDeviceGetAttribute", &arguments, &format!(r#""code":0,"*pi":{value}"#))
        };
        assert_eq!(difference(&[read(88, 1)], &[read(88, 0)]), None);
        assert!(difference(&[read(88, 1)], &[read(88, 1)]).is_some());
        assert!(difference(&[read(16, 1)], &[read(16, 0)]).is_some());
    }
}

//! Counts of a program's work by callgrind, a tool of valgrind. Other work of the machine does not change them.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    process::{Command, Stdio},
};

/// The tool.
const VALGRIND: &str = "valgrind";

/// The work of a program, or of one of its functions with all that this calls: then callgrind counts instructions of that function alone,
/// and calls and system calls of the whole program.
#[derive(Debug, Default)]
pub struct Counts {
    pub instructions: u64,
    /// Calls of each function.
    calls: BTreeMap<String, u64>,
    /// The instructions of each function itself, and its system calls.
    own: BTreeMap<String, (u64, u64)>,
}

/// The reason why nothing can be counted here, if there is one.
#[must_use]
pub fn missing() -> Option<String> {
    let version = Command::new(VALGRIND).arg("--version").stdout(Stdio::null()).status();
    version.err().map(|error| format!("no valgrind to count with: {error}"))
}

/// Callgrind with its options; a program and its arguments follow. It writes its counts to `to`. With `inside` it counts the work of that
/// function alone.
#[must_use]
pub fn callgrind(to: &Path, inside: Option<&str>) -> Command {
    let mut callgrind = Command::new(VALGRIND);
    callgrind.args(["--tool=callgrind", "--collect-systime=yes"]);
    callgrind.arg(format!("--callgrind-out-file={}", to.display()));
    callgrind.args(inside.map(|function| format!("--toggle-collect={function}")));
    callgrind
}

impl Counts {
    /// Reads what callgrind wrote.
    ///
    /// # Errors
    /// When the file cannot be read or has no counts.
    pub fn read(file: &Path) -> io::Result<Counts> {
        let text = fs::read_to_string(file)?;
        Counts::parse(&text).ok_or_else(|| io::Error::other(format!("{} has no counts", file.display())))
    }

    fn parse(text: &str) -> Option<Counts> {
        let mut counts = Counts::default();
        let (mut names, mut current, mut called) = (BTreeMap::new(), String::new(), None);
        let mut events = Vec::new();
        for line in text.lines() {
            let event = |name| events.iter().position(|event| *event == name);
            if let Some(list) = line.strip_prefix("events: ") {
                events = list.split(' ').collect();
            } else if let Some(list) = line.strip_prefix("totals: ") {
                counts.instructions = list.split(' ').nth(event("Ir")?)?.parse().ok()?;
            } else if let Some(function) = line.strip_prefix("fn=") {
                current = name(&mut names, function)?;
            } else if let Some(function) = line.strip_prefix("cfn=") {
                called = Some(name(&mut names, function)?);
            } else if let Some(number) = line.strip_prefix("calls=") {
                let number: u64 = number.split(' ').next()?.parse().ok()?;
                *counts.calls.entry(called.clone()?).or_default() += number;
            } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
                // The line after a call has what the called function cost.
                if called.take().is_some() {
                    continue;
                }
                let costs: Vec<u64> =
                    line.split(' ').skip(1).map(str::parse).collect::<Result<_, _>>().ok()?;
                // Zeros at the end are left out.
                let cost = |name| Some(costs.get(event(name)?).copied().unwrap_or(0));
                let own = counts.own.entry(current.clone()).or_default();
                *own = (own.0 + cost("Ir")?, own.1 + cost("sysCount")?);
            }
        }
        (counts.instructions > 0).then_some(counts)
    }

    /// System calls without reads of the clock: only under valgrind the system reads it.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.own.iter().filter(|(name, _)| !reads_clock(name)).map(|(_, (_, calls))| calls).sum()
    }

    /// Functions that were counted and made system calls, without reads of the clock.
    pub fn system_callers(&self) -> impl Iterator<Item = &str> {
        let counted = self.own.iter().filter(|(_, (instructions, calls))| *instructions > 0 && *calls > 0);
        counted.map(|(name, _)| name.as_str()).filter(|name| !reads_clock(name))
    }

    /// Instructions of the C library's allocator itself.
    #[must_use]
    pub fn allocator_instructions(&self) -> u64 {
        self.own.iter().filter(|(name, _)| allocates(name)).map(|(_, (instructions, _))| instructions).sum()
    }

    /// Requests for memory from the C library.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.calls_of(allocates)
    }

    /// Calls of functions of the driver.
    #[must_use]
    pub fn driver_calls(&self) -> u64 {
        let is_capital = |letter: char| letter.is_ascii_uppercase();
        self.calls_of(|name| name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(is_capital)))
    }

    fn calls_of(&self, are: impl Fn(&str) -> bool) -> u64 {
        self.calls.iter().filter(|(name, _)| are(name)).map(|(_, calls)| calls).sum()
    }

    /// The counts of this run beyond those of one that did less.
    #[must_use]
    pub fn beyond(&self, less: &Counts) -> Counts {
        let calls = self.calls.iter().map(|(name, calls)| {
            (name.clone(), calls.saturating_sub(less.calls.get(name).copied().unwrap_or(0)))
        });
        let own = self.own.iter().map(|(name, own)| {
            let less = less.own.get(name).copied().unwrap_or_default();
            (name.clone(), (own.0.saturating_sub(less.0), own.1.saturating_sub(less.1)))
        });
        Counts {
            instructions: self.instructions.saturating_sub(less.instructions),
            calls: calls.collect(),
            own: own.collect(),
        }
    }
}

fn allocates(function: &str) -> bool {
    ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc"].contains(&function)
}

fn reads_clock(function: &str) -> bool {
    function.contains("clock_gettime")
}

/// The name of a function: callgrind writes it behind its number the first time, and later the number alone.
fn name(names: &mut BTreeMap<String, String>, function: &str) -> Option<String> {
    match function.split_once(' ') {
        Some((number, name)) => {
            names.insert(number.to_owned(), name.to_owned());
            Some(name.to_owned())
        }
        None => names.get(function).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "version: 1\nevents: Ir sysCount sysTime\n\nfl=(1) a.rs\nfn=(1) main\n7 5\ncfn=(2) malloc\ncalls=3 1\n\
                        7 90 1 2\nfn=(6) clock_gettime@@GLIBC_2.17\n+1 4 2\nfn=(3) f\n8 1 1\ncfn=(2)\ncalls=2 1\n8 20\n\
                        cob=(2) libcuda.so\ncfn=(4) cuLaunchKernel\ncalls=6 0\n9 1 1\ncfn=(5) custom\ncalls=1 0\n9 1\n\
                        fn=(2)\n9 3\n\ntotals: 117 1 4\n";

    #[test]
    fn counts_of_callgrind_are_read_by_function() {
        let counts = Counts::parse(FILE).unwrap();
        assert_eq!((counts.instructions, counts.system_calls()), (117, 1));
        assert_eq!((counts.allocations(), counts.driver_calls()), (5, 6));
        assert_eq!(counts.system_callers().collect::<Vec<_>>(), ["f"]);
        assert_eq!((counts.allocator_instructions(), counts.own["main"].0), (3, 5));
        let less = FILE.replace("calls=6", "calls=2").replace("totals: 117", "totals: 100");
        let beyond = counts.beyond(&Counts::parse(&less).unwrap());
        assert_eq!((beyond.instructions, beyond.driver_calls(), beyond.allocations()), (17, 4, 0));
        assert_eq!(beyond.system_calls(), 0);
        assert!(Counts::parse("events: Ir sysCount sysTime\ntotals: 0 0 0\n").is_none());
        assert!(Counts::parse("").is_none());
    }
}

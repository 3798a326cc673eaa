//! The canary matrix: programs of one VM leave a pattern in every kind of memory and end in a certain way; a program of another VM takes
//! all memory that it can get, in every way, and searches it for the patterns.

use std::collections::BTreeMap;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::json;

use super::{FIRST, SECOND, broken, held, void};
use crate::host::{Host, vm};
use crate::libraries;
use crate::running::Running;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};

/// Kinds of memory, each with the program's own word for it. The place of a kind is the number of its pattern.
const KINDS: [&str; 14] = [
    "large",
    "small",
    "pool",
    "vmm",
    "managed",
    "graph",
    "array",
    "mipmap",
    "local",
    "shared",
    "registers",
    "pinned",
    "staging",
    "ring",
];

/// Kinds that are chunks of the arbiter: without scrubbing, their patterns must be found.
const CHUNKS: [&str; 3] = ["large", "small", "vmm"];

/// Ways that take all memory in the same manner, from chunks of the arbiter. They differ in the worker's code, not in the writer's end, so
/// one end is searched in every way, and the others without these.
const OTHER_WAYS: [&str; 2] = ["pool", "vmm"];

/// All ways of a search but those, and but the one that must be named.
const WAYS: [&str; 7] = ["local", "shared", "registers", "variable", "linear", "managed", "pinned"];

/// Result of a kind of memory that the driver or Sluice does not offer: CUDA_ERROR_NOT_SUPPORTED.
const NOT_SUPPORTED: &str = "801";

/// The end of the writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Free,
    Exit,
    KillProgram,
    KillWorker,
    Fault,
    Fence,
    Removal,
}

impl End {
    /// The writer's word for it.
    const fn word(self) -> &'static str {
        match self {
            End::Free => "free",
            End::Exit => "exit",
            End::Fault => "fault",
            End::KillProgram | End::KillWorker | End::Fence | End::Removal => "hold",
        }
    }
}

const fn matrix(name: &'static str, question: &'static str, ask: fn(&Step) -> Answer) -> Question {
    Question {
        name,
        question,
        expected: "No: custody cleared all of it.",
        consequence: "A pattern that is found is data of a VM in the hands of another: no two tenants may share the GPU.",
        seconds: 90,
        ask,
    }
}

pub(super) const QUESTIONS: &[Question] = &[
    Question {
        name: "canary-control",
        question: "Does the search find the patterns if scrubbing is switched off?",
        expected: "Yes, in all memory that is lent in chunks.",
        consequence: "A kind whose pattern the search does not find here proves nothing in the matrix.",
        seconds: 90,
        ask: control,
    },
    matrix(
        "canary-kill-program",
        "Does a VM find patterns of another VM's programs that were killed?",
        |step| cells(step, End::KillProgram),
    ),
    matrix("canary-kill-worker", "Does a VM find patterns of another VM that lost its workers?", |step| {
        cells(step, End::KillWorker)
    }),
    matrix("canary-fence", "Does a VM find patterns of another VM that was fenced?", |step| {
        cells(step, End::Fence)
    }),
    matrix("canary-removal", "Does a VM find patterns of another VM that was removed?", |step| {
        cells(step, End::Removal)
    }),
    matrix("canary-fault", "Does a VM find patterns of another VM whose kernels faulted?", |step| {
        cells(step, End::Fault)
    }),
    matrix("canary-free", "Does a VM find patterns that another VM's programs freed?", |step| {
        cells(step, End::Free)
    }),
    matrix("canary-exit", "Does a VM find patterns of another VM's programs that exited?", |step| {
        cells(step, End::Exit)
    }),
    Question {
        name: "canary-native",
        question: "Without Sluice, does a process find patterns of another process, beside it and after its kill?",
        expected: "No: the driver clears memory before it gives it out.",
        consequence: "The kinds that are found rest on the driver and the hardware alone: see the threat model.",
        seconds: 90,
        ask: native,
    },
];

/// The patterns that a search found.
#[derive(Debug, Default, Serialize)]
struct Search {
    /// Number of found patterns by the kind that wrote them.
    hits: BTreeMap<String, u64>,
    /// The most bytes that one way got.
    bytes: u64,
    /// Ways that were refused, with their results.
    refused: Vec<String>,
    /// Milliseconds by way.
    milliseconds: BTreeMap<String, u64>,
}

impl Search {
    /// Reads the output of the searching program.
    fn read(printed: &str) -> Answer<Search> {
        let mut search = Search::default();
        let mut total = None;
        for line in printed.lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["read", _, bytes] => search.bytes = search.bytes.max(bytes.parse().unwrap_or(0)),
                ["took", way, milliseconds] => {
                    let milliseconds = milliseconds.parse().unwrap_or(0);
                    search.milliseconds.insert(way.to_owned(), milliseconds);
                }
                ["refused", way, code] => search.refused.push(format!("{way} {code}")),
                ["hit", _, cell, count] => {
                    let kind = cell.parse().ok().and_then(|cell: usize| KINDS.get(cell));
                    let kind = kind.map_or_else(|| format!("pattern {cell}"), |kind| (*kind).to_owned());
                    *search.hits.entry(kind).or_default() += count.parse::<u64>().unwrap_or(1);
                }
                ["hits", count] => total = Some(count),
                _ => {}
            }
        }
        match total {
            None => Err(Stop::failed(format!("the search has no end: {printed}"))),
            Some("0") if search.hits.is_empty() => Ok(search),
            Some(_) if !search.hits.is_empty() => Ok(search),
            Some(count) => Err(Stop::failed(format!("the search counts {count} hits and lists others"))),
        }
    }

    fn add(&mut self, other: Search) {
        for (kind, count) in other.hits {
            *self.hits.entry(kind).or_default() += count;
        }
        self.bytes = self.bytes.max(other.bytes);
        let new = other.refused.into_iter().filter(|way| !self.refused.contains(way)).collect::<Vec<_>>();
        self.refused.extend(new);
        for (way, milliseconds) in other.milliseconds {
            *self.milliseconds.entry(way).or_default() += milliseconds;
        }
    }
}

/// True if a kernel searches the memory. A kernel of the software GPU is slower than a copy; the copy of a large device takes minutes.
fn by_kernel(step: &Step) -> bool {
    !libraries::is_software_gpu(&step.libraries().driver)
}

/// Searches all memory that a VM can get, in these ways or in every way.
fn search(step: &Step, host: &Host, vm: Option<u32>, ways: &[&str]) -> Answer<Search> {
    search_by(by_kernel(step), host, vm, ways)
}

fn search_by(by_kernel: bool, host: &Host, vm: Option<u32>, ways: &[&str]) -> Answer<Search> {
    let words: Vec<&str> = by_kernel.then_some("kernel").into_iter().chain(ways.iter().copied()).collect();
    let mut reader = host.spawn(vm, "canary_read", &words)?;
    let status = reader.end()?;
    if !status.success() {
        let end = crate::running::words(status);
        return Err(Stop::failed(format!("the search: {end}: {}", reader.tail())));
    }
    Search::read(&reader.printed())
}

/// Searches in these ways, or in every way. The searcher's own kernels take memory that it cannot read: if it got too little, it searches
/// once more with fewer of them.
fn search_all(step: &Step, host: &Host, ways: &[&str]) -> Answer<Search> {
    let mut found = search(step, host, Some(SECOND), ways)?;
    let enough = host.settled()?.total_bytes / 4 * 3;
    if found.bytes < enough {
        found.add(search(step, host, Some(SECOND), &["linear", "vmm"])?);
    }
    if found.bytes < enough {
        return Err(void(format!("the search got {} bytes of {enough}", found.bytes)));
    }
    Ok(found)
}

/// Programs that have left a pattern, and the kinds that are refused.
struct Writers {
    programs: Vec<Running>,
    refused: Vec<&'static str>,
}

/// Leaves a pattern in each kind of memory.
fn write(host: &Host, vm: Option<u32>, end: &str) -> Answer<Writers> {
    write_kinds(host, vm, end, &KINDS)
}

/// Leaves a pattern in each of some kinds of memory. The programs start together, because the start of a driver takes its time.
fn write_kinds(host: &Host, vm: Option<u32>, end: &str, kinds: &[&str]) -> Answer<Writers> {
    let chosen = KINDS.into_iter().enumerate().filter(|(_, kind)| kinds.contains(kind));
    let started: Vec<(&'static str, Running)> = chosen
        .map(|(cell, kind)| Ok((kind, host.spawn(vm, "canary_write", &[kind, end, &cell.to_string()])?)))
        .collect::<Answer<_>>()?;
    let mut writers = Writers { programs: Vec::new(), refused: Vec::new() };
    for (kind, mut writer) in started {
        let line = writer.line(&["written ", "refused "])?;
        if line.starts_with("written ") {
            writers.programs.push(writer);
        } else if line.ends_with(&format!(" {NOT_SUPPORTED}")) {
            writer.end()?;
            writers.refused.push(kind);
        } else {
            return Err(Stop::failed(format!("{kind}: {line}")));
        }
    }
    Ok(writers)
}

fn kill_all(writers: &mut Writers) -> Answer {
    writers.programs.iter_mut().try_for_each(|program| program.kill().map(drop))
}

fn note_search(step: &Step, search: &Search) -> Answer {
    step.note("searched_bytes", search.bytes)?;
    step.note("search_milliseconds", &search.milliseconds)
}

/// The parts of a step. The one that runs is noted at its begin, so that a step that is cut off says where it was.
struct Parts<'a> {
    step: &'a Step,
    running: Option<(&'static str, Instant)>,
    /// Milliseconds of the parts that have ended, in their order.
    ended: Vec<(&'static str, u128)>,
}

impl<'a> Parts<'a> {
    fn new(step: &'a Step) -> Self {
        Self { step, running: None, ended: Vec::new() }
    }

    /// Ends the part that runs, and begins the next.
    fn begin(&mut self, part: &'static str) -> Answer {
        self.end()?;
        self.running = Some((part, Instant::now()));
        self.step.note("part", part)
    }

    fn end(&mut self) -> Answer {
        let Some((part, begun)) = self.running.take() else { return Ok(()) };
        self.ended.push((part, begun.elapsed().as_millis()));
        self.step.note("part", "none")?;
        self.step.note("part_milliseconds", &self.ended)
    }
}

/// Without scrubbing, the same search finds the patterns.
fn control(step: &Step) -> Answer {
    let mut parts = Parts::new(step);
    parts.begin("start")?;
    let host = Host::start_with(step, &[vm(), vm()], &[("SLUICE_UNSAFE_NO_SCRUB", "1")], "")?;
    let word = End::KillProgram.word();
    parts.begin("write")?;
    let mut writers = write(&host, Some(FIRST), word)?;
    step.note("refused", &writers.refused)?;
    parts.begin("kill")?;
    kill_all(&mut writers)?;
    parts.begin("search")?;
    let mut found = search_all(step, &host, &[])?;
    note_search(step, &found)?;
    let missed = |found: &Search| -> Vec<&str> {
        let offered = KINDS.into_iter().filter(|kind| !writers.refused.contains(kind));
        offered.filter(|kind| !found.hits.contains_key(*kind)).collect()
    };
    let again = missed(&found);
    if !again.is_empty() {
        // Contexts that start meanwhile may take the memory of a pattern, and the searcher's own is one: so each has a second try.
        parts.begin("write again")?;
        kill_all(&mut write_kinds(&host, Some(FIRST), word, &again)?)?;
        parts.begin("search again")?;
        found.add(search_all(step, &host, &WAYS)?);
    }
    if !by_kernel(step) {
        // A rehearsal tries the other form of the search as well.
        parts.begin("search by a kernel")?;
        let other = search_by(true, &host, Some(SECOND), &["linear"])?;
        if found.hits.contains_key("large") && !other.hits.contains_key("large") {
            return Err(void("the kernel that searches did not find a pattern that a copy has"));
        }
    }
    let missed = missed(&found);
    step.note("found", found.hits.keys().collect::<Vec<_>>())?;
    step.note("not_found", &missed)?;
    note_search(step, &found)?;
    if let Some(kind) = CHUNKS.iter().find(|kind| !found.hits.contains_key(**kind)) {
        return Err(void(format!("without scrubbing, the search did not find the pattern of {kind}")));
    }
    parts.begin("stop")?;
    host.stop()?;
    parts.end()?;
    held(step)
}

/// All kinds with one end.
fn cells(step: &Step, end: End) -> Answer {
    let mut parts = Parts::new(step);
    parts.begin("start")?;
    let host = Host::start(step, &[vm(), vm()])?;
    parts.begin("write")?;
    let mut writers = write(&host, Some(FIRST), end.word())?;
    step.note("refused", &writers.refused)?;
    parts.begin("search beside the writers")?;
    // While the writers live; those that exited have ended already. Remnants in multiprocessors between VMs that take turns are not
    // custody's, so this search has no kernel that looks for them.
    let mut found = match end {
        // Up to here these are as `KillProgram`.
        End::KillWorker | End::Fence | End::Removal => Search::default(),
        End::Free | End::Fault | End::Exit | End::KillProgram => {
            search(step, &host, Some(SECOND), &["linear"])?
        }
    };
    parts.begin("end of the writers")?;
    match end {
        End::Free | End::Fault => {}
        End::Exit => writers.programs.iter_mut().try_for_each(|program| program.end().map(drop))?,
        End::KillProgram => kill_all(&mut writers)?,
        End::KillWorker => {
            let workers = host.workers(FIRST)?;
            step.note("killed_workers", workers.len())?;
            for worker in workers {
                let worker = i32::try_from(worker).ok().and_then(Pid::from_raw);
                kill_process(worker.ok_or_else(|| Stop::failed("no process"))?, Signal::KILL)?;
            }
            host.wait("nothing is lent to the VM", |host| Ok(host.charge(FIRST)?.lent == 0))?;
        }
        End::Fence => {
            host.fence(FIRST)?;
        }
        End::Removal => host.delete(FIRST)?,
    }
    if matches!(end, End::Free | End::Fault) {
        parts.begin("search of what they freed")?;
        // The programs live on, so the arbiter may not have all memory back.
        found.add(search(step, &host, Some(SECOND), &WAYS)?);
    }
    kill_all(&mut writers)?;
    if end == End::Removal {
        host.put(FIRST, &vm())?;
    }
    let ways: Vec<&str> = match end {
        End::KillProgram => WAYS.into_iter().chain(OTHER_WAYS).collect(),
        _ => WAYS.to_vec(),
    };
    parts.begin("search")?;
    found.add(search_all(step, &host, &ways)?);
    parts.begin("search of arrays")?;
    // Last, because a new array is cleared, and with it what the others look for.
    found.add(search(step, &host, Some(SECOND), &["array"])?);
    step.note("hits", &found.hits)?;
    note_search(step, &found)?;
    if !found.hits.is_empty() {
        return Err(broken(format!("another VM found {}", json!(found.hits))));
    }
    parts.begin("stop")?;
    host.stop()?;
    parts.end()?;
    held(step)
}

/// Two processes on the driver alone.
fn native(step: &Step) -> Answer {
    // A daemon would hold the memory.
    let host = Host::without_daemon(step)?;
    let mut writers = write(&host, None, End::KillProgram.word())?;
    step.note("refused", &writers.refused)?;
    step.note("beside_the_writers", search(step, &host, None, &[])?)?;
    kill_all(&mut writers)?;
    step.note("after_their_kill", search(step, &host, None, &[])?)?;
    // No promise of Sluice: the driver's behaviour.
    step.note("verdict", "shown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_counted_by_the_kind_that_wrote_them() {
        let printed = "read local 0\nread linear 4096\nread vmm 2048\nrefused managed 801\nhit linear 0 2\n\
                       took linear 7\nhit vmm 0 1\nhit linear 13 5\nhits 8\n";
        let search = Search::read(printed).unwrap();
        assert_eq!(search.hits, BTreeMap::from([("large".to_owned(), 3), ("ring".to_owned(), 5)]));
        assert_eq!((search.bytes, search.refused), (4096, vec!["managed 801".to_owned()]));
        assert_eq!(search.milliseconds, BTreeMap::from([("linear".to_owned(), 7)]));
    }

    #[test]
    fn search_that_was_cut_off_or_contradicts_itself_is_no_result() {
        assert!(Search::read("read linear 4096\n").is_err());
        assert!(Search::read("read linear 4096\nhits 3\n").is_err());
        assert!(Search::read("read linear 4096\nhits 0\n").unwrap().hits.is_empty());
    }

    #[test]
    fn kinds_of_chunks_are_kinds() {
        assert!(CHUNKS.iter().all(|chunk| KINDS.contains(chunk)));
    }
}

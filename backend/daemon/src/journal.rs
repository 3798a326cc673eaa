//! What has happened, for clients of the management API to follow.
//!
//! A bounded list, kept in a file that outlives the daemon but not the machine: nothing is flushed for it. Who follows it too
//! slowly, or comes back after too long, or after the machine was started anew, is told that there is a gap. It must never
//! grow with what guests do, nor wait for who reads it.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Events that are kept.
const KEPT: usize = 4096;
/// Events in the file, beyond which it is written anew with those that are kept.
const LINES: usize = 2 * KEPT;
/// Bytes of a file that is read at all.
const LARGEST: u64 = 64 << 20;
/// Bytes of an event's detail.
const DETAIL: usize = 1024;
/// The form of the file.
const VERSION: u32 = 1;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Event {
    /// Counts from 1 without a hole.
    pub(crate) sequence: u64,
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    /// What kind of thing.
    pub(crate) kind: Cow<'static, str>,
    /// The VM it is about.
    pub(crate) vm: Option<Subject>,
    /// More, for people.
    pub(crate) detail: String,
}

/// A VM and whose it was then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Subject {
    pub(crate) id: String,
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
}

/// What comes next for who has read up to somewhere.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// This many were lost, and the list goes on behind them.
    Gap(u64),
    /// These follow.
    Events(Vec<Event>),
    /// Nothing yet.
    Nothing,
}

/// The journal.
#[derive(Debug)]
pub(crate) struct Journal {
    /// Which list it is: a token of another leads nowhere.
    stream: String,
    list: Mutex<List>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct List {
    events: VecDeque<Event>,
    last: u64,
    /// Nothing where the list is in memory only.
    log: Option<Log>,
}

/// The file: a header, then a line for each event.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    header: Header,
    file: File,
    lines: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    stream: String,
    /// Which start of the machine: what a power cut has taken cannot be told, so nothing goes on behind one.
    boot: String,
}

impl Journal {
    /// That of a directory, which goes on where the daemon before has ended; an empty one where that cannot be told.
    pub(crate) fn open(directory: &Path) -> Self {
        let path = directory.join("events.log");
        // Where it is not known nothing is continued.
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = boot.trim();
        let found = load(&path, boot).unwrap_or_else(|why| {
            tracing::warn!("{} is not continued: {why}", path.display());
            None
        });
        let (stream, events) = found.unwrap_or_else(|| (new_stream(), VecDeque::new()));
        let last = events.back().map_or(0, |event| event.sequence);
        let header = Header { version: VERSION, stream: stream.clone(), boot: boot.to_owned() };
        let log = Log::create(path.clone(), header, &events).map_err(|error| give_up(&path, &error)).ok();
        let list = List { events, last, log };
        Self { stream, list: Mutex::new(list), last: watch::Sender::new(last) }
    }

    /// Takes the file away: nothing has to be remembered.
    pub(crate) fn forget(&self) -> io::Result<()> {
        self.list().log.take().map_or(Ok(()), |log| fs::remove_file(log.path))
    }

    /// Notes something.
    pub(crate) fn note(&self, kind: &'static str, vm: Option<Subject>, detail: impl Into<String>) {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(DETAIL));
        let mut list = self.list();
        list.last += 1;
        let event = Event { sequence: list.last, time: now(), kind: kind.into(), vm, detail };
        list.events.push_back(event);
        if list.events.len() > KEPT {
            list.events.pop_front();
        }
        // Before anybody is told: a number that was told is never another event's.
        list.write();
        self.last.send_replace(list.last);
    }

    /// A token for who has read up to an event.
    pub(crate) fn token(&self, sequence: u64) -> String {
        format!("{}.{sequence}", self.stream)
    }

    /// Where who has a token goes on; `None` when it is of another list, or none.
    pub(crate) fn resume(&self, token: &str) -> Option<u64> {
        let (stream, sequence) = token.split_once('.')?;
        let sequence = sequence.parse().ok()?;
        (stream == self.stream && sequence <= self.list().last).then_some(sequence)
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        self.list().last
    }

    /// Where who wants all there is begins.
    pub(crate) fn oldest(&self) -> u64 {
        let list = self.list();
        list.events.front().map_or(list.last, |event| event.sequence - 1)
    }

    /// Up to `count` events behind one.
    pub(crate) fn after(&self, sequence: u64, count: usize) -> Next {
        let list = self.list();
        let first = list.events.front().map_or(list.last + 1, |event| event.sequence);
        if sequence + 1 < first {
            return Next::Gap(first - 1 - sequence);
        }
        let skip = usize::try_from(sequence + 1 - first).unwrap_or(usize::MAX);
        let events: Vec<_> = list.events.iter().skip(skip).take(count).cloned().collect();
        if events.is_empty() { Next::Nothing } else { Next::Events(events) }
    }

    /// Changes with every event.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl List {
    /// Writes the last event down.
    fn write(&mut self) {
        let Some(mut log) = self.log.take() else { return };
        let path = log.path.clone();
        let written = match self.events.back() {
            Some(event) if log.lines < LINES => log.append(event).map(|()| log),
            _ => Log::create(log.path, log.header, &self.events),
        };
        self.log = written.map_err(|error| give_up(&path, &error)).ok();
    }
}

/// A file that cannot be written is taken away, or the next daemon would give numbers again that were told.
fn give_up(path: &Path, error: &io::Error) {
    tracing::error!("events are kept in memory only from now on: {error}");
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::error!("{} stays behind: {error}", path.display());
        }
        _ => {}
    }
}

impl Log {
    /// Writes all of it, beside the one that is there, and puts it in its place.
    fn create(path: PathBuf, header: Header, events: &VecDeque<Event>) -> io::Result<Self> {
        let mut text = line(&header)?;
        for event in events {
            text.extend(line(event)?);
        }
        let new = path.with_extension("new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        fs::rename(new, &path)?;
        Ok(Self { path, header, file, lines: events.len() })
    }

    fn append(&mut self, event: &Event) -> io::Result<()> {
        self.lines += 1;
        self.file.write_all(&line(event)?)
    }
}

fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// What a daemon has left that was killed, or has ended, since the machine was started: the name of the list, and its events.
fn load(path: &Path, boot: &str) -> Result<Option<(String, VecDeque<Event>)>, String> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
        Ok(metadata) if metadata.len() > LARGEST => return Err("it is too long".to_owned()),
        Ok(_) => {}
    }
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    // Of an event whose writer was killed meanwhile nobody was told.
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut lines = bytes[..whole].split_inclusive(|byte| *byte == b'\n');
    let header = lines.next().ok_or("it has no header")?;
    let header: Header = serde_json::from_slice(header).map_err(|error| format!("header: {error}"))?;
    if header.version != VERSION {
        return Err(format!("it is of version {}, not {VERSION}", header.version));
    }
    if boot.is_empty() || header.boot != boot {
        return Ok(None);
    }
    let mut events: VecDeque<Event> = VecDeque::new();
    for line in lines {
        let event: Event = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if events.back().is_some_and(|before| before.sequence.checked_add(1) != Some(event.sequence)) {
            return Err(format!("event {} does not follow the one before it", event.sequence));
        }
        events.push_back(event);
        if events.len() > KEPT {
            events.pop_front();
        }
    }
    Ok(Some((header.stream, events)))
}

/// A name that no other list has.
fn new_stream() -> String {
    let mut random = [0; 8];
    // Where there is none the time has to do: it tells two lists apart, and keeps no secret.
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
    let number = match filled {
        Ok(8) => u64::from_le_bytes(random),
        _ => now(),
    };
    format!("{number:016x}")
}

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, Journal) {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = Journal::open(directory.path());
        (directory, journal)
    }

    fn sequences(next: Next) -> Vec<u64> {
        match next {
            Next::Events(events) => events.iter().map(|event| event.sequence).collect(),
            other => panic!("{other:?}"),
        }
    }

    // Promise: A5
    #[test]
    fn who_reads_too_slowly_sees_the_gap() {
        let (_directory, journal) = place();
        assert_eq!((journal.oldest(), journal.after(0, 9)), (0, Next::Nothing));
        for _ in 0..KEPT {
            journal.note("a", None, "");
        }
        assert_eq!(sequences(journal.after(0, 3)), [1, 2, 3]);
        let last = u64::try_from(KEPT).expect("small");
        assert_eq!(sequences(journal.after(last - 1, 3)), [last]);
        for _ in 0..5 {
            journal.note("a", None, "");
        }
        assert_eq!(journal.after(2, 3), Next::Gap(3));
        assert_eq!(sequences(journal.after(5, 2)), [6, 7]);
        assert_eq!(journal.oldest(), 5);
        assert_eq!(journal.after(last + 5, 2), Next::Nothing);
    }

    // Promise: A5
    #[test]
    fn a_token_is_of_one_list() {
        let (_directory, journal) = place();
        journal.note("a", None, "");
        assert_eq!(journal.resume(&journal.token(1)), Some(1));
        assert_eq!(journal.resume(&journal.token(2)), None, "it has not happened yet");
        assert_eq!(journal.resume(&place().1.token(0)), None);
        for bad in ["", ".", "x.1", "1", &format!("{}.x", journal.stream)] {
            assert_eq!(journal.resume(bad), None, "{bad:?}");
        }
    }

    // Promise: A5
    #[test]
    fn the_list_goes_on_in_the_next_daemon_wherever_this_one_was_killed() {
        let (directory, journal) = place();
        let path = directory.path().join("events.log");
        let subject = Subject { id: "web-1".to_owned(), ..Subject::default() };
        journal.note("a", Some(subject), "first");
        let token = journal.token(1);
        journal.note("b", None, "second");
        let before = fs::read(&path).expect("there");
        journal.note("c", None, "third");
        let after = fs::read(&path).expect("there");
        // Killed while it wrote the third: of that one nobody was told.
        for end in before.len()..=after.len() {
            fs::write(&path, &after[..end]).expect("written");
            let next = Journal::open(directory.path());
            let at = next.resume(&token).unwrap_or_else(|| panic!("cut at {end} a token leads nowhere"));
            let there = if end == after.len() { vec![2, 3] } else { vec![2] };
            assert_eq!(sequences(next.after(at, 9)), there, "cut at {end}");
            assert_eq!(next.after(0, 1), journal.after(0, 1), "it is the same event");
            next.note("d", None, "");
            assert_eq!(Journal::open(directory.path()).last(), next.last(), "and it counts on");
        }
    }

    // Promise: A5
    #[test]
    fn what_cannot_be_continued_begins_anew() {
        let (directory, journal) = place();
        let path = directory.path().join("events.log");
        journal.note("a", None, "");
        journal.note("b", None, "");
        let token = journal.token(1);
        let text = fs::read_to_string(&path).expect("there");
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
        let lines: Vec<&str> = text.lines().collect();
        for (what, text) in [
            ("of another start of the machine", text.replace(boot.trim(), "another")),
            ("without its header", format!("{}\n", lines[1])),
            ("with a line that is none", text.replace(lines[1], "{}")),
            ("with a hole", text.replace("\"sequence\":2", "\"sequence\":3")),
            ("of another form", text.replace("\"version\":1", "\"version\":2")),
            ("empty", String::new()),
        ] {
            fs::write(&path, text).expect("written");
            let next = Journal::open(directory.path());
            assert_eq!((next.resume(&token), next.last()), (None, 0), "{what}");
        }
    }

    // Promise: A5
    #[test]
    fn where_the_file_cannot_be_written_the_next_daemon_does_not_go_on() {
        let (directory, journal) = place();
        journal.note("a", None, "");
        let token = journal.token(1);
        let full = OpenOptions::new().write(true).open("/dev/full").expect("a device");
        journal.list().log.as_mut().expect("a file").file = full;
        journal.note("b", None, "");
        journal.note("c", None, "");
        assert_eq!(sequences(journal.after(1, 9)), [2, 3], "this one goes on");
        assert_eq!(Journal::open(directory.path()).resume(&token), None);
    }

    // Promise: A5
    #[test]
    fn the_file_stays_bounded() {
        let (directory, journal) = place();
        for _ in 0..=LINES {
            journal.note("a", None, "");
        }
        let text = fs::read_to_string(directory.path().join("events.log")).expect("there");
        assert_eq!(text.lines().count(), KEPT + 1);
        let next = Journal::open(directory.path());
        assert_eq!((next.last(), next.oldest()), (journal.last(), journal.oldest()));
    }
}

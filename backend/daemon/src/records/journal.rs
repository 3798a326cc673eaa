//! The event log, for clients of the management API to follow.
//!
//! A bounded list, kept in a file that outlives the daemon but not the machine: nothing is flushed for it. A follower that is
//! too slow, returns after too long, or returns after a restart of the machine gets a notice of the gap. The log must never
//! grow with the actions of guests, nor wait for its readers.
//!
//! A thread writes the file, so that a slow disk does not delay the code that notes an event. Readers see an event after it is
//! written: a number that a reader has received never belongs to another event.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use aes::{
    Aes128,
    cipher::{BlockCipherDecrypt as _, BlockCipherEncrypt as _, KeyInit as _},
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
const VERSION: u32 = 2;

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
    name: Name,
    shared: Arc<Shared>,
}

/// State that the journal shares with the thread that writes.
#[derive(Debug)]
struct Shared {
    list: Mutex<List>,
    /// There is an event to write, or there will be none any more.
    noted: Condvar,
    /// The number of the last event that readers may see. It changes while the list is locked.
    told: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct List {
    events: VecDeque<Event>,
    /// The number of the last event.
    last: u64,
    /// Whether there is a file. Without one, readers see events at once.
    kept: bool,
    ended: bool,
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
    name: Name,
    /// Which start of the machine: what a power cut has taken cannot be told, so nothing goes on behind one.
    boot: String,
}

/// The identity of a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    /// A token of another list leads nowhere.
    stream: String,
    /// Hides in tokens how many events there are: not all who have tokens may see all events.
    secret: [u64; 2],
}

impl Name {
    /// One that no other list has.
    fn new() -> Self {
        let [stream, low, high] = [random(), random(), random()];
        Self { stream: format!("{stream:016x}"), secret: [low, high] }
    }

    /// A token for a place in the list. The salt makes two tokens of one place differ.
    fn token(&self, salt: u64, sequence: u64) -> String {
        let mut block = pair(salt, sequence).into();
        self.cipher().encrypt_block(&mut block);
        format!("{}.{:032x}", self.stream, u128::from_be_bytes(block.into()))
    }

    /// The place that a token is of.
    fn place(&self, token: &str) -> Option<u64> {
        let (stream, sealed) = token.split_once('.')?;
        if stream != self.stream || sealed.len() != 32 {
            return None;
        }
        let mut block = u128::from_str_radix(sealed, 16).ok()?.to_be_bytes().into();
        self.cipher().decrypt_block(&mut block);
        let [.., a, b, c, d, e, f, g, h] = <[u8; 16]>::from(block);
        Some(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// A token is one block, so a cipher of blocks alone makes it look random to all who do not know the secret.
    fn cipher(&self) -> Aes128 {
        let [low, high] = self.secret;
        Aes128::new(&pair(low, high).into())
    }
}

/// Two numbers, as a block or a key.
fn pair(first: u64, second: u64) -> [u8; 16] {
    ((u128::from(first) << 64) | u128::from(second)).to_be_bytes()
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
        let (name, events) = found.unwrap_or_else(|| (Name::new(), VecDeque::new()));
        let last = events.back().map_or(0, |event| event.sequence);
        let header = Header { version: VERSION, name: name.clone(), boot: boot.to_owned() };
        let log = Log::create(path.clone(), header, &events).map_err(|error| give_up(&path, &error)).ok();
        let list = List { events, last, kept: log.is_some(), ended: false };
        let told = watch::Sender::new(last);
        let shared = Arc::new(Shared { list: Mutex::new(list), noted: Condvar::new(), told });
        if let Some(log) = log {
            let writing = Arc::clone(&shared);
            let writer = thread::Builder::new().name("events".to_owned()).spawn(move || writing.write(log));
            if let Err(error) = writer {
                give_up(&path, &error);
                shared.list().kept = false;
            }
        }
        Self { name, shared }
    }

    /// Returns when everything that was noted until now is written, or cannot be.
    pub(crate) async fn settled(&self) {
        let last = self.shared.list().last;
        // The sender lives as long as this.
        _ = self.changes().wait_for(|told| *told >= last).await;
    }

    /// Takes the file away, when all is settled: nothing has to be remembered.
    pub(crate) fn forget(&self, directory: &Path) -> io::Result<()> {
        let was_kept = std::mem::take(&mut self.shared.list().kept);
        if was_kept { fs::remove_file(directory.join("events.log")) } else { Ok(()) }
    }

    /// Notes something.
    pub(crate) fn note(&self, kind: &'static str, vm: Option<Subject>, detail: impl Into<String>) {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(DETAIL));
        let mut list = self.shared.list();
        list.last += 1;
        let event = Event { sequence: list.last, time: now(), kind: kind.into(), vm, detail };
        list.events.push_back(event);
        if list.events.len() > KEPT {
            list.events.pop_front();
        }
        if list.kept {
            self.shared.noted.notify_one();
        } else {
            self.shared.told.send_replace(list.last);
        }
    }

    /// A token for who has read up to an event.
    pub(crate) fn token(&self, sequence: u64) -> String {
        self.name.token(0, sequence)
    }

    /// The same for one who may not learn whether there were events.
    pub(crate) fn salted_token(&self, sequence: u64) -> String {
        self.name.token(random(), sequence)
    }

    /// Where who has a token goes on; `None` when it is of another list, or none.
    pub(crate) fn resume(&self, token: &str) -> Option<u64> {
        self.name.place(token).filter(|sequence| *sequence <= self.shared.told())
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        self.shared.list().last
    }

    /// Where who wants all there is begins.
    pub(crate) fn oldest(&self) -> u64 {
        let list = self.shared.list();
        list.events.front().map_or_else(|| self.shared.told(), |event| event.sequence - 1)
    }

    /// Up to `count` events behind one.
    pub(crate) fn after(&self, sequence: u64, count: usize) -> Next {
        let list = self.shared.list();
        let first = list.events.front().map_or(list.last + 1, |event| event.sequence);
        if sequence + 1 < first {
            return Next::Gap(first - 1 - sequence);
        }
        let skip = usize::try_from(sequence + 1 - first).unwrap_or(usize::MAX);
        let last = self.shared.told();
        let told = list.events.iter().skip(skip).take_while(|event| event.sequence <= last);
        let events: Vec<_> = told.take(count).cloned().collect();
        if events.is_empty() { Next::Nothing } else { Next::Events(events) }
    }

    /// Changes when readers may see more.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.told.subscribe()
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.list().ended = true;
        self.shared.noted.notify_one();
    }
}

impl Shared {
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the last event that readers may see.
    fn told(&self) -> u64 {
        *self.told.borrow()
    }

    /// Writes events as they are noted, until the journal is dropped.
    fn write(&self, mut log: Log) {
        loop {
            let list = self.list();
            let waits = |list: &mut List| list.kept && list.last == self.told() && !list.ended;
            let list = self.noted.wait_while(list, waits).unwrap_or_else(PoisonError::into_inner);
            let (last, told) = (list.last, self.told());
            if !list.kept || last == told {
                return;
            }
            let new = list.events.iter().skip_while(|event| event.sequence <= told);
            let follows = new.clone().next().is_some_and(|event| event.sequence == told + 1);
            let is_long = log.lines.saturating_add(new.clone().count()) > LINES;
            // A list with a hole could not be continued.
            let anew = is_long || !follows;
            let events: VecDeque<Event> = if anew { list.events.clone() } else { new.cloned().collect() };
            drop(list);
            let path = log.path.clone();
            let written = if anew {
                Log::create(log.path, log.header, &events)
            } else {
                log.append(&events).map(|()| log)
            };
            let mut list = self.list();
            match written {
                Ok(next) => {
                    log = next;
                    self.told.send_replace(last);
                }
                Err(error) => {
                    give_up(&path, &error);
                    list.kept = false;
                    self.told.send_replace(list.last);
                    return;
                }
            }
        }
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

    fn append(&mut self, events: &VecDeque<Event>) -> io::Result<()> {
        let mut text = Vec::new();
        for event in events {
            text.extend(line(event)?);
        }
        self.lines += events.len();
        self.file.write_all(&text)
    }
}

fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// What a daemon has left that was killed, or has ended, since the machine was started: the name of the list, and its events.
fn load(path: &Path, boot: &str) -> Result<Option<(Name, VecDeque<Event>)>, String> {
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
    Ok(Some((header.name, events)))
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Where there is none the time has to do.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK) {
        Ok(8) => u64::from_le_bytes(bytes),
        _ => now(),
    }
}

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering::Relaxed},
        time::Duration,
    };

    use rustix::{
        fs::{CWD, Mode, OFlags, mkfifoat, open},
        io::read,
    };

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
    #[tokio::test]
    async fn who_reads_too_slowly_sees_the_gap() {
        let (_directory, journal) = place();
        assert_eq!((journal.oldest(), journal.after(0, 9)), (0, Next::Nothing));
        for _ in 0..KEPT {
            journal.note("a", None, "");
        }
        journal.settled().await;
        assert_eq!(sequences(journal.after(0, 3)), [1, 2, 3]);
        let last = u64::try_from(KEPT).expect("small");
        assert_eq!(sequences(journal.after(last - 1, 3)), [last]);
        for _ in 0..5 {
            journal.note("a", None, "");
        }
        journal.settled().await;
        assert_eq!(journal.after(2, 3), Next::Gap(3));
        assert_eq!(sequences(journal.after(5, 2)), [6, 7]);
        assert_eq!(journal.oldest(), 5);
        assert_eq!(journal.after(last + 5, 2), Next::Nothing);
    }

    // Promise: A5
    #[tokio::test]
    async fn a_token_is_of_one_list() {
        let (_directory, journal) = place();
        journal.note("a", None, "");
        journal.settled().await;
        assert_eq!(journal.resume(&journal.token(1)), Some(1));
        assert_eq!(journal.resume(&journal.salted_token(1)), Some(1));
        assert_eq!(journal.resume(&journal.token(2)), None, "it has not happened yet");
        assert_eq!(journal.resume(&place().1.token(0)), None);
        let stream = &journal.name.stream;
        for bad in [
            "",
            ".",
            "x.1",
            "1",
            &format!("{stream}.x"),
            &format!("{stream}.{:032}", 1),
            &format!("{stream}.é{:030}", 1),
        ] {
            assert_eq!(journal.resume(bad), None, "{bad:?}");
        }
    }

    // Promise: A55
    #[test]
    fn a_token_does_not_tell_how_many_events_there_are() {
        let (_directory, journal) = place();
        let sealed = |token: String| token.split_once('.').expect("a token").1.to_owned();
        let tokens: Vec<_> = (0..100).map(|sequence| sealed(journal.token(sequence))).collect();
        // Each half of neighbours differs in about as many bits as two random numbers do.
        for half in [0..16, 16..32] {
            let number = |token: &String| u64::from_str_radix(&token[half.clone()], 16).expect("a number");
            let bits = |pair: &[String]| (number(&pair[0]) ^ number(&pair[1])).count_ones();
            let total: u32 = tokens.windows(2).map(bits).sum();
            assert!((99 * 24..99 * 40).contains(&total), "{total} of {} bits", 99 * 64);
        }
        assert_ne!(journal.salted_token(7), journal.salted_token(7), "the same place can be recognised");
    }

    // Promise: A5
    #[tokio::test]
    async fn the_list_goes_on_in_the_next_daemon_wherever_this_one_was_killed() {
        let (directory, journal) = place();
        let path = directory.path().join("events.log");
        let subject = Subject { id: "web-1".to_owned(), ..Subject::default() };
        journal.note("a", Some(subject), "first");
        let token = journal.token(1);
        journal.note("b", None, "second");
        journal.settled().await;
        let before = fs::read(&path).expect("there");
        journal.note("c", None, "third");
        journal.settled().await;
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
            next.settled().await;
            assert_eq!(Journal::open(directory.path()).last(), next.last(), "and it counts on");
        }
    }

    // Promise: A5
    #[tokio::test]
    async fn what_cannot_be_continued_begins_anew() {
        let (directory, journal) = place();
        let path = directory.path().join("events.log");
        journal.note("a", None, "");
        journal.note("b", None, "");
        journal.settled().await;
        let token = journal.token(1);
        let text = fs::read_to_string(&path).expect("there");
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
        let lines: Vec<&str> = text.lines().collect();
        for (what, text) in [
            ("of another start of the machine", text.replace(boot.trim(), "another")),
            ("without its header", format!("{}\n", lines[1])),
            ("with a line that is none", text.replace(lines[1], "{}")),
            ("with a hole", text.replace("\"sequence\":2", "\"sequence\":3")),
            ("of another form", text.replace("\"version\":2", "\"version\":1")),
            ("empty", String::new()),
        ] {
            assert_ne!(fs::read_to_string(&path).ok().as_ref(), Some(&text), "{what}");
            fs::write(&path, text).expect("written");
            let next = Journal::open(directory.path());
            assert_eq!((next.resume(&token), next.last()), (None, 0), "{what}");
        }
    }

    // Promise: A5
    #[tokio::test]
    async fn where_the_file_cannot_be_written_the_next_daemon_does_not_go_on() {
        let (directory, journal) = place();
        journal.note("a", None, "");
        journal.settled().await;
        let token = journal.token(1);
        // The file that takes the place of one that is too long cannot be made.
        let new = directory.path().join("events.new");
        fs::create_dir(&new).expect("a directory");
        for _ in 0..LINES {
            journal.note("b", None, "");
        }
        journal.settled().await;
        let last = journal.last();
        journal.note("c", None, "");
        assert_eq!(sequences(journal.after(last, 9)), [last + 1], "this one goes on");
        fs::remove_dir(&new).expect("removed");
        assert_eq!(Journal::open(directory.path()).resume(&token), None);
    }

    // Promise: A2, A5
    #[test]
    fn while_a_disk_does_not_answer_events_are_noted_and_not_told() {
        let (directory, journal) = place();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        for _ in 0..LINES {
            journal.note("a", None, "");
        }
        runtime.block_on(journal.settled());
        let told = journal.last();
        // Opening a pipe waits until another process opens its other end.
        let new = directory.path().join("events.new");
        mkfifoat(CWD, &new, Mode::RWXU).expect("a pipe");
        // More than there is room for in the file.
        for _ in 0..LINES {
            journal.note("b", None, "");
        }
        let last = told + u64::try_from(LINES).expect("small");
        assert_eq!(journal.last(), last);
        assert!(*journal.changes().borrow() < last, "all are told");
        assert_eq!(journal.resume(&journal.token(last)), None);
        let pipe = open(&new, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).expect("its other end");
        let settled = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !settled.load(Relaxed) {
                    if !matches!(read(&pipe, &mut [0; 4096]), Ok(1..)) {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            runtime.block_on(journal.settled());
            settled.store(true, Relaxed);
        });
        assert_eq!(*journal.changes().borrow(), last);
        let Next::Events(events) = journal.after(journal.oldest(), LINES) else { panic!("there are some") };
        assert_eq!(events.len(), KEPT);
    }

    // Promise: A5
    #[tokio::test]
    async fn the_file_stays_bounded() {
        let (directory, journal) = place();
        for _ in 0..=LINES {
            journal.note("a", None, "");
        }
        journal.settled().await;
        let text = fs::read_to_string(directory.path().join("events.log")).expect("there");
        assert!((KEPT + 1..=LINES + 1).contains(&text.lines().count()), "{} lines", text.lines().count());
        let next = Journal::open(directory.path());
        assert_eq!((next.last(), next.oldest()), (journal.last(), journal.oldest()));
    }
}

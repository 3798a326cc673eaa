//! The event log, for clients of the management API to follow.
//!
//! A bounded list, kept in a file that outlives the daemon but not the machine: it is never flushed. A follower that is too
//! slow, returns after too long, or returns after a restart of the machine gets a `gap` event. The log must never grow with the
//! actions of guests, nor wait for its readers.
//!
//! A thread writes the file, so that a slow disk does not delay the code that records an event. Readers see an event after it
//! is written: a number that a reader has received never belongs to another event.

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

use super::state::objects::host_name;

/// Number of events kept.
pub(crate) const KEPT: usize = 4096;
/// Limit of events in the file; beyond it the file is rewritten with the kept events.
const LINES: usize = 2 * KEPT;
/// Limit of a file that is read, in bytes.
const LARGEST: u64 = 64 << 20;
/// Limit of an event's detail, in bytes.
const DETAIL: usize = 1024;
/// The version of the file's format.
const VERSION: u32 = 2;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JournalEvent {
    /// Counts from 1 without a gap.
    pub(crate) sequence: u64,
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    /// The kind of event.
    pub(crate) kind: Cow<'static, str>,
    /// The VM of the event.
    pub(crate) vm: Option<Subject>,
    /// Details, for people.
    pub(crate) detail: String,
}

/// A VM and its owners at the time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Subject {
    pub(crate) id: String,
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
}

impl Subject {
    /// The unique name on this host.
    pub(crate) fn host_name(&self) -> String {
        host_name(self.organisation.as_deref(), self.project.as_deref(), &self.id)
    }

    /// The name of its organisation, or of its project outside of any organisation.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.organisation.as_deref().or(self.project.as_deref())
    }
}

/// The next events for a reader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextEvents {
    /// This many were lost; the list continues after them.
    Gap(u64),
    /// The next events.
    Events(Vec<JournalEvent>),
    /// No event yet.
    Nothing,
}

/// The journal.
#[derive(Debug)]
pub(crate) struct Journal {
    name: JournalName,
    shared: Arc<SharedJournal>,
}

/// State that the journal shares with the thread that writes.
#[derive(Debug)]
struct SharedJournal {
    list: Mutex<EventList>,
    /// Signalled when there is an event to write, or when the journal ends.
    noted: Condvar,
    /// The number of the last event that readers may see. It changes only while the list is locked.
    told: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct EventList {
    events: VecDeque<JournalEvent>,
    /// The number of the last event.
    last: u64,
    /// True if there is a file. Without one, readers see events at once.
    kept: bool,
    ended: bool,
}

/// The file: a header, then a line for each event.
#[derive(Debug)]
struct JournalFile {
    path: PathBuf,
    header: JournalHeader,
    file: File,
    lines: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JournalHeader {
    version: u32,
    name: JournalName,
    /// The boot id: after a power cut it is unknown which events were lost, so no list continues after one.
    boot: String,
}

/// The identity of a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JournalName {
    /// A token of another list is invalid.
    stream: String,
    /// Hides the number of events in tokens: not every holder of a token may see all events.
    secret: [u64; 2],
}

impl JournalName {
    /// A new name that no other list has.
    fn new() -> Self {
        let [stream, low, high] = [random(), random(), random()];
        Self { stream: format!("{stream:016x}"), secret: [low, high] }
    }

    /// A token for a position in the list. The salt makes two tokens of one position differ.
    fn token(&self, salt: u64, sequence: u64) -> String {
        let mut block = pair(salt, sequence).into();
        self.cipher().encrypt_block(&mut block);
        format!("{}.{:032x}", self.stream, u128::from_be_bytes(block.into()))
    }

    /// The position of a token.
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

    /// A token is one block, so a block cipher alone makes it look random without the secret.
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
    /// Opens the journal of a directory; it continues the list of the last daemon, or begins an empty one if that is
    /// unreadable.
    pub(crate) fn open(directory: &Path) -> Self {
        let path = directory.join("events.log");
        // Without a boot id no list is continued.
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = boot.trim();
        let found = load(&path, boot).unwrap_or_else(|why| {
            tracing::warn!(path = %path.display(), error = why, "the event log is unreadable, and a new one begins");
            None
        });
        let (name, events) = found.unwrap_or_else(|| (JournalName::new(), VecDeque::new()));
        let last = events.back().map_or(0, |event| event.sequence);
        let header = JournalHeader { version: VERSION, name: name.clone(), boot: boot.to_owned() };
        let log =
            JournalFile::create(path.clone(), header, &events).map_err(|error| give_up(&path, &error)).ok();
        let list = EventList { events, last, kept: log.is_some(), ended: false };
        let told = watch::Sender::new(last);
        let shared = Arc::new(SharedJournal { list: Mutex::new(list), noted: Condvar::new(), told });
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

    /// Returns when every event recorded so far is written, or cannot be written.
    pub(crate) async fn settled(&self) {
        let last = self.shared.list().last;
        // The sender lives as long as the journal.
        _ = self.changes().wait_for(|told| *told >= last).await;
    }

    /// Removes the file, when all events are settled: no event has to be kept.
    pub(crate) fn forget(&self, directory: &Path) -> io::Result<()> {
        let was_kept = std::mem::take(&mut self.shared.list().kept);
        if was_kept { fs::remove_file(directory.join("events.log")) } else { Ok(()) }
    }

    /// Records an event.
    pub(crate) fn note(&self, kind: &'static str, vm: Option<Subject>, detail: impl Into<String>) {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(DETAIL));
        let mut list = self.shared.list();
        list.last += 1;
        let event = JournalEvent { sequence: list.last, time: now(), kind: kind.into(), vm, detail };
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

    /// A token for a reader that has read up to an event.
    pub(crate) fn token(&self, sequence: u64) -> String {
        self.name.token(0, sequence)
    }

    /// The same for a reader that must not learn from equal tokens that there were no events.
    pub(crate) fn salted_token(&self, sequence: u64) -> String {
        self.name.token(random(), sequence)
    }

    /// The position of a token; `None` if it is invalid, or of another list.
    pub(crate) fn resume(&self, token: &str) -> Option<u64> {
        self.name.place(token).filter(|sequence| *sequence <= self.shared.told())
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        self.shared.list().last
    }

    /// The position before the oldest event.
    pub(crate) fn oldest(&self) -> u64 {
        let list = self.shared.list();
        list.events.front().map_or_else(|| self.shared.told(), |event| event.sequence - 1)
    }

    /// Up to `count` events after a position.
    pub(crate) fn after(&self, sequence: u64, count: usize) -> NextEvents {
        let list = self.shared.list();
        let first = list.events.front().map_or(list.last + 1, |event| event.sequence);
        if sequence + 1 < first {
            return NextEvents::Gap(first - 1 - sequence);
        }
        let skip = usize::try_from(sequence + 1 - first).unwrap_or(usize::MAX);
        let last = self.shared.told();
        let told = list.events.iter().skip(skip).take_while(|event| event.sequence <= last);
        let events: Vec<_> = told.take(count).cloned().collect();
        if events.is_empty() { NextEvents::Nothing } else { NextEvents::Events(events) }
    }

    /// Changes when readers may see more events.
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

impl SharedJournal {
    fn list(&self) -> MutexGuard<'_, EventList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the last event that readers may see.
    fn told(&self) -> u64 {
        *self.told.borrow()
    }

    /// Writes events as they are recorded, until the journal is dropped.
    fn write(&self, mut log: JournalFile) {
        loop {
            let list = self.list();
            let waits = |list: &mut EventList| list.kept && list.last == self.told() && !list.ended;
            let list = self.noted.wait_while(list, waits).unwrap_or_else(PoisonError::into_inner);
            let (last, told) = (list.last, self.told());
            if !list.kept || last == told {
                return;
            }
            let new = list.events.iter().skip_while(|event| event.sequence <= told);
            let follows = new.clone().next().is_some_and(|event| event.sequence == told + 1);
            let is_long = log.lines.saturating_add(new.clone().count()) > LINES;
            // A list with a gap could not be continued.
            let anew = is_long || !follows;
            let events: VecDeque<JournalEvent> =
                if anew { list.events.clone() } else { new.cloned().collect() };
            drop(list);
            let path = log.path.clone();
            let written = if anew {
                JournalFile::create(log.path, log.header, &events)
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

/// Removes a file that cannot be written; otherwise the next daemon would reuse numbers that readers have received.
fn give_up(path: &Path, error: &io::Error) {
    tracing::error!(%error, "cannot write the event log; events are kept in memory only from now on");
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::error!(path = %path.display(), %error, "cannot remove the event log");
        }
        _ => {}
    }
}

impl JournalFile {
    /// Writes a complete new file beside the old one, and renames it to the old one's name.
    fn create(path: PathBuf, header: JournalHeader, events: &VecDeque<JournalEvent>) -> io::Result<Self> {
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

    fn append(&mut self, events: &VecDeque<JournalEvent>) -> io::Result<()> {
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

/// The list of the last daemon since the machine's boot: its name and its events. `None` if there is no file.
fn load(path: &Path, boot: &str) -> Result<Option<(JournalName, VecDeque<JournalEvent>)>, String> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
        Ok(metadata) if metadata.len() > LARGEST => return Err("it is too long".to_owned()),
        Ok(_) => {}
    }
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    // No reader has seen an event whose writer was killed in between.
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut lines = bytes[..whole].split_inclusive(|byte| *byte == b'\n');
    let header = lines.next().ok_or("it has no header")?;
    let header: JournalHeader = serde_json::from_slice(header).map_err(|error| format!("header: {error}"))?;
    if header.version != VERSION {
        return Err(format!("it is of version {}, not {VERSION}", header.version));
    }
    if boot.is_empty() || header.boot != boot {
        return Ok(None);
    }
    let mut events: VecDeque<JournalEvent> = VecDeque::new();
    for line in lines {
        let event: JournalEvent = serde_json::from_slice(line).map_err(|error| error.to_string())?;
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
    // Without random numbers the time is used.
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
mod tests;

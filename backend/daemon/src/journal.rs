//! What has happened, for clients of the management API to follow.
//!
//! A bounded list in memory: who follows it too slowly, or comes back after too long, or to another daemon, is told that
//! there is a gap. It must never grow with what guests do, nor wait for who reads it.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;

/// Events that are kept.
const KEPT: usize = 4096;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Counts from 1 without a hole.
    pub(crate) sequence: u64,
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    /// What kind of thing.
    pub(crate) kind: &'static str,
    /// The VM it is about.
    pub(crate) vm: Option<Subject>,
    /// More, for people.
    pub(crate) detail: String,
}

/// A VM and whose it was then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Which daemon's it is.
    stream: String,
    list: Mutex<List>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct List {
    events: VecDeque<Event>,
    last: u64,
}

impl Journal {
    /// An empty one.
    pub(crate) fn new() -> Self {
        let mut random = [0; 8];
        // Where there is none the time has to do: it tells two daemons apart, and keeps no secret.
        let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
        let number = match filled {
            Ok(8) => u64::from_le_bytes(random),
            _ => now(),
        };
        Self {
            stream: format!("{number:016x}"),
            list: Mutex::new(List::default()),
            last: watch::Sender::new(0),
        }
    }

    /// Notes something.
    pub(crate) fn note(&self, kind: &'static str, vm: Option<Subject>, detail: impl Into<String>) {
        let mut list = self.list();
        list.last += 1;
        let event = Event { sequence: list.last, time: now(), kind, vm, detail: detail.into() };
        list.events.push_back(event);
        if list.events.len() > KEPT {
            list.events.pop_front();
        }
        self.last.send_replace(list.last);
    }

    /// A token for who has read up to an event.
    pub(crate) fn token(&self, sequence: u64) -> String {
        format!("{}.{sequence}", self.stream)
    }

    /// Where who has a token goes on; `None` when it is of another daemon, or none.
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

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: A5
    #[test]
    fn who_reads_too_slowly_sees_the_gap() {
        let journal = Journal::new();
        assert_eq!((journal.oldest(), journal.after(0, 9)), (0, Next::Nothing));
        for _ in 0..KEPT {
            journal.note("a", None, "");
        }
        let sequences = |next| match next {
            Next::Events(events) => events.iter().map(|event| event.sequence).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
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
    fn a_token_is_of_one_daemon() {
        let journal = Journal::new();
        journal.note("a", None, "");
        assert_eq!(journal.resume(&journal.token(1)), Some(1));
        assert_eq!(journal.resume(&journal.token(2)), None, "it has not happened yet");
        assert_eq!(journal.resume(&Journal::new().token(0)), None);
        for bad in ["", ".", "x.1", "1", &format!("{}.x", journal.stream)] {
            assert_eq!(journal.resume(bad), None, "{bad:?}");
        }
    }
}

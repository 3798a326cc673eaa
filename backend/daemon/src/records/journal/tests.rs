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

fn sequences(next: NextEvents) -> Vec<u64> {
    match next {
        NextEvents::Events(events) => events.iter().map(|event| event.sequence).collect(),
        other => panic!("{other:?}"),
    }
}

// Promise: A5
#[tokio::test]
async fn reader_that_is_too_slow_gets_a_gap() {
    let (_directory, journal) = place();
    assert_eq!((journal.oldest(), journal.after(0, 9)), (0, NextEvents::Nothing));
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
    assert_eq!(journal.after(2, 3), NextEvents::Gap(3));
    assert_eq!(sequences(journal.after(5, 2)), [6, 7]);
    assert_eq!(journal.oldest(), 5);
    assert_eq!(journal.after(last + 5, 2), NextEvents::Nothing);
}

// Promise: A5
#[tokio::test]
async fn token_is_valid_for_one_list_only() {
    let (_directory, journal) = place();
    journal.note("a", None, "");
    journal.settled().await;
    assert_eq!(journal.resume(&journal.token(1)), Some(1));
    assert_eq!(journal.resume(&journal.salted_token(1)), Some(1));
    assert_eq!(journal.resume(&journal.token(2)), None, "the event has not happened yet");
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
fn token_hides_the_number_of_events() {
    let (_directory, journal) = place();
    let sealed = |token: String| token.split_once('.').expect("a token").1.to_owned();
    let tokens: Vec<_> = (0..100).map(|sequence| sealed(journal.token(sequence))).collect();
    // Each half of neighbouring tokens differs in about as many bits as two random numbers do.
    for half in [0..16, 16..32] {
        let number = |token: &String| u64::from_str_radix(&token[half.clone()], 16).expect("a number");
        let bits = |pair: &[String]| (number(&pair[0]) ^ number(&pair[1])).count_ones();
        let total: u32 = tokens.windows(2).map(bits).sum();
        assert!((99 * 24..99 * 40).contains(&total), "{total} of {} bits", 99 * 64);
    }
    assert_ne!(journal.salted_token(7), journal.salted_token(7), "two tokens of one position are equal");
}

// Promise: A5
#[tokio::test]
async fn list_continues_in_the_next_daemon_after_a_kill_at_any_byte() {
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
    // Killed while it wrote the third event, which no reader has seen.
    for end in before.len()..=after.len() {
        fs::write(&path, &after[..end]).expect("written");
        let next = Journal::open(directory.path());
        let at = next.resume(&token).unwrap_or_else(|| panic!("cut at {end} the token is invalid"));
        let there = if end == after.len() { vec![2, 3] } else { vec![2] };
        assert_eq!(sequences(next.after(at, 9)), there, "cut at {end}");
        assert_eq!(next.after(0, 1), journal.after(0, 1), "it is the same event");
        next.note("d", None, "");
        next.settled().await;
        assert_eq!(Journal::open(directory.path()).last(), next.last(), "the count continues");
    }
}

// Promise: A5
#[tokio::test]
async fn unreadable_list_begins_anew() {
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
        ("with a malformed line", text.replace(lines[1], "{}")),
        ("with a gap", text.replace("\"sequence\":2", "\"sequence\":3")),
        ("of another version", text.replace("\"version\":2", "\"version\":1")),
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
async fn list_that_could_not_be_written_is_not_continued_by_the_next_daemon() {
    let (directory, journal) = place();
    journal.note("a", None, "");
    journal.settled().await;
    let token = journal.token(1);
    // The file that replaces one that is too long cannot be created.
    let new = directory.path().join("events.new");
    fs::create_dir(&new).expect("a directory");
    for _ in 0..LINES {
        journal.note("b", None, "");
    }
    journal.settled().await;
    let last = journal.last();
    journal.note("c", None, "");
    assert_eq!(sequences(journal.after(last, 9)), [last + 1], "this daemon continues");
    fs::remove_dir(&new).expect("removed");
    assert_eq!(Journal::open(directory.path()).resume(&token), None);
}

// Promise: A2, A5
#[test]
fn events_are_recorded_and_not_shown_while_the_disk_hangs() {
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
    // More than the file has room for.
    for _ in 0..LINES {
        journal.note("b", None, "");
    }
    let last = told + u64::try_from(LINES).expect("small");
    assert_eq!(journal.last(), last);
    assert!(*journal.changes().borrow() < last, "readers see unwritten events");
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
    let NextEvents::Events(events) = journal.after(journal.oldest(), LINES) else { panic!("there are some") };
    assert_eq!(events.len(), KEPT);
}

// Promise: A5
#[tokio::test]
async fn file_of_events_stays_bounded() {
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

//! The log of a child: its standard error, a pipe of its own, read here and passed on to this process's own standard error.
//!
//! Every line that is passed on begins with a label that this process writes, has no control characters and is bounded, so that
//! no child can pass its line off as another's. The number of lines is bounded per child, per VM and for all processes that
//! guests reach: lines beyond the bound are dropped and counted. A child that writes too fast is not read for a while; its pipe
//! fills and it loses lines itself, but neither it nor this process waits.

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    io::Errno,
    pipe::PipeFlags,
};

use crate::{limited, peer_time::PeerTime, rate::TokenBucket};

/// Largest part of a child's line that is passed on, in bytes. With its label it is still one write of [`crate::log::output`].
const LINE_BYTES: usize = 2048;
/// Largest length of a launcher's line: one of a child with its label.
const LAUNCHER_LINE_BYTES: usize = LINE_BYTES + 1024;
/// Capacity of a child's pipe, in bytes.
const PIPE_BYTES: usize = 16 << 10;
/// Capacity of a launcher's pipe, in bytes; it carries the logs of all its children.
const LAUNCHER_PIPE_BYTES: usize = 256 << 10;
/// Limit of lines of one child: at once, and per second in the long run.
const CHILD: (u32, f64) = (200, 10.0);
/// Limit for all workers of a VM and its device.
const VM: (u32, f64) = (400, 20.0);
/// Limit for all processes that guests can reach. In the 30 seconds for which a journal counts, this is half of its limit of 10,000 lines
/// per service, so a guest never causes the journal to drop the service's own lines.
const GUESTS: (u32, f64) = (2000, 100.0);
/// Shortest pause in reading a child that writes too fast.
const PAUSE: Duration = Duration::from_millis(200);

/// Creates a pipe for a child's standard error: the end to read, and the child's. Neither end waits for the other.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    pipe_of(PIPE_BYTES)
}

/// Creates such a pipe for a launcher.
pub fn launcher_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    pipe_of(LAUNCHER_PIPE_BYTES)
}

fn pipe_of(bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    rustix::pipe::fcntl_setpipe_size(&writer, bytes)?;
    Ok((reader, writer))
}

/// Splits the output of a child into lines, each cleaned and bounded.
#[derive(Debug)]
pub struct Lines {
    /// Largest length of a line, in bytes.
    bound: usize,
    /// The beginning of an incomplete line.
    begun: Vec<u8>,
    /// True while the rest of a line is beyond the bound.
    skipping: bool,
}

impl Lines {
    fn new(bound: usize) -> Self {
        Self { bound, begun: Vec::new(), skipping: false }
    }

    /// Takes new bytes, and passes each completed line to `line`.
    pub fn take(&mut self, mut bytes: &[u8], mut line: impl FnMut(&str)) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.add(&bytes[..end]);
            self.complete(&mut line);
            bytes = &bytes[end + 1..];
        }
        self.add(bytes);
    }

    /// Ends the output: passes an incomplete line on, too.
    pub fn finish(&mut self, mut line: impl FnMut(&str)) {
        if !self.begun.is_empty() {
            self.complete(&mut line);
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        let room = self.bound - self.begun.len();
        self.skipping |= bytes.len() > room;
        self.begun.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn complete(&mut self, line: &mut impl FnMut(&str)) {
        let mut text = clean(&self.begun);
        if std::mem::take(&mut self.skipping) {
            text.push_str(" [cut]");
        }
        self.begun.clear();
        line(&text);
    }
}

/// The text of a line: question marks replace invalid text, and characters that a terminal or a log reader interprets.
fn clean(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        let acts = |character: char| {
            // Ends of lines and paragraphs, and marks that change the direction of text.
            let turns = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            character.is_control() && character != '\t' || turns
        };
        text.extend(chunk.valid().chars().map(|character| if acts(character) { '?' } else { character }));
        text.extend(chunk.invalid().iter().map(|_| '?'));
    }
    text
}

/// The limits of guests' processes: the remaining lines per VM and in all, and the time that reading takes because of each VM.
#[derive(Debug)]
pub struct GuestLimits {
    vms: BTreeMap<u32, VmLimit>,
    all: TokenBucket,
}

#[derive(Debug)]
struct VmLimit {
    lines: TokenBucket,
    time: PeerTime,
}

impl GuestLimits {
    /// Unused limits.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { vms: BTreeMap::new(), all: TokenBucket::new(GUESTS.1, GUESTS.0, now) }
    }

    fn of(&mut self, vm: u32, now: Instant) -> &mut VmLimit {
        let new = || VmLimit { lines: TokenBucket::new(VM.1, VM.0, now), time: PeerTime::new() };
        self.vms.entry(vm).or_insert_with(new)
    }

    /// Takes one line of a VM, or returns the time until one may pass.
    fn take(&mut self, vm: u32, now: Instant) -> Result<(), Duration> {
        self.of(vm, now).lines.take(now)?;
        self.all.take(now)
    }

    /// Forgets VMs with unused limits. Those of other VMs continue to apply to the VM's next worker.
    pub fn forget_full(&mut self, now: Instant) {
        self.vms.retain(|_, limit| !(limit.lines.is_full(now) && limit.time.is_forgiven(now)));
    }
}

/// The result of reading a child's log.
#[derive(Debug, PartialEq, Eq)]
pub enum NextRead {
    /// There is no more to read now.
    Wait,
    /// There may be more to read.
    More,
    /// The next read is at this time, not before.
    At(Instant),
    /// The log has ended.
    End,
}

/// The log of one child.
#[derive(Debug)]
pub struct ChildLog {
    pipe: OwnedFd,
    lines: Lines,
    limiter: LineLimit,
}

impl AsFd for ChildLog {
    fn as_fd(&self) -> rustix::fd::BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl ChildLog {
    /// The log of a child, from its end of the pipe, the label of its lines, and the VM whose guest can reach it.
    #[must_use]
    pub fn new(pipe: OwnedFd, label: String, vm: Option<u32>, now: Instant) -> Self {
        let limit = Some(TokenBucket::new(CHILD.1, CHILD.0, now));
        Self { pipe, lines: Lines::new(LINE_BYTES), limiter: LineLimit { label, vm, limit, dropped: 0 } }
    }

    /// The log of a launcher, which has limited its children's lines and writes few itself.
    pub fn of_launcher(pipe: OwnedFd, process: u32) -> Self {
        let label = format!("launcher pid={process}");
        let limiter = LineLimit { label, vm: None, limit: None, dropped: 0 };
        Self { pipe, lines: Lines::new(LAUNCHER_LINE_BYTES), limiter }
    }

    /// Reads at most as much as the pipe holds, and passes lines on within the limits. Reading wakes all that wait to write, in this process's
    /// time: the log of a child whose VM lets a crowd wait has ended.
    pub fn read(&mut self, guests: &mut GuestLimits, now: Instant) -> NextRead {
        let mut out = |line: &[u8]| _ = crate::log::output::put(line);
        self.read_to(guests, now, &mut out)
    }

    /// The child has ended: passes on the rest.
    pub fn finish(&mut self, guests: &mut GuestLimits, now: Instant) {
        let mut out = |line: &[u8]| _ = crate::log::output::put(line);
        self.read_to(guests, now, &mut out);
        self.end(guests, now, &mut out);
    }

    fn read_to(&mut self, guests: &mut GuestLimits, now: Instant, out: &mut dyn FnMut(&[u8])) -> NextRead {
        let mut wait = None;
        let mut next = NextRead::More;
        let mut bytes = [0; 4096];
        for _ in 0..PIPE_BYTES.div_ceil(bytes.len()) {
            let mut read = || rustix::io::read(&self.pipe, &mut bytes);
            let (result, crowded) = match self.limiter.vm {
                Some(vm) => {
                    let time = &guests.of(vm, now).time;
                    (time.measure(read), time.is_over())
                }
                None => (read(), false),
            };
            if crowded {
                limited!(
                    error,
                    child = self.limiter.label,
                    "processes of a VM let a crowd wait on a log, which is closed"
                );
                self.end(guests, now, out);
                return NextRead::End;
            }
            match result {
                Ok(0) => {
                    self.end(guests, now, out);
                    return NextRead::End;
                }
                Ok(count) => {
                    let Self { lines, limiter, .. } = self;
                    lines.take(&bytes[..count], |line| {
                        wait = limiter.pass(line, guests, now, out).err().or(wait);
                    });
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    next = NextRead::Wait;
                    break;
                }
                Err(error) => {
                    tracing::error!(child = self.limiter.label, %error, "cannot read the log of a child");
                    return NextRead::End;
                }
            }
        }
        wait.map_or(next, |wait| NextRead::At(now + wait.max(PAUSE)))
    }

    fn end(&mut self, guests: &mut GuestLimits, now: Instant, out: &mut dyn FnMut(&[u8])) {
        let Self { lines, limiter, .. } = self;
        lines.finish(|line| _ = limiter.pass(line, guests, now, out));
        limiter.report_dropped(out);
    }
}

/// Selects the lines of a child that are passed on.
#[derive(Debug)]
struct LineLimit {
    /// The prefix of its lines.
    label: String,
    /// The VM whose guest can reach the child, if there is one.
    vm: Option<u32>,
    /// The limit of lines; `None` for no limit.
    limit: Option<TokenBucket>,
    /// Number of dropped lines since the last report.
    dropped: u64,
}

impl LineLimit {
    /// Passes a line on, or drops it and returns the time until another may pass.
    fn pass(
        &mut self,
        line: &str,
        guests: &mut GuestLimits,
        now: Instant,
        out: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Duration> {
        let own = self.limit.as_mut().map_or(Ok(()), |limit| limit.take(now));
        let taken = own.and_then(|()| self.vm.map_or(Ok(()), |vm| guests.take(vm, now)));
        if taken.is_err() {
            self.dropped = self.dropped.saturating_add(1);
            return taken;
        }
        self.report_dropped(out);
        out(format!("{}: {line}", self.label).as_bytes());
        Ok(())
    }

    /// Reports the number of dropped lines; at most once per line that passes, and once at the end.
    fn report_dropped(&mut self, out: &mut dyn FnMut(&[u8])) {
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            out(format!("{}: [{dropped} lines dropped]", self.label).as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines_of(chunks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut found) = (Lines::new(LINE_BYTES), Vec::new());
        for chunk in chunks {
            lines.take(chunk, |line| found.push(line.to_owned()));
        }
        lines.finish(|line| found.push(line.to_owned()));
        found
    }

    // Promise: F115
    #[test]
    #[cfg(not(miri))]
    fn log_on_which_a_crowd_waits_is_closed_and_others_are_read() {
        use rustix::event::epoll;
        /// Event loops, and descriptors of the pipe that each watches.
        const EACH: usize = 300;
        let now = Instant::now();
        let mut guests = GuestLimits::new(now);
        let open = |vm| {
            let (reader, writer) = pipe().expect("a pipe");
            (ChildLog::new(reader, "child".to_owned(), vm, now), writer)
        };
        let ((mut log, writer), (mut other, others)) = (open(Some(1)), open(Some(2)));
        let copies: Vec<_> = (0..EACH).map(|_| writer.try_clone().expect("a descriptor")).collect();
        let mut loops = Vec::new();
        for _ in 0..EACH {
            let events = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an event loop");
            for copy in &copies {
                let (data, flags) =
                    (epoll::EventData::new_u64(0), epoll::EventFlags::OUT | epoll::EventFlags::ET);
                epoll::add(&events, copy, data, flags).expect("watched");
            }
            loops.push(events);
        }
        let mut out = |_: &[u8]| {};
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            // A read wakes those that wait if the pipe was full.
            while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
            if log.read_to(&mut guests, now, &mut out) == NextRead::End {
                break;
            }
            assert!(Instant::now() < end, "{guests:?}");
        }
        rustix::io::write(&others, b"a line\n").expect("written");
        assert_eq!(other.read_to(&mut guests, now, &mut out), NextRead::Wait);
        guests.forget_full(now);
        assert!(guests.vms.contains_key(&1), "the time of a VM is forgotten");
    }

    // Promise: F72
    #[test]
    fn text_in_any_pieces_becomes_the_same_lines() {
        assert_eq!(lines_of(&[b"one\ntw", b"o\n", b"", b"three"]), ["one", "two", "three"]);
        assert_eq!(lines_of(&[b"\n\n"]), ["", ""]);
        assert_eq!(lines_of(&[b""]), [] as [&str; 0]);
        // A character in two pieces is one character.
        assert_eq!(lines_of(&[b"gr\xc3", b"\xbc\xc3\x9f\n"]), ["gr\u{fc}\u{df}"]);
    }

    // Promise: F72
    #[test]
    fn line_with_control_characters_is_logged_without_them() {
        let line = b"\x1b[2J\rsluiced: all is well\x00\x9b\xff\x7f\tand \xe2\x80\xa8more \xe2\x80\xae\n";
        assert_eq!(lines_of(&[line]), ["?[2J?sluiced: all is well????\tand ?more ?"]);
    }

    // Promise: F72
    #[test]
    fn line_without_end_is_cut_and_marked() {
        let long = vec![b'x'; 10 * LINE_BYTES];
        let found = lines_of(&[&long, &long, b"\nnext\n"]);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], format!("{} [cut]", "x".repeat(LINE_BYTES)));
        assert_eq!(found[1], "next");
        let exact = [&long[..LINE_BYTES], b"\n"].concat();
        assert_eq!(lines_of(&[&exact]), ["x".repeat(LINE_BYTES)]);
    }

    proptest! {
        #[test]
        fn any_bytes_become_bounded_lines_of_text(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 0..20)) {
            let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let found = lines_of(&chunks);
            let whole = chunks.concat();
            prop_assert_eq!(&found, &lines_of(&[&whole]));
            for line in found {
                // Every invalid byte becomes one character.
                prop_assert!(line.len() <= LINE_BYTES + 6 && !line.contains(|c: char| c.is_control() && c != '\t'));
            }
        }
    }

    struct Read {
        log: ChildLog,
        writer: OwnedFd,
        guests: GuestLimits,
        start: Instant,
    }

    impl Read {
        fn new(vm: Option<u32>) -> Self {
            let start = Instant::now();
            let (reader, writer) = pipe().expect("a pipe");
            let log = ChildLog::new(reader, "a child".to_owned(), vm, start);
            Self { log, writer, guests: GuestLimits::new(start), start }
        }

        fn at(&mut self, seconds: u64) -> (NextRead, Vec<String>) {
            let mut found = Vec::new();
            let mut out = |line: &[u8]| found.push(String::from_utf8(line.to_owned()).expect("text"));
            let next =
                self.log.read_to(&mut self.guests, self.start + Duration::from_secs(seconds), &mut out);
            (next, found)
        }
    }

    // Promise: F72
    #[test]
    fn lines_of_a_child_that_writes_too_fast_are_dropped_and_counted() {
        let mut read = Read::new(None);
        let mut written = 0;
        // Until its pipe is full, which the write reports at once.
        while rustix::io::write(&read.writer, b"forged: line\n").is_ok() {
            written += 1;
        }
        let (next, found) = read.at(0);
        assert_eq!(next, NextRead::At(read.start + PAUSE));
        assert_eq!(found.len(), 200);
        assert!(found.iter().all(|line| line == "a child: forged: line"), "{found:?}");
        rustix::io::write(&read.writer, b"later\n").expect("room");
        let (next, found) = read.at(10);
        assert_eq!((next, found.len()), (NextRead::Wait, 2));
        assert_eq!(
            found,
            [format!("a child: [{} lines dropped]", written - 200), "a child: later".to_owned()]
        );
    }

    // Promise: F72
    #[test]
    fn children_of_one_vm_share_its_log_limit_and_other_vms_have_theirs() {
        let mut limits = GuestLimits::new(Instant::now());
        let now = Instant::now();
        let passed = (0..10_000).filter(|_| limits.take(1, now).is_ok()).count();
        assert_eq!(passed, 400);
        assert_eq!((0..10_000).filter(|_| limits.take(2, now).is_ok()).count(), 400);
        limits.forget_full(now + Duration::from_secs(1));
        assert!((0..10_000).filter(|_| limits.take(1, now + Duration::from_secs(1)).is_ok()).count() <= 20);
        limits.forget_full(now + Duration::from_secs(100));
        assert!(limits.vms.is_empty());
        // All VMs together, for the time for which a journal counts.
        let mut limits = GuestLimits::new(now);
        let second = |second| now + Duration::from_secs(second);
        let passed = (0..30).flat_map(|at| (0..100_000).map(move |line| (at, line % 100)));
        let passed = passed.filter(|(at, vm)| limits.take(*vm, second(*at)).is_ok()).count();
        assert!(passed <= 5000, "{passed} lines");
    }

    // Promise: F72
    #[test]
    fn last_line_of_a_child_without_newline_is_logged_at_its_end() {
        let mut read = Read::new(Some(1));
        rustix::io::write(&read.writer, b"one\nlast words").expect("written");
        let Read { log, writer, guests, start } = &mut read;
        drop(std::mem::replace(writer, std::fs::File::open("/dev/null").expect("a file").into()));
        let mut found = Vec::new();
        let mut out = |line: &[u8]| found.push(String::from_utf8(line.to_owned()).expect("text"));
        while log.read_to(guests, *start, &mut out) != NextRead::End {}
        assert_eq!(found, ["a child: one", "a child: last words"]);
    }
}

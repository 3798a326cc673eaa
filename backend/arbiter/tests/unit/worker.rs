//! A worker in a process of its own: this test's executable, started again. In one file: both ends of its protocol of text. It does what
//! the test tells it by text, and speaks the custody protocol to the arbiter.

#![allow(unsafe_code, reason = "says which of its mappings the driver may touch")]

use crate::host::Listed;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use sluice_driver::{DeviceRange, Driver, Handle, HostRange, Rows};
use sluice_kit::wait::{TIMEOUT, eventually, readable};
use sluice_messages::{
    control::BYTES,
    custody::{CLASSES, CustodyAnswer, CustodyRequest, page, report},
};
use sluice_protocol::limits;
use sluice_shared_memory::{Mapping, Run, mapping::Words, socket};
use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The test's side of a worker.
pub(crate) struct Worker {
    child: Child,
    control: OwnedFd,
    listed: Arc<Mutex<Listed>>,
}

impl Worker {
    pub(crate) fn start(
        driver: &Path,
        environment: &[(&'static str, String)],
        custody: OwnedFd,
        listed: Arc<Mutex<Listed>>,
    ) -> Worker {
        let (control, theirs) = socket::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker::worker_process", "--ignored", "--nocapture"])
            .envs(environment.iter().map(|(name, value)| (*name, value.as_str())))
            .env("ARBITER_TEST_DRIVER", driver)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        socket::send(&control, b"custody", &[custody.as_fd()]).unwrap();
        Worker { child, control, listed }
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command that is not answered, or not yet.
    pub(crate) fn say(&self, what: &str) {
        socket::send(&self.control, what.as_bytes(), &[]).unwrap();
    }

    /// Sends such a command with a descriptor.
    pub(crate) fn say_with(&self, what: &str, descriptor: BorrowedFd<'_>) {
        socket::send(&self.control, what.as_bytes(), &[descriptor]).unwrap();
    }

    pub(crate) fn receive(&self) -> String {
        let mut buffer = [0; 4096];
        assert!(self.speaks_within(TIMEOUT), "no answer");
        let (message, _) = socket::receive(&self.control, &mut buffer).expect("an answer").expect("a worker");
        String::from_utf8(message.to_vec()).unwrap()
    }

    /// True if an answer is there, now or soon.
    pub(crate) fn speaks_within(&self, time: Duration) -> bool {
        readable(&self.control, time)
    }

    pub(crate) fn ask(&self, what: &str) -> String {
        self.say(what);
        let answer = self.receive();
        if (what, answer.as_str()) == ("begin", "0 0") {
            self.listed.lock().unwrap().begun.push(self.process());
        }
        answer
    }

    /// Sends a command; returns the answer as numbers.
    pub(crate) fn numbers(&self, what: &str) -> Vec<u64> {
        let answer = self.ask(what);
        let numbers: Option<Vec<u64>> = answer.split(' ').map(|word| word.parse().ok()).collect();
        numbers.unwrap_or_else(|| panic!("{what}: {answer}"))
    }

    /// Takes a chunk; returns its lease, or the CUresult.
    pub(crate) fn take(&self, bytes: u64) -> Result<u64, u64> {
        match *self.numbers(&format!("take {bytes}")) {
            [0, lease] => Ok(lease),
            [error, _] => Err(error),
            _ => panic!("an answer of two numbers"),
        }
    }

    /// Adds a lease to a share, 0 for a new one; returns the share, or the CUresult.
    pub(crate) fn share(&self, share: u128, lease: u64) -> Result<u128, u32> {
        let answer = self.ask(&format!("share {share} {lease}"));
        match answer.split_once(' ').unwrap() {
            ("0", share) => Ok(share.parse().unwrap()),
            (error, _) => Err(error.parse().unwrap()),
        }
    }

    /// Makes it take a chunk and pass its descriptor on unopened.
    pub(crate) fn hand_on(&self, bytes: u64) -> OwnedFd {
        self.say(&format!("hand-on {bytes}"));
        let mut buffer = [0; 4096];
        assert!(self.speaks_within(TIMEOUT), "no answer");
        let (_, mut descriptors) = socket::receive(&self.control, &mut buffer).unwrap().expect("a worker");
        descriptors.pop().expect("the chunk's descriptor")
    }

    /// The answer to a `want` that was sent at `asked`; the memory is there now. If a busy machine delayed the test until here for longer
    /// than a take waits, the next take must get it.
    pub(crate) fn lent(&self, bytes: u64, asked: Instant) -> Result<u64, u64> {
        let late = asked.elapsed() >= Duration::from_millis(limits::TAKE_MILLISECONDS);
        match *self.numbers("lent") {
            [0, lease] => Ok(lease),
            [error, _] if !late => Err(error),
            [_, _] => self.take(bytes),
            _ => panic!("an answer of two numbers"),
        }
    }

    /// Takes all free memory; returns the bytes.
    pub(crate) fn take_all(&self) -> u64 {
        self.numbers("take-all")[0]
    }

    /// Takes all free memory until the sum reaches `bytes`: it waits for memory to become clean, but not for ever.
    pub(crate) fn take_in_all(&self, bytes: u64) -> u64 {
        let mut taken = 0;
        eventually("all of it", || {
            taken += self.take_all();
            taken >= bytes
        });
        taken
    }

    /// Free and total bytes as its guest would see them.
    pub(crate) fn info(&self) -> (u64, u64) {
        let numbers = self.numbers("info");
        (numbers[0], numbers[1])
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end, which another process causes.
    pub(crate) fn is_killed(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Chunk {
    handle: Handle,
    address: u64,
    bytes: u64,
}

/// The worker's side.
struct Played {
    driver: Option<Driver>,
    custody: OwnedFd,
    page: Words,
    report: Words,
    wake_fd: OwnedFd,
    chunks: BTreeMap<u64, Chunk>,
    /// Chunks that it reported as given back but kept.
    secret: Vec<Chunk>,
    answers: VecDeque<(CustodyAnswer, Vec<OwnedFd>)>,
    serial: u64,
    /// Descriptors for the test with the next answer.
    handed: Vec<OwnedFd>,
    /// Descriptors that came from the test with the command.
    given: Vec<OwnedFd>,
}

fn receive(custody: &OwnedFd) -> (CustodyAnswer, Vec<OwnedFd>) {
    let mut buffer = [0; BYTES];
    let (message, descriptors) =
        socket::receive(custody, &mut buffer).expect("an answer").expect("the arbiter lives");
    let answer = CustodyAnswer::decode(message).unwrap();
    assert_eq!(descriptors.len(), answer.descriptors());
    (answer, descriptors)
}

impl Played {
    fn send(&self, request: CustodyRequest) {
        socket::send(&self.custody, &request.encode(), &[]).expect("the arbiter lives");
    }

    fn next(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// The answer to a request; unrequested messages are kept.
    fn answer(&mut self, wanted: u64) -> (CustodyAnswer, Vec<OwnedFd>) {
        loop {
            let (answer, descriptors) = receive(&self.custody);
            match answer {
                CustodyAnswer::Lent { serial, .. }
                | CustodyAnswer::Granted { serial, .. }
                | CustodyAnswer::Refused { serial, .. }
                | CustodyAnswer::Process { serial, .. }
                | CustodyAnswer::Shared { serial, .. }
                    if serial == wanted =>
                {
                    return (answer, descriptors);
                }
                _ => self.answers.push_back((answer, descriptors)),
            }
        }
    }

    fn plain(&mut self, request: impl FnOnce(u64) -> CustodyRequest) -> String {
        let serial = self.next();
        self.send(request(serial));
        match self.answer(serial).0 {
            CustodyAnswer::Granted { value, .. } => format!("0 {value}"),
            CustodyAnswer::Refused { error, .. } => format!("{error} 0"),
            CustodyAnswer::Process { process, bytes, .. } => format!("{process} {bytes}"),
            CustodyAnswer::Shared { share, .. } => format!("0 {share}"),
            other => panic!("{other:?}"),
        }
    }

    /// Requests a grant and reports an empty margin.
    fn grow(&mut self, reason: u32, bytes: u64) -> String {
        let granted = self.plain(|serial| CustodyRequest::Grow { serial, reason, bytes, spent: u64::MAX });
        if granted.starts_with("0 ") { "0 0".to_owned() } else { granted }
    }

    fn driver(&self) -> &Driver {
        self.driver.as_ref().expect("begun")
    }

    /// Starts the driver, with a grant for its context.
    fn begin(&mut self) -> String {
        let granted = self.grow(0, 0);
        if granted != "0 0" {
            return granted;
        }
        let path = std::env::var("ARBITER_TEST_DRIVER").unwrap();
        let driver = Driver::load(Path::new(&path)).unwrap();
        driver.init().unwrap();
        let context = driver.primary_retain(0, 0).unwrap();
        driver.set_current(context).unwrap();
        self.driver = Some(driver);
        self.send(CustodyRequest::Grown { serial: self.serial });
        granted
    }

    fn import(&mut self, lease: u64, bytes: u64, descriptor: &OwnedFd) {
        let driver = self.driver();
        let handle = driver.chunk_import(descriptor.as_fd()).unwrap();
        let address = driver.address_reserve(0, bytes).unwrap();
        driver.map(address, bytes, handle).unwrap();
        driver.allow(address, bytes, 0).unwrap();
        self.chunks.insert(lease, Chunk { handle, address, bytes });
    }

    fn take(&mut self, bytes: u64) -> Result<u64, u32> {
        let serial = self.next();
        self.send(CustodyRequest::Take { serial, bytes });
        self.lent(serial)
    }

    fn lent(&mut self, serial: u64) -> Result<u64, u32> {
        match self.answer(serial) {
            (CustodyAnswer::Lent { lease, bytes, .. }, descriptors) => {
                if self.driver.is_some() {
                    self.import(lease, bytes, &descriptors[0]);
                }
                Ok(lease)
            }
            (CustodyAnswer::Refused { error, .. }, _) => Err(error),
            (other, _) => panic!("{other:?}"),
        }
    }

    fn open(&mut self, share: u128) -> String {
        let serial = self.next();
        self.send(CustodyRequest::Open { serial, share });
        let mut count = 0;
        loop {
            match self.answer(serial) {
                (CustodyAnswer::Lent { lease, bytes, more, .. }, descriptors) => {
                    self.import(lease, bytes, &descriptors[0]);
                    count += 1;
                    if !more {
                        return format!("0 {count}");
                    }
                }
                (CustodyAnswer::Refused { error, .. }, _) => return format!("{error} {count}"),
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    fn unmap(&self, chunk: &Chunk) {
        let driver = self.driver();
        driver.unmap(chunk.address, chunk.bytes).unwrap();
        driver.address_free(chunk.address, chunk.bytes).unwrap();
        driver.cuMemRelease(chunk.handle).unwrap();
    }

    fn fill(&self, chunks: impl Iterator<Item = (u64, u64)>, tag: u32) {
        for (address, bytes) in chunks {
            let rows = Rows { pitch: 0, width: bytes / 4, height: 1 };
            // SAFETY: a mapping of this process.
            let all = unsafe { DeviceRange::new(address, bytes) };
            self.driver().memset(all, 4, tag, rows, 0).unwrap();
        }
        self.driver().cuStreamSynchronize(0).unwrap();
    }

    /// Counts the words that are `tag`, and those that are not zero.
    fn scan(&self, tag: u32) -> (u64, u64) {
        let (mut hits, mut dirt) = (0, 0);
        let mut buffer = vec![0xff_u8; 2 << 20];
        for chunk in self.chunks.values() {
            for at in (0..chunk.bytes).step_by(buffer.len()) {
                let bytes = buffer.len() as u64;
                // SAFETY: the buffer, which is not read before the stream has completed.
                let to = unsafe { HostRange::new(buffer.as_mut_ptr().expose_provenance() as u64, bytes) };
                // SAFETY: a mapping of this process.
                let from = unsafe { DeviceRange::new(chunk.address + at, bytes) };
                self.driver().memcpy_dtoh(to, from, 0).unwrap();
                self.driver().cuStreamSynchronize(0).unwrap();
                for word in buffer.as_chunks::<4>().0 {
                    let word = u32::from_le_bytes(*word);
                    hits += u64::from(word == tag);
                    dirt += u64::from(word != 0);
                }
            }
        }
        (hits, dirt)
    }

    fn obey(&mut self, command: &str) -> Option<String> {
        let mut words = command.split(' ');
        let verb = words.next()?;
        let large: Vec<u128> = words.map(|word| word.parse().unwrap()).collect();
        let share = large.first().copied().unwrap_or(0);
        let numbers: Vec<u64> =
            large.iter().map(|number| u64::try_from(*number).unwrap_or(u64::MAX)).collect();
        let number = |index: usize| numbers.get(index).copied().unwrap_or(0);
        let small = |index: usize| u32::try_from(number(index)).unwrap();
        Some(match verb {
            "begin" => self.begin(),
            "take" => match self.take(number(0)) {
                Ok(lease) => format!("0 {lease}"),
                Err(error) => format!("{error} 0"),
            },
            "hand-on" => {
                let serial = self.next();
                self.send(CustodyRequest::Take { serial, bytes: number(0) });
                let (answer, descriptors) = self.answer(serial);
                assert!(matches!(answer, CustodyAnswer::Lent { .. }), "{answer:?}");
                self.handed = descriptors;
                "0".to_owned()
            }
            "take-all" => {
                let held = |played: &Played| played.chunks.values().map(|chunk| chunk.bytes).sum::<u64>();
                let before = held(self);
                for class in CLASSES {
                    while self.take(class).is_ok() {}
                }
                (held(self) - before).to_string()
            }
            "take-only" => {
                let mut count = 0_u64;
                while self.take(number(0)).is_ok() {
                    count += 1;
                }
                count.to_string()
            }
            // Answered by `lent`.
            "want" => {
                let serial = self.next();
                self.send(CustodyRequest::Take { serial, bytes: number(0) });
                return None;
            }
            "lent" => match self.lent(self.serial) {
                Ok(lease) => format!("0 {lease}"),
                Err(error) => format!("{error} 0"),
            },
            "give" => {
                let chunk = self.chunks.remove(&number(0)).unwrap();
                self.unmap(&chunk);
                self.send(CustodyRequest::Give { lease: number(0) });
                "0".to_owned()
            }
            // Gives back a chunk that was never imported.
            "give-only" => {
                self.send(CustodyRequest::Give { lease: number(0) });
                "0".to_owned()
            }
            // Sends the descriptors that the test passed.
            "strange" => {
                let request = CustodyRequest::Idle { bytes: 0 }.encode();
                let given = core::mem::take(&mut self.given);
                let strange: Vec<_> = given.iter().map(AsFd::as_fd).collect();
                socket::send(&self.custody, &request, &strange).unwrap();
                "0".to_owned()
            }
            "lie" => {
                let chunk = self.chunks.remove(&number(0)).unwrap();
                self.secret.push(chunk);
                self.send(CustodyRequest::Give { lease: number(0) });
                "0".to_owned()
            }
            "forge" => {
                self.send(CustodyRequest::Give { lease: number(0) });
                return None;
            }
            "fill" => {
                self.fill(self.chunks.values().map(|chunk| (chunk.address, chunk.bytes)), small(0));
                "0".to_owned()
            }
            "poke" => {
                self.fill(self.secret.iter().map(|chunk| (chunk.address, chunk.bytes)), small(0));
                "0".to_owned()
            }
            "scan" => {
                let (hits, dirt) = self.scan(small(0));
                format!("{hits} {dirt}")
            }
            "info" => {
                let (free, total) = page::memory(&self.page);
                format!("{free} {total}")
            }
            "idle" => {
                self.send(CustodyRequest::Idle { bytes: number(0) });
                "0".to_owned()
            }
            "recalled" => loop {
                let kept = self.answers.iter().find_map(|(answer, _)| match answer {
                    CustodyAnswer::Recall { bytes } => Some(*bytes),
                    _ => None,
                });
                if let Some(bytes) = kept {
                    self.answers.clear();
                    break bytes.to_string();
                }
                let next = receive(&self.custody);
                self.answers.push_back(next);
            },
            "pin" => self.plain(|serial| CustodyRequest::Pin { serial, bytes: number(0) }),
            "unpin" => {
                self.send(CustodyRequest::Unpin { bytes: number(0) });
                "0".to_owned()
            }
            "grow" => self.plain(|serial| CustodyRequest::Grow {
                serial,
                reason: small(0),
                bytes: number(1),
                spent: 0,
            }),
            "grown" => {
                self.send(CustodyRequest::Grown { serial: number(0) });
                "0".to_owned()
            }
            "serial" => self.serial.to_string(),
            "share" => self.plain(|serial| CustodyRequest::Share { serial, share, lease: number(1) }),
            "open" => self.open(share),
            // Opens a share until that is refused, without reading the memory.
            "open-many" => {
                let mut count = 0_u64;
                loop {
                    let serial = self.next();
                    self.send(CustodyRequest::Open { serial, share });
                    match self.answer(serial) {
                        (CustodyAnswer::Lent { .. }, _) => count += 1,
                        (CustodyAnswer::Refused { error: 2, .. }, _) => break count.to_string(),
                        (other, _) => panic!("{other:?}"),
                    }
                }
            }
            // Opens every number from 1 to the first word; returns the number of shares among them.
            "guess" => {
                let found = (1..=share).filter(|share| self.open(*share).starts_with("0 ")).count();
                found.to_string()
            }
            "hello" => {
                self.send(CustodyRequest::Hello { process: small(0) });
                "0".to_owned()
            }
            "list" => self.plain(|serial| CustodyRequest::Process { serial, index: small(0) }),
            "permit" => {
                use sluice_protocol::shared::Shared as _;
                self.page.load_u32(page::PERMIT, std::sync::atomic::Ordering::Acquire).to_string()
            }
            "waits" => {
                use sluice_protocol::shared::Shared as _;
                self.report.store_u32(report::WAITING, small(0), std::sync::atomic::Ordering::SeqCst);
                rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes()).unwrap();
                "0".to_owned()
            }
            "flies" => {
                use sluice_protocol::shared::Shared as _;
                self.report.store_u64(report::BEGUN, number(0), std::sync::atomic::Ordering::SeqCst);
                self.report.store_u64(report::ENDED, number(1), std::sync::atomic::Ordering::SeqCst);
                rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes()).unwrap();
                "0".to_owned()
            }
            "frees" => {
                use sluice_protocol::shared::Shared as _;
                self.report.store_u64(report::FREED, number(0), std::sync::atomic::Ordering::SeqCst);
                rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes()).unwrap();
                "0".to_owned()
            }
            "did" => {
                use sluice_protocol::shared::Shared as _;
                let words = [report::LAUNCHES, report::COPIES, report::COPIED, report::CALLS];
                for (place, at) in words.into_iter().enumerate() {
                    self.report.store_u64(at, number(place), std::sync::atomic::Ordering::Release);
                }
                "0".to_owned()
            }
            "flood" => {
                // Never reads an answer.
                loop {
                    let serial = self.next();
                    self.send(CustodyRequest::Take { serial, bytes: CLASSES[2] });
                }
            }
            other => panic!("{other}?"),
        })
    }
}

/// Not a test: the body of [`Worker::start`]'s process.
#[test]
#[ignore = "the body of worker processes"]
fn worker_process() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut buffer = [0; 4096];
    let (_, mut descriptors) = socket::receive(&control, &mut buffer).unwrap().unwrap();
    let custody = descriptors.pop().unwrap();
    let (welcome, descriptors) = match socket::receive(&custody, &mut buffer) {
        Ok(Some((message, descriptors))) => (CustodyAnswer::decode(message).unwrap(), descriptors),
        // It is refused. Panics of many such processes would load the machine with their traces.
        Ok(None) | Err(_) => std::process::exit(1),
    };
    assert_eq!(descriptors.len(), welcome.descriptors());
    let CustodyAnswer::Welcome { limit, .. } = welcome else { panic!("{welcome:?}") };
    let run = Run { offset: 0, bytes: page::BYTES as u64 };
    let writable = Mapping::scattered(0, run.bytes, [(descriptors[0].as_fd(), run)]);
    assert!(writable.is_err(), "the custody page can be mapped writable");
    // SAFETY: a mapping at the kernel's choice.
    let at = unsafe {
        mmap(std::ptr::null_mut(), page::BYTES, ProtFlags::READ, MapFlags::SHARED, &descriptors[0], 0)
    }
    .unwrap();
    // SAFETY: the mapping above, which stays; it is only read.
    let page = unsafe { Words::new(at.expose_provenance(), page::BYTES) };
    assert_eq!(page::memory(&page).1, limit);
    let writable = Mapping::scattered(0, run.bytes, [(descriptors[1].as_fd(), run)]).unwrap();
    let report = writable.words();
    // It stays as long as the process.
    std::mem::forget(writable);
    let wake_fd = descriptors[2].try_clone().unwrap();
    let mut played = Played {
        driver: None,
        custody,
        page,
        report,
        wake_fd,
        chunks: BTreeMap::new(),
        secret: Vec::new(),
        answers: VecDeque::new(),
        serial: 0,
        handed: Vec::new(),
        given: Vec::new(),
    };
    while let Ok(Some((message, given))) = socket::receive(&control, &mut buffer) {
        played.given = given;
        let command = std::str::from_utf8(message).unwrap().to_owned();
        if let Some(answer) = played.obey(&command) {
            let handed = core::mem::take(&mut played.handed);
            let descriptors: Vec<_> = handed.iter().map(AsFd::as_fd).collect();
            socket::send(&control, answer.as_bytes(), &descriptors).unwrap();
        }
    }
    // The test is over.
    std::process::exit(0);
}

//! Plays the arbiter of one device for the workers of one VM. Chunks of the null driver are made in this process; those of
//! the software GPU, which is configured by the environment, in one of their own: [`Elsewhere`].

use crate::guest::null_driver;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use sluice_driver::Driver;
use sluice_messages::{
    control::{self, BYTES},
    custody::{Answer, Request, UNIT, page, report},
};
use sluice_protocol::shared::Shared;
use sluice_shared_memory::{Mapping, Run, socket};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

static NULL_DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| loaded(&null_driver()));

fn loaded(path: &Path) -> Arc<Driver> {
    let driver = Driver::load(path).expect("the driver loads");
    driver.init().expect("the driver starts");
    Arc::new(driver)
}

/// What [`Terms::ballast`] leaves free for what drivers take without asking.
const RESERVE: u64 = 8 << 20;

/// What a lender allows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// Bytes of chunks, 0 for many.
    pub(crate) limit: u64,
    /// Bytes that one growth of a driver may ask for, 0 for any.
    pub(crate) headroom: u64,
    /// Whether the device's free memory is kept occupied, and released for growth only.
    pub(crate) ballast: bool,
    /// Bytes that a driver may take beside each grant without asking.
    pub(crate) margin: u64,
}

const OUT_OF_MEMORY: u32 = 2;
const INVALID_VALUE: u32 = 1;

#[derive(Debug)]
struct Books {
    driver: Arc<Driver>,
    limit: u64,
    headroom: u64,
    margin: u64,
    /// Chunks that only occupy memory.
    ballast: Option<Vec<u64>>,
    /// Chunks by handle: bytes and leases on them.
    chunks: BTreeMap<u64, (u64, u32)>,
    leases: BTreeMap<u64, u64>,
    shares: BTreeMap<u128, Vec<u64>>,
    next: u64,
    tenants: Vec<Arc<Tenant>>,
    pinned: u64,
    /// Reasons of all grants and bytes asked for, and how many are open.
    grown: Vec<(u32, u64)>,
    growing: u32,
    /// How often a worker said that its driver has given something back.
    shrunk: u32,
}

#[derive(Debug)]
struct Tenant {
    page: Mapping,
    socket: OwnedFd,
    process: AtomicU32,
    idle: Mutex<u64>,
    /// Leases of this worker and their bytes.
    held: Mutex<BTreeMap<u64, u64>>,
}

/// The lender of one device to one VM.
#[derive(Clone, Debug)]
pub(crate) struct Lender {
    books: Arc<Mutex<Books>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lender {
    pub(crate) fn new(limit: u64) -> Lender {
        Lender::with(Terms { limit, ..Terms::default() })
    }

    pub(crate) fn with(terms: Terms) -> Lender {
        Lender::of(Arc::clone(&NULL_DRIVER), terms)
    }

    fn of(driver: Arc<Driver>, terms: Terms) -> Lender {
        let mut books = Books {
            driver,
            limit: if terms.limit == 0 { 16 << 30 } else { terms.limit / UNIT * UNIT },
            headroom: terms.headroom,
            margin: terms.margin,
            ballast: terms.ballast.then(Vec::new),
            chunks: BTreeMap::new(),
            leases: BTreeMap::new(),
            shares: BTreeMap::new(),
            next: 0,
            tenants: Vec::new(),
            pinned: 0,
            grown: Vec::new(),
            growing: 0,
            shrunk: 0,
        };
        books.occupy();
        Lender { books: Arc::new(Mutex::new(books)) }
    }

    /// Bytes of all chunks lent.
    pub(crate) fn lent(&self) -> u64 {
        lock(&self.books).chunks.values().map(|(bytes, _)| bytes).sum()
    }

    /// Bytes said to be pinned.
    pub(crate) fn pinned(&self) -> u64 {
        lock(&self.books).pinned
    }

    /// Why grants were asked for, and how many are not over.
    pub(crate) fn grants(&self) -> (Vec<u32>, u32) {
        let books = lock(&self.books);
        (books.grown.iter().map(|(reason, _)| *reason).collect(), books.growing)
    }

    /// How often a worker said that its driver has given something back.
    pub(crate) fn shrunk(&self) -> u32 {
        lock(&self.books).shrunk
    }

    /// Bytes of the last grant.
    pub(crate) fn last_grant(&self) -> u64 {
        lock(&self.books).grown.last().map_or(0, |(_, bytes)| *bytes)
    }

    /// Wants memory back from every worker.
    pub(crate) fn recall(&self, bytes: u64) {
        for tenant in &lock(&self.books).tenants {
            socket::send(&tenant.socket, &Answer::Recall { bytes }.encode(), &[]).expect("recall");
        }
    }

    /// Goes away.
    pub(crate) fn hang_up(&self) {
        for tenant in &lock(&self.books).tenants {
            rustix::net::shutdown(&tenant.socket, rustix::net::Shutdown::Both).expect("shutdown");
        }
    }

    /// The worker's end of a custody socket.
    pub(crate) fn admit(&self) -> OwnedFd {
        self.admit_as(control::VERSION)
    }

    /// The same, of a lender of this version.
    pub(crate) fn admit_as(&self, version: u32) -> OwnedFd {
        let (ours, theirs) = socket::pair().expect("socket pair");
        self.admit_at(ours, version);
        theirs
    }

    fn admit_at(&self, ours: OwnedFd, version: u32) {
        let bytes = page::BYTES as u64;
        let file = memfd_create("custody", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
        ftruncate(&file, bytes).expect("truncate");
        let page = Mapping::scattered(0, bytes, [(file.as_fd(), Run { offset: 0, bytes })]).expect("maps");
        fcntl_add_seals(
            &file,
            SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
        )
        .expect("seals");
        let tenant = Arc::new(Tenant {
            page,
            socket: ours,
            process: AtomicU32::new(0),
            idle: Mutex::default(),
            held: Mutex::default(),
        });
        let mut books = lock(&self.books);
        books.tenants.push(Arc::clone(&tenant));
        publish(&books);
        let limit = books.limit;
        drop(books);
        tenant.page.words().store_u64(page::MAGIC_AT, page::MAGIC, Ordering::Release);
        // Time is no matter here: the permit is as good as open for ever, and nobody listens.
        tenant.page.words().store_u32(page::PERMIT, page::TELL - 1, Ordering::Release);
        let welcome = Answer::Welcome { unit: 0, epoch: 1, limit, version };
        let report = memfd_create("report", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&report, report::BYTES as u64).expect("truncate");
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let sent = [file.as_fd(), report.as_fd(), bell.as_fd()];
        socket::send(&tenant.socket, &welcome.encode(), &sent).expect("welcome");
        let lender = self.clone();
        std::thread::spawn(move || lender.serve(&tenant));
    }

    fn serve(&self, tenant: &Arc<Tenant>) {
        let mut buffer = [0; BYTES];
        while let Ok(Some((bytes, descriptors))) = socket::receive(&tenant.socket, &mut buffer) {
            assert!(descriptors.is_empty());
            let request = Request::decode(bytes).expect("a request");
            let mut books = lock(&self.books);
            let answers = books.take_in(tenant, request);
            publish(&books);
            let driver = Arc::clone(&books.driver);
            for (answer, chunk) in answers {
                let exported = chunk.map(|chunk| driver.chunk_export(chunk).expect("exports"));
                let exported: Vec<_> = exported.iter().map(|file| file.as_fd()).collect();
                // A worker that is gone needs no answer.
                let _ = socket::send(&tenant.socket, &answer.encode(), &exported);
            }
        }
        let mut books = lock(&self.books);
        let held = core::mem::take(&mut *lock(&tenant.held));
        held.into_keys().for_each(|lease| books.end(lease));
        books.tenants.retain(|other| !Arc::ptr_eq(other, tenant));
        publish(&books);
    }
}

fn publish(books: &Books) {
    let lent: u64 = books.chunks.values().map(|(bytes, _)| bytes).sum();
    let idle: u64 = books.tenants.iter().map(|tenant| *lock(&tenant.idle)).sum();
    for tenant in &books.tenants {
        tenant.page.words().store_u64(page::LIMIT, books.limit, Ordering::Release);
        tenant.page.words().store_u64(page::USED, lent - idle, Ordering::Release);
        tenant.page.words().store_u32(page::OPEN, u32::from(books.margin > 0), Ordering::Release);
    }
}

type Answers = Vec<(Answer, Option<u64>)>;

impl Books {
    fn lease(&mut self, tenant: &Tenant, chunk: u64) -> u64 {
        self.next += 1;
        self.leases.insert(self.next, chunk);
        let (bytes, leases) = self.chunks.get_mut(&chunk).expect("known");
        *leases += 1;
        lock(&tenant.held).insert(self.next, *bytes);
        self.next
    }

    fn end(&mut self, lease: u64) {
        let chunk = self.leases.remove(&lease).expect("a lease");
        let (_, leases) = self.chunks.get_mut(&chunk).expect("known");
        *leases -= 1;
        if *leases == 0 {
            self.chunks.remove(&chunk);
            self.driver.chunk_release(chunk).expect("releases");
        }
    }

    /// Takes what the device has left above the reserve, if that is wanted.
    fn occupy(&mut self) {
        let Some(ballast) = &mut self.ballast else { return };
        while let Ok(chunk) = self.driver.chunk_create(UNIT, 0) {
            ballast.push(chunk);
        }
        self.make_room(RESERVE);
    }

    /// Gives up so much of it.
    fn make_room(&mut self, bytes: u64) {
        let Some(ballast) = &mut self.ballast else { return };
        let count = usize::try_from(bytes.div_ceil(UNIT)).unwrap_or(usize::MAX).min(ballast.len());
        for chunk in ballast.drain(..count) {
            self.driver.chunk_release(chunk).expect("releases");
        }
    }

    fn take_in(&mut self, tenant: &Arc<Tenant>, request: Request) -> Answers {
        match request {
            Request::Hello { process } => {
                tenant.process.store(process, Ordering::Relaxed);
                Vec::new()
            }
            Request::Take { serial, bytes } => {
                let lent: u64 = self.chunks.values().map(|(bytes, _)| bytes).sum();
                if lent + bytes > self.limit {
                    return vec![(Answer::Refused { serial, error: OUT_OF_MEMORY }, None)];
                }
                self.make_room(bytes);
                let chunk = match self.driver.chunk_create(bytes, 0) {
                    Ok(chunk) => chunk,
                    Err(error) => return vec![(Answer::Refused { serial, error }, None)],
                };
                self.chunks.insert(chunk, (bytes, 0));
                let lease = self.lease(tenant, chunk);
                vec![(Answer::Lent { serial, lease, bytes, more: false }, Some(chunk))]
            }
            Request::Give { lease } => {
                assert!(lock(&tenant.held).remove(&lease).is_some(), "its own lease");
                self.end(lease);
                Vec::new()
            }
            Request::Idle { bytes } => {
                assert!(bytes <= lock(&tenant.held).values().sum(), "no more than it holds");
                *lock(&tenant.idle) = bytes;
                Vec::new()
            }
            Request::Grow { serial, reason, bytes, left } => {
                if self.headroom > 0 && bytes > self.headroom {
                    return vec![(Answer::Refused { serial, error: OUT_OF_MEMORY }, None)];
                }
                self.make_room(bytes);
                self.grown.push((reason, bytes));
                self.growing += 1;
                vec![(Answer::Granted { serial, value: self.margin.saturating_sub(left) }, None)]
            }
            Request::Shrunk { .. } => {
                self.shrunk += 1;
                Vec::new()
            }
            Request::Grown { .. } => {
                self.growing -= 1;
                self.occupy();
                Vec::new()
            }
            Request::Share { serial, share, lease } => {
                // Wider than one word, as real ones are.
                let share = if share == 0 { (1 << 64) + u128::from(self.shares.len() as u64) } else { share };
                let chunk = self.leases[&lease];
                self.shares.entry(share).or_default().push(chunk);
                vec![(Answer::Shared { serial, share }, None)]
            }
            Request::Unshare { share } => {
                self.shares.insert(share, Vec::new());
                Vec::new()
            }
            Request::Open { serial, share } => {
                let chunks = self.shares.get(&share).cloned().unwrap_or_default();
                if chunks.is_empty() {
                    return vec![(Answer::Refused { serial, error: INVALID_VALUE }, None)];
                }
                let count = chunks.len();
                let lend = |(at, chunk)| {
                    let lease = self.lease(tenant, chunk);
                    let (bytes, more) = (self.chunks[&chunk].0, at + 1 < count);
                    (Answer::Lent { serial, lease, bytes, more }, Some(chunk))
                };
                chunks.into_iter().enumerate().map(lend).collect()
            }
            Request::Pin { serial, bytes } => {
                self.pinned += bytes;
                vec![(Answer::Granted { serial, value: 0 }, None)]
            }
            Request::Unpin { bytes } => {
                self.pinned -= bytes;
                Vec::new()
            }
            Request::Process { serial, index } => {
                let answer = match self.tenants.get(index as usize) {
                    Some(of) => {
                        let bytes = lock(&of.held).values().sum::<u64>() - *lock(&of.idle);
                        Answer::Process { serial, process: of.process.load(Ordering::Relaxed), bytes }
                    }
                    None => Answer::Refused { serial, error: INVALID_VALUE },
                };
                vec![(answer, None)]
            }
        }
    }
}

/// A lender in a process of its own, with a driver and an environment of its own.
#[derive(Debug)]
pub(crate) struct Elsewhere {
    process: Child,
    control: OwnedFd,
}

/// Names the driver to the process of an [`Elsewhere`].
const DRIVER_VARIABLE: &str = "SLUICE_TEST_LENDER_DRIVER";

impl Elsewhere {
    pub(crate) fn start(driver: &Path, environment: &[(&str, &OsStr)], terms: Terms) -> Elsewhere {
        let (control, theirs) = socket::pair().expect("socket pair");
        let process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "lender::a_process_that_lends", "--nocapture"])
            .env(DRIVER_VARIABLE, driver)
            .envs(environment.iter().copied())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .expect("this program starts again");
        let terms = [terms.limit, terms.headroom, u64::from(terms.ballast)].map(u64::to_le_bytes).concat();
        socket::send(&control, &terms, &[]).expect("terms");
        Elsewhere { process, control }
    }

    /// The worker's end of a custody socket.
    pub(crate) fn admit(&self) -> OwnedFd {
        let (ours, theirs) = socket::pair().expect("socket pair");
        socket::send(&self.control, b"admit", &[ours.as_fd()]).expect("a lender");
        theirs
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        // It is gone already where it failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// No test: the process of an [`Elsewhere`]. Started by anybody else, it does nothing.
#[test]
fn a_process_that_lends() {
    let Some(driver) = std::env::var_os(DRIVER_VARIABLE) else { return };
    let control = rustix::io::dup(rustix::stdio::stdin()).expect("a socket");
    let mut buffer = [0; BYTES];
    let (bytes, _) = socket::receive(&control, &mut buffer).expect("receive").expect("terms");
    let word = |at| bytes[at..].first_chunk().copied().map(u64::from_le_bytes).expect("a word");
    let terms = Terms { limit: word(0), headroom: word(8), ballast: word(16) != 0, ..Terms::default() };
    let lender = Lender::of(loaded(&PathBuf::from(driver)), terms);
    while let Ok(Some((_, descriptors))) = socket::receive(&control, &mut buffer) {
        descriptors.into_iter().for_each(|ours| lender.admit_at(ours, control::VERSION));
    }
}

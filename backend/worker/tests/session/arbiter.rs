//! A fake arbiter of one device for the workers of one VM. Chunks of the null driver are made in this process; those of the
//! software GPU, which is configured by the environment, in a separate one: [`Elsewhere`].

use crate::{
    code::{INVALID_VALUE, OUT_OF_MEMORY},
    guest::null_driver,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use sluice_driver::Driver;
use sluice_kit::wait::{TIMEOUT, eventually, readable};
use sluice_messages::{
    control::{self, BYTES},
    custody::{CustodyAnswer, CustodyRequest, UNIT, page, report},
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
    time::Duration,
};

static NULL_DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| loaded(&null_driver()));

fn loaded(path: &Path) -> Arc<Driver> {
    let driver = Driver::load(path).expect("the driver loads");
    driver.init().expect("the driver starts");
    Arc::new(driver)
}

/// Memory that [`Terms::ballast`] leaves free for driver memory without a grant.
const RESERVE: u64 = 8 << 20;

/// The memory that an arbiter allows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// Bytes of chunks, 0 for many.
    pub(crate) limit: u64,
    /// Bytes that one growth of a driver may request, 0 for any.
    pub(crate) headroom: u64,
    /// True if the device's free memory is kept occupied, and released for growth only.
    pub(crate) ballast: bool,
    /// Bytes that a driver may take beyond each grant without a request.
    pub(crate) margin: u64,
}

#[derive(Debug)]
struct MemoryCounts {
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
    /// The reason and the bytes of every grant, and the number of open grants.
    grown: Vec<(u32, u64)>,
    growing: u32,
    /// The bytes of every `Shrunk` message.
    shrunk: Vec<u64>,
}

#[derive(Debug)]
struct Tenant {
    page: Mapping,
    socket: OwnedFd,
    process: AtomicU32,
    idle: Mutex<u64>,
    /// Bytes of the margins of all its grants.
    margins: Mutex<u64>,
    /// Leases of this worker and their bytes.
    held: Mutex<BTreeMap<u64, u64>>,
}

/// The arbiter of one device, for one VM.
#[derive(Clone, Debug)]
pub(crate) struct FakeArbiter {
    books: Arc<Mutex<MemoryCounts>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeArbiter {
    pub(crate) fn new(limit: u64) -> FakeArbiter {
        FakeArbiter::with(Terms { limit, ..Terms::default() })
    }

    pub(crate) fn with(terms: Terms) -> FakeArbiter {
        FakeArbiter::of(Arc::clone(&NULL_DRIVER), terms)
    }

    fn of(driver: Arc<Driver>, terms: Terms) -> FakeArbiter {
        let mut books = MemoryCounts {
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
            shrunk: Vec::new(),
        };
        books.occupy();
        FakeArbiter { books: Arc::new(Mutex::new(books)) }
    }

    /// The books once they contain all that the workers have sent: some messages have no answer that a test could wait for.
    fn current(&self) -> MutexGuard<'_, MemoryCounts> {
        let is_unread = |tenant: &Arc<Tenant>| readable(&tenant.socket, Duration::ZERO);
        eventually("every message is read", || !lock(&self.books).tenants.iter().any(is_unread));
        lock(&self.books)
    }

    /// Bytes of all chunks lent.
    pub(crate) fn lent(&self) -> u64 {
        self.current().chunks.values().map(|(bytes, _)| bytes).sum()
    }

    /// Bytes that workers reported as pinned.
    pub(crate) fn pinned(&self) -> u64 {
        self.current().pinned
    }

    /// The reasons of all grants, and the number of open ones.
    pub(crate) fn grants(&self) -> (Vec<u32>, u32) {
        let books = self.current();
        (books.grown.iter().map(|(reason, _)| *reason).collect(), books.growing)
    }

    /// The number of `Shrunk` messages.
    pub(crate) fn shrunk(&self) -> usize {
        self.current().shrunk.len()
    }

    /// Bytes of all grants that workers have not reported as given back.
    pub(crate) fn granted_now(&self) -> u64 {
        let books = self.current();
        let granted: u64 = books.grown.iter().map(|(_, bytes)| bytes).sum();
        granted - books.shrunk.iter().sum::<u64>()
    }

    /// Bytes of the last grant.
    pub(crate) fn last_grant(&self) -> u64 {
        self.current().grown.last().map_or(0, |(_, bytes)| *bytes)
    }

    /// Recalls memory from every worker.
    pub(crate) fn recall(&self, bytes: u64) {
        for tenant in &lock(&self.books).tenants {
            socket::send(&tenant.socket, &CustodyAnswer::Recall { bytes }.encode(), &[]).expect("recall");
        }
    }

    /// Closes every custody socket.
    pub(crate) fn hang_up(&self) {
        for tenant in &lock(&self.books).tenants {
            rustix::net::shutdown(&tenant.socket, rustix::net::Shutdown::Both).expect("shutdown");
        }
    }

    /// The worker's end of a custody socket.
    pub(crate) fn admit(&self) -> OwnedFd {
        self.admit_as(control::VERSION)
    }

    /// As [`FakeArbiter::admit`], with this version in the first message.
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
            margins: Mutex::default(),
            held: Mutex::default(),
        });
        let mut books = lock(&self.books);
        books.tenants.push(Arc::clone(&tenant));
        publish(&books);
        let limit = books.limit;
        drop(books);
        tenant.page.words().store_u64(page::MAGIC_AT, page::MAGIC, Ordering::Release);
        // Time does not matter here: the permit is open for ever, and no thread reads the eventfd.
        tenant.page.words().store_u32(page::PERMIT, page::TELL - 1, Ordering::Release);
        let welcome = CustodyAnswer::Welcome { unit: 0, epoch: 1, limit, version };
        let report = memfd_create("report", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&report, report::BYTES as u64).expect("truncate");
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let sent = [file.as_fd(), report.as_fd(), wake_fd.as_fd()];
        socket::send(&tenant.socket, &welcome.encode(), &sent).expect("welcome");
        let arbiter = self.clone();
        std::thread::spawn(move || arbiter.serve(&tenant));
    }

    fn serve(&self, tenant: &Arc<Tenant>) {
        let mut buffer = [0; BYTES];
        loop {
            while !readable(&tenant.socket, TIMEOUT) {}
            // A message leaves the socket under the lock, so that it is always either there or in the books.
            let mut books = lock(&self.books);
            let Ok(Some((bytes, descriptors))) = socket::receive(&tenant.socket, &mut buffer) else { break };
            assert!(descriptors.is_empty());
            let request = CustodyRequest::decode(bytes).expect("a request");
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

fn publish(books: &MemoryCounts) {
    let lent: u64 = books.chunks.values().map(|(bytes, _)| bytes).sum();
    let idle: u64 = books.tenants.iter().map(|tenant| *lock(&tenant.idle)).sum();
    for tenant in &books.tenants {
        tenant.page.words().store_u64(page::LIMIT, books.limit, Ordering::Release);
        tenant.page.words().store_u64(page::USED, lent - idle, Ordering::Release);
        tenant.page.words().store_u32(page::OPEN, u32::from(books.margin > 0), Ordering::Release);
    }
}

type Answers = Vec<(CustodyAnswer, Option<u64>)>;

impl MemoryCounts {
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
            self.driver.cuMemRelease(chunk).expect("releases");
        }
    }

    /// Takes the device's free memory above the reserve, if `ballast` is set.
    fn occupy(&mut self) {
        let Some(ballast) = &mut self.ballast else { return };
        while let Ok(chunk) = self.driver.chunk_create(UNIT, 0) {
            ballast.push(chunk);
        }
        self.make_room(RESERVE);
    }

    /// Releases ballast of `bytes`.
    fn make_room(&mut self, bytes: u64) {
        let Some(ballast) = &mut self.ballast else { return };
        let count = usize::try_from(bytes.div_ceil(UNIT)).unwrap_or(usize::MAX).min(ballast.len());
        for chunk in ballast.drain(..count) {
            self.driver.cuMemRelease(chunk).expect("releases");
        }
    }

    fn take_in(&mut self, tenant: &Arc<Tenant>, request: CustodyRequest) -> Answers {
        match request {
            CustodyRequest::Hello { process } => {
                tenant.process.store(process, Ordering::Relaxed);
                Vec::new()
            }
            CustodyRequest::Take { serial, bytes } => {
                let lent: u64 = self.chunks.values().map(|(bytes, _)| bytes).sum();
                if lent + bytes > self.limit {
                    return vec![(CustodyAnswer::Refused { serial, error: OUT_OF_MEMORY }, None)];
                }
                self.make_room(bytes);
                let chunk = match self.driver.chunk_create(bytes, 0) {
                    Ok(chunk) => chunk,
                    Err(error) => return vec![(CustodyAnswer::Refused { serial, error }, None)],
                };
                self.chunks.insert(chunk, (bytes, 0));
                let lease = self.lease(tenant, chunk);
                vec![(CustodyAnswer::Lent { serial, lease, bytes, more: false }, Some(chunk))]
            }
            CustodyRequest::Give { lease } => {
                assert!(lock(&tenant.held).remove(&lease).is_some(), "its own lease");
                self.end(lease);
                Vec::new()
            }
            CustodyRequest::Idle { bytes } => {
                assert!(bytes <= lock(&tenant.held).values().sum(), "no more than it holds");
                *lock(&tenant.idle) = bytes;
                Vec::new()
            }
            CustodyRequest::Grow { serial, reason, bytes, spent } => {
                if self.headroom > 0 && bytes > self.headroom {
                    return vec![(CustodyAnswer::Refused { serial, error: OUT_OF_MEMORY }, None)];
                }
                self.make_room(bytes);
                self.grown.push((reason, bytes));
                self.growing += 1;
                let mut margins = lock(&tenant.margins);
                let left = margins.checked_sub(spent).expect("no more than it was granted");
                let value = self.margin.saturating_sub(left);
                *margins += value;
                vec![(CustodyAnswer::Granted { serial, value }, None)]
            }
            CustodyRequest::Shrunk { bytes, .. } => {
                self.shrunk.push(bytes);
                Vec::new()
            }
            CustodyRequest::Grown { .. } => {
                self.growing -= 1;
                self.occupy();
                Vec::new()
            }
            CustodyRequest::Share { serial, share, lease } => {
                // Wider than one word, as real ones are.
                let share = if share == 0 { (1 << 64) + u128::from(self.shares.len() as u64) } else { share };
                let chunk = self.leases[&lease];
                self.shares.entry(share).or_default().push(chunk);
                vec![(CustodyAnswer::Shared { serial, share }, None)]
            }
            CustodyRequest::Unshare { share } => {
                self.shares.insert(share, Vec::new());
                Vec::new()
            }
            CustodyRequest::Open { serial, share } => {
                let chunks = self.shares.get(&share).cloned().unwrap_or_default();
                if chunks.is_empty() {
                    return vec![(CustodyAnswer::Refused { serial, error: INVALID_VALUE }, None)];
                }
                let count = chunks.len();
                let lend = |(at, chunk)| {
                    let lease = self.lease(tenant, chunk);
                    let (bytes, more) = (self.chunks[&chunk].0, at + 1 < count);
                    (CustodyAnswer::Lent { serial, lease, bytes, more }, Some(chunk))
                };
                chunks.into_iter().enumerate().map(lend).collect()
            }
            CustodyRequest::Pin { serial, bytes } => {
                self.pinned += bytes;
                vec![(CustodyAnswer::Granted { serial, value: 0 }, None)]
            }
            CustodyRequest::Unpin { bytes } => {
                self.pinned -= bytes;
                Vec::new()
            }
            CustodyRequest::Process { serial, index } => {
                let answer = match self.tenants.get(index as usize) {
                    Some(of) => {
                        let bytes = lock(&of.held).values().sum::<u64>() - *lock(&of.idle);
                        CustodyAnswer::Process { serial, process: of.process.load(Ordering::Relaxed), bytes }
                    }
                    None => CustodyAnswer::Refused { serial, error: INVALID_VALUE },
                };
                vec![(answer, None)]
            }
        }
    }
}

/// An arbiter in a separate process, with its own driver and environment.
#[derive(Debug)]
pub(crate) struct Elsewhere {
    process: Child,
    control: OwnedFd,
}

/// The variable with the driver's path for the process of an [`Elsewhere`].
const DRIVER_VARIABLE: &str = "SLUICE_TEST_LENDER_DRIVER";

impl Elsewhere {
    pub(crate) fn start(driver: &Path, environment: &[(&str, &OsStr)], terms: Terms) -> Elsewhere {
        let (control, theirs) = socket::pair().expect("socket pair");
        let process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "arbiter::process_of_a_fake_arbiter_lends_chunks", "--nocapture"])
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
        socket::send(&self.control, b"admit", &[ours.as_fd()]).expect("an arbiter");
        theirs
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        // It has ended already if the test failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a test: the process of an [`Elsewhere`]. Started in any other way, it does nothing.
#[test]
fn process_of_a_fake_arbiter_lends_chunks() {
    let Some(driver) = std::env::var_os(DRIVER_VARIABLE) else { return };
    let control = rustix::io::dup(rustix::stdio::stdin()).expect("a socket");
    let mut buffer = [0; BYTES];
    let (bytes, _) = socket::receive(&control, &mut buffer).expect("receive").expect("terms");
    let word = |at| bytes[at..].first_chunk().copied().map(u64::from_le_bytes).expect("a word");
    let terms = Terms { limit: word(0), headroom: word(8), ballast: word(16) != 0, ..Terms::default() };
    let arbiter = FakeArbiter::of(loaded(&PathBuf::from(driver)), terms);
    while let Ok(Some((_, descriptors))) = socket::receive(&control, &mut buffer) {
        descriptors.into_iter().for_each(|ours| arbiter.admit_at(ours, control::VERSION));
    }
}

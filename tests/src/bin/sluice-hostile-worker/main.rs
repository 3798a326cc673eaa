//! A worker that lies. In one file: the list of its lies. It is started in place of `sluice-worker`. For every VM except the first it is
//! the real one.
//!
//! In its [`liar_folder`], a file `attack` names the attack; it writes the results to a file `report` there, one per line. It uses the custody
//! protocol and breaks its rules, in the filters of the real one; [`UNFILTERED`] lists the exceptions. The test judges the effect,
//! above all by the memory that a second VM finds.

#![expect(
    unsafe_code,
    reason = "an inherited descriptor, a mapping of the custody page, a fork without exec"
)]

mod bombs;
mod driver;

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::net::RecvFlags;
use sluice_messages::control::{self, SETUP_BYTES, ToWorker, WorkerSetup, codec};
use sluice_messages::custody::{CLASSES, CustodyAnswer, CustodyRequest, Growth, UNIT, page};
use sluice_protocol::limits;
use sluice_sandbox::{DriverList, Role};
use sluice_shared_memory::socket;
use sluice_tests::reach::{ATTEMPTS, Targets};
use sluice_tests::tenants::liar_folder;

use driver::{Driver, Piece};

/// Descriptor number of its control socket.
const CONTROL: i32 = 3;
/// The VM whose workers lie, unless a file `vm` beside the attack names another.
const OURS: u32 = 1;
/// Time limit for steps that take milliseconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of an arbiter to end a worker that breaks the protocol.
const BEFORE_THE_END: Duration = Duration::from_secs(10);
/// Attacks that make calls which the filters forbid, as if a flaw in the kernel had lifted them: a fork, a file that is opened
/// anew, messages with descriptors, and every way to other things of the host.
const UNFILTERED: [&str; 5] = ["pass-on", "write-page", "descriptor", "empty-message", "reach-out"];
/// Time after which a chained grant is followed by the next; a quarter of the time for which one may delay others.
const LINK: Duration = Duration::from_millis(limits::GROW_MILLISECONDS / 4);
/// Time for which a worker that fails now tries to take memory again.
const RETRY: Duration = Duration::from_secs(10);

/// The pattern that canary programs search for, in its last cell.
const TAG: [u64; 2] = [0xc0ff_ee5e_ed5e_ca11, 0x0510_9ce5_1a00_0000 + (1 << 20) - 1];

fn main() -> Result<ExitCode> {
    // SAFETY: the launcher passes it open, and no other code here uses it.
    let control = unsafe { OwnedFd::from_raw_fd(CONTROL) };
    let mut buffer = vec![0; SETUP_BYTES];
    let (length, _) = rustix::net::recv(&control, &mut buffer[..], RecvFlags::PEEK).context("the setup")?;
    let setup: WorkerSetup = codec::decode(&buffer[..length])?;
    let state = std::env::var_os("SLUICE_SOFTGPU_STATE").context("no folder of the software GPU")?;
    let folder = liar_folder(Path::new(&state));
    let ours = std::fs::read_to_string(folder.join("vm")).map_or(Ok(OURS), |number| number.trim().parse())?;
    if setup.vm != ours {
        // The real worker owns it.
        core::mem::forget(control);
        // SAFETY: no other code uses the control socket.
        return Ok(unsafe { sluice_worker::program::main() });
    }
    let report = OpenOptions::new().create(true).append(true).open(folder.join("report"))?;
    let attack = std::fs::read_to_string(folder.join("attack")).context("reading the attack")?;
    let attack = attack.trim();
    let mut worker = Hostile::new(control, &mut buffer, report, folder, !UNFILTERED.contains(&attack))?;
    worker.tell("begun", attack);
    if let Err(error) = worker.attack(attack) {
        worker.tell("failed", format!("{error:#}"));
    }
    worker.tell("done", attack);
    worker.wait_for_the_end();
    Ok(ExitCode::SUCCESS)
}

/// A chunk on loan to us.
struct Lease {
    number: u64,
    bytes: u64,
    descriptor: OwnedFd,
}

struct Hostile {
    /// Kept open, because the device ends workers whose socket closes.
    control: OwnedFd,
    custody: OwnedFd,
    page: OwnedFd,
    limit: u64,
    driver: Driver,
    report: File,
    /// The folder of the test's commands.
    folder: PathBuf,
    serial: u64,
}

impl Hostile {
    /// Sets itself up as a worker with a custody socket, in the filters of one if `filtered`, and sends a hello.
    fn new(
        control: OwnedFd,
        buffer: &mut [u8],
        report: File,
        folder: PathBuf,
        filtered: bool,
    ) -> Result<Self> {
        let (message, _) = socket::receive(&control, buffer)?.context("the setup")?;
        let setup: WorkerSetup = codec::decode(message)?;
        ensure!(setup.devices > 0, "no arbiter lends memory");
        let mut sockets = Vec::new();
        for _ in 0..setup.devices {
            let (message, descriptors) = socket::receive(&control, buffer)?.context("custody")?;
            let ToWorker::Custody { device: _ } = ToWorker::decode(message)? else { bail!("not custody") };
            sockets.extend(descriptors);
        }
        let custody = sockets.swap_remove(0);
        // As the real one: the second filter follows when the driver has opened all its files.
        if filtered {
            sluice_sandbox::enter(Role::Worker(DriverList::of_library(Path::new(&setup.driver))?))?;
        }
        let driver = Driver::load(Path::new(&setup.driver))?;
        if filtered {
            driver.init()?;
            sluice_sandbox::enter(Role::WorkerSettled)?;
        }
        let page = custody.try_clone()?;
        let mut worker = Self { control, custody, page, limit: 0, driver, report, folder, serial: 0 };
        let Some((CustodyAnswer::Welcome { limit, .. }, mut descriptors)) = worker.receive(TIMEOUT)? else {
            bail!("no welcome");
        };
        worker.limit = limit;
        ensure!(descriptors.len() == 3, "the pages and the eventfd");
        worker.page = descriptors.swap_remove(0);
        worker.say(CustodyRequest::Hello { process: 4711 })?;
        Ok(worker)
    }

    fn tell(&mut self, what: &str, how: impl std::fmt::Display) {
        // In one write, because the test reads meanwhile. If it fails, the test misses the line.
        self.report.write_all(format!("{what} {how}\n").as_bytes()).ok();
    }

    fn say(&self, request: CustodyRequest) -> Result<(), Errno> {
        socket::send(&self.custody, &request.encode(), &[])
    }

    /// The next answer, recalls left out; `None` if the arbiter has closed the connection, or does not answer in time.
    fn receive(&self, limit: Duration) -> Result<Option<(CustodyAnswer, Vec<OwnedFd>)>> {
        let deadline = Instant::now() + limit;
        loop {
            if !readable(&self.custody, deadline) {
                return Ok(None);
            }
            let mut bytes = [0; control::BYTES];
            match socket::receive(&self.custody, &mut bytes) {
                Ok(Some((message, descriptors))) => match CustodyAnswer::decode(message)? {
                    CustodyAnswer::Recall { .. } => {}
                    answer => return Ok(Some((answer, descriptors))),
                },
                Ok(None) | Err(Errno::CONNRESET | Errno::PIPE) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Requests a chunk.
    fn take(&mut self, bytes: u64) -> Result<Result<Lease, u32>> {
        self.serial += 1;
        self.say(CustodyRequest::Take { serial: self.serial, bytes })?;
        match self.receive(TIMEOUT)?.context("no answer to a request for memory")? {
            (CustodyAnswer::Lent { lease, bytes, .. }, mut descriptors) => {
                let descriptor = descriptors.pop().context("a lent chunk has a descriptor")?;
                Ok(Ok(Lease { number: lease, bytes, descriptor }))
            }
            (CustodyAnswer::Refused { error, .. }, _) => Ok(Err(error)),
            other => bail!("an answer to something else: {other:?}"),
        }
    }

    /// Takes small chunks until there are no more, or up to `most`.
    fn take_all(&mut self, most: usize) -> Result<Vec<Lease>> {
        self.take_all_of(UNIT, most)
    }

    /// Requests growth of no bytes within the margin that the worker has.
    fn grow(&mut self, reason: Growth) -> Result<u64, Errno> {
        self.serial += 1;
        let serial = self.serial;
        self.say(CustodyRequest::Grow { serial, reason: reason as u32, bytes: 0, spent: 0 })?;
        Ok(serial)
    }

    fn take_all_of(&mut self, bytes: u64, most: usize) -> Result<Vec<Lease>> {
        let mut all = Vec::new();
        while all.len() < most {
            match self.take(bytes)? {
                Ok(lease) => all.push(lease),
                Err(error) => {
                    self.tell("refused", error);
                    break;
                }
            }
        }
        self.tell("taken", all.iter().map(|lease| lease.bytes).sum::<u64>());
        Ok(all)
    }

    /// Starts the driver as an honest worker does.
    fn start_driver(&mut self) -> Result<()> {
        self.serial += 1;
        let serial = self.serial;
        self.say(CustodyRequest::Grow { serial, reason: Growth::Context as u32, bytes: 0, spent: u64::MAX })?;
        let (answer, _) = self.receive(TIMEOUT)?.context("no answer to a request to grow")?;
        ensure!(matches!(answer, CustodyAnswer::Granted { .. }), "{answer:?}");
        self.driver.start()?;
        self.say(CustodyRequest::Grown { serial })?;
        Ok(())
    }

    /// Takes chunks, imports and maps them, and fills them with the pattern.
    fn marked(&mut self, count: usize) -> Result<Vec<(Lease, Piece)>> {
        self.start_driver()?;
        let leases = self.take_all(count)?;
        let pattern = pattern();
        let mut all = Vec::new();
        for lease in leases {
            let piece = self.driver.import(lease.descriptor.as_fd(), lease.bytes);
            let piece = piece.map_err(|error| anyhow::anyhow!("import: {error}"))?;
            self.driver.write(piece, &pattern).map_err(|error| anyhow::anyhow!("write: {error}"))?;
            all.push((lease, piece));
        }
        Ok(all)
    }

    fn attack(&mut self, name: &str) -> Result<()> {
        match name {
            "nothing" => Ok(()),
            "reach-out" => self.reach_out(),
            "keep-mapping" => self.keep_mapping(),
            "honest-return" => self.honest_return(),
            "hold" => self.hold(),
            "hide-time" => self.hide_time(),
            "pass-on" => self.pass_on(),
            "write-page" => self.write_page(),
            "absurd-idle" => self.absurd_idle(),
            "strangers" => self.strangers(),
            "give-twice" => self.give_twice(),
            "flood" => self.flood(),
            "unread" => self.leave_unread(),
            "crowd" => self.crowd(),
            "never-grown" => self.never_grown(),
            "chained-grants" => self.chain_grants(),
            "queued-growth" => self.queue_growth(),
            "repeated-opens" => self.open_repeatedly(),
            "guest-memory" => self.keep_guest_memory(),
            "standard-error" => standard_error(),
            "memory-bomb" => bombs::memory(|what, how| self.tell(what, how)),
            "shared-memory-bomb" => bombs::shared_memory(|what, how| self.tell(what, how)),
            "huge-page-bomb" => bombs::huge_pages(|what, how| self.tell(what, how)),
            "thread-bomb" => bombs::threads(|what, how| self.tell(what, how)),
            "descriptor-bomb" => bombs::descriptors(|what, how| self.tell(what, how)),
            "grown-unasked" => {
                self.say(CustodyRequest::Grown { serial: 99 })?;
                self.expect_end()
            }
            "odd-sizes" => self.odd_sizes(),
            "over-limit" => self.over_limit(),
            "past-arbiter" => self.past_arbiter(Duration::ZERO),
            "past-arbiter-again" => self.past_arbiter(RETRY),
            "short-message" => self.malformed(&[1; 8], false),
            "long-message" => self.malformed(&[1; 4096], false),
            "unknown-message" => self.malformed(&[0xee; control::BYTES], false),
            "empty-message" => self.malformed(&[], true),
            "descriptor" => self.malformed(&CustodyRequest::Give { lease: 1 }.encode(), true),
            other => bail!("no attack {other:?}"),
        }
    }

    /// Tries to reach things of the host; reports those that it reaches and those that are refused.
    fn reach_out(&mut self) -> Result<()> {
        let targets = Targets::read(&self.folder)?;
        for (name, attempt) in ATTEMPTS {
            match attempt(&targets) {
                Ok(()) => self.tell("reached", name),
                Err(error) => self.tell("refused", format!("{name}: {error}")),
            }
        }
        Ok(())
    }

    /// Is honest until it has the session's page, and so until it can read a byte of its guest. After that it keeps each descriptor
    /// that it receives, and reads the first word of each memory file.
    fn keep_guest_memory(&mut self) -> Result<()> {
        let mut buffer = [0; control::BYTES];
        let mut doorbell = None;
        loop {
            let (message, mut descriptors) =
                socket::receive(&self.control, &mut buffer)?.context("the page")?;
            match ToWorker::decode(message)? {
                ToWorker::Begin { .. } => doorbell = Some(descriptors.swap_remove(0)),
                ToWorker::Attach { slot: 0, more: false, .. } => break,
                ToWorker::Attach { .. } => {}
                other => bail!("{other:?} before the page"),
            }
        }
        let doorbell = doorbell.context("no doorbell")?;
        self.tell("has-page", "now");
        ensure!(readable(&doorbell, Instant::now() + TIMEOUT), "the guest never rings");
        let mut kept = Vec::new();
        while readable(&self.control, Instant::now()) {
            let Some((_, descriptors)) = socket::receive(&self.control, &mut buffer)? else { break };
            kept.extend(descriptors);
        }
        for descriptor in &kept {
            let null = core::ptr::null_mut();
            // SAFETY: a new mapping of a page, at an address that the kernel chooses; it is never unmapped.
            let page =
                unsafe { rustix::mm::mmap(null, 4096, ProtFlags::READ, MapFlags::SHARED, descriptor, 0) };
            let word = match page {
                // SAFETY: the page is mapped; a page behind the end of a file would end this process, as the test would notice.
                Ok(page) => unsafe { page.cast::<u64>().read_volatile() },
                Err(error) => {
                    self.tell("unreadable", error);
                    continue;
                }
            };
            self.tell("read", format!("{word:#x}"));
        }
        self.tell("received", format!("{} descriptors", kept.len()));
        Ok(())
    }

    /// Reports that it has given chunks back, and continues to write into them.
    fn keep_mapping(&mut self) -> Result<()> {
        let all = self.marked(8)?;
        for (lease, _) in &all {
            self.say(CustodyRequest::Give { lease: lease.number })?;
        }
        self.tell("given", all.len());
        let pattern = pattern();
        // Until it is killed, or the arbiter closes the connection.
        while readable_now(&self.custody) != Some(Ended) {
            for (_, piece) in &all {
                self.driver.write(*piece, &pattern).map_err(|error| anyhow::anyhow!("write: {error}"))?;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Returns chunks honestly, for comparison.
    fn honest_return(&mut self) -> Result<()> {
        for (lease, piece) in self.marked(8)? {
            self.driver.unmap(piece).map_err(|error| anyhow::anyhow!("unmap: {error}"))?;
            drop(lease.descriptor);
            self.say(CustodyRequest::Give { lease: lease.number })?;
        }
        Ok(())
    }

    /// Fills memory with the pattern and keeps it until it is killed.
    fn hold(&mut self) -> Result<()> {
        let all = self.marked(8)?;
        self.tell("holding", all.len());
        self.wait_for_the_end();
        Ok(())
    }

    /// Computes all the time and reports none of it.
    fn hide_time(&mut self) -> Result<()> {
        self.start_driver()?;
        self.tell("computing", "");
        self.driver.compute().map_err(|error| anyhow::anyhow!("compute: {error}"))
    }

    /// Passes its leases on to a child that the arbiter does not know.
    fn pass_on(&mut self) -> Result<()> {
        // Chunks of a size that is never released for a driver's growth, so that other VMs can get them.
        let leases = self.take_all_of(CLASSES[1], 2)?;
        // SAFETY: this process has one thread; the child goes on with copies of everything.
        match unsafe { libc::fork() } {
            0 => {
                if let Err(error) = self.outlive(&leases) {
                    self.tell("failed", format!("{error:#}"));
                }
                std::process::exit(0)
            }
            child => ensure!(child > 0, "cannot fork"),
        }
        self.wait_for_the_end();
        Ok(())
    }

    /// The child: it writes into half of the chunks, and only holds the other half until the test continues. Then it writes
    /// into all, and reports that.
    fn outlive(&mut self, leases: &[Lease]) -> Result<()> {
        // Away from all signals that could end it with its parent.
        rustix::process::setsid().ok();
        self.control = self.page.try_clone()?;
        self.custody = self.page.try_clone()?;
        self.driver.start()?;
        let pattern = pattern();
        let (first, rest) = leases.split_at(leases.len() / 2);
        let mut pieces = Vec::new();
        let import = |driver: &Driver, lease: &Lease| {
            let piece = driver.import(lease.descriptor.as_fd(), lease.bytes);
            piece.map_err(|error| anyhow::anyhow!("import: {error}"))
        };
        for lease in first {
            pieces.push(import(&self.driver, lease)?);
        }
        let mut rounds = 0_u64;
        let end = Instant::now() + 2 * TIMEOUT;
        while Instant::now() < end {
            let all = self.folder.join("all").exists();
            if all && pieces.len() < leases.len() {
                for lease in rest {
                    pieces.push(import(&self.driver, lease)?);
                }
                rounds = 0;
            }
            for piece in &pieces {
                self.driver.write(*piece, &pattern).map_err(|error| anyhow::anyhow!("write: {error}"))?;
            }
            rounds += 1;
            match (all, rounds) {
                (false, 1) => self.tell("stranger", std::process::id()),
                (true, 1) => self.tell("everywhere", pieces.len()),
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Tries to enable in the arbiter's page what it forbids, and to get more than its limit.
    fn write_page(&mut self) -> Result<()> {
        let shared = |protection, descriptor: &OwnedFd| {
            // SAFETY: a new mapping of a descriptor of ours, at an address of the kernel's choice.
            unsafe {
                rustix::mm::mmap(
                    core::ptr::null_mut(),
                    page::BYTES,
                    protection,
                    MapFlags::SHARED,
                    descriptor,
                    0,
                )
            }
        };
        let both = ProtFlags::READ | ProtFlags::WRITE;
        self.tell("map-writable", outcome(&shared(both, &self.page)));
        let readable = shared(ProtFlags::READ, &self.page).context("the page can be read")?;
        // SAFETY: the mapping made above, of that size.
        let protect = unsafe {
            rustix::mm::mprotect(readable, page::BYTES, MprotectFlags::READ | MprotectFlags::WRITE)
        };
        self.tell("make-writable", outcome(&protect));
        let text = rustix::io::pwrite(&self.page, &1_u64.to_le_bytes(), page::PERMIT as u64);
        self.tell("write", outcome(&text));
        self.tell("truncate", outcome(&rustix::fs::ftruncate(&self.page, 0)));
        self.tell("grow", outcome(&rustix::fs::ftruncate(&self.page, 1 << 20)));
        let seals = rustix::fs::fcntl_add_seals(&self.page, SealFlags::WRITE);
        self.tell("seal", outcome(&seals));
        // A memory file can be opened anew by its path in /proc, with other rights than the descriptor's.
        let path = format!("/proc/self/fd/{}", self.page.as_raw_fd());
        match OpenOptions::new().read(true).write(true).open(&path) {
            Err(error) => self.tell("open-writable", error.kind()),
            Ok(file) => {
                let file = OwnedFd::from(file);
                self.tell("open-and-map", outcome(&shared(both, &file)));
                let text = rustix::io::pwrite(&file, &u64::MAX.to_le_bytes(), page::LIMIT as u64);
                self.tell("open-and-write", outcome(&text));
            }
        }
        Ok(())
    }

    /// Reports more unused memory than it has.
    fn absurd_idle(&mut self) -> Result<()> {
        let leases = self.take_all(2)?;
        for bytes in [u64::MAX, 1 << 63, self.limit, leases.len() as u64 * UNIT + 1, 3] {
            if self.say(CustodyRequest::Idle { bytes }).is_err() {
                break;
            }
        }
        // Independent of its claim: not a byte more than the limit.
        let mut total = leases.len() as u64 * UNIT;
        let mut held = Vec::new();
        while let Ok(Ok(lease)) = self.take(UNIT) {
            total += lease.bytes;
            held.push(lease);
            // A bound, in case the arbiter has none.
            if total > 2 * self.limit {
                break;
            }
        }
        self.tell("total", total);
        Ok(())
    }

    /// Names leases and shares of other workers.
    fn strangers(&mut self) -> Result<()> {
        let own = self.take_all(1)?;
        let number = own.first().map_or(0, |lease| lease.number);
        let mut opened = 0;
        for share in (0..1024).chain([u128::MAX, u128::from(u64::MAX), 1 << 32, 1 << 63, 1 << 127]) {
            self.serial += 1;
            if self.say(CustodyRequest::Open { serial: self.serial, share }).is_err() {
                break;
            }
            match self.receive(TIMEOUT)? {
                Some((CustodyAnswer::Lent { .. }, _)) => opened += 1,
                Some((CustodyAnswer::Refused { .. }, _)) => {}
                other => {
                    self.tell("open-ended", format!("{:?}", other.is_none()));
                    break;
                }
            }
        }
        self.tell("opened", opened);
        // These may end us: the most harmless first.
        let shares = [0, 1, u128::MAX].map(|share| CustodyRequest::Unshare { share });
        let near = (number.saturating_sub(8)..number + 8).filter(|near| *near != number);
        let leases = near.chain([u64::MAX]).map(|lease| CustodyRequest::Give { lease });
        for request in shares.into_iter().chain(leases) {
            if self.say(request).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn give_twice(&mut self) -> Result<()> {
        let leases = self.take_all(1)?;
        let lease = leases.first().context("a lease")?.number;
        drop(leases);
        self.say(CustodyRequest::Give { lease })?;
        self.say(CustodyRequest::Give { lease }).ok();
        self.expect_end()
    }

    /// Sends requests and never reads answers, until it is ended.
    fn flood(&mut self) -> Result<()> {
        self.never_wait()?;
        self.tell("flooding", "");
        let mut sent = 0_u64;
        loop {
            let request = self.next_of_flood();
            match self.say(request) {
                Ok(()) => sent += 1,
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_micros(100)),
                Err(_) => break,
            }
        }
        self.tell("sent", sent);
        Ok(())
    }

    const fn next_of_flood(&mut self) -> CustodyRequest {
        self.serial += 1;
        let serial = self.serial;
        // No growth: a worker that requests too much of it is ended, and floods no more.
        match serial % 4 {
            0 => CustodyRequest::Take { serial, bytes: UNIT },
            1 => CustodyRequest::Idle { bytes: 0 },
            2 => CustodyRequest::Process { serial, index: 0 },
            _ => CustodyRequest::Pin { serial, bytes: 1 << 20 },
        }
    }

    /// Fills its socket with requests whose answers it never reads, and fills it again whenever there is room.
    fn leave_unread(&mut self) -> Result<()> {
        self.never_wait()?;
        let mut request = self.next_of_flood();
        loop {
            match self.say(request) {
                Ok(()) => request = self.next_of_flood(),
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(20)),
                Err(_) => return Ok(()),
            }
        }
    }

    /// Lets as many threads as it gets wait on its socket, with as many entries each as its filter permits, and makes requests: the process that
    /// answers wakes them all.
    fn crowd(&mut self) -> Result<()> {
        /// Entries of a thread.
        const ENTRIES: usize = 32;
        /// Threads of a worker by default.
        const MOST: u32 = 1024;
        let socket = std::sync::Arc::new(self.custody.try_clone()?);
        let mut threads = 0;
        while threads < MOST {
            let socket = std::sync::Arc::clone(&socket);
            let wait = move || loop {
                let mut polled: Vec<_> = (0..ENTRIES).map(|_| PollFd::new(&*socket, PollFlags::IN)).collect();
                let _ = poll(&mut polled, None);
                std::thread::sleep(Duration::from_millis(1));
            };
            if std::thread::Builder::new().stack_size(64 << 10).spawn(wait).is_err() {
                break;
            }
            threads += 1;
        }
        self.tell("crowd", threads);
        let mut answers = 0;
        loop {
            self.serial += 1;
            let asked = self.say(CustodyRequest::Process { serial: self.serial, index: 0 });
            if asked.is_err() || self.receive(TIMEOUT)?.is_none() {
                break;
            }
            answers += 1;
        }
        self.tell("answers", answers);
        Ok(())
    }

    /// A send that would wait fails from now on.
    fn never_wait(&self) -> Result<(), Errno> {
        rustix::fs::fcntl_setfl(&self.custody, OFlags::NONBLOCK)
    }

    /// Takes all small chunks that it can get, so that large ones must be split for other VMs. Then it has a grant of no bytes open at
    /// all times, and none for long.
    fn chain_grants(&mut self) -> Result<()> {
        let _held = self.take_all(usize::MAX)?;
        self.tell("chaining", "");
        let mut open = None;
        while let Ok(serial) = self.grow(Growth::Module) {
            match self.receive(TIMEOUT)? {
                Some((CustodyAnswer::Granted { .. }, _)) => {
                    if let Some(last) = open.replace(serial) {
                        self.say(CustodyRequest::Grown { serial: last })?;
                    }
                }
                Some(_) => {}
                None => break,
            }
            std::thread::sleep(LINK);
        }
        Ok(())
    }

    /// Has as many requests for growth under way as a worker may have, and keeps the grants among them almost until they are late.
    fn queue_growth(&mut self) -> Result<()> {
        let mut waiting = 0;
        loop {
            while waiting + 1 < limits::GROWTHS {
                self.grow(Growth::Module)?;
                waiting += 1;
            }
            let mut granted = Vec::new();
            let end = Instant::now() + 3 * LINK;
            while let Some(left) = end.checked_duration_since(Instant::now()).filter(|_| waiting > 0) {
                match self.receive(left)? {
                    Some((CustodyAnswer::Granted { serial, .. }, _)) => granted.push(serial),
                    Some(_) => {}
                    None if readable_now(&self.custody) == Some(Ended) => return Ok(()),
                    None => break,
                }
                waiting -= 1;
            }
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            for serial in granted {
                self.say(CustodyRequest::Grown { serial })?;
            }
        }
    }

    /// Opens shares of one lease each until they are refused, and then a share of many chunks.
    fn open_repeatedly(&mut self) -> Result<()> {
        /// Shares of one lease each. They give the worker thousands of leases.
        const ALONE: usize = 16;
        let leases = self.take_all(usize::MAX)?;
        let (alone, together) = leases.split_at_checked(ALONE).context("few chunks")?;
        for leases in alone.chunks(1).chain([together]) {
            self.tell("opening", leases.len());
            let mut share = 0;
            for lease in leases {
                self.serial += 1;
                self.say(CustodyRequest::Share { serial: self.serial, share, lease: lease.number })?;
                let Some((CustodyAnswer::Shared { share: number, .. }, _)) = self.receive(TIMEOUT)? else {
                    bail!("a chunk cannot be shared");
                };
                share = number;
            }
            let mut opened = 0_u64;
            while self.open(share)? {
                opened += 1;
            }
            self.tell("opened", opened);
        }
        Ok(())
    }

    /// Opens a share, and drops its chunks' descriptors. Returns `false` if it is refused.
    fn open(&mut self, share: u128) -> Result<bool> {
        self.serial += 1;
        self.say(CustodyRequest::Open { serial: self.serial, share })?;
        loop {
            match self.receive(TIMEOUT)?.context("no answer to a request to open a share")? {
                (CustodyAnswer::Lent { more: true, .. }, _) => {}
                (CustodyAnswer::Lent { .. }, _) => return Ok(true),
                (CustodyAnswer::Refused { .. }, _) => return Ok(false),
                other => bail!("an answer to something else: {other:?}"),
            }
        }
    }

    /// Takes the only grant, and keeps it.
    fn never_grown(&mut self) -> Result<()> {
        self.grow(Growth::Context)?;
        let (answer, _) = self.receive(TIMEOUT)?.context("no answer to a request to grow")?;
        self.tell("grant", format!("{answer:?}"));
        let start = Instant::now();
        self.receive(Duration::from_millis(2 * limits::GROW_MILLISECONDS))?;
        self.tell("ended-after", start.elapsed().as_secs());
        Ok(())
    }

    /// Requests chunks of sizes that do not exist.
    fn odd_sizes(&mut self) -> Result<()> {
        for bytes in [0, 1, UNIT - 1, UNIT + 1, 3 * UNIT, 1 << 62, u64::MAX] {
            match self.take(bytes) {
                Ok(Ok(lease)) => self.tell("lent", format!("{bytes} {}", lease.bytes)),
                Ok(Err(error)) => self.tell("refused", error),
                Err(_) => {
                    self.tell("ended", bytes);
                    break;
                }
            }
        }
        Ok(())
    }

    fn over_limit(&mut self) -> Result<()> {
        let held = self.take_all(1 << 16)?;
        self.tell("limit", self.limit);
        drop(held);
        Ok(())
    }

    /// Takes memory from the driver itself, past the arbiter, and again whenever there is some for this time.
    fn past_arbiter(&mut self, time: Duration) -> Result<()> {
        self.start_driver()?;
        let mut total = 0;
        let end = Instant::now() + time;
        loop {
            for bytes in [512 << 20, 32 << 20, UNIT] {
                // Created memory is never given back.
                while self.driver.create(bytes).is_ok() {
                    total += bytes;
                }
            }
            while self.driver.allocate(UNIT).is_ok() {
                total += UNIT;
            }
            if Instant::now() >= end {
                break;
            }
        }
        self.tell("got", total);
        self.wait_for_the_end();
        Ok(())
    }

    /// Sends an invalid request.
    fn malformed(&mut self, message: &[u8], with_descriptor: bool) -> Result<()> {
        let file = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC)?;
        let descriptors = [file.as_fd(), file.as_fd(), file.as_fd()];
        let count = if with_descriptor { 3 } else { 0 };
        socket::send(&self.custody, message, descriptors.get(..count).unwrap_or_default())?;
        self.expect_end()
    }

    /// Reports whether the arbiter has closed the connection.
    fn expect_end(&mut self) -> Result<()> {
        let deadline = Instant::now() + BEFORE_THE_END;
        while Instant::now() < deadline {
            if self.receive(Duration::from_millis(100))?.is_none()
                && readable_now(&self.custody) == Some(Ended)
            {
                self.tell("ended", "by the arbiter");
                return Ok(());
            }
        }
        self.tell("not-ended", "by the arbiter");
        Ok(())
    }

    /// Waits to be killed.
    fn wait_for_the_end(&self) {
        let end = Instant::now() + 2 * TIMEOUT;
        while Instant::now() < end && readable_now(&self.custody) != Some(Ended) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The other side has closed the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ended;

fn readable_now(socket: &OwnedFd) -> Option<Ended> {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&zero)).ok()?;
    polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR).then_some(Ended)
}

fn readable(socket: &OwnedFd, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let Ok(left) = Timespec::try_from(left) else { return false };
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&left)), Ok(1..))
}

fn outcome<T>(result: &Result<T, Errno>) -> String {
    match result {
        Ok(_) => "done".to_owned(),
        Err(error) => format!("{error:?}"),
    }
}

/// Writes lines to standard error as fast as possible, until it is killed.
fn standard_error() -> Result<()> {
    let lines = "sluiced: VM 2 is fenced\n".repeat(100);
    let end = Instant::now() + TIMEOUT;
    while Instant::now() < end {
        rustix::io::write(rustix::stdio::stderr(), lines.as_bytes())?;
    }
    Ok(())
}

fn pattern() -> Vec<u8> {
    let tag: Vec<u8> = TAG.iter().flat_map(|word| word.to_le_bytes()).collect();
    tag.repeat(1 << 16)
}

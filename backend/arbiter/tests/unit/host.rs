//! Plays `sluiced` and the inventory for one arbiter.

use crate::{MIB, instances, worker::Worker};
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Mode, OFlags, open},
    io::Errno,
    process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process, pidfd_open, prlimit},
};
use sluice_kit::wait::{TIMEOUT, eventually, readable};
use sluice_messages::control::{
    ArbiterEvent, ArbiterSetup, BYTES, Figures, FromArbiter, FromInventory, HostAccess, NO_USER, ToArbiter,
    ToInventory, Verify, codec,
};
use sluice_messages::{
    figures::{UnitBytes, Upkeep, WorkCounts},
    inventory::{Visible, VisibleInstance, WHOLE},
};
use sluice_shared_memory::socket;
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};
use tempfile::TempDir;

/// The software GPU's driver, which cargo has built beside this test.
pub(crate) fn driver() -> PathBuf {
    let driver = std::env::current_exe().unwrap().with_file_name("libsoftgpu_cuda.so");
    assert!(driver.exists(), "{} is built with this test", driver.display());
    driver
}

/// The null driver, which cargo has built beside this test.
pub(crate) fn null_driver() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libsluice_null_driver.so")
}

/// The played driver's booking of chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DriverBooking {
    #[default]
    Owner,
    Importer,
    Both,
    Nowhere,
    /// It gives no bytes per process.
    Absent,
}

/// The state of the played inventory.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    /// Dead processes that it still lists.
    pub(crate) stuck: HashSet<u32>,
    /// Processes it lists, with their bytes; `None` lists every worker that has begun and lives, with its context.
    pub(crate) processes: Option<Vec<(u32, u64)>>,
    /// Processes of workers that have begun.
    pub(crate) begun: Vec<u32>,
    /// The arbiter's process, with all chunks: listed unless `processes` contains it.
    pub(crate) arbiter: Option<(u32, u64)>,
    /// Bytes that processes have imported, and their booking.
    pub(crate) imported: HashMap<u32, u64>,
    pub(crate) books: DriverBooking,
    /// Bytes of a context.
    pub(crate) context: u64,
    /// Percent of the time in which kernels of a process run, if known.
    pub(crate) busy: HashMap<u32, u32>,
    /// Bytes used on the device; with `None` it does not answer.
    pub(crate) used: Option<u64>,
    /// Number of queries for it.
    pub(crate) asked: u64,
}

impl Listed {
    fn nth(&self, index: usize) -> Option<(u32, u64)> {
        let known = self.begun.iter().filter(|process| self.stuck.contains(process) || lives(**process));
        let mut processes = match &self.processes {
            Some(processes) => processes.clone(),
            None => known.map(|process| (*process, self.booked(*process))).collect(),
        };
        let missing = |(arbiter, _): &(u32, u64)| processes.iter().all(|(process, _)| process != arbiter);
        let made = self.arbiter.map(|(arbiter, chunks)| (arbiter, self.made(chunks)));
        processes.extend(made.filter(missing));
        processes.get(index).copied()
    }

    /// Bytes booked to a worker.
    fn booked(&self, process: u32) -> u64 {
        let imported = self.imported.get(&process).copied().unwrap_or(0);
        match self.books {
            DriverBooking::Owner | DriverBooking::Nowhere => self.context,
            DriverBooking::Importer | DriverBooking::Both => self.context + imported,
            DriverBooking::Absent => 0,
        }
    }

    /// Bytes booked to the arbiter, which made all chunks.
    fn made(&self, chunks: u64) -> u64 {
        match self.books {
            DriverBooking::Owner | DriverBooking::Both => self.context + chunks,
            DriverBooking::Importer => self.context + chunks - self.imported.values().sum::<u64>(),
            DriverBooking::Nowhere => self.context,
            DriverBooking::Absent => 0,
        }
    }
}

/// Options for starting an arbiter.
pub(crate) struct Options {
    pub(crate) scrub: bool,
    pub(crate) verify: Verify,
    pub(crate) reserve: u64,
    pub(crate) inventory: bool,
    pub(crate) descriptors: Option<u64>,
    pub(crate) driver: PathBuf,
    pub(crate) environment: Vec<(&'static str, String)>,
    /// Makes the device a divided one, and the unit an instance of it: the profile, the first slice, and whether the
    /// arbiter gets its identity or another one.
    pub(crate) instance: Option<(u32, u32, bool)>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            scrub: true,
            verify: Verify::All,
            reserve: 8 * MIB,
            inventory: true,
            descriptors: None,
            driver: driver(),
            environment: Vec::new(),
            instance: None,
        }
    }
}

/// An arbiter, and the played parties around it.
pub(crate) struct Host {
    pub(crate) arbiter: Child,
    control: OwnedFd,
    state: TempDir,
    driver: PathBuf,
    environment: Vec<(&'static str, String)>,
    pub(crate) listed: Arc<Mutex<Listed>>,
    /// Bytes that can be lent, and bytes of a context.
    pub(crate) bytes: u64,
    pub(crate) context: u64,
    pub(crate) margin: u64,
    /// The host memory that kernels reach.
    pub(crate) host_access: HostAccess,
    pub(crate) events: Vec<(ArbiterEvent, u32, u32, u64)>,
    pub(crate) wanted: Vec<(u32, u64)>,
    used: HashMap<u32, u64>,
    /// `[launches, copies, bytes copied, calls]` by VM, as last reported.
    pub(crate) work: HashMap<u32, [u64; 4]>,
    /// The last reported VM with its pinned bytes.
    pinned: (u32, u64),
    /// The care for memory, as last reported.
    upkeep: Upkeep,
    /// The use of the driver's bytes per process, as last reported.
    figures: Figures,
}

impl Host {
    pub(crate) fn start() -> Host {
        Host::with(Options::default())
    }

    pub(crate) fn with(options: Options) -> Host {
        let mut host = Host::begin(options);
        match host.receive() {
            FromArbiter::Ready { bytes, context, margin, host_access } => {
                host.host_access = host_access;
                (host.bytes, host.context, host.margin) = (bytes, context, margin);
                let mut listed = host.listed.lock().unwrap();
                listed.context = context;
                listed.arbiter = Some((host.arbiter.id(), bytes));
                drop(listed);
            }
            other => panic!("{other:?} before Ready"),
        }
        // A take waits only some seconds for memory that is not clean yet.
        eventually("all memory is clean", || host.unit()[3] == 0);
        host
    }

    /// Starts an arbiter that may fail before it is ready.
    pub(crate) fn begin(options: Options) -> Host {
        let state = TempDir::new_in("/dev/shm").unwrap();
        let (control, theirs) = socket::pair().unwrap();
        // A device of 358 MiB whose fresh memory is full of a pattern.
        let mut environment: Vec<(&'static str, String)> = vec![
            ("SLUICE_SOFTGPU_STATE", state.path().join("gpu").display().to_string()),
            ("SLUICE_SOFTGPU_MODEL", "A10-24".to_owned()),
            ("SLUICE_SOFTGPU_SCALE", "64".to_owned()),
            ("SLUICE_SOFTGPU_FILL", "0xA5".to_owned()),
            ("SLUICE_SOFTGPU_CONTEXT_BYTES", (4 * MIB).to_string()),
        ];
        let faults = state.path().join("fault").display().to_string();
        environment.push(("SLUICE_NULL_FAULTS", faults));
        environment.extend(options.environment);
        let placed = options.instance.map(|(profile, start, expected)| {
            environment.extend([
                ("SLUICE_SOFTGPU_MODEL", "H100-80".to_owned()),
                ("SLUICE_SOFTGPU_MIG", "1".to_owned()),
            ]);
            let device = instances::device(&environment);
            let (instance, uuid) = instances::make(&device, profile, start);
            environment.push((
                "CUDA_VISIBLE_DEVICES",
                Visible::Instance(VisibleInstance { uuid, ..VisibleInstance::default() }).variable().unwrap(),
            ));
            (if expected { uuid } else { [7; 16] }, instance.id)
        });
        let arbiter = Command::new(env!("CARGO_BIN_EXE_sluice-arbiter"))
            .args(["--control-fd", "0"])
            .envs(environment.iter().map(|(name, value)| (*name, value.as_str())))
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        if let Some(count) = options.descriptors {
            let limit = Rlimit { current: Some(count), maximum: Some(count) };
            let pid = Pid::from_raw(i32::try_from(arbiter.id()).unwrap());
            prlimit(pid, Resource::Nofile, limit).unwrap();
        }
        let host = Host {
            arbiter,
            control,
            state,
            driver: options.driver.clone(),
            environment,
            listed: Arc::default(),
            bytes: 0,
            context: 0,
            margin: 0,
            host_access: HostAccess::None,
            events: Vec::new(),
            wanted: Vec::new(),
            used: HashMap::new(),
            work: HashMap::new(),
            pinned: (0, 0),
            upkeep: Upkeep::default(),
            figures: Figures::Unknown,
        };
        let setup = ArbiterSetup {
            unit: 0,
            driver: options.driver.display().to_string(),
            device: 0,
            identity: placed.map(|(uuid, _)| uuid),
            listed: 0,
            instance: placed.map_or(WHOLE, |(_, instance)| instance),
            verify: options.verify,
            scrub: options.scrub,
            reserve: options.reserve,
            receipts: 16 << 20,
        };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        let log = open(host.log_path(), flags, Mode::RUSR | Mode::WUSR).unwrap();
        socket::send(&host.control, &codec::encode(&setup).unwrap(), &[log.as_fd()]).unwrap();
        if options.inventory {
            host.attach_inventory();
        }
        host
    }

    /// Environment in which the arbiter and its workers find the device.
    pub(crate) fn environment(&self) -> &[(&'static str, String)] {
        &self.environment
    }

    fn log_path(&self) -> PathBuf {
        self.state.path().join("scrub.log")
    }

    /// The lines of the audit log.
    pub(crate) fn log(&self) -> Vec<String> {
        std::fs::read_to_string(self.log_path()).unwrap().lines().map(str::to_owned).collect()
    }

    pub(crate) fn attach_inventory(&self) {
        let (ours, theirs) = socket::pair().unwrap();
        self.send(ToArbiter::Inventory {}, &[theirs.as_fd()]);
        let listed = Arc::clone(&self.listed);
        thread::spawn(move || inventory(&ours, &listed));
    }

    /// Closes the arbiter's control socket.
    pub(crate) fn hang_up(&mut self) {
        let (fresh, _) = socket::pair().unwrap();
        self.control = fresh;
    }

    pub(crate) fn send(&self, message: ToArbiter, descriptors: &[rustix::fd::BorrowedFd<'_>]) {
        socket::send(&self.control, &message.encode(), descriptors).unwrap();
    }

    fn receive(&self) -> FromArbiter {
        let mut buffer = [0; BYTES];
        assert!(readable(&self.control, TIMEOUT), "the arbiter says nothing");
        let (message, descriptors) = socket::receive(&self.control, &mut buffer)
            .expect("a message of the arbiter")
            .expect("the arbiter lives");
        assert!(descriptors.is_empty());
        FromArbiter::decode(message).unwrap()
    }

    /// Keeps unrequested messages; returns the answer.
    fn answer(&mut self) -> FromArbiter {
        loop {
            match self.receive() {
                FromArbiter::Event { kind, vm, process, bytes } => {
                    self.events.push((ArbiterEvent::from_number(kind).unwrap(), vm, process, bytes));
                }
                FromArbiter::WantEscrow { ancestor, bytes } => self.wanted.push((ancestor, bytes)),
                FromArbiter::Time { vm, time, .. } => {
                    self.used.insert(vm, time.used);
                }
                FromArbiter::Work { vm, work, .. } => {
                    let WorkCounts { launches, copies, copied, calls } = work;
                    self.work.insert(vm, [launches, copies, copied, calls]);
                }
                FromArbiter::Pinned { vm, bytes, .. } => self.pinned = (vm, bytes),
                FromArbiter::Ready { bytes, .. } => self.bytes = bytes,
                FromArbiter::Upkeep { upkeep, figures } => (self.upkeep, self.figures) = (upkeep, figures),
                other => return other,
            }
        }
    }

    /// Bytes of its quota that a VM is charged for a worker whose driver is started.
    pub(crate) const fn driver_share(&self) -> u64 {
        (self.context + self.margin).next_multiple_of(2 * MIB)
    }

    /// Creates a VM with a limit and no other terms.
    pub(crate) fn vm(&self, vm: u32, limit: u64) {
        self.terms(vm, 1, limit, [0; 4]);
    }

    /// Creates a VM with `[guaranteed, headroom, pinned, ancestors]`.
    pub(crate) fn terms(&self, vm: u32, epoch: u64, limit: u64, more: [u64; 4]) {
        let [guaranteed, headroom, pinned, ancestors] = more;
        self.send(ToArbiter::Vm { vm, epoch, limit, guaranteed, headroom, pinned, ancestors }, &[]);
    }

    /// Starts a worker of a VM, in a process of its own.
    pub(crate) fn worker(&self, vm: u32) -> Worker {
        self.worker_of(vm, 1)
    }

    pub(crate) fn worker_of(&self, vm: u32, epoch: u64) -> Worker {
        self.worker_of_user(vm, epoch, NO_USER)
    }

    pub(crate) fn worker_of_user(&self, vm: u32, epoch: u64, user: u32) -> Worker {
        let (custody, theirs) = socket::pair().unwrap();
        let worker = Worker::start(&self.driver, &self.environment, theirs, Arc::clone(&self.listed));
        let pid = Pid::from_raw(i32::try_from(worker.process()).unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let message =
            ToArbiter::Worker { vm, epoch, process: worker.process(), session: 1, user, grouped: false };
        self.send(message, &[custody.as_fd(), pidfd.as_fd()]);
        worker
    }

    /// Starts a probe, in a process of its own, that has done nothing yet.
    pub(crate) fn prober(&self) -> Worker {
        let (custody, theirs) = socket::pair().unwrap();
        let probe = Worker::start(&self.driver, &self.environment, theirs, Arc::clone(&self.listed));
        let pid = Pid::from_raw(i32::try_from(probe.process()).unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        self.send(
            ToArbiter::Prober { process: probe.process(), grouped: false },
            &[custody.as_fd(), pidfd.as_fd()],
        );
        probe
    }

    /// Makes the arbiter find out with a probe whether it can use figures of a driver with this booking.
    pub(crate) fn probe(&mut self, books: DriverBooking) -> Figures {
        self.listed.lock().unwrap().books = books;
        let mut probe = self.prober();
        assert_eq!(probe.ask("begin"), "0 0");
        if books == DriverBooking::Absent {
            probe.say(&format!("take {}", 2 * MIB));
        } else {
            assert!(probe.take(2 * MIB).is_ok());
            self.listed.lock().unwrap().imported.insert(probe.process(), 32 * MIB);
            probe.say(&format!("take {}", 2 * MIB));
        }
        eventually("the probe's end", || probe.is_killed());
        self.listed.lock().unwrap().imported.remove(&probe.process());
        self.figures()
    }

    /// Probes while there is no VM; checks that the probe leaves nothing behind.
    pub(crate) fn measured(&mut self, books: DriverBooking) -> Figures {
        let figures = self.probe(books);
        eventually("what the probe had is taken back", || {
            let [total, lent, clean, ..] = self.unit();
            self.describe(0) == ([0, 0, 0], 0) && (total, lent, clean) == (self.bytes, 0, self.bytes)
        });
        figures
    }

    /// `[lent, headroom, dirty]` of a VM, and its holders.
    pub(crate) fn describe(&mut self, vm: u32) -> ([u64; 3], u32) {
        self.send(ToArbiter::DescribeVm { serial: 1, vm }, &[]);
        match self.answer() {
            FromArbiter::Vm { lent, headroom, dirty, holders, .. } => ([lent, headroom, dirty], holders),
            other => panic!("{other:?}"),
        }
    }

    /// Nanoseconds of the unit's time that a VM is charged.
    pub(crate) fn used(&mut self, vm: u32) -> u64 {
        self.describe(vm);
        self.used.get(&vm).copied().unwrap_or(0)
    }

    /// `[launches, copies, bytes copied, calls]` of a VM.
    pub(crate) fn work(&mut self, vm: u32) -> [u64; 4] {
        self.describe(vm);
        self.work.get(&vm).copied().unwrap_or_default()
    }

    /// Bytes of guest memory that a VM has pinned.
    pub(crate) fn pinned(&mut self, vm: u32) -> u64 {
        self.describe(vm);
        assert_eq!(self.pinned.0, vm, "it is said before what else the VM has");
        self.pinned.1
    }

    /// The care for the unit's memory.
    pub(crate) fn upkeep(&mut self) -> Upkeep {
        self.unit();
        self.upkeep
    }

    /// The use of the driver's bytes per process.
    pub(crate) fn figures(&mut self) -> Figures {
        self.unit();
        self.figures
    }

    /// `[total, lent, clean, dirty, headroom, suspect]` of the unit.
    pub(crate) fn unit(&mut self) -> [u64; 6] {
        self.send(ToArbiter::DescribeUnit { serial: 1 }, &[]);
        match self.answer() {
            FromArbiter::Unit { memory, .. } => {
                let UnitBytes { total, lent, clean, dirty, headroom, suspect } = memory;
                [total, lent, clean, dirty, headroom, suspect]
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the arbiter has the inventory's present answers: in each round it queries the memory first, and begins
    /// the next round after all answers to the last.
    pub(crate) fn looks(&self) {
        let asked = || self.listed.lock().unwrap().asked;
        let before = asked();
        eventually("another two rounds", || asked() >= before + 2);
    }

    /// Stops the arbiter in its present state, until [`Host::go_on`].
    pub(crate) fn stop(&self) {
        let arbiter = Pid::from_raw(i32::try_from(self.arbiter.id()).unwrap()).unwrap();
        kill_process(arbiter, Signal::STOP).unwrap();
        eventually("a stop", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.arbiter.id())).unwrap();
            let mut states =
                threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")));
            states.all(|stat| stat.is_ok_and(|stat| stat.rsplit(") ").next().unwrap_or("").starts_with('T')))
        });
    }

    /// Lets the arbiter continue after [`Host::stop`].
    pub(crate) fn go_on(&self) {
        let arbiter = Pid::from_raw(i32::try_from(self.arbiter.id()).unwrap()).unwrap();
        kill_process(arbiter, Signal::CONT).unwrap();
    }

    /// True if an event of this kind came.
    pub(crate) fn saw(&mut self, kind: ArbiterEvent) -> bool {
        self.unit();
        self.events.iter().any(|(other, ..)| *other == kind)
    }

    /// True if an event of this kind came for a VM.
    pub(crate) fn saw_of(&mut self, kind: ArbiterEvent, vm: u32) -> bool {
        self.unit();
        self.events.iter().any(|(other, of, ..)| (*other, *of) == (kind, vm))
    }

    /// Sets the fault that the null driver plays from now on; other drivers play none.
    pub(crate) fn play(&self, fault: &str) {
        std::fs::write(self.state.path().join("fault"), fault).unwrap();
    }

    /// Reads the arbiter's messages to its end; returns its exit status and its events.
    pub(crate) fn ends(&mut self) -> (std::process::ExitStatus, Vec<ArbiterEvent>) {
        let mut buffer = [0; BYTES];
        let mut events = Vec::new();
        loop {
            assert!(readable(&self.control, TIMEOUT), "the arbiter neither speaks nor ends");
            match socket::receive(&self.control, &mut buffer) {
                Ok(Some((message, _))) => {
                    if let FromArbiter::Event { kind, .. } = FromArbiter::decode(message).unwrap() {
                        events.push(ArbiterEvent::from_number(kind).unwrap());
                    }
                }
                Ok(None) | Err(Errno::CONNRESET) => return (self.arbiter.wait().unwrap(), events),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Limits the arbiter's descriptors to the present ones and this many more.
    pub(crate) fn leave_descriptors(&mut self, more: u64) {
        // The answer shows that all earlier messages have been received, and their descriptors.
        self.unit();
        let pid = Pid::from_raw(i32::try_from(self.arbiter.id()).unwrap());
        let limit = getrlimit(Resource::Nofile);
        let count = self.descriptors() as u64 + more;
        prlimit(pid, Resource::Nofile, Rlimit { current: Some(count), ..limit }).unwrap();
    }

    /// Checks that no contradiction was reported.
    pub(crate) fn assert_sound(&mut self) {
        self.unit();
        let broken =
            |kind: &ArbiterEvent| matches!(kind, ArbiterEvent::LedgerBroken | ArbiterEvent::ScrubFailed);
        assert!(!self.events.iter().any(|(kind, ..)| broken(kind)), "{:?}", self.events);
    }

    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.arbiter.id())).map_or(0, Iterator::count)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.arbiter.kill();
        let _ = self.arbiter.wait();
    }
}

/// True if a process exists that is not a zombie.
pub(crate) fn lives(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().unwrap_or("").starts_with(['Z', 'X']))
}

fn inventory(socket: &OwnedFd, listed: &Mutex<Listed>) {
    let mut buffer = [0; BYTES];
    loop {
        let message = match socket::receive(socket, &mut buffer) {
            Ok(Some((message, _))) => ToInventory::decode(message).unwrap(),
            Ok(None) | Err(Errno::CONNRESET) => return,
            Err(error) => panic!("{error}"),
        };
        let mut listed = listed.lock().unwrap();
        listed.asked += u64::from(matches!(message, ToInventory::Memory { .. }));
        let answer = match message {
            ToInventory::Process { serial, process, .. } => {
                let present = listed.stuck.contains(&process) || lives(process);
                FromInventory::Process { serial, process, present, bytes: 0, busy: u32::MAX }
            }
            ToInventory::Memory { serial, .. } => match listed.used {
                Some(used) => {
                    FromInventory::Memory { serial, total: 400 * MIB, used, free: 400 * MIB - used }
                }
                None => FromInventory::Failed { serial, error: 3 },
            },
            ToInventory::Nth { serial, index, .. } => {
                let found = listed.nth(index as usize);
                let (process, bytes) = found.unwrap_or((0, 0));
                // The time of the arbiter's kernels is negligible.
                let is_arbiter = listed.arbiter.is_some_and(|(arbiter, _)| arbiter == process);
                let unknown = if is_arbiter { 0 } else { u32::MAX };
                let busy = listed.busy.get(&process).copied().unwrap_or(unknown);
                FromInventory::Process { serial, process, present: found.is_some(), bytes, busy }
            }
            ToInventory::Units { serial } => FromInventory::Units { serial, count: 1 },
            ToInventory::Client {} => continue,
            other => panic!("an arbiter asks {other:?}"),
        };
        drop(listed);
        if socket::send(socket, &answer.encode(), &[]).is_err() {
            return;
        }
    }
}

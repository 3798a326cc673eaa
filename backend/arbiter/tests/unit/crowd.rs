//! Many busy workers of one VM, played in this process, beside one worker of another VM.

use crate::{
    MIB,
    host::{Host, Options},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit},
};
use sluice_kit::{
    figures::median,
    wait::{TIMEOUT, eventually, readable},
};
use sluice_messages::{
    control::{BYTES, NO_USER, ToArbiter},
    custody::{CustodyAnswer, CustodyRequest, UNIT},
};
use sluice_protocol::limits;
use sluice_shared_memory::socket;
use std::{
    io::IoSlice,
    mem::MaybeUninit,
    process::Child,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

const CROWD: usize = 512;
/// Descriptors of a message at most (`SCM_MAX_FD` of the kernel).
pub(crate) const MOST_DESCRIPTORS: usize = 253;
const ROUNDS: usize = 9;
/// Chunks that the neighbour takes in a round.
const TAKES: usize = 40;
/// Time for which the arbiter serves workers before it checks other sources, such as the neighbour's take.
const TURN: Duration = Duration::from_millis(1);
/// Largest factor between a take beside all of the crowd and one beside a single member and a turn.
const LONGER: f64 = 5.0;

/// A worker of which only the socket is real: its process computes nothing, and several may have one.
pub(crate) struct Played {
    custody: OwnedFd,
    serial: u64,
}

impl Played {
    pub(crate) fn join(host: &Host, vm: u32, process: &Child) -> Played {
        let worker = Played::sent(host, vm, process);
        assert!(worker.is_welcomed(), "a worker is refused");
        worker
    }

    /// A worker that the arbiter is told of.
    pub(crate) fn sent(host: &Host, vm: u32, process: &Child) -> Played {
        let (custody, theirs) = socket::pair().unwrap();
        let pidfd = pidfd_open(Pid::from_child(process), PidfdFlags::empty()).unwrap();
        let message = ToArbiter::Worker {
            vm,
            epoch: 1,
            process: process.id(),
            session: 1,
            user: NO_USER,
            grouped: false,
        };
        host.send(message, &[theirs.as_fd(), pidfd.as_fd()]);
        Played { custody, serial: 0 }
    }

    /// Waits for the answer of the arbiter; `false` if it closes the socket.
    pub(crate) fn is_welcomed(&self) -> bool {
        assert!(readable(&self.custody, TIMEOUT), "a worker has no answer");
        let mut buffer = [0; BYTES];
        let answer = socket::receive(&self.custody, &mut buffer).ok().flatten();
        answer.is_some_and(|(message, _)| {
            matches!(CustodyAnswer::decode(message), Ok(CustodyAnswer::Welcome { .. }))
        })
    }

    /// True if the arbiter has neither answered nor closed the socket.
    pub(crate) fn has_no_answer(&self) -> bool {
        !readable(&self.custody, Duration::ZERO)
    }

    /// Sends a request that needs no answer, with descriptors.
    pub(crate) fn send_with(&self, descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "too many descriptors");
        }
        let request = CustodyRequest::Idle { bytes: 0 }.encode();
        sendmsg(&self.custody, &[IoSlice::new(&request)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    /// The arbiter's next message, without its descriptors.
    fn receive(&self) -> CustodyAnswer {
        let mut buffer = [0; BYTES];
        let (message, _) = socket::receive(&self.custody, &mut buffer).unwrap().expect("it is served");
        CustodyAnswer::decode(message).unwrap()
    }

    fn send(&self, request: CustodyRequest) {
        socket::send(&self.custody, &request.encode(), &[]).unwrap();
    }

    fn ask(&mut self) {
        self.serial += 1;
        self.send(CustodyRequest::Take { serial: self.serial, bytes: UNIT });
    }

    /// Opens a share that does not exist, which is refused at once.
    fn ask_in_vain(&mut self) {
        self.serial += 1;
        self.send(CustodyRequest::Open { serial: self.serial, share: 1 });
    }

    /// Puts chunks of this worker into one share; returns its number.
    fn share(&mut self, leases: &[u64]) -> u128 {
        leases.iter().fold(0, |share, lease| {
            self.serial += 1;
            self.send(CustodyRequest::Share { serial: self.serial, share, lease: *lease });
            assert!(readable(&self.custody, TIMEOUT), "a share is not answered");
            match self.receive() {
                CustodyAnswer::Shared { share, .. } => share,
                other => panic!("{other:?}"),
            }
        })
    }

    /// Takes a chunk; returns its lease.
    fn take(&mut self) -> u64 {
        self.ask();
        loop {
            assert!(readable(&self.custody, TIMEOUT), "a take is not answered");
            match self.receive() {
                CustodyAnswer::Lent { lease, .. } => return lease,
                CustodyAnswer::Recall { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Keeps this many workers of a crowd busy: each sends a request after each answer. Returns the number of answers.
fn keep_busy(crowd: &mut [Played], busy: &AtomicUsize) -> usize {
    let mut answers = 0;
    let mut waits = vec![false; crowd.len()];
    loop {
        let count = busy.load(Ordering::Relaxed);
        if count == usize::MAX {
            return answers;
        }
        for (worker, waits) in crowd.iter_mut().zip(&mut waits).take(count).filter(|(_, waits)| !**waits) {
            worker.ask_in_vain();
            *waits = true;
        }
        let mut polled: Vec<PollFd<'_>> =
            crowd.iter().map(|worker| PollFd::new(&worker.custody, PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        poll(&mut polled, Some(&limit)).unwrap();
        let answered: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        for ((worker, waits), _) in
            crowd.iter().zip(&mut waits).zip(answered).filter(|(_, answered)| *answered)
        {
            assert!(matches!(worker.receive(), CustodyAnswer::Refused { .. }));
            answers += 1;
            *waits = false;
        }
    }
}

/// Ends the crowd's thread, also when the test fails.
struct Ends<'b>(&'b AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(usize::MAX, Ordering::Relaxed);
    }
}

// Promise: F83
#[test]
fn take_beside_512_busy_workers_of_another_vm_waits_for_one_turn() {
    const DESCRIPTORS: u64 = 8192;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum }).unwrap();
    let mut host =
        Host::with(Options { descriptors: Some(DESCRIPTORS), inventory: false, ..Options::default() });
    host.vm(1, UNIT);
    host.vm(2, 128 * MIB);
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut crowd: Vec<Played> = (0..CROWD).map(|_| Played::join(&host, 1, &process)).collect();
    let mut neighbour = Played::join(&host, 2, &process);
    let busy = AtomicUsize::new(0);
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let best = |rounds: &[Duration]| rounds.iter().copied().min().unwrap();
    let answers = thread::scope(|scope| {
        let crowd = scope.spawn(|| keep_busy(&mut crowd, &busy));
        let ends = Ends(&busy);
        for _ in 0..ROUNDS {
            for (count, times) in [(1, &mut alone), (CROWD, &mut beside)] {
                busy.store(count, Ordering::Relaxed);
                let mut leases = Vec::new();
                let mut round = Vec::new();
                for _ in 0..TAKES {
                    let asked = Instant::now();
                    leases.push(neighbour.take());
                    round.push(asked.elapsed());
                }
                times.push(median(&round));
                for lease in leases {
                    socket::send(&neighbour.custody, &CustodyRequest::Give { lease }.encode(), &[]).unwrap();
                }
                eventually("what it gave is back", || host.describe(2).0[0] == 0);
            }
        }
        drop(ends);
        crowd.join().unwrap()
    });
    // Of the best round: other load delays a take as well, but a take that waited for all of the crowd would be late in every round.
    let (alone, beside) = (best(&alone), best(&beside));
    let ratio = beside.as_secs_f64() / (alone + TURN).as_secs_f64();
    println!(
        "a take beside one busy worker: {alone:?}; beside {CROWD}: {beside:?}; ratio to that and a turn {ratio:.2}; the crowd had {answers} answers"
    );
    assert!(answers > ROUNDS * CROWD, "the crowd was not busy: it had {answers} answers");
    assert!(ratio < LONGER, "beside {CROWD} busy workers a take is answered {ratio:.1} times as late");
    process.kill().unwrap();
    process.wait().unwrap();
    host.assert_sound();
}

/// Time for which a process has used processors.
fn processor_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

// Promise: P65
#[test]
fn worker_that_reads_while_its_arbiter_is_stopped_is_not_ended() {
    let mut host = Host::with(Options { inventory: false, ..Options::default() });
    host.vm(1, 128 * MIB);
    let start = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (mut process, mut silent_process) = (start(), start());
    let mut worker = Played::join(&host, 1, &process);
    let leases: Vec<u64> = (0..30).map(|_| worker.take()).collect();
    let share = worker.share(&leases);
    // More answers than a socket holds.
    let silent = Played::join(&host, 1, &silent_process);
    for worker in [&worker, &silent] {
        worker.send(CustodyRequest::Open { serial: 1, share });
        assert!(readable(&worker.custody, TIMEOUT), "a share is not opened");
    }
    // Answered in a later turn, after the arbiter has found the sockets full.
    host.describe(1);
    host.stop();
    let (mut answers, began) = (0, Instant::now());
    while answers < leases.len() && readable(&worker.custody, TIMEOUT / 100) {
        worker.receive();
        answers += 1;
    }
    assert!((1..leases.len()).contains(&answers), "{answers} answers were sent");
    thread::sleep(Duration::from_millis(limits::CUSTODY_UNREAD_MILLISECONDS).saturating_sub(began.elapsed()));
    host.go_on();
    // It gets the others, and is served.
    for _ in answers..leases.len() {
        assert!(readable(&worker.custody, TIMEOUT), "an answer is not sent");
        worker.receive();
    }
    worker.take();
    silent_process.wait().unwrap();
    worker.take();
    process.kill().unwrap();
    process.wait().unwrap();
    host.assert_sound();
}

// Promise: F83
#[test]
fn workers_that_do_not_read_their_answers_cost_their_arbiter_no_time() {
    const DESCRIPTORS: u64 = 8192;
    const SILENT: usize = 160;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum }).unwrap();
    let mut host =
        Host::with(Options { descriptors: Some(DESCRIPTORS), inventory: false, ..Options::default() });
    host.vm(1, 128 * MIB);
    host.vm(2, 64 * MIB);
    let start = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (mut process, mut other) = (start(), start());
    let mut owner = Played::join(&host, 1, &process);
    let leases: Vec<u64> = (0..30).map(|_| owner.take()).collect();
    let share = owner.share(&leases);
    let silent: Vec<Played> = (0..SILENT).map(|_| Played::join(&host, 1, &process)).collect();
    // More answers than a socket holds, and each of them has a descriptor.
    silent.iter().for_each(|worker| worker.send(CustodyRequest::Open { serial: 1, share }));
    let mut neighbour = Played::join(&host, 2, &other);
    neighbour.take();
    // The least of several shares, because at first the arbiter sends as much as the sockets hold.
    let shares = (0..6).map(|_| {
        let (began, before) = (Instant::now(), processor_time(host.arbiter.id()));
        thread::sleep(Duration::from_millis(500));
        (processor_time(host.arbiter.id()) - before).as_secs_f64() / began.elapsed().as_secs_f64()
    });
    let share = shares.fold(f64::MAX, f64::min);
    println!("beside {SILENT} workers that do not read, the arbiter used {share:.2} processors");
    assert!(share < 0.12, "the arbiter used {share:.2} processors");
    // They are ended, and the other VM's worker is not.
    process.wait().unwrap();
    neighbour.take();
    other.kill().unwrap();
    other.wait().unwrap();
    host.assert_sound();
}

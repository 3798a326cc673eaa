//! The attempts of a hostile device, as data: name, attempt, expected answer.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, sendmsg};
use sluice_messages::control::{
    BYTES, FromArbiter, FromDevice, FromInventory, FromLauncher, FromWorker, NO_USER, Priority, TimeShare,
    ToArbiter, ToDevice, ToInventory, ToLauncher, ToWorker, VERSION,
};
use sluice_messages::custody::CustodyRequest;
use sluice_messages::inventory::Visible;
use sluice_tests::hostile_device::{ENDED, Order};
use sluice_tests::reach::ATTEMPTS;

use crate::{Answer, Hostile};

/// Linux's limit of descriptors in one message.
const MOST: usize = 253;
/// Messages that are sent without reading an answer.
const FLOOD: u32 = 10_000;
/// VM of the neighbour.
const NEIGHBOUR: u32 = 2;
/// A number of no VM, session, process or unit.
const ABSURD: u32 = u32::MAX - 7;

type Run = Box<dyn Fn(&mut Hostile, &Attempt) -> Result<String>>;

/// An attempt.
pub(crate) struct Attempt {
    /// Its name.
    pub(crate) name: String,
    /// True if it is made without a filter.
    pub(crate) lifted: bool,
    /// The expected outcome.
    pub(crate) expected: String,
    /// Makes the attempt and tells its outcome.
    pub(crate) run: Run,
}

fn attempt(
    name: impl Into<String>,
    expected: &str,
    run: impl Fn(&mut Hostile, &Attempt) -> Result<String> + 'static,
) -> Attempt {
    Attempt { name: name.into(), lifted: false, expected: expected.to_owned(), run: Box::new(run) }
}

/// All attempts.
pub(crate) fn all(order: &Order) -> Vec<Attempt> {
    let mut all = well_formed();
    all.extend(malformed());
    all.extend(foreign(order));
    all.extend(descriptors());
    all.push(attempt("a crowd that waits on its socket to sluiced", ENDED, |device, _| device.crowd()));
    all.push(attempt("a crowd behind a malformed message", ENDED, |device, _| {
        device.crowd_behind_malformed_message()
    }));
    // Only its filter keeps it from signals: it ends its workers by them, because they have no cgroups here.
    let by_filter_only = "signal";
    all.extend(ATTEMPTS.into_iter().map(|(name, reach)| Attempt {
        lifted: true,
        ..attempt(
            format!("reach {name} without a filter"),
            if name == by_filter_only { "reached" } else { "refused" },
            move |device, _| {
                let outcome = reach(device.order.targets.as_ref().context("targets")?);
                Ok(if outcome.is_ok() { "reached" } else { "refused" }.to_owned())
            },
        )
    }));
    all
}

/// Messages that a device may send, with numbers of others, in another order, twice, and without end.
fn well_formed() -> Vec<Attempt> {
    vec![
        attempt("ends of sessions that are not its own", "served", |device, _| {
            let strange = [0, 1, 2, 3, ABSURD, u32::MAX];
            for session in strange.into_iter().chain(numbers(&device.order)) {
                device.say(FromDevice::SessionEnded { session })?;
            }
            device.served()
        }),
        attempt("sessions with numbers of others", "all served", |device, _| {
            let wanted: Vec<_> = numbers(&device.order).into_iter().chain([0, ABSURD, u32::MAX]).collect();
            let mut workers = Vec::new();
            for session in &wanted {
                device.want(*session)?;
                workers.push(device.receive()?);
            }
            let own = |(answer, wanted): (&Answer, &u32)| matches!(answer, Answer::Worker { session, .. } if session == wanted);
            let served = workers.iter().zip(&wanted).filter(|pair| own(*pair)).count();
            Ok(if served == wanted.len() { "all served".to_owned() } else { format!("{workers:?}") })
        }),
        attempt("sessions of users of others", "all served", |device, _| {
            let users = [0, 1, 65534, NO_USER - 1].into_iter().chain(numbers(&device.order));
            let mut served = Vec::new();
            for (session, user) in (100..).zip(users) {
                device.say(FromDevice::WorkerWanted { session, user })?;
                served.push(matches!(device.receive()?, Answer::Worker { .. }));
            }
            Ok(if served.iter().all(|served| *served) {
                "all served".to_owned()
            } else {
                format!("{served:?}")
            })
        }),
        attempt("one session wanted three times", "one worker", |device, _| {
            (0..3).try_for_each(|_| device.want(7))?;
            let mut workers = 0;
            // The answers to the requests for session 7 come before, or end it.
            device.say(FromDevice::WorkerWanted { session: 8, user: NO_USER })?;
            loop {
                match device.receive()? {
                    Answer::Worker { session: 7, .. } => workers += 1,
                    Answer::Worker { session: 8, .. } => break,
                    _ => {}
                }
            }
            Ok(if workers == 1 { "one worker".to_owned() } else { format!("{workers} workers") })
        }),
        attempt("ends before and at the begin of a session, twice", "served", |device, _| {
            for _ in 0..2 {
                device.say(FromDevice::SessionEnded { session: 9 })?;
                device.want(9)?;
                device.say(FromDevice::SessionEnded { session: 9 })?;
                device.say(FromDevice::SessionEnded { session: 9 })?;
            }
            device.served()
        }),
        attempt("a session that is wanted again while its worker dies", "served", |device, _| {
            for _ in 0..8 {
                device.want(11)?;
                while !matches!(device.receive()?, Answer::Worker { session: 11, .. }) {}
                device.say(FromDevice::SessionEnded { session: 11 })?;
            }
            device.served()
        }),
        attempt("a session whose worker is killed and not reported", "served", |device, _| {
            let worker = device.worker()?;
            rustix::process::pidfd_send_signal(&worker[1], rustix::process::Signal::KILL)?;
            device.served()
        }),
        attempt("ten thousand ends of sessions at once", "served", |device, _| {
            (0..FLOOD).try_for_each(|session| device.say(FromDevice::SessionEnded { session }))?;
            device.served()
        }),
        attempt("workers without end, and no answer read", "closed", |device, _| {
            for session in 0..FLOOD {
                match device.want(session) {
                    Err(Errno::PIPE) => break,
                    other => other?,
                }
            }
            device.closed()
        }),
    ]
}

/// Bytes that are no message, and messages with descriptors.
fn malformed() -> Vec<Attempt> {
    let wanted = FromDevice::WorkerWanted { session: 1, user: NO_USER }.encode();
    let lengths = [0, 1, 4, 8, BYTES - 1, BYTES + 1, 4096, 64 << 10];
    let mut all: Vec<_> = lengths
        .into_iter()
        .map(|length| {
            attempt(format!("message of {length} bytes"), "closed", move |device, _| {
                let mut bytes = wanted.to_vec();
                bytes.resize(length, 0xff);
                send(&device.control, &bytes, &[])?;
                device.closed()
            })
        })
        .collect();
    all.extend([0, 3, 0xff, u32::MAX].into_iter().map(|tag| {
        attempt(format!("message of type {tag}"), "closed", move |device, _| {
            let mut bytes = [0xee; BYTES];
            bytes[..4].copy_from_slice(&tag.to_le_bytes());
            send(&device.control, &bytes, &[])?;
            device.closed()
        })
    }));
    all.extend([1, 4, 5, 64, MOST].into_iter().map(|count| {
        attempt(format!("message with {count} descriptors"), "closed", move |device, _| {
            send(&device.control, &wanted, &vec![device.listener.as_fd(); count])?;
            device.closed()
        })
    }));
    all.push(attempt("ten thousand messages with 64 descriptors", "closed", move |device, _| {
        flood(device, &wanted, |device| device.listener.as_fd())?;
        device.closed()
    }));
    all.push(attempt("its own socket, sent into itself", "closed", move |device, _| {
        flood(device, &wanted, |device| device.control.as_fd())?;
        device.closed()
    }));
    // The last close of such a socket waits until its peer reads.
    all.push(attempt("a socket that lingers", "closed", move |device, _| {
        ensure!(!device.given.is_empty(), "the guest has sent no descriptor");
        let given = core::mem::take(&mut device.given);
        let borrowed: Vec<_> = given.iter().map(|given| given.as_fd()).collect();
        send(&device.control, &wanted, &borrowed)?;
        // From here on sluiced has the only ones.
        drop(given);
        device.closed()
    }));
    all.push(attempt("sockets that linger, behind a broken message", "closed", move |device, _| {
        ensure!(!device.given.is_empty(), "the guest has sent no descriptor");
        send(&device.control, &[], &[])?;
        let mut given = core::mem::take(&mut device.given);
        while let Some(one) = given.pop() {
            match send(&device.control, &wanted, &[one.as_fd()]) {
                Err(Errno::PIPE) => {
                    // This process would wait for their close itself; its end does not.
                    core::mem::forget((one, given));
                    break;
                }
                other => other?,
            }
        }
        device.closed()
    }));
    all
}

/// Sends a message with 64 descriptors over and over, until it is refused.
fn flood(
    device: &Hostile,
    message: &[u8],
    descriptor: impl Fn(&Hostile) -> BorrowedFd<'_>,
) -> Result<(), Errno> {
    for _ in 0..FLOOD {
        match send(&device.control, message, &[descriptor(device); 64]) {
            Err(Errno::PIPE) => break,
            // The kernel bounds the descriptors that are under way.
            Err(Errno::TOOMANYREFS) => std::thread::park_timeout(Duration::from_millis(1)),
            other => other?,
        }
    }
    Ok(())
}

/// Messages of other sockets: to the arbiter, the launcher, the inventory, a worker, and from them.
fn foreign(order: &Order) -> Vec<Attempt> {
    let process = order.processes.first().copied().unwrap_or(1);
    let (vm, epoch) = (NEIGHBOUR, order.epoch);
    let visible = Visible::Host;
    let mut all: Vec<(String, [u8; BYTES], usize)> = Vec::new();
    macro_rules! add {
        ($($kind:ident { $($message:ident $fields:tt),* $(,)? })*) => {$($({
            let message = $kind::$message $fields;
            let name = format!("{}::{}", stringify!($kind), stringify!($message));
            all.push((name, message.encode(), message.descriptors()));
        })*)*};
    }
    add! {
        ToLauncher {
            StartWorker { vm, session: 1, visible },
            StartDevice { vm, scanouts: 0, direct: true, fixed_arena: 0 },
            StartArbiter { unit: 0, visible },
            StartInventory {},
            Settle {},
            KeepWorker { process, started: 0 },
            Sweep {},
            Find { process },
            StartProbe { unit: 0, visible },
            Attach { configuration: [0; 16] },
            RemoveSockets { vm },
            EndAll {},
        }
        ToArbiter {
            Vm { vm, epoch: epoch + 1, limit: 0, guaranteed: 0, headroom: 0, pinned: 0, ancestors: 0 },
            Worker { vm, epoch, process, session: 1, user: NO_USER, grouped: true },
            Escrow { ancestor: 1, bytes: 0 },
            Fence { vm, epoch },
            Forget { vm, epoch: epoch.saturating_sub(1) },
            DescribeVm { serial: 1, vm },
            DescribeUnit { serial: 1 },
            Inventory {},
            TimeShare { vm, epoch, share: TimeShare { weight: 1, priority: Priority::Low, cap: 1, guarantee: 0, hang: 1 } },
            Probe {},
            Prober { process, grouped: true },
        }
        ToInventory { Units { serial: 1 }, Process { serial: 1, unit: 0, instance: 0, process } }
        ToWorker {
            Begin { version: VERSION, session: 1 },
            Attach { slot: 0, address: 0, bytes: 4096, runs: 1, extents: 1, granule: 4096, more: false },
            Detach { slot: 0 },
            Custody { device: 0 },
        }
        ToDevice { Worker { session: 1, grouped: true }, NoWorker { session: 1, error: 0 }, Resume {} }
        FromLauncher {
            Started { process, started: 0, grouped: true },
            Failed { error: 1 },
            Settled {},
            Found { started: 0, worker: true, grouped: true },
            Attached { process, fresh: true },
        }
        FromWorker { Attached { slot: 0, error: 0 }, Detached { slot: 0 }, Unfit { ability: 1, error: 1 } }
        FromArbiter { Pinned { vm, epoch, bytes: u64::MAX } }
        FromInventory { Units { serial: 1, count: ABSURD } }
        CustodyRequest {
            Take { serial: 1, bytes: 2 << 20 },
            Give { lease: 1 },
            Open { serial: 1, share: 1 },
            Pin { serial: 1, bytes: u64::MAX },
        }
    }
    let attempts = all.into_iter().map(|(name, bytes, count)| {
        // The first two types of each socket have the numbers of a device's two messages, and are taken for them.
        let is_own = count == 0 && FromDevice::decode(&bytes).is_ok();
        attempt(name, if is_own { "served" } else { "closed" }, move |device, attempt| {
            send(&device.control, &bytes, &vec![device.listener.as_fd(); count])?;
            device.state(attempt)
        })
    });
    attempts.collect()
}

/// Each descriptor that a device holds, used against its other end.
fn descriptors() -> Vec<Attempt> {
    vec![
        attempt("its socket to sluiced, shut down for sending", "closed", |device, _| {
            rustix::net::shutdown(&device.control, Shutdown::Write)?;
            device.closed()
        }),
        attempt(
            "its socket to sluiced, shut down for receiving, and workers wanted",
            "closed",
            |device, _| {
                rustix::net::shutdown(&device.control, Shutdown::Read)?;
                (0..64).try_for_each(|session| device.want(session))?;
                rustix::net::shutdown(&device.control, Shutdown::Both)?;
                device.closed()
            },
        ),
        attempt("its socket for front-ends, shut down", "served", |device, _| {
            rustix::net::shutdown(&device.listener, Shutdown::Both)?;
            device.served()
        }),
        attempt("every message to its worker, with wrong numbers and descriptors", "served", |device, _| {
            let worker = device.worker()?;
            let messages = [
                ToWorker::Detach { slot: u32::MAX },
                ToWorker::Custody { device: u32::MAX },
                ToWorker::Begin { version: VERSION, session: ABSURD },
                ToWorker::Begin { version: VERSION + 1, session: 1 },
                ToWorker::Attach {
                    slot: u32::MAX,
                    address: !0xfff,
                    bytes: u64::MAX,
                    runs: u32::MAX,
                    extents: u32::MAX,
                    granule: u64::MAX,
                    more: true,
                },
            ];
            let file = memory_file()?;
            for message in messages {
                for descriptor in [file.as_fd(), device.control.as_fd(), worker[0].as_fd(), worker[1].as_fd()]
                {
                    let own = vec![descriptor; message.descriptors()];
                    to_worker(&worker, &message.encode(), &own)?;
                    to_worker(&worker, &message.encode(), &[descriptor; 64])?;
                }
                to_worker(&worker, &message.encode()[..17], &[])?;
            }
            to_worker(&worker, &[0xff; 8192], &[])?;
            device.served()
        }),
        attempt("ten thousand messages to its worker", "served", |device, _| {
            let worker = device.worker()?;
            let message = ToWorker::Detach { slot: 0 }.encode();
            (0..FLOOD).try_for_each(|_| to_worker(&worker, &message, &[]))?;
            device.served()
        }),
        attempt("its worker's socket, shut down, with the worker", "served", |device, _| {
            let worker = device.worker()?;
            rustix::net::shutdown(&worker[0], Shutdown::Both)?;
            device.served()
        }),
        attempt("the file with which its worker is ended, written and extended", "served", |device, _| {
            let worker = device.worker()?;
            // Without cgroups there is no such file.
            for file in worker.iter().skip(2) {
                for text in ["0", "2", "-1", "", "\n", "1"] {
                    // Values that the kernel refuses.
                    rustix::io::write(file, text.as_bytes()).ok();
                }
                rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 1 << 20).ok();
            }
            device.served()
        }),
        attempt("standard error, flooded", "served", |device, _| {
            let line = format!("{}\n", "sluiced: VM 2 is fenced ".repeat(100));
            for _ in 0..FLOOD {
                // The pipe is full most of the time.
                rustix::io::write(rustix::stdio::stderr(), line.as_bytes()).ok();
            }
            device.served()
        }),
    ]
}

/// Numbers that mean something to others.
fn numbers(order: &Order) -> Vec<u32> {
    let epoch = u32::try_from(order.epoch).unwrap_or(u32::MAX);
    let epochs = [epoch.wrapping_sub(1), epoch, epoch.wrapping_add(1)];
    let mut all = [&order.processes[..], &order.sessions[..], &epochs[..]].concat();
    all.sort_unstable();
    all.dedup();
    all.retain(|number| !matches!(*number, 0 | ABSURD | u32::MAX));
    all
}

fn memory_file() -> Result<OwnedFd> {
    let file = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20)?;
    Ok(file)
}

/// Sends to a worker, which may have ended meanwhile, or read nothing.
fn to_worker(worker: &[OwnedFd], message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    match send_with(&worker[0], message, descriptors, SendFlags::DONTWAIT) {
        Err(Errno::PIPE | Errno::CONNRESET | Errno::AGAIN) => Ok(()),
        other => other,
    }
}

fn send(socket: &OwnedFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    send_with(socket, message, descriptors, SendFlags::empty())
}

/// Sends a message of any length with any number of descriptors.
fn send_with(
    socket: &OwnedFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(message)], &mut control, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

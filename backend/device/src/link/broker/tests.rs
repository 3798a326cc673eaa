#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use super::{super::*, *};
use rustix::{fd::AsFd as _, fs::OFlags};
use sluice_messages::control::{self, FromDevice, ToDevice};
use sluice_shared_memory::socket;
use std::{collections::BTreeSet, mem::ManuallyDrop, time::Instant};

// Promise: V23
#[test]
fn worker_requests_of_closed_sessions_are_dropped_and_others_queued() {
    let link = Link::new(true).unwrap();
    let (socket, daemon) = socket::pair().unwrap();
    let mut broker = Broker::new(&link, Some(socket));
    rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
    let stays = Arc::new(Inbox::new().unwrap());
    // Clients connect, request and leave, again and again, while no process reads the requests.
    for session in 0..4 * u32::try_from(limits::SESSIONS).unwrap() {
        let goes = Arc::new(Inbox::new().unwrap());
        link.wanted(session, 0, &goes);
        broker.round();
    }
    let last = u32::MAX;
    link.wanted(last, 0, &stays);
    broker.round();
    assert!(broker.unsent.len() <= limits::SESSIONS, "{} messages", broker.unsent.len());
    assert!(broker.held.len() <= 1, "{} sessions wait", broker.held.len());
    // Once the requests are read, the clients that are left get a turn.
    let mut received = Vec::new();
    rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
    for _ in 0..8 * limits::SESSIONS {
        let mut buffer = [0; control::BYTES];
        match socket::receive(&daemon, &mut buffer) {
            Ok(Some((bytes, _))) => received.push(FromDevice::decode(bytes).unwrap()),
            _ => broker.round(),
        }
        if received.last() == Some(&FromDevice::WorkerWanted { session: last, user: 0 }) {
            break;
        }
    }
    assert_eq!(
        received.last(),
        Some(&FromDevice::WorkerWanted { session: last, user: 0 }),
        "it is forgotten"
    );
}

// Promise: V23
#[test]
fn requested_session_counts_until_the_daemon_answers() {
    let link = Link::new(true).unwrap();
    let (socket, daemon) = socket::pair().unwrap();
    let mut broker = Broker::new(&link, Some(socket));
    rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
    rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
    // Requested by clients that are gone before there is an answer.
    let mut opened = Vec::new();
    while let Some(session) = link.open(None) {
        let inbox = Arc::new(Inbox::new().unwrap());
        link.wanted(session, 0, &inbox);
        broker.round();
        opened.push((session, inbox));
    }
    assert_eq!(opened.len(), limits::SESSIONS);
    let kept = opened.pop().unwrap();
    let sessions: Vec<u32> = opened.drain(..).map(|(session, _)| session).collect();
    assert_eq!(
        (link.sessions(), link.open(None)),
        (limits::SESSIONS, None),
        "every session is counted until its answer"
    );
    // Refused, and with workers that no device takes.
    let mut buffer = [0; control::BYTES];
    while let Ok(Some(_)) = socket::receive(&daemon, &mut buffer) {}
    for session in &sessions {
        let left = link.sessions();
        let answer = if session.is_multiple_of(2) {
            ToDevice::NoWorker { session: *session, error: 46 }
        } else {
            ToDevice::Worker { session: *session, grouped: false }
        };
        let (one, _other) = socket::pair().unwrap();
        let both = [one.as_fd(), one.as_fd()];
        socket::send(&daemon, &answer.encode(), both.get(..answer.descriptors()).unwrap()).unwrap();
        broker.receive();
        assert_eq!(link.sessions(), left.saturating_sub(1), "answered");
    }
    // A session whose device closes its inbox, which may cross the answer.
    assert!(kept.1.close().is_empty());
    broker.deliver(&Arc::downgrade(&kept.1), Arrival::None { session: kept.0, error: 46 });
    assert_eq!(link.sessions(), 0);
}

// Promise: V23
#[test]
fn resources_kept_for_a_worker_are_released_when_it_exits() {
    let link = Link::new(false).unwrap();
    let mut broker = Broker::new(&link, None);
    // In place of a pidfd: readable when the worker is gone, and not a process to kill.
    let (gone, end) = rustix::pipe::pipe().unwrap();
    let kept: KeepAlive = Arc::new(());
    let held = Arc::downgrade(&kept);
    link.reap(1, gone.into(), Some(kept));
    broker.round();
    link.ended(2);
    broker.round();
    assert_eq!(held.strong_count(), 1, "it is not gone");
    drop(end);
    broker.round();
    assert_eq!(held.strong_count(), 0);
}

// Promise: Q51
#[test]
fn worker_request_waits_for_earlier_workers_to_exit() {
    let link = Link::new(true).unwrap();
    let (socket, daemon) = socket::pair().unwrap();
    let inbox = Arc::new(Inbox::new().unwrap());
    let mut broker = Broker::new(&link, Some(socket));
    rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
    rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
    let received = || {
        let mut buffer = [0; control::BYTES];
        let message = socket::receive(&daemon, &mut buffer).ok().flatten();
        message.map(|(bytes, _)| FromDevice::decode(bytes).unwrap())
    };
    link.ending(1);
    link.wanted(2, 1000, &inbox);
    link.ending(3);
    broker.round();
    // The request does not stop waiting by time alone, also on a busy machine.
    broker.held.front_mut().unwrap().since += 1000 * PREDECESSORS;
    // The one that ends later was in the same batch; it sent no request either.
    assert_eq!(received(), None, "a worker is not gone");
    link.ended(3);
    broker.round();
    assert_eq!(received(), Some(FromDevice::SessionEnded { session: 3 }));
    assert_eq!(received(), None);
    link.ending(4);
    link.ended(1);
    broker.round();
    assert_eq!(received(), Some(FromDevice::SessionEnded { session: 1 }));
    assert_eq!(
        received(),
        Some(FromDevice::WorkerWanted { session: 2, user: 1000 }),
        "what ends later is not waited for"
    );
    link.wanted(5, 1001, &inbox);
    broker.round();
    assert_eq!(received(), None);
    broker.held.front_mut().unwrap().since = Instant::now().checked_sub(PREDECESSORS).unwrap();
    broker.round();
    assert_eq!(received(), Some(FromDevice::WorkerWanted { session: 5, user: 1001 }), "nor for ever");
}

// Promise: F9
#[test]
fn link_thread_survives_a_panic_and_loses_no_request() {
    let link = Arc::new(Link::new(true).unwrap());
    let (socket, daemon) = socket::pair().unwrap();
    // The thread ends its process with success once this end is closed, which would hide a failure of this test and of others.
    let daemon = ManuallyDrop::new(daemon);
    let served = Arc::clone(&link);
    std::thread::spawn(move || serve(&served, Some(socket)));
    let inbox = Arc::new(Inbox::new().unwrap());
    for session in 0..3 {
        link.wanted(2 * session, 0, &inbox);
        link.push(LinkRequest::Panic);
        link.wanted(2 * session + 1, 0, &inbox);
    }
    let received = (0..6).map(|_| {
        let mut buffer = [0; control::BYTES];
        let (bytes, _) = socket::receive(&*daemon, &mut buffer).unwrap().unwrap();
        match FromDevice::decode(bytes).unwrap() {
            FromDevice::WorkerWanted { session, .. } => session,
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(received.collect::<BTreeSet<_>>(), (0..6).collect());
}

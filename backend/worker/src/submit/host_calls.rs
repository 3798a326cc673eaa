//! Calls of the program's functions, in the order of a stream.
//!
//! A driver calls a host function on a thread of its own and holds the stream until the function returns. The worker gives it
//! [`HostCalls::run`], which passes the call on to the guest through two words of the session's page, and returns once the guest has
//! run the program's function. The driver's threads call it, for [`crate::submit::Operation::HostCall`]; so nothing here may call the
//! driver, which forbids that in a host function.
//!
//! ```text
//! driver's thread: [publish what is complete] -> store the call, wake the guest -> [wait for its return] -> return
//! guest:                                               run the function -> store the return
//! ```
//!
//! One call of a session is with the guest at a time, as with a driver that has one thread for host functions; the others wait for
//! their turn. A node of a graph that calls a function does the same at each launch ([`HostCalls::node`]). The guest's word is only
//! compared. A guest that stores it early, late or never does so to its own streams: no other
//! thread of the worker waits for it, and the end of the process ends the wait.

use crate::{session::Session, submit::completion::Completion};
use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use sluice_driver::{Code, Driver, Handle, NodeCall, NodeFunction, code};
use sluice_protocol::{limits, session::HostCall};
use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Instant,
};

/// The calls of all sessions of this process; a worker has one session. A node names its session by the place here and not by a pointer:
/// no call tells when a driver is done with the launches of an executable that was destroyed.
static SESSIONS: Mutex<Vec<Weak<HostCalls>>> = Mutex::new(Vec::new());

/// The calls of one session.
#[derive(Debug)]
pub(crate) struct HostCalls {
    /// The place in [`SESSIONS`].
    number: u32,
    session: Arc<Session>,
    completion: Arc<Completion>,
    /// The latest call. Locked while a call is with the guest.
    turn: Mutex<HostCall>,
    /// Calls that the driver has and that did not return.
    under_way: AtomicU32,
}

impl HostCalls {
    pub(crate) fn new(session: Arc<Session>, completion: Arc<Completion>) -> Arc<HostCalls> {
        let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let number = u32::try_from(sessions.len()).unwrap_or(u32::MAX);
        let (turn, under_way) = (Mutex::default(), AtomicU32::new(0));
        let calls = Arc::new(HostCalls { number, session, completion, turn, under_way });
        sessions.push(Arc::downgrade(&calls));
        calls
    }

    /// The function of a node that has the guest run the function that it names `token`, at each launch.
    pub(crate) fn node(&self, token: u32) -> NodeFunction {
        NodeFunction::new::<HostNode>(u64::from(self.number) << 32 | u64::from(token))
    }

    /// Has the guest run the function that it names `token`, in the order of a stream, once: the work of a sequence in a slot.
    pub(crate) fn launch(
        self: &Arc<HostCalls>,
        driver: &Driver,
        stream: Handle,
        own: (u32, u64),
        token: u32,
    ) -> Result<(), Code> {
        // The guest's library keeps below the limit; the driver keeps memory for each call.
        if self.under_way.fetch_add(1, Ordering::Relaxed) >= limits::HOST_FUNCTIONS {
            self.under_way.fetch_sub(1, Ordering::Relaxed);
            return Err(code::OUT_OF_MEMORY);
        }
        let calls = Arc::clone(self);
        let launched = driver.launch_host(stream, move || {
            calls.run(token, Some(own));
            calls.under_way.fetch_sub(1, Ordering::Relaxed);
        });
        launched.inspect_err(|_| {
            self.under_way.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Has the guest run the function that it names `token`, and returns when the guest says that the function has returned. Called by
    /// the driver's thread, as the content of a host function: the driver's earlier work on which the function depends is complete.
    /// `own` is the slot and the sequence that the call completes; a node completes none.
    fn run(&self, token: u32, own: Option<(u32, u64)>) {
        let mut latest = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Work that is complete must also appear so: the results of copies to gathered memory, sequences, text of kernels.
        match own {
            Some(own) => self.completion.settle_for(own),
            None => self.completion.settle(),
        }
        let call = latest.next(token);
        *latest = call;
        self.session.call_host(call);
        self.await_return(call);
        drop(latest);
        // The stream goes on as soon as this returns. Another call would soon look for that itself.
        if self.under_way.load(Ordering::Relaxed) <= u32::from(own.is_some()) {
            self.completion.hurry();
        } else {
            self.completion.notify();
        }
    }

    /// Waits for the return of a call: first it polls, then it naps. The guest needs no way to wake it, and a wait of any length costs
    /// little. It does not yield: the kernel would run every thread that polls before it, each for a whole slice.
    fn await_return(&self, call: HostCall) {
        let started = Instant::now();
        while self.session.host_returned() != call {
            let elapsed = started.elapsed();
            if elapsed < POLLING {
                core::hint::spin_loop();
            } else {
                std::thread::sleep((elapsed / PART).clamp(SHORTEST_NAP, LONGEST_NAP));
            }
        }
    }
}

/// Calls of nodes.
struct HostNode;

impl NodeCall for HostNode {
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
    fn call(data: u64) {
        let (number, token) = ((data >> 32) as usize, data as u32);
        let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = sessions.get(number).and_then(Weak::upgrade);
        drop(sessions);
        if let Some(calls) = calls {
            calls.run(token, None);
        }
    }
}

/// Most functions return within this time, if the guest has a processor for them.
const POLLING: Duration = Duration::from_micros(20);
/// A nap lasts this fraction of the wait so far, within bounds.
const PART: u32 = 32;
/// A shorter one often ends before the kernel runs another thread, such as that of the function.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);

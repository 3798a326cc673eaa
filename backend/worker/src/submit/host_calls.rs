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
//! their turn. The guest's word is only compared. A guest that stores it early, late or never does so to its own streams: no other
//! thread of the worker waits for it, and the end of the process ends the wait.

use crate::{session::Session, submit::completion::Completion};
use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use sluice_driver::{Code, Driver, Handle, code};
use sluice_protocol::{limits, session::HostCall};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// The calls of one session.
#[derive(Debug)]
pub(crate) struct HostCalls {
    session: Arc<Session>,
    completion: Arc<Completion>,
    /// The latest call. Locked while a call is with the guest.
    turn: Mutex<HostCall>,
    /// Calls that the driver has and that did not return.
    under_way: AtomicU32,
}

impl HostCalls {
    pub(crate) fn new(session: Arc<Session>, completion: Arc<Completion>) -> HostCalls {
        HostCalls { session, completion, turn: Mutex::default(), under_way: AtomicU32::new(0) }
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
            calls.run(token, own);
            calls.under_way.fetch_sub(1, Ordering::Relaxed);
        });
        launched.inspect_err(|_| {
            self.under_way.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Has the guest run the function that it names `token`, and returns when the guest says that the function has returned. Called by
    /// the driver's thread, as the content of a host function: the driver's earlier work on which the function depends is complete.
    /// `own` is the slot and the sequence that the call completes.
    fn run(&self, token: u32, own: (u32, u64)) {
        let mut latest = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Work that is complete must also appear so: the results of copies to gathered memory, sequences, text of kernels.
        self.completion.settle_for(own);
        let call = latest.next(token);
        *latest = call;
        self.session.call_host(call);
        self.await_return(call);
        drop(latest);
        // The stream goes on as soon as this returns. Another call would soon look for that itself.
        if self.under_way.load(Ordering::Relaxed) <= 1 {
            self.completion.hurry();
        } else {
            self.completion.notify();
        }
    }

    /// Waits for the return of a call: first it lets other threads run, then it naps. The guest needs no way to wake it, and a wait of any
    /// length costs little.
    fn await_return(&self, call: HostCall) {
        let started = Instant::now();
        while self.session.host_returned() != call {
            let elapsed = started.elapsed();
            if elapsed < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep((elapsed / PART).clamp(SHORTEST_NAP, LONGEST_NAP));
            }
        }
    }
}

/// Most functions return within this time.
const YIELDS: Duration = Duration::from_micros(100);
/// A nap lasts this fraction of the wait so far, within bounds.
const PART: u32 = 32;
const SHORTEST_NAP: Duration = Duration::from_micros(5);
const LONGEST_NAP: Duration = Duration::from_millis(1);

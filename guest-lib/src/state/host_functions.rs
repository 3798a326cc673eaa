//! Functions of the program that run in the order of a stream, and the thread that runs them.
//!
//! A call that enters one gives it a token and posts the token. When the stream reaches it, the worker holds the stream and stores the
//! token in the session page; the thread runs the function and stores the answer there. One thread runs all functions of the process,
//! one at a time and without a lock, so other threads go on to use the driver; a function itself may not call it.
//!
//! Once work has failed, or the worker is gone, no stream reaches a function any more. Then the functions of `cuStreamAddCallback` run
//! with the error, in the order in which they were entered, and the others are dropped, as with the vendor's driver.

use crate::{
    arguments::HostTask,
    error::{Error, Result},
    lifetime,
    session::Session,
    spawn::spawn_for_program,
    state::thread,
};
use core::sync::atomic::{AtomicUsize, Ordering};
use sluice_protocol::{limits, session::HostCall};
use std::{
    collections::HashMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// The functions that were entered and did not run yet.
#[derive(Default)]
pub(crate) struct HostFunctions {
    table: Mutex<TaskTable>,
    /// Notifies the thread of the first function.
    some: Condvar,
    /// Number of functions, to be read without the lock.
    count: AtomicUsize,
}

#[derive(Default)]
struct TaskTable {
    /// By their tokens, each with its place in the order of entry.
    tasks: HashMap<u32, (u64, HostTask)>,
    token: u32,
    entered: u64,
    started: bool,
}

impl HostFunctions {
    fn lock(&self) -> MutexGuard<'_, TaskTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a function did not run yet, or runs.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Enters a function, and has `post` post the token that it gets. The first function starts the thread.
    pub(crate) fn post(
        &'static self,
        session: &'static Session,
        task: HostTask,
        post: impl FnOnce(u32) -> Result<u64>,
    ) -> Result {
        let token = self.enter(session, task)?;
        match post(token) {
            // The failure of other work may have run it just now; then it counts as posted.
            Err(error) if self.withdraw(token) => Err(error),
            _ => {
                // After the post, which the thread would delay if few processors are free.
                self.some.notify_one();
                Ok(())
            }
        }
    }

    fn enter(&'static self, session: &'static Session, task: HostTask) -> Result<u32> {
        let mut table = self.lock();
        if table.tasks.len() + 1 >= limits::HOST_FUNCTIONS as usize {
            return Err(Error::OUT_OF_MEMORY);
        }
        if !table.started {
            spawn_for_program("sluice-host", move || self.run(session))
                .map_err(|_| Error::OPERATING_SYSTEM)?;
            table.started = true;
        }
        while table.tasks.contains_key(&table.token) {
            table.token = table.token.wrapping_add(1);
        }
        let (token, place) = (table.token, table.entered);
        table.tasks.insert(token, (place, task));
        table.token = token.wrapping_add(1);
        table.entered = place + 1;
        self.count.fetch_add(1, Ordering::Release);
        Ok(token)
    }

    /// Takes a function out again; `false` if it is not there any more.
    fn withdraw(&self, token: u32) -> bool {
        let withdrawn = self.lock().tasks.remove(&token).is_some();
        if withdrawn {
            self.count.fetch_sub(1, Ordering::Release);
        }
        withdrawn
    }

    /// The thread. It ends when the process exits, whose later functions do not run, and in a forked child, to which a function of the
    /// program may return: the child has no session, and its pages are not mapped there.
    fn run(&self, session: &Session) {
        let mut latest = HostCall::default();
        loop {
            let empty = |table: &mut TaskTable| table.tasks.is_empty();
            drop(self.some.wait_while(self.lock(), empty).unwrap_or_else(PoisonError::into_inner));
            match session.next_host_call(latest) {
                Ok(call) => {
                    latest = call;
                    let task = self.lock().tasks.remove(&call.token);
                    if let Some((_, task)) = task
                        && !run(task, None)
                    {
                        return;
                    }
                    // A token that is not known is of a function that has run with an error: its stream must not stay held.
                    session.host_function_returned(call);
                    self.count.fetch_sub(usize::from(task.is_some()), Ordering::Release);
                }
                Err(Error(code)) => {
                    if !self.fail(code) {
                        return;
                    }
                }
            }
        }
    }

    /// Runs the callbacks that no stream will reach, with the error, and drops the other functions. `false` as for [`run`].
    fn fail(&self, code: u32) -> bool {
        let tasks = core::mem::take(&mut self.lock().tasks);
        let mut tasks: Vec<(u64, HostTask)> = tasks.into_values().collect();
        tasks.sort_unstable_by_key(|(place, _)| *place);
        for (_, task) in tasks {
            if !run(task, Some(code)) {
                return false;
            }
            self.count.fetch_sub(1, Ordering::Release);
        }
        true
    }
}

/// Runs a function; `false` if this is a process that may not use the driver any more.
fn run(task: HostTask, error: Option<u32>) -> bool {
    if lifetime::usable().is_ok() {
        thread::in_host_function(|| task.run(error));
    }
    lifetime::usable().is_ok()
}

//! Functions of the program that run in the order of a stream, and the thread that runs them.
//!
//! A call that enters one gives it a token and posts the token. When the stream reaches it, the worker holds the stream and stores the
//! token in the session page; the thread runs the function and stores the answer there. One thread runs all functions of the process,
//! one at a time and without a lock, so other threads go on to use the driver; a function itself may not call it.
//!
//! A node of a graph has a token for as long as a launch may call its function: see [`NodeToken`]. The number of calls that a launch makes
//! is known, so the thread waits for calls only while some are to come.
//!
//! Once work has failed, or the worker is gone, no stream reaches a function any more. Then the functions of `cuStreamAddCallback` run
//! with the error, in the order in which they were entered, and the others are dropped, as with the vendor's driver.

use crate::{
    arguments::HostTask,
    error::{Error, Result},
    host_memory::HostCopy,
    lifetime,
    session::Session,
    spawn::spawn_for_program,
    state::{
        memory::arena::{Arena, Room},
        thread,
    },
};
use core::sync::atomic::{AtomicUsize, Ordering};
use sluice_protocol::{limits, session::HostCall};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
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
    /// Functions of nodes by their tokens.
    nodes: HashMap<u32, NodeTask>,
    /// Calls of nodes by launches, that did not begin yet.
    expected: usize,
    /// The last sequence of a launch with such calls in each stream slot.
    launches: BTreeMap<u32, u64>,
    /// Launches that have no sequence yet.
    launching: usize,
    token: u32,
    entered: u64,
    started: bool,
}

/// The work of a call by a node.
#[derive(Clone, Copy)]
pub(crate) enum NodeTask {
    /// A function of the program.
    Function(HostTask),
    /// A copy from or to memory that the worker does not see.
    Copy(HostCopy),
    /// Nothing: a copy that is turned off.
    Nothing,
}

/// The token of a node's function. No launch that may call it is in flight when this is dropped.
pub(crate) struct NodeToken {
    functions: &'static HostFunctions,
    token: u32,
    /// Staging memory of the node.
    staging: Option<Arc<Staging>>,
}

/// Staging memory of a node, for as long as a token of it lives.
pub(crate) struct Staging {
    arena: &'static Arena,
    room: Option<Room>,
    bytes: u64,
}

impl Staging {
    /// Allocates staging memory.
    pub(crate) fn new(arena: &'static Arena, session: &Session, bytes: u64) -> Result<Staging> {
        let room = arena.allocate(session, bytes)?.ok_or(Error::OUT_OF_MEMORY)?;
        Ok(Staging { arena, room: Some(room), bytes })
    }

    /// Its length.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its address.
    pub(crate) fn address(&self) -> u64 {
        self.room.as_ref().map_or(0, Room::address)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A forked child may have been made while another thread held the lock.
        if lifetime::usable().is_ok()
            && let Some(room) = self.room.take()
        {
            self.arena.free(room);
        }
    }
}

impl NodeToken {
    /// Keeps staging memory with this token.
    pub(crate) fn keep(&mut self, staging: Arc<Staging>) {
        self.staging = Some(staging);
    }

    /// The staging memory of the node.
    pub(crate) const fn staging(&self) -> Option<&Arc<Staging>> {
        self.staging.as_ref()
    }

    /// The number that crosses to the worker.
    pub(crate) const fn number(&self) -> u32 {
        self.token
    }
}

impl Drop for NodeToken {
    fn drop(&mut self) {
        // A forked child may have been made while another thread held the lock.
        if lifetime::usable().is_ok() {
            self.functions.lock().nodes.remove(&self.token);
        }
    }
}

impl TaskTable {
    /// A token that names nothing yet.
    fn take_token(&mut self) -> u32 {
        while self.tasks.contains_key(&self.token) || self.nodes.contains_key(&self.token) {
            self.token = self.token.wrapping_add(1);
        }
        let token = self.token;
        self.token = token.wrapping_add(1);
        token
    }

    /// Forgets calls that do not come any more, since all launches are complete; a launch that was refused makes none. Returns their
    /// number.
    fn forget_calls(&mut self, session: &Session) -> usize {
        self.launches.retain(|slot, sequence| !session.is_complete(*slot, *sequence));
        if self.launches.is_empty() && self.launching == 0 { core::mem::take(&mut self.expected) } else { 0 }
    }

    /// The work of a call, and whether it was counted.
    fn called(&mut self, token: u32) -> (Option<NodeTask>, bool) {
        if let Some((_, task)) = self.tasks.remove(&token) {
            return (Some(NodeTask::Function(task)), true);
        }
        let was_expected = self.expected > 0;
        self.expected = self.expected.saturating_sub(1);
        (self.nodes.get(&token).copied(), was_expected)
    }
}

impl HostFunctions {
    fn lock(&self) -> MutexGuard<'_, TaskTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a function did not run yet, or runs.
    pub(crate) fn any(&self, session: &Session) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let forgotten = self.lock().forget_calls(session);
        self.count.fetch_sub(forgotten, Ordering::AcqRel) > forgotten
    }

    /// Names the function of a node. The first function starts the thread.
    pub(crate) fn name(&'static self, session: &'static Session, task: NodeTask) -> Result<NodeToken> {
        let mut table = self.lock();
        self.start(&mut table, session)?;
        let token = table.take_token();
        table.nodes.insert(token, task);
        Ok(NodeToken { functions: self, token, staging: None })
    }

    /// Has `post` post a launch that calls functions of nodes this many times; it returns the slot and the sequence.
    pub(crate) fn launch(&self, calls: usize, post: impl FnOnce() -> Result<(u32, u64)>) -> Result<u64> {
        let mut table = self.lock();
        table.launching += 1;
        table.expected += calls;
        self.count.fetch_add(calls, Ordering::Release);
        drop(table);
        let posted = post();
        let mut table = self.lock();
        table.launching -= 1;
        match posted {
            Ok((slot, sequence)) => {
                // Another thread may have posted a later launch and come back first.
                let last = table.launches.entry(slot).or_insert(sequence);
                *last = sequence.max(*last);
            }
            Err(_) => {
                // The failure of other work may have made an end of them.
                let withdrawn = calls.min(table.expected);
                table.expected -= withdrawn;
                self.count.fetch_sub(withdrawn, Ordering::Release);
            }
        }
        drop(table);
        self.some.notify_one();
        posted.map(|(_, sequence)| sequence)
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
        self.start(&mut table, session)?;
        let (token, place) = (table.take_token(), table.entered);
        table.tasks.insert(token, (place, task));
        table.entered = place + 1;
        self.count.fetch_add(1, Ordering::Release);
        Ok(token)
    }

    fn start(&'static self, table: &mut TaskTable, session: &'static Session) -> Result {
        if !table.started {
            spawn_for_program("sluice-host", move || self.run(session))
                .map_err(|_| Error::OPERATING_SYSTEM)?;
            table.started = true;
        }
        Ok(())
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
            let empty = |table: &mut TaskTable| {
                self.count.fetch_sub(table.forget_calls(session), Ordering::Release);
                table.tasks.is_empty() && table.expected == 0
            };
            drop(self.some.wait_while(self.lock(), empty).unwrap_or_else(PoisonError::into_inner));
            match session.next_host_call(latest) {
                Ok(call) => {
                    latest = call;
                    let (task, was_counted) = self.lock().called(call.token);
                    match task {
                        Some(NodeTask::Function(task)) if !run(task, None) => return,
                        Some(NodeTask::Copy(copy)) => copy.run(),
                        // A token that is not known is of a function that has run with an error: its stream must not stay held.
                        Some(NodeTask::Function(_) | NodeTask::Nothing) | None => {}
                    }
                    session.host_function_returned(call);
                    self.count.fetch_sub(usize::from(was_counted), Ordering::Release);
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
        let mut table = self.lock();
        let tasks = core::mem::take(&mut table.tasks);
        table.launches.clear();
        self.count.fetch_sub(core::mem::take(&mut table.expected), Ordering::Release);
        drop(table);
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

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C73
    #[test]
    fn calls_are_expected_until_the_last_of_the_launches_of_a_stream_is_complete() {
        let functions = HostFunctions::default();
        // Two threads may come back from their posts in the other order.
        for sequence in [9, 8] {
            assert_eq!(functions.launch(1, || Ok((3, sequence))), Ok(sequence));
        }
        assert_eq!(functions.lock().launches, BTreeMap::from([(3, 9)]));
    }
}

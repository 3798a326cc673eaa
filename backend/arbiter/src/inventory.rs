//! The client of the inventory: it lists the processes that use the device, and confirms that a dead worker is gone from it.
//!
//! The inventory may hang, die and be replaced at any time, so this module never waits for it. While a question is unanswered,
//! state that depends on the answer stays as it is.

use crate::{custody::Millis, ids::WorkerId};
use rustix::{fd::OwnedFd, io::Errno};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{FromInventory, ToInventory},
};
use std::collections::HashMap;

/// Milliseconds after which a question is asked again.
const TIMEOUT: Millis = 1000;
/// Milliseconds between looks at the whole device.
const ROUND: Millis = 500;
/// Milliseconds between looks while some request waits for the next one: a VM must not occupy the driver by such requests.
const SHORT_ROUND: Millis = 20;
/// Milliseconds between questions about one dead worker.
const CONFIRM: Millis = 20;
/// Processes listed in one round.
const PROCESSES: u32 = 4096;

/// A question that was sent to the inventory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Gone(WorkerId),
    Memory,
    Nth(u32),
}

/// A result of the inventory's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// True if the driver lists a dead worker.
    Listed(WorkerId, bool),
    /// The device's total and used bytes.
    Memory {
        /// All bytes of the device.
        total: u64,
        /// Bytes in use.
        used: u64,
    },
    /// Every process on the device.
    Processes(Vec<ListedProcess>),
}

/// A process on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    /// The process's id.
    pub process: u32,
    /// Bytes booked to it; `None` if unknown.
    pub bytes: Option<u64>,
    /// The start of the look: the inventory takes the whole list then, and answers later questions of the look from it.
    pub asked: Millis,
    /// Percent of recent time in which its kernels ran; `None` if unknown.
    pub busy: Option<u32>,
}

/// A connection to the inventory.
#[derive(Debug)]
pub struct Inventory {
    socket: Channel<FromInventory, ToInventory>,
    /// Device and instance.
    place: (u32, u32),
    serial: u64,
    asked: HashMap<u64, (Question, Millis)>,
    /// Dead workers, and the time of the last question about each.
    confirming: HashMap<WorkerId, Millis>,
    /// Start of the last look at the whole device; `None` if the next is due.
    round: Option<Millis>,
    /// Milliseconds that the last complete look took.
    took: Millis,
    /// True if some request waits for the next look.
    look_requested: bool,
    listed: Vec<ListedProcess>,
}

impl Inventory {
    /// A client on a connected socket that asks about one instance of a device, or about all of it.
    #[must_use]
    pub fn new(socket: OwnedFd, place: (u32, u32)) -> Inventory {
        Inventory {
            socket: Channel::new(socket),
            place,
            serial: 0,
            asked: HashMap::new(),
            confirming: HashMap::new(),
            round: None,
            took: 0,
            look_requested: false,
            listed: Vec::new(),
        }
    }

    /// The socket, for the event loop to watch.
    #[must_use]
    pub const fn socket(&self) -> &Channel<FromInventory, ToInventory> {
        &self.socket
    }

    /// True while a look at the whole device is under way.
    #[must_use]
    pub fn is_looking(&self) -> bool {
        self.asked.values().any(|(question, _)| !matches!(question, Question::Gone(_)))
    }

    /// Makes the next look begin soon after the last.
    pub const fn request_look(&mut self) {
        self.look_requested = true;
    }

    fn ask(&mut self, question: Question, message: impl FnOnce(u64) -> ToInventory, now: Millis) {
        self.serial += 1;
        // A full socket is not read at present: the question is sent again later.
        if self.socket.send(&message(self.serial), &[]).is_ok() {
            self.asked.insert(self.serial, (question, now));
        }
    }

    /// Sends the questions that are due. Returns the time of the next call.
    pub fn poll(&mut self, dead: impl Iterator<Item = (WorkerId, u32)>, now: Millis) -> Millis {
        self.asked.retain(|_, (_, when)| now.saturating_sub(*when) < TIMEOUT);
        let (unit, instance) = self.place;
        let mut confirming = HashMap::new();
        let mut next = now.saturating_add(ROUND);
        for (worker, process) in dead {
            let last = self.confirming.get(&worker).copied();
            let waits = self.asked.values().any(|(question, _)| *question == Question::Gone(worker));
            let due = last.is_none_or(|last| now.saturating_sub(last) >= CONFIRM);
            if due && !waits {
                let message = |serial| ToInventory::Process { serial, unit, process, instance };
                self.ask(Question::Gone(worker), message, now);
            }
            confirming.insert(worker, if due { now } else { last.unwrap_or(now) });
            next = next.min(now.saturating_add(CONFIRM));
        }
        self.confirming = confirming;
        if self.is_looking() {
            return next;
        }
        let apart = match self.look_requested {
            // Most of the time, the inventory serves others.
            true => SHORT_ROUND.max(self.took.saturating_mul(4)).min(ROUND),
            false => ROUND,
        };
        let due = self.round.map_or(now, |last| last.saturating_add(apart));
        next = next.min(due.max(now));
        if due <= now {
            self.round = Some(now);
            self.look_requested = false;
            self.listed.clear();
            self.ask(Question::Memory, |serial| ToInventory::Memory { serial, unit, instance }, now);
            self.ask(Question::Nth(0), |serial| ToInventory::Nth { serial, unit, index: 0, instance }, now);
        }
        next
    }

    /// Reads one answer. `Ok(None)`: the answer completes nothing.
    ///
    /// # Errors
    /// The kernel's. AGAIN: no message is there. PIPE: the inventory has ended or breaks the protocol.
    pub fn receive(&mut self, now: Millis) -> Result<Option<News>, Errno> {
        let message = match self.socket.receive() {
            Ok(Received::Message(message, _)) => message,
            Ok(Received::Empty) => return Err(Errno::AGAIN),
            Err(ReceiveError::Failed(error)) => return Err(error),
            Ok(Received::Closed) | Err(_) => return Err(Errno::PIPE),
        };
        let (FromInventory::Memory { serial, .. }
        | FromInventory::Process { serial, .. }
        | FromInventory::Failed { serial, .. }) = message
        else {
            return Ok(None);
        };
        let Some((question, _)) = self.asked.remove(&serial) else { return Ok(None) };
        let began = self.round.unwrap_or(now);
        Ok(match (question, message) {
            (Question::Gone(worker), FromInventory::Process { present, .. }) => {
                Some(News::Listed(worker, present))
            }
            (Question::Memory, FromInventory::Memory { total, used, .. }) => {
                Some(News::Memory { total, used })
            }
            (Question::Nth(_), FromInventory::Process { process: 0, .. }) => {
                self.took = now.saturating_sub(began);
                Some(News::Processes(core::mem::take(&mut self.listed)))
            }
            (Question::Nth(index), FromInventory::Process { process, bytes, busy, .. })
                if index < PROCESSES =>
            {
                // A listed process uses some memory, so 0 means that the driver does not report it.
                let bytes = Some(bytes).filter(|bytes| *bytes != 0);
                let busy = Some(busy).filter(|busy| *busy <= 100);
                self.listed.push(ListedProcess { process, bytes, asked: began, busy });
                let (unit, instance) = self.place;
                let index = index + 1;
                self.ask(
                    Question::Nth(index),
                    |serial| ToInventory::Nth { serial, unit, index, instance },
                    now,
                );
                None
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{FromInventory, Inventory, ListedProcess, Millis, News, ToInventory};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use sluice_messages::channel::{Channel, Received};

    // Promise: Q65
    #[test]
    fn figures_of_a_look_count_from_its_start() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
        let mut inventory = Inventory::new(near, (0, 0));
        let far = Channel::<ToInventory, FromInventory>::new(far);
        let began: Millis = 10;
        inventory.poll(core::iter::empty(), began);
        let mut now = began;
        let mut news = None;
        while let Ok(Received::Message(question, _)) = far.receive() {
            now += 5;
            let ToInventory::Nth { serial, index, .. } = question else { continue };
            let process = if index < 2 { 100 + index } else { 0 };
            let answer = FromInventory::Process { serial, process, present: true, bytes: 1, busy: u32::MAX };
            far.send(&answer, &[]).unwrap();
            news = inventory.receive(now).unwrap();
        }
        // The inventory answered both from the list that it took for the first question.
        let listed = |process| ListedProcess { process, bytes: Some(1), asked: began, busy: None };
        assert_eq!(news, Some(News::Processes(vec![listed(100), listed(101)])));
    }
}

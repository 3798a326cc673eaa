//! The driver's side of a split virtqueue, many commands in flight, over the first pages of the memory file.
//!
//! Each command has a slot: two descriptors that are linked for ever, and room for a command and its answer. The device is
//! another party that writes the used ring: its entries are checked, and an impossible entry ends the connection.

#![expect(clippy::cast_possible_truncation, reason = "halves of words, slot numbers and lengths of slots")]

use sluice_protocol::{gpu, shared::Shared};
use std::sync::atomic::Ordering;

pub(super) const DESCRIPTORS: u16 = 256;
/// Commands in flight.
pub(super) const SLOTS: usize = DESCRIPTORS as usize / 2;
/// Offset of the descriptor table.
pub(super) const TABLE_AT: usize = 0;
/// Offset of the available ring.
pub(super) const AVAILABLE_AT: usize = 0x1000;
/// Offset of the used ring.
pub(super) const USED_AT: usize = 0x2000;
const SLOTS_AT: usize = 0x3000;
/// Bytes of a slot: half for the command, half for the answer.
const SLOT_BYTES: usize = 256;
/// Bytes of the longest command, and of the longest answer.
pub(super) const HALF_BYTES: usize = SLOT_BYTES / 2;
/// Bytes of the whole area.
pub(super) const BYTES: usize = SLOTS_AT + SLOTS * SLOT_BYTES;

/// Offset of the word by which the driver names the answer for which it requests an interrupt.
const USED_EVENT_AT: usize = AVAILABLE_AT + 4 + 2 * DESCRIPTORS as usize;
/// Offset of the word by which the device names the command for which it requests a kick.
const AVAILABLE_EVENT_AT: usize = USED_AT + 4 + 8 * DESCRIPTORS as usize;

const _: () = assert!(BYTES.is_multiple_of(4096));
const _: () = assert!(USED_EVENT_AT.is_multiple_of(4) && AVAILABLE_EVENT_AT.is_multiple_of(4));

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// The device wrote an impossible used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

/// The state of a slot. `T` goes with commands whose end the caller acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandSlot<T> {
    Free,
    /// The answer is ignored.
    Forgotten,
    /// The answer makes this due.
    Due(T),
    /// A caller waits for the answer.
    Awaited,
    /// The answer is there, with this length.
    Answered(usize),
}

/// A command for which a caller waits. Given to [`CommandQueue::answer`] until that returns the answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ticket(u16);

#[derive(Debug)]
pub(super) struct CommandQueue<M, T> {
    memory: M,
    slots: [CommandSlot<T>; SLOTS],
    /// Free slots; a stack.
    free: Vec<u16>,
    /// Values that are due since they were last taken. Room for every slot, so that nothing is allocated.
    due: Vec<T>,
    /// Commands ever made available.
    available: u16,
    /// Answers ever seen.
    used: u16,
}

impl<M: Shared, T: Copy> CommandQueue<M, T> {
    /// A queue in zeroed memory, which the device knows at guest-physical address 0.
    pub(super) fn new(memory: M) -> CommandQueue<M, T> {
        for slot in 0..DESCRIPTORS / 2 {
            let at = slot_at(slot) as u64;
            let half = HALF_BYTES as u32;
            descriptor(&memory, 2 * slot, at, half, NEXT, 2 * slot + 1);
            descriptor(&memory, 2 * slot + 1, at + u64::from(half), half, WRITE, 0);
        }
        CommandQueue {
            memory,
            slots: [const { CommandSlot::Free }; SLOTS],
            free: (0..DESCRIPTORS / 2).rev().collect(),
            due: Vec::with_capacity(SLOTS),
            available: 0,
            used: 0,
        }
    }

    /// Makes a command available whose answer is ignored. `None`: no slot is free. `Some(kick)`: true if the device
    /// wants a kick.
    pub(super) fn post(&mut self, command: &[u8]) -> Option<bool> {
        self.put(command, CommandSlot::Forgotten).map(|(_, kick)| kick)
    }

    /// The same; [`CommandQueue::take_due`] returns `due` when the device has answered.
    pub(super) fn post_due(&mut self, command: &[u8], due: T) -> Option<bool> {
        self.put(command, CommandSlot::Due(due)).map(|(_, kick)| kick)
    }

    /// Makes a command available and keeps its answer.
    pub(super) fn ask(&mut self, command: &[u8]) -> Option<(Ticket, bool)> {
        self.put(command, CommandSlot::Awaited).map(|(slot, kick)| (Ticket(slot), kick))
    }

    fn put(&mut self, command: &[u8], state: CommandSlot<T>) -> Option<(u16, bool)> {
        debug_assert!(command.len() >= gpu::HEADER_BYTES && command.len() <= HALF_BYTES);
        let slot = self.free.pop()?;
        self.slots[usize::from(slot)] = state;
        self.memory.write(slot_at(slot), command);
        let length = command.len().min(HALF_BYTES) as u32;
        descriptor(&self.memory, 2 * slot, slot_at(slot) as u64, length, NEXT, 2 * slot + 1);
        let entry = AVAILABLE_AT + 4 + 2 * usize::from(self.available % DESCRIPTORS);
        self.memory.write(entry, &(2 * slot).to_le_bytes());
        let old = self.available;
        self.available = old.wrapping_add(1);
        // Flags and index share a word, and the driver owns both.
        self.memory.store_u32(AVAILABLE_AT, u32::from(self.available) << 16, Ordering::Release);
        self.memory.fence();
        let event = low(self.memory.load_u32(AVAILABLE_EVENT_AT, Ordering::Relaxed));
        Some((slot, needs_event(event, self.available, old)))
    }

    /// Processes the answers of the device.
    pub(super) fn collect(&mut self) -> Result<(), Corrupt> {
        let used = high(self.memory.load_u32(USED_AT, Ordering::Acquire));
        if usize::from(used.wrapping_sub(self.used)) > SLOTS {
            return Err(Corrupt);
        }
        while self.used != used {
            let mut element = [0; 8];
            self.memory.read(USED_AT + 4 + 8 * usize::from(self.used % DESCRIPTORS), &mut element);
            let word = u64::from_le_bytes(element);
            let (head, length) = (word & 0xffff_ffff, word >> 32);
            let index = usize::try_from(head / 2).map_err(|_| Corrupt)?;
            let slot = self.slots.get_mut(index).filter(|_| head.is_multiple_of(2)).ok_or(Corrupt)?;
            match *slot {
                CommandSlot::Free | CommandSlot::Answered(_) => return Err(Corrupt),
                CommandSlot::Awaited => {
                    let length = usize::try_from(length).unwrap_or(HALF_BYTES).min(HALF_BYTES);
                    *slot = CommandSlot::Answered(length);
                }
                CommandSlot::Forgotten | CommandSlot::Due(_) => {
                    if let CommandSlot::Due(due) = *slot {
                        self.due.push(due);
                    }
                    *slot = CommandSlot::Free;
                    self.free.push(index as u16);
                }
            }
            self.used = self.used.wrapping_add(1);
        }
        Ok(())
    }

    /// The answer to a command, once it is there; the ticket is then spent.
    pub(super) fn answer(&mut self, ticket: &Ticket, into: &mut [u8; HALF_BYTES]) -> Option<usize> {
        let slot = self.slots.get_mut(usize::from(ticket.0))?;
        let CommandSlot::Answered(length) = *slot else { return None };
        *slot = CommandSlot::Free;
        self.free.push(ticket.0);
        self.memory.read(slot_at(ticket.0) + HALF_BYTES, into);
        Some(length)
    }

    /// Ignores the answer to this command from now on.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        match self.slots.get_mut(usize::from(ticket.0)) {
            Some(slot @ CommandSlot::Awaited) => *slot = CommandSlot::Forgotten,
            Some(slot @ CommandSlot::Answered(_)) => {
                *slot = CommandSlot::Free;
                self.free.push(ticket.0);
            }
            _ => {}
        }
    }

    /// Takes a value that has become due.
    pub(super) fn take_due(&mut self) -> Option<T> {
        self.due.pop()
    }

    /// Asks for an interrupt at the next answer. The caller checks for earlier answers after this.
    pub(super) fn want_interrupt(&self) {
        self.memory.store_u32(USED_EVENT_AT, u32::from(self.used), Ordering::Relaxed);
        self.memory.fence();
    }
}

const fn slot_at(slot: u16) -> usize {
    SLOTS_AT + slot as usize * SLOT_BYTES
}

const fn low(word: u32) -> u16 {
    (word & 0xffff) as u16
}

const fn high(word: u32) -> u16 {
    (word >> 16) as u16
}

/// True if the step from `old` to `new` passes `event`: the rule of the virtio specification.
const fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn descriptor(memory: &impl Shared, index: u16, address: u64, length: u32, flags: u16, next: u16) {
    let at = TABLE_AT + 16 * usize::from(index);
    memory.store_u64(at, address, Ordering::Relaxed);
    let rest = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
    memory.store_u64(at + 8, rest, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_shared_memory::{Mapping, mapping::Words};

    fn memory() -> (Mapping, Words) {
        use rustix::fd::AsFd;
        let file = rustix::fs::memfd_create(c"queue", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, BYTES as u64).unwrap();
        let run = sluice_shared_memory::Run { offset: 0, bytes: BYTES as u64 };
        let mapping = Mapping::scattered(0, BYTES as u64, [(file.as_fd(), run)]).unwrap();
        let words = mapping.words();
        (mapping, words)
    }

    /// A device: answers the heads in `order`, which index the commands made available since `from`.
    fn answer(memory: &Words, from: u16, order: &[u16]) {
        let mut used = high(memory.load_u32(USED_AT, Ordering::Relaxed));
        for index in order {
            let mut head = [0; 2];
            memory
                .read(AVAILABLE_AT + 4 + 2 * usize::from(from.wrapping_add(*index) % DESCRIPTORS), &mut head);
            let head = u16::from_le_bytes(head);
            let element = u64::from(head) | 24 << 32;
            memory.write(USED_AT + 4 + 8 * usize::from(used % DESCRIPTORS), &element.to_le_bytes());
            memory.write(slot_at(head / 2) + HALF_BYTES, &[0xab; 24]);
            used = used.wrapping_add(1);
        }
        memory.store_u32(USED_AT, u32::from(used) << 16, Ordering::Release);
    }

    #[test]
    fn commands_are_answered_out_of_order_for_ever() {
        let (_mapping, words) = memory();
        let mut queue: CommandQueue<Words, u32> = CommandQueue::new(words);
        for round in 0..2000u32 {
            let from = queue.available;
            assert!(queue.post(&[1; 24]).is_some());
            let (ticket, _) = queue.ask(&[2; 24]).unwrap();
            assert!(queue.post_due(&[3; 64], round).is_some());
            let mut into = [0; HALF_BYTES];
            assert_eq!(queue.answer(&ticket, &mut into), None);
            answer(&words, from, &[2, 0, 1]);
            queue.collect().unwrap();
            assert_eq!(queue.answer(&ticket, &mut into), Some(24));
            assert_eq!(into[..24], [0xab; 24]);
            assert_eq!((queue.take_due(), queue.take_due()), (Some(round), None));
            assert_eq!(queue.free.len(), SLOTS);
        }
    }

    #[test]
    fn full_queue_refuses_a_command() {
        let (_mapping, words) = memory();
        let mut queue: CommandQueue<Words, ()> = CommandQueue::new(words);
        for _ in 0..SLOTS {
            assert!(queue.post(&[0; 24]).is_some());
        }
        assert_eq!(queue.post(&[0; 24]), None);
        answer(&words, 0, &[5]);
        queue.collect().unwrap();
        assert!(queue.post(&[0; 24]).is_some());
        assert_eq!(queue.post(&[0; 24]), None);
    }

    #[test]
    fn forgotten_command_frees_its_slot() {
        let (_mapping, words) = memory();
        let mut queue: CommandQueue<Words, ()> = CommandQueue::new(words);
        let (early, _) = queue.ask(&[0; 24]).unwrap();
        let (late, _) = queue.ask(&[0; 24]).unwrap();
        queue.forget(early);
        answer(&words, 0, &[0, 1]);
        queue.collect().unwrap();
        queue.forget(late);
        assert_eq!(queue.free.len(), SLOTS);
    }

    #[test]
    fn impossible_used_ring_is_reported() {
        for (head, count) in [(1u64, 1u32), (256, 1), (u64::from(u32::MAX), 1), (4, 1), (0, 200), (0, 2)] {
            let (_mapping, words) = memory();
            let mut queue: CommandQueue<Words, ()> = CommandQueue::new(words);
            assert!(queue.post(&[0; 24]).is_some());
            for at in 0..4 {
                words.write(USED_AT + 4 + 8 * at, &head.to_le_bytes());
            }
            words.store_u32(USED_AT, count << 16, Ordering::Release);
            assert_eq!(queue.collect(), Err(Corrupt), "head {head}, {count} answers");
        }
    }

    #[test]
    fn device_is_kicked_if_it_asked() {
        let (_mapping, words) = memory();
        let mut queue: CommandQueue<Words, ()> = CommandQueue::new(words);
        // It asked for the first command, then for none for long.
        assert_eq!(queue.post(&[0; 24]), Some(true));
        assert_eq!(queue.post(&[0; 24]), Some(false));
        words.store_u32(AVAILABLE_EVENT_AT, 2, Ordering::Relaxed);
        assert_eq!(queue.post(&[0; 24]), Some(true));
    }
}

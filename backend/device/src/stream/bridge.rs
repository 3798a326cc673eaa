//! Issues the commands of a guest kernel for a guest that has no such kernel.

use crate::{
    chain::{AnswerPlace, Copied},
    device::Device,
};
use sluice_protocol::{
    doorbell::{self, Doorbell},
    gpu::{self, answer, command},
};
use sluice_shared_memory::ranges::Range;
use std::{collections::HashMap, time::Duration};

/// The only context of a connection.
const CONTEXT: u32 = 1;
/// Heads of commands, which identify their answers: answered at once, the wait, and from here on resources to
/// remove.
const PLAIN: u16 = 0;
const WAIT: u16 = 1;
const LEAVING: u16 = 2;

/// The device of one connection, and its pending commands.
#[derive(Debug)]
pub(super) struct Bridge {
    pub(super) device: Device,
    /// True while a wait is unanswered.
    waiting: bool,
    /// Resources whose memory the worker may still map, by the head of the command that removes them.
    leaving: HashMap<u16, Range>,
    /// Memory that no process maps any more.
    left: Vec<Range>,
}

impl Bridge {
    pub(super) fn new(device: Device) -> Bridge {
        let mut bridge = Bridge { device, waiting: false, leaving: HashMap::new(), left: Vec::new() };
        let name = [0; 16];
        let create = [&[6, doorbell::Capset::ID], name.as_slice()].concat();
        let made = bridge.run(command::CTX_CREATE, CONTEXT, PLAIN, &create);
        debug_assert!(made, "the first context of a device");
        bridge
    }

    /// Runs a command; true if it was answered at once with success.
    fn run(&mut self, kind: u32, context: u32, head: u16, words: &[u32]) -> bool {
        // The wait is answered late, so it needs a fence.
        let flags = if head == WAIT { gpu::FLAG_FENCE | gpu::FLAG_INFO_RING_IDX } else { 0 };
        let mut bytes = Vec::with_capacity(gpu::HEADER_BYTES.saturating_add(words.len().saturating_mul(4)));
        for word in [kind, flags, 0, 0, context, 1].iter().chain(words) {
            bytes.extend(word.to_le_bytes());
        }
        self.device.command(Copied::Whole, &bytes, AnswerPlace::nowhere(head));
        self.answers()
    }

    /// Takes the device's answers; true if one to a plain command was a success.
    fn answers(&mut self) -> bool {
        let answers = self.device.take_answers();
        let mut done = false;
        for answer in &answers {
            match answer.place.head() {
                PLAIN => {
                    let kind = answer.bytes().first_chunk().map(|kind| u32::from_le_bytes(*kind));
                    done = kind == Some(answer::OK_NODATA);
                }
                WAIT => self.waiting = false,
                head => self.left.extend(self.leaving.remove(&head)),
            }
        }
        self.device.recycle(answers);
        done
    }

    fn submit(&mut self, doorbell: Doorbell, head: u16) -> bool {
        let payload = doorbell.encode();
        let words = payload.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        let bytes = u32::try_from(payload.len()).unwrap_or(0);
        let words: Vec<u32> = [bytes, 0].into_iter().chain(words).collect();
        self.run(command::SUBMIT_3D, CONTEXT, head, &words)
    }

    /// Number of resources being removed.
    pub(super) fn leaving(&self) -> usize {
        self.leaving.len()
    }

    /// Creates a resource of a range; `false` if the device refuses.
    pub(super) fn create(&mut self, resource: u32, range: Range) -> bool {
        let [offset, bytes] = [range.offset, range.bytes].map(|value| {
            let half = |shift: u32| u32::try_from(value >> shift & 0xffff_ffff).unwrap_or(0);
            [half(0), half(32)]
        });
        // Guest memory, mappable, one entry.
        let words = [resource, 1, 1, 1, 0, 0, bytes[0], bytes[1], offset[0], offset[1], bytes[0], 0];
        if !self.run(command::RESOURCE_CREATE_BLOB, 0, PLAIN, &words) {
            return false;
        }
        let attached = self.run(command::CTX_ATTACH_RESOURCE, CONTEXT, PLAIN, &[resource, 0]);
        if !attached {
            self.run(command::RESOURCE_UNREF, 0, PLAIN, &[resource, 0]);
        }
        attached
    }

    /// Removes a resource; its memory is in [`Bridge::left`] once no process maps it.
    pub(super) fn destroy(&mut self, resource: u32, range: Range) {
        self.run(command::CTX_DETACH_RESOURCE, CONTEXT, PLAIN, &[resource, 0]);
        let free = (LEAVING..u16::MAX).find(|head| !self.leaving.contains_key(head));
        let Some(head) = free else { return };
        self.leaving.insert(head, range);
        self.run(command::RESOURCE_UNREF, 0, head, &[resource, 0]);
    }

    /// Takes memory that no process maps any more.
    pub(super) fn left(&mut self) -> Vec<Range> {
        core::mem::take(&mut self.left)
    }

    /// Sends a doorbell that is answered at once; `false` if the device refuses.
    pub(super) fn say(&mut self, doorbell: Doorbell) -> bool {
        self.submit(doorbell, PLAIN)
    }

    /// Requests an answer when the worker wakes the guest, or after a bounded time.
    pub(super) fn wait(&mut self) {
        if !self.waiting {
            self.waiting = true;
            self.submit(Doorbell::Wait, WAIT);
        }
    }

    /// True while the wait is unanswered.
    pub(super) const fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// True if there is a session with a worker, or one that may get one.
    pub(super) fn serves(&self) -> bool {
        self.device.serves(CONTEXT)
    }

    /// Handles the device's events.
    pub(super) fn events(&mut self) -> Result<(), rustix::io::Errno> {
        let mut events = Vec::new();
        self.device.poller.wait(Duration::ZERO, &mut events)?;
        for event in events {
            self.device.event(event);
        }
        self.answers();
        Ok(())
    }
}

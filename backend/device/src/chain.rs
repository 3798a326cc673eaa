//! Descriptor chains: one private copy of the command, and the place for its answer.

use sluice_protocol::{gpu, limits};
use virtio_queue::{DescriptorChain, desc::split::Descriptor};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Largest answer, in bytes.
pub const ANSWER_BYTES: usize = gpu::HEADER_BYTES + gpu::DISPLAY_INFO_BYTES;
/// Writable descriptors of a chain that are used; Linux sends one.
const SEGMENTS: usize = 4;

/// The place for an answer: the chain's head and its first writable descriptors. Kept while the answer is withheld.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerPlace {
    head: u16,
    segments: [(u64, u32); SEGMENTS],
}

impl AnswerPlace {
    /// A place without room for an answer.
    #[must_use]
    pub const fn nowhere(head: u16) -> AnswerPlace {
        AnswerPlace { head, segments: [(0, 0); SEGMENTS] }
    }

    /// The chain's head, with which it is returned to the guest.
    #[must_use]
    pub const fn head(&self) -> u16 {
        self.head
    }

    /// Writes as much of an answer as fits; returns the number of bytes written.
    #[must_use]
    pub fn write(&self, memory: &GuestMemoryMmap<()>, answer: &[u8]) -> u32 {
        let mut written = 0u32;
        let mut left = answer;
        for (address, room) in self.segments {
            let count = left.len().min(usize::try_from(room).unwrap_or(usize::MAX));
            let (now, later) = left.split_at(count);
            if now.is_empty() || memory.write_slice(now, GuestAddress(address)).is_err() {
                break;
            }
            written = written.saturating_add(u32::try_from(count).unwrap_or(0));
            left = later;
        }
        written
    }
}

/// The result of copying a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// The whole command is in the buffer.
    Whole,
    /// Only the header is in the buffer: the command exceeds the limit, or lies outside guest memory.
    HeaderOnly,
}

/// The buffer for copied commands. It lives as long as the device, and is large only while a large command needs it.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
}

/// Capacity kept between commands.
const KEPT: usize = 16 << 10;

impl Buffer {
    /// The last copied command.
    #[must_use]
    pub fn command(&self) -> &[u8] {
        &self.bytes
    }

    /// Copies the readable part of a chain, once, and notes its writable part.
    ///
    /// The chain's iterator stops at loops, at indirect tables within indirect tables and at descriptors outside guest
    /// memory; the part before that is treated as the chain.
    pub fn copy<M>(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: DescriptorChain<M>,
    ) -> (Copied, AnswerPlace)
    where
        M: core::ops::Deref<Target = GuestMemoryMmap<()>>,
    {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        let mut place = AnswerPlace::nowhere(chain.head_index());
        let mut segments = place.segments.iter_mut();
        let mut room = 0usize;
        let mut copied = Copied::Whole;
        for descriptor in chain {
            if descriptor.is_write_only() {
                if room < ANSWER_BYTES && descriptor.len() > 0 {
                    if let Some(segment) = segments.next() {
                        *segment = (descriptor.addr().0, descriptor.len());
                    }
                    room = room.saturating_add(usize::try_from(descriptor.len()).unwrap_or(usize::MAX));
                }
            } else if copied == Copied::Whole && !self.append(memory, descriptor) {
                self.bytes.truncate(gpu::HEADER_BYTES);
                copied = Copied::HeaderOnly;
            }
        }
        (copied, place)
    }

    /// Appends a readable descriptor; `false` if it is too long or outside guest memory.
    fn append(&mut self, memory: &GuestMemoryMmap<()>, descriptor: Descriptor) -> bool {
        let start = self.bytes.len();
        let Ok(length) = usize::try_from(descriptor.len()) else { return false };
        let whole = start.saturating_add(length);
        // Too long: the header is kept, to answer with the right fence.
        let end = if whole > limits::GPU_COMMAND_BYTES { start.max(gpu::HEADER_BYTES) } else { whole };
        self.bytes.resize(end, 0);
        let read = self
            .bytes
            .get_mut(start..)
            .is_some_and(|into| memory.read_slice(into, descriptor.addr()).is_ok());
        if !read {
            self.bytes.truncate(start);
        }
        read && end == whole
    }
}

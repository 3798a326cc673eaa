//! Every virtio-gpu command on a mock queue, in every form that a guest may give it. In one file: the list of all commands.

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use sluice_device::{
    chain::Buffer,
    device::Device,
    link::Link,
    memory::{MemoryError, MemoryPolicy, MemorySnapshot},
    users::{ResourceKind, Users},
};
use sluice_kit::front_end::{self, blob, command};
use sluice_protocol::{
    doorbell::{Capset, Doorbell},
    gpu::{HEADER_BYTES, answer::*, command::*},
    limits, session,
};
use std::{fs::File, sync::Arc};
use virtio_queue::{
    Queue, QueueOwnedT, QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Addresses of commands, their answers, and pages for resources: above those of the mock queue.
const COMMAND: u64 = 0x10_0000;
const ANSWER: u64 = 0x8_0000;
const PAGES: u64 = 0x100_0000;
/// Two regions with a hole between them, as on a PC: low memory, and memory above 4 GiB.
const LOW_BYTES: u64 = 0x200_0000;
const HIGH: u64 = 1 << 32;
const HIGH_BYTES: u64 = 0x100_0000;

fn sealed(bytes: u64, seals: SealFlags) -> File {
    let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

fn memory() -> GuestMemoryMmap<()> {
    let file = Arc::new(sealed(LOW_BYTES + HIGH_BYTES, SealFlags::SHRINK));
    let part = |at, bytes: u64, offset| {
        (GuestAddress(at), bytes as usize, Some(FileOffset::from_arc(Arc::clone(&file), offset)))
    };
    GuestMemoryMmap::from_ranges_with_files([part(0, LOW_BYTES, 0), part(HIGH, HIGH_BYTES, LOW_BYTES)])
        .unwrap()
}

/// A guest kernel's side: memory, and a device that uses it.
struct Guest {
    memory: MemorySnapshot,
    device: Device,
    buffer: Buffer,
}

impl Guest {
    fn new() -> Guest {
        let memory = MemorySnapshot::new(memory());
        let mut device = Device::new(MemoryPolicy::Sealed, Arc::new(Link::new(true).unwrap())).unwrap();
        device.set_memory(memory.clone()).unwrap();
        Guest { memory, device, buffer: Buffer::default() }
    }

    /// Puts descriptors into a queue, makes the device handle the first chain, and returns the written bytes at
    /// [`ANSWER`] that count. `None` if the answer is withheld.
    fn chain(&mut self, descriptors: &[(u64, u32, u16, u16)]) -> Option<Vec<u8>> {
        let memory = self.memory.memory();
        let mock = MockSplitQueue::new(&*memory, 256);
        for (index, (address, length, flags, next)) in (0u16..).zip(descriptors) {
            let descriptor = Descriptor::new(*address, *length, *flags, *next);
            mock.desc_table().store(index, RawDescriptor::from(descriptor)).unwrap();
        }
        mock.avail().ring().ref_at(0).unwrap().store(0);
        mock.avail().idx().store(1);
        let mut queue: Queue = mock.create_queue().unwrap();
        let chain = queue.iter(&*memory).unwrap().next().unwrap();
        assert_eq!(chain.head_index(), 0);
        let (copied, place) = self.buffer.copy(&memory, chain);
        self.device.command(copied, self.buffer.command(), place);
        let answers = self.device.take_answers();
        let answer = answers.first()?;
        let written = answer.place.write(&memory, answer.bytes());
        queue.add_used(&*memory, answer.place.head(), written).unwrap();
        assert_eq!(mock.used().idx().load(), 1);
        let mut bytes = vec![0; written as usize];
        memory.read_slice(&mut bytes, GuestAddress(ANSWER)).unwrap();
        Some(bytes)
    }

    /// Sends a command as Linux does: a readable descriptor and a writable one. Returns the whole answer.
    fn whole(&mut self, command: &[u8]) -> Option<Vec<u8>> {
        self.memory.memory().write_slice(command, GuestAddress(COMMAND)).unwrap();
        self.chain(&[(COMMAND, command.len() as u32, NEXT, 1), (ANSWER, 4096, WRITE, 0)])
    }

    /// The type word of the answer.
    fn send(&mut self, command: &[u8]) -> u32 {
        kind(&self.whole(command).expect("an answer"))
    }

    fn context(&mut self, context: u32) -> u32 {
        let mut words = vec![4, Capset::ID];
        words.extend([0; 16]);
        self.send(&command(CTX_CREATE, context, &words))
    }

    fn blob(&mut self, id: u32, entries: &[(u64, u32)]) -> u32 {
        self.send(&blob(id, entries))
    }
}

fn kind(answer: &[u8]) -> u32 {
    u32::from_le_bytes(answer[..4].try_into().unwrap())
}

fn submit(context: u32, doorbell: Doorbell) -> Vec<u8> {
    front_end::submit(context, doorbell, 0)
}

/// Makes the answer echo this fence, of this ring.
fn fenced(mut command: Vec<u8>, fence: u64, ring: u8) -> Vec<u8> {
    command[4..8].copy_from_slice(&3u32.to_le_bytes());
    command[8..16].copy_from_slice(&fence.to_le_bytes());
    command[20] = ring;
    command
}

/// One command of each kind, valid on a device that has context 1 and resources 5 (shared with it) and 6, with its answer.
fn every_command() -> Vec<(Vec<u8>, u32, usize)> {
    let header = HEADER_BYTES;
    let entry = [(PAGES + 0x10_0000, 4096)];
    let mut backing = vec![6, 1];
    backing.extend([(PAGES + 0x20_0000) as u32, 0, 4096, 0]);
    let mut create = vec![2, Capset::ID];
    create.extend([0; 16]);
    vec![
        (command(GET_DISPLAY_INFO, 0, &[]), OK_DISPLAY_INFO, header + 384),
        (command(RESOURCE_CREATE_2D, 0, &[7, 1, 64, 64]), OK_NODATA, header),
        (command(RESOURCE_CREATE_3D, 0, &[8, 0, 64, 1 << 17, 4096, 1, 1, 1, 0, 0, 0, 0]), OK_NODATA, header),
        (blob(9, &entry), OK_NODATA, header),
        (command(ATTACH_BACKING, 0, &backing), OK_NODATA, header),
        (command(DETACH_BACKING, 0, &[5, 0]), OK_NODATA, header),
        (command(RESOURCE_UNREF, 0, &[5, 0]), OK_NODATA, header),
        (command(SET_SCANOUT, 0, &[0, 0, 0, 0, 0, 0]), OK_NODATA, header),
        (command(RESOURCE_FLUSH, 0, &[0; 6]), OK_NODATA, header),
        (command(TRANSFER_TO_HOST_2D, 0, &[0; 8]), OK_NODATA, header),
        (command(GET_CAPSET, 0, &[Capset::ID, 0]), OK_CAPSET, header + 64),
        (command(CTX_CREATE, 2, &create), OK_NODATA, header),
        (command(CTX_ATTACH_RESOURCE, 1, &[6, 0]), OK_NODATA, header),
        (command(CTX_DETACH_RESOURCE, 1, &[5, 0]), OK_NODATA, header),
        (submit(1, Doorbell::Wait), OK_NODATA, header),
        (command(CTX_DESTROY, 1, &[]), OK_NODATA, header),
        (command(GET_CAPSET_INFO, 0, &[0, 0]), OK_CAPSET_INFO, header + 16),
    ]
}

/// A device on which [`every_command`] is valid.
fn guest() -> Guest {
    let mut guest = Guest::new();
    assert_eq!(guest.context(1), OK_NODATA);
    assert_eq!(guest.blob(5, &[(PAGES, 0x3000)]), OK_NODATA);
    assert_eq!(guest.send(&command(CTX_ATTACH_RESOURCE, 1, &[5, 0])), OK_NODATA);
    assert_eq!(
        guest.send(&command(RESOURCE_CREATE_3D, 0, &[6, 0, 64, 1 << 17, 4096, 1, 1, 1, 0, 0, 0, 0])),
        OK_NODATA
    );
    guest
}

#[test]
fn every_command_is_answered_and_its_fence_echoed() {
    for (command, expected, length) in every_command() {
        let answer = guest().whole(&command).unwrap();
        assert_eq!((kind(&answer), answer.len()), (expected, length), "{:#x}", kind(&command));
        assert_eq!(answer[4..24], [0; 20], "no fence");
        let answer = guest().whole(&fenced(command.clone(), 0x1_2345_6789, 7)).unwrap();
        assert_eq!((kind(&answer), answer.len()), (expected, length));
        assert_eq!(answer[4..8], 3u32.to_le_bytes());
        assert_eq!(answer[8..16], 0x1_2345_6789u64.to_le_bytes());
        assert_eq!(answer[16..20], command[16..20], "context");
        assert_eq!(answer[20], 7);
    }
}

// Promise: V5
#[test]
fn every_command_cut_anywhere_is_answered() {
    for (command, expected, _) in every_command() {
        for length in 0..command.len() {
            let answer = guest().whole(&command[..length]).unwrap();
            let ok = kind(&answer) == expected;
            // Some commands have fields that are never read; none is accepted without its header.
            assert!(length >= HEADER_BYTES || !ok, "{:#x} of {length} bytes", kind(&command));
            assert!(ok || kind(&answer) >= ERR_UNSPEC);
        }
    }
}

#[test]
fn every_command_without_length_is_answered() {
    for (command, ..) in every_command() {
        let mut guest = guest();
        guest.memory.memory().write_slice(&command, GuestAddress(COMMAND)).unwrap();
        let answer = guest.chain(&[(COMMAND, 0, NEXT, 1), (ANSWER, 4096, WRITE, 0)]).unwrap();
        assert_eq!(kind(&answer), ERR_UNSPEC);
        // Without a readable descriptor.
        assert_eq!(kind(&guest.chain(&[(ANSWER, 4096, WRITE, 0)]).unwrap()), ERR_UNSPEC);
    }
}

// Promise: V5
#[test]
fn every_command_over_the_limit_is_refused_with_its_fence() {
    for (command, ..) in every_command() {
        let mut guest = guest();
        let command = fenced(command, 77, 1);
        guest.memory.memory().write_slice(&command, GuestAddress(COMMAND)).unwrap();
        let first = command.len() as u32;
        // A chain may be 4 GiB long in all, and not longer.
        for second in [limits::GPU_COMMAND_BYTES as u32 - first + 1, u32::MAX - 8192] {
            let chain = [(COMMAND, first, NEXT, 1), (COMMAND, second, NEXT, 2), (ANSWER, 4096, WRITE, 0)];
            let answer = guest.chain(&chain).unwrap();
            assert_eq!(kind(&answer), ERR_UNSPEC);
            assert_eq!(answer[8..16], 77u64.to_le_bytes());
        }
        let chain = [(COMMAND, limits::GPU_COMMAND_BYTES as u32 + 1, NEXT, 1), (ANSWER, 4096, WRITE, 0)];
        assert_eq!(guest.chain(&chain).unwrap()[8..16], 77u64.to_le_bytes());
    }
}

#[test]
fn every_command_without_a_writable_answer_buffer_is_returned() {
    for (command, ..) in every_command() {
        let mut guest = guest();
        guest.memory.memory().write_slice(&command, GuestAddress(COMMAND)).unwrap();
        let length = command.len() as u32;
        // The descriptor for the answer is read-only, missing, empty, or outside guest memory.
        assert_eq!(guest.chain(&[(COMMAND, length, NEXT, 1), (ANSWER, 4096, 0, 0)]).unwrap(), []);
        assert_eq!(guest.chain(&[(COMMAND, length, 0, 0)]).unwrap(), []);
        assert_eq!(guest.chain(&[(COMMAND, length, NEXT, 1), (ANSWER, 0, WRITE, 0)]).unwrap(), []);
        assert_eq!(guest.chain(&[(COMMAND, length, NEXT, 1), (u64::MAX - 8, 4096, WRITE, 0)]).unwrap(), []);
        assert_eq!(guest.chain(&[(COMMAND, length, NEXT, 1), (LOW_BYTES, 4096, WRITE, 0)]).unwrap(), []);
    }
}

#[test]
fn every_command_with_a_short_answer_buffer_gets_a_cut_answer() {
    for (command, expected, length) in every_command() {
        for room in [1, 4, 23, 24, 25, 100] {
            let mut guest = guest();
            guest.memory.memory().write_slice(&command, GuestAddress(COMMAND)).unwrap();
            let chain = [(COMMAND, command.len() as u32, NEXT, 1), (ANSWER, room, WRITE, 0)];
            let answer = guest.chain(&chain).unwrap();
            assert_eq!(answer.len(), length.min(room as usize));
            if room >= 4 {
                assert_eq!(kind(&answer), expected);
            }
        }
    }
}

#[test]
fn every_command_may_be_chained() {
    for (command, expected, length) in every_command() {
        for piece in [1, 7, 24] {
            let mut guest = guest();
            guest.memory.memory().write_slice(&command, GuestAddress(COMMAND)).unwrap();
            let mut chain = Vec::new();
            for start in (0..command.len()).step_by(piece) {
                let bytes = piece.min(command.len() - start) as u32;
                chain.push((COMMAND + start as u64, bytes, NEXT, chain.len() as u16 + 1));
            }
            // The answer in four adjacent pieces.
            let mut at = ANSWER;
            for room in [5, 19, 100, 400] {
                chain.push((at, room, WRITE | NEXT, chain.len() as u16 + 1));
                at += u64::from(room);
            }
            let last = chain.last_mut().unwrap();
            last.2 = WRITE;
            let answer = guest.chain(&chain).unwrap();
            assert_eq!((kind(&answer), answer.len()), (expected, length), "{:#x} by {piece}", kind(&command));
        }
    }
}

#[test]
fn every_command_may_be_indirect() {
    const TABLE: u64 = 0xc_0000;
    for (command, expected, length) in every_command() {
        let mut guest = guest();
        let memory = guest.memory.memory();
        memory.write_slice(&command, GuestAddress(COMMAND)).unwrap();
        let half = command.len() as u32 / 2;
        let table = [
            Descriptor::new(COMMAND, half, NEXT, 1),
            Descriptor::new(COMMAND + u64::from(half), command.len() as u32 - half, NEXT, 2),
            Descriptor::new(ANSWER, 4096, WRITE, 0),
        ];
        for (index, descriptor) in (0u64..).zip(table) {
            memory.write_obj(descriptor, GuestAddress(TABLE + 16 * index)).unwrap();
        }
        let answer = guest.chain(&[(TABLE, 48, INDIRECT, 0)]).unwrap();
        assert_eq!((kind(&answer), answer.len()), (expected, length), "{:#x}", kind(&command));
    }
}

// Promise: V5
#[test]
fn looping_or_broken_descriptor_chains_end() {
    const TABLE: u64 = 0xc_0000;
    let mut guest = guest();
    let memory = guest.memory.memory();
    memory.write_slice(&command(GET_DISPLAY_INFO, 0, &[]), GuestAddress(COMMAND)).unwrap();
    // Loops: the same readable bytes again and again.
    assert_eq!(guest.chain(&[(COMMAND, 24, NEXT, 0)]).unwrap(), []);
    assert_eq!(
        guest.chain(&[(COMMAND, 4096, NEXT, 1), (ANSWER, 24, WRITE | NEXT, 0)]).unwrap().len(),
        4 * 24
    );
    // A next descriptor that does not exist.
    assert_eq!(guest.chain(&[(COMMAND, 24, NEXT, u16::MAX)]).unwrap(), []);
    // Indirect tables: within one another, of a strange length, outside memory, huge, and looping.
    memory.write_obj(Descriptor::new(TABLE, 16, INDIRECT, 0), GuestAddress(TABLE)).unwrap();
    assert_eq!(guest.chain(&[(TABLE, 16, INDIRECT, 0)]).unwrap(), []);
    assert_eq!(guest.chain(&[(TABLE, 17, INDIRECT, 0)]).unwrap(), []);
    assert_eq!(guest.chain(&[(TABLE, 0, INDIRECT, 0)]).unwrap(), []);
    assert_eq!(guest.chain(&[(u64::MAX - 15, 16, INDIRECT, 0)]).unwrap(), []);
    assert_eq!(guest.chain(&[(TABLE, !15, INDIRECT, 0)]).unwrap(), []);
    memory.write_obj(Descriptor::new(COMMAND, 24, NEXT, 0), GuestAddress(TABLE)).unwrap();
    assert_eq!(guest.chain(&[(TABLE, 0xffff0, INDIRECT, 0)]).unwrap(), []);
    // Readable bytes outside memory.
    let outside = [(LOW_BYTES - 8, 64, NEXT, 1), (ANSWER, 4096, WRITE, 0)];
    assert_eq!(kind(&guest.chain(&outside).unwrap()), ERR_UNSPEC);
}

// Promise: V9
#[test]
fn page_lists_outside_memory_or_overlapping_are_refused() {
    const PAGE: u32 = 4096;
    let refused: [&[(u64, u32)]; 13] = [
        &[(PAGES + 1, PAGE)],
        &[(PAGES, PAGE - 1)],
        &[(PAGES, 0)],
        &[(PAGES, PAGE), (PAGES, PAGE)],
        &[(PAGES, 4 * PAGE), (PAGES + 0x2000, PAGE)],
        &[(PAGES + 0x1000, PAGE), (PAGES, 2 * PAGE)],
        &[(LOW_BYTES, PAGE)],
        &[(LOW_BYTES - 0x1000, 2 * PAGE)],
        &[(HIGH + HIGH_BYTES - 0x1000, 2 * PAGE)],
        &[(u64::MAX - 0xfff, PAGE)],
        &[(!0xfff, !0xfff)],
        &[(1 << 63, PAGE)],
        &[(PAGES, 0x4000_0000), (PAGES + 0x1000, PAGE)],
    ];
    let mut guest = Guest::new();
    for entries in refused {
        assert!(guest.blob(1, entries) >= ERR_UNSPEC, "{entries:x?}");
        assert_eq!(guest.device.resource_count(), 0);
    }
    // No page of a refused list is taken.
    assert_eq!(guest.blob(1, &[(PAGES, 0x1000)]), OK_NODATA);
    assert!(guest.blob(2, &[(PAGES + 0x1000, PAGE), (PAGES, PAGE)]) >= ERR_UNSPEC, "another resource's page");
    assert_eq!(guest.blob(2, &[(PAGES + 0x1000, PAGE), (HIGH, PAGE)]), OK_NODATA);
    // Pages come back.
    assert_eq!(guest.send(&command(RESOURCE_UNREF, 0, &[1, 0])), OK_NODATA);
    assert_eq!(guest.blob(3, &[(PAGES, PAGE)]), OK_NODATA);
}

#[test]
fn page_runs_of_all_resources_are_bounded_together() {
    const PAGE: u64 = 4096;
    let bytes = 3u64 << 30;
    let file = FileOffset::new(sealed(bytes, SealFlags::SHRINK), 0);
    let memory =
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), bytes as usize, Some(file))])
            .unwrap();
    let mut guest = Guest::new();
    guest.memory = MemorySnapshot::new(memory);
    guest.device.set_memory(guest.memory.clone()).unwrap();
    // Every second page, as a fragmented guest has them.
    let scattered = |from: u64, count: u64| -> Vec<(u64, u32)> {
        (0..count).map(|index| (from + 2 * PAGE * index, PAGE as u32)).collect()
    };
    let (most, one) = (scattered(PAGES, (1 << 18) - 1), scattered(5 << 29, 1));
    assert_eq!(guest.blob(1, &most), OK_NODATA);
    assert_eq!(guest.blob(2, &one), OK_NODATA);
    assert_eq!(guest.blob(3, &scattered(PAGES + (2 << 30), 1)), ERR_INVALID_PARAMETER);
    // Refused entries did not count, and released ones count no more.
    assert_eq!(guest.send(&command(RESOURCE_UNREF, 0, &[2, 0])), OK_NODATA);
    assert_eq!(guest.blob(3, &scattered(PAGES + (2 << 30), 1)), OK_NODATA);
    assert_eq!(guest.send(&command(RESOURCE_UNREF, 0, &[1, 0])), OK_NODATA);
    assert_eq!(guest.blob(4, &[(PAGES, 0x4000_0000)]), OK_NODATA);
}

#[test]
fn more_entries_than_sent_are_refused() {
    let mut guest = Guest::new();
    for count in [2u32, limits::RESOURCE_RUNS as u32, limits::RESOURCE_RUNS as u32 + 1, u32::MAX] {
        let mut bytes = blob(1, &[(PAGES, 4096)]);
        bytes[36..40].copy_from_slice(&count.to_le_bytes());
        assert_eq!(guest.send(&bytes), ERR_INVALID_PARAMETER);
    }
    // Without entries: a resource without memory, which is useless.
    assert_eq!(guest.blob(1, &[]), OK_NODATA);
}

// Promise: V11
#[test]
fn unknown_or_duplicate_ids_are_refused_with_their_error() {
    let mut guest = guest();
    let cases = [
        (blob(0, &[(PAGES + 0x10_0000, 4096)]), ERR_INVALID_RESOURCE_ID),
        (blob(5, &[(PAGES + 0x10_0000, 4096)]), ERR_INVALID_RESOURCE_ID),
        (command(RESOURCE_CREATE_2D, 0, &[0, 1, 1, 1]), ERR_INVALID_RESOURCE_ID),
        (command(RESOURCE_CREATE_3D, 0, &[6, 1, 1, 1]), ERR_INVALID_RESOURCE_ID),
        (command(RESOURCE_UNREF, 0, &[99, 0]), ERR_INVALID_RESOURCE_ID),
        (command(DETACH_BACKING, 0, &[99, 0]), ERR_INVALID_RESOURCE_ID),
        (command(ATTACH_BACKING, 0, &[99, 0]), ERR_INVALID_RESOURCE_ID),
        (command(CTX_ATTACH_RESOURCE, 1, &[99, 0]), ERR_INVALID_RESOURCE_ID),
        (command(CTX_DETACH_RESOURCE, 1, &[99, 0]), ERR_INVALID_RESOURCE_ID),
        (command(CTX_ATTACH_RESOURCE, 9, &[5, 0]), ERR_INVALID_CONTEXT_ID),
        (command(CTX_DETACH_RESOURCE, 9, &[5, 0]), ERR_INVALID_CONTEXT_ID),
        (command(CTX_DESTROY, 9, &[]), ERR_INVALID_CONTEXT_ID),
        (command(CTX_CREATE, 1, &[0, 0]), ERR_INVALID_CONTEXT_ID),
        (command(CTX_CREATE, 0, &[0, 0]), ERR_INVALID_CONTEXT_ID),
        (command(CTX_CREATE, 2, &[0, 40]), ERR_INVALID_PARAMETER),
        (command(GET_CAPSET, 0, &[1, 0]), ERR_INVALID_PARAMETER),
        (command(GET_CAPSET, 0, &[Capset::ID, 1]), ERR_INVALID_PARAMETER),
        (submit(9, Doorbell::Ring), ERR_INVALID_CONTEXT_ID),
        (submit(1, Doorbell::Ring), ERR_INVALID_PARAMETER),
        (submit(1, Doorbell::Close), ERR_INVALID_PARAMETER),
        (submit(1, Doorbell::Detach { slot: 1 }), ERR_INVALID_PARAMETER),
        (submit(1, Doorbell::Open { resource: 6 }), ERR_INVALID_RESOURCE_ID),
        (submit(1, Doorbell::Open { resource: 5 }), ERR_INVALID_PARAMETER),
        (
            submit(1, Doorbell::Attach { resource: 5, slot: 1, address: limits::WINDOW_BOUNDS.start }),
            ERR_INVALID_PARAMETER,
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(guest.send(&bytes), expected, "{:#x}: {:?}", kind(&bytes), &bytes[24..]);
    }
    // A backing is not replaced.
    let mut words = vec![5, 1];
    words.extend([(PAGES + 0x10_0000) as u32, 0, 4096, 0]);
    assert_eq!(guest.send(&command(ATTACH_BACKING, 0, &words)), ERR_INVALID_PARAMETER);
}

#[test]
fn reused_context_id_has_no_resources_of_the_old_context() {
    let mut guest = guest();
    let control = PAGES + 0x40_0000;
    assert_eq!(guest.blob(10, &[(control, session::BYTES as u32)]), OK_NODATA);
    guest.memory.memory().write_obj(session::MAGIC, GuestAddress(control)).unwrap();
    guest.send(&command(CTX_ATTACH_RESOURCE, 1, &[10, 0]));
    assert_eq!(guest.send(&command(CTX_DESTROY, 1, &[])), OK_NODATA);
    assert_eq!(guest.context(1), OK_NODATA);
    assert_eq!(guest.send(&submit(1, Doorbell::Open { resource: 10 })), ERR_INVALID_RESOURCE_ID);
    // With its own it works, once.
    guest.send(&command(CTX_ATTACH_RESOURCE, 1, &[10, 0]));
    assert_eq!(guest.send(&submit(1, Doorbell::Open { resource: 10 })), OK_NODATA);
    assert_eq!(guest.send(&submit(1, Doorbell::Open { resource: 10 })), ERR_INVALID_PARAMETER);
    assert_eq!(guest.device.sessions(), 1);
}

#[test]
fn control_page_without_the_magic_opens_no_session() {
    let mut guest = guest();
    let control = PAGES + 0x40_0000;
    guest.blob(10, &[(control, session::BYTES as u32)]);
    guest.send(&command(CTX_ATTACH_RESOURCE, 1, &[10, 0]));
    assert_eq!(guest.send(&submit(1, Doorbell::Open { resource: 10 })), ERR_INVALID_PARAMETER);
    assert_eq!(guest.device.sessions(), 0);
}

#[test]
fn contexts_and_resources_beyond_their_limits_are_refused() {
    let mut guest = Guest::new();
    for id in 1..=limits::GPU_CONTEXTS as u32 {
        assert_eq!(guest.context(id), OK_NODATA);
    }
    assert_eq!(guest.context(u32::MAX), ERR_OUT_OF_MEMORY);
    for id in 1..=limits::RESOURCES as u32 {
        assert_eq!(guest.send(&command(RESOURCE_CREATE_2D, 0, &[id, 1, 1, 1])), OK_NODATA);
    }
    assert_eq!(guest.send(&command(RESOURCE_CREATE_2D, 0, &[u32::MAX, 1, 1, 1])), ERR_OUT_OF_MEMORY);
    // A new driver starts with empty tables.
    assert_eq!(guest.send(&command(GET_CAPSET_INFO, 0, &[0, 0])), OK_CAPSET_INFO);
    assert_eq!(guest.device.resource_count(), 0);
    assert_eq!(guest.context(1), OK_NODATA);
}

#[test]
fn resource_is_attached_to_at_most_16_contexts() {
    let mut guest = Guest::new();
    guest.blob(1, &[(PAGES, 4096)]);
    let shared = (1..=100).filter(|context| {
        guest.context(*context);
        guest.send(&command(CTX_ATTACH_RESOURCE, *context, &[1, 0])) == OK_NODATA
    });
    assert_eq!(shared.count(), 16);
}

// Promise: V10, V30
#[test]
fn guest_memory_is_accepted_or_refused_as_the_policy_requires() {
    let table = |seals, policy| {
        let file = FileOffset::new(sealed(0x10_0000, seals), 0);
        let memory =
            GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), 0x10_0000, Some(file))])
                .unwrap();
        let mut device = Device::new(policy, Arc::new(Link::new(true).unwrap())).unwrap();
        let accepted = device.set_memory(MemorySnapshot::new(memory));
        assert_eq!(device.memory().is_some(), accepted.is_ok());
        accepted
    };
    for policy in [MemoryPolicy::Sealed, MemoryPolicy::Vmm] {
        assert_eq!(table(SealFlags::SHRINK, policy), Ok(()));
        assert_eq!(table(SealFlags::GROW, policy), Err(MemoryError::Shrinkable(0)));
    }
    assert_eq!(table(SealFlags::empty(), MemoryPolicy::Any), Ok(()));
    // More memory than this process keeps account of.
    let file = FileOffset::new(sealed(2 << 40, SealFlags::SHRINK), 0);
    let memory =
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), 2 << 40, Some(file))]).unwrap();
    for (policy, accepted) in
        [(MemoryPolicy::Sealed, Err(MemoryError::TooMuch(1 << 40))), (MemoryPolicy::Vmm, Ok(()))]
    {
        let mut device = Device::new(policy, Arc::new(Link::new(true).unwrap())).unwrap();
        assert_eq!(device.set_memory(MemorySnapshot::new(memory.clone())), accepted);
    }
    // Memory of a process: no huge pages, which may run out when they are touched, and not too many descriptors.
    let memory = |parts| GuestMemoryMmap::<()>::from_ranges_with_files(parts).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let huge: File = memfd_create(c"ram", flags).unwrap().into();
    ftruncate(&huge, 4 << 20).unwrap();
    fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let huge = memory(vec![(GuestAddress(0), 4 << 20, Some(FileOffset::new(huge, 0)))]);
    let file = Arc::new(sealed(0x1_0000, SealFlags::SHRINK));
    let part = |at| (GuestAddress(at), 0x1000, Some(FileOffset::from_arc(Arc::clone(&file), at)));
    let parts = memory((0..5).map(|index| part(0x2000 * index)).collect());
    for (memory, refused) in [(huge, MemoryError::Huge(0)), (parts, MemoryError::Regions)] {
        for (policy, accepted) in [(MemoryPolicy::Sealed, Err(refused)), (MemoryPolicy::Vmm, Ok(()))] {
            let mut device = Device::new(policy, Arc::new(Link::new(true).unwrap())).unwrap();
            assert_eq!(device.set_memory(MemorySnapshot::new(memory.clone())), accepted);
        }
    }
    // Memory without a file cannot be passed to a worker.
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
    let mut device = Device::new(MemoryPolicy::Any, Arc::new(Link::new(true).unwrap())).unwrap();
    assert_eq!(device.set_memory(MemorySnapshot::new(memory)), Err(MemoryError::NoFile(0)));
}

#[test]
fn changed_guest_memory_drops_only_resources_of_removed_regions() {
    let low = Arc::new(sealed(0x40_0000, SealFlags::SHRINK));
    let high = Arc::new(sealed(0x40_0000, SealFlags::SHRINK));
    let part = |at, file: &Arc<File>, offset, bytes| {
        (GuestAddress(at), bytes, Some(FileOffset::from_arc(Arc::clone(file), offset)))
    };
    let table =
        |parts: Vec<_>| MemorySnapshot::new(GuestMemoryMmap::<()>::from_ranges_with_files(parts).unwrap());
    let mut guest = Guest::new();
    let set = |guest: &mut Guest, memory: MemorySnapshot| {
        guest.memory = memory.clone();
        guest.device.set_memory(memory).unwrap();
    };
    set(&mut guest, table(vec![part(0, &low, 0, 0x40_0000), part(HIGH, &high, 0, 0x40_0000)]));
    assert_eq!(guest.blob(1, &[(0x30_0000, 0x8000)]), OK_NODATA);
    assert_eq!(guest.blob(2, &[(HIGH, 0x8000)]), OK_NODATA);
    // The same memory in other regions: all resources stay, with their pages.
    set(
        &mut guest,
        table(vec![
            part(0, &low, 0, 0x30_4000),
            part(0x30_4000, &low, 0x30_4000, 0xf_c000),
            part(HIGH, &high, 0, 0x40_0000),
        ]),
    );
    assert!(guest.blob(3, &[(0x30_6000, 0x1000)]) >= ERR_UNSPEC);
    // One region is removed: its resource loses its pages, the other keeps them.
    set(&mut guest, table(vec![part(0, &low, 0, 0x40_0000)]));
    assert!(guest.blob(3, &[(0x30_6000, 0x1000)]) >= ERR_UNSPEC);
    assert!(guest.blob(3, &[(HIGH, 0x1000)]) >= ERR_UNSPEC);
    // The same addresses with other bytes are other memory.
    set(&mut guest, table(vec![part(0, &high, 0, 0x40_0000)]));
    assert_eq!(guest.blob(3, &[(0x30_6000, 0x1000)]), OK_NODATA);
    assert_eq!(guest.send(&command(RESOURCE_UNREF, 0, &[1, 0])), OK_NODATA);
    assert!(guest.blob(4, &[(0x30_6000, 0x1000)]) >= ERR_UNSPEC, "not given back by a resource that lost it");
}

// Promise: V32
#[test]
fn objects_of_a_connection_are_counted_for_its_user() {
    let users = Users::default();
    let share = users.share(1000);
    let mut guest = Guest::new();
    guest.device.count_for(Arc::clone(&share));
    let have = || {
        [ResourceKind::Contexts, ResourceKind::Resources, ResourceKind::Runs, ResourceKind::Pages]
            .map(|kind| share.have(kind))
    };
    guest.context(1);
    assert_eq!(guest.blob(1, &[(PAGES, 4 * 4096), (PAGES + 0x1_0000, 4096)]), OK_NODATA);
    assert_eq!(guest.send(&command(RESOURCE_CREATE_3D, 0, &[2, 0, 0, 0])), OK_NODATA);
    assert_eq!(have(), [1, 2, 2, 5]);
    assert!(guest.blob(3, &[(PAGES + 0x2_0000, 4096), (PAGES, 4096)]) >= ERR_UNSPEC, "a page is taken");
    assert_eq!(have(), [1, 2, 2, 5], "nothing of what is refused counts");
    // Removed memory takes its resources along.
    let file = Arc::new(sealed(LOW_BYTES, SealFlags::SHRINK));
    let part = (GuestAddress(0), LOW_BYTES as usize, Some(FileOffset::from_arc(file, 0)));
    guest.memory = MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files([part]).unwrap());
    guest.device.set_memory(guest.memory.clone()).unwrap();
    assert_eq!(guest.send(&command(RESOURCE_UNREF, 0, &[2, 0])), OK_NODATA);
    assert_eq!(have(), [1, 1, 0, 0]);
    assert_eq!(guest.blob(4, &[(PAGES, 4 * 4096)]), OK_NODATA);
    assert_eq!(have(), [1, 2, 1, 4]);
    drop(guest);
    assert_eq!(have(), [0; 4]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_answered_once(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut guest = Guest::new();
        guest.context(1);
        prop_assert!(guest.whole(&bytes).is_some());
    }

    #[test]
    fn any_sequence_of_commands_leaves_every_page_free_at_the_end(
        steps in proptest::collection::vec((0..16usize, 1..4u32, 0..5u32, 0..6u64, 1..4u32), 1..60)
    ) {
        let mut guest = Guest::new();
        for (what, context, id, page, pages) in steps {
            let entries = [(PAGES + page * 4096, pages * 4096)];
            let mut backing = vec![id, 1];
            backing.extend([entries[0].0 as u32, 0, entries[0].1, 0]);
            let bytes = match what {
                0 | 1 => blob(id, &entries),
                2 => command(RESOURCE_CREATE_3D, 0, &[id, 0, 0, 0]),
                3 => command(ATTACH_BACKING, 0, &backing),
                4 => command(DETACH_BACKING, 0, &[id, 0]),
                5 | 6 => command(RESOURCE_UNREF, 0, &[id, 0]),
                7 => command(CTX_CREATE, context, &[0, 0]),
                8 => command(CTX_DESTROY, context, &[]),
                9 | 10 => command(CTX_ATTACH_RESOURCE, context, &[id, 0]),
                11 => command(CTX_DETACH_RESOURCE, context, &[id, 0]),
                12 => submit(context, Doorbell::Open { resource: id }),
                13 => submit(context, Doorbell::Attach { resource: id, slot: id, address: limits::WINDOW_BOUNDS.start }),
                14 => submit(context, Doorbell::Close),
                _ => command(GET_CAPSET_INFO, 0, &[0, 0]),
            };
            prop_assert!(guest.whole(&bytes).is_some());
        }
        // In any case, releasing everything leaves every page free.
        for id in 0..5 {
            guest.send(&command(RESOURCE_UNREF, 0, &[id, 0]));
        }
        prop_assert_eq!(guest.device.resource_count(), 0);
        prop_assert_eq!(guest.blob(1, &[(PAGES, 16 * 4096)]), OK_NODATA);
    }
}

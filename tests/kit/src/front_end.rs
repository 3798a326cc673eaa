//! A vhost-user front-end that sends any command to the device, right or wrong.

use crate::wait::TIMEOUT;
use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use sluice_protocol::{
    doorbell::{Capset, Doorbell},
    gpu::{self, Purpose, command::*},
    session::{self, Nonce},
    shared::Shared,
};
use sluice_shared_memory::{Mapping, Run, mapping::Words};
use std::{path::Path, sync::atomic::Ordering, time::Instant};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend,
        message::{VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures},
    },
};
pub use vmm_sys_util::eventfd::EventFd;

pub const QUEUE: u16 = 1024;
const AVAILABLE: usize = 0x4000;
const USED: usize = 0x6000;
const SLOTS: usize = 0x1_0000;
const SLOT: usize = 1024;
/// First address for use by the test.
pub const FREE: u64 = 0x10_0000;
/// Length of the memory in bytes.
pub const MEMORY: u64 = 64 << 20;

/// Creates a memory file for a guest of this front-end.
pub fn memory(seals: SealFlags) -> OwnedFd {
    let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, MEMORY).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn region(mapping: &Mapping, file: &OwnedFd) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY,
        userspace_addr: mapping.base(),
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

pub struct FrontEnd {
    pub words: Words,
    pub frontend: Frontend,
    kick: EventFd,
    _call: EventFd,
    next: u16,
    used: u16,
    /// The fence of the last fenced wait.
    pub fence: u64,
    answered: Vec<(u16, Vec<u8>)>,
    _mapping: Mapping,
    _file: OwnedFd,
}

impl FrontEnd {
    /// Connects, with sealed memory and a context 1.
    pub fn connect(path: &Path) -> FrontEnd {
        FrontEnd::try_connect(path).expect("a connection and a context")
    }

    /// Connects; `None` if the device refuses the connection or the context.
    pub fn try_connect(path: &Path) -> Option<FrontEnd> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let mut front_end = FrontEnd::with_memory(path, memory(seals)).ok()?;
        assert_eq!(front_end.ask(&command(GET_CAPSET_INFO, 0, &[0, 0])), 0x1102);
        (front_end.context(1) == 0x1100).then_some(front_end)
    }

    pub fn with_memory(path: &Path, file: OwnedFd) -> Result<FrontEnd, vhost::Error> {
        FrontEnd::with_frontend(Frontend::connect(path, 2)?, file)
    }

    pub fn with_frontend(frontend: Frontend, file: OwnedFd) -> Result<FrontEnd, vhost::Error> {
        FrontEnd::with_features(frontend, file, 1 | 1 << 3 | 1 << 4)
    }

    /// Connects as a driver without 3D, and so without contexts.
    pub fn flat(path: &Path) -> FrontEnd {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let frontend = Frontend::connect(path, 2).expect("a device");
        let mut front_end = FrontEnd::with_features(frontend, memory(seals), 0).expect("a device");
        assert_eq!(front_end.ask(&command(GET_CAPSET_INFO, 0, &[0, 0])), 0x1102);
        front_end
    }

    fn with_features(mut frontend: Frontend, file: OwnedFd, gpu: u64) -> Result<FrontEnd, vhost::Error> {
        let mapping =
            Mapping::scattered(0, MEMORY, [(file.as_fd(), Run { offset: 0, bytes: MEMORY })]).unwrap();
        frontend.set_owner()?;
        frontend.get_features()?;
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK;
        let protocol = frontend.get_protocol_features()?;
        frontend.set_protocol_features(protocol & wanted)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(1 << 32 | gpu | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())?;
        frontend.set_mem_table(&[region(&mapping, &file)])?;
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let mut front_end = FrontEnd {
            words: mapping.words(),
            frontend,
            kick,
            _call: call,
            next: 0,
            used: 0,
            fence: 0,
            answered: Vec::new(),
            _mapping: mapping,
            _file: file,
        };
        front_end.start(0)?;
        Ok(front_end)
    }

    /// Starts the queue at `base`, as after a pause or a reboot.
    pub fn start(&mut self, base: u16) -> Result<(), vhost::Error> {
        let at = self._mapping.base();
        let rings = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: at,
            avail_ring_addr: at + AVAILABLE as u64,
            used_ring_addr: at + USED as u64,
            log_addr: None,
        };
        if base == 0 {
            self.words.store_u32(AVAILABLE, 0, Ordering::SeqCst);
            self.words.store_u32(USED, 0, Ordering::SeqCst);
            (self.next, self.used) = (0, 0);
        }
        self.frontend.set_vring_num(0, QUEUE)?;
        self.frontend.set_vring_addr(0, &rings)?;
        self.frontend.set_vring_base(0, base)?;
        self.frontend.set_vring_call(0, &self._call)?;
        self.frontend.set_vring_kick(0, &self.kick)?;
        self.frontend.set_vring_enable(0, true)
    }

    /// Passes the descriptors by which a program and its worker wake each other.
    pub fn signals(&mut self, doorbell: &EventFd, wake: &EventFd) -> Result<(), vhost::Error> {
        self.frontend.set_vring_kick(gpu::CURSOR_QUEUE.into(), doorbell)?;
        self.frontend.set_vring_call(gpu::CURSOR_QUEUE.into(), wake)
    }

    /// Replaces the device's memory by another memory file.
    pub fn replace(&mut self, file: &OwnedFd) -> Result<(), vhost::Error> {
        self.frontend.set_mem_table(&[region(&self._mapping, file)]).map(drop)
    }

    /// Stops the queue; returns its index.
    pub fn stop(&mut self) -> u32 {
        self.frontend.get_vring_base(0).unwrap()
    }

    /// Makes a command available, with room for an answer; returns its head.
    pub fn send(&mut self, command: &[u8]) -> u16 {
        let head = (self.next % (QUEUE / 2)) * 2;
        let at = SLOTS + SLOT * usize::from(head / 2);
        self.words.write(at, command);
        self.words.write(at + SLOT / 2, &[0; SLOT / 2]);
        self.descriptor(head, at as u64, command.len() as u32, 1, head + 1);
        self.descriptor(head + 1, (at + SLOT / 2) as u64, SLOT as u32 / 2, 2, 0);
        self.make_available(head);
        head
    }

    pub fn descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = 16 * usize::from(index);
        self.words.store_u64(at, address, Ordering::SeqCst);
        let rest = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.words.store_u64(at + 8, rest, Ordering::SeqCst);
    }

    pub fn make_available(&mut self, head: u16) {
        self.words.write(AVAILABLE + 4 + 2 * usize::from(self.next % QUEUE), &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        self.words.store_u32(AVAILABLE, u32::from(self.next) << 16, Ordering::SeqCst);
        self.kick.write(1).unwrap();
    }

    /// Takes the present answers.
    fn collect(&mut self) {
        let used = (self.words.load_u32(USED, Ordering::SeqCst) >> 16) as u16;
        while self.used != used {
            let mut element = [0; 8];
            self.words.read(USED + 4 + 8 * usize::from(self.used % QUEUE), &mut element);
            let head = u16::from_le_bytes([element[0], element[1]]);
            let mut answer = vec![0; u32::from_le_bytes(element[4..].try_into().unwrap()) as usize];
            self.words.read(SLOTS + SLOT * usize::from(head / 2) + SLOT / 2, &mut answer);
            self.answered.push((head, answer));
            self.used = self.used.wrapping_add(1);
        }
    }

    /// Number of answers since [`FrontEnd::forget`] that were not taken by head.
    pub fn answers(&mut self) -> usize {
        self.collect();
        self.answered.len()
    }

    /// Forgets the answers so far.
    pub fn forget(&mut self) {
        self.collect();
        self.answered.clear();
    }

    /// The answer to a command, if it has come.
    pub fn answer(&mut self, head: u16) -> Option<Vec<u8>> {
        self.collect();
        let index = self.answered.iter().position(|(other, _)| *other == head)?;
        Some(self.answered.remove(index).1)
    }

    /// Waits for the answer to a command.
    pub fn soon(&mut self, head: u16) -> Vec<u8> {
        let started = Instant::now();
        loop {
            if let Some(answer) = self.answer(head) {
                return answer;
            }
            assert!(started.elapsed() < TIMEOUT, "no answer");
            std::thread::yield_now();
        }
    }

    /// Sends a command; returns the type word of its answer.
    pub fn ask(&mut self, command: &[u8]) -> u32 {
        let head = self.send(command);
        let answer = self.soon(head);
        u32::from_le_bytes(answer[..4].try_into().unwrap())
    }

    pub fn context(&mut self, context: u32) -> u32 {
        let mut words = vec![3, Capset::ID];
        words.extend([0; 16]);
        self.ask(&command(CTX_CREATE, context, &words))
    }

    /// Creates a resource of these pages and attaches it to a context.
    pub fn resource(&mut self, context: u32, id: u32, entries: &[(u64, u32)]) -> u32 {
        let kind = self.ask(&blob(id, entries));
        if kind != 0x1100 {
            return kind;
        }
        self.ask(&command(CTX_ATTACH_RESOURCE, context, &[id, 0]))
    }

    pub fn doorbell(&mut self, context: u32, doorbell: Doorbell) -> u32 {
        self.ask(&submit(context, doorbell, 0))
    }

    /// Sends a fenced wait.
    pub fn wait(&mut self, context: u32) -> u16 {
        self.fence += 1;
        let command = submit(context, Doorbell::Wait, self.fence);
        self.send(&command)
    }

    /// Creates a control resource at `at` and opens a session with it.
    pub fn open(&mut self, context: u32, id: u32, at: u64) {
        assert_eq!(self.try_open(context, id, at), 0x1100);
    }

    /// Creates a control resource at `at` and asks for a session with it; returns the first refusal, or the answer.
    pub fn try_open(&mut self, context: u32, id: u32, at: u64) -> u32 {
        let made = self.resource(context, id, &[(at, session::BYTES as u32)]);
        if made != 0x1100 {
            return made;
        }
        self.words.store_u64(at as usize + session::MAGIC_AT, session::MAGIC, Ordering::SeqCst);
        self.doorbell(context, Doorbell::Open { resource: id })
    }

    /// Creates memory of these pages without contexts; its first page carries this nonce.
    pub fn flat_memory(&mut self, id: u32, entries: &[(u64, u32)], nonce: [u8; Nonce::BYTES]) {
        assert_eq!(self.ask(&create_2d(id, Purpose::Memory, 0)), 0x1100);
        assert_eq!(self.ask(&backing(id, entries)), 0x1100);
        self.words.write(entries[0].0 as usize + session::NONCE_AT, &nonce);
    }

    /// Creates a control resource at `at` and opens a session with it, without contexts.
    pub fn flat_open(&mut self, id: u32, at: u64, nonce: [u8; Nonce::BYTES]) {
        self.flat_memory(id, &[(at, session::BYTES as u32)], nonce);
        self.words.store_u64(at as usize + session::MAGIC_AT, session::MAGIC, Ordering::SeqCst);
        assert_eq!(self.ask(&transfer(id, Doorbell::Open { resource: id })), 0x1100);
    }

    /// Creates a token, which is the sleep of a session.
    pub fn token(&mut self, id: u32, nonce: [u8; Nonce::BYTES]) -> u16 {
        self.fence += 1;
        let key = Nonce::new(nonce).unwrap().key();
        let command = create_2d(id, Purpose::Token { key }, self.fence);
        self.send(&command)
    }

    pub fn state(&self, at: u64) -> u32 {
        self.words.load_u32(at as usize + session::STATE, Ordering::Acquire)
    }
}

/// A command from its header and words.
pub fn command(kind: u32, context: u32, words: &[u32]) -> Vec<u8> {
    let header = [kind, 0, 0, 0, context, 0];
    header.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
}

pub fn blob(id: u32, entries: &[(u64, u32)]) -> Vec<u8> {
    let mut words = vec![id, 1, 1, entries.len() as u32, 0, 0, 0, 0];
    for (address, bytes) in entries {
        words.extend([*address as u32, (*address >> 32) as u32, *bytes, 0]);
    }
    command(RESOURCE_CREATE_BLOB, 0, &words)
}

/// A 2D resource, fenced unless `fence` is 0.
pub fn create_2d(id: u32, purpose: Purpose, fence: u64) -> Vec<u8> {
    let [format, width, height] = purpose.encode();
    let mut bytes = command(RESOURCE_CREATE_2D, 0, &[id, format, width, height]);
    if fence != 0 {
        bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&fence.to_le_bytes());
    }
    bytes
}

pub fn backing(id: u32, entries: &[(u64, u32)]) -> Vec<u8> {
    let mut words = vec![id, entries.len() as u32];
    for (address, bytes) in entries {
        words.extend([*address as u32, (*address >> 32) as u32, *bytes, 0]);
    }
    command(ATTACH_BACKING, 0, &words)
}

/// A doorbell without contexts.
pub fn transfer(control: u32, doorbell: Doorbell) -> Vec<u8> {
    let [x, y, width, height, offset] = doorbell.numbers().expect("something a transfer can say");
    command(TRANSFER_TO_HOST_2D, 0, &[x, y, width, height, offset, 0, control, 0])
}

/// A doorbell, fenced unless `fence` is 0.
pub fn submit(context: u32, doorbell: Doorbell, fence: u64) -> Vec<u8> {
    let mut bytes = command(SUBMIT_3D, context, &[32, 0]);
    if fence != 0 {
        bytes[4..8].copy_from_slice(&3u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&fence.to_le_bytes());
        bytes[20] = 1;
    }
    bytes.extend(doorbell.encode());
    bytes
}

//! A hostile guest process: an ordinary user with a render node that uses the protocol and breaks all its rules.
//!
//! Each attack has an open file of its own, which is a virtio-gpu context; if the driver has no contexts, it has a control resource
//! with a nonce of its own. The program checks the effects that the attacker can see; the test checks that no other process was
//! affected. Usage: sluice-hostile-guest `SEED [ROUNDS]`

#![expect(unsafe_code, reason = "ioctls of the virtio_gpu driver with arguments that no library would make")]
#![expect(clippy::cast_possible_truncation, reason = "random numbers")]

use std::cell::Cell;
use std::env;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Updater};
use sluice_kit::figures::Random;
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::gpu::Purpose;
use sluice_protocol::session::{self, Attachment, Nonce};
use sluice_protocol::shared::Shared as _;
use sluice_protocol::{limits, record};
use sluice_shared_memory::Reservation;
use sluice_shared_memory::mapping::Words;

const NODE: &str = "/dev/dri/renderD128";
/// Time limit for steps that take milliseconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(100);
/// Resource ids of a small guest are below this number.
const IDS: u32 = 96;

const GEM_CLOSE: Opcode = ioctl::opcode::write::<[u32; 2]>(b'd', 0x09);
const MAP: Opcode = ioctl::opcode::read_write::<Map>(b'd', 0x41);
const GETPARAM: Opcode = ioctl::opcode::read_write::<[u64; 2]>(b'd', 0x43);
const PRIME_HANDLE_TO_FD: Opcode = ioctl::opcode::read_write::<[u32; 3]>(b'd', 0x2d);
const EXECBUFFER: Opcode = ioctl::opcode::read_write::<Execbuffer>(b'd', 0x42);
const RESOURCE_CREATE: Opcode = ioctl::opcode::read_write::<[u32; 14]>(b'd', 0x44);
const TRANSFER_TO_HOST: Opcode = ioctl::opcode::read_write::<[u32; 11]>(b'd', 0x47);
const GET_CAPS: Opcode = ioctl::opcode::read_write::<GetCaps>(b'd', 0x49);
const FENCE_OUT: u32 = 2;

#[repr(C)]
struct Map {
    offset: u64,
    handle: u32,
    pad: u32,
}

#[repr(C)]
struct Execbuffer {
    flags: u32,
    size: u32,
    command: u64,
    handles: u64,
    handle_count: u32,
    fence: i32,
    ring: u32,
    pad: u32,
}

#[repr(C)]
struct GetCaps {
    id: u32,
    version: u32,
    address: u64,
    size: u32,
    pad: u32,
}

/// An open render node.
struct Node {
    file: File,
    /// Set if the driver has no contexts.
    flat: Option<Flat>,
}

/// The replacement of a context.
struct Flat {
    nonce: [u8; Nonce::BYTES],
    /// The handle whose transfers are doorbells: that of the control resource, if there is one.
    vessel: Cell<u32>,
}

impl Node {
    fn open() -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(NODE);
        let mut node = Self { file: file.with_context(|| format!("opening {NODE}"))?, flat: None };
        let mut three_d = 0i32;
        let mut get = [1, (&raw mut three_d).expose_provenance() as u64];
        // SAFETY: the structure of this ioctl; its one address points to an int that may be written.
        unsafe { node.call::<GETPARAM, _>(&mut get) }.context("GETPARAM")?;
        if three_d == 0 {
            let mut nonce = [0; Nonce::BYTES];
            rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
            node.flat = Some(Flat { nonce, vessel: Cell::new(0) });
            let (handle, _) = node.create(4096).context("creating a resource")?;
            node.sail(handle);
        }
        Ok(node)
    }

    /// Uses another resource for doorbells from now on.
    fn sail(&self, handle: u32) {
        if let Some(flat) = &self.flat {
            flat.vessel.set(handle);
        }
    }

    /// # Safety
    /// `T` is the structure of the ioctl, and every address in it is valid for the driver's access.
    unsafe fn call<const OPCODE: Opcode, T>(&self, value: &mut T) -> Result<(), Errno> {
        loop {
            // SAFETY: the caller guarantees that this is the structure of the ioctl.
            let request = unsafe { Updater::<OPCODE, T>::new(value) };
            // SAFETY: the caller guarantees that the addresses in it are valid.
            match unsafe { ioctl::ioctl(self.file.as_fd(), request) } {
                Err(Errno::INTR | Errno::AGAIN) => {}
                result => return result,
            }
        }
    }

    /// Sends a payload. The result of the kernel does not matter, but the call must return.
    fn execute(&self, payload: &[u8], flags: u32) -> Result<Option<OwnedFd>, Errno> {
        let mut execbuffer = Execbuffer {
            flags,
            size: payload.len() as u32,
            command: payload.as_ptr().expose_provenance() as u64,
            handles: 0,
            handle_count: 0,
            fence: -1,
            ring: 0,
            pad: 0,
        };
        // SAFETY: the structure of this ioctl; its one address points to `size` bytes that are only read.
        unsafe { self.call::<EXECBUFFER, _>(&mut execbuffer) }?;
        // SAFETY: the driver made this descriptor for us just now.
        Ok((flags & FENCE_OUT != 0 && execbuffer.fence >= 0)
            .then(|| unsafe { OwnedFd::from_raw_fd(execbuffer.fence) }))
    }

    fn say(&self, doorbell: Doorbell) -> Result<()> {
        let said = match (&self.flat, doorbell.numbers()) {
            (Some(flat), Some(numbers)) => self.transfer(flat.vessel.get(), numbers),
            _ => self.execute(&doorbell.encode(), 0).map(drop),
        };
        said.with_context(|| format!("{doorbell:?}"))
    }

    fn transfer(&self, handle: u32, [x, y, width, height, offset]: [u32; 5]) -> Result<(), Errno> {
        // handle, x, y, z, width, height, depth, level, offset, stride, layer_stride
        let mut transfer = [handle, x, y, 0, width, height, 1, 0, offset, 0, 0];
        // SAFETY: the structure of this ioctl, without addresses: the device reads the memory that it names.
        unsafe { self.call::<TRANSFER_TO_HOST, _>(&mut transfer) }
    }

    /// A wait in the own session or, without contexts, in any with a known key; returns a descriptor that becomes readable at its end.
    fn sleep(&self, key: Option<u64>) -> Result<OwnedFd> {
        let Some(flat) = &self.flat else {
            let fence = self.execute(&Doorbell::Wait.encode(), FENCE_OUT).context("a wait")?;
            return fence.context("a wait has a fence");
        };
        let own = Nonce::new(flat.nonce).context("a nonce that is not zero")?.key();
        let (handle, _) =
            self.create_2d(Purpose::Token { key: key.unwrap_or(own) }, 4096).context("a token")?;
        let mut prime = [handle, 0, u32::MAX];
        // SAFETY: the structure of this ioctl, without addresses.
        let exported = unsafe { self.call::<PRIME_HANDLE_TO_FD, _>(&mut prime) };
        self.close(handle);
        exported.context("exporting a token")?;
        // SAFETY: the driver made this descriptor for us just now.
        Ok(unsafe { OwnedFd::from_raw_fd(prime[2].cast_signed()) })
    }

    fn create_2d(&self, purpose: Purpose, size: u32) -> Result<(u32, u32), Errno> {
        let [format, width, height] = purpose.encode();
        let mut create = [2, format, 0, width, height, 1, 1, 0, 0, 0, 0, 0, size, 0];
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { self.call::<RESOURCE_CREATE, _>(&mut create) }?;
        Ok((create[10], create[11]))
    }

    /// A buffer resource of any size: its handle and id.
    fn create(&self, size: u32) -> Result<(u32, u32), Errno> {
        if self.flat.is_some() {
            return self.create_2d(Purpose::Memory, size);
        }
        // target, format, bind, width, height, depth, array_size, last_level, samples, flags, handle, id, size, stride
        let mut create = [0, 64, 1 << 17, size, 1, 1, 1, 0, 0, 0, 0, 0, size, 0];
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { self.call::<RESOURCE_CREATE, _>(&mut create) }?;
        Ok((create[10], create[11]))
    }

    fn close(&self, handle: u32) {
        // SAFETY: the structure of this ioctl, without addresses. An invalid handle is refused.
        let _ = unsafe { self.call::<GEM_CLOSE, _>(&mut [handle, 0]) };
    }

    fn resource(&self, bytes: usize) -> Result<Resource> {
        let (handle, id) = self.create(bytes as u32).context("creating a resource")?;
        let mut map = Map { offset: 0, handle, pad: 0 };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { self.call::<MAP, _>(&mut map) }.context("mapping a resource")?;
        let memory = Reservation::new(0, bytes as u64)?;
        memory.map(memory.base(), self.file.as_fd(), map.offset, bytes as u64)?;
        // SAFETY: the reservation lives as long as the value that holds both, and no reference to its bytes exists.
        let words = unsafe { Words::new(memory.base() as usize, bytes) };
        if let Some(flat) = &self.flat {
            words.write(session::NONCE_AT, &flat.nonce);
        }
        Ok(Resource { id, handle, words, _memory: memory })
    }

    /// Opens a session as the library would; a worker serves it.
    fn session(&self) -> Result<Resource> {
        let control = self.resource(session::BYTES)?;
        control.words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
        self.sail(control.handle);
        self.say(Doorbell::Open { resource: control.id })?;
        let state = self.await_state(&control, |state| state != session::NEW)?;
        ensure!(state == session::READY, "no worker: state {state}");
        Ok(control)
    }

    fn await_state(&self, control: &Resource, good: impl Fn(u32) -> bool) -> Result<u32> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let state = control.words.load_u32(session::STATE, Ordering::Acquire);
            if good(state) {
                return Ok(state);
            }
            ensure!(Instant::now() < deadline, "the session stays in state {state}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A resource mapped into this process.
struct Resource {
    id: u32,
    handle: u32,
    words: Words,
    _memory: Reservation,
}

/// Requests every capset that does not exist, in every version and size.
fn capsets() -> Result<()> {
    let node = Node::open()?;
    let mut body = [0u8; 4096];
    for id in (0..64).chain([255, 0x8000_0000, u32::MAX]) {
        for version in [0, 1, u32::MAX] {
            for size in [0, 1, 63, 64, body.len() as u32] {
                let address = body.as_mut_ptr().expose_provenance() as u64;
                let mut caps = GetCaps { id, version, address, size, pad: 0 };
                // SAFETY: the structure of this ioctl; its one address points to `size` bytes that may be written.
                let _ = unsafe { node.call::<GET_CAPS, _>(&mut caps) };
            }
        }
    }
    Ok(())
}

/// Sends payloads of every length, of random bytes and of random requests; first without a session, then in one.
fn payloads(random: &mut Random) -> Result<()> {
    let stranger = Node::open()?;
    let member = Node::open()?;
    let _control = member.session()?;
    for node in [&stranger, &member] {
        for length in (0..160).chain([4095, 4096, 4097, 65536]) {
            let mut payload = random.bytes(length);
            let _ = node.execute(&payload, 0);
            // The same with a valid request kind; not Close, which would end the attack, nor Wait without a fence.
            if let Some(head) = payload.first_chunk_mut::<8>() {
                *head = (1 + random.below(4)).to_le_bytes();
                let _ = node.execute(&payload, 0);
            }
        }
        let (handle, _) = node.create(4096).context("creating a resource")?;
        for round in 0..200 {
            let mut numbers = [0; 5].map(|_: u32| random.next_u64() as u32);
            // If transfers are doorbells, half of them go to the own session; not Close, which would end the attack.
            let vessel = node.flat.as_ref().filter(|_| round % 2 == 0).map(|flat| flat.vessel.get());
            if vessel.is_some() {
                numbers[0] = 1 + random.below(4) as u32;
            }
            let _ = node.transfer(vessel.unwrap_or(handle), numbers);
        }
    }
    Ok(())
}

/// Opens sessions over resources of other contexts, and over own resources that are no control resource.
fn foreign_control(own: &Node) -> Result<()> {
    let node = Node::open()?;
    for resource in (0..IDS).chain([u32::MAX, 1 << 31]) {
        node.say(Doorbell::Open { resource })?;
    }
    let small = node.resource(4096)?;
    small.words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
    node.sail(small.handle);
    node.say(Doorbell::Open { resource: small.id })?;
    let other = own.resource(session::BYTES)?;
    other.words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
    node.say(Doorbell::Open { resource: other.id })?;
    let unmarked = node.resource(session::BYTES)?;
    node.sail(unmarked.handle);
    node.say(Doorbell::Open { resource: unmarked.id })?;
    // The context is still free, so no attempt has opened a session.
    let control = node.session()?;
    for words in [&small.words, &other.words, &unmarked.words] {
        let state = words.load_u32(session::STATE, Ordering::Acquire);
        ensure!(state == session::NEW, "an invalid control resource got state {state}");
    }
    node.say(Doorbell::Open { resource: control.id })?;
    node.say(Doorbell::Close)?;
    Ok(())
}

/// Without contexts: missing or foreign nonces; waits in the sessions of others; memory of others in the own session.
fn nonces(random: &mut Random) -> Result<()> {
    let (alice, mallory) = (Node::open()?, Node::open()?);
    let (Some(known), Some(_)) = (&alice.flat, &mallory.flat) else { return Ok(()) };
    let hers = alice.session()?;
    // Her nonce must not stay in the page.
    let mut left = [0; Nonce::BYTES];
    hers.words.read(session::NONCE_AT, &mut left);
    ensure!(left == [0; Nonce::BYTES], "the nonce stays in the page");
    for nonce in [[0; Nonce::BYTES], known.nonce] {
        let control = mallory.resource(session::BYTES)?;
        control.words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
        control.words.write(session::NONCE_AT, &nonce);
        mallory.sail(control.handle);
        mallory.say(Doorbell::Open { resource: control.id })?;
        let state = mallory.await_state(&control, |state| state != session::NEW)?;
        ensure!(state == session::LOST, "a session with a nonce that cannot be got state {state}");
    }
    // Her memory, which contains her nonce until she has attached it, for a session of his.
    let his = mallory.session()?;
    let memory = alice.resource(1 << 20)?;
    let address = limits::WINDOW_BOUNDS.start;
    mallory.say(Doorbell::Attach { resource: memory.id, slot: 1, address })?;
    let deadline = Instant::now() + TIMEOUT;
    while session::attachment(&his.words, 1) == Attachment::Pending && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let became = session::attachment(&his.words, 1);
    ensure!(matches!(became, Attachment::Refused(_)), "memory of another became {became:?}");
    // Waits in sessions that do not exist, more than there is room for.
    let sleeps: Vec<OwnedFd> =
        (0..300).map(|_| mallory.sleep(Some(random.next_u64()))).collect::<Result<_>>()?;
    for sleep in &sleeps {
        let mut fds = [PollFd::new(sleep, PollFlags::IN)];
        let left = Timespec { tv_sec: TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        ensure!(poll(&mut fds, Some(&left))? == 1, "a wait without a session never ends");
    }
    alice.say(Doorbell::Attach { resource: memory.id, slot: 1, address })?;
    while session::attachment(&hers.words, 1) == Attachment::Pending && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let became = session::attachment(&hers.words, 1);
    ensure!(became == Attachment::Adopted(1 << 20), "her memory became {became:?}");
    Ok(())
}

/// Attaches at forbidden addresses and with forbidden entries, also resources of others.
fn attachments(random: &mut Random) -> Result<()> {
    let node = Node::open()?;
    let control = node.session()?;
    let base = limits::WINDOW_BOUNDS.start;
    let good = node.resource(1 << 20)?;
    let spare = node.resource(1 << 20)?;
    let refused = |slot: u32, resource: u32, address: u64| -> Result<()> {
        node.say(Doorbell::Attach { resource, slot, address })?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match session::attachment(&control.words, slot) {
                Attachment::Refused(_) => return Ok(()),
                Attachment::Pending if Instant::now() < deadline => std::thread::yield_now(),
                other => anyhow::bail!("resource {resource} at {address:#x} became {other:?}"),
            }
        }
    };
    let attach = |slot: u32, resource: u32, address: u64| -> Result<()> {
        node.say(Doorbell::Attach { resource, slot, address })?;
        let deadline = Instant::now() + TIMEOUT;
        while session::attachment(&control.words, slot) == Attachment::Pending && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let became = session::attachment(&control.words, slot);
        ensure!(became == Attachment::Adopted(1 << 20), "a lawful resource became {became:?}");
        Ok(())
    };
    attach(1, good.id, base)?;
    let mut slot = 2;
    let mut next = || {
        slot += 1;
        slot
    };
    // Unaligned, outside the windows, wrapping around, overlapping the first one.
    for address in [
        0,
        1,
        4096,
        base + 1,
        base - 4096,
        base,
        base + (1 << 20) - 4096,
        base - (1 << 20) + 4096,
        limits::WINDOW_BOUNDS.end,
        limits::WINDOW_BOUNDS.end - 4096,
        0x7d00_0000_0000,
        0x7fff_ffff_f000,
        0xffff_8000_0000_0000,
        u64::MAX,
        u64::MAX - 4095,
        random.next_u64() & 0x7fff_ffff,
    ] {
        refused(next(), spare.id, address)?;
    }
    // An attached resource, the control resource itself, resources of others and resources that do not exist.
    for resource in [good.id, control.id, u32::MAX, 0] {
        refused(next(), resource, base + (1 << 30))?;
    }
    for resource in (1..IDS).filter(|id| ![good.id, control.id, spare.id].contains(id)) {
        refused(next(), resource, base + (1 << 30))?;
    }
    for slot in [0, 1, limits::ATTACHMENTS, limits::ATTACHMENTS + 1, u32::MAX] {
        node.say(Doorbell::Attach { resource: spare.id, slot, address: base + (2 << 30) })?;
        node.say(Doorbell::Detach { slot: if slot == 1 { 3 } else { slot } })?;
    }
    attach(2, spare.id, base + (3 << 30))?;
    Ok(())
}

/// Sends more doorbells and more waits than any program needs. Every wait must end.
fn floods() -> Result<()> {
    let node = Node::open()?;
    let _control = node.session()?;
    for _ in 0..3000 {
        node.say(Doorbell::Ring)?;
    }
    let mut fences = Vec::new();
    for _ in 0..400 {
        fences.push(node.sleep(None)?);
    }
    for fence in &fences {
        let mut fds = [PollFd::new(fence, PollFlags::IN)];
        let left = Timespec { tv_sec: TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        ensure!(poll(&mut fds, Some(&left))? == 1, "a wait (descriptor {}) never ends", fence.as_raw_fd());
    }
    // Unattended waits, with an end of the session during them.
    for _ in 0..50 {
        let _ = node.sleep(None);
    }
    Ok(())
}

/// Makes many small resources and frees them in another order, some of them while attached.
fn resources(random: &mut Random) -> Result<()> {
    let node = Node::open()?;
    let _control = node.session()?;
    let mut handles = Vec::new();
    for slot in 1..200u32 {
        let (handle, resource) = node.create(4096 << random.below(3)).context("creating a resource")?;
        let address = limits::WINDOW_BOUNDS.start + (u64::from(slot) << 20);
        node.say(Doorbell::Attach { resource, slot, address })?;
        handles.push(handle);
    }
    while !handles.is_empty() {
        let at = random.below(handles.len() as u64) as usize;
        node.close(handles.swap_remove(at));
    }
    Ok(())
}

/// Fills control resources with garbage. The worker must end the session or continue to serve it.
fn garbage(random: &mut Random) -> Result<()> {
    for attack in 0..6 {
        let node = Node::open()?;
        let control = node.session()?;
        let words = &control.words;
        match attack {
            // Invalid indices.
            0 => words.store_u64(session::RING_TAIL, random.next_u64() | 1 << 40, Ordering::Release),
            1 => words.store_u64(session::RING_TAIL, 7, Ordering::Release),
            // Invalid records.
            2 => {
                words.write(session::RING_AT, &random.bytes(4096));
                words.store_u64(session::RING_TAIL, 4096, Ordering::Release);
            }
            // Records of the right length, with any call and any fields.
            3 => {
                let mut tail = 0usize;
                for _ in 0..200 {
                    let size = (record::HEADER_BYTES + 8 * random.below(40) as usize).next_multiple_of(8);
                    let mut bytes = random.bytes(size);
                    bytes[..4].copy_from_slice(&(size as u32).to_le_bytes());
                    bytes[4..8].copy_from_slice(&(random.below(400) as u32).to_le_bytes());
                    words.write(session::RING_AT + tail, &bytes);
                    tail += size;
                    words.store_u64(session::RING_TAIL, tail as u64, Ordering::Release);
                    node.say(Doorbell::Ring)?;
                }
            }
            // Records that change during reading.
            4 => {
                words.store_u64(session::RING_TAIL, 1 << 19, Ordering::Release);
                for _ in 0..200 {
                    let at = session::RING_AT + random.below(1 << 16) as usize * 8;
                    words.store_u64(at, random.next_u64() & 0xffff_0000_00ff, Ordering::Release);
                    node.say(Doorbell::Ring)?;
                }
            }
            // All of these at once, the host's own words included.
            _ => {
                for _ in 0..500 {
                    let at = random.below(session::RING_AT as u64 / 8) as usize * 8;
                    words.store_u64(at, random.next_u64(), Ordering::Release);
                }
                node.say(Doorbell::Ring)?;
                continue;
            }
        }
        node.say(Doorbell::Ring)?;
        if attack != 3 {
            node.await_state(&control, |state| state == session::LOST)
                .with_context(|| format!("garbage of kind {attack}"))?;
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let number = |at: usize| env::args().nth(at).map(|text| text.parse::<u64>()).transpose();
    let seed = number(1)?.context("usage: sluice-hostile-guest SEED [ROUNDS]")?;
    let mut random = Random(seed);
    let own = Node::open()?;
    let mut attack = |name: &str, run: &mut dyn FnMut(&mut Random) -> Result<()>| -> Result<()> {
        let started = Instant::now();
        run(&mut random).with_context(|| name.to_owned())?;
        eprintln!("{name}: {:.2} s", started.elapsed().as_secs_f64());
        Ok(())
    };
    println!("attacking");
    for _ in 0..number(2)?.unwrap_or(1) {
        attack("capsets", &mut |_| capsets())?;
        attack("payloads", &mut payloads)?;
        attack("foreign control resources", &mut |_| foreign_control(&own))?;
        attack("nonces", &mut nonces)?;
        attack("attachments", &mut attachments)?;
        attack("floods", &mut |_| floods())?;
        attack("resources", &mut resources)?;
        attack("garbage", &mut garbage)?;
    }
    println!("nothing was gained");
    Ok(())
}

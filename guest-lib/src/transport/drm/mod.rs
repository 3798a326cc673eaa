//! A virtual machine: the kernel's stock `virtio_gpu` driver, reached through an unprivileged render node.
//!
//! Two of the driver's modes serve: FULL (guest blobs and contexts of a capset) where the VMM passes those features, and
//! LEGACY (3D resources with guest backing) under stock QEMU. The difference is how a resource is made, and that in
//! LEGACY any answer to anybody ends every wait, which a wait permits. Errors of the device do not come back through
//! this driver: whether a resource is usable is learnt from the attach table.

#![expect(unsafe_code, reason = "ioctls of the virtio_gpu driver")]
#![expect(clippy::cast_possible_truncation, reason = "lengths of small structures")]

use super::{Resource, Token, Transport, TransportError, held::Held};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, FromRawFd, OwnedFd},
    fs::{Mode, OFlags},
    io::Errno,
    ioctl::{self, Opcode, Updater},
};
use sluice_protocol::{
    calls,
    doorbell::{Capset, Doorbell},
    gpu, limits,
};
use sluice_shared_memory::Reservation;
use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The structures of the driver, as `drm.h` and `virtgpu_drm.h` define them. Written out because the headers of older
/// distributions lack the newer ones.
mod abi {
    /// DRM_IOCTL_VERSION. A C program passes buffers for three strings; this one only the name's.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Version {
        pub(super) numbers: [i32; 3],
        pub(super) name_length: u64,
        pub(super) name: u64,
        pub(super) date_length: u64,
        pub(super) date: u64,
        pub(super) description_length: u64,
        pub(super) description: u64,
    }

    /// DRM_IOCTL_GEM_CLOSE.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct GemClose {
        pub(super) handle: u32,
        pub(super) pad: u32,
    }

    /// DRM_IOCTL_VIRTGPU_MAP.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Map {
        pub(super) offset: u64,
        pub(super) handle: u32,
        pub(super) pad: u32,
    }

    /// DRM_IOCTL_VIRTGPU_EXECBUFFER, as of 5.16: older kernels ignore its last words, newer ones take what is missing
    /// for zero.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Execbuffer {
        pub(super) flags: u32,
        pub(super) size: u32,
        pub(super) command: u64,
        pub(super) handles: u64,
        pub(super) handle_count: u32,
        pub(super) fence: i32,
        pub(super) ring: u32,
        pub(super) pad: u32,
    }

    pub(super) const FENCE_OUT: u32 = 2;
    pub(super) const RING_INDEX: u32 = 4;

    /// DRM_IOCTL_VIRTGPU_GETPARAM. `value` is the address of an `int`.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Parameter {
        pub(super) parameter: u64,
        pub(super) value: u64,
    }

    pub(super) const HAS_3D: u64 = 1;
    pub(super) const HAS_BLOBS: u64 = 3;
    pub(super) const HAS_CONTEXTS: u64 = 6;

    /// DRM_IOCTL_VIRTGPU_RESOURCE_CREATE.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Create {
        pub(super) target: u32,
        pub(super) format: u32,
        pub(super) bind: u32,
        pub(super) width: u32,
        pub(super) height: u32,
        pub(super) depth: u32,
        pub(super) array_size: u32,
        pub(super) last_level: u32,
        pub(super) samples: u32,
        pub(super) flags: u32,
        pub(super) handle: u32,
        pub(super) resource: u32,
        pub(super) size: u32,
        pub(super) stride: u32,
    }

    /// DRM_IOCTL_VIRTGPU_GET_CAPS.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct GetCaps {
        pub(super) id: u32,
        pub(super) version: u32,
        pub(super) address: u64,
        pub(super) size: u32,
        pub(super) pad: u32,
    }

    /// DRM_IOCTL_VIRTGPU_RESOURCE_CREATE_BLOB.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct CreateBlob {
        pub(super) memory: u32,
        pub(super) flags: u32,
        pub(super) handle: u32,
        pub(super) resource: u32,
        pub(super) size: u64,
        pub(super) pad: u32,
        pub(super) command_size: u32,
        pub(super) command: u64,
        pub(super) blob: u64,
    }

    pub(super) const GUEST_MEMORY: u32 = 1;
    pub(super) const MAPPABLE: u32 = 1;

    /// DRM_IOCTL_VIRTGPU_CONTEXT_INIT.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct ContextInit {
        pub(super) count: u32,
        pub(super) pad: u32,
        pub(super) parameters: u64,
    }

    /// A parameter of it.
    #[repr(C)]
    pub(super) struct ContextParameter {
        pub(super) parameter: u64,
        pub(super) value: u64,
    }

    pub(super) const CAPSET: u64 = 1;
    pub(super) const RINGS: u64 = 2;
}

const fn drm<T>(number: u8) -> Opcode {
    ioctl::opcode::read_write::<T>(b'd', number)
}

const fn virtgpu<T>(number: u8) -> Opcode {
    drm::<T>(0x40 + number)
}

const VERSION: Opcode = drm::<abi::Version>(0x00);
const GEM_CLOSE: Opcode = ioctl::opcode::write::<abi::GemClose>(b'd', 0x09);
const MAP: Opcode = virtgpu::<abi::Map>(0x01);
const EXECBUFFER: Opcode = virtgpu::<abi::Execbuffer>(0x02);
const GETPARAM: Opcode = virtgpu::<abi::Parameter>(0x03);
const RESOURCE_CREATE: Opcode = virtgpu::<abi::Create>(0x04);
const GET_CAPS: Opcode = virtgpu::<abi::GetCaps>(0x09);
const RESOURCE_CREATE_BLOB: Opcode = virtgpu::<abi::CreateBlob>(0x0a);
const CONTEXT_INIT: Opcode = virtgpu::<abi::ContextInit>(0x0b);

/// Render nodes have these minor numbers.
const NODES: core::ops::Range<u32> = 128..192;
/// The ring of doorbells without an answer.
const DOORBELL_RING: u32 = 0;
/// The ring whose fences are waits: a fence ends earlier waits of its own ring only.
const WAIT_RING: u32 = 1;
/// PIPE_BUFFER of one-byte texels, as a constant buffer: the plainest 3D resource there is.
const LEGACY_FORMAT: u32 = 64;
const LEGACY_BIND: u32 = 1 << 17;

/// What the driver of this node can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Legacy,
    Full,
}

/// An open render node.
#[derive(Debug)]
pub struct Drm {
    node: Held,
    mode: Way,
    /// The fence of a wait that has not ended.
    fence: Mutex<Option<Held>>,
}

/// Calls the driver until it is not interrupted.
///
/// # Safety
/// `T` is the structure of ioctl `OPCODE`, and every address in it is valid for what the driver does with it.
unsafe fn call<const OPCODE: Opcode, T>(node: &Held, value: &mut T) -> Result<(), TransportError> {
    let fd = node.get()?;
    // SAFETY: as for this function.
    unsafe { call_fd::<OPCODE, T>(fd.as_fd(), value) }.map_err(|error| match error {
        // The device was unplugged, or the kernel gave it up.
        Errno::NODEV | Errno::IO => TransportError::Lost,
        error => TransportError::System { what: "the virtio_gpu driver", error },
    })
}

/// As [`call`], with the kernel's own answer.
///
/// # Safety
/// As for [`call`].
unsafe fn call_fd<const OPCODE: Opcode, T>(
    fd: rustix::fd::BorrowedFd<'_>,
    value: &mut T,
) -> Result<(), Errno> {
    loop {
        // SAFETY: the caller says that this is the structure of the ioctl.
        let request = unsafe { Updater::<OPCODE, T>::new(value) };
        // SAFETY: the caller says that the addresses in it are valid.
        match unsafe { ioctl::ioctl(fd, request) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
}

/// The number at which an address is passed to the kernel.
fn address<T>(value: *const T) -> u64 {
    value.expose_provenance() as u64
}

impl Drm {
    /// Opens the first render node that is a Sluice device.
    ///
    /// # Errors
    /// [`TransportError::NoDevice`] when there is none, [`TransportError::Denied`] when one may not be opened.
    pub fn open() -> Result<Drm, TransportError> {
        let mut denied = None;
        for number in NODES {
            let path = format!("/dev/dri/renderD{number}");
            match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
                Ok(node) => {
                    if let Some(mode) = recognise(&node)? {
                        return Drm::start(node, mode);
                    }
                }
                Err(error @ (Errno::ACCESS | Errno::PERM)) => {
                    denied.get_or_insert(TransportError::Denied { path, error });
                }
                Err(_) => {}
            }
        }
        Err(denied.unwrap_or(TransportError::NoDevice))
    }

    fn start(node: OwnedFd, mode: Way) -> Result<Drm, TransportError> {
        let node =
            Held::new(node).map_err(|error| TransportError::System { what: "the render node", error })?;
        if mode == Way::Full {
            // Before anything else that needs a context.
            let parameters = [
                abi::ContextParameter { parameter: abi::CAPSET, value: u64::from(Capset::ID) },
                abi::ContextParameter { parameter: abi::RINGS, value: u64::from(WAIT_RING) + 1 },
            ];
            let mut init = abi::ContextInit {
                count: parameters.len() as u32,
                pad: 0,
                parameters: address(parameters.as_ptr()),
            };
            // SAFETY: the structure of this ioctl; its address names an array of `count` parameters that is only read.
            unsafe { call::<CONTEXT_INIT, _>(&node, &mut init) }?;
        }
        Ok(Drm { node, mode, fence: Mutex::new(None) })
    }

    /// Executes a doorbell; with `fence`, answers what is signalled when the device has answered.
    fn execute(&self, doorbell: Doorbell, fence: bool) -> Result<Option<OwnedFd>, TransportError> {
        let payload = doorbell.encode();
        let mut execbuffer = abi::Execbuffer {
            size: payload.len() as u32,
            command: address(payload.as_ptr()),
            fence: -1,
            ..abi::Execbuffer::default()
        };
        if fence {
            execbuffer.flags |= abi::FENCE_OUT;
        }
        if self.mode == Way::Full {
            execbuffer.flags |= abi::RING_INDEX;
            execbuffer.ring = if fence { WAIT_RING } else { DOORBELL_RING };
        }
        // SAFETY: the structure of this ioctl; its address names `size` bytes that are only read.
        unsafe { call::<EXECBUFFER, _>(&self.node, &mut execbuffer) }?;
        if !fence || execbuffer.fence < 0 {
            return Ok(None);
        }
        // SAFETY: the driver made this descriptor for us just now.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(execbuffer.fence) }))
    }

    fn make(&self, bytes: u64) -> Result<(u32, u32), TransportError> {
        match self.mode {
            Way::Full => {
                let mut create = abi::CreateBlob {
                    memory: abi::GUEST_MEMORY,
                    flags: abi::MAPPABLE,
                    size: bytes,
                    ..abi::CreateBlob::default()
                };
                // SAFETY: the structure of this ioctl, without addresses.
                unsafe { call::<RESOURCE_CREATE_BLOB, _>(&self.node, &mut create) }?;
                Ok((create.handle, create.resource))
            }
            Way::Legacy => {
                let size = u32::try_from(bytes).map_err(|_| TransportError::Size(bytes))?;
                let mut create = abi::Create {
                    format: LEGACY_FORMAT,
                    bind: LEGACY_BIND,
                    width: size,
                    height: 1,
                    depth: 1,
                    array_size: 1,
                    size,
                    ..abi::Create::default()
                };
                // SAFETY: the structure of this ioctl, without addresses.
                unsafe { call::<RESOURCE_CREATE, _>(&self.node, &mut create) }?;
                Ok((create.handle, create.resource))
            }
        }
    }

    fn map(&self, handle: u32, reservation: &Reservation, at: u64, bytes: u64) -> Result<(), TransportError> {
        let mut map = abi::Map { handle, ..abi::Map::default() };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<MAP, _>(&self.node, &mut map) }?;
        Ok(reservation.map(at, self.node.get()?, map.offset, bytes)?)
    }

    fn close(&self, handle: u32) -> Result<(), TransportError> {
        let mut close = abi::GemClose { handle, pad: 0 };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<GEM_CLOSE, _>(&self.node, &mut close) }
    }
}

/// What a node's driver can do, if it drives a Sluice device of this version.
fn recognise(node: &OwnedFd) -> Result<Option<Way>, TransportError> {
    let mut name = [0u8; 16];
    let mut version = abi::Version {
        name_length: name.len() as u64,
        name: address(name.as_mut_ptr()),
        ..abi::Version::default()
    };
    // SAFETY: the structure of this ioctl; its one address names `name_length` bytes that may be written.
    let answered = unsafe { call_fd::<VERSION, _>(node.as_fd(), &mut version) };
    if answered.is_err() || !name.starts_with(b"virtio_gpu") {
        return Ok(None);
    }
    let mut body = [0u8; Capset::BYTES];
    let mut caps = abi::GetCaps {
        id: Capset::ID,
        address: address(body.as_mut_ptr()),
        size: body.len() as u32,
        ..abi::GetCaps::default()
    };
    // SAFETY: the structure of this ioctl; its address names `size` bytes that may be written.
    let answered = unsafe { call_fd::<GET_CAPS, _>(node.as_fd(), &mut caps) };
    if answered.is_err() || Capset::decode(&body) != Some(Capset { version: calls::VERSION }) {
        return Ok(None);
    }
    let has = |parameter: u64| {
        let mut value = 0i32;
        let mut get = abi::Parameter { parameter, value: address(&raw mut value) };
        // SAFETY: the structure of this ioctl; its address names an int that may be written.
        let answered = unsafe { call_fd::<GETPARAM, _>(node.as_fd(), &mut get) };
        answered.is_ok() && value == 1
    };
    if !has(abi::HAS_3D) {
        return Err(TransportError::System {
            what: "a virtio_gpu driver without 3D",
            error: Errno::OPNOTSUPP,
        });
    }
    Ok(Some(if has(abi::HAS_BLOBS) && has(abi::HAS_CONTEXTS) { Way::Full } else { Way::Legacy }))
}

impl Transport for Drm {
    fn create(&self, reservation: &Reservation, at: u64, bytes: u64) -> Result<Resource, TransportError> {
        if bytes == 0 || !bytes.is_multiple_of(gpu::PAGE) || bytes > limits::RESOURCE_BYTES {
            return Err(TransportError::Size(bytes));
        }
        let (handle, id) = self.make(bytes)?;
        match self.map(handle, reservation, at, bytes) {
            Ok(()) => Ok(Resource { id, token: Token::Handle(handle) }),
            Err(error) => {
                // The first error is the one to be told.
                let _ = self.close(handle);
                Err(error)
            }
        }
    }

    fn destroy(&self, resource: Resource) -> Result<(), TransportError> {
        let Token::Handle(handle) = resource.token else { return Err(TransportError::Lost) };
        self.close(handle)
    }

    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError> {
        self.execute(doorbell, false).map(|_| ())
    }

    fn wait(&self, timeout: Duration) -> Result<(), TransportError> {
        let mut pending = self.fence.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.is_none() {
            let Some(fence) = self.execute(Doorbell::Wait, true)? else { return Ok(()) };
            let fence =
                Held::new(fence).map_err(|error| TransportError::System { what: "a fence", error })?;
            *pending = Some(fence);
        }
        let started = Instant::now();
        loop {
            let Some(fence) = pending.as_ref() else { return Ok(()) };
            let left = timeout.saturating_sub(started.elapsed());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let Ok(fd) = fence.get() else {
                // The program closed it. The next wait makes another.
                *pending = None;
                return Ok(());
            };
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Ok(()),
                Ok(_) => {
                    *pending = None;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(TransportError::System { what: "poll", error }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_headers() {
        let sizes = [
            (size_of::<abi::Version>(), 64),
            (size_of::<abi::GemClose>(), 8),
            (size_of::<abi::Map>(), 16),
            (size_of::<abi::Execbuffer>(), 40),
            (size_of::<abi::Parameter>(), 16),
            (size_of::<abi::Create>(), 56),
            (size_of::<abi::GetCaps>(), 24),
            (size_of::<abi::CreateBlob>(), 48),
            (size_of::<abi::ContextInit>(), 16),
            (size_of::<abi::ContextParameter>(), 16),
        ];
        for (ours, theirs) in sizes {
            assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn requests_have_the_numbers_of_the_headers() {
        // As the macros of drm.h make them.
        assert_eq!(VERSION, 0xc040_6400);
        assert_eq!(GEM_CLOSE, 0x4008_6409);
        assert_eq!(MAP, 0xc010_6441);
        assert_eq!(GETPARAM, 0xc010_6443);
        assert_eq!(RESOURCE_CREATE, 0xc038_6444);
        assert_eq!(GET_CAPS, 0xc018_6449);
        assert_eq!(RESOURCE_CREATE_BLOB, 0xc030_644a);
        assert_eq!(CONTEXT_INIT, 0xc010_644b);
    }

    #[test]
    fn without_a_render_node_there_is_no_device() {
        if !std::path::Path::new("/dev/dri").exists() {
            assert!(matches!(Drm::open(), Err(TransportError::NoDevice)));
        }
    }
}

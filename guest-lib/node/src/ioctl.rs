//! The ioctls of the driver.

#![expect(unsafe_code, reason = "ioctls of the virtio_gpu driver")]
#![expect(clippy::cast_possible_truncation, reason = "lengths of small structures")]

use crate::{Abilities, DeviceKind};
use rustix::{
    fd::{BorrowedFd, FromRawFd as _, OwnedFd},
    io::Errno,
    ioctl::{self, Opcode, Updater},
};
use sluice_protocol::doorbell::{self, Capset};

/// The structures of the driver, as `drm.h` and `virtgpu_drm.h` define them. Written out because the headers of older
/// distributions lack the newer ones.
mod abi {
    /// DRM_IOCTL_VERSION. The structure has buffers for three strings; only the name's is used here.
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

    /// DRM_IOCTL_VIRTGPU_EXECBUFFER, as of 5.16: older kernels ignore its last words, newer ones treat missing words
    /// as zero.
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

    /// DRM_IOCTL_VIRTGPU_TRANSFER_TO_HOST.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Transfer {
        pub(super) handle: u32,
        pub(super) x: u32,
        pub(super) y: u32,
        pub(super) z: u32,
        pub(super) width: u32,
        pub(super) height: u32,
        pub(super) depth: u32,
        pub(super) level: u32,
        pub(super) offset: u32,
        pub(super) stride: u32,
        pub(super) layer_stride: u32,
    }

    /// DRM_IOCTL_PRIME_HANDLE_TO_FD.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Prime {
        pub(super) handle: u32,
        pub(super) flags: u32,
        pub(super) fd: i32,
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

    /// A parameter of DRM_IOCTL_VIRTGPU_CONTEXT_INIT.
    #[repr(C)]
    pub(super) struct ContextParameter {
        pub(super) parameter: u64,
        pub(super) value: u64,
    }

    pub(super) const CAPSET: u64 = 1;
    pub(super) const RINGS: u64 = 2;
    /// DRM_CLOEXEC.
    pub(super) const CLOSE_ON_EXEC: u32 = 0o2_000_000;
}

const fn drm<T>(number: u8) -> Opcode {
    ioctl::opcode::read_write::<T>(b'd', number)
}

const fn virtgpu<T>(number: u8) -> Opcode {
    drm::<T>(0x40 + number)
}

const VERSION: Opcode = drm::<abi::Version>(0x00);
const GEM_CLOSE: Opcode = ioctl::opcode::write::<abi::GemClose>(b'd', 0x09);
const PRIME_HANDLE_TO_FD: Opcode = drm::<abi::Prime>(0x2d);
const MAP: Opcode = virtgpu::<abi::Map>(0x01);
const EXECBUFFER: Opcode = virtgpu::<abi::Execbuffer>(0x02);
const GETPARAM: Opcode = virtgpu::<abi::Parameter>(0x03);
const RESOURCE_CREATE: Opcode = virtgpu::<abi::Create>(0x04);
const TRANSFER_TO_HOST: Opcode = virtgpu::<abi::Transfer>(0x07);
const GET_CAPS: Opcode = virtgpu::<abi::GetCaps>(0x09);
const RESOURCE_CREATE_BLOB: Opcode = virtgpu::<abi::CreateBlob>(0x0a);
const CONTEXT_INIT: Opcode = virtgpu::<abi::ContextInit>(0x0b);

/// PIPE_BUFFER of one-byte texels, as a constant buffer: the simplest 3D resource.
const BUFFER_FORMAT: u32 = 64;
const BUFFER_BIND: u32 = 1 << 17;
/// PIPE_TEXTURE_2D, the only target of a driver without 3D.
const TEXTURE_2D: u32 = 2;

/// A resource of the driver.
#[derive(Clone, Copy, Debug)]
pub struct MadeResource {
    /// The handle of this open file.
    pub handle: u32,
    /// The id on the device.
    pub id: u32,
}

/// Calls the driver again as long as a signal interrupts the call.
///
/// # Safety
/// `T` is the structure of ioctl `OPCODE`, and every address in it is valid for the driver's access.
unsafe fn call<const OPCODE: Opcode, T>(node: Node<'_>, value: &mut T) -> Result<(), Errno> {
    loop {
        // SAFETY: by the contract of this function, this is the structure of the ioctl.
        let request = unsafe { Updater::<OPCODE, T>::new(value) };
        // SAFETY: by the contract of this function, the addresses in it are valid.
        match unsafe { ioctl::ioctl(node.0, request) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
}

/// An address as a number for the kernel.
fn address<T>(value: *const T) -> u64 {
    value.expose_provenance() as u64
}

/// An open render node.
#[derive(Clone, Copy, Debug)]
pub struct Node<'f>(BorrowedFd<'f>);

impl<'f> Node<'f> {
    /// Wraps a descriptor. If it is not a Sluice device's, only [`Node::kind`] gives a useful answer.
    #[must_use]
    pub const fn new(file: BorrowedFd<'f>) -> Node<'f> {
        Node(file)
    }

    /// The kind of device behind the node.
    #[must_use]
    pub fn kind(self) -> DeviceKind {
        let mut name = [0u8; 16];
        let mut version = abi::Version {
            name_length: name.len() as u64,
            name: address(name.as_mut_ptr()),
            ..abi::Version::default()
        };
        // SAFETY: the structure of this ioctl; its one address names `name_length` bytes that may be written.
        let answered = unsafe { call::<VERSION, _>(self, &mut version) };
        if answered.is_err() || !name.starts_with(b"virtio_gpu") {
            return DeviceKind::Other;
        }
        let mut body = [0u8; Capset::BYTES];
        let mut caps = abi::GetCaps {
            id: Capset::ID,
            address: address(body.as_mut_ptr()),
            size: body.len() as u32,
            ..abi::GetCaps::default()
        };
        // SAFETY: the structure of this ioctl; its address names `size` bytes that may be written.
        let answered = unsafe { call::<GET_CAPS, _>(self, &mut caps) };
        let Some(capset) = answered.ok().and_then(|()| Capset::decode(&body)) else {
            return DeviceKind::OtherVirtio;
        };
        let abilities = Abilities {
            three_d: self.has(abi::HAS_3D),
            blobs: self.has(abi::HAS_BLOBS),
            contexts: self.has(abi::HAS_CONTEXTS),
        };
        DeviceKind::Sluice { version: capset.version, abilities }
    }

    fn has(self, parameter: u64) -> bool {
        self.parameter(parameter).is_ok_and(|value| value == 1)
    }

    /// Checks that the driver still has the device.
    ///
    /// # Errors
    /// The kernel's: ENODEV if the device was removed.
    pub fn is_there(self) -> Result<(), Errno> {
        self.parameter(abi::HAS_3D).map(drop)
    }

    fn parameter(self, parameter: u64) -> Result<i32, Errno> {
        let mut value = 0i32;
        let mut get = abi::Parameter { parameter, value: address(&raw mut value) };
        // SAFETY: the structure of this ioctl; its address names an int that may be written.
        unsafe { call::<GETPARAM, _>(self, &mut get) }?;
        Ok(value)
    }

    /// Makes this open file a context of Sluice's capset with `rings` rings. Must precede every call that needs a context.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start_context(self, rings: u32) -> Result<(), Errno> {
        let parameters = [
            abi::ContextParameter { parameter: abi::CAPSET, value: u64::from(Capset::ID) },
            abi::ContextParameter { parameter: abi::RINGS, value: u64::from(rings) },
        ];
        let mut init = abi::ContextInit {
            count: parameters.len() as u32,
            pad: 0,
            parameters: address(parameters.as_ptr()),
        };
        // SAFETY: the structure of this ioctl; its address names an array of `count` parameters that is only read.
        unsafe { call::<CONTEXT_INIT, _>(self, &mut init) }
    }

    /// Guest memory as a blob.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create_blob(self, bytes: u64) -> Result<MadeResource, Errno> {
        let mut create = abi::CreateBlob {
            memory: abi::GUEST_MEMORY,
            flags: abi::MAPPABLE,
            size: bytes,
            ..abi::CreateBlob::default()
        };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<RESOURCE_CREATE_BLOB, _>(self, &mut create) }?;
        Ok(MadeResource { handle: create.handle, id: create.resource })
    }

    /// Guest memory as a 3D resource.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create_3d(self, bytes: u64) -> Result<MadeResource, Errno> {
        let size = u32::try_from(bytes).map_err(|_| Errno::FBIG)?;
        self.create(abi::Create {
            format: BUFFER_FORMAT,
            bind: BUFFER_BIND,
            width: size,
            height: 1,
            size,
            ..abi::Create::default()
        })
    }

    /// Guest memory as a 2D resource of this format, width and height, which the driver does not interpret.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create_2d(self, numbers: [u32; 3], bytes: u64) -> Result<MadeResource, Errno> {
        let [format, width, height] = numbers;
        let size = u32::try_from(bytes).map_err(|_| Errno::FBIG)?;
        self.create(abi::Create { target: TEXTURE_2D, format, width, height, size, ..abi::Create::default() })
    }

    fn create(self, of: abi::Create) -> Result<MadeResource, Errno> {
        let mut create = abi::Create { depth: 1, array_size: 1, ..of };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<RESOURCE_CREATE, _>(self, &mut create) }?;
        Ok(MadeResource { handle: create.handle, id: create.resource })
    }

    /// The offset in the open file at which a resource can be mapped.
    ///
    /// # Errors
    /// The kernel's.
    pub fn offset(self, handle: u32) -> Result<u64, Errno> {
        let mut map = abi::Map { handle, ..abi::Map::default() };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<MAP, _>(self, &mut map) }?;
        Ok(map.offset)
    }

    /// Closes a handle.
    ///
    /// # Errors
    /// The kernel's.
    pub fn close(self, handle: u32) -> Result<(), Errno> {
        let mut close = abi::GemClose { handle, pad: 0 };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<GEM_CLOSE, _>(self, &mut close) }
    }

    /// Sends a payload, in a ring of the context if it has any; with `fence`, returns a descriptor that is readable when the device
    /// has answered.
    ///
    /// # Errors
    /// The kernel's.
    pub fn execute(self, payload: &[u8], ring: Option<u32>, fence: bool) -> Result<Option<OwnedFd>, Errno> {
        let mut execbuffer = abi::Execbuffer {
            size: payload.len() as u32,
            command: address(payload.as_ptr()),
            fence: -1,
            ..abi::Execbuffer::default()
        };
        if fence {
            execbuffer.flags |= abi::FENCE_OUT;
        }
        if let Some(ring) = ring {
            execbuffer.flags |= abi::RING_INDEX;
            execbuffer.ring = ring;
        }
        // SAFETY: the structure of this ioctl; its address names `size` bytes that are only read.
        unsafe { call::<EXECBUFFER, _>(self, &mut execbuffer) }?;
        if !fence || execbuffer.fence < 0 {
            return Ok(None);
        }
        // SAFETY: the driver has just made this descriptor for the caller.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(execbuffer.fence) }))
    }

    /// Transfers a 2D resource with these numbers, which the driver does not interpret.
    ///
    /// # Errors
    /// The kernel's.
    pub fn transfer(self, handle: u32, numbers: [u32; doorbell::NUMBERS]) -> Result<(), Errno> {
        let [x, y, width, height, offset] = numbers;
        let mut transfer =
            abi::Transfer { handle, x, y, width, height, depth: 1, offset, ..abi::Transfer::default() };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<TRANSFER_TO_HOST, _>(self, &mut transfer) }
    }

    /// A descriptor for a resource, readable when the device has answered the last command about it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn export(self, handle: u32) -> Result<OwnedFd, Errno> {
        let mut prime = abi::Prime { handle, flags: abi::CLOSE_ON_EXEC, fd: -1 };
        // SAFETY: the structure of this ioctl, without addresses.
        unsafe { call::<PRIME_HANDLE_TO_FD, _>(self, &mut prime) }?;
        if prime.fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: the driver has just made this descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(prime.fd) })
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
            (size_of::<abi::Prime>(), 12),
            (size_of::<abi::Map>(), 16),
            (size_of::<abi::Execbuffer>(), 40),
            (size_of::<abi::Parameter>(), 16),
            (size_of::<abi::Create>(), 56),
            (size_of::<abi::Transfer>(), 44),
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
        // As the macros of drm.h compute them.
        assert_eq!(VERSION, 0xc040_6400);
        assert_eq!(GEM_CLOSE, 0x4008_6409);
        assert_eq!(PRIME_HANDLE_TO_FD, 0xc00c_642d);
        assert_eq!(MAP, 0xc010_6441);
        assert_eq!(GETPARAM, 0xc010_6443);
        assert_eq!(RESOURCE_CREATE, 0xc038_6444);
        assert_eq!(TRANSFER_TO_HOST, 0xc02c_6447);
        assert_eq!(GET_CAPS, 0xc018_6449);
        assert_eq!(RESOURCE_CREATE_BLOB, 0xc030_644a);
        assert_eq!(CONTEXT_INIT, 0xc010_644b);
    }
}

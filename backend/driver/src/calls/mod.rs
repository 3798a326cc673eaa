//! The driver calls that the backend makes, one method each.
//!
//! Workers, arbiters and the probe of booking call them. Each owns the passing of its arguments to one entry point, and returns the
//! driver's own code. None may decide, repeat or cache.
//!
//! Handles come from this driver and are forgotten before they are destroyed (the session's tables ensure it); addresses come
//! as [`crate::DeviceRange`] and [`crate::HostRange`] ranges, which are created after addresses are checked. The driver checks the rest.

#![expect(unsafe_code, reason = "calls the driver's C functions")]
#![expect(clippy::missing_errors_doc, reason = "every method fails with the driver's own code")]

use crate::{Code, Handle, code};
use core::ffi::c_void;

/// Calls an entry point if the driver has it.
macro_rules! call {
    ($self:ident.$name:ident($($argument:expr),* $(,)?)) => {
        match $self.entries.$name {
            // SAFETY: the signature is that of the driver's header. Pointers that the driver uses during the call are to live
            // values of this function or of its caller's borrowed arguments. Memory that it uses later, as for an asynchronous
            // copy, comes as a `DeviceRange` or a `HostRange`: its creator promises that the memory stays until the work is
            // complete.
            Some(entry) => match unsafe { entry($($argument),*) } {
                0 => Ok(()),
                failed => Err(failed),
            },
            None => Err(code::NOT_SUPPORTED),
        }
    };
}

mod contexts;
mod copies;
mod devices;
mod forwarded;
mod graphs;
mod images;
mod linker;
mod memory;
mod modules;
mod resources;
mod streams;

pub use graphs::{CopyBox, CopyEnd, CopyMemory, NodeCall, NodeFunction, NodeWork, WrittenValue};
pub use images::{ArrayCopy, ArrayCopyEnd, ArrayExtent, ImageMemory, Pitches};
pub use linker::{CompilerOptions, CompilerReport, DriverLink, LogText};

/// The arguments of a launch, except the kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchArguments {
    /// The function or kernel to launch.
    pub function: Handle,
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

/// The driver's attributes of an address; zeros if it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// The context that owns the memory.
    pub context: Handle,
    /// True if it is memory of a device.
    pub on_device: bool,
    /// True if it is managed memory, which moves between host and device.
    pub managed: bool,
    /// First address of its range.
    pub start: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

type Result<T> = core::result::Result<T, Code>;

fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| code::INVALID_VALUE)
}

fn pointer<T>(address: u64) -> Result<*mut T> {
    Ok(core::ptr::with_exposed_provenance_mut(size(address)?))
}

fn out<T>(value: &mut T) -> *mut c_void {
    core::ptr::from_mut(value).cast()
}

fn input<T>(value: &T) -> *const c_void {
    core::ptr::from_ref(value).cast()
}

/// The `extra` list of a launch: a block of packed parameters and its length.
fn packed(parameters: &[u8], bytes: &mut usize) -> [*mut c_void; 5] {
    const END: *mut c_void = core::ptr::null_mut();
    const BUFFER: *mut c_void = core::ptr::without_provenance_mut(1);
    const BUFFER_BYTES: *mut c_void = core::ptr::without_provenance_mut(2);
    // The driver only reads the block; the C signature has no const.
    let buffer = parameters.as_ptr().cast_mut().cast::<c_void>();
    [BUFFER, buffer, BUFFER_BYTES, out(bytes), END]
}

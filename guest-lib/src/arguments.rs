//! Arguments of C callers: raw pointers, functions and descriptors become typed values that define their permitted use.
//!
//! A caller of the C API guarantees that its arguments are valid; nothing can check them. The conversions here are the one place
//! that relies on this, so the rest of the shim reads and writes through these types and contains no unsafe code.

#![expect(unsafe_code, reason = "C callers pass raw pointers")]

use crate::error::Error;
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_graphs::HostWork;
use sluice_protocol::calls::IpcHandle;

/// The properties of a call that follow from the name of the called symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Stream 0 is the calling thread's (`_ptds`, `_ptsz`), not the context's.
    pub(crate) per_thread: bool,
}

/// A parameter of an exported function.
pub(crate) trait Argument {
    /// The type that the function's implementation receives.
    type Value;
    /// Converts the pointer of a C caller, which nothing can check.
    ///
    /// # Safety
    /// The parameter is as the C API requires: a pointer is null or valid for the function's use of it.
    unsafe fn receive(self) -> Self::Value;
}

macro_rules! scalars {
    ($($ty:ty),+) => {$(
        impl Argument for $ty {
            type Value = $ty;
            unsafe fn receive(self) -> $ty {
                self
            }
        }
    )+};
}
scalars!(c_int, c_uint, u64, usize, u8, u16, f32, IpcHandle);

/// A place for a result.
pub(crate) type Out<T> = sluice_cuda_frontend::Out<T, Error>;

/// A place for input of the caller.
pub(crate) type In<T> = sluice_cuda_frontend::In<T, Error>;

impl<T> Argument for *mut T {
    type Value = Out<T>;
    unsafe fn receive(self) -> Out<T> {
        // SAFETY: the caller guarantees it.
        unsafe { Out::new(self) }
    }
}

impl<T> Argument for *const T {
    type Value = In<T>;
    unsafe fn receive(self) -> In<T> {
        // SAFETY: the caller guarantees it.
        unsafe { In::new(self) }
    }
}

/// File descriptors that a caller passes in place of a pointer, and receives as numbers.
pub(crate) mod descriptor {
    use crate::error::{Error, Result};
    use rustix::fd::{BorrowedFd, IntoRawFd, OwnedFd};

    /// The descriptor of a number, unless no descriptor can have it.
    fn of<'a>(number: u64) -> Option<BorrowedFd<'a>> {
        let number = i32::try_from(number).ok()?;
        // SAFETY: by the API the descriptor is open; it is used during the call only. For another number, system calls fail.
        Some(unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Reads the first bytes of a file by its number.
    pub(crate) fn read<const N: usize>(number: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        match rustix::io::pread(of(number).ok_or(Error::INVALID_VALUE)?, &mut bytes, 0) {
            Ok(read) if read == N => Ok(bytes),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Passes the ownership of a descriptor to the caller.
    pub(crate) fn hand_out(file: OwnedFd) -> i32 {
        file.into_raw_fd()
    }
}

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(data: *mut c_void);

/// `CUstreamCallback`.
pub(crate) type StreamCallback = unsafe extern "C" fn(stream: u64, status: c_uint, data: *mut c_void);

/// A function of the caller that runs later, on a thread of the shim.
#[derive(Clone, Copy)]
pub(crate) struct HostTask {
    function: TaskFunction,
    data: u64,
}

#[derive(Clone, Copy)]
enum TaskFunction {
    Plain(HostFunction),
    /// With the stream as the caller named it.
    Callback(StreamCallback, u64),
}

impl HostTask {
    /// A function of `cuLaunchHostFunc`.
    pub(crate) fn plain(function: HostFunction, data: u64) -> HostTask {
        HostTask { function: TaskFunction::Plain(function), data }
    }

    /// A function of `cuStreamAddCallback`.
    pub(crate) fn callback(function: StreamCallback, stream: u64, data: u64) -> HostTask {
        HostTask { function: TaskFunction::Callback(function, stream), data }
    }

    /// The work of a node that calls it, unless it gets more than its data.
    pub(crate) fn as_node(self) -> Option<HostWork> {
        match self.function {
            TaskFunction::Plain(function) => {
                let function = (function as *const ()).expose_provenance() as u64;
                Some(HostWork { function, data: self.data })
            }
            TaskFunction::Callback(..) => None,
        }
    }

    /// The function of a node, which the program gave as a number.
    pub(crate) fn of_node(node: HostWork) -> Option<HostTask> {
        let function = core::ptr::with_exposed_provenance::<()>(usize::try_from(node.function).ok()?);
        if function.is_null() {
            return None;
        }
        // SAFETY: not null, and the caller of the C API guarantees that it is a function of this type.
        let function = unsafe { core::mem::transmute::<*const (), HostFunction>(function) };
        Some(HostTask::plain(function, node.data))
    }

    /// Runs it. After an error only a callback runs, and gets the error.
    pub(crate) fn run(self, error: Option<c_uint>) {
        let data = core::ptr::with_exposed_provenance_mut(usize::try_from(self.data).unwrap_or(0));
        match (self.function, error) {
            // SAFETY: the caller gave a function of this type, to be called with this pointer on another thread.
            (TaskFunction::Plain(function), None) => unsafe { function(data) },
            (TaskFunction::Plain(_), Some(_)) => {}
            (TaskFunction::Callback(function, stream), error) => {
                // SAFETY: as above.
                unsafe { function(stream, error.unwrap_or(0), data) }
            }
        }
    }
}

impl Argument for Option<HostFunction> {
    type Value = Option<HostFunction>;
    unsafe fn receive(self) -> Option<HostFunction> {
        self
    }
}

impl Argument for Option<StreamCallback> {
    type Value = Option<StreamCallback>;
    unsafe fn receive(self) -> Option<StreamCallback> {
        self
    }
}

/// A callback that the shim keeps but never calls.
pub(crate) type Callback = unsafe extern "C" fn();

/// `CUoccupancyB2DSize`: dynamic shared memory for a block size.
pub(crate) type BlockToShared = unsafe extern "C" fn(block: c_int) -> usize;

/// A function of the caller that the call may invoke.
#[derive(Clone, Copy)]
pub(crate) struct SharedSize(BlockToShared);

impl SharedSize {
    /// Dynamic shared memory for blocks of this size.
    pub(crate) fn of(self, block: c_int) -> usize {
        // SAFETY: the caller gave a function of this type, to be called during the call.
        unsafe { (self.0)(block) }
    }
}

impl Argument for Option<BlockToShared> {
    type Value = Option<SharedSize>;
    unsafe fn receive(self) -> Option<SharedSize> {
        self.map(SharedSize)
    }
}

impl Argument for Option<Callback> {
    type Value = Option<Callback>;
    unsafe fn receive(self) -> Option<Callback> {
        self
    }
}

//! The driver: one library, loaded by absolute path, one table of optional entry points.
//!
//! Worker and arbiter call the driver only through this crate ([`Driver`]'s methods, one per call). An entry point that the
//! library does not have answers `CUDA_ERROR_NOT_SUPPORTED`; this crate never panics if a driver is older than its table.

#![expect(unsafe_code, reason = "loads a C library and takes its entry points at their declared signatures")]

mod abi;
mod calls;
mod libraries;
mod range;

pub use abi::{EdgeData, LaunchAttribute, Rows};
pub use calls::{
    ArrayCopy, ArrayCopyEnd, ArrayExtent, CompilerOptions, CompilerReport, CopyBox, CopyEnd, CopyMemory,
    DriverLink, ImageMemory, LaunchArguments, LogText, NodeCall, NodeFunction, NodeWork, Pitches, Pointer,
    WrittenValue,
};
pub use libraries::{LibraryError, load_further};
pub use range::{DeviceRange, HostRange};

use core::ffi::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_cuda_abi::sys::CUresult;
use sluice_protocol::calls::IpcHandle;
use std::path::{Path, PathBuf};

/// A handle of the driver: a pointer to the driver, a number here.
pub type Handle = u64;
/// A C callback; only null is ever passed.
pub type Callback = unsafe extern "C" fn();
/// A function from block size to dynamic shared bytes; only null is ever passed.
pub type BlockToShared = unsafe extern "C" fn(c_int) -> usize;

/// A function that the driver calls in the order of a stream, with the pointer that it got with it.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);
/// A function that the driver calls with a stream and a status; only null is ever passed.
pub type StreamCallback = unsafe extern "C" fn(Handle, c_uint, *mut c_void);

/// A CUresult that is not success.
pub type Code = u32;

/// The codes that workers and arbiters return themselves.
pub mod code {
    use super::{CUresult, Code};

    macro_rules! codes {
        ($($name:ident = $of:ident;)+) => {
            $(#[doc = concat!("`", stringify!($of), "`.")] pub const $name: Code = CUresult::$of as Code;)+
        };
    }
    codes! {
        INVALID_VALUE = CUDA_ERROR_INVALID_VALUE;
        OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY;
        DEVICE_UNAVAILABLE = CUDA_ERROR_DEVICE_UNAVAILABLE;
        INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE;
        INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT;
        ALREADY_MAPPED = CUDA_ERROR_ALREADY_MAPPED;
        INVALID_IMAGE = CUDA_ERROR_INVALID_IMAGE;
        SHARED_OBJECT_INIT_FAILED = CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
        INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE;
        NOT_FOUND = CUDA_ERROR_NOT_FOUND;
        INVALID_RESOURCE_CONFIGURATION = CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        NOT_READY = CUDA_ERROR_NOT_READY;
        PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        PEER_ACCESS_NOT_ENABLED = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
        GRAPH_EXEC_UPDATE_FAILURE = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
        ILLEGAL_STATE = CUDA_ERROR_ILLEGAL_STATE;
        SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
        NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED;
        UNKNOWN = CUDA_ERROR_UNKNOWN;
    }
}

/// A table of optional entry points.
macro_rules! table {
    ($(#[$attribute:meta])* $table:ident { $(fn $name:ident($($p:ident: $ty:ty),*);)+ }) => {
        $(#[$attribute])*
        struct $table {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> c_uint>,)+
        }

        impl $table {
            fn load(library: &Library) -> $table {
                $table {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the symbol has this signature in the driver's header, from which the table is taken.
                        unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> c_uint>(symbol) }.ok().map(|entry| *entry)
                    },)+
                }
            }
        }
    };
}

macro_rules! entries {
    ($($(#[doc = $doc:literal])* $id:literal @ $since:literal $class:ident fn $name:ident($($p:ident: $ty:ty),*)
        $(also $($also:ident),+)? $(=> $wire:ident $to:tt -> $into:tt)?;)+) => {
        table! {
            /// The driver's entry points: those of the table of C functions that it has.
            #[expect(dead_code, reason = "the table has more than the worker calls")]
            Entries { $(fn $name($($p: $ty),*);)+ }
        }
    };
}
sluice_protocol::for_each_c_call!(entries);

/// A loaded driver library.
pub struct Driver {
    entries: Entries,
    /// Keeps the code of the entry points mapped.
    _library: Library,
}

/// The reason why the driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A relative path would be searched for in places that others may write.
    #[error("the driver's path {0} is not absolute")]
    Relative(PathBuf),
    /// The library cannot be loaded.
    #[error("cannot load the driver: {0:?}")]
    Load(#[from] libloading::Error),
    /// `cuInit` failed.
    #[error("the driver did not start: CUresult {0}")]
    Init(u32),
    /// It shows other devices than the requested one.
    #[error("the driver shows {count} devices, and the first is not the requested one")]
    Identity {
        /// Number of devices that it shows.
        count: u32,
    },
}

impl Driver {
    /// Loads the library at `path` and finds its entry points, without calling any.
    pub fn load(path: &Path) -> Result<Driver, DriverError> {
        if !path.is_absolute() {
            return Err(DriverError::Relative(path.to_path_buf()));
        }
        // SAFETY: the path comes from the operator; the library's constructors are the driver's own.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }?;
        Ok(Driver { entries: Entries::load(&library), _library: library })
    }
}

impl core::fmt::Debug for Driver {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Driver")
    }
}

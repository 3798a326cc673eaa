//! The driver's library: its entry points, found by name.

#![expect(unsafe_code, reason = "loads a C library and takes its entry points at their declared signatures")]

use crate::abi::{BlockToShared, Callback, Handle, HostFunction, StreamCallback};
use core::ffi::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_protocol::calls::IpcHandle;
use std::path::{Path, PathBuf};

/// A table of optional entry points.
macro_rules! table {
    ($(#[$attribute:meta])* $table:ident { $(fn $name:ident($($p:ident: $ty:ty),*);)+ }) => {
        $(#[$attribute])*
        pub(crate) struct $table {
            $(pub(crate) $name: Option<unsafe extern "C" fn($($ty),*) -> c_uint>,)+
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
    pub(crate) entries: Entries,
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

//! The entry points of the driver, as C programs see them.
//!
//! Each names its arguments and describes its parts in a line or two. No panic unwinds across this boundary, and a call that
//! fails has written nothing unless its documentation says otherwise.
#![expect(unsafe_code, reason = "exports the names of the driver's C interface")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result, code};
use crate::process;

/// Runs a call at any time.
fn guard(call: impl FnOnce() -> Result) -> u32 {
    code(catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Error::UNKNOWN)))
}

/// Runs a call that needs `cuInit`.
fn call(action: impl FnOnce() -> Result) -> u32 {
    guard(|| {
        process::driver()?;
        action()
    })
}

/// Entry points that need `cuInit`.
macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            super::call(move || $body)
        }
    )*};
}

/// Entry points that may be called at any time.
macro_rules! always {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            super::guard(move || $body)
        }
    )*};
}

/// Entry points with a second form whose stream 0 is the calling thread's own. The body learns which it is.
macro_rules! twins {
    ($(fn $name:ident, $twin:ident($implicit:ident; $($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let $implicit = $crate::context::Implicit::Legacy;
            super::call(move || $body)
        }
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $twin($($argument: $type),*) -> u32 {
            let $implicit = $crate::context::Implicit::PerThread;
            super::call(move || $body)
        }
    )*};
}

mod contexts;
mod copies;
mod devices;
mod events;
mod functions;
mod general;
mod ipc;
mod launches;
mod libraries;
mod managed;
mod memory;
mod modules;
mod pointers;
mod pools;
mod refused;
mod streams;
mod virtual_memory;

use contexts::*;
use copies::*;
use devices::*;
use events::*;
use functions::*;
use general::*;
use ipc::*;
use launches::*;
use libraries::*;
use managed::*;
use memory::*;
use modules::*;
use pointers::*;
use pools::*;
use streams::*;
use virtual_memory::*;

//! The C entry points of the driver.
//!
//! C programs call them through the names of the library or the pointers of `cuGetProcAddress`. An entry point names its
//! arguments and calls the modules below in a line or two; the folder owns the layouts of arguments. No panic unwinds across this
//! boundary, and a call that fails has written nothing unless its documentation says otherwise.
#![expect(unsafe_code, reason = "exports the names of the driver's C interface")]

use sluice_cuda_frontend::enter;

use crate::error::Result;
use crate::{process, threads};

/// Runs a call that is valid at any time.
fn guard(call: impl FnOnce() -> Result) -> u32 {
    enter(call, || ())
}

/// Runs a call that needs `cuInit` and that no host function may make.
fn call(action: impl FnOnce() -> Result) -> u32 {
    guard(|| {
        process::driver()?;
        threads::may_call()?;
        action()
    })
}

/// Runs the call of an entry point, and traces it if the user asks for that.
macro_rules! traced {
    ($name:ident($($argument:ident: $type:ty),*), $call:expr) => {{
        static SITE: sluice_cuda_frontend::trace::Site = sluice_cuda_frontend::trace::Site {
            name: stringify!($name),
            parameters: &[$((stringify!($argument), stringify!($type))),*],
        };
        sluice_cuda_frontend::trace::traced(&SITE, || [$(sluice_cuda_frontend::trace::word(&$argument)),*], || $call)
    }};
}
use traced;

/// Defines entry points that need `cuInit`.
macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            super::traced!($name($($argument: $type),*), super::call(move || $body))
        }
    )*};
}

/// Defines entry points that are valid at any time.
macro_rules! always {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            super::traced!($name($($argument: $type),*), super::guard(move || $body))
        }
    )*};
}

/// Defines entry points with a second form, in which stream 0 is the calling thread's own. The body receives the form.
macro_rules! twins {
    ($(fn $name:ident, $twin:ident($implicit:ident; $($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let $implicit = $crate::stream::Implicit::Legacy;
            super::traced!($name($($argument: $type),*), super::call(move || $body))
        }
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $twin($($argument: $type),*) -> u32 {
            let $implicit = $crate::stream::Implicit::PerThread;
            super::traced!($twin($($argument: $type),*), super::call(move || $body))
        }
    )*};
}

mod batches;
mod contexts;
mod copies;
mod devices;
mod events;
mod functions;
mod general;
mod graphs;
mod green;
mod images;
mod ipc;
mod launches;
mod libraries;
mod linker;
mod managed;
mod memory;
mod modules;
mod old_launches;
mod pointers;
mod pools;
mod refused;
mod stream_values;
mod streams;
mod tensor_maps;
mod virtual_memory;

use batches::*;
use contexts::*;
use copies::*;
use devices::*;
use events::*;
use functions::*;
use general::*;
use graphs::*;
use green::*;
use images::*;
use ipc::*;
use launches::*;
use libraries::*;
use linker::*;
use managed::*;
use memory::*;
use modules::*;
use old_launches::*;
use pointers::*;
use pools::*;
use stream_values::*;
use streams::*;
use tensor_maps::*;
use virtual_memory::*;

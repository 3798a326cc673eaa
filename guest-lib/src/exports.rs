//! The C symbols: one export per row of the call table, one for every other name of `cuda.h`.

#![expect(unsafe_code, reason = "C exports")]
#![allow(non_snake_case, unreachable_pub, reason = "the names of cuda.h, visible to C alone")]

use crate::{
    arguments::{Argument, BlockToShared, Call, Callback, HostFunction, StreamCallback},
    error::{Error, Result},
    lifetime, log,
};
use core::ffi::{c_char, c_int, c_uint, c_void};
use sluice_cuda_frontend::trace::{Site, traced, word};
use sluice_protocol::calls::IpcHandle;
use std::sync::atomic::{AtomicBool, Ordering};

/// A handle of the session as C code holds it.
type Handle = u64;

/// Runs an implementation behind the C boundary: no panic unwinds into the program.
fn enter(name: &'static str, per_thread: bool, body: impl FnOnce(Call) -> Result) -> c_uint {
    sluice_cuda_frontend::enter(
        || body(Call { per_thread }),
        || log::error(format_args!("{name}: internal error; the call fails with CUDA_ERROR_UNKNOWN")),
    )
}

macro_rules! exports {
    ($($(#[doc = $doc:literal])* $id:literal @ $since:literal $class:ident fn $name:ident $parameters:tt
        $(also $($also:ident),+)? $(=> $wire:ident $to:tt -> $into:tt)?;)+) => {
        $(
            export!($class $name $name false $parameters);
            $($(export!($class $name $also true $parameters);)+)?
        )+
    };
}

macro_rules! export {
    (driver $name:ident $symbol:ident $per_thread:literal $parameters:tt) => {};
    ($class:ident $name:ident $symbol:ident $per_thread:literal ($($p:ident: $ty:ty),*)) => {
        /// See `cuda.h`.
        ///
        /// # Safety
        /// The requirements of the C API on its callers.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($p: $ty),*) -> c_uint {
            static SITE: Site = Site {
                name: stringify!($symbol),
                parameters: &[$((stringify!($p), stringify!($ty))),*],
            };
            traced(&SITE, || [$(word(&$p)),*], || {
                enter(SITE.name, $per_thread, |call| {
                    // SAFETY: the caller guarantees that its pointers are as the C API requires.
                    $(let $p = unsafe { Argument::receive($p) };)*
                    served::$name(call $(, $p)*)
                })
            })
        }
    };
}
sluice_protocol::for_each_c_call!(exports);

/// The implementations by their C names. Two are here: they look for the exports of this file.
mod served {
    use super::{Error, Result, address, c_char, c_int, c_uint, c_void};
    pub(super) use crate::api::*;
    use crate::arguments::{Call, In, Out};

    pub(super) fn cuGetProcAddress(
        _: Call,
        symbol: In<c_char>,
        pfn: Out<*mut c_void>,
        version: c_int,
        flags: u64,
    ) -> Result {
        match look_up(address, symbol, pfn, version, flags)? {
            symbol_status::FOUND => Ok(()),
            _ => Err(Error::NOT_FOUND),
        }
    }

    pub(super) fn cuGetProcAddress_v2(
        _: Call,
        symbol: In<c_char>,
        pfn: Out<*mut c_void>,
        version: c_int,
        flags: u64,
        found: Out<c_uint>,
    ) -> Result {
        // Like NVIDIA's driver, it succeeds without a function.
        found.set_if_given(look_up(address, symbol, pfn, version, flags)?);
        Ok(())
    }
}

macro_rules! unserved {
    ($($name:ident)*) => {
        $(
            /// Exists because programs and runtimes look it up; not served yet.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_uint {
                static LOGGED: AtomicBool = AtomicBool::new(false);
                static SITE: Site = Site { name: stringify!($name), parameters: &[] };
                traced(&SITE, || [], || not_served(SITE.name, &LOGGED))
            }
        )*
    };
}
include!(concat!(env!("OUT_DIR"), "/unserved.rs"));

#[cold]
fn not_served(name: &'static str, logged: &AtomicBool) -> c_uint {
    if let Err(Error(code)) = lifetime::usable() {
        return code;
    }
    if !logged.swap(true, Ordering::Relaxed) {
        log::warn(format_args!("{name} is not supported yet (CUDA_ERROR_NOT_SUPPORTED)"));
    }
    Error::NOT_SUPPORTED.0
}

/// The address of export `index` of [`sluice_cuda_abi::symbols::EXPORTS`].
fn address(index: usize) -> Option<*mut c_void> {
    const ADDRESSES: &[*const ()] = &include!(concat!(env!("OUT_DIR"), "/addresses.rs"));
    ADDRESSES.get(index).map(|address| address.cast_mut().cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_cuda_abi::symbols;
    use sluice_protocol::calls::C;
    use std::collections::BTreeSet;

    /// Arguments beyond those in registers.
    #[repr(C)]
    struct Rest([u64; 16]);
    type Entry = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, Rest) -> c_uint;

    /// Calls an export with arguments that are all 0, before `cuInit`.
    fn call(index: usize) -> c_uint {
        let address = address(index).expect("each name has an address");
        // SAFETY: an exported function. In the C convention a function that has fewer arguments ignores the others, which the caller
        // removes; the functions refuse null pointers, and before `cuInit` nearly all calls.
        let entry = unsafe { core::mem::transmute::<*mut c_void, Entry>(address) };
        // SAFETY: as above.
        unsafe { entry(0, 0, 0, 0, 0, 0, Rest([0; 16])) }
    }

    // Promise: C2
    #[test]
    #[cfg_attr(miri, ignore = "calls functions with more arguments than they have")]
    fn each_of_the_drivers_functions_is_served_or_refused_as_the_table_says() {
        let served: BTreeSet<&str> = C
            .iter()
            .filter(|row| row.class != "driver")
            .flat_map(|row| std::iter::once(row.name).chain(row.per_thread.iter().copied()))
            .collect();
        let (mut bases, mut differences) = (BTreeSet::new(), Vec::new());
        for index in 0..symbols::EXPORTS.len() {
            let export = symbols::export(index).expect("a symbol of the driver");
            bases.insert(export.base);
            // It would look for a device.
            if export.name == "cuInit" {
                continue;
            }
            let refused = call(index) == Error::NOT_SUPPORTED.0;
            if refused == served.contains(export.name) {
                differences.push((export.name, refused));
            }
        }
        assert_eq!(differences, [], "each with true if it is refused");
        assert_eq!(bases.len(), 516);
    }
}

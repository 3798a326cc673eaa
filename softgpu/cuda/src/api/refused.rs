//! Unsupported exports, and the table of all exports.

use std::sync::Mutex;

use sluice_cuda_abi::symbols;

use crate::error::{Error, code};
use crate::lock::lock;
use crate::log::log;

/// The address of an entry point.
#[repr(transparent)]
pub(super) struct EntryPoint(*const ());

// SAFETY: an address of code.
unsafe impl Sync for EntryPoint {}

impl EntryPoint {
    const fn new(function: *const ()) -> EntryPoint {
        EntryPoint(function)
    }

    pub(super) fn address(&self) -> u64 {
        self.0.addr() as u64
    }
}

static LOGGED: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Logs that a call is not supported, once per call and process.
fn refuse(name: &'static str) -> u32 {
    if crate::log::enabled() {
        let mut logged = lock(&LOGGED);
        if !logged.contains(&name) {
            logged.push(name);
            log!("{name} is not supported");
        }
    }
    code(Err(Error::NOT_SUPPORTED))
}

// A function without parameters: in the C convention the caller removes the arguments, and the function reads none.
macro_rules! refuse {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> u32 {
            super::traced!($name(), refuse(stringify!($name)))
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

const _: () = assert!(FUNCTIONS.len() == symbols::EXPORTS.len());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_the_order_of_the_exported_names() {
        assert_eq!(NAMES, symbols::EXPORTS);
        let unique: std::collections::BTreeSet<u64> = FUNCTIONS.iter().map(EntryPoint::address).collect();
        assert!(unique.len() > 1 && !unique.contains(&0));
    }
}

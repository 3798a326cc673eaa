//! Exports that are not served, and the table of all exports.

use std::sync::Mutex;

use sluice_cuda_abi::symbols;

use crate::context::lock;
use crate::error::{Error, code};
use crate::log::log;

/// The address of an entry point.
#[repr(transparent)]
pub(super) struct Entry(*const ());

// SAFETY: an address of code.
unsafe impl Sync for Entry {}

impl Entry {
    const fn new(function: *const ()) -> Entry {
        Entry(function)
    }

    /// The address.
    pub(super) fn address(&self) -> u64 {
        self.0.addr() as u64
    }
}

static LOGGED: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Says that a call is not served, once per call and process.
fn refuse(name: &'static str) -> u32 {
    if crate::log::enabled() {
        let mut logged = lock(&LOGGED);
        if !logged.contains(&name) {
            logged.push(name);
            log!("{name} is not served");
        }
    }
    code(Err(Error::NOT_SUPPORTED))
}

// A function without parameters: in the C convention the caller takes the arguments away, and none is looked at.
macro_rules! refuse {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> u32 {
            refuse(stringify!($name))
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

const _: () = assert!(FUNCTIONS.len() == symbols::EXPORTS.len());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stands_in_the_order_of_the_exported_names() {
        assert_eq!(NAMES, symbols::EXPORTS);
        let unique: std::collections::BTreeSet<u64> = FUNCTIONS.iter().map(Entry::address).collect();
        assert!(unique.len() > 1 && !unique.contains(&0));
    }
}

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

    /// Arguments beyond those in registers.
    #[repr(C)]
    struct Rest([u64; 16]);
    type Entry = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, Rest) -> u32;

    /// Calls an export with arguments that are all 0, before `cuInit`.
    fn call(index: usize) -> u32 {
        // SAFETY: an exported function. In the C convention a function that has fewer arguments ignores the others, which the caller
        // removes; before `cuInit` nearly all calls are refused, and null pointers in the others.
        let entry = unsafe { std::mem::transmute::<*const (), Entry>(FUNCTIONS[index].0) };
        // SAFETY: as above.
        unsafe { entry(0, 0, 0, 0, 0, 0, Rest([0; 16])) }
    }

    // Promise: C2
    #[test]
    #[cfg_attr(miri, ignore = "calls functions with more arguments than they have")]
    fn each_function_is_served_or_refused_as_the_page_of_functions_says() {
        let page = include_str!("../../../../docs/cuda-coverage.md");
        let state = |base: &str| {
            let row =
                page.split_once(&format!("| `{base}` | ")).unwrap_or_else(|| panic!("{base} has a row"));
            row.1.split(" | ").nth(1).unwrap_or_default().trim()
        };
        let (mut states, mut differences) = ([0; 3], Vec::new());
        for index in 0..symbols::EXPORTS.len() {
            let export = symbols::export(index).unwrap();
            // It would look for a device.
            if export.name == "cuInit" {
                continue;
            }
            let refuses = call(index) == code(Err(Error::NOT_SUPPORTED));
            let state = state(export.base);
            let (kind, wrong) = match state {
                "served" => (0, refuses),
                _ if state.starts_with("refused") => (1, !refuses),
                _ => (2, false),
            };
            states[kind] += 1;
            if wrong {
                differences.push((export.name, state));
            }
        }
        assert_eq!(differences, []);
        assert!(states[0] > states[1] && states[1] > 0, "{states:?}");
    }
}

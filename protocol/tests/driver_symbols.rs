//! The table of C functions against the symbols of NVIDIA's driver.

use sluice_cuda_abi::symbols;
use sluice_protocol::calls::C;
use std::collections::BTreeSet;

/// A row whose symbol does not exist would be served to nobody.
// Promise: C2
#[test]
fn every_c_function_of_the_table_is_a_symbol_of_the_driver() {
    for row in C {
        let export = symbols::export_index(row.name).and_then(symbols::export);
        let export = export.unwrap_or_else(|| panic!("{} is no symbol of the driver", row.name));
        assert_eq!(row.since, export.version, "{} appeared in", row.name);
        for name in row.per_thread {
            let twin = symbols::export_index(name).and_then(symbols::export);
            let twin = twin.unwrap_or_else(|| panic!("{name} is no symbol of the driver"));
            assert!(twin.per_thread, "{name} is not a per-thread form");
            assert_eq!(twin.base, export.base, "{name} is no form of {}", row.name);
        }
    }
}

#[test]
fn no_symbol_is_served_twice() {
    let mut seen = BTreeSet::new();
    for row in C {
        for name in [row.name].iter().chain(row.per_thread) {
            assert!(seen.insert(*name), "{name} stands in the table twice");
        }
        assert!(["local", "hand", "driver"].contains(&row.class), "{}: {}", row.name, row.class);
    }
}

/// A form whose default stream is the thread's own must be served wherever the plain form is: programs compiled for
/// per-thread streams call only that one.
// Promise: C2
#[test]
fn every_per_thread_form_of_a_served_function_is_served() {
    for row in C.iter().filter(|row| row.class != "driver") {
        for suffix in ["_ptds", "_ptsz"] {
            let twin = format!("{}{suffix}", row.name);
            if symbols::export_index(&twin).is_some() {
                assert!(row.per_thread.contains(&twin.as_str()), "{twin} is missing");
            }
        }
    }
}

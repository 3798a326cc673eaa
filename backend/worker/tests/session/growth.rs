//! Memory that a driver takes for itself when an image is loaded, on a device whose free memory is kept occupied.

use crate::{
    arbiter::Terms,
    code::OUT_OF_MEMORY,
    guest::ARENA,
    softgpu::{Device, load},
};
use sluice_protocol::{
    calls::wire,
    field::{Mint, Name},
    handle::Id,
    limits,
};

const MIB: u64 = 1 << 20;

/// A PTX text with a large array, whose address can be queried.
fn text(between: &str) -> String {
    format!(
        "
.version 8.0
.target sm_80
.address_size 64

.visible .global {between} .align 4 .b8 large[{}];

.visible .entry nothing()
{{
    ret;
}}
",
        64 * MIB
    )
}

/// Loads the text and looks up its array and its kernel. A library takes memory at the lookup.
fn result(terms: Terms, text: &str, library: bool) -> u32 {
    let device = Device::small(terms);
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let arena = guest.attach(1, ARENA, 4 * MIB);
    let (result, module) = load(&mut guest, &arena, text, library);
    if result != 0 {
        return result;
    }
    let function = guest.call(wire::module_function::CALL, |w| {
        wire::module_function::Args { module, function: Mint(Id::new(0, 1)), name: Name(b"nothing") }.put(w)
    });
    let (result, fields) = guest.call(wire::module_global::CALL, |w| {
        wire::module_global::Args { module, name: Name(b"large") }.put(w)
    });
    assert_eq!(function.0, result, "function and array have the same result");
    if result == 0 {
        assert_eq!(wire::module_global::Reply::get(&fields).unwrap().bytes, 64 * MIB);
    }
    result
}

// Promise: Q6
#[test]
fn image_with_large_variables_loads_into_memory_released_for_it() {
    let terms = Terms { limit: 64 * MIB, ballast: true, ..Terms::default() };
    for library in [false, true] {
        assert_eq!(result(terms, &text(""), library), 0);
        assert_eq!(result(Terms { headroom: 80 * MIB, ..terms }, &text(""), library), 0);
        assert_eq!(result(Terms { headroom: 60 * MIB, ..terms }, &text(""), library), OUT_OF_MEMORY);
    }
}

// Promise: Q6
#[test]
fn image_that_needs_more_than_it_declares_gets_more_up_to_the_limit() {
    let terms = Terms { limit: 64 * MIB, ballast: true, ..Terms::default() };
    // The text is long, so that an estimate from its length would be wrong.
    let text = text(&format!("/* {} */", "-".repeat(2000)));
    for library in [false, true] {
        assert_eq!(result(terms, &text, library), 0);
        assert_eq!(result(Terms { headroom: 20 * MIB, ..terms }, &text, library), OUT_OF_MEMORY);
    }
}

//! Plans of graphs, through the dispatcher, the module helper and a driver that does nothing: for any bytes, the worker refuses them, or
//! builds, launches, changes and destroys a graph that touches no memory but the session's.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_fuzz::worker::Session;
use std::cell::RefCell;

thread_local! {
    // One session serves many inputs, because starting one takes milliseconds.
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| {
    SESSION.with_borrow_mut(|current| Session::ready(current).graph(bytes));
});

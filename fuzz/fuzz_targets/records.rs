//! Ring records through the consumer, the dispatcher and its helpers, on a driver that does nothing: for any bytes, the worker
//! answers, refuses or ends the session, and never panics or touches memory that is not the session's.
//!
//! The input is the guest's data in the ring, with a few liberties: a record's sequence counts from the one that
//! is due, so that 0 is right; its thread number may close or open the permit; a record without a reply slot gets one; and
//! the first word of the input is added to the tail.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sluice_fuzz::worker::Session;
use std::cell::RefCell;

thread_local! {
    // One session serves many inputs, because starting one takes milliseconds.
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((skew, records)) = bytes.split_first_chunk::<8>() else { return Corpus::Reject };
    SESSION.with_borrow_mut(|current| Session::ready(current).run(u64::from_le_bytes(*skew), records));
    Corpus::Keep
});

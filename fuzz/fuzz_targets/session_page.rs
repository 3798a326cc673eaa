//! A guest that changes its session page, its ring and its arena while the worker reads them: the worker neither panics nor touches
//! memory that is not the session's, and still answers each call when the guest has stopped.
//!
//! The input begins with the guest's stores, which a second thread repeats until the worker has emptied the ring; the ring's data, as
//! in `records`, follows.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sluice_fuzz::{input::Input, worker::Session};
use sluice_protocol::{limits, reply, session, shared::Shared as _};
use sluice_shared_memory::mapping::Words;
use sluice_worker::harness::ARENA_BYTES;
use std::{
    cell::RefCell,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
};

/// Stores of one input.
const STORES: usize = 64;

#[derive(Clone, Copy, Debug)]
enum Store {
    Page(usize, u64),
    Arena(usize, u32),
    Pause(u8),
}

/// A store from five bytes: most go to the words that the worker reads.
fn store(input: &mut Input<'_>) -> Store {
    let (kind, place, small) = (input.byte(), input.short(), input.short());
    let inside = usize::from(place);
    let value = match kind % 4 {
        0 => u64::from(small) * 8,
        1 => u64::from(small),
        2 => u64::from(small) << 48 | u64::from(small),
        _ => u64::MAX - u64::from(small),
    };
    let at = match kind / 4 % 16 {
        0..=2 => session::RING_TAIL,
        3 => session::RING_HEAD,
        4 => session::WORKER_PARKED,
        5 => session::GUEST_PARKED,
        // Sizes, and calls, of the first records.
        6..=9 => session::RING_AT + inside % 512 * 8,
        10 => reply::slot_at(u32::from(place) % limits::REPLY_SLOTS) + usize::from(place % 2) * 8,
        11 => session::SEQUENCES_AT + inside % limits::STREAMS as usize * 8,
        12 => session::ATTACHMENTS_AT + inside % limits::ATTACHMENTS as usize * 16,
        13 => (inside * 8) % session::RING_AT,
        14 => return Store::Arena(inside * 4 % ARENA_BYTES as usize, u32::from(small) << (kind % 4 * 8)),
        _ => return Store::Pause(kind % 64),
    };
    Store::Page(at, value)
}

/// The guest's thread.
fn apply(stores: &[Store], page: &Words, arena: &Words, over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        for store in stores {
            match *store {
                Store::Page(at, value) => page.store_u64(at, value, Ordering::Release),
                Store::Arena(at, value) => arena.store_u32(at, value, Ordering::Release),
                Store::Pause(polls) => (0..polls).for_each(|_| core::hint::spin_loop()),
            }
        }
    }
}

thread_local! {
    // One session serves many inputs, because starting one takes milliseconds.
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let mut input = Input(bytes);
    let Some(count) = input.next() else { return Corpus::Reject };
    let stores: Vec<Store> = (0..usize::from(count) % STORES).map(|_| store(&mut input)).collect();
    SESSION.with_borrow_mut(|current| {
        let session = Session::ready(current);
        let words = session.harness.words();
        let arena = session.harness.arena_words();
        let (start, over) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                apply(&stores, &words, &arena, &over);
            });
            start.wait();
            session.run(0, input.0);
            over.store(true, Ordering::Release);
        });
        // The worker's threads still work, whatever the guest has left in the page.
        session.must_answer();
    });
    Corpus::Keep
});

//! Messages between devices, workers, arbiters, the inventory and `sluiced`: any bytes, with any number of descriptors, are one message
//! of its kind or are refused. A received message is encoded to bytes with the same meaning, and no bytes make the decoder allocate
//! more than the longest message has.
//!
//! The first byte of the input chooses the kind, the second the number of descriptors.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use sluice_messages::{
    channel::{self, ReceiveError, Received},
    control::{
        ArbiterSetup, BYTES, FromArbiter, FromDevice, FromInventory, FromWorker, Message, SETUP_BYTES,
        ToArbiter, ToDevice, ToInventory, ToWorker, VERSION, WorkerSetup, codec,
    },
    custody::{CustodyAnswer, CustodyRequest},
};
use sluice_shared_memory::socket;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// Counts the bytes that a thread allocates.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: each function passes its arguments to the system's allocator, which has the same contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // No count is kept while the thread ends.
        let _ = ALLOCATED.try_with(|sum| sum.set(sum.get().saturating_add(layout.size())));
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs a decoder; panics if it allocates more than `limit`.
fn within<T>(limit: usize, decode: impl FnOnce() -> T) -> T {
    let before = ALLOCATED.get();
    let decoded = decode();
    let allocated = ALLOCATED.get() - before;
    assert!(allocated <= limit, "the decoder allocated {allocated} bytes");
    decoded
}

/// Decodes one message, and receives it with this number of descriptors from a socket.
fn message<M: Message + PartialEq>(bytes: &[u8], descriptors: usize, ends: &(OwnedFd, OwnedFd)) {
    let decoded = within(0, || M::decode(bytes));
    if let Ok(decoded) = decoded {
        let encoded = decoded.encode();
        assert_eq!(M::decode(&encoded).ok(), Some(decoded), "another message arrives");
        assert!(decoded.descriptors() <= socket::DESCRIPTORS, "more descriptors than are received");
    }
    let passed: Vec<BorrowedFd<'_>> = vec![ends.0.as_fd(); descriptors];
    if bytes.is_empty() || socket::send(&ends.0, bytes, &passed).is_err() {
        return;
    }
    let fits = decoded.is_ok_and(|message| {
        message.descriptors() == descriptors && message.version().is_none_or(|version| version == VERSION)
    });
    match channel::receive::<M>(&ends.1) {
        Ok(Received::Message(received, list)) => {
            assert!(fits, "{received:?} was taken with {descriptors} descriptors");
            assert_eq!(Some(received), decoded.ok());
            assert_eq!(list.len(), descriptors);
        }
        Ok(Received::Empty | Received::Closed) => panic!("a message is lost"),
        Err(ReceiveError::Failed(error)) => panic!("{error}"),
        Err(error) => assert!(!fits, "refused: {error}"),
    }
}

/// Decodes a setup; the accepted one is encoded to the same bytes.
fn setup<S: bincode::Encode + bincode::Decode<()>>(bytes: &[u8]) {
    // The message itself, and the text of an error.
    if let Ok(decoded) = within(SETUP_BYTES + 1024, || codec::decode::<S>(bytes)) {
        assert_eq!(codec::encode(&decoded).expect("as short as it was"), bytes, "other bytes, same setup");
    }
}

thread_local! {
    static ENDS: (OwnedFd, OwnedFd) = {
        let (ours, theirs) = socket::pair().expect("a pair");
        rustix::io::ioctl_fionbio(&theirs, true).expect("non-blocking");
        (ours, theirs)
    };
}

fuzz_target!(|input: &[u8]| {
    let [kind, descriptors, bytes @ ..] = input else { return };
    let count = usize::from(*descriptors) % (socket::DESCRIPTORS + 1);
    // Longer than any message, to be cut.
    let bytes = &bytes[..bytes.len().min(SETUP_BYTES)];
    let short = &bytes[..bytes.len().min(BYTES + 8)];
    ENDS.with(|ends| match kind % 12 {
        0 => message::<ToWorker>(short, count, ends),
        1 => message::<FromWorker>(short, count, ends),
        2 => message::<ToDevice>(short, count, ends),
        3 => message::<FromDevice>(short, count, ends),
        4 => message::<ToArbiter>(short, count, ends),
        5 => message::<FromArbiter>(short, count, ends),
        6 => message::<CustodyRequest>(short, count, ends),
        7 => message::<CustodyAnswer>(short, count, ends),
        8 => message::<ToInventory>(short, count, ends),
        9 => message::<FromInventory>(short, count, ends),
        10 => setup::<WorkerSetup>(bytes),
        _ => setup::<ArbiterSetup>(bytes),
    });
});

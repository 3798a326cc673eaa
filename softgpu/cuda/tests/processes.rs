//! The virtual-memory API between processes: memory is passed as a descriptor, and ends with its last holder.

use std::os::fd::AsFd;
use std::path::Path;

use crate::support::peer::{Peer, serve};
use crate::support::*;
use sluice_kit::wait::eventually;

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

fn start(state: &Path) -> Peer {
    let peer = Peer::start("processes::peer_process", state);
    peer.ask("context").unwrap();
    peer
}

/// Waits until the device has that much free memory, seen by one of its users. This can take a while: a process that another test
/// starts at this moment has copies of this one's descriptors until its exec.
fn wait_for_free(peer: &Peer, bytes: u64) {
    eventually(&format!("{bytes} bytes are free"), || peer.ask("free") == Ok(bytes));
}

// Promise: Q11
#[test]
fn two_processes_share_one_memory() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    let free = maker.ask("free").unwrap();
    maker.ask("create 0 3 1").unwrap();
    maker.ask("map 0").unwrap();
    maker.ask("put 0 40 1111").unwrap();
    let descriptor = maker.ask_for("export 0");
    taker.ask_with("import 0 3", descriptor.as_fd()).unwrap();
    taker.ask("map 0").unwrap();
    assert_eq!(taker.ask("get 0 40"), Ok(1111));
    taker.ask("put 0 4194304 2222").unwrap();
    assert_eq!(maker.ask("get 0 4194304"), Ok(2222));
    assert_eq!(maker.ask("free"), Ok(free - 3 * PAGE), "shared memory is taken once");
    assert_eq!(taker.ask("free"), Ok(free - 3 * PAGE));
    // Importer and exporter get the same attributes.
    for peer in [&maker, &taker] {
        assert_eq!(peer.ask("shareable 0"), Ok(1));
        assert_eq!(peer.ask("access 0"), Ok(3));
        assert_eq!(peer.ask("retain 0"), Ok(1));
    }
    // An importer may export the memory again.
    let third = start(state.path());
    let again = taker.ask_for("export 0");
    third.ask_with("import 5 3", again.as_fd()).unwrap();
    third.ask("map 5").unwrap();
    assert_eq!(third.ask("get 5 4194304"), Ok(2222));
}

// Promise: Q11
#[test]
fn unshareable_memory_cannot_be_exported() {
    let state = new_state();
    let maker = start(state.path());
    maker.ask("create 0 1 0").unwrap();
    assert_eq!(maker.ask("shareable 0"), Ok(0));
    assert_eq!(maker.ask("export 0"), Err(INVALID_VALUE));
}

// Promise: Q11
#[test]
fn memory_ends_with_the_last_handle_and_mapping_in_every_order() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    let free = maker.ask("free").unwrap();
    let steps = [(&maker, "release 0"), (&maker, "unmap 0"), (&taker, "release 0"), (&taker, "unmap 0")];
    for order in permutations(steps.len()) {
        maker.ask("create 0 2 1").unwrap();
        maker.ask("map 0").unwrap();
        let descriptor = maker.ask_for("export 0");
        taker.ask_with("import 0 2", descriptor.as_fd()).unwrap();
        taker.ask("map 0").unwrap();
        drop(descriptor);
        for (done, index) in order.iter().enumerate() {
            assert_eq!(maker.ask("free"), Ok(free - 2 * PAGE), "{order:?} after {done}");
            let (peer, words) = steps[*index];
            peer.ask(words).unwrap();
        }
        wait_for_free(&maker, free);
    }
}

fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for shorter in permutations(count - 1) {
        for at in 0..=shorter.len() {
            let mut longer = shorter.clone();
            longer.insert(at, count - 1);
            all.push(longer);
        }
    }
    all
}

// Promise: Q11
#[test]
fn descriptor_in_flight_outlives_its_maker() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    let free = taker.ask("free").unwrap();
    maker.ask("create 0 2 1").unwrap();
    maker.ask("map 0").unwrap();
    maker.ask("put 0 8 77").unwrap();
    let descriptor = maker.ask_for("export 0");
    maker.kill();
    // Only the descriptor holds the memory now. A process that needs memory checks it.
    let next = start(state.path());
    next.ask("create 9 1 1").unwrap();
    drop(next.ask_for("export 9"));
    assert!(taker.ask("free").unwrap() <= free - 2 * PAGE);
    taker.ask_with("import 0 2", descriptor.as_fd()).unwrap();
    drop(descriptor);
    taker.ask("map 0").unwrap();
    assert_eq!(taker.ask("get 0 8"), Ok(77));
    let before = next.ask("free").unwrap();
    taker.ask("release 0").unwrap();
    assert_eq!(next.ask("free"), Ok(before), "still mapped");
    taker.ask("unmap 0").unwrap();
    wait_for_free(&next, before + 2 * PAGE);
}

// Promise: Q11
#[test]
fn killed_process_holds_no_memory() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    let watched = maker.ask("free").unwrap();
    for words in ["release 0", "unmap 0", "get 0 0"] {
        let third = start(state.path());
        let free = maker.ask("free").unwrap();
        maker.ask("create 0 4 1").unwrap();
        let descriptor = maker.ask_for("export 0");
        third.ask_with("import 0 4", descriptor.as_fd()).unwrap();
        third.ask("map 0").unwrap();
        drop(descriptor);
        maker.ask("release 0").unwrap();
        assert_eq!(maker.ask("free"), Ok(free - 4 * PAGE));
        // The process is killed with a mapping, with a handle, and with both.
        third.ask(words).unwrap();
        third.kill();
        wait_for_free(&maker, watched);
    }
    drop(taker);
}

// Promise: Q11
#[test]
fn importer_continues_when_the_exporter_is_killed() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    maker.ask("create 0 2 1").unwrap();
    maker.ask("map 0").unwrap();
    maker.ask("put 0 0 5").unwrap();
    let descriptor = maker.ask_for("export 0");
    taker.ask_with("import 0 2", descriptor.as_fd()).unwrap();
    drop(descriptor);
    taker.ask("map 0").unwrap();
    maker.kill();
    let next = start(state.path());
    let free = next.ask("free").unwrap();
    // Another process takes all memory that is left; it gets no memory of the importer.
    next.ask(&format!("allocate 1 {free}")).unwrap();
    next.ask("fill 1 99").unwrap();
    assert_eq!(taker.ask("get 0 0"), Ok(5));
    taker.ask("put 0 0 6").unwrap();
    assert_eq!(next.ask(&format!("count 1 {}", 6)), Ok(0));
    assert_eq!(next.ask("free"), Ok(0));
}

/// The filter ends the process at its first attempt to open a file or to look one up.
// Promise: Q11
#[test]
fn process_without_the_right_to_open_files_imports_and_maps() {
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    taker.ask("confine").unwrap();
    let free = maker.ask("free").unwrap();
    for round in 0..3 {
        maker.ask("create 0 2 1").unwrap();
        maker.ask("map 0").unwrap();
        maker.ask(&format!("put 0 16 {round}")).unwrap();
        let descriptor = maker.ask_for("export 0");
        taker.ask_with("import 0 2", descriptor.as_fd()).unwrap();
        drop(descriptor);
        taker.ask("map 0").unwrap();
        assert_eq!(taker.ask("get 0 16"), Ok(round));
        maker.ask("unmap 0").unwrap();
        maker.ask("release 0").unwrap();
        taker.ask("free").unwrap();
        taker.ask("unmap 0").unwrap();
        taker.ask("release 0").unwrap();
        wait_for_free(&maker, free);
    }
}

// Promise: Q11
#[test]
fn exporter_needs_no_descriptor_after_sending_it() {
    const PIECES: u64 = 12;
    let state = new_state();
    let (maker, taker) = (start(state.path()), start(state.path()));
    let free = maker.ask("free").unwrap();
    maker.ask("descriptors 64").unwrap();
    taker.ask("descriptors 64").unwrap();
    for piece in 0..PIECES {
        maker.ask(&format!("create {piece} 1 1")).unwrap();
        maker.ask(&format!("export-often {piece} 2000")).unwrap();
    }
    for round in 0..20 {
        for piece in 0..PIECES {
            let descriptor = maker.ask_for(&format!("export {piece}"));
            taker.ask_with(&format!("import {piece} 1"), descriptor.as_fd()).unwrap();
            taker.ask(&format!("map {piece}")).unwrap();
            taker.ask(&format!("put {piece} 8 {}", round * 100 + piece)).unwrap();
        }
        for piece in 0..PIECES {
            assert_eq!(taker.ask(&format!("get {piece} 8")), Ok(round * 100 + piece));
            taker.ask(&format!("unmap {piece}")).unwrap();
            taker.ask(&format!("release {piece}")).unwrap();
        }
        assert_eq!(maker.ask("free"), Ok(free - PIECES * PAGE));
    }
    for piece in 0..PIECES {
        maker.ask(&format!("release {piece}")).unwrap();
    }
    wait_for_free(&maker, free);
}

// Promise: S84
#[test]
fn program_that_exits_last_gives_the_memory_of_its_device_back() {
    use std::os::unix::fs::MetadataExt as _;

    const TAG: u64 = 0x7a67_7a67;
    let state = new_state();
    let path = state.path().join("gpu0/hbm");
    let storage = || std::fs::metadata(&path).unwrap().blocks() * 512;
    let start = || {
        let mut command = command("processes::peer_process", state.path(), "peer");
        command.env("SLUICE_SOFTGPU_IDLE_BYTES", "0");
        let peer = Peer::start_as(command);
        peer.ask("context").unwrap();
        peer
    };
    let (one, last) = (start(), start());
    for peer in [&one, &last] {
        peer.ask("create 0 4 0").unwrap();
        peer.ask("map 0").unwrap();
        peer.ask(&format!("fill 0 {TAG}")).unwrap();
    }
    one.finish();
    assert!(storage() >= 8 * PAGE, "the other process computes");
    assert_eq!(last.ask(&format!("count 0 {TAG}")), Ok(4 * PAGE / 8));
    last.finish();
    assert_eq!(storage(), 0);
    let next = start();
    next.ask("create 0 4 0").unwrap();
    next.ask("map 0").unwrap();
    assert_eq!(next.ask(&format!("count 0 {TAG}")), Ok(0));
    assert_eq!(
        next.ask(&format!("count 0 {}", 0xd5d5_d5d5_d5d5_d5d5_u64)),
        Ok(4 * PAGE / 8),
        "nor is it fresh"
    );
}

//! Nothing is cleared: the next process finds the content that a process left in device memory, as on a GPU whose driver clears
//! nothing. This is the positive control of every test that Sluice scrubs.

use std::path::Path;

use crate::support::peer::{Peer, serve};
use crate::support::*;
use sluice_kit::wait::eventually;

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

fn start(state: &Path, context_bytes: u64) -> Peer {
    let mut command = command("remnants::peer_process", state, "peer");
    command.env("SLUICE_SOFTGPU_CONTEXT_BYTES", context_bytes.to_string());
    let peer = Peer::start_as(command);
    peer.ask("context").unwrap();
    peer
}

/// Takes and maps all free memory but one page, by one kind of allocation.
fn take(peer: &Peer, way: &str) -> u64 {
    let bytes = peer.ask("free").unwrap() - PAGE;
    match way {
        "create" => {
            peer.ask(&format!("create 0 {} 0", bytes / PAGE)).unwrap();
            peer.ask("map 0").unwrap();
        }
        _ => {
            peer.ask(&format!("{way} 0 {bytes}")).unwrap();
        }
    }
    bytes / 8
}

// Promise: S10
#[test]
fn next_process_finds_the_bytes_of_a_killed_one() {
    let ways = ["create", "allocate", "allocate-async"];
    let state = new_state();
    let mut tag = 0x7a67_0000;
    for left in ways {
        for found in ways {
            tag += 1;
            let victim = start(state.path(), 0);
            let words = take(&victim, left);
            victim.ask(&format!("fill 0 {tag}")).unwrap();
            victim.kill();
            let next = start(state.path(), 0);
            assert_eq!(take(&next, found), words);
            let count = next.ask(&format!("count 0 {tag}")).unwrap();
            assert_eq!(count, words, "left by {left}, found by {found}");
        }
    }
}

// Promise: S10
#[test]
fn next_process_finds_the_code_of_a_module() {
    let state = new_state();
    let victim = start(state.path(), 0);
    victim.ask("module 77").unwrap();
    victim.kill();
    let next = start(state.path(), 0);
    next.ask("allocate 0 2000000").unwrap();
    // A word of the text of the module; texts start at multiples of 512, after the variable.
    let head = u64::from_le_bytes(*b".version");
    assert_eq!(next.ask(&format!("count 0 {head}")), Ok(1));
}

// Promise: S10
#[test]
fn next_process_finds_shared_and_local_memory_of_kernels() {
    for (number, space) in ["shared", "local"].into_iter().enumerate() {
        let state = new_state();
        let tag = 0x7ac0_ffee + number as u64;
        let fresh = start(state.path(), PAGE);
        assert_eq!(fresh.ask(&format!("find-in {number}")), Ok(0), "{space} of a device that was never used");
        drop(fresh);
        let victim = start(state.path(), PAGE);
        victim.ask(&format!("leave-in {number} {tag}")).unwrap();
        // The next kernel of the same process finds the value,
        assert_eq!(victim.ask(&format!("find-in {number}")), Ok(tag), "{space}");
        victim.kill();
        // and that of the next process,
        let next = start(state.path(), PAGE);
        assert_eq!(next.ask(&format!("find-in {number}")), Ok(tag), "{space}");
        drop(next);
        // unless another process has taken the pages meanwhile and overwritten them.
        let scrubber = start(state.path(), 0);
        take(&scrubber, "create");
        scrubber.ask("fill 0 0").unwrap();
        drop(scrubber);
        let last = start(state.path(), PAGE);
        assert_eq!(last.ask(&format!("find-in {number}")), Ok(0), "{space}");
    }
}

// Promise: S10
#[test]
fn kernels_without_device_memory_find_remnants_of_others() {
    let state = new_state();
    let peer = start(state.path(), 0);
    for number in 0..2 {
        // Each thread that executes kernels keeps the content of its last block. Several take turns, or one is used no more.
        eventually("a thread executes two kernels", || {
            peer.ask(&format!("leave-in {number} 4711")).unwrap();
            (0..8).any(|_| peer.ask(&format!("find-in {number}")) == Ok(4711))
        });
    }
}

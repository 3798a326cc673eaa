//! Storage of the host goes back when no process computes, and memory that lost its content never reads as fresh.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_kit::wait::eventually;
use softgpu_device::{Allocation, Client, Config, Device, LOST, Owner, PAGE_BYTES, Use};

/// Content that an owner leaves.
const TAG: u8 = 0x77;
/// Storage that the devices here keep while they are idle.
const KEPT: u64 = 4 * PAGE_BYTES;

fn attach(state: &Path) -> Arc<Owner> {
    let state = state.to_owned();
    let config = Config::from_variables(&|name| match name {
        "SLUICE_SOFTGPU_STATE" => Some(state.clone().into()),
        "SLUICE_SOFTGPU_SCALE" => Some("2048".into()),
        "SLUICE_SOFTGPU_IDLE_BYTES" => Some(KEPT.to_string().into()),
        _ => None,
    });
    Arc::new(Device::open(&config.unwrap(), 0).unwrap()).attach(Client::Cuda).unwrap()
}

fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("softgpu-test-").tempdir_in("/dev/shm").unwrap()
}

fn memory(state: &Path) -> File {
    File::options().read(true).write(true).open(state.join("gpu0/hbm")).unwrap()
}

/// Bytes that the host spends on the device.
fn storage(state: &Path) -> u64 {
    memory(state).metadata().unwrap().blocks() * 512
}

/// Writes a byte to all pages of an allocation.
fn write(state: &Path, allocation: &Allocation, byte: u8) {
    let (memory, page) = (memory(state), vec![byte; usize::try_from(PAGE_BYTES).unwrap()]);
    for run in allocation.runs() {
        for number in run.first..run.first + run.count {
            memory.write_all_at(&page, number * PAGE_BYTES).unwrap();
        }
    }
}

/// The first and the last byte of each page of an allocation.
fn bytes(state: &Path, allocation: &Allocation) -> Vec<u8> {
    let memory = memory(state);
    let mut found = Vec::new();
    for run in allocation.runs() {
        for number in run.first..run.first + run.count {
            for at in [number * PAGE_BYTES, (number + 1) * PAGE_BYTES - 1] {
                let mut byte = [0];
                memory.read_exact_at(&mut byte, at).unwrap();
                found.push(byte[0]);
            }
        }
    }
    found
}

// Promise: S84
#[test]
fn last_process_gives_storage_back_and_the_next_finds_no_fresh_memory() {
    let state = state();
    let path = state.path();
    let last = attach(path);
    let total = last.device().total_bytes();
    // Some memory is free at the end, and some is still held.
    let half = total / PAGE_BYTES / 2 * PAGE_BYTES;
    let freed = last.allocate(half, Use::Chunk).unwrap();
    let held = last.allocate(total - half - PAGE_BYTES, Use::Heap).unwrap();
    write(path, &freed, TAG);
    write(path, &held, TAG);
    drop(freed);
    assert!(storage(path) >= total - PAGE_BYTES);
    last.give_back();
    assert!(storage(path) <= KEPT, "{} bytes stay", storage(path));
    assert_eq!(last.device().used_bytes(), held.bytes(), "the table is the same");
    drop((held, last));

    let next = attach(path);
    let all = next.allocate(total, Use::Chunk).unwrap();
    let found = bytes(path, &all);
    let count = |byte| found.iter().filter(|other| **other == byte).count() as u64;
    // One page was never used.
    assert_eq!((count(TAG), count(0)), (2 * KEPT / PAGE_BYTES, 2), "{found:x?}");
    assert_eq!(count(LOST), 2 * (total - KEPT) / PAGE_BYTES - 2);
    // The loss happens once.
    write(path, &all, TAG);
    drop(all);
    let again = next.allocate(total, Use::Chunk).unwrap();
    assert!(bytes(path, &again).iter().all(|byte| *byte == TAG));
}

// Promise: S84
#[test]
fn storage_stays_while_another_process_computes_or_holds_the_memory() {
    let state = state();
    let path = state.path();
    let (one, other) = (attach(path), attach(path));
    let made = one.allocate(16 * PAGE_BYTES, Use::Chunk).unwrap();
    write(path, &made, TAG);
    let exported = made.export().unwrap();
    one.give_back();
    assert!(bytes(path, &made).iter().all(|byte| *byte == TAG), "another process computes");
    drop(other);
    one.give_back();
    assert!(bytes(path, &made).iter().all(|byte| *byte == TAG), "a descriptor names the memory");
    drop(exported);
    // A process that another test starts has copies of the descriptor until its exec.
    eventually("the storage is given back", || {
        one.give_back();
        storage(path) <= KEPT
    });
}

// Promise: S84
#[test]
fn next_process_gives_back_the_storage_that_a_killed_one_left() {
    let state = state();
    let path = state.path();
    let mut child = start(path, "take_and_wait");
    eventually("the child has taken memory", || path.join("taken").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(storage(path) >= 16 * PAGE_BYTES);
    let next = attach(path);
    assert!(storage(path) <= KEPT, "{} bytes stay", storage(path));
    let all = next.allocate(16 * PAGE_BYTES, Use::Chunk).unwrap();
    assert!(bytes(path, &all).iter().all(|byte| [TAG, LOST].contains(byte)), "it is no fresh memory");
}

#[test]
#[ignore = "a part of next_process_gives_back_the_storage_that_a_killed_one_left"]
fn take_and_wait() {
    let state = std::env::var_os("SOFTGPU_TEST_STATE").unwrap();
    let path = Path::new(&state);
    let owner = attach(path);
    let made = owner.allocate(16 * PAGE_BYTES, Use::Chunk).unwrap();
    write(path, &made, TAG);
    std::fs::write(path.join("taken"), "").unwrap();
    while path.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kills processes that take memory, write to it and give its storage back, at random moments. Memory that was in use never reads
/// as zeroes.
// Promise: S84
#[test]
fn no_used_page_reads_as_fresh_when_processes_are_killed_at_any_point() {
    let state = state();
    let path = state.path();
    let watcher = attach(path);
    let total = watcher.device().total_bytes();
    let all = watcher.allocate(total, Use::Chunk).unwrap();
    write(path, &all, TAG);
    drop((all, watcher));
    let kill = |mut child: Child| {
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL), "it has failed");
    };
    // The first lives until it has given storage back, and the others for up to twice that time, if the machine did not stop meanwhile.
    let begun = Instant::now();
    let first = start(path, "take_write_and_give_back");
    eventually("a process gives storage back", || path.join("gave").exists());
    let once = begun.elapsed().min(Duration::from_millis(100));
    kill(first);
    for round in 0..60 {
        let child = start(path, "take_write_and_give_back");
        std::thread::sleep(once * (round % 13) / 6);
        kill(child);
    }
    let owner = attach(path);
    assert_eq!(owner.free_bytes(), total);
    let all = owner.allocate(total, Use::Chunk).unwrap();
    let found = bytes(path, &all);
    assert!(found.iter().all(|byte| [TAG, LOST].contains(byte)), "{found:x?}");
    assert!(found.contains(&LOST), "no process gave storage back");
}

#[test]
#[ignore = "a part of no_used_page_reads_as_fresh_when_processes_are_killed_at_any_point"]
fn take_write_and_give_back() {
    let state = std::env::var_os("SOFTGPU_TEST_STATE").unwrap();
    let path = Path::new(&state);
    while path.exists() {
        let owner = attach(path);
        let made = owner.allocate(8 * PAGE_BYTES, Use::Chunk).unwrap();
        assert!(bytes(path, &made).iter().all(|byte| [TAG, LOST].contains(byte)));
        write(path, &made, TAG);
        owner.give_back();
        std::fs::write(path.join("gave"), "").unwrap();
    }
}

fn start(state: &Path, test: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("storage::{test}"), "--ignored", "--test-threads=1"])
        .env("SOFTGPU_TEST_STATE", state)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

//! Descriptors of the queue, and memory of the front-end.

use std::time::{Duration, Instant};

use super::scene::Scene;
use anyhow::{Result, ensure};
use rustix::fs::SealFlags;
use sluice_kit::front_end::{FrontEnd, MEMORY, command, memory};
use sluice_protocol::gpu::command::{ATTACH_BACKING, SUBMIT_3D};
use sluice_protocol::shared::Shared;
use sluice_tests::direct::TIMEOUT;

// Promise: V5
#[test]
fn looping_or_broken_descriptors_leave_the_device_serving() -> Result<()> {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let scene = Scene::start()?;
    let at = MEMORY - 0x1_0000;
    let chains: [&[(u64, u32, u16, u16)]; 12] = [
        // Loops of one and of two.
        &[(at, 32, NEXT, 900)],
        &[(at, 32, NEXT, 901), (at, 32, NEXT, 900)],
        // Nothing to read, nothing to write, an empty descriptor.
        &[(at, 0, 0, 0)],
        &[(at, 0, NEXT, 901), (at, 0, WRITE, 0)],
        &[(at, 24, 0, 0)],
        &[(at, 4096, WRITE, 0)],
        // The place of the answer is read-only.
        &[(at, 24, NEXT, 901), (at + 4096, 4096, 0, 0)],
        // Outside of memory, across its end, and longer than any command.
        &[(MEMORY, 24, NEXT, 901), (MEMORY, 4096, WRITE, 0)],
        &[(u64::MAX - 8, u32::MAX, NEXT, 901), (at, 4096, WRITE, 0)],
        &[(0, u32::MAX, NEXT, 901), (at, u32::MAX, WRITE, 0)],
        // An indirect table that points to itself, and a descriptor beyond the table.
        &[(at, 16, INDIRECT, 0)],
        &[(at, 24, NEXT, u16::MAX)],
    ];
    for chain in chains {
        let mut raw = FrontEnd::connect(&scene.backend.socket()?);
        raw.words.write(at as usize, &command(SUBMIT_3D, 1, &[u32::MAX, 0]));
        for (index, (address, length, flags, next)) in (900..).zip(chain) {
            raw.descriptor(index, *address, *length, *flags, *next);
        }
        raw.make_available(900);
        raw.make_available(u16::MAX);
    }
    // Commands that announce more than they contain.
    let mut raw = FrontEnd::connect(&scene.backend.socket()?);
    for command in [
        command(SUBMIT_3D, 1, &[u32::MAX, 0]),
        command(SUBMIT_3D, 1, &[]),
        command(ATTACH_BACKING, 0, &[1, u32::MAX]),
        command(ATTACH_BACKING, 0, &[1, 1000, 0, 0, 4096, 0]),
        command(0xffff_ffff, u32::MAX, &[]),
    ] {
        let head = raw.send(&command);
        raw.soon(head);
    }
    drop(raw);
    scene.unharmed()
}

// Promise: V10
#[test]
fn front_end_whose_memory_can_shrink_is_refused() -> Result<()> {
    let scene = Scene::start()?;
    for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::GROW | SealFlags::SEAL] {
        let refused = FrontEnd::with_memory(&scene.backend.socket()?, memory(seals));
        ensure!(refused.is_err(), "memory with {seals:?} is accepted");
    }
    let deadline = Instant::now() + TIMEOUT;
    while !scene.backend.printed().contains("can shrink") {
        ensure!(Instant::now() < deadline, "the reason is missing in the log:\n{}", scene.backend.printed());
        std::thread::sleep(Duration::from_millis(10));
    }
    scene.unharmed()
}

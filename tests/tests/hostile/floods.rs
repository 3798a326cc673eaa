//! More waits, contexts, resources and sessions than a guest may have.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::guest::{CONTROL, OK};
use super::scene::Scene;
use anyhow::{Result, ensure};
use sluice_kit::front_end::{FREE, FrontEnd, command};
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::gpu::command::{CTX_ATTACH_RESOURCE, RESOURCE_CREATE_3D};
use sluice_protocol::limits;
use sluice_protocol::session;
use sluice_protocol::shared::Shared;
use sluice_tests::direct::{self, TIMEOUT};

// Promise: V12
#[test]
fn floods_of_waits_contexts_and_resources_stop_at_their_limits() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    guest.settle()?;
    // Waits: only so many are withheld, the others are answered at once.
    let mut heads = std::collections::VecDeque::new();
    for _ in 0..5000 {
        heads.push_back(guest.front_end.wait(1));
        while heads.len() > 200 {
            let before = heads.len();
            heads.retain(|head| guest.front_end.answer(*head).is_none());
            ensure!(heads.len() < before || heads.len() <= 200 + limits::WAITERS_PER_SESSION);
        }
    }
    let deadline = Instant::now() + TIMEOUT;
    while !heads.is_empty() {
        heads.retain(|head| guest.front_end.answer(*head).is_none());
        ensure!(Instant::now() < deadline, "{} waits are never answered", heads.len());
    }
    // Contexts and resources of the device.
    let mut contexts = 1;
    while guest.front_end.context(100 + contexts) == OK {
        contexts += 1;
        ensure!(contexts as usize <= limits::GPU_CONTEXTS, "more than {} contexts", limits::GPU_CONTEXTS);
    }
    println!("{contexts} contexts");
    let mut resources = 2;
    while guest.front_end.ask(&command(
        RESOURCE_CREATE_3D,
        0,
        &[1000 + resources, 0, 64, 1, 1, 1, 1, 1, 0, 0, 0, 0],
    )) == OK
    {
        resources += 1;
        ensure!(resources as usize <= limits::RESOURCES, "more than {} resources", limits::RESOURCES);
    }
    println!("{resources} resources");
    ensure!(guest.front_end.ask(&command(CTX_ATTACH_RESOURCE, 1, &[u32::MAX, 0])) != OK);
    let ring = guest.front_end.doorbell(1, Doorbell::Ring);
    ensure!(ring == OK, "the session still has its doorbell: {ring:#x}");
    drop(guest);
    // Its user may have as many again once the device has freed them.
    let deadline = Instant::now() + TIMEOUT;
    while FrontEnd::try_connect(&scene.backend.socket()?).is_none() {
        ensure!(Instant::now() < deadline, "a guest that is gone keeps its user's contexts");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Sessions that come and go without a message.
    for _ in 0..40 {
        let mut raw = FrontEnd::connect(&scene.backend.socket()?);
        raw.open(1, 10, CONTROL);
    }
    scene.unharmed()
}

// Promise: C12
#[test]
fn sessions_beyond_the_limit_are_refused() -> Result<()> {
    const PER_GUEST: u32 = 40;
    let scene = Scene::start()?;
    let before = direct::private_kibibytes(scene.device)?;
    let (mut opened, mut refused) = (1, 0);
    let (mut guests, mut pages) = (Vec::new(), Vec::new());
    // Every guest has as many sessions as its memory has pages for.
    while opened + refused <= limits::SESSIONS + 40 {
        let mut raw = FrontEnd::connect(&scene.backend.socket()?);
        for number in 0..PER_GUEST {
            let (context, at) = (number + 10, FREE + u64::from(number) * session::BYTES as u64);
            ensure!(raw.context(context) == OK, "context {context}");
            ensure!(raw.resource(context, context, &[(at, session::BYTES as u32)]) == OK, "page {number}");
            raw.words.store_u64(at as usize + session::MAGIC_AT, session::MAGIC, Ordering::SeqCst);
            if raw.doorbell(context, Doorbell::Open { resource: context }) == OK {
                opened += 1;
                pages.push((guests.len(), at));
                continue;
            }
            refused += 1;
            ensure!(raw.state(at) == session::LOST, "a refused session gets no error");
        }
        guests.push(raw);
    }
    // All of them belong to one user, as does the neighbour. A session that got no worker in time makes room for another.
    let allowed = usize::try_from(limits::USER_SESSIONS)?;
    let lost = pages.iter().filter(|(guest, at)| guests[*guest].state(*at) == session::LOST).count();
    println!("{opened} sessions of {allowed} opened, {lost} of them lost, {refused} refused");
    ensure!((allowed..=allowed + lost).contains(&opened), "{opened} sessions, {allowed} are allowed");
    // The neighbour computes while workers start, as many as the rate lets through.
    std::thread::sleep(Duration::from_secs(2));
    let workers = scene.backend.processes("sluice-worker")?.len();
    let after = direct::private_kibibytes(scene.device)?;
    println!("{workers} workers meanwhile; sluice-device: {before} KiB before, {after} KiB after");
    ensure!(workers <= allowed && after < before + (16 << 10));
    drop(guests);
    scene.unharmed()
}

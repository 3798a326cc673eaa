//! Attachments of pages that the guest may not attach.

use super::guest::{ARENA, CONTROL, OK, PAGES, PAGES_BYTES};
use super::scene::Scene;
use anyhow::{Result, ensure};
use sluice_kit::front_end::{MEMORY, blob};
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::limits;
use sluice_protocol::session::Attachment;

// Promise: V11
#[test]
fn attachments_at_bad_slots_addresses_or_resources_are_refused() -> Result<()> {
    let scene = Scene::start()?;
    let mut guest = scene.guest()?;
    guest.settle()?;
    let bounds = limits::WINDOW_BOUNDS;
    let page = PAGES + u64::from(PAGES_BYTES);
    ensure!(guest.front_end.resource(1, 30, &[(page, 8192)]) == OK);
    let addresses = [
        0,
        8,
        4096,
        bounds.start - 4096,
        bounds.end,
        bounds.end - 4096,
        ARENA + u64::from(PAGES_BYTES) + 8,
        ARENA,
        ARENA + 4096,
        u64::MAX - 4095,
        u64::MAX - 8191,
        1 << 63,
        0x7fff_ffff_f000,
    ];
    for (slot, address) in (2..).zip(addresses) {
        let became = guest.attach_again(30, slot, address)?;
        ensure!(matches!(became, Attachment::Refused(_)), "at {address:#x}: {became:?}");
    }
    // Entries that are in use, that belong to the device, or that do not exist.
    let free = ARENA + (1 << 30);
    for slot in [0, 1, limits::ATTACHMENTS, u32::MAX] {
        let answer = guest.front_end.doorbell(1, Doorbell::Attach { resource: 30, slot, address: free });
        ensure!(answer != OK, "slot {slot}");
    }
    // A resource of another context, a resource without a context, and a resource that is attached already.
    ensure!(guest.front_end.context(2) == OK);
    ensure!(guest.front_end.resource(2, 31, &[(page + 8192, 4096)]) == OK);
    for resource in [31, 99, 0, u32::MAX, 10, 20] {
        let became = guest.attach_again(resource, 40, free)?;
        ensure!(matches!(became, Attachment::Refused(_)), "resource {resource}: {became:?}");
    }
    // A second session may use neither the first one's page nor its arena.
    for resource in [10, 20, 30] {
        ensure!(guest.front_end.doorbell(2, Doorbell::Open { resource }) != OK, "resource {resource}");
    }
    // Pages of another resource, outside of memory, empty, or with an overflow.
    let pages: [(u64, u32); 7] = [
        (CONTROL, 4096),
        (PAGES, 4096),
        (MEMORY, 4096),
        (MEMORY - 4096, 8192),
        (page + (1 << 20) + 1, 4096),
        (page + (1 << 20), 100),
        (u64::MAX - 4095, 4096),
    ];
    for (id, entry) in (50..).zip(pages) {
        ensure!(guest.front_end.ask(&blob(id, &[entry])) != OK, "pages {entry:x?}");
    }
    // The entry can still be used for permitted memory.
    ensure!(guest.attach_again(30, 41, free)? == Attachment::Adopted(8192));
    drop(guest);
    scene.unharmed()
}

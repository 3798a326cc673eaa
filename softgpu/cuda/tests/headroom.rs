//! The memory that the driver takes for itself: per context, for limits that grow, and for modules.

use std::path::Path;
use std::sync::Arc;

use crate::support::peer::{Peer, serve};
use crate::support::*;
use softgpu_device::{Config, Device, Held, Process};

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

/// A process on a device of 70 pages, each of whose contexts takes `context_bytes`.
fn start(state: &Path, context_bytes: Option<u64>) -> Peer {
    let mut command = command("headroom::peer_process", state, "peer");
    command.env("SLUICE_SOFTGPU_SCALE", "1024").env_remove("SLUICE_SOFTGPU_CONTEXT_BYTES");
    if let Some(bytes) = context_bytes {
        command.env("SLUICE_SOFTGPU_CONTEXT_BYTES", bytes.to_string());
    }
    Peer::start_as(command)
}

fn device(state: &Path) -> Arc<Device> {
    let state = state.to_owned();
    let config =
        Config::from_variables(&|name| (name == STATE).then(|| state.clone().into_os_string())).unwrap();
    Arc::new(Device::open(&config, 0).unwrap())
}

fn process(device: &Device, peer: &Peer) -> Process {
    device.processes().into_iter().find(|process| process.pid == peer.pid()).unwrap()
}

// Promise: Q12
#[test]
fn context_takes_memory_and_gives_it_back() {
    let state = new_state();
    let peer = start(state.path(), Some(3 * PAGE - 5));
    let device = device(state.path());
    assert_eq!(device.used_bytes(), 0, "a process without a context takes nothing");
    let first = peer.ask("context").unwrap();
    assert_eq!(device.used_bytes(), 3 * PAGE);
    let second = peer.ask("context").unwrap();
    let total = device.total_bytes();
    assert_eq!(peer.ask("free"), Ok(total - 6 * PAGE));
    assert_eq!(peer.ask("total"), Ok(total));
    let told = process(&device, &peer);
    assert_eq!((told.contexts, told.held), (2, Held { driver: 6 * PAGE, ..Held::default() }));
    peer.ask(&format!("destroy {second}")).unwrap();
    assert_eq!(device.used_bytes(), 3 * PAGE);
    peer.ask(&format!("destroy {first}")).unwrap();
    assert_eq!((device.used_bytes(), process(&device, &peer).contexts), (0, 0));
    // The primary context lives from its first retain to its last release.
    for _ in 0..2 {
        peer.ask("retain-primary").unwrap();
        assert_eq!(device.used_bytes(), 3 * PAGE);
    }
    peer.ask("release-primary").unwrap();
    assert_eq!(device.used_bytes(), 3 * PAGE);
    peer.ask("release-primary").unwrap();
    assert_eq!(device.used_bytes(), 0);
}

// Promise: Q12
#[test]
fn context_without_configuration_takes_a_page_of_a_small_device() {
    let state = new_state();
    let peer = start(state.path(), None);
    peer.ask("context").unwrap();
    assert_eq!(device(state.path()).used_bytes(), PAGE);
}

// Promise: Q12
#[test]
fn killed_process_releases_the_memory_of_its_contexts() {
    let state = new_state();
    let (one, other) = (start(state.path(), Some(2 * PAGE)), start(state.path(), Some(PAGE)));
    one.ask("context").unwrap();
    one.ask("module 100").unwrap();
    other.ask("context").unwrap();
    let free = other.ask("free").unwrap();
    one.kill();
    assert_eq!(other.ask("free"), Ok(free + 3 * PAGE));
}

// Promise: Q12
#[test]
fn context_and_module_fail_without_a_free_page() {
    let state = new_state();
    let (holder, other) = (start(state.path(), Some(0)), start(state.path(), Some(2 * PAGE)));
    holder.ask("context").unwrap();
    let free = holder.ask("free").unwrap();
    holder.ask(&format!("create 0 {} 0", free / PAGE - 1)).unwrap();
    let device = device(state.path());
    for words in ["context", "retain-primary"] {
        assert_eq!(other.ask(words), Err(OUT_OF_MEMORY), "{words}");
        assert_eq!(device.free_bytes(), PAGE, "no memory was taken");
        assert_eq!(process(&device, &other).contexts, 0);
    }
    assert_eq!(holder.ask("module 3000000"), Err(OUT_OF_MEMORY));
    assert_eq!(device.free_bytes(), PAGE);
    // Code and variables of small modules share a page.
    let modules: Vec<u64> = (0..10).map(|_| holder.ask("module 1000").unwrap()).collect();
    assert_eq!(device.free_bytes(), 0);
    for module in modules {
        holder.ask(&format!("unload {module}")).unwrap();
    }
    assert_eq!(device.free_bytes(), PAGE);
    holder.ask("release 0").unwrap();
    other.ask("context").unwrap();
    other.ask("retain-primary").unwrap();
}

// Promise: Q12
#[test]
fn growing_limits_take_memory() {
    const STACK: u64 = 0;
    const PRINTF: u64 = 1;
    let state = new_state();
    let peer = start(state.path(), Some(0));
    let device = device(state.path());
    let context = peer.ask("context").unwrap();
    let limit = |number: u64, value: u64| peer.ask(&format!("limit {number} {value}"));
    // Limits below or at their default take nothing.
    for (number, value) in [(STACK, 512), (STACK, 1024), (PRINTF, 4096), (PRINTF, 1 << 20)] {
        limit(number, value).unwrap();
        assert_eq!(device.used_bytes(), 0, "{number} {value}");
    }
    // 132 multiprocessors of 2048 threads with 16 KiB more each, divided by the scale: 4.1 MiB.
    limit(STACK, 17 << 10).unwrap();
    assert_eq!(device.used_bytes(), 3 * PAGE);
    limit(STACK, 1024).unwrap();
    limit(STACK, 17 << 10).unwrap();
    assert_eq!(device.used_bytes(), 3 * PAGE, "memory that was taken is not taken again");
    limit(PRINTF, (1 << 20) + (4 << 30 >> 2)).unwrap_err(); // Beyond the driver's maximum.
    limit(PRINTF, 1 << 30).unwrap();
    assert_eq!(device.used_bytes(), 4 * PAGE);
    peer.ask("create 0 6 0").unwrap();
    assert_eq!(limit(STACK, 512 << 10), Err(OUT_OF_MEMORY));
    assert_eq!(device.used_bytes(), 10 * PAGE);
    peer.ask("release 0").unwrap();
    assert_eq!(process(&device, &peer).held, Held { driver: 4 * PAGE, ..Held::default() });
    peer.ask(&format!("destroy {context}")).unwrap();
    assert_eq!(device.used_bytes(), 0);
}

/// Sets the size of the heap of kernels.
fn heap(peer: &Peer, bytes: u64) -> Result<u64, u32> {
    peer.ask(&format!("limit 2 {bytes}"))
}

// Promise: Q12
#[test]
fn first_module_that_calls_malloc_allocates_the_heap_of_kernels() {
    let state = new_state();
    let peer = start(state.path(), Some(0));
    let device = device(state.path());
    let context = peer.ask("context").unwrap();
    heap(&peer, 6 << 20).unwrap();
    peer.ask("module 1000").unwrap();
    assert_eq!(device.used_bytes(), PAGE, "no module calls malloc");
    // The size of the heap is that which kernels get, without scaling. Small modules share a page.
    let module = peer.ask("allocating-module").unwrap();
    assert_eq!(device.used_bytes(), 4 * PAGE);
    let other = peer.ask("allocating-module").unwrap();
    assert_eq!(device.used_bytes(), 4 * PAGE, "one heap for all modules");
    heap(&peer, 10 << 20).unwrap();
    assert_eq!(device.used_bytes(), 6 * PAGE);
    assert_eq!(heap(&peer, 1 << 35), Err(OUT_OF_MEMORY));
    assert_eq!(device.used_bytes(), 6 * PAGE);
    assert_eq!(peer.ask(&format!("allocate-in-kernel {module} 9000000")), Ok(1));
    assert_eq!(peer.ask(&format!("allocate-in-kernel {other} 9000000")), Ok(0), "the heap is full");
    assert_eq!(device.used_bytes(), 6 * PAGE, "a kernel takes nothing");
    assert_eq!(heap(&peer, 8 << 20), Err(INVALID_VALUE), "a kernel has used it");
    for module in [module, other] {
        peer.ask(&format!("unload {module}")).unwrap();
    }
    assert_eq!(process(&device, &peer).held, Held { driver: 6 * PAGE, ..Held::default() });
    peer.ask(&format!("destroy {context}")).unwrap();
    assert_eq!(device.used_bytes(), 0);
}

// Promise: Q12
#[test]
fn module_without_room_for_its_heap_does_not_load() {
    let state = new_state();
    let (holder, peer) = (start(state.path(), Some(0)), start(state.path(), Some(0)));
    let device = device(state.path());
    holder.ask("context").unwrap();
    peer.ask("context").unwrap();
    let pages = holder.ask("free").unwrap() / PAGE;
    holder.ask(&format!("create 0 {} 0", pages - 4)).unwrap();
    // One page holds the module itself.
    assert_eq!(peer.ask("allocating-module"), Err(SHARED_OBJECT_INIT_FAILED));
    assert_eq!(device.free_bytes(), 4 * PAGE, "no memory was taken");
    peer.ask("module 1000").unwrap();
    heap(&peer, 6 << 20).unwrap();
    let module = peer.ask("allocating-module").unwrap();
    assert_eq!(device.free_bytes(), 0);
    assert_eq!(peer.ask(&format!("allocate-in-kernel {module} 5000000")), Ok(1));
}

// Promise: Q12
#[test]
fn chunks_heap_and_driver_memory_are_accounted_separately() {
    let state = new_state();
    let peer = start(state.path(), Some(PAGE));
    let device = device(state.path());
    peer.ask("context").unwrap();
    peer.ask("module 100").unwrap();
    peer.ask("allocate 0 1000").unwrap();
    peer.ask("create 1 4 1").unwrap();
    let expected = Held { chunks: 4 * PAGE, heap: PAGE, driver: 2 * PAGE, imported: 0, lent: 0 };
    assert_eq!(process(&device, &peer).held, expected);
    peer.ask("map 1").unwrap();
    peer.ask("release 1").unwrap();
    assert_eq!(process(&device, &peer).held, expected, "mapped memory is held");
    peer.ask("unmap 1").unwrap();
    peer.ask("deallocate 0").unwrap();
    assert_eq!(process(&device, &peer).held, Held { driver: 2 * PAGE, ..Held::default() });
}

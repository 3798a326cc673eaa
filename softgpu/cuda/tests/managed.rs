//! Managed and registered memory, and the pointer attributes of all kinds of memory.

use std::ffi::c_void;

use crate::support::*;

const CONTEXT: i32 = 1;
const MEMORY_TYPE: i32 = 2;
const DEVICE_POINTER: i32 = 3;
const HOST_POINTER: i32 = 4;
const IS_MANAGED: i32 = 8;
const IPC_CAPABLE: i32 = 10;
const START: i32 = 11;
const SIZE: i32 = 12;
const MAPPED: i32 = 13;
const POOL: i32 = 17;

fn managed(bytes: u64) -> u64 {
    let mut address = 0;
    ok!(cuMemAllocManaged(&raw mut address, bytes, 1));
    address
}

fn host(address: u64) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

fn said(address: u64, bytes: u64, attribute: i32) -> i32 {
    let mut value = 77;
    ok!(cuMemRangeGetAttribute((&raw mut value).cast(), 4, attribute, address, bytes));
    value
}

// Promise: C20, C124
#[test]
fn managed_memory_is_accessible_to_host_and_device() {
    let _context = Context::new();
    let before = free_bytes();
    let increment = function(module(KERNELS), "increment");
    let without = free_bytes();
    let address = managed(4 * PAGE);
    assert_eq!(without - free_bytes(), 4 * PAGE, "device memory is set aside");
    // SAFETY: the program's own memory, which nothing else uses now.
    unsafe { host(address + 800).write(41) };
    assert_eq!(launch(increment, 1, 1, 0, &mut [address + 800]), 0);
    ok!(cuCtxSynchronize());
    // SAFETY: the same memory.
    assert_eq!(unsafe { host(address + 800).read() }, 42);
    let other = allocate(8);
    ok!(cuMemcpyDtoD_v2(other, address + 800, 8));
    assert_eq!(read::<u64>(other, 1), [42]);
    ok!(cuMemFree_v2(address));
    assert_eq!(cu!(cuMemFree_v2(address)), INVALID_VALUE);
    let mut none = 0;
    assert_eq!(cu!(cuMemAllocManaged(&raw mut none, 8, 3)), INVALID_VALUE);
    assert_eq!(cu!(cuMemAllocManaged(&raw mut none, 0, 1)), INVALID_VALUE);
    ok!(cuMemFree_v2(other));
    assert!(free_bytes() >= before - PAGE, "all but a chunk for small blocks is free again");
    assert_eq!(cu!(cuMemAllocManaged(&raw mut none, before + PAGE, 1)), OUT_OF_MEMORY);
    assert_eq!(cu!(cuMemAllocManaged(&raw mut none, u64::MAX, 1)), OUT_OF_MEMORY);
    assert_eq!((device_attribute(83), device_attribute(86), device_attribute(88)), (1, 1, 0));
    assert_eq!(device_attribute(89), 1);
    assert_eq!(launch(increment, 1, 1, 0, &mut [address + 800]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
}

const VARIABLES: &str = "
.visible .global .attribute(.managed) .align 8 .u64 shared[3] = {5, 6};
.visible .global .align 8 .u64 own = 1;
.visible .entry raise()
{
    .reg .b64 %rd<4>;
    ld.global.u64 %rd0, [shared+8];
    ld.global.u64 %rd1, [own];
    add.u64 %rd2, %rd0, %rd1;
    st.global.u64 [shared+8], %rd2;
    ret;
}
";

fn second_word(address: u64) -> u64 {
    // SAFETY: a managed variable of two words and more, which no kernel uses now.
    unsafe { host(address + 8).read() }
}

// Promise: C128
#[test]
fn managed_variable_is_memory_that_host_and_kernels_share() {
    let context = Context::new();
    // A chunk for small blocks stays.
    ok!(cuModuleUnload(module(VARIABLES)));
    let before = free_bytes();
    let module = module(VARIABLES);
    let (mut address, mut bytes) = (0, 0);
    ok!(cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, text("shared").as_ptr()));
    assert_eq!((bytes, second_word(address)), (24, 6));
    assert_eq!(launch(function(module, "raise"), 1, 1, 0, &mut []), 0);
    ok!(cuCtxSynchronize());
    assert_eq!(second_word(address), 7);
    let mut is_managed = 9u32;
    ok!(cuPointerGetAttribute((&raw mut is_managed).cast(), IS_MANAGED, address + 8));
    assert_eq!(is_managed, 1);
    ok!(cuMemAdvise(address, 24, 1, 0));
    assert_eq!(said(address, 24, 1), 1);
    assert_eq!(cu!(cuMemFree_v2(address)), INVALID_VALUE);
    ok!(cuModuleUnload(module));
    assert_eq!(free_bytes(), before, "with the memory that was set aside");
    assert_eq!(cu!(cuPointerGetAttribute((&raw mut is_managed).cast(), IS_MANAGED, address)), INVALID_VALUE);

    // All contexts share the variable of a library, which outlives them.
    let (source, none) = (ptx(VARIABLES), std::ptr::null());
    let (mut library, mut kernel, mut other) = (0, 0, 0);
    let image = source.as_ptr().cast();
    ok!(cuLibraryLoadData(&raw mut library, image, std::ptr::null(), none, 0, std::ptr::null(), none, 0));
    let mut find = |name: &str, address: &mut u64| {
        cu!(cuLibraryGetManaged(address, &raw mut bytes, library, text(name).as_ptr()))
    };
    assert_eq!(find("own", &mut address), NOT_FOUND);
    assert_eq!(find("shared", &mut address), 0);
    ok!(cuLibraryGetKernel(&raw mut kernel, library, text("raise").as_ptr()));
    assert_eq!(launch(kernel, 1, 1, 0, &mut []), 0);
    ok!(cuCtxSynchronize());
    ok!(cuCtxCreate_v2(&raw mut other, 0, 0));
    let mut same = 0;
    assert_eq!(find("shared", &mut same), 0);
    assert_eq!(launch(kernel, 1, 1, 0, &mut []), 0);
    ok!(cuCtxSynchronize());
    ok!(cuCtxDestroy_v2(other));
    ok!(cuCtxSetCurrent(context.handle));
    assert_eq!((same, second_word(address)), (address, 8));
    ok!(cuLibraryUnload(library));
    assert_eq!(free_bytes(), before);
}

// Promise: C20
#[test]
fn advice_applies_to_its_range() {
    let _context = Context::new();
    let address = managed(1 << 20);
    let half = 1 << 19;
    assert_eq!((said(address, 1 << 20, 1), said(address, 1 << 20, 2), said(address, 8, 4)), (0, -2, -2));
    ok!(cuMemAdvise(address, half, 1, 0));
    ok!(cuMemAdvise(address, 1 << 20, 3, 0));
    ok!(cuMemAdvise(address + half, half, 3, -1));
    ok!(cuMemAdvise(address, 1 << 20, 5, 0));
    assert_eq!((said(address, half, 1), said(address, 1 << 20, 1)), (1, 0));
    assert_eq!((said(address, half, 2), said(address + half, 8, 2), said(address, 1 << 20, 2)), (0, -1, -2));
    let mut devices = [5i32; 3];
    ok!(cuMemRangeGetAttribute(devices.as_mut_ptr().cast(), 12, 3, address, 1 << 20));
    assert_eq!(devices, [0, -2, -2]);
    let queue = stream(1);
    ok!(cuMemPrefetchAsync(address, half, 0, queue));
    ok!(cuStreamSynchronize(queue));
    assert_eq!((said(address, half, 4), said(address, 1 << 20, 4)), (0, -2));
    for (advice, device) in [(3, 5), (9, 0)] {
        assert_ne!(cu!(cuMemAdvise(address, 8, advice, device)), 0);
    }
    let block = allocate(100);
    for unmanaged in [block, 8, address + (1 << 20)] {
        assert_eq!(cu!(cuMemAdvise(unmanaged, 8, 1, 0)), INVALID_VALUE);
        assert_eq!(cu!(cuMemPrefetchAsync(unmanaged, 8, 0, 0)), INVALID_VALUE);
    }
    ok!(cuMemFree_v2(address));
}

// Promise: C20
#[test]
fn pointer_attributes_match_the_allocation() {
    let context = Context::new();
    let (mut pooled, mut pinned) = (0, std::ptr::null_mut::<c_void>());
    let (block, both) = (allocate(1000), managed(3000));
    ok!(cuMemAllocAsync(&raw mut pooled, 2000, 0));
    ok!(cuMemHostAlloc(&raw mut pinned, 4000, 0));
    let mut registered = vec![0u8; 5000];
    let start: *mut c_void = registered.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(start, 5000, 0));
    let mut pool = 0;
    ok!(cuDeviceGetDefaultMemPool(&raw mut pool, 0));
    // Address, size, memory type, whether the host can access it, managed, with an IPC name, and its pool.
    for (address, size, kind, of_host, is_managed, named, from) in [
        (block, 1000, 2, false, 0, 1, 0),
        (pooled, 2000, 2, false, 0, 0, pool),
        (both, 3000, 2, true, 1, 0, 0),
        (pinned.addr() as u64, 4000, 1, true, 0, 0, 0),
        (start.addr() as u64, 5000, 1, true, 0, 0, 0),
    ] {
        let inside = address + 99;
        assert_eq!(pointer(inside, MEMORY_TYPE), Ok(kind), "{size}");
        assert_eq!(pointer(inside, CONTEXT), Ok(context.handle), "{size}");
        assert_eq!(pointer(inside, DEVICE_POINTER), Ok(inside), "{size}");
        assert_eq!(pointer(inside, HOST_POINTER), if of_host { Ok(inside) } else { Err(INVALID_VALUE) });
        assert_eq!((pointer(inside, START), pointer(inside, SIZE)), (Ok(address), Ok(size)));
        assert_eq!(pointer(inside, MAPPED), Ok(1), "{size}");
        assert_eq!(pointer(inside, IS_MANAGED), Ok(is_managed), "{size}");
        assert_eq!(pointer(inside, IPC_CAPABLE), Ok(named), "{size}");
        assert_eq!(pointer(inside, POOL), Ok(from), "{size}");
    }
    ok!(cuMemHostUnregister(start));
    assert_eq!(pointer(start.addr() as u64, MEMORY_TYPE), Err(INVALID_VALUE));
    ok!(cuMemFreeHost(pinned));
    ok!(cuMemFree_v2(both));
}

// Promise: C20
#[test]
fn memory_registered_read_only_is_not_written() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (load, store) = (function(kernels, "load"), function(kernels, "store"));
    let mut words = vec![123u64; 512];
    let start: *mut c_void = words.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(start, 4096, 8));
    let result = allocate(8);
    assert_eq!(launch(load, 1, 1, 0, &mut [start.addr() as u64, result]), 0);
    ok!(cuCtxSynchronize());
    assert_eq!(read::<u64>(result, 1), [123]);
    assert_eq!(device_attribute(113), 1);
    assert_eq!(launch(store, 1, 1, 0, &mut [start.addr() as u64, 9]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    assert_eq!(words[0], 123);
}

// Promise: C20
#[test]
fn graphs_that_devices_launch_are_refused_as_the_attributes_report() {
    let _context = Context::new();
    let (mut handle, mut graph) = (0, 0);
    ok!(cuGraphCreate(&raw mut graph, 0));
    let (none, out) = (std::ptr::null::<u64>(), std::ptr::null_mut::<c_void>());
    assert_eq!(cu!(cuGraphAddMemAllocNode(&raw mut handle, graph, none, 0, out)), INVALID_VALUE);
    // Nodes for memory without a description, by the other function.
    for kind in [10, 11] {
        let mut parameters = [0; 32];
        parameters[0] = kind;
        let (before, place) = (std::ptr::null(), &raw mut parameters);
        let added = cu!(cuGraphAddNode_v2(&raw mut handle, graph, none, before, 0, place));
        assert_eq!(added, INVALID_VALUE, "{kind}");
    }
    // A launch by a device.
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&raw mut handle, graph, 4)), NOT_SUPPORTED);
    ok!(cuGraphDestroy(graph));
    assert_eq!(cu!(cuGraphDestroy(graph)), INVALID_VALUE);
    assert_eq!(cu!(cuGraphCreate(&raw mut graph, 1)), INVALID_VALUE);
    assert_eq!(cu!(cuMulticastCreate(&raw mut handle, std::ptr::null())), NOT_SUPPORTED);
}

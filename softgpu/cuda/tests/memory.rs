//! Memory: accounting, access rights, and that nothing is ever cleared.

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::ptr;

use crate::support::*;
use sluice_kit::wait::eventually;

/// `CUmemAllocationProp` for exportable pinned memory on device 0.
static ON_DEVICE: [u32; 8] = [1, 1, 1, 0, 0, 0, 0, 0];

fn create(bytes: u64) -> u64 {
    let mut handle = 0;
    ok!(cuMemCreate(&raw mut handle, bytes, &raw const ON_DEVICE, 0));
    handle
}

fn reserve(bytes: u64, hint: u64) -> u64 {
    let mut address = 0;
    ok!(cuMemAddressReserve(&raw mut address, bytes, 0, hint, 0));
    address
}

fn access(address: u64, bytes: u64, flags: u32) -> u32 {
    let description = [1, 0, flags];
    cu!(cuMemSetAccess(address, bytes, &raw const description, 1))
}

#[test]
fn free_memory_excludes_all_allocations() {
    let _context = Context::new();
    let before = free_bytes();
    let large = allocate(3 * PAGE + 1);
    assert_eq!(free_bytes(), before - 4 * PAGE);
    // Small blocks share a page.
    let small: Vec<u64> = (0..100).map(|_| allocate(1000)).collect();
    assert_eq!(free_bytes(), before - 5 * PAGE);
    assert!(small.iter().all(|address| address % 512 == 0));
    let (mut start, mut bytes) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, small[7] + 999));
    assert_eq!((start, bytes), (small[7], 1000));
    for address in small {
        ok!(cuMemFree_v2(address));
    }
    ok!(cuMemFree_v2(large));
    assert_eq!(free_bytes(), before);
    let again = allocate(3 * PAGE + 1);
    assert_ne!(again, large, "addresses are not used again soon");
    ok!(cuMemFree_v2(again));
}

#[test]
fn oversized_allocation_is_refused_and_changes_nothing() {
    let _context = Context::new();
    let before = free_bytes();
    let mut address = 77;
    for bytes in [before + 1, 1 << 50, u64::MAX, u64::MAX - 511] {
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, bytes)), OUT_OF_MEMORY, "{bytes:#x}");
    }
    assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, 0)), INVALID_VALUE);
    let mut handle = 77;
    assert_eq!(cu!(cuMemCreate(&raw mut handle, before + PAGE, &raw const ON_DEVICE, 0)), OUT_OF_MEMORY);
    assert_eq!((address, handle, free_bytes()), (77, 77, before));
    let all = allocate(before);
    assert_eq!(free_bytes(), 0);
    assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, 1)), OUT_OF_MEMORY);
    ok!(cuMemFree_v2(all));
    assert_eq!(free_bytes(), before);
}

#[test]
fn destroyed_context_frees_its_memory() {
    let context = Context::new();
    let before = free_bytes();
    let mut other = 0;
    ok!(cuCtxCreate_v2(&raw mut other, 0, 0));
    allocate(5 * PAGE);
    module(".visible .global .align 4 .b8 large[5000000];");
    assert!(free_bytes() < before - 5 * PAGE);
    ok!(cuCtxDestroy_v2(other));
    ok!(cuCtxSetCurrent(context.handle));
    assert_eq!(free_bytes(), before);
}

#[test]
fn mapped_memory_is_accessible_according_to_its_access_flags() {
    for (flags, load_code, store_code) in
        [(0, ILLEGAL_ADDRESS, ILLEGAL_ADDRESS), (1, 0, ILLEGAL_ADDRESS), (3, 0, 0)]
    {
        for (kernel, expected) in [("load", load_code), ("store", store_code)] {
            let _context = Context::new();
            let before = free_bytes();
            let function = function(module(KERNELS), kernel);
            let address = reserve(4 * PAGE, 0);
            let handle = create(2 * PAGE);
            ok!(cuMemMap(address + PAGE, 2 * PAGE, 0, handle, 0));
            ok!(cuMemRelease(handle)); // The mapping keeps it.
            if flags != 0 {
                assert_eq!(access(address + PAGE, 2 * PAGE, flags), 0);
            }
            let result = allocate(8);
            let place = address + PAGE + 0x1000;
            assert_eq!(launch(function, 1, 1, 0, &mut [place, result]), 0);
            assert_eq!(cu!(cuCtxSynchronize()), expected, "{kernel} with {flags}");
            if expected == 0 {
                // The next page is reserved but not mapped.
                assert_eq!(launch(function, 1, 1, 0, &mut [address + 3 * PAGE, result]), 0);
                assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
            }
            ok!(cuMemUnmap(address + PAGE, 2 * PAGE));
            ok!(cuMemAddressFree(address, 4 * PAGE));
            drop(_context);
            let _context = Context::new();
            assert_eq!(free_bytes(), before);
        }
    }
}

#[test]
fn allocation_mapped_twice_is_one_memory_and_outlives_its_mappings() {
    let _context = Context::new();
    let handle = create(PAGE);
    let (one, two) = (reserve(PAGE, 0), reserve(PAGE, 0));
    ok!(cuMemMap(one, PAGE, 0, handle, 0));
    ok!(cuMemMap(two, PAGE, 0, handle, 0));
    assert_eq!(access(one, PAGE, 3), 0);
    assert_eq!(access(two, PAGE, 3), 0);
    write(one + 40, &[0xdead_beef_u64]);
    assert_eq!(read::<u64>(two + 40, 1), [0xdead_beef]);
    let mut again = 0;
    ok!(cuMemRetainAllocationHandle(&raw mut again, two + 5));
    assert_eq!(again, handle);
    ok!(cuMemRelease(again));
    ok!(cuMemUnmap(one, PAGE));
    ok!(cuMemUnmap(two, PAGE));
    ok!(cuMemMap(one, PAGE, 0, handle, 0));
    assert_eq!(access(one, PAGE, 1), 0);
    assert_eq!(read::<u64>(one + 40, 1), [0xdead_beef]);
    assert_eq!(cu!(cuMemcpyHtoD_v2(one, (&raw const handle).cast(), 8)), INVALID_VALUE);
    ok!(cuMemUnmap(one, PAGE));
    ok!(cuMemRelease(handle));
    assert_eq!(cu!(cuMemRelease(handle)), INVALID_VALUE);
    assert_eq!(cu!(cuMemMap(one, PAGE, 0, handle, 0)), INVALID_VALUE);
    ok!(cuMemAddressFree(one, PAGE));
    ok!(cuMemAddressFree(two, PAGE));
}

#[test]
fn bad_arguments_of_the_virtual_memory_calls_are_refused() {
    let _context = Context::new();
    let mut address = 0;
    assert_eq!(cu!(cuMemAddressReserve(&raw mut address, PAGE + 1, 0, 0, 0)), INVALID_VALUE);
    assert_eq!(cu!(cuMemAddressReserve(&raw mut address, PAGE, 3, 0, 0)), INVALID_VALUE);
    let mut handle = 0;
    assert_eq!(cu!(cuMemCreate(&raw mut handle, 4096, &raw const ON_DEVICE, 0)), INVALID_VALUE);
    let range = reserve(4 * PAGE, 0);
    let handle = create(2 * PAGE);
    for (at, bytes, offset) in [
        (range + 4096, PAGE, 0),
        (range, 3 * PAGE, 0),
        (range, PAGE, PAGE),
        (range, 0, 0),
        (range + 3 * PAGE, 2 * PAGE, 0),
        (0x1000_0000_0000, PAGE, 0),
        (u64::MAX - PAGE + 1, 2 * PAGE, 0),
    ] {
        assert_eq!(cu!(cuMemMap(at, bytes, offset, handle, 0)), INVALID_VALUE, "{at:#x} {bytes:#x}");
    }
    ok!(cuMemMap(range, 2 * PAGE, 0, handle, 0));
    assert_eq!(cu!(cuMemMap(range + PAGE, PAGE, 0, handle, 0)), INVALID_VALUE);
    assert_eq!(cu!(cuMemUnmap(range, PAGE)), INVALID_VALUE);
    assert_eq!(cu!(cuMemAddressFree(range, 4 * PAGE)), INVALID_VALUE);
    assert_eq!(access(range, PAGE, 3), INVALID_VALUE);
    assert_eq!(access(range, 3 * PAGE, 3), INVALID_VALUE);
    assert_eq!(access(range, 2 * PAGE, 2), INVALID_VALUE);
    ok!(cuMemUnmap(range, 2 * PAGE));
    assert_eq!(cu!(cuMemUnmap(range, 2 * PAGE)), INVALID_VALUE);
    assert_eq!(cu!(cuMemAddressFree(range, 2 * PAGE)), INVALID_VALUE);
    ok!(cuMemAddressFree(range, 4 * PAGE));
    ok!(cuMemRelease(handle));
}

#[test]
fn reservation_is_at_its_hint_or_elsewhere_and_never_overlaps() {
    let _context = Context::new();
    // Behind the windows of devices, and with its end below every place at which the kernel may begin to choose addresses.
    let hint = 0x7e00_0000_0000;
    let bytes = 480 << 30;
    let first = reserve(bytes, hint);
    assert_eq!(first, hint);
    let second = reserve(bytes, hint);
    assert!(second + bytes <= first || second >= first + bytes, "{second:#x}");
    ok!(cuMemAddressFree(first, bytes));
    ok!(cuMemAddressFree(second, bytes));
}

#[test]
fn exported_allocation_can_be_imported_while_its_descriptor_is_open() {
    let _context = Context::new();
    let before = free_bytes();
    let handle = create(PAGE);
    let mut descriptor = -1;
    ok!(cuMemExportToShareableHandle(&raw mut descriptor, handle, 1, 0));
    let range = reserve(PAGE, 0);
    ok!(cuMemMap(range, PAGE, 0, handle, 0));
    assert_eq!(access(range, PAGE, 3), 0);
    write(range, &[0x5eed_u64]);
    ok!(cuMemUnmap(range, PAGE));
    ok!(cuMemRelease(handle));
    // Only the descriptor keeps the memory alive now.
    assert_eq!(free_bytes(), before - PAGE);
    let mut imported = 0;
    ok!(cuMemImportFromShareableHandle(&raw mut imported, i64::from(descriptor), 1));
    // SAFETY: the descriptor is the test's own.
    unsafe { libc::close(descriptor) };
    ok!(cuMemMap(range, PAGE, 0, imported, 0));
    assert_eq!(access(range, PAGE, 3), 0);
    assert_eq!(read::<u64>(range, 1), [0x5eed]);
    ok!(cuMemUnmap(range, PAGE));
    ok!(cuMemRelease(imported));
    ok!(cuMemAddressFree(range, PAGE));
    // A process that another test starts has a copy of the descriptor until its exec.
    eventually("the memory is free", || free_bytes() == before);
    let file = tempfile::tempfile().unwrap();
    let other = std::os::fd::AsRawFd::as_raw_fd(&file);
    assert_eq!(cu!(cuMemImportFromShareableHandle(&raw mut imported, i64::from(other), 1)), INVALID_VALUE);
}

#[test]
fn pinned_and_registered_memory_has_the_same_address_for_the_device() {
    let _context = Context::new();
    let increment = function(module(KERNELS), "increment");
    let flag = Flag::new();
    assert_eq!(launch(increment, 1, 1, 0, &mut [flag.address()]), 0);
    ok!(cuCtxSynchronize());
    assert_eq!(flag.get(), 1);
    let mut kind = 0u32;
    ok!(cuPointerGetAttribute((&raw mut kind).cast(), 2, flag.address()));
    assert_eq!(kind, 1);

    let mut buffer = vec![5u64; 1000];
    let start: *mut c_void = buffer.as_mut_ptr().cast();
    assert_eq!(cu!(cuPointerGetAttribute((&raw mut kind).cast(), 2, start.addr() as u64)), INVALID_VALUE);
    ok!(cuMemHostRegister_v2(start, 8000, 0));
    assert_eq!(cu!(cuMemHostRegister_v2(start, 8, 0)), 712);
    assert_eq!(launch(increment, 1, 1, 0, &mut [start.addr() as u64 + 80]), 0);
    ok!(cuCtxSynchronize());
    assert_eq!(buffer[10], 6);
    assert_eq!(cu!(cuMemHostUnregister(start.wrapping_byte_add(8))), 1, "not its start");
    ok!(cuMemHostUnregister(start));
    assert_eq!(cu!(cuMemHostUnregister(start)), 713);
    assert_eq!(launch(increment, 1, 1, 0, &mut [start.addr() as u64]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    assert_eq!(buffer[0], 5);
}

#[test]
fn copy_never_treats_a_device_address_as_host_memory() {
    let _context = Context::new();
    let block = allocate(PAGE);
    let mut value = [0u8; 16];
    let host = value.as_mut_ptr().addr() as u64;
    // Beyond the end of a mapped page, in an unmapped part of the window.
    assert_eq!(cu!(cuMemcpyDtoH_v2(value.as_mut_ptr().cast(), block + PAGE - 8, 16)), INVALID_VALUE);
    assert_eq!(cu!(cuMemcpy(block + PAGE, host, 16)), INVALID_VALUE);
    assert_eq!(cu!(cuMemcpy(host, block + (8 << 30), 16)), INVALID_VALUE);
    assert_eq!(cu!(cuMemcpy(0, host, 16)), INVALID_VALUE);
    assert_eq!(cu!(cuMemcpyDtoD_v2(block, host, 16)), INVALID_VALUE);
    assert_eq!(cu!(cuMemsetD8_v2(block + PAGE, 0, 1)), INVALID_VALUE);
    assert_eq!(cu!(cuMemsetD32_v2(block + 2, 0, 1)), INVALID_VALUE);
    ok!(cuMemcpy(block, host, 16));
    ok!(cuMemcpy(host, block, 16));
}

#[test]
fn strict_policy_protects_every_byte() {
    let state = new_state();
    for policy in ["mmu", "strict"] {
        let role = format!("policy {}", u8::from(policy == "strict"));
        let mut child = command("memory::one_owner", state.path(), &role)
            .env("SLUICE_SOFTGPU_MEMORY", policy)
            .spawn()
            .unwrap();
        assert!(child.wait().unwrap().success(), "{policy}");
    }
}

#[test]
fn two_devices_share_addresses_for_copies_and_host_memory_but_not_for_kernels() {
    let state = new_state();
    let mut command = command("memory::one_owner", state.path(), "devices 2");
    assert!(command.env("SLUICE_SOFTGPU_DEVICES", "2").status().unwrap().success());
    command.env("CUDA_VISIBLE_DEVICES", "1").env("SOFTGPU_TEST_ROLE", "devices 1");
    assert!(command.status().unwrap().success());
}

const TAG: u64 = 0x7461_6720_7461_6721;

/// Counts the pages in all free memory that begin with the tag.
fn tagged_pages() -> u64 {
    let bytes = free_bytes();
    let all = allocate(bytes);
    let count = (0..bytes / PAGE).filter(|page| read::<u64>(all + page * PAGE, 1)[0] == TAG).count();
    ok!(cuMemFree_v2(all));
    count as u64
}

#[test]
fn next_owner_finds_the_content_that_the_last_one_left() {
    let state = new_state();
    for role in ["look 0", "leave 3", "look 3", "leave-chunk 2", "look 3"] {
        let mut child = start_child("memory::one_owner", state.path(), role);
        assert!(child.wait().unwrap().success(), "{role}");
    }
}

#[test]
fn killed_process_returns_its_memory_uncleared() {
    let state = new_state();
    let mut child = start_child("memory::one_owner", state.path(), "hold 5");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next().unwrap().unwrap() != "holding" {}
    let mut other = start_child("memory::one_owner", state.path(), "short 5");
    assert!(other.wait().unwrap().success());
    child.kill().unwrap();
    child.wait().unwrap();
    let mut other = start_child("memory::one_owner", state.path(), "look 5");
    assert!(other.wait().unwrap().success());
}

#[test]
#[ignore = "a part of the tests with several processes"]
fn one_owner() {
    init();
    let mut context = 0;
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    let role = role();
    let (what, count) = role.split_once(' ').unwrap();
    let count: u64 = count.parse().unwrap();
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    match what {
        "look" => {
            assert_eq!(free, total);
            assert_eq!(tagged_pages(), count);
        }
        "devices" => {
            let mut number = 0;
            ok!(cuDeviceGetCount(&raw mut number));
            assert_eq!(u64::try_from(number), Ok(count));
            // The last device is the same in both runs; its PCI bus proves it.
            ok!(cuDeviceGetAttribute(&raw mut number, 33, i32::try_from(count).unwrap() - 1));
            assert_eq!(number, 2);
            if count == 2 {
                let here = allocate(8);
                write(here, &[42u64]);
                let mut other = 0;
                ok!(cuCtxCreate_v2(&raw mut other, 0, 1));
                let (there, flag) = (allocate(8), Flag::new());
                ok!(cuMemcpyDtoD_v2(there, here, 8));
                assert_eq!(read::<u64>(there, 1), [42]);
                ok!(cuCtxSetCurrent(context));
                let store = function(module(KERNELS), "store");
                assert_eq!(launch(store, 1, 1, 0, &mut [flag.address(), 5]), 0);
                ok!(cuCtxSynchronize());
                assert_eq!(flag.get(), 5);
                // All devices share managed memory and managed variables, but each has a pool of its own.
                let (mut shared, mut pools) = (0, [0; 2]);
                ok!(cuMemAllocManaged(&raw mut shared, 8, 1));
                let variables = module(".visible .global .attribute(.managed) .align 8 .u64 word;\n");
                let (mut variable, mut bytes) = (0, 0);
                let name = text("word");
                ok!(cuModuleGetGlobal_v2(&raw mut variable, &raw mut bytes, variables, name.as_ptr()));
                ok!(cuDeviceGetDefaultMemPool(&raw mut pools[0], 0));
                ok!(cuDeviceGetDefaultMemPool(&raw mut pools[1], 1));
                assert_ne!(pools[0], pools[1]);
                assert_eq!(cu!(cuMemAllocFromPoolAsync(&raw mut free, 8, pools[1], 0)), INVALID_VALUE);
                let mut pooled = 0;
                for (place, context) in [(5, context), (6, other)] {
                    ok!(cuCtxSetCurrent(context));
                    let store = function(module(KERNELS), "store");
                    ok!(cuMemAllocAsync(&raw mut pooled, 8, 0));
                    assert_eq!(pointer(pooled, 17), Ok(pools[place - 5]));
                    assert_eq!(pointer(pooled, 9), Ok(place as u64 - 5));
                    assert_eq!(launch(store, 1, 1, 0, &mut [pooled, place as u64]), 0);
                    assert_eq!(launch(store, 1, 1, 0, &mut [shared, place as u64]), 0);
                    assert_eq!(launch(store, 1, 1, 0, &mut [variable, place as u64]), 0);
                    ok!(cuCtxSynchronize());
                    for address in [pooled, shared, variable] {
                        assert_eq!(read::<u64>(address, 1), [place as u64]);
                    }
                }
                ok!(cuCtxSetCurrent(context));
                ok!(cuModuleUnload(variables));
                assert_eq!(launch(store, 1, 1, 0, &mut [pooled, 5]), 0);
                assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
                ok!(cuCtxSetCurrent(other));
                ok!(cuCtxSynchronize());
            }
        }
        "policy" => {
            let strict = count == 1;
            let store = function(module(KERNELS), "store");
            let (block, neighbour) = (allocate(100), allocate(8));
            ok!(cuMemFree_v2(neighbour));
            assert_eq!(launch(store, 1, 1, 0, &mut [block + 88, 1]), 0);
            ok!(cuCtxSynchronize());
            let mut value = 0u64;
            let over = cu!(cuMemcpyDtoH_v2(ptr::from_mut(&mut value).cast(), block + 96, 8));
            // A copy keeps to the allocation under either policy; a kernel reaches the rest of the page.
            assert_eq!(over, INVALID_VALUE);
            assert_eq!(launch(store, 1, 1, 0, &mut [neighbour, 1]), 0);
            assert_eq!(cu!(cuCtxSynchronize()), if strict { ILLEGAL_ADDRESS } else { 0 });
        }
        "short" => assert_eq!(free, total - count * PAGE),
        "leave" | "hold" => {
            let block = allocate(count * PAGE);
            for page in 0..count {
                write(block + page * PAGE, &[TAG]);
            }
            if what == "hold" {
                // SAFETY: makes the kernel kill this process when its parent dies, in case the test fails.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                println!("\nholding");
                loop {
                    std::thread::park();
                }
            }
        }
        "leave-chunk" => {
            let handle = create(count * PAGE);
            let range = reserve(count * PAGE, 0);
            ok!(cuMemMap(range, count * PAGE, 0, handle, 0));
            assert_eq!(access(range, count * PAGE, 3), 0);
            for page in 0..count {
                assert_eq!(read::<u64>(range + page * PAGE, 1), [TAG], "the same pages come first");
                write(range + page * PAGE, &[TAG]);
            }
        }
        other => panic!("{other}"),
    }
}

//! Modules, libraries, launches and copies through the C interface.

use std::ffi::c_void;
use std::ptr;

use crate::support::*;

#[test]
fn vector_addition_returns_the_sums() {
    let _context = Context::new();
    let add = function(module(KERNELS), "vector_add");
    let n = 100_003usize;
    let blocks = u32::try_from(n.div_ceil(256)).unwrap();
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let b: Vec<f32> = (0..n).map(|i| 1000.0 - i as f32).collect();
    let bytes = n as u64 * 4;
    let (da, db, dc) = (allocate(bytes), allocate(bytes), allocate(bytes));
    write(da, &a);
    write(db, &b);
    assert_eq!(launch(add, blocks, 256, 0, &mut [da, db, dc, n as u64]), 0);
    let c: Vec<f32> = read(dc, n);
    for i in 0..n {
        assert_eq!(c[i], a[i] + b[i], "element {i}");
    }
}

#[test]
fn library_kernel_launches_like_a_function_and_takes_a_parameter_buffer() {
    let context = Context::new();
    let source = ptx(KERNELS);
    let (mut library, mut kernel, mut function) = (0, 0, 0);
    let none = ptr::null();
    ok!(cuLibraryLoadData(
        &raw mut library,
        source.as_ptr().cast(),
        ptr::null(),
        none,
        0,
        ptr::null(),
        none,
        0
    ));
    let name = text("store");
    ok!(cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()));
    let (mut offset, mut size) = (9, 9);
    ok!(cuKernelGetParamInfo(kernel, 1, &raw mut offset, &raw mut size));
    assert_eq!((offset, size), (8, 8));
    assert_eq!(cu!(cuKernelGetParamInfo(kernel, 2, &raw mut offset, &raw mut size)), INVALID_VALUE);
    assert_eq!((offset, size), (8, 8), "nothing is written on failure");
    let mut current = 0;
    ok!(cuCtxGetCurrent(&raw mut current));
    let (mut threads, device) = (0, 0);
    ok!(cuKernelGetAttribute(&raw mut threads, 0, kernel, device));
    assert!(threads > 0);
    ok!(cuCtxSetCurrent(0));
    assert_eq!(cu!(cuKernelGetAttribute(&raw mut threads, 0, kernel, device)), INVALID_CONTEXT);
    ok!(cuCtxSetCurrent(current));

    let word = allocate(8);
    let mut buffer = [word, 0x1234_5678_9abc_def0];
    let mut bytes = size_of_val(&buffer);
    let mut short = bytes - 1;
    let mut extra: [*mut c_void; 5] = [
        ptr::without_provenance_mut(1),
        buffer.as_mut_ptr().cast(),
        ptr::without_provenance_mut(2),
        ptr::from_mut(&mut bytes).cast(),
        ptr::null_mut(),
    ];
    ok!(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ptr::null_mut(), extra.as_mut_ptr()));
    assert_eq!(read::<u64>(word, 1), [0x1234_5678_9abc_def0]);
    extra[3] = ptr::from_mut(&mut short).cast();
    assert_eq!(
        cu!(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ptr::null_mut(), extra.as_mut_ptr())),
        INVALID_VALUE
    );

    ok!(cuKernelGetFunction(&raw mut function, kernel));
    assert_eq!(launch(function, 1, 1, 0, &mut [word, 7]), 0);
    assert_eq!(read::<u64>(word, 1), [7]);

    // The same kernel is a different function in another context.
    let mut other = 0;
    ok!(cuCtxCreate_v2(&raw mut other, 0, 0));
    assert_eq!(launch(function, 1, 1, 0, &mut [word, 8]), INVALID_HANDLE);
    let there = allocate(8);
    assert_eq!(launch(kernel, 1, 1, 0, &mut [there, 9]), 0);
    assert_eq!(read::<u64>(there, 1), [9]);
    ok!(cuCtxDestroy_v2(other));
    ok!(cuCtxSetCurrent(context.handle));

    ok!(cuLibraryUnload(library));
    assert_eq!(launch(kernel, 1, 1, 0, &mut [word, 9]), INVALID_HANDLE);
}

#[test]
fn variables_of_a_module_have_addresses_and_initial_values() {
    let _context = Context::new();
    let body = "
        .visible .global .align 8 .u64 numbers[3] = {3, 5, 7};
        .visible .const .align 4 .u32 constant = 11;
        .visible .global .align 4 .u32 empty[4];
        .visible .entry sum(.param .u64 to)
        {
            .reg .b64 %rd<6>; .reg .b32 %r<1>;
            ld.param.u64 %rd0, [to];
            ld.global.u64 %rd1, [numbers]; ld.global.u64 %rd2, [numbers+8]; ld.global.u64 %rd3, [numbers+16];
            add.u64 %rd1, %rd1, %rd2; add.u64 %rd1, %rd1, %rd3;
            ld.const.u32 %r0, [constant]; cvt.u64.u32 %rd4, %r0; add.u64 %rd1, %rd1, %rd4;
            st.global.u64 [%rd0], %rd1;
            ret;
        }";
    let module = module(body);
    let (mut address, mut bytes) = (0, 0);
    let name = text("numbers");
    ok!(cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name.as_ptr()));
    assert_eq!(bytes, 24);
    assert_eq!(read::<u64>(address, 3), [3, 5, 7]);
    let name = text("empty");
    let mut empty = 0;
    ok!(cuModuleGetGlobal_v2(&raw mut empty, ptr::null_mut(), module, name.as_ptr()));
    assert_eq!(read::<u32>(empty, 4), [0; 4]);
    let sum = function(module, "sum");
    let word = allocate(8);
    write(address, &[100u64]);
    assert_eq!(launch(sum, 1, 1, 0, &mut [word]), 0);
    assert_eq!(read::<u64>(word, 1), [100 + 5 + 7 + 11]);
    let name = text("nothing like it");
    assert_eq!(cu!(cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name.as_ptr())), NOT_FOUND);
    ok!(cuModuleUnload(module));
    assert_eq!(launch(sum, 1, 1, 0, &mut [word]), INVALID_HANDLE);
}

#[test]
fn compiler_log_names_the_error_and_its_line() {
    let _context = Context::new();
    let source = text(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f()\n{\n    frobnicate.u32;\n}\n",
    );
    let mut log = vec![0u8; 400];
    let keys = [5u32, 6];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
    let mut module = 77;
    let code = cu!(cuModuleLoadDataEx(
        &raw mut module,
        source.as_ptr().cast(),
        2,
        keys.as_ptr(),
        values.as_mut_ptr()
    ));
    assert_eq!(code, INVALID_PTX);
    assert_eq!(module, 77);
    let used = values[1].addr() & 0xffff_ffff;
    let message = std::str::from_utf8(&log[..used - 1]).unwrap();
    assert!(message.contains("frobnicate") && message.contains('6'), "{message}");
}

#[test]
fn images_without_ptx_for_this_device_are_refused() {
    let _context = Context::new();
    let mut module = 0;
    let newer = text(".version 8.0\n.target sm_90\n.address_size 64\n");
    assert_eq!(cu!(cuModuleLoadData(&raw mut module, newer.as_ptr().cast())), NO_BINARY);
    let text = text("this is no image at all");
    assert_eq!(cu!(cuModuleLoadData(&raw mut module, text.as_ptr().cast())), INVALID_IMAGE);
    assert_eq!(cu!(cuModuleLoadData(&raw mut module, ptr::null())), INVALID_VALUE);
}

// Promise: S91
#[test]
fn library_of_no_known_image_is_refused_when_it_is_used() {
    let _context = Context::new();
    let (mut library, mut kernel, mut module) = (0, 0, 0);
    let (image, name) = (text("this is no image at all"), text("kernel"));
    let (keys, values) = (ptr::null(), ptr::null());
    let load = |library: *mut u64, image: *const c_void| {
        cu!(cuLibraryLoadData(library, image, keys, values, 0, ptr::null(), ptr::null(), 0))
    };
    assert_eq!(load(&raw mut library, image.as_ptr().cast()), 0);
    assert_eq!(cu!(cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr())), INVALID_IMAGE);
    assert_eq!(cu!(cuLibraryGetModule(&raw mut module, library)), INVALID_IMAGE);
    ok!(cuLibraryUnload(library));
    assert_eq!(cu!(cuLibraryUnload(library)), INVALID_HANDLE);
    let broken = text(".version 8.0\n.target sm_80\n.address_size 64\n.nonsense\n");
    assert_eq!(load(&raw mut library, broken.as_ptr().cast()), INVALID_PTX);
}

#[test]
fn copy_in_two_dimensions_preserves_bytes_between_rows() {
    let _context = Context::new();
    let device = allocate(64 * 8);
    ok!(cuMemsetD8_v2(device, 0xee, 64 * 8));
    let host: Vec<u8> = (0..5 * 10).collect();
    // x, y, kind, host, device, array, pitch of both sides, then width and height.
    let from = [2, 1, 1, host.as_ptr().addr() as u64, 0, 0, 10];
    let to = [3, 2, 2, 0, device, 0, 64];
    let mut request = [0u64; 16];
    request[..7].copy_from_slice(&from);
    request[7..14].copy_from_slice(&to);
    request[14..].copy_from_slice(&[7, 3]);
    ok!(cuMemcpy2D_v2(&raw const request));
    let result: Vec<u8> = read(device, 64 * 8);
    for (place, byte) in result.iter().enumerate() {
        let (row, column) = (place / 64, place % 64);
        let inside = (2..5).contains(&row) && (3..10).contains(&column);
        let expected = if inside { host[(row - 2 + 1) * 10 + column - 3 + 2] } else { 0xee };
        assert_eq!(*byte, expected, "row {row}, column {column}");
    }
    request[13] = 9; // A pitch smaller than a row.
    assert_eq!(cu!(cuMemcpy2D_v2(&raw const request)), INVALID_VALUE);
    ok!(cuMemsetD2D16_v2(device, 64, 0x1234, 4, 2));
    assert_eq!(read::<u16>(device, 5), [0x1234, 0x1234, 0x1234, 0x1234, 0xeeee]);
    assert_eq!(cu!(cuMemsetD2D16_v2(device + 1, 64, 0x1234, 4, 2)), INVALID_VALUE);
}

#[test]
fn asynchronous_copy_reads_a_pageable_source_at_the_call_and_a_pinned_one_later() {
    let _context = Context::new();
    let spin = function(module(KERNELS), "spin");
    let flag = Flag::new();
    let held = stream(1);
    assert_eq!(launch(spin, 1, 1, held, &mut [flag.address()]), 0);
    let device = allocate(16);
    let mut pageable = [1u64];
    let pinned = Flag::new();
    pinned.set(1);
    ok!(cuMemcpyHtoDAsync_v2(device, pageable.as_ptr().cast(), 8, held));
    ok!(cuMemcpyHtoDAsync_v2(device + 8, pinned.pointer(), 8, held));
    pageable[0] = 2;
    pinned.set(2);
    flag.set(1);
    ok!(cuStreamSynchronize(held));
    assert_eq!(read::<u64>(device, 2), [1, 2]);
    assert_eq!(pageable[0], 2);
}

#[test]
fn unsupported_call_returns_not_supported_and_writes_nothing() {
    init();
    let mut place = 5;
    assert_eq!(cu!(cuMulticastCreate(&raw mut place, ptr::null())), NOT_SUPPORTED);
    assert_eq!(place, 5);
}

#[test]
fn symbol_lookup_returns_the_form_for_the_version() {
    init();
    let (mut place, mut status) = (ptr::null(), 9);
    let name = text("cuMemAlloc");
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut place, 13050, 0, &raw mut status));
    assert_eq!((place, status), (cuMemAlloc_v2 as *const c_void, 0));
    let name = text("cuCtxGetId");
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut place, 11000, 0, &raw mut status));
    assert_eq!((place, status), (ptr::null(), 2));
    let name = text("cuNothing");
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut place, 13050, 0, &raw mut status));
    assert_eq!((place, status), (ptr::null(), 1));
    place = (&raw const status).cast();
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut place, 13050, 0, ptr::null_mut()));
    assert_eq!(place, ptr::null(), "without a place for the status");
    assert_eq!(
        cu!(cuGetProcAddress_v2(name.as_ptr(), &raw mut place, 99999, 0, &raw mut status)),
        INVALID_VALUE
    );
}

#[test]
fn every_attribute_of_the_header_returns_a_value() {
    init();
    for attribute in 1..=161 {
        let mut value = 0;
        assert_eq!(cu!(cuDeviceGetAttribute(&raw mut value, attribute, 0)), 0, "{attribute}");
    }
    let mut value = 0;
    assert_eq!(cu!(cuDeviceGetAttribute(&raw mut value, 0, 0)), INVALID_VALUE);
    assert_eq!(cu!(cuDeviceGetAttribute(&raw mut value, 5000, 0)), INVALID_VALUE);
    ok!(cuDeviceGetAttribute(&raw mut value, 75, 0));
    assert_eq!(value, 8);
}

#[test]
fn image_that_ends_at_unreadable_memory_loads() {
    let _context = Context::new();
    let source = ptx(".visible .entry nothing() { ret; }");
    let text = source.as_bytes_with_nul();
    // SAFETY: a new mapping of three pages.
    let start = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(ptr::null_mut(), 3 << 12, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(start, libc::MAP_FAILED);
    let end = start.cast::<u8>().wrapping_add(2 << 12);
    // An address that is free could be taken by another test.
    // SAFETY: the last page of the mapping made above.
    assert_eq!(unsafe { libc::mprotect(end.cast(), 1 << 12, libc::PROT_NONE) }, 0);
    for behind in [0, 1, 7, 100, 4090] {
        let place = end.wrapping_sub(text.len() + behind);
        // SAFETY: the address lies in the two remaining pages, with room for the text.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
        let mut module = 0;
        ok!(cuModuleLoadData(&raw mut module, place.cast_const().cast()));
        ok!(cuModuleUnload(module));
    }
}

/// Three times, each block adds 1 to a number of its own, and after a barrier of the grid each thread adds all numbers to its total.
const GRID_GROUP: &str = "
    .extern .func (.param .b64 handle) cudaCGGetIntrinsicHandle(.param .b32 scope);
    .extern .func (.param .b32 status) cudaCGSynchronize(.param .b64 handle, .param .b32 flags);
    .extern .func (.param .b32 status) cudaCGGetSize(.param .b64 threads, .param .b64 grids, .param .b64 handle);
    .extern .func (.param .b32 status) cudaCGGetRank(.param .b64 thread, .param .b64 grid, .param .b64 handle);
    .visible .entry meet(.param .u64 numbers, .param .u64 results)
    {
        .reg .b32 %r, %k, %n, %total, %statuses, %thread, %block, %blocks, %x, %y;
        .reg .b64 %h, %d, %numbers, %to, %at, %own;
        .reg .pred %p, %first;
        ld.param.u64 %numbers, [numbers];
        ld.param.u64 %to, [results];
        mov.u32 %thread, %tid.x; mov.u32 %y, %tid.y; mov.u32 %x, %ntid.x; mad.lo.u32 %thread, %y, %x, %thread;
        mov.u32 %block, %ctaid.x; mov.u32 %blocks, %nctaid.x;
        mov.u32 %y, %ntid.y; mul.lo.u32 %x, %x, %y; mad.lo.u32 %x, %block, %x, %thread;
        mad.wide.u32 %to, %x, 24, %to;
        mad.wide.u32 %own, %block, 4, %numbers;
        setp.eq.u32 %first, %thread, 0;
        call.uni (%h), cudaCGGetIntrinsicHandle, (1);
        mov.u32 %total, 0; mov.u32 %statuses, 0; mov.u32 %k, 0;
    rounds:
        @!%first bra numbered;
        ld.u32 %n, [%own]; add.u32 %n, %n, 1; st.u32 [%own], %n;
    numbered:
        call.uni (%r), cudaCGSynchronize, (%h, 0);
        add.u32 %statuses, %statuses, %r;
        mov.u32 %n, 0; mov.u64 %at, %numbers;
    sums:
        ld.volatile.u32 %x, [%at]; add.u32 %total, %total, %x;
        add.u64 %at, %at, 4; add.u32 %n, %n, 1;
        setp.lt.u32 %p, %n, %blocks; @%p bra sums;
        call.uni (%r), cudaCGSynchronize, (%h, 0);
        add.u32 %statuses, %statuses, %r;
        add.u32 %k, %k, 1; setp.lt.u32 %p, %k, 3; @%p bra rounds;
        st.u32 [%to], %total;
        add.u64 %at, %to, 8; add.u64 %d, %to, 12;
        call.uni (%r), cudaCGGetSize, (%at, %d, %h);
        add.u32 %statuses, %statuses, %r;
        add.u64 %at, %to, 16; add.u64 %d, %to, 20;
        call.uni (%r), cudaCGGetRank, (%at, %d, %h);
        add.u32 %statuses, %statuses, %r;
        st.u32 [%to+4], %statuses;
        ret;
    }";

// Promise: S92
#[test]
fn blocks_of_a_cooperative_launch_meet_by_functions_of_the_device_runtime() {
    let _context = Context::new();
    let (mut link, mut image, mut bytes, mut module) = (0, ptr::null(), 0, 0);
    let (none, name) = (ptr::null_mut(), text("input"));
    ok!(cuLinkCreate_v2(0, ptr::null(), none, &raw mut link));
    // The vendor's archive has machine code and no text.
    let archive = text("!<arch>\n//              cuda_device_runtime.o/\n");
    for (kind, data) in [(1, ptx(GRID_GROUP)), (4, archive)] {
        let (data, bytes) = (data.as_ptr().cast(), data.as_bytes().len() as u64);
        ok!(cuLinkAddData_v2(link, kind, data, bytes, name.as_ptr(), 0, ptr::null(), none));
    }
    ok!(cuLinkComplete(link, &raw mut image, &raw mut bytes));
    ok!(cuModuleLoadData(&raw mut module, image));
    ok!(cuLinkDestroy(link));
    let meet = function(module, "meet");

    let (blocks, threads) = (6, 64);
    let numbers = allocate(u64::from(blocks) * 4);
    let results = allocate(u64::from(blocks * threads) * 24);
    let mut values = [numbers, results];
    let mut pointers = values.each_mut().map(|value| ptr::from_mut(value).cast());
    for _ in 0..3 {
        write(numbers, &[0u32; 6]);
        ok!(cuLaunchCooperativeKernel(meet, blocks, 1, 1, 32, 2, 1, 0, 0, pointers.as_mut_ptr()));
        ok!(cuCtxSynchronize());
        for (thread, result) in (0..).zip(read::<[u32; 6]>(results, 384)) {
            assert_eq!(result, [6 * (1 + 2 + 3), 0, 384, 1, thread, 0], "thread {thread}");
        }
    }
    // Another launch has no barrier of the grid, and each function says so.
    assert_eq!(launch(meet, blocks, threads, 0, &mut [numbers, results]), 0);
    ok!(cuCtxSynchronize());
    assert!(read::<[u32; 6]>(results, 384).iter().all(|result| result[1] == 8));
}

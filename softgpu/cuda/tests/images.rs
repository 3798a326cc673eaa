//! Arrays, textures and surfaces: their memory, copies, and the ends of their lives.

use std::ffi::c_void;
use std::ptr;

use crate::support::*;

const FLOAT: u32 = 0x20;
const SURFACE: u32 = 2;
const HOST: u32 = 1;
const ARRAY: u32 = 3;

/// Kernels that read a texture of two dimensions and a linear one, and that write a surface. The last two use references.
const IMAGES: &str = r"
.global .texref image;
.global .surfref canvas;
.visible .entry fetch(.param .u64 texture, .param .u64 to)
{
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .f32 %f<8>;
    ld.param.u64 %rd0, [texture]; ld.param.u64 %rd1, [to];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    cvt.rn.f32.u32 %f0, %r0; cvt.rn.f32.u32 %f1, %r1;
    add.f32 %f0, %f0, 0f3F000000; add.f32 %f1, %f1, 0f3F000000;
    tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd0, {%f0, %f1}];
    mad.lo.u32 %r3, %r1, %r2, %r0;
    mul.wide.u32 %rd2, %r3, 4; add.u64 %rd1, %rd1, %rd2;
    st.global.f32 [%rd1], %f2;
    ret;
}
.visible .entry fetch_linear(.param .u64 texture, .param .u64 to)
{
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .f32 %f<8>;
    ld.param.u64 %rd0, [texture]; ld.param.u64 %rd1, [to];
    mov.u32 %r0, %tid.x;
    tex.1d.v4.f32.s32 {%f2, %f3, %f4, %f5}, [%rd0, {%r0}];
    mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2;
    st.global.f32 [%rd1], %f2;
    ret;
}
.visible .entry draw(.param .u64 surface)
{
    .reg .b64 %rd<2>; .reg .b32 %r<8>;
    ld.param.u64 %rd0, [surface];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
    shl.b32 %r2, %r0, 2;
    mad.lo.u32 %r3, %r1, 100, %r0;
    sust.b.2d.b32.trap [%rd0, {%r2, %r1}], {%r3};
    ret;
}
.visible .entry fetch_reference(.param .u64 to)
{
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .f32 %f<8>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r0, %tid.x;
    tex.1d.v4.f32.s32 {%f2, %f3, %f4, %f5}, [image, {%r0}];
    mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2;
    st.global.f32 [%rd1], %f2;
    ret;
}
.visible .entry draw_reference()
{
    .reg .b32 %r<4>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
    shl.b32 %r2, %r0, 2;
    sust.b.2d.b32.trap [canvas, {%r2, %r1}], {%r0};
    ret;
}
";

fn description(width: u64, height: u64, depth: u64, flags: u32) -> ArrayDescription {
    ArrayDescription { width, height, depth, format: FLOAT, channels: 1, flags }
}

fn array(width: u64, height: u64, depth: u64, flags: u32) -> u64 {
    let mut array = 0;
    ok!(cuArray3DCreate_v2(&raw mut array, &description(width, height, depth, flags)));
    array
}

fn over(array: u64) -> ResourceDescription {
    ResourceDescription { object: array, ..Default::default() }
}

fn texture(resource: &ResourceDescription) -> u64 {
    let mut object = 0;
    // The filter is that of points, and coordinates clamp.
    let sampling = TextureDescription { modes: [1; 3], ..Default::default() };
    ok!(cuTexObjectCreate(&raw mut object, resource, &sampling, ptr::null()));
    object
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|number| number as f32 + 0.25).collect()
}

fn host(values: *const f32, row: u64, rows: u64) -> CopySide {
    CopySide { kind: HOST, host: values.addr() as u64, pitch: row, height: rows, ..Default::default() }
}

fn inside(array: u64, origin: [u64; 3]) -> CopySide {
    CopySide { kind: ARRAY, array, origin, ..Default::default() }
}

fn copy(from: CopySide, to: CopySide, extent: [u64; 3]) -> u32 {
    cu!(cuMemcpy3D_v2(&BoxCopy { from, to, extent }))
}

/// Reads a box of an array as rows without gaps.
fn read_box(array: u64, origin: [u64; 3], extent: [u64; 3]) -> Vec<f32> {
    let count = usize::try_from(extent[0] / 4 * extent[1] * extent[2]).unwrap();
    let mut values = vec![-1.0; count];
    let to = host(values.as_mut_ptr(), extent[0], extent[1]);
    assert_eq!(copy(inside(array, origin), to, extent), 0);
    values
}

// Promise: C84
#[test]
fn copies_in_all_directions_keep_to_their_box_of_an_array() {
    let _context = Context::new();
    let volume = array(8, 4, 3, 0);
    let all = numbers(96);
    assert_eq!(copy(host(all.as_ptr(), 32, 4), inside(volume, [0; 3]), [32, 4, 3]), 0);
    assert_eq!(read_box(volume, [0; 3], [32, 4, 3]), all);
    // A box in the middle.
    let part = [100.0, 101.0, 102.0, 103.0];
    assert_eq!(copy(host(part.as_ptr(), 8, 2), inside(volume, [8, 1, 2]), [8, 2, 1]), 0);
    let mut expected = all.clone();
    for (row, pair) in part.chunks(2).enumerate() {
        let place = 2 * 32 + (1 + row) * 8 + 2;
        expected[place..place + 2].copy_from_slice(pair);
    }
    assert_eq!(read_box(volume, [0; 3], [32, 4, 3]), expected);
    // From array to array.
    let other = array(8, 4, 3, 0);
    assert_eq!(copy(inside(volume, [0; 3]), inside(other, [0; 3]), [32, 4, 3]), 0);
    assert_eq!(read_box(other, [8, 1, 2], [8, 2, 1]), part);
    for (origin, extent) in [([4, 0, 0], [32, 1, 1]), ([0, 3, 0], [4, 2, 1]), ([30, 0, 0], [4, 1, 1])] {
        assert_eq!(copy(host(all.as_ptr(), 0, 0), inside(volume, origin), extent), INVALID_VALUE);
    }
    // Arrays of one dimension have functions of their own.
    let (line, second) = (array(16, 0, 0, 0), array(16, 0, 0, 0));
    ok!(cuMemcpyHtoA_v2(line, 8, all.as_ptr().cast(), 40));
    let linear = allocate(64);
    ok!(cuMemcpyAtoD_v2(linear, line, 8, 40));
    assert_eq!(read::<f32>(linear, 10), all[..10]);
    ok!(cuMemcpyDtoA_v2(second, 0, linear, 40));
    ok!(cuMemcpyAtoA_v2(second, 40, line, 12, 8));
    let mut values = [0.0f32; 12];
    ok!(cuMemcpyAtoH_v2(values.as_mut_ptr().cast(), second, 0, 48));
    assert_eq!(values[..10], all[..10]);
    assert_eq!(values[10..], all[1..3]);
    // Bytes 2 to 5 of a row, which are parts of two elements.
    let parts = [9u8, 8, 7, 6];
    ok!(cuMemcpyHtoA_v2(second, 2, parts.as_ptr().cast(), 4));
    ok!(cuMemcpyAtoH_v2(values.as_mut_ptr().cast(), second, 0, 8));
    let bytes = [values[0], values[1]].map(f32::to_ne_bytes);
    let first = [all[0], all[1]].map(f32::to_ne_bytes);
    assert_eq!(bytes.as_flattened()[2..6], parts);
    assert_eq!(
        (bytes[0][..2].to_vec(), bytes[1][2..].to_vec()),
        (first[0][..2].to_vec(), first[1][2..].to_vec())
    );
    assert_eq!(cu!(cuMemcpyHtoA_v2(line, 60, all.as_ptr().cast(), 8)), INVALID_VALUE);
    assert_eq!(cu!(cuMemcpyHtoA_v2(line + 1, 0, all.as_ptr().cast(), 8)), INVALID_HANDLE);
    let stream = stream(1);
    ok!(cuMemcpyHtoAAsync_v2(line, 0, all[20..].as_ptr().cast(), 64, stream));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(read_box(line, [0; 3], [64, 1, 1]), all[20..36]);
}

// Promise: C84
#[test]
fn batch_of_boxes_counts_elements_of_its_arrays() {
    let _context = Context::new();
    let (plane, stream) = (array(8, 4, 0, 0), stream(1));
    let linear = allocate(128);
    let all = numbers(32);
    write(linear, &all);
    let pointer = |address, row| BatchOperand { kind: 1, words: [address, row, 0, 0] };
    let element = |array, x, y| BatchOperand { kind: 2, words: [array, x, y, 0] };
    let one = |from, to, extent| BatchCopy { from, to, extent, order: 1, flags: 0 };
    let whole = one(pointer(linear, 8), element(plane, 0, 0), [8, 4, 1]);
    ok!(cuMemcpy3DBatchAsync_v2(1, &whole, 0, stream));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(read_box(plane, [0; 3], [32, 4, 1]), all);
    let back = allocate(64);
    let part = one(element(plane, 2, 1), pointer(back, 0), [3, 2, 1]);
    ok!(cuMemcpy3DBatchAsync_v2(1, &part, 0, stream));
    ok!(cuStreamSynchronize(stream));
    let expected = [all[10..13].to_vec(), all[18..21].to_vec()].concat();
    assert_eq!(read::<f32>(back, 6), expected);
    let beyond = one(element(plane, 6, 0), pointer(back, 0), [3, 1, 1]);
    assert_eq!(cu!(cuMemcpy3DBatchAsync_v2(1, &beyond, 0, stream)), INVALID_VALUE);
}

// Promise: C80
#[test]
fn kernel_reads_the_elements_of_an_array_and_writes_them_by_a_surface() {
    let _context = Context::new();
    let module = module(IMAGES);
    let plane = array(5, 3, 0, SURFACE);
    let all = numbers(15);
    assert_eq!(copy(host(all.as_ptr(), 20, 3), inside(plane, [0; 3]), [20, 3, 1]), 0);
    let object = texture(&over(plane));
    let to = allocate(60);
    assert_eq!(launch(function(module, "fetch"), 3, 5, 0, &mut [object, to]), 0);
    assert_eq!(read::<f32>(to, 15), all);
    let mut described = ResourceDescription::default();
    ok!(cuTexObjectGetResourceDesc(&raw mut described, object));
    assert_eq!(described, over(plane));

    let mut surface = 0;
    ok!(cuSurfObjectCreate(&raw mut surface, &over(plane)));
    assert_eq!(launch(function(module, "draw"), 3, 5, 0, &mut [surface]), 0);
    ok!(cuCtxSynchronize());
    let drawn: Vec<u32> = read_box(plane, [0; 3], [20, 3, 1]).iter().map(|value| value.to_bits()).collect();
    let expected: Vec<u32> = (0..15).map(|place| place / 5 * 100 + place % 5).collect();
    assert_eq!(drawn, expected);
    ok!(cuSurfObjectDestroy(surface));
    ok!(cuTexObjectDestroy(object));
    ok!(cuTexObjectDestroy(object));

    let plain = array(5, 3, 0, 0);
    ok!(cuSurfObjectCreate(&raw mut surface, &over(plain)));
    assert_eq!(launch(function(module, "draw"), 3, 5, 0, &mut [surface]), 0);
    ok!(cuCtxSynchronize());
    let drawn: Vec<u32> = read_box(plain, [0; 3], [20, 3, 1]).iter().map(|value| value.to_bits()).collect();
    assert_eq!(drawn, expected, "an array that was not made for surfaces");
}

// Promise: C80
#[test]
fn linear_memory_is_a_texture_and_must_be_the_devices() {
    let _context = Context::new();
    let module = module(IMAGES);
    let all = numbers(20);
    let (from, to) = (allocate(80), allocate(80));
    write(from, &all);
    let linear = |address, bytes| ResourceDescription {
        kind: 2,
        object: address,
        format: FLOAT,
        channels: 1,
        extents: [bytes, 0, 0],
        ..Default::default()
    };
    let object = texture(&linear(from, 80));
    assert_eq!(launch(function(module, "fetch_linear"), 1, 20, 0, &mut [object, to]), 0);
    assert_eq!(read::<f32>(to, 20), all);
    let mut refused = 7;
    let sampling = TextureDescription::default();
    for wrong in [linear(from + 4, 64), linear(1 << 20, 64), linear(from, 2 << 30), linear(from, 0)] {
        let code = cu!(cuTexObjectCreate(&raw mut refused, &wrong, &sampling, ptr::null()));
        assert_eq!((code, refused), (INVALID_VALUE, 7), "{wrong:?}");
    }
}

// Promise: C81
#[test]
fn texture_of_a_destroyed_array_faults_its_launch() {
    let context = Context::new();
    let kernel = |context: u64| {
        ok!(cuCtxSetCurrent(context));
        function(module(IMAGES), "fetch")
    };
    let mut doomed = 0;
    ok!(cuCtxCreate_v2(&raw mut doomed, 0, 0));
    let fetch = kernel(doomed);
    let plane = array(5, 3, 0, 0);
    let object = texture(&over(plane));
    ok!(cuArrayDestroy(plane));
    assert_eq!(cu!(cuArrayDestroy(plane)), INVALID_HANDLE);
    // Another array may have got the memory.
    let secret = array(5, 3, 0, 0);
    let all = numbers(15);
    assert_eq!(copy(host(all.as_ptr(), 20, 3), inside(secret, [0; 3]), [20, 3, 1]), 0);
    let to = allocate(60);
    assert_eq!(launch(fetch, 3, 5, 0, &mut [object, to]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    ok!(cuCtxDestroy_v2(doomed));

    // An object of one context is none in another.
    ok!(cuCtxSetCurrent(context.handle));
    let object = texture(&over(array(5, 3, 0, 0)));
    ok!(cuCtxCreate_v2(&raw mut doomed, 0, 0));
    let fetch = kernel(doomed);
    let to = allocate(60);
    assert_eq!(launch(fetch, 3, 5, 0, &mut [object, to]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    ok!(cuCtxDestroy_v2(doomed));
    ok!(cuCtxSetCurrent(context.handle));
}

// Promise: C81
#[test]
fn destruction_waits_for_copies_and_graphs_refuse_the_array_afterwards() {
    let _context = Context::new();
    let spin = function(module(KERNELS), "spin");
    let (flag, stream) = (Flag::new(), stream(1));
    let line = array(16, 0, 0, 0);
    let target = allocate(64);
    write(target, &[7.0f32; 16]);
    let all = numbers(16);
    ok!(cuMemcpyHtoA_v2(line, 0, all.as_ptr().cast(), 64));
    // A graph that copies from the array.
    let (mut graph, mut node, mut executable) = (0, 0, 0);
    ok!(cuGraphCreate(&raw mut graph, 0));
    let mut context = 0;
    ok!(cuCtxGetCurrent(&raw mut context));
    let to = CopySide { kind: 2, device: target, ..Default::default() };
    let work = BoxCopy { from: inside(line, [0; 3]), to, extent: [64, 1, 1] };
    // SAFETY: both are the words of `CUDA_MEMCPY3D`.
    let words = unsafe { std::mem::transmute::<BoxCopy, [u64; 25]>(work) };
    ok!(cuGraphAddMemcpyNode(&raw mut node, graph, ptr::null(), 0, &words, context));
    ok!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
    ok!(cuGraphLaunch(executable, stream));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(read::<f32>(target, 16), all);

    assert_eq!(launch(spin, 1, 1, stream, &mut [flag.address()]), 0);
    ok!(cuMemcpyHtoAAsync_v2(line, 0, [5.0f32; 16].as_ptr().cast(), 64, stream));
    let address = flag.address();
    let release = std::thread::spawn(move || {
        a_moment();
        // SAFETY: the word lives until the context ends, after this thread.
        let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(address as *mut u64) };
        word.store(1, std::sync::atomic::Ordering::SeqCst);
    });
    ok!(cuArrayDestroy(line));
    assert_eq!(flag.get(), 1, "the call returned before the work");
    release.join().unwrap();
    ok!(cuStreamQuery(stream));
    ok!(cuGraphLaunch(executable, stream));
    assert_eq!(cu!(cuStreamSynchronize(stream)), ILLEGAL_ADDRESS);
}

#[test]
fn memory_of_arrays_counts_and_comes_back_with_its_context_too() {
    let _context = Context::new();
    let before = free_bytes();
    let plane = array(4096, 512, 0, 0);
    assert!(before - free_bytes() >= 8 << 20);
    ok!(cuArrayDestroy(plane));
    assert_eq!(free_bytes(), before);
    let mut second = 0;
    ok!(cuCtxCreate_v2(&raw mut second, 0, 0));
    let within = free_bytes();
    let mut levels = 0;
    ok!(cuMipmappedArrayCreate(&raw mut levels, &description(1024, 1024, 0, 0), 99));
    let mut last = 0;
    ok!(cuMipmappedArrayGetLevel(&raw mut last, levels, 10));
    assert_eq!(cu!(cuMipmappedArrayGetLevel(&raw mut last, levels, 11)), INVALID_VALUE);
    assert!(within - free_bytes() >= 5 << 20, "four thirds of the first level");
    ok!(cuCtxDestroy_v2(second));
    assert_eq!(free_bytes(), before);
    let mut refused = 9;
    let large = description(32_768, 32_768, 2_048, 1);
    assert_eq!(cu!(cuArray3DCreate_v2(&raw mut refused, &large)), OUT_OF_MEMORY);
    assert_eq!(refused, 9);
    assert_eq!(free_bytes(), before);
}

// Promise: C80
#[test]
fn level_of_a_mipmapped_array_is_an_array_of_its_own() {
    let _context = Context::new();
    let mut mipmapped = 0;
    ok!(cuMipmappedArrayCreate(&raw mut mipmapped, &description(16, 8, 0, SURFACE), 3));
    let level = |number| {
        let mut level = 0;
        ok!(cuMipmappedArrayGetLevel(&raw mut level, mipmapped, number));
        level
    };
    let all = numbers(128);
    for (number, width, height) in [(0, 16, 8), (1, 8, 4), (2, 4, 2)] {
        let mut described = ArrayDescription::default();
        ok!(cuArray3DGetDescriptor_v2(&raw mut described, level(number)));
        assert_eq!(described, description(width, height, 0, SURFACE));
        let from = all[number as usize..].as_ptr();
        let extent = [width * 4, height, 1];
        assert_eq!(copy(host(from, width * 4, height), inside(level(number), [0; 3]), extent), 0);
    }
    for (number, width, height) in [(0, 16, 8), (1, 8, 4), (2, 4, 2)] {
        let found = read_box(level(number), [0; 3], [width * 4, height, 1]);
        assert_eq!(found, all[number as usize..][..found.len()].to_vec(), "level {number}");
    }
    assert_eq!(cu!(cuArrayDestroy(level(1))), INVALID_HANDLE);
    let second = level(1);
    ok!(cuMipmappedArrayDestroy(mipmapped));
    assert_eq!(copy(host(all.as_ptr(), 32, 4), inside(second, [0; 3]), [32, 4, 1]), INVALID_HANDLE);
}

// Promise: C82
#[test]
fn launch_uses_the_texture_that_its_reference_had_at_the_call() {
    let _context = Context::new();
    let module = module(&format!("{IMAGES}{KERNELS}"));
    let (fetch, draw) = (function(module, "fetch_reference"), function(module, "draw_reference"));
    let (name, other) = (text("image"), text("nothing"));
    let (mut reference, mut canvas) = (0, 0);
    assert_eq!(cu!(cuModuleGetTexRef(&raw mut reference, module, other.as_ptr())), NOT_FOUND);
    assert_eq!(cu!(cuModuleGetSurfRef(&raw mut canvas, module, name.as_ptr())), NOT_FOUND);
    ok!(cuModuleGetTexRef(&raw mut reference, module, name.as_ptr()));
    let (first, second, to) = (allocate(64), allocate(64), allocate(128));
    let all = numbers(32);
    write(first, &all[..16]);
    write(second, &all[16..]);
    ok!(cuTexRefSetFormat(reference, FLOAT, 1));
    ok!(cuTexRefSetFlags(reference, 1));
    let stream = stream(1);
    let flag = Flag::new();
    assert_eq!(launch(function(module, "spin"), 1, 1, stream, &mut [flag.address()]), 0);
    ok!(cuTexRefSetAddress_v2(ptr::null_mut(), reference, first, 64));
    assert_eq!(launch(fetch, 1, 16, stream, &mut [to]), 0);
    ok!(cuTexRefSetAddress_v2(ptr::null_mut(), reference, second, 64));
    assert_eq!(launch(fetch, 1, 16, stream, &mut [to + 64]), 0);
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(read::<f32>(to, 32), all);

    let name = text("canvas");
    ok!(cuModuleGetSurfRef(&raw mut canvas, module, name.as_ptr()));
    let plane = array(4, 2, 0, SURFACE);
    ok!(cuSurfRefSetArray(canvas, plane, 0));
    assert_eq!(launch(draw, 2, 4, 0, &mut []), 0);
    ok!(cuCtxSynchronize());
    let drawn: Vec<u32> = read_box(plane, [0; 3], [16, 2, 1]).iter().map(|value| value.to_bits()).collect();
    assert_eq!(drawn, [0, 1, 2, 3, 0, 1, 2, 3]);
    // Without its array the reference is unbound, and an access fails.
    ok!(cuArrayDestroy(plane));
    assert_eq!(launch(draw, 2, 4, 0, &mut []), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
    assert_eq!(cu!(cuTexRefSetArray(reference, plane, 1)), ILLEGAL_ADDRESS);
}

// Promise: C83
#[test]
fn attributes_state_the_extents_that_arrays_may_have() {
    let _context = Context::new();
    for number in (21..=29).chain(42..=49).chain(52..=74).chain([77]) {
        assert!(device_attribute(number) > 0, "attribute {number}");
    }
    assert_eq!([14, 30, 51].map(device_attribute), [512, 512, 32]);
    assert_eq!([112, 121].map(device_attribute), [0, 0], "sparse and deferred arrays are refused");
    let width = u64::try_from(device_attribute(21)).unwrap();
    let mut place = 0;
    ok!(cuArray3DCreate_v2(&raw mut place, &description(width, 0, 0, 0)));
    let wider = description(width + 1, 0, 0, 0);
    assert_eq!(cu!(cuArray3DCreate_v2(&raw mut place, &wider)), INVALID_VALUE);
    for flags in [0x40, 0x80] {
        let deferred = description(16, 16, 0, flags);
        assert_eq!(cu!(cuArray3DCreate_v2(&raw mut place, &deferred)), NOT_SUPPORTED);
    }
    assert_eq!(cu!(cuMemMapArrayAsync(ptr::null::<c_void>(), 0, 0)), NOT_SUPPORTED);
    let mut linear = 0;
    ok!(cuDeviceGetTexture1DLinearMaxWidth(&raw mut linear, FLOAT, 4, 0));
    assert_eq!(linear, u64::try_from(device_attribute(69)).unwrap());
}

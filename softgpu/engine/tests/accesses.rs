//! Accesses to memory in machine code: the values and faults of the interpreter, and never a byte outside the memory of the device.
//!
//! Each launch of a rig runs interpreted and as machine code, and compares memory and faults.

#![expect(unsafe_code, reason = "memory between pages without access belongs to the device")]

use std::ops::Range;

use proptest::prelude::*;
use softgpu_engine::{Fault, FaultKind};

use crate::common::{Buffer, Params, Rig, shape};

const PAGE: usize = 4096;

/// One page of memory. The pages before and after it admit no access, so an access there ends the test with a signal.
struct GuardedPage {
    start: *mut u8,
}

impl GuardedPage {
    fn new() -> GuardedPage {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE, libc::PROT_NONE, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let page = start.wrapping_byte_add(PAGE);
        // SAFETY: the page is part of the mapping.
        assert_eq!(unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) }, 0);
        let page = GuardedPage { start: page.cast() };
        page.fill(0xa5);
        page
    }

    fn addr(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the page is mapped, and no launch runs.
        unsafe { self.start.write_bytes(byte, PAGE) };
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the page is mapped, initialised, and no launch runs.
        unsafe { std::slice::from_raw_parts(self.start, PAGE) }.to_vec()
    }

    /// Asserts that all bytes outside of `window` have their first value.
    fn assert_untouched(&self, window: &Range<usize>) {
        let bytes = self.bytes();
        let changed = (0..PAGE).find(|n| !window.contains(n) && bytes[*n] != 0xa5);
        assert_eq!(changed, None, "a byte outside of {window:?} has changed");
    }
}

impl Drop for GuardedPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.start.wrapping_sub(PAGE).cast(), 3 * PAGE) };
    }
}

/// The addresses of the threads of an access.
#[derive(Clone, Debug)]
enum AddressPattern {
    Equal,
    Consecutive,
    Reversed,
    /// Eight consecutive ones, and eight others.
    Rows,
    Scattered(Vec<u16>),
}

fn pattern() -> impl Strategy<Value = AddressPattern> {
    prop_oneof![
        1 => Just(AddressPattern::Equal),
        3 => Just(AddressPattern::Consecutive),
        1 => Just(AddressPattern::Reversed),
        1 => Just(AddressPattern::Rows),
        2 => prop::collection::vec(any::<u16>(), 32).prop_map(AddressPattern::Scattered),
    ]
}

impl AddressPattern {
    /// The element that a thread accesses, of 64.
    fn element(&self, thread: usize) -> usize {
        match self {
            AddressPattern::Equal => 7,
            AddressPattern::Consecutive => thread % 64,
            AddressPattern::Reversed => 63 - thread % 64,
            AddressPattern::Rows => thread % 8 + thread / 8 * 16 % 64,
            AddressPattern::Scattered(n) => usize::from(n[thread % 32]) % 64,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AccessOperation {
    Load,
    Store,
    Add,
}

/// An access of a generated kernel.
#[derive(Clone, Debug)]
struct GeneratedAccess {
    operation: AccessOperation,
    shared: bool,
    generic: bool,
    /// The type, by its number.
    ty: usize,
    /// Elements between the address in the register and that of the access.
    offset: i8,
    /// One of two registers.
    base: usize,
    /// True if the kernel advances the register before.
    advance: bool,
}

const TYPES: [(&str, usize); 8] =
    [("u8", 1), ("s8", 1), ("u16", 2), ("s16", 2), ("b32", 4), ("f32", 4), ("b64", 8), ("f64", 8)];

fn access() -> impl Strategy<Value = GeneratedAccess> {
    let operation = prop_oneof![3 => Just(AccessOperation::Load), 2 => Just(AccessOperation::Store), 1 => Just(AccessOperation::Add)];
    (operation, any::<[bool; 3]>(), 0..TYPES.len(), -2i8..3, 0..2usize).prop_map(
        |(operation, [shared, generic, advance], ty, offset, base)| {
            // Atomics are on words.
            let ty = if operation == AccessOperation::Add { 4 } else { ty };
            GeneratedAccess { operation, shared, generic, ty, offset, base, advance }
        },
    )
}

/// Words that a thread loads, or stores.
const VALUES: usize = 4;

/// The text of a kernel that executes the accesses, once or in a loop of three iterations, and then writes its registers.
///
/// Each thread finds its two addresses of global memory, two of shared memory, and its number of iterations in `i`. Shared memory has
/// 1,024 bytes.
fn kernel(accesses: &[GeneratedAccess], repeat: bool) -> String {
    let mut text = String::from(
        ".shared .align 16 .b8 s[1024]; .reg .b32 %r<16>; .reg .b64 %d<20>; .reg .b16 %h<4>; .reg .pred %p<2>;\n\
         ld.param.u64 %d0, [i]; ld.param.u64 %d1, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 32; add.u64 %d0, %d0, %d2;\n\
         mul.wide.u32 %d2, %r0, 64; add.u64 %d1, %d1, %d2;\n\
         mov.u32 %r15, %ntid.x; mov.u32 %r1, %r0;\n\
         fill: shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r2, %r2, %r3; mad.lo.u32 %r3, %r1, 7777777, 5; st.shared.b32 [%r2], %r3;\n\
         add.u32 %r1, %r1, %r15; setp.lt.u32 %p0, %r1, 256; @%p0 bra fill; bar.sync 0;\n\
         ld.global.b64 %d3, [%d0]; ld.global.b64 %d4, [%d0+8]; ld.global.b32 %r3, [%d0+16]; ld.global.b32 %r4, [%d0+20];\n\
         ld.global.b32 %r5, [%d0+24];\n",
    );
    text += "mov.b32 %r10, 0; mov.b32 %r11, 0;\n";
    for n in 0..VALUES {
        let word = 6 + n;
        text += &format!(
            "mad.lo.u32 %r{word}, %r0, 1234567, {n}; mov.b16 %h{n}, 0; mul.wide.u32 %d{word}, %r{word}, 99991;\n"
        );
    }
    if repeat {
        text += "again:\n";
    }
    for (n, a) in accesses.iter().enumerate() {
        let (name, size) = TYPES[a.ty];
        let register = if a.shared { format!("%r{}", 3 + a.base) } else { format!("%d{}", 3 + a.base) };
        if a.advance {
            let width = if a.shared { "u32" } else { "u64" };
            text += &format!("add.{width} {register}, {register}, 8;\n");
        }
        let space = match (a.shared, a.generic) {
            (true, _) => ".shared",
            (false, false) => ".global",
            (false, true) => "",
        };
        let address = format!("[{register}+{}]", i32::from(a.offset) * i32::try_from(size).unwrap());
        let value = match size {
            1 | 2 => format!("%h{}", n % VALUES),
            4 => format!("%r{}", 6 + n % VALUES),
            _ => format!("%d{}", 6 + n % VALUES),
        };
        text += &match a.operation {
            AccessOperation::Load => format!("ld{space}.{name} {value}, {address};\n"),
            AccessOperation::Store => format!("st{space}.{name} {address}, {value};\n"),
            AccessOperation::Add => {
                format!("atom{space}.add.u32 %r{}, {address}, %r{};\n", 10 + n % 2, 6 + n % VALUES)
            }
        };
        text += &format!("add.u32 %r{0}, %r{0}, %r{1};\n", 6 + (n + 1) % VALUES, 6 + n % VALUES);
    }
    if repeat {
        text += "sub.u32 %r5, %r5, 1; setp.gt.s32 %p0, %r5, 0; @%p0 bra again;\n";
    }
    text += "xor.b32 %r6, %r6, %r10; xor.b32 %r7, %r7, %r11;\n";
    for n in 0..VALUES {
        let (word, next) = (6 + n, (n + 1) % VALUES);
        text += &format!(
            "st.global.b32 [%d1+{}], %r{word}; st.global.b64 [%d1+{}], %d{word}; cvt.u32.u16 %r12, %h{n};\n\
             mul.wide.s16 %r13, %h{n}, %h{next}; xor.b32 %r12, %r12, %r13; mul.wide.u16 %r14, %h{n}, %h{next};\n\
             xor.b32 %r12, %r12, %r14; st.global.b32 [%d1+{}], %r12;\n",
            4 * n,
            16 + 8 * n,
            48 + 4 * n,
        );
    }
    text + "ret;"
}

/// A thread, and an address that it uses.
fn wild() -> impl Strategy<Value = (usize, u64)> {
    let address = prop_oneof![
        Just(0u64),
        Just(u64::MAX),
        Just(u64::MAX - 7),
        Just(0x7c00_0000_0000),
        Just(0x7c10_0000_0000),
        any::<u64>(),
    ];
    (0..64usize, address)
}

/// Mostly full warps.
fn threads() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(64), 1 => 1usize..64]
}

/// Runs the accesses of `threads` threads at these addresses: two of global memory and two of shared memory for each.
fn launch(
    accesses: &[GeneratedAccess],
    (repeat, threads): (bool, usize),
    windows: &[(Range<u64>, bool)],
    addresses: impl Fn(usize) -> ([u64; 2], [u32; 2]),
) -> (Result<(), Fault>, Vec<u64>) {
    let mut rig = Rig::body(".param .u64 i, .param .u64 o", &kernel(accesses, repeat));
    let (input, output) = (Buffer::zeroed(64 * 32), Buffer::zeroed(64 * 64));
    for thread in 0..64 {
        let (global, [first, second]) = addresses(thread);
        input.set(4 * thread, global[0]);
        input.set(4 * thread + 1, global[1]);
        input.set(4 * thread + 2, u64::from(first) | u64::from(second) << 32);
        input.set(4 * thread + 3, (thread % 3 + 1) as u64);
    }
    rig.map(&[&input, &output]);
    rig.table.ranges.extend(windows.iter().cloned());
    let params = Params::new().buf(&input).buf(&output);
    (rig.launch("k", shape(1, u32::try_from(threads).unwrap()), params), output.all())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: S74
    #[test]
    fn accesses_of_every_shape_give_the_memory_of_the_interpreter(
        accesses in prop::collection::vec(access(), 1..12), repeat: bool, threads in threads(), patterns in [pattern(), pattern()],
    ) {
        let (one, other) = (Buffer::zeroed(4096), Buffer::zeroed(4096));
        for n in 0..512u64 {
            one.set(usize::try_from(n).unwrap(), n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            other.set(usize::try_from(n).unwrap(), n.wrapping_mul(0xd134_2543_de82_ef95));
        }
        // The elements follow each other if all accesses have one size; else there is one every eight bytes, so that all are aligned.
        let step = accesses.iter().map(|a| TYPES[a.ty].1).min().unwrap();
        let widest = accesses.iter().map(|a| TYPES[a.ty].1).max().unwrap();
        let step = if widest == step { step } else { 8 };
        let at = |pattern: &AddressPattern, thread| 256 + step * pattern.element(thread);
        let (result, _) = launch(
            &accesses,
            (repeat, threads),
            &[(one.range(), true), (other.range(), true)],
            |thread| {
                let [a, b] = [at(&patterns[0], thread), at(&patterns[1], thread)];
                (
                    [one.addr() + a as u64, other.addr() + b as u64],
                    [u32::try_from(a % 512 + 64).unwrap() & !7, u32::try_from(b % 512 + 64).unwrap() & !7],
                )
            },
        );
        prop_assert_eq!(result, Ok(()));
    }

    // Promise: S75
    #[test]
    fn accesses_never_leave_the_memory_of_the_device(
        accesses in prop::collection::vec(access(), 1..8), repeat: bool, threads in threads(), patterns in [pattern(), pattern()],
        window in (0..PAGE / 4, 3 * PAGE / 4..PAGE + 1), writable in prop::bool::weighted(0.8),
        one_size in prop::bool::weighted(0.7), wild in prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(wild(), 1..3)],
        shifts in [-3i64..4, -20i64..20], at_end: bool,
    ) {
        // Mostly all accesses have the size of an element, so that only the ends of the window stop them.
        let (ty, size) = TYPES[accesses[0].ty];
        let accesses: Vec<_> = accesses
            .into_iter()
            .filter(|a| !one_size || TYPES[a.ty].1 == size || a.operation != AccessOperation::Add)
            .map(|a| if one_size { GeneratedAccess { ty: TYPES.iter().position(|t| t.0 == ty).unwrap(), ..a } } else { a })
            .collect();
        let step = size;
        let page = GuardedPage::new();
        let window = window.0 & !7..window.1 & !7;
        let (start, end) = (page.addr() + window.start as u64, page.addr() + window.end as u64);
        // Around one of the ends of the window, with a few addresses anywhere.
        let origin = if at_end { end.wrapping_sub(64 * step as u64) } else { start };
        let wild_at = |thread| wild.iter().find(|(t, _)| *t == thread).map(|(_, address)| *address);
        let (result, _) = launch(
            &accesses,
            (repeat, threads),
            &[(start..end, writable)],
            |thread| {
                let global = [0, 1].map(|n| {
                    let address = origin
                        .wrapping_add((step * patterns[n].element(thread)) as u64)
                        .wrapping_add_signed(shifts[n] * i64::try_from(step).unwrap());
                    wild_at(thread).unwrap_or(address)
                });
                let shared = [0, 1].map(|n| {
                    let element = u32::try_from(step * patterns[n].element(thread)).unwrap();
                    let address = if at_end { 1024 - 8 * 64 + element } else { element };
                    u32::try_from(wild_at(thread).unwrap_or(u64::from(address)) & 0xffff_ffff).unwrap()
                });
                (global, shared)
            },
        );
        page.assert_untouched(&window);
        if !writable {
            page.assert_untouched(&(0..0));
        }
        if let Err(fault) = result {
            prop_assert!(matches!(
                fault.kind,
                FaultKind::IllegalAddress | FaultKind::Misaligned | FaultKind::LaunchFailed | FaultKind::AddressSpace
            ));
        }
    }
}

// Promise: S71
#[test]
fn fault_of_an_access_to_global_memory_has_its_thread_and_line() {
    // The store in the sixth line fails in thread 37, after the loads and the store before it.
    let mut rig = Rig::body(
        ".param .u64 a, .param .u64 b",
        ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<2>;\n\
         ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4;\n\
         add.u64 %d3, %d0, %d2; add.u64 %d4, %d1, %d2; setp.eq.u32 %p0, %r0, 37; selp.b64 %d5, 4096, %d4, %p0;\n\
         ld.global.u32 %r1, [%d3];\n\
         st.global.u32 [%d3], %r0;\n\
         st.global.u32 [%d5], %r1;\n\
         st.global.u32 [%d4+256], %r1;\nret;",
    );
    let (a, b) = (Buffer::of::<u32>(&[9; 64]), Buffer::of::<u32>(&[1; 128]));
    rig.map(&[&a, &b]);
    let fault = rig.launch("k", shape(1, 64), Params::new().buf(&a).buf(&b)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::IllegalAddress);
    assert_eq!((fault.cta, fault.thread, fault.address), ([0; 3], [37, 0, 0], 4096));
    assert_eq!(fault.line, 11);
    let (a, b) = (a.all::<u32>(), b.all::<u32>());
    // Threads of the first warp are complete, those of the second one have executed the first store.
    assert!((0..64).all(|n| a[n as usize] == n), "{a:?}");
    assert!((0..37).all(|n| b[n] == 9) && (37..64).all(|n| b[n] == 1), "{b:?}");
    assert!((64..96).all(|n| b[n] == 9) && (96..128).all(|n| b[n] == 1), "{b:?}");
}

// Promise: S75
#[test]
fn store_of_a_called_function_never_writes_what_its_caller_may_only_read() {
    let mut rig = Rig::new(
        ".version 8.7\n.target sm_90\n.address_size 64\n\
         .func store(.param .b64 p, .param .b32 v)\n\
         { .reg .b32 %r<9>; .reg .b64 %d<9>;\n\
         ld.param.b64 %d0, [p]; ld.param.b32 %r0, [v]; add.u32 %r0, %r0, 1; mul.lo.u32 %r0, %r0, 3; xor.b32 %r0, %r0, 5;\n\
         st.global.u32 [%d0], %r0; ret; }\n\
         .visible .entry k(.param .u64 a)\n\
         { .reg .b32 %r<9>; .reg .b64 %d<9>; .param .b64 p; .param .b32 v;\n\
         ld.param.u64 %d0, [a]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d2, %d0, %d1;\n\
         ld.global.u32 %r1, [%d2]; add.u32 %r1, %r1, 1;\n\
         st.param.b64 [p], %d2; st.param.b32 [v], %r1; call.uni store, (p, v); ret; }\n",
    );
    let a = Buffer::of::<u32>(&[9; 32]);
    rig.table.ranges.push((a.range(), false));
    let fault = rig.launch("k", shape(1, 32), Params::new().buf(&a)).unwrap_err();
    assert_eq!((fault.kind, fault.address), (FaultKind::IllegalAddress, a.addr()));
    assert_eq!(a.all::<u32>(), [9; 32]);
}

// Promise: S74
#[test]
fn store_and_load_of_one_address_keep_their_order() {
    // Each thread stores, loads what its neighbour has stored, and stores that.
    let mut rig = Rig::body(
        ".param .u64 a",
        ".reg .b32 %r<9>; .reg .b64 %d<9>;\n\
         ld.param.u64 %d0, [a]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d2, %d0, %d1; mad.lo.u32 %r1, %r0, 3, 100;\n\
         st.global.u32 [%d2], %r1; xor.b32 %r2, %r0, 8; mul.wide.u32 %d1, %r2, 4; add.u64 %d3, %d0, %d1;\n\
         ld.global.u32 %r3, [%d3]; add.u32 %r3, %r3, 1; st.global.u32 [%d2+128], %r3; ret;",
    );
    let a = Buffer::zeroed(256);
    rig.map(&[&a]);
    rig.run("k", shape(1, 32), Params::new().buf(&a));
    let a = a.all::<u32>();
    assert!(
        (0..32u32).all(|n| a[n as usize] == 3 * n + 100 && a[n as usize + 32] == 3 * (n ^ 8) + 101),
        "{a:?}"
    );
}

// Promise: S74
#[test]
fn generic_addresses_of_two_spaces_give_their_values_however_often() {
    // The loads of a loop are from shared and from global memory in turn.
    let mut rig = Rig::body(
        ".param .u64 a",
        ".shared .align 4 .b8 s[256]; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>;\n\
         ld.param.u64 %d0, [a]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d2, %d0, %d1;\n\
         mov.u64 %d3, s; cvta.shared.u64 %d3, %d3; add.u64 %d3, %d3, %d1; mul.lo.u32 %r1, %r0, 3; st.u32 [%d3], %r1; bar.sync 0;\n\
         mov.u32 %r2, 0; mov.u32 %r3, 0;\n\
         again: and.b32 %r4, %r2, 1; setp.eq.u32 %p0, %r4, 0; selp.b64 %d4, %d2, %d3, %p0;\n\
         ld.u32 %r5, [%d4]; add.u32 %r3, %r3, %r5; add.u32 %r2, %r2, 1; bar.sync 0;\n\
         setp.lt.u32 %p1, %r2, 600; @%p1 bra again; st.global.u32 [%d2+256], %r3; ret;",
    );
    let a = Buffer::of::<u32>(&(0..128).map(|n| 1000 * n).collect::<Vec<_>>());
    rig.map(&[&a]);
    rig.run("k", shape(1, 64), Params::new().buf(&a));
    assert!((0..64u32).all(|n| a.get::<u32>(n as usize + 64) == 300 * (1000 * n) + 300 * (3 * n)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: S93
    #[test]
    fn whole_warps_with_regular_addresses_give_the_memory_of_the_interpreter(
        shared: bool, wide in prop::bool::weighted(0.2), offsets in prop::collection::vec(-3i64..4, 1..9), paired: bool,
        equal in prop_oneof![Just([true; 8]), Just([false; 8]), any::<[bool; 8]>()], firsts in any::<[u8; 8]>(),
        shift in prop_oneof![4 => Just(0i64), 1 => -24i64..24], at_end: bool, odd in prop::bool::weighted(0.1),
    ) {
        // Each group of eight threads has one address, or addresses that follow each other. A barrier before the accesses makes sure that
        // they find all of them in registers.
        let (ty, value, size) = if wide { ("b64", "%d", 8) } else { ("b32", "%r", 4) };
        let (space, register) = if shared { (".shared", "%r3") } else { (".global", "%d3") };
        let mut text = String::from(
            ".shared .align 16 .b8 s[2048]; .reg .b32 %r<16>; .reg .b64 %d<16>; .reg .pred %p<2>;\n\
             ld.param.u64 %d0, [i]; ld.param.u64 %d1, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 16;\n\
             add.u64 %d0, %d0, %d2; add.u64 %d1, %d1, %d2; mov.u32 %r1, %r0; mul.wide.u32 %d5, %r0, 7919;\n\
             fill: shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r2, %r2, %r3; mad.lo.u32 %r3, %r1, 7777777, 5;\n\
             st.shared.b32 [%r2], %r3; add.u32 %r1, %r1, 64; setp.lt.u32 %p0, %r1, 512; @%p0 bra fill;\n\
             ld.global.b64 %d3, [%d0]; ld.global.b32 %r3, [%d0+8]; shl.b32 %r4, %r0, 3; mov.b32 %r5, 1; bar.sync 0;\n",
        );
        for offset in &offsets {
            text += &format!("ld{space}.{ty} {value}6, [{register}+{}];\n", offset * i64::try_from(size).unwrap());
            text += if wide { "xor.b64 %d5, %d5, %d6;\n" } else { "mad.lo.u32 %r5, %r5, 3, %r6;\n" };
        }
        text += &format!(
            "st.global.{ty} [%d1], {value}5;\nst.shared.{ty} [%r4], {value}5;\nbar.sync 0;\nxor.b32 %r7, %r4, 64;\n\
             ld.shared.b32 %r8, [%r7]; st.global.b32 [%d1+8], %r8; ret;"
        );
        let mut rig = Rig::body(".param .u64 i, .param .u64 o", &text);
        let (input, output, page) = (Buffer::zeroed(64 * 16), Buffer::zeroed(64 * 16), GuardedPage::new());
        let window = 64..PAGE - 64;
        let (start, end) = (page.addr() + window.start as u64, page.addr() + window.end as u64);
        for thread in 0..64 {
            let group = thread / 8;
            let first = usize::from(firsts[if paired { group & !1 } else { group }] % 32) + 4;
            let element = first + if equal[group] { 0 } else { thread % 8 };
            // Room for 48 elements at the start or at the end.
            let byte = element * size + if odd && thread == 41 { 2 } else { 0 };
            let place = |start: u64, end: u64| {
                let origin = if at_end { end - 48 * size as u64 } else { start };
                (origin + byte as u64).wrapping_add_signed(shift * i64::try_from(size).unwrap())
            };
            input.set(2 * thread, place(start, end));
            input.set(2 * thread + 1, place(0, 2048) & 0xffff_ffff);
        }
        rig.map(&[&input, &output]);
        rig.table.ranges.push((start..end, true));
        // The launch compares memory, and the fault, with those of the interpreter.
        let result = rig.launch("k", shape(1, 64), Params::new().buf(&input).buf(&output));
        page.assert_untouched(&(0..0));
        if shift == 0 && !odd {
            prop_assert_eq!(result, Ok(()));
        }
    }
}

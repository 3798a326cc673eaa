//! Shared pages: mapped in order, only at free addresses, not seen by children.

#![expect(unsafe_code, reason = "fork, and a mapping that stands in the way")]

use proptest::prelude::*;
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::{Errno, pwrite},
    mm::{MapFlags, ProtFlags},
};
use sluice_protocol::shared::Shared;
use sluice_shared_memory::{
    Mapping, Reservation, Run,
    mapping::{MapError, Words},
};
use std::sync::atomic::Ordering;

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;

/// A file of `pages` pages, each filled with `first` + its number.
fn file(pages: u8, first: u8) -> OwnedFd {
    let file = memfd_create("sluice-test-pages", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, u64::from(pages) * PAGE).unwrap();
    for page in 0..pages {
        let bytes = [first + page; PAGE_BYTES];
        assert_eq!(pwrite(&file, &bytes, u64::from(page) * PAGE).unwrap(), bytes.len());
    }
    file
}

fn run(page: u64, pages: u64) -> Run {
    Run { offset: page * PAGE, bytes: pages * PAGE }
}

fn byte(mapping: &Mapping, at: u64) -> u8 {
    let mut byte = [0];
    mapping.words().read(usize::try_from(at).unwrap(), &mut byte);
    byte[0]
}

/// An address range that is free now and that the kernel does not choose on its own; each test has its own.
fn free(number: u64) -> u64 {
    0x7e70_0000_0000 + number * 0x1000_0000
}

/// True if a child made by fork sees a mapping at `address`; asks the kernel instead of touching it.
fn child_sees(address: u64) -> bool {
    let pointer = std::ptr::without_provenance_mut(usize::try_from(address).unwrap());
    let mut resident = [0u8];
    // SAFETY: the child only makes two system calls and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: `resident` has room for one page; a page that is not mapped is ENOMEM.
        let answer = unsafe { libc::mincore(pointer, PAGE_BYTES, resident.as_mut_ptr()) };
        // SAFETY: ends the child without running the test harness.
        unsafe { libc::_exit(i32::from(answer == 0)) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status));
    libc::WEXITSTATUS(status) == 1
}

// Promise: V9
#[test]
fn scattered_pages_lie_in_the_order_of_the_runs() {
    let (one, two) = (file(8, 10), file(4, 50));
    let pieces = [
        (one.as_fd(), run(6, 1)),
        (two.as_fd(), run(1, 2)),
        (one.as_fd(), run(0, 3)),
        (one.as_fd(), run(6, 1)),
    ];
    let mapping = Mapping::scattered(0, 7 * PAGE, pieces).unwrap();
    assert_eq!(mapping.bytes(), 7 * PAGE);
    let seen: Vec<u8> = (0..7).map(|page| byte(&mapping, page * PAGE + 100)).collect();
    assert_eq!(seen, [16, 51, 52, 10, 11, 12, 16]);
    // The same page twice is the same memory, also the file's.
    mapping.words().store_u64(0, 0x1122_3344_5566_7788, Ordering::Release);
    let last = usize::try_from(6 * PAGE).unwrap();
    assert_eq!(mapping.words().load_u64(last, Ordering::Acquire), 0x1122_3344_5566_7788);
    let mut bytes = [0; 8];
    rustix::io::pread(&one, &mut bytes, 6 * PAGE).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 0x1122_3344_5566_7788);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: V9
    #[test]
    fn any_page_list_reads_back(pages in prop::collection::vec(0..32u8, 1..40)) {
        let file = file(32, 100);
        let pieces = pages.iter().map(|page| (file.as_fd(), run(u64::from(*page), 1)));
        let mapping = Mapping::scattered(0, pages.len() as u64 * PAGE, pieces).unwrap();
        for (i, page) in pages.iter().enumerate() {
            prop_assert_eq!(byte(&mapping, i as u64 * PAGE), 100 + page);
            prop_assert_eq!(byte(&mapping, (i as u64 + 1) * PAGE - 1), 100 + page);
        }
    }
}

// Promise: V9
#[test]
fn runs_that_are_not_whole_pages_or_do_not_add_up_are_refused() {
    let file = file(8, 0);
    let refuse = |bytes: u64, runs: &[Run]| {
        let pieces = runs.iter().map(|run| (file.as_fd(), *run));
        let error = Mapping::scattered(0, bytes, pieces).unwrap_err();
        assert!(matches!(error, MapError::Layout(_)), "{runs:?}: {error}");
    };
    refuse(2 * PAGE, &[]);
    refuse(2 * PAGE, &[run(0, 1)]);
    refuse(2 * PAGE, &[run(0, 3)]);
    refuse(2 * PAGE, &[run(0, 1), run(1, 2)]);
    refuse(2 * PAGE, &[run(0, 2), run(1, 1)]);
    refuse(PAGE, &[Run { offset: 1, bytes: PAGE }]);
    refuse(PAGE, &[Run { offset: 2048, bytes: PAGE }]);
    refuse(PAGE, &[Run { offset: 0, bytes: PAGE - 1 }]);
    refuse(PAGE, &[Run { offset: 0, bytes: PAGE + 1 }]);
    refuse(PAGE, &[Run { offset: 0, bytes: 0 }, run(0, 1)]);
    refuse(2 * PAGE, &[Run { offset: 0, bytes: u64::MAX - PAGE + 1 }]);
    refuse(PAGE + 8, &[run(0, 1)]);
}

#[test]
fn reservation_with_an_impossible_length_or_base_is_refused() {
    for bytes in [0, u64::MAX, u64::MAX - PAGE + 1, 1 << 56] {
        assert!(matches!(Reservation::new(0, bytes), Err(MapError::Reserve { .. })), "{bytes:#x}");
    }
    for base in [1, PAGE / 2, u64::MAX - PAGE + 1, 1 << 56] {
        assert!(matches!(Reservation::new(base, PAGE), Err(MapError::Reserve { .. })), "{base:#x}");
    }
}

/// A failed attempt has no effect: the same range can be reserved again.
// Promise: V9
#[test]
fn refused_mapping_gives_its_addresses_back() {
    let (file, base) = (file(2, 0), free(1));
    assert!(Mapping::scattered(base, 2 * PAGE, [(file.as_fd(), run(0, 1))]).is_err());
    let mapping = Mapping::scattered(base, 2 * PAGE, [(file.as_fd(), run(0, 2))]).unwrap();
    assert_eq!(mapping.base(), base, "exactly there");
    drop(mapping);
    Reservation::new(base, 2 * PAGE).unwrap();
}

// Promise: C3
#[test]
fn reservation_never_replaces_a_mapping() {
    let base = free(2);
    let pointer = std::ptr::without_provenance_mut(usize::try_from(base + PAGE).unwrap());
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: replaces no mapping.
    let taken =
        unsafe { rustix::mm::mmap_anonymous(pointer, PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, flags) };
    let taken: *mut u8 = taken.unwrap().cast();
    // SAFETY: the page mapped above.
    unsafe { taken.write(42) };
    for (at, pages) in [(base, 2), (base + PAGE, 1), (base, 3), (base + PAGE, 2)] {
        let error = Reservation::new(at, pages * PAGE).unwrap_err();
        assert!(matches!(error, MapError::Reserve { error: Errno::EXIST, .. }), "{at:#x}: {error}");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { taken.read() }, 42, "untouched");
    // There is room beside it.
    let beside = Reservation::new(base, PAGE).unwrap();
    assert!(Reservation::new(base, PAGE).is_err(), "a reservation is a mapping, too");
    drop(beside);
    // SAFETY: the page is not used any more.
    unsafe { rustix::mm::munmap(taken.cast(), PAGE_BYTES) }.unwrap();
    assert_eq!(Reservation::new(base, 3 * PAGE).unwrap().base(), base);
}

#[test]
fn mapping_outside_a_reservation_is_refused() {
    let file = file(8, 0);
    let reservation = Reservation::new(free(3), 4 * PAGE).unwrap();
    let base = reservation.base();
    for (at, bytes) in [
        (base - PAGE, PAGE),
        (base + 4 * PAGE, PAGE),
        (base + 3 * PAGE, 2 * PAGE),
        (base, 0),
        (base, u64::MAX),
        (0, PAGE),
        (u64::MAX, PAGE),
    ] {
        let error = reservation.map(at, file.as_fd(), 0, bytes).unwrap_err();
        assert!(matches!(error, MapError::Layout(_)), "{at:#x} + {bytes:#x}: {error}");
        assert!(reservation.unmap(at, bytes).is_err());
    }
    // The kernel's own refusals: an unaligned address, an unaligned offset.
    assert!(matches!(reservation.map(base + 8, file.as_fd(), 0, PAGE), Err(MapError::Piece { .. })));
    assert!(matches!(reservation.map(base, file.as_fd(), 8, PAGE), Err(MapError::Piece { .. })));
}

#[test]
fn unmapped_pages_of_a_reservation_can_be_mapped_again() {
    let file = file(8, 20);
    let reservation = Reservation::new(free(4), 4 * PAGE).unwrap();
    let base = reservation.base();
    let words = |at: u64| {
        // SAFETY: used only while the page at `at` is mapped; tests form no references to it.
        unsafe { Words::new(usize::try_from(at).unwrap(), PAGE_BYTES) }
    };
    reservation.map(base + PAGE, file.as_fd(), 3 * PAGE, PAGE).unwrap();
    let mut byte = [0];
    words(base + PAGE).read(5, &mut byte);
    assert_eq!(byte, [23]);
    reservation.unmap(base + PAGE, PAGE).unwrap();
    reservation.map(base + PAGE, file.as_fd(), 7 * PAGE, PAGE).unwrap();
    words(base + PAGE).read(5, &mut byte);
    assert_eq!(byte, [27]);
}

/// A sleeping child must not keep alive, or reach, memory that its parent shares with the host.
// Promise: G2
#[test]
fn forked_child_sees_no_shared_pages() {
    let file = file(4, 0);
    let pieces = [(file.as_fd(), run(3, 1)), (file.as_fd(), run(0, 2)), (file.as_fd(), run(0, 1))];
    let mapping = Mapping::scattered(0, 4 * PAGE, pieces).unwrap();
    for page in 0..4 {
        assert!(!child_sees(mapping.base() + page * PAGE), "page {page}");
    }
    let reservation = Reservation::new(free(5), 4 * PAGE).unwrap();
    assert!(!child_sees(reservation.base()), "bare addresses");
    reservation.map(reservation.base() + PAGE, file.as_fd(), 0, PAGE).unwrap();
    assert!(!child_sees(reservation.base() + PAGE), "pages laid over them");
    reservation.unmap(reservation.base() + PAGE, PAGE).unwrap();
    assert!(!child_sees(reservation.base() + PAGE), "pages taken back");
    // The check can fail: ordinary memory is inherited.
    let ordinary = vec![1u8; 3 * PAGE_BYTES];
    assert!(child_sees((ordinary.as_ptr().addr() as u64).next_multiple_of(PAGE)));
}

#[test]
fn words_of_a_mapping_read_back_as_written() {
    let file = file(1, 0);
    let mapping = Mapping::scattered(0, PAGE, [(file.as_fd(), run(0, 1))]).unwrap();
    let words = mapping.words();
    words.store_u32(64, 0xdead_beef, Ordering::Release);
    assert_eq!(words.load_u32(64, Ordering::Acquire), 0xdead_beef);
    assert_eq!(words.swap_u32(64, 5), 0xdead_beef);
    assert_eq!(words.load_u32(64, Ordering::Relaxed), 5);
    words.write(100, b"bytes at any place");
    let mut bytes = [0; 18];
    words.read(100, &mut bytes);
    assert_eq!(&bytes, b"bytes at any place");
    words.fence();
    // The last word is inside; the empty range at the end is, too.
    words.store_u64(4088, u64::MAX, Ordering::Relaxed);
    words.read(4096, &mut []);
}

#[test]
fn access_outside_a_mapping_or_unaligned_panics() {
    let file = file(1, 0);
    let mapping = Mapping::scattered(0, PAGE, [(file.as_fd(), run(0, 1))]).unwrap();
    let words = mapping.words();
    let caught = |access: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err();
    assert!(caught(&|| _ = words.load_u32(4096, Ordering::Relaxed)));
    assert!(caught(&|| _ = words.load_u64(4092, Ordering::Relaxed)), "half outside");
    assert!(caught(&|| _ = words.load_u32(2, Ordering::Relaxed)), "not aligned");
    assert!(caught(&|| words.write(4090, &[0; 7])));
    assert!(caught(&|| words.read(usize::MAX, &mut [0; 2])), "no overflow");
}

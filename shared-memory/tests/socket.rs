//! Messages with descriptors between processes.

#![expect(unsafe_code, reason = "the raw sendmsg of a peer that does not keep to the rules")]

use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, fstat, memfd_create},
    io::{Errno, FdFlags, fcntl_getfd},
};
use sluice_shared_memory::socket::{DESCRIPTORS, pair, receive, send};

fn memfd(name: &str) -> OwnedFd {
    memfd_create(name, MemfdFlags::CLOEXEC).unwrap()
}

/// Number of this process's open descriptors of the memfd `name`. Not of all, because tests run in parallel.
fn open(name: &str) -> usize {
    let wanted = format!("/memfd:{name} (deleted)");
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|link| link.to_str() == Some(&wanted))
        .count()
}

/// Sends one byte with `count` copies of a descriptor, without the limit of [`send`].
fn send_raw(socket: &OwnedFd, descriptor: &OwnedFd, count: usize) {
    let mut byte = 7u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0u64; 64];
    let bytes = u32::try_from(count * 4).unwrap();
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: computes a length.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as usize;
    // SAFETY: the control buffer is aligned and long enough for one header and its descriptors.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: computes a length.
    let length = unsafe { libc::CMSG_LEN(bytes) } as usize;
    // SAFETY: as above, the header lies inside `control`.
    unsafe {
        *header =
            libc::cmsghdr { cmsg_len: length, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
    }
    // SAFETY: as above.
    let data: *mut i32 = unsafe { libc::CMSG_DATA(header) }.cast();
    for i in 0..count {
        // SAFETY: `count` descriptors fit behind the header, which is aligned to 8.
        unsafe { data.wrapping_add(i).write_unaligned(descriptor.as_raw_fd()) };
    }
    // SAFETY: every pointer in `message` is valid during the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) };
    assert_eq!(sent, 1, "{}", std::io::Error::last_os_error());
}

// Promise: V6
#[test]
fn message_arrives_with_its_descriptors_in_order() {
    let (ours, theirs) = pair().unwrap();
    let files: Vec<_> = (0..DESCRIPTORS).map(|i| memfd(&format!("sluice-test-order-{i}"))).collect();
    for count in 0..=DESCRIPTORS {
        let borrowed: Vec<BorrowedFd<'_>> = files[..count].iter().map(AsFd::as_fd).collect();
        send(&ours, b"message", &borrowed).unwrap();
        let mut buffer = [0; 64];
        let (bytes, received) = receive(&theirs, &mut buffer).unwrap().unwrap();
        assert_eq!(bytes, b"message");
        assert_eq!(received.len(), count);
        for (got, sent) in received.iter().zip(&files) {
            assert_eq!(fstat(got).unwrap().st_ino, fstat(sent).unwrap().st_ino);
            assert!(fcntl_getfd(got).unwrap().contains(FdFlags::CLOEXEC), "a child must not inherit it");
        }
    }
}

#[test]
fn message_boundaries_are_kept() {
    let (ours, theirs) = pair().unwrap();
    let mut buffer = [0; 64];
    for length in [1, 63, 64] {
        send(&ours, &vec![u8::try_from(length).unwrap(); length], &[]).unwrap();
    }
    for length in [1, 63, 64] {
        let (bytes, descriptors) = receive(&theirs, &mut buffer).unwrap().unwrap();
        assert_eq!((bytes.len(), descriptors.len()), (length, 0));
    }
}

// Promise: V6
#[test]
fn message_that_is_too_long_is_refused_and_its_descriptors_closed() {
    let (ours, theirs) = pair().unwrap();
    let file = memfd("sluice-test-long");
    send(&ours, &[1; 65], &[file.as_fd(), file.as_fd()]).unwrap();
    assert_eq!(open("sluice-test-long"), 1, "in flight");
    assert_eq!(receive(&theirs, &mut [0; 64]).unwrap_err(), Errno::MSGSIZE);
    assert_eq!(open("sluice-test-long"), 1, "nothing stays open");
    // The next message is complete.
    send(&ours, &[2; 64], &[]).unwrap();
    assert!(matches!(receive(&theirs, &mut [0; 64]), Ok(Some((bytes, _))) if bytes == [2; 64]));
}

// Promise: V6
#[test]
fn too_many_descriptors_are_refused_and_closed() {
    let file = memfd("sluice-test-many");
    for count in [DESCRIPTORS + 1, DESCRIPTORS + 2, DESCRIPTORS + 3, 64] {
        let (ours, theirs) = pair().unwrap();
        send_raw(&ours, &file, count);
        assert_eq!(receive(&theirs, &mut [0; 64]).unwrap_err(), Errno::MSGSIZE, "{count} descriptors");
        assert_eq!(open("sluice-test-many"), 1, "{count} descriptors");
    }
    let (ours, theirs) = pair().unwrap();
    send_raw(&ours, &file, DESCRIPTORS);
    let mut buffer = [0; 64];
    assert_eq!(receive(&theirs, &mut buffer).unwrap().unwrap().1.len(), DESCRIPTORS);
}

#[test]
fn more_descriptors_than_allowed_are_not_sent() {
    let (ours, _theirs) = pair().unwrap();
    let file = memfd("sluice-test-not-sent");
    for count in DESCRIPTORS + 1..DESCRIPTORS + 4 {
        assert_eq!(send(&ours, b"x", &vec![file.as_fd(); count]), Err(Errno::INVAL), "{count}");
    }
}

#[test]
fn closed_peer_is_reported_after_its_last_message() {
    let (ours, theirs) = pair().unwrap();
    send(&ours, b"last", &[]).unwrap();
    drop(ours);
    let mut buffer = [0; 64];
    assert_eq!(receive(&theirs, &mut buffer).unwrap().unwrap().0, b"last");
    assert!(receive(&theirs, &mut buffer).unwrap().is_none());
    assert_eq!(send(&theirs, b"x", &[]), Err(Errno::PIPE), "no SIGPIPE");
}

#[test]
fn empty_nonblocking_socket_returns_eagain() {
    let (_ours, theirs) = pair().unwrap();
    rustix::io::ioctl_fionbio(&theirs, true).unwrap();
    assert_eq!(receive(&theirs, &mut [0; 64]).unwrap_err(), Errno::AGAIN);
}

//! The mappings of this process, as the kernel lists them.

#![expect(unsafe_code, reason = "the bounds of this thread's stack")]

use super::{PAGE, TakeOverError, kernel};
use rustix::{
    fs::{Mode, OFlags, open},
    io::{Errno, read, retry_on_intr},
};

/// Bytes above a frame of this module in which all frames lie that are in use while the range is empty.
const FRAMES: usize = 64 << 10;

/// A part of one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MappedPart {
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// A part of a range that maps a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FilePart {
    pub(super) at: usize,
    pub(super) bytes: usize,
    pub(super) readable: bool,
}

/// `/proc/self/maps`. The functions of the C library that read a file end a thread that the program has cancelled.
pub(super) fn maps() -> Result<Vec<u8>, TakeOverError> {
    let read_all = || -> Result<Vec<u8>, Errno> {
        let file = open("/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (mut all, mut some) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            match retry_on_intr(|| read(&file, &mut some))? {
                0 => return Ok(all),
                bytes => all.extend_from_slice(&some[..bytes]),
            }
        }
    };
    read_all().map_err(kernel("/proc/self/maps"))
}

/// The parts of a range, one for each mapping, if all of them are private memory of the program, readable and writable.
pub(super) fn private_parts(maps: &[u8], at: usize, bytes: usize) -> Result<Vec<MappedPart>, TakeOverError> {
    let end = at.checked_add(bytes).ok_or(TakeOverError::Unmapped(at))?;
    if bytes == 0 || !at.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
        return Err(TakeOverError::Kind { at, kind: "not made of whole pages" });
    }
    let here = core::ptr::from_ref(&end).addr();
    if at < here.saturating_add(FRAMES).min(top_of_stack()) && here < end {
        return Err(TakeOverError::Kind { at, kind: "the stack of the calling thread" });
    }
    let (mut parts, mut next) = (Vec::new(), at);
    for line in maps.split(|byte| *byte == b'\n') {
        let Some((from, to, kind)) = entry(line) else { continue };
        if to <= next || next >= end {
            continue;
        }
        if from > next {
            break;
        }
        if let Some(kind) = kind {
            return Err(TakeOverError::Kind { at: next, kind });
        }
        let bytes = to.min(end) - next;
        parts.push(MappedPart { at: next, bytes });
        next += bytes;
    }
    if next == end { Ok(parts) } else { Err(TakeOverError::Unmapped(next)) }
}

/// The parts of a range that are a shared mapping of a file's pages from `offset` on.
pub(super) fn parts_of_file(maps: &[u8], range: MappedPart, inode: u64, offset: u64) -> Vec<FilePart> {
    let mut parts = Vec::new();
    for line in maps.split(|byte| *byte == b'\n') {
        let text = String::from_utf8_lossy(line);
        let fields: Vec<&str> = text.split_ascii_whitespace().take(5).collect();
        let (Some((from, to, _)), [_, access, mapped, _, file]) = (entry(line), fields.as_slice()) else {
            continue;
        };
        let (first, last) = (from.max(range.at), to.min(range.at + range.bytes));
        let Ok(mapped) = u64::from_str_radix(mapped, 16) else { continue };
        let same = first < last
            && access.ends_with('s')
            && file.parse() == Ok(inode)
            && mapped + (first - from) as u64 == offset + (first - range.at) as u64;
        if same {
            let readable = access.starts_with('r');
            parts.push(FilePart { at: first, bytes: last - first, readable });
        }
    }
    parts
}

/// The end of this thread's stack, as far as it is known. Other memory of the program may begin there.
fn top_of_stack() -> usize {
    // SAFETY: a structure of numbers and pointers, which the next call fills.
    let mut attributes: libc::pthread_attr_t = unsafe { core::mem::zeroed() };
    // SAFETY: a call without arguments.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the calling thread, and a structure of this function.
    let filled = unsafe { libc::pthread_getattr_np(this, &raw mut attributes) };
    if filled != 0 {
        return usize::MAX;
    }
    let (mut base, mut bytes) = (core::ptr::null_mut(), 0);
    // SAFETY: the structure was filled.
    let known = unsafe { libc::pthread_attr_getstack(&raw const attributes, &raw mut base, &raw mut bytes) };
    // SAFETY: as above; it is not used after this.
    unsafe { libc::pthread_attr_destroy(&raw mut attributes) };
    if known == 0 { base.addr().saturating_add(bytes) } else { usize::MAX }
}

/// The bounds of a line of `/proc/self/maps`, and the kind of a mapping that is not private memory of the program.
fn entry(line: &[u8]) -> Option<(usize, usize, Option<&'static str>)> {
    let text = String::from_utf8_lossy(line);
    let mut fields = text.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
    let access = fields.next()?.as_bytes();
    let (_offset, _device, inode) = (fields.next()?, fields.next()?, fields.next()?);
    let name = fields.next().unwrap_or("");
    let kind = match access {
        [_, _, _, b's'] => Some("shared with other processes or with a file"),
        [b'r', b'w', _, _] if inode != "0" => Some("a mapping of a file"),
        [b'r', b'w', ..] if name == "[stack]" => Some("the stack of the first thread"),
        [b'r', b'w', ..] if name.is_empty() || name == "[heap]" || name.starts_with("[anon:") => None,
        [b'r', b'w', ..] => Some("memory of the kernel"),
        _ => Some("not readable and writable"),
    };
    Some((from, to, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let maps = b"1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-p 00000000 00:00 0    [heap]\n\
            4000-5000 r--p 00000000 00:00 0 \n5000-6000 rw-p 00000000 fe:00 77    /lib/libc.so.6\n\
            6000-7000 rw-s 00000000 00:01 9   /memfd:x (deleted)\n8000-9000 rw-p 00000000 00:00 0 [stack]\n";
        let parts = private_parts(maps, 0x2000, 0x2000).unwrap();
        assert_eq!(
            parts,
            [MappedPart { at: 0x2000, bytes: 0x1000 }, MappedPart { at: 0x3000, bytes: 0x1000 }]
        );
        for (at, bytes) in [(0x3000, 0x2000), (0x5000, 0x1000), (0x6000, 0x1000), (0x8000, 0x1000)] {
            assert!(matches!(private_parts(maps, at, bytes), Err(TakeOverError::Kind { .. })), "{at:#x}");
        }
        for (at, bytes) in [(0x7000, 0x1000), (0x0, 0x2000), (0x9000, 0x1000)] {
            assert!(matches!(private_parts(maps, at, bytes), Err(TakeOverError::Unmapped(_))), "{at:#x}");
        }
        assert!(matches!(private_parts(maps, 0x1001, 0x1000), Err(TakeOverError::Kind { .. })));
        assert!(matches!(private_parts(maps, usize::MAX - 0xfff, 0x2000), Err(TakeOverError::Unmapped(_))));
    }
}

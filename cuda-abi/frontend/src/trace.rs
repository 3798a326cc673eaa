//! The trace of a program's calls: `SLUICE_TRACE=FILE`.
//!
//! Each entry point of both drop-in libraries goes through [`traced`]. A call is two events of the Chrome trace format, which Perfetto
//! opens: one before, with the arguments, and one after, with the result and the values that the call stored. An event is one `write` to a
//! file that is only appended to. So there is no buffer to lose: a program that is killed leaves all its events, and the last one that has
//! no end is the call in which it died. The format needs no closing bracket.
//!
//! `%p` in the name stands for the process id. Without it, children write to the same file, line by line. A file has at most [`MOST_BYTES`].

#![expect(unsafe_code, reason = "reads memory of the program through the kernel, and owns a descriptor")]

use core::fmt::{self, Write as _};
use core::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use sluice_cuda_abi::status;

/// Bytes after which a file gets no more events.
pub const MOST_BYTES: u64 = 1 << 30;
/// Bytes of a text that an event shows.
const TEXT_BYTES: usize = 256;
/// The smallest number of the file's descriptor: programs expect that they get small ones.
const LEAST_DESCRIPTOR: i32 = 1000;

/// Nothing was read from the environment yet.
const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
static FILE: AtomicI32 = AtomicI32::new(-1);
/// The process that opened the file.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The process of which a thread opens the file, or 0.
static OPENING: AtomicI32 = AtomicI32::new(0);

/// An entry point, as declared.
#[derive(Debug)]
pub struct Site {
    /// The exported name.
    pub name: &'static str,
    /// Names and declared types of its parameters.
    pub parameters: &'static [(&'static str, &'static str)],
}

/// Runs `call`, and traces it if the user asks for that. `words` gives the arguments, see [`word`]; it is called only then.
#[inline]
pub fn traced<const N: usize>(
    site: &'static Site,
    words: impl Fn() -> [u64; N],
    call: impl FnOnce() -> u32,
) -> u32 {
    let traces = STATE.load(Ordering::Relaxed) != OFF;
    if traces {
        begin(site, &words());
    }
    let code = call();
    if traces {
        end(site, &words(), code);
    }
    code
}

/// The first bytes of an argument, at most eight: all of a number, and the address of a pointer of any type.
pub fn word<T: Copy>(argument: &T) -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: as many bytes as both have. Arguments are numbers, pointers and structures without padding.
    unsafe {
        core::ptr::copy_nonoverlapping(
            core::ptr::from_ref(argument).cast::<u8>(),
            bytes.as_mut_ptr(),
            size_of::<T>().min(8),
        );
    }
    u64::from_le_bytes(bytes)
}

/// The way in which an event shows a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Signed,
    Unsigned,
    Real,
    /// A handle, an address, or another word.
    Word,
}

/// A parameter by its declared type, in C's notation or that of [`Out`](crate::Out) and [`In`](crate::In).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ParameterKind {
    Value(Shown),
    Text,
    /// A pointer to a result of so many bytes.
    Result(Shown, usize),
}

fn kind(declared: &str) -> ParameterKind {
    // The compiler decides on the spaces in a type's text.
    let declared: String = declared.split_whitespace().collect();
    let pointee = declared
        .strip_prefix("*mut")
        .or_else(|| declared.strip_prefix("Out<").and_then(|rest| rest.strip_suffix('>')));
    match pointee {
        Some("c_int" | "i32") => ParameterKind::Result(Shown::Signed, 4),
        Some("c_uint" | "u32") => ParameterKind::Result(Shown::Unsigned, 4),
        Some("f32") => ParameterKind::Result(Shown::Real, 4),
        Some("usize") => ParameterKind::Result(Shown::Unsigned, 8),
        Some("u64" | "Handle" | "*mutc_void" | "*constc_void" | "*constc_char") => {
            ParameterKind::Result(Shown::Word, 8)
        }
        Some(_) => ParameterKind::Value(Shown::Word),
        None => match declared.as_str() {
            "c_int" | "i32" => ParameterKind::Value(Shown::Signed),
            "c_uint" | "u32" | "u16" | "u8" | "usize" => ParameterKind::Value(Shown::Unsigned),
            "f32" => ParameterKind::Value(Shown::Real),
            "*constc_char" | "Text<'_>" | "In<c_char>" => ParameterKind::Text,
            _ => ParameterKind::Value(Shown::Word),
        },
    }
}

impl Shown {
    fn write(self, line: &mut EventLine, word: u64) -> fmt::Result {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half of a word is the number")]
        let half = word as u32;
        match self {
            Shown::Signed => write!(line, "{}", half.cast_signed()),
            Shown::Unsigned => write!(line, "{word}"),
            // JSON has no numbers that are not finite.
            Shown::Real if f32::from_bits(half).is_finite() => write!(line, "{}", f32::from_bits(half)),
            Shown::Real => write!(line, "\"{}\"", f32::from_bits(half)),
            // A word does not fit into a number of JavaScript.
            Shown::Word => write!(line, "\"{word:#x}\""),
        }
    }
}

#[cold]
fn begin(site: &Site, words: &[u64]) {
    let Some(file) = file() else { return };
    let mut line = EventLine::default();
    let written = line.head(site, 'B').and_then(|()| {
        for (index, ((name, declared), word)) in site.parameters.iter().zip(words).enumerate() {
            write!(line, "{}\"{name}\":", if index > 0 { "," } else { "" })?;
            match kind(declared) {
                ParameterKind::Value(shown) => shown.write(&mut line, *word)?,
                ParameterKind::Result(..) => Shown::Word.write(&mut line, *word)?,
                ParameterKind::Text => line.text(*word)?,
            }
        }
        line.write_str("}},\n")
    });
    if written.is_ok() {
        append(file, &line.0);
    }
}

#[cold]
fn end(site: &Site, words: &[u64], code: u32) {
    let Some(file) = file() else { return };
    let mut line = EventLine::default();
    let written = line.head(site, 'E').and_then(|()| {
        let name = status::name(code).and_then(|name| name.to_str().ok()).unwrap_or("?");
        write!(line, "\"result\":\"{name}\",\"code\":{code}")?;
        let stored = site.parameters.iter().zip(words).filter(|_| code == 0);
        for ((name, declared), word) in stored {
            if let ParameterKind::Result(shown, bytes) = kind(declared)
                && let Some(value) = read_word(*word, bytes)
            {
                write!(line, ",\"*{name}\":")?;
                shown.write(&mut line, value)?;
            }
        }
        line.write_str("}},\n")
    });
    if written.is_ok() {
        append(file, &line.0);
    }
}

/// A line of the file.
#[derive(Default)]
struct EventLine(Vec<u8>);

impl fmt::Write for EventLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

impl EventLine {
    fn head(&mut self, site: &Site, phase: char) -> fmt::Result {
        let now = now();
        // SAFETY: a call without arguments.
        let thread = unsafe { libc::gettid() };
        let process = process_id();
        write!(
            self,
            "{{\"name\":\"{}\",\"cat\":\"cuda\",\"ph\":\"{phase}\",\"ts\":{}.{:03},\"pid\":{process},\"tid\":{thread},\"args\":{{",
            site.name,
            now / 1000,
            now % 1000
        )
    }

    /// The text at an address of the program.
    fn text(&mut self, address: u64) -> fmt::Result {
        let mut room = [0; TEXT_BYTES];
        let read = read(address, &mut room);
        let text = room[..read].split(|byte| *byte == 0).next().unwrap_or_default();
        if address == 0 || read == 0 {
            return Shown::Word.write(self, address);
        }
        self.write_char('"')?;
        for character in String::from_utf8_lossy(text).chars() {
            match character {
                '"' | '\\' => write!(self, "\\{character}")?,
                character if character.is_control() => write!(self, "\\u{:04x}", u32::from(character))?,
                character => self.write_char(character)?,
            }
        }
        self.write_char('"')
    }
}

fn process_id() -> i32 {
    std::process::id().cast_signed()
}

/// Nanoseconds of the clock that runs since the system started, as in other traces.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

fn read_word(address: u64, bytes: usize) -> Option<u64> {
    let mut word = [0; 8];
    (read(address, word.get_mut(..bytes)?) == bytes).then(|| u64::from_le_bytes(word))
}

/// Reads memory of the program through the kernel, up to the end of what is mapped: a pointer that a call ignores may be wild. Returns the bytes
/// that were read.
fn read(address: u64, into: &mut [u8]) -> usize {
    const PAGE: usize = 4096;
    let Ok(address) = usize::try_from(address) else { return 0 };
    let to_page_end = (PAGE - address % PAGE).min(into.len());
    // The kernel reads all of a range or nothing, so the part on the next page is a range of its own.
    let part = |start: usize, bytes: usize| libc::iovec {
        iov_base: core::ptr::without_provenance_mut(start),
        iov_len: bytes,
    };
    let from =
        [part(address, to_page_end), part(address.wrapping_add(to_page_end), into.len() - to_page_end)];
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let process = process_id();
    // SAFETY: the destination is `into`; a source that is not mapped is an error.
    let read = unsafe { libc::process_vm_readv(process, &raw const to, 1, from.as_ptr(), 2, 0) };
    usize::try_from(read).unwrap_or(0)
}

/// The file of this process, opened at the first event.
fn file() -> Option<i32> {
    let process = process_id();
    if OWNER.load(Ordering::Acquire) == process {
        return Some(FILE.load(Ordering::Relaxed)).filter(|file| *file >= 0);
    }
    open(process)
}

/// Opens the file, by one thread at a time: the first one opens it for all.
#[cold]
fn open(process: i32) -> Option<i32> {
    let mut before = 0;
    // A forked child may have a copy of its parent's mark, which no thread of the child takes away.
    while let Err(opens) = OPENING.compare_exchange(before, process, Ordering::Acquire, Ordering::Relaxed) {
        before = if opens == process { 0 } else { opens };
        std::thread::yield_now();
    }
    let file = if OWNER.load(Ordering::Relaxed) == process {
        Some(FILE.load(Ordering::Relaxed)).filter(|file| *file >= 0)
    } else if STATE.load(Ordering::Relaxed) == OFF {
        None
    } else {
        open_first(process)
    };
    OPENING.store(0, Ordering::Release);
    file
}

fn open_first(process: i32) -> Option<i32> {
    let Some(name) = std::env::var_os("SLUICE_TRACE").filter(|name| !name.is_empty()) else {
        STATE.store(OFF, Ordering::Relaxed);
        return None;
    };
    let before = FILE.load(Ordering::Relaxed);
    let (name, own) = with_process(name, process);
    let file = if before >= 0 && !own {
        // A forked child goes on with its parent's file.
        before
    } else {
        match create(name) {
            Ok(file) => file,
            Err(error) => {
                eprintln!("sluice: cannot write the trace of SLUICE_TRACE: {error}");
                STATE.store(OFF, Ordering::Relaxed);
                return None;
            }
        }
    };
    FILE.store(file, Ordering::Relaxed);
    STATE.store(ON, Ordering::Relaxed);
    OWNER.store(process, Ordering::Release);
    if before >= 0 && before != file {
        close(before);
    }
    Some(file)
}

/// The name with the process id in the place of `%p`, and whether it has one.
fn with_process(name: OsString, process: i32) -> (OsString, bool) {
    let bytes = name.as_bytes();
    match bytes.windows(2).position(|pair| pair == b"%p") {
        None => (name, false),
        Some(at) => {
            let id = process.to_string();
            (OsString::from_vec([&bytes[..at], id.as_bytes(), &bytes[at + 2..]].concat()), true)
        }
    }
}

fn create(name: OsString) -> std::io::Result<i32> {
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};
    let file = std::fs::File::options().append(true).create(true).open(name)?;
    if file.metadata()?.len() == 0 {
        append(file.as_raw_fd(), b"[\n");
    }
    // SAFETY: copies an open descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR) } {
        // The program may not have as many descriptors.
        -1 => Ok(file.into_raw_fd()),
        copy => Ok(copy),
    }
}

fn close(file: i32) {
    // SAFETY: a descriptor that `create` made in the parent, and that no thread of this process uses.
    unsafe { libc::close(file) };
}

/// Appends a line with one call of the kernel, so that lines of several threads and processes do not mix.
fn append(file: i32, line: &[u8]) {
    // SAFETY: a structure for the answer, which any bytes are.
    let mut facts: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: a place for the answer.
    let known = unsafe { libc::fstat(file, &raw mut facts) } == 0;
    // SAFETY: the bytes of the line. A disk that is full loses it, which must not disturb the program.
    let write = |line: &[u8]| unsafe { libc::write(file, line.as_ptr().cast(), line.len()) };
    if known && u64::try_from(facts.st_size).unwrap_or(0) < MOST_BYTES {
        write(line);
    } else if STATE.swap(OFF, Ordering::Relaxed) != OFF {
        eprintln!("sluice: the trace of SLUICE_TRACE is full; later calls are not in it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C101
    #[test]
    fn declared_types_decide_on_the_form_of_values() {
        for (declared, expected) in [
            ("c_int", ParameterKind::Value(Shown::Signed)),
            ("u32", ParameterKind::Value(Shown::Unsigned)),
            ("Handle", ParameterKind::Value(Shown::Word)),
            ("*const c_char", ParameterKind::Text),
            ("Text<'_>", ParameterKind::Text),
            ("*mut Handle", ParameterKind::Result(Shown::Word, 8)),
            ("* mut Handle", ParameterKind::Result(Shown::Word, 8)),
            ("* mut * const c_char", ParameterKind::Result(Shown::Word, 8)),
            ("Out<u64>", ParameterKind::Result(Shown::Word, 8)),
            ("*mut c_int", ParameterKind::Result(Shown::Signed, 4)),
            ("Out<usize>", ParameterKind::Result(Shown::Unsigned, 8)),
            ("*mut c_void", ParameterKind::Value(Shown::Word)),
            ("Option<HostFunction>", ParameterKind::Value(Shown::Word)),
        ] {
            assert_eq!(kind(declared), expected, "{declared}");
        }
    }

    // Promise: C101
    #[test]
    #[cfg(not(miri))]
    fn wild_pointers_are_shown_and_not_followed() {
        assert_eq!((read_word(0, 8), read_word(16, 4), read_word(u64::MAX - 2, 8)), (None, None, None));
        let value = 7_u64;
        assert_eq!(read_word(core::ptr::from_ref(&value).expose_provenance() as u64, 8), Some(7));
        let mut line = EventLine::default();
        line.text(8).unwrap();
        line.text(c"a\"b\\c\n".as_ptr().expose_provenance() as u64).unwrap();
        assert_eq!(String::from_utf8(line.0).unwrap(), r#""0x8""a\"b\\c\u000a""#);
    }

    #[test]
    fn name_has_the_process_in_the_place_of_its_sign() {
        assert_eq!(with_process("a-%p.json".into(), 12), ("a-12.json".into(), true));
        assert_eq!(with_process("a.json".into(), 12), ("a.json".into(), false));
    }
}

//! Processes that a test controls: each is a separate user of the device and executes commands from a socket, which carries
//! descriptors as well.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::*;

/// A process that executes commands. It is killed when this value is dropped.
pub(crate) struct Peer {
    child: Child,
    socket: OwnedFd,
    output: Option<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts a process that runs `test`, which calls [`serve`].
    pub(crate) fn start(test: &str, state: &Path) -> Peer {
        Peer::start_as(command(test, state, "peer"))
    }

    /// Like [`Peer::start`], with a command of the caller.
    pub(crate) fn start_as(mut command: Command) -> Peer {
        let mut ends = [-1; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: two descriptors are written.
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) }, 0);
        // SAFETY: both were just created and have no other owner.
        let [here, there] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let mut child = command.stdin(Stdio::from(there)).spawn().unwrap();
        let output = child.stdout.take().map(BufReader::new);
        let peer = Peer { child, socket: here, output };
        // The device exists once this returns.
        peer.ask("nothing").unwrap();
        peer
    }

    /// Executes a command. Returns its number, or the driver's error.
    pub(crate) fn ask(&self, words: &str) -> Result<u64, u32> {
        self.talk(words, None).0
    }

    /// Like [`Peer::ask`], and sends a descriptor.
    pub(crate) fn ask_with(&self, words: &str, descriptor: BorrowedFd<'_>) -> Result<u64, u32> {
        self.talk(words, Some(descriptor.as_raw_fd())).0
    }

    /// Like [`Peer::ask`], and receives a descriptor.
    pub(crate) fn ask_for(&self, words: &str) -> OwnedFd {
        let (result, descriptor) = self.talk(words, None);
        assert_eq!(result, Ok(0), "{words}");
        descriptor.unwrap()
    }

    fn talk(&self, words: &str, descriptor: Option<RawFd>) -> (Result<u64, u32>, Option<OwnedFd>) {
        send(self.socket.as_raw_fd(), words, descriptor).unwrap();
        let (answer, descriptor) = receive(self.socket.as_raw_fd()).unwrap();
        let (kind, number) = answer.split_once(' ').unwrap_or_else(|| panic!("{words}: {answer}"));
        let result = match kind {
            "ok" => Ok(number.parse().unwrap()),
            "error" => Err(number.parse().unwrap()),
            _ => panic!("{words}: {answer}"),
        };
        (result, descriptor)
    }

    /// Returns the IPC name of an allocation, at an offset.
    pub(crate) fn name(&mut self, piece: u64, offset: u64) -> String {
        self.ask(&format!("name {piece} {offset}")).unwrap();
        let output = self.output.as_mut().unwrap();
        loop {
            let mut line = String::new();
            assert!(output.read_line(&mut line).unwrap() > 0);
            if line.split(' ').filter(|word| word.trim().parse::<u64>().is_ok()).count() == 8 {
                return line.trim().to_owned();
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets the process return from its main function.
    pub(crate) fn finish(mut self) {
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) }, 0);
        assert!(self.child.wait().unwrap().success());
    }

    /// Kills the process at once.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A control message with one descriptor: its length, level and type, and the number.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn send(socket: RawFd, words: &str, descriptor: Option<RawFd>) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: words.as_ptr().cast_mut().cast(), iov_len: words.len() };
    let mut control = Control([0; 64]);
    // SAFETY: plain data, all zeroes are a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if let Some(descriptor) = descriptor {
        control.0[..8].copy_from_slice(&20u64.to_ne_bytes());
        control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        control.0[16..20].copy_from_slice(&descriptor.to_ne_bytes());
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), 24);
    }
    // SAFETY: everything that the message names lives through the call.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn receive(socket: RawFd) -> Option<(String, Option<OwnedFd>)> {
    let mut bytes = vec![0u8; 4096];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: plain data, all zeroes are a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), 64);
    // SAFETY: everything that the message names lives through the call.
    let got = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let got = usize::try_from(got).ok().filter(|got| *got > 0)?;
    let descriptor = (message.msg_controllen > 0).then(|| {
        let [a, b, c, d] = control.0[16..20] else { unreachable!() };
        // SAFETY: the only control message that is sent here is one descriptor, which this process now owns.
        unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes([a, b, c, d])) }
    });
    Some((String::from_utf8(bytes[..got].to_vec()).unwrap(), descriptor))
}

/// A kernel whose blocks loop `count` times and then count themselves.
const WORK: &str = r"
.visible .entry work(.param .u64 counter, .param .u64 count)
{
    .reg .pred %p; .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [counter]; ld.param.u64 %rd1, [count];
AGAIN:
    add.u64 %rd1, %rd1, -1;
    setp.ne.u64 %p, %rd1, 0;
    @%p bra AGAIN;
    atom.global.add.u64 %rd2, [%rd0], 1;
    ret;
}
";

/// A kernel that waits for one word and then sets another.
const RELAY: &str = r"
.visible .entry relay(.param .u64 from, .param .u64 to)
{
    .reg .pred %p; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [from]; ld.param.u64 %rd1, [to];
AGAIN:
    ld.volatile.global.u64 %rd2, [%rd0];
    setp.eq.u64 %p, %rd2, 0;
    @%p bra AGAIN;
    st.volatile.global.u64 [%rd1], 1;
    ret;
}
";

/// Kernels that write all of their shared or local memory, and kernels that read it.
const REMNANT: &str = r"
.visible .entry leave(.param .u64 found, .param .u64 value)
{
    .SPACE .align 8 .b8 room[4096];
    .reg .pred %p; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [value];
    mov.u64 %rd2, room; mov.u64 %rd3, 512;
AGAIN:
    st.SPACE.u64 [%rd2], %rd1;
    add.u64 %rd2, %rd2, 8; add.u64 %rd3, %rd3, -1;
    setp.ne.u64 %p, %rd3, 0;
    @%p bra AGAIN;
    ret;
}
.visible .entry find(.param .u64 found, .param .u64 value)
{
    .SPACE .align 8 .b8 room[4096];
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [found];
    ld.SPACE.u64 %rd1, [room+2048];
    st.global.u64 [%rd0], %rd1;
    ret;
}
";

/// A kernel that allocates memory and stores its address.
const ALLOCATE: &str = r"
.extern .func (.param .b64 memory) malloc (.param .b64 bytes);
.visible .entry allocate(.param .u64 got, .param .u64 bytes)
{
    .reg .b64 %rd<3>;
    .param .b64 in; .param .b64 out;
    ld.param.u64 %rd0, [got]; ld.param.u64 %rd1, [bytes];
    st.param.b64 [in], %rd1;
    call.uni (out), malloc, (in);
    ld.param.b64 %rd2, [out];
    st.global.u64 [%rd0], %rd2;
    ret;
}
";

/// Memory of a peer.
#[derive(Default)]
struct Piece {
    handle: u64,
    range: u64,
    bytes: u64,
}

/// The loop of a peer: executes commands until its test ends.
pub(crate) fn serve() {
    // SAFETY: makes the kernel kill this process when its parent dies, in case the test fails.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    init();
    let mut pieces: BTreeMap<u64, Piece> = BTreeMap::new();
    while let Some((words, descriptor)) = receive(0) {
        let mut out = None;
        let answer = match obey(&words, descriptor, &mut pieces, &mut out) {
            Ok(number) => format!("ok {number}"),
            Err(code) => format!("error {code}"),
        };
        send(0, &answer, out.as_ref().map(AsRawFd::as_raw_fd)).unwrap();
    }
}

fn checked(code: u32) -> Result<(), u32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn obey(
    words: &str,
    descriptor: Option<OwnedFd>,
    pieces: &mut BTreeMap<u64, Piece>,
    out: &mut Option<OwnedFd>,
) -> Result<u64, u32> {
    let mut words = words.split(' ');
    let verb = words.next().unwrap();
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    let number = |index: usize| numbers[index];
    let piece = |pieces: &mut BTreeMap<u64, Piece>| -> *mut Piece { pieces.entry(number(0)).or_default() };
    match verb {
        "nothing" => {}
        // context [DEVICE]
        "context" => {
            let device = i32::try_from(numbers.first().copied().unwrap_or(0)).unwrap();
            let mut context = 0;
            checked(cu!(cuCtxCreate_v2(&raw mut context, 0, device)))?;
            return Ok(context);
        }
        "current" => {
            let mut context = 0;
            checked(cu!(cuCtxGetCurrent(&raw mut context)))?;
            return Ok(context);
        }
        "destroy" => checked(cu!(cuCtxDestroy_v2(number(0))))?,
        "retain-primary" => {
            let mut context = 0;
            checked(cu!(cuDevicePrimaryCtxRetain(&raw mut context, 0)))?;
            checked(cu!(cuCtxSetCurrent(context)))?;
        }
        "release-primary" => checked(cu!(cuDevicePrimaryCtxRelease_v2(0)))?,
        "limit" => checked(cu!(cuCtxSetLimit(i32::try_from(number(0)).unwrap(), number(1))))?,
        "attribute" => {
            let mut value = 0;
            checked(cu!(cuDeviceGetAttribute(&raw mut value, i32::try_from(number(0)).unwrap(), 0)))?;
            return Ok(u64::try_from(value).unwrap());
        }
        "free" => return Ok(free_bytes()),
        "total" => {
            let (mut free, mut total) = (0, 0);
            checked(cu!(cuMemGetInfo_v2(&raw mut free, &raw mut total)))?;
            return Ok(total);
        }
        "confine" => confine::confine(),
        "descriptors" => {
            let limit = libc::rlimit { rlim_cur: number(0), rlim_max: number(0) };
            // SAFETY: the structure lives through the call.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        }
        // create PIECE PAGES SHAREABLE
        "create" => {
            let properties = [1, u32::try_from(number(2)).unwrap(), 1, 0, 0, 0, 0, 0];
            let mut handle = 0;
            checked(cu!(cuMemCreate(&raw mut handle, number(1) * PAGE, &raw const properties, 0)))?;
            pieces.insert(number(0), Piece { handle, range: 0, bytes: number(1) * PAGE });
        }
        "export" => {
            let mut made = -1;
            checked(cu!(cuMemExportToShareableHandle(&raw mut made, pieces[&number(0)].handle, 1, 0)))?;
            // SAFETY: the driver passes ownership of the descriptor. It is sent, and closed here.
            *out = Some(unsafe { OwnedFd::from_raw_fd(made) });
        }
        // export-often PIECE COUNT
        "export-often" => {
            for _ in 0..number(1) {
                let mut made = -1;
                checked(cu!(cuMemExportToShareableHandle(&raw mut made, pieces[&number(0)].handle, 1, 0)))?;
                // SAFETY: the driver passes ownership of the descriptor.
                drop(unsafe { OwnedFd::from_raw_fd(made) });
            }
        }
        // import PIECE PAGES
        "import" => {
            let mut handle = 0;
            let shared = descriptor.unwrap();
            let number_of_it = i64::from(shared.as_raw_fd());
            checked(cu!(cuMemImportFromShareableHandle(&raw mut handle, number_of_it, 1)))?;
            drop(shared);
            pieces.insert(number(0), Piece { handle, range: 0, bytes: number(1) * PAGE });
        }
        "map" => {
            let piece = piece(pieces);
            // SAFETY: no other code has the piece.
            let piece = unsafe { &mut *piece };
            let access = [1, 0, 3];
            checked(cu!(cuMemAddressReserve(&raw mut piece.range, piece.bytes, 0, 0, 0)))?;
            checked(cu!(cuMemMap(piece.range, piece.bytes, 0, piece.handle, 0)))?;
            checked(cu!(cuMemSetAccess(piece.range, piece.bytes, &raw const access, 1)))?;
        }
        "unmap" => {
            let piece = &pieces[&number(0)];
            checked(cu!(cuMemUnmap(piece.range, piece.bytes)))?;
            checked(cu!(cuMemAddressFree(piece.range, piece.bytes)))?;
        }
        "release" => checked(cu!(cuMemRelease(pieces[&number(0)].handle)))?,
        // Gets another handle of the mapped memory and releases it; returns whether it is the known one.
        "retain" => {
            let (piece, mut handle) = (&pieces[&number(0)], 0);
            checked(cu!(cuMemRetainAllocationHandle(&raw mut handle, piece.range)))?;
            checked(cu!(cuMemRelease(handle)))?;
            return Ok(u64::from(handle == piece.handle));
        }
        "shareable" => {
            let mut properties = [0u32; 8];
            let handle = pieces[&number(0)].handle;
            checked(cu!(cuMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr(), handle)))?;
            assert_eq!((properties[0], properties[2], properties[3]), (1, 1, 0), "pinned on device 0");
            return Ok(u64::from(properties[1]));
        }
        "access" => {
            let (mut flags, location) = (0, [1, 0]);
            let range = pieces[&number(0)].range;
            checked(cu!(cuMemGetAccess(&raw mut flags, &raw const location, range)))?;
            return Ok(flags);
        }
        // allocate PIECE BYTES
        "allocate" => {
            let mut range = 0;
            checked(cu!(cuMemAlloc_v2(&raw mut range, number(1))))?;
            pieces.insert(number(0), Piece { handle: 0, range, bytes: number(1) });
        }
        "deallocate" => checked(cu!(cuMemFree_v2(pieces[&number(0)].range)))?,
        // module BYTES: loads a module with a variable of that size; returns its handle
        "module" => {
            let source = ptx(&format!(".visible .global .align 4 .b8 variable[{}];", number(0)));
            let mut module = 0;
            checked(cu!(cuModuleLoadData(&raw mut module, source.as_ptr().cast())))?;
            return Ok(module);
        }
        // allocating-module: loads a module with a kernel that calls `malloc`; returns its handle
        "allocating-module" => {
            let source = ptx(ALLOCATE);
            let mut module = 0;
            checked(cu!(cuModuleLoadData(&raw mut module, source.as_ptr().cast())))?;
            return Ok(module);
        }
        // allocate-in-kernel MODULE BYTES: returns whether the kernel got the memory
        "allocate-in-kernel" => {
            let got = Flag::new();
            let allocate = function(number(0), "allocate");
            checked(launch(allocate, 1, 1, 0, &mut [got.address(), number(1)]))?;
            checked(cu!(cuCtxSynchronize()))?;
            return Ok(u64::from(got.get() != 0));
        }
        "unload" => checked(cu!(cuModuleUnload(number(0))))?,
        // work STREAMS BLOCKS: starts kernels that count their blocks, one in each stream, with some work per block; does not
        // wait
        "work" => {
            let counter = Flag::new();
            let work = function(module(WORK), "work");
            for _ in 0..number(0) {
                let blocks = u32::try_from(number(1)).unwrap();
                checked(launch(work, blocks, 1, stream(1), &mut [counter.address(), 50_000]))?;
            }
            pieces.insert(u64::MAX, Piece { handle: 0, range: counter.address(), bytes: 8 });
        }
        "worked" => {
            let counter = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(
                usize::try_from(pieces[&u64::MAX].range).unwrap(),
            );
            // SAFETY: pinned memory that lives as long as the context, and is only changed atomically.
            return Ok(unsafe { &*counter }.load(std::sync::atomic::Ordering::SeqCst));
        }
        // short COUNT: runs that many small kernels, each waited for; returns the microseconds of the shortest
        "short" => {
            let counter = Flag::new();
            let work = function(module(WORK), "work");
            let mut shortest = u64::MAX;
            for _ in 0..number(0) {
                let begun = std::time::Instant::now();
                checked(launch(work, 1, 1, 0, &mut [counter.address(), 100]))?;
                checked(cu!(cuCtxSynchronize()))?;
                shortest = shortest.min(u64::try_from(begun.elapsed().as_micros()).unwrap());
            }
            return Ok(shortest);
        }
        // relay COUNT: runs kernels that each wait until the next one reports that it runs; the last one reports first
        "relay" => {
            let flags: Vec<Flag> = (0..=number(0)).map(|_| Flag::new()).collect();
            let relay = function(module(RELAY), "relay");
            for pair in flags.windows(2) {
                let mut values = [pair[1].address(), pair[0].address()];
                checked(launch(relay, 1, 1, stream(1), &mut values))?;
            }
            flags.last().unwrap().set(1);
            checked(cu!(cuCtxSynchronize()))?;
            return Ok(flags[..flags.len() - 1].iter().map(Flag::get).sum());
        }
        // leave-in SPACE VALUE / find-in SPACE: writes shared or local memory; reads it before anything else has written it
        "leave-in" | "find-in" => {
            let space = if number(0) == 0 { "shared" } else { "local" };
            let found = Flag::new();
            let source = REMNANT.replace("SPACE", space);
            let kernel = function(module(&source), if verb == "find-in" { "find" } else { "leave" });
            let value = numbers.get(1).copied().unwrap_or(0);
            checked(launch(kernel, 1, 32, 0, &mut [found.address(), value]))?;
            checked(cu!(cuCtxSynchronize()))?;
            return Ok(found.get());
        }
        // name PIECE: prints the IPC name of an allocation, as a line of eight numbers
        "name" => {
            let mut handle = IpcHandle([0; 8]);
            checked(cu!(cuIpcGetMemHandle(&raw mut handle, pieces[&number(0)].range + number(1))))?;
            let words: Vec<String> = handle.0.iter().map(u64::to_string).collect();
            println!("\n{}", words.join(" "));
        }
        // open PIECE BYTES and the name
        "open" => {
            let handle = IpcHandle(std::array::from_fn(|index| number(2 + index)));
            let mut range = 0;
            checked(cu!(cuIpcOpenMemHandle_v2(&raw mut range, handle, 1)))?;
            pieces.insert(number(0), Piece { handle: 0, range, bytes: number(1) });
            return Ok(range);
        }
        "close" => checked(cu!(cuIpcCloseMemHandle(pieces[&number(0)].range)))?,
        // set PIECE BYTE: fills the first word, by the device of the current context
        "set" => {
            checked(cu!(cuMemsetD8_v2(pieces[&number(0)].range, u8::try_from(number(1)).unwrap(), 8)))?;
            checked(cu!(cuCtxSynchronize()))?;
        }
        // allocate-async PIECE BYTES
        "allocate-async" => {
            let mut range = 0;
            checked(cu!(cuMemAllocAsync(&raw mut range, number(1), 0)))?;
            pieces.insert(number(0), Piece { handle: 0, range, bytes: number(1) });
        }
        // put PIECE OFFSET VALUE
        "put" => write(pieces[&number(0)].range + number(1), &[number(2)]),
        "get" => return Ok(read::<u64>(pieces[&number(0)].range + number(1), 1)[0]),
        // count PIECE VALUE: returns the number of words with that value
        "count" => {
            let piece = &pieces[&number(0)];
            let words = read::<u64>(piece.range, usize::try_from(piece.bytes / 8).unwrap());
            return Ok(words.iter().filter(|word| **word == number(1)).count() as u64);
        }
        // fill PIECE VALUE
        "fill" => {
            let piece = &pieces[&number(0)];
            let words = vec![number(1); usize::try_from(piece.bytes / 8).unwrap()];
            write(piece.range, &words);
        }
        other => panic!("{other}"),
    }
    Ok(0)
}

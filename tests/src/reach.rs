#![expect(unsafe_code, reason = "signals to any number and System V memory have no safe calls")]

//! Attempts of a process to reach things of its host that are not its own: the list, as data.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

use serde::{Deserialize, Serialize};
use sluice_kit::processes::Process;
use tempfile::TempDir;

/// The things of a host that a process tries to reach.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Targets {
    /// Name of an abstract socket that listens.
    pub abstract_name: String,
    /// A Unix socket that listens.
    pub socket: PathBuf,
    /// A port of 127.0.0.1 that listens.
    pub port: u16,
    /// A process of the same user.
    pub process: i32,
    /// Key of a System V memory segment of the same user.
    pub segment: i32,
    /// A file of the same user.
    pub file: PathBuf,
}

/// Largest length of a message to or from `sluice-intruder`.
pub const INTRUDER_BYTES: usize = 4 << 10;

/// Name of the file with the targets in the folder of a lying worker.
pub const FILE: &str = "targets";

impl Targets {
    /// Writes them for a lying worker.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        Ok(std::fs::write(folder.join(FILE), serde_json::to_vec(self)?)?)
    }

    /// Reads them.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(folder.join(FILE))?)?)
    }
}

/// Things of a host to which a process may try to find a way, all of this process. Drop removes them.
#[derive(Debug)]
pub struct Host {
    /// Their names.
    pub targets: Targets,
    _named: UnixListener,
    _socket: UnixListener,
    _port: TcpListener,
    _process: Process,
    _segment: Segment,
    _folder: TempDir,
}

impl Host {
    /// Makes them.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn make() -> anyhow::Result<Self> {
        static MADE: AtomicI32 = AtomicI32::new(0);
        let folder = tempfile::tempdir()?;
        // An abstract name that is as unique as the folder's.
        let abstract_name = folder.path().display().to_string();
        let named = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&abstract_name)?)?;
        let path = folder.path().join("socket");
        let socket = UnixListener::bind(&path)?;
        let port = TcpListener::bind("127.0.0.1:0")?;
        let mut sleep = Command::new("sleep");
        sleep.arg("infinity");
        // SAFETY: the hook makes system calls only.
        unsafe { sleep.pre_exec(drop_capabilities) };
        let process = Process(sleep.spawn()?);
        // Keys of other programs are rarely in this range.
        let key =
            0x5100_0000 + 16 * i32::try_from(std::process::id())? + MADE.fetch_add(1, Ordering::Relaxed);
        let segment = Segment::make(key)?;
        let targets = Targets {
            abstract_name,
            socket: path,
            port: port.local_addr()?.port(),
            process: i32::try_from(process.0.id())?,
            segment: segment.key,
            file: PathBuf::from("/etc/passwd"),
        };
        Ok(Self {
            targets,
            _named: named,
            _socket: socket,
            _port: port,
            _process: process,
            _segment: segment,
            _folder: folder,
        })
    }
}

/// Keeps a process of root from having capabilities after exec: the processes of a launcher have none either, and may trace no
/// process that has more.
fn drop_capabilities() -> io::Result<()> {
    for bit in 0..u64::BITS {
        // Ends at the first capability that this process may not drop, or the kernel does not have.
        let capability = rustix::thread::CapabilitySet::from_bits_retain(1 << bit);
        if rustix::thread::remove_capability_from_bounding_set(capability).is_err() {
            break;
        }
    }
    Ok(())
}

/// A System V memory segment. Drop removes it.
#[derive(Debug)]
struct Segment {
    key: i32,
    number: i32,
}

impl Segment {
    fn make(key: i32) -> io::Result<Self> {
        // SAFETY: no pointers.
        let number = unsafe { libc::shmget(key, 4096, libc::IPC_CREAT | libc::IPC_EXCL | 0o600) };
        if number < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { key, number }) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the command takes no buffer.
        unsafe { libc::shmctl(self.number, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

/// Succeeds if the process reaches a thing.
pub type Attempt = fn(&Targets) -> io::Result<()>;

/// Every attempt, with a name of one word.
pub const ATTEMPTS: [(&str, Attempt); 11] = [
    ("abstract-socket", |targets| {
        let address = SocketAddr::from_abstract_name(&targets.abstract_name)?;
        UnixStream::connect_addr(&address).map(drop)
    }),
    ("socket", |targets| UnixStream::connect(&targets.socket).map(drop)),
    ("port", |targets| TcpStream::connect(("127.0.0.1", targets.port)).map(drop)),
    ("status-of-a-process", |targets| std::fs::read(format!("/proc/{}/status", targets.process)).map(drop)),
    ("signal", |targets| done(no_signal(targets.process))),
    ("shared-segment", |targets| done(segment(targets.segment))),
    ("file", |targets| std::fs::read(&targets.file).map(drop)),
    ("new-file-in-shm", |_| new_file("/dev/shm")),
    ("new-file-in-tmp", |_| new_file("/tmp")),
    ("message-queue", |_| message_queue()),
    ("private-memory-beyond-the-host", |_| private_memory()),
];

/// Attempts that end a process if the launcher has its filter, which its children inherit; each with a name of one word.
pub const ATTEMPTS_WITHOUT_ANY_FILTER: [(&str, Attempt); 2] = [
    ("trace", |targets| done(trace(targets.process))),
    // A process that may read the other's memory is told that there is none at this address.
    ("memory-of-a-process", |targets| match done(read_memory(targets.process)) {
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
        result => result,
    }),
];

fn done(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends no signal, but needs the right to send one.
fn no_signal(process: i32) -> i32 {
    // SAFETY: no pointers.
    unsafe { libc::kill(process, 0) }
}

/// Traces a process for a moment, without stopping it.
fn trace(process: i32) -> i32 {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the request takes no address and no data.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, none, none) };
    if seized == 0 {
        // SAFETY: the request takes no address and no data.
        unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, process, none, none) };
        // SAFETY: no status is wanted; the process is traced, and stops.
        unsafe { libc::waitpid(process, std::ptr::null_mut(), libc::__WALL) };
        // SAFETY: the request takes no address and no data.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, process, none, none) };
    }
    if seized < 0 { -1 } else { 0 }
}

/// Reads a byte at an address at which no process has memory.
fn read_memory(process: i32) -> i32 {
    let mut byte = 0_u8;
    let ours = libc::iovec { iov_base: std::ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    let theirs = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
    // SAFETY: the kernel writes to `ours` only, one byte.
    let read = unsafe { libc::process_vm_readv(process, &raw const ours, 1, &raw const theirs, 1, 0) };
    if read < 0 { -1 } else { 0 }
}

fn segment(key: i32) -> i32 {
    // With the right to read and to write it.
    // SAFETY: no pointers.
    unsafe { libc::shmget(key, 0, 0o600) }.min(0)
}

/// Makes a message queue and removes it.
fn message_queue() -> io::Result<()> {
    let name = CString::new(format!("/sluice-reach-{}", std::process::id()))?;
    let attributes = std::ptr::null_mut::<libc::mq_attr>();
    // SAFETY: the name ends with a NUL; without attributes the kernel takes its own.
    let queue = unsafe { libc::mq_open(name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600, attributes) };
    done(queue.min(0))?;
    // SAFETY: the queue was just opened, and no other code has it.
    done(unsafe { libc::mq_close(queue) })?;
    // SAFETY: as above.
    done(unsafe { libc::mq_unlink(name.as_ptr()) })
}

/// Maps more private memory than any process may, and touches none.
fn private_memory() -> io::Result<()> {
    // SAFETY: no pointers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    // SAFETY: no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let bytes = usize::try_from(2 * pages * page + (4 << 30)).map_err(io::Error::other)?;
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address that the kernel chooses.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is this function's own.
    done(unsafe { libc::munmap(memory, bytes) })
}

fn new_file(folder: &str) -> io::Result<()> {
    let path = Path::new(folder).join(format!("sluice-reach-{}", std::process::id()));
    let mut file = File::create(&path)?;
    file.write_all(b"reached")?;
    std::fs::remove_file(path)
}

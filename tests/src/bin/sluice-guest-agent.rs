//! The agent inside a test guest: runs commands for the tests on the host, several at once.
//!
//! Reads requests from a virtio-serial port and answers there; see `agent_protocol`. Runs as root in the guest, because
//! it must become any user, signal any process and reboot. It has no code of Sluice.

use std::env;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};
use sluice_tests::agent_protocol::{
    Exited, Frame, Hello, Kind, PutRequest, RunRequest, SignalRequest, read_frame, write_frame,
};

/// Maximum bytes of output per frame; the kernel passes such a frame on in one piece.
const CHUNK: usize = 16 << 10;

type Port = Arc<Mutex<File>>;

fn main() -> Result<()> {
    let path = env::args().nth(1).context("usage: sluice-guest-agent PORT")?;
    let file =
        OpenOptions::new().read(true).write(true).open(&path).with_context(|| format!("opening {path}"))?;
    let mut requests = BufReader::new(file.try_clone().context("duplicating the port")?);
    let port: Port = Arc::new(Mutex::new(file));
    send(&port, Kind::Hello, 0, &serde_json::to_vec(&hello()?)?);
    while let Some(frame) = read_frame(&mut requests).context("reading a request")? {
        let request = frame.request;
        match frame.kind {
            // A command's own thread sends its answers.
            Kind::Run => {
                let port = Arc::clone(&port);
                thread::spawn(move || run(&port, &frame));
            }
            Kind::Signal => done(&port, request, &signal(&frame.payload)),
            Kind::Put => done(&port, request, &put(&frame.payload)),
            Kind::Shutdown => done(&port, request, &shutdown(&frame.payload)),
            other => done(&port, request, &Err(anyhow::anyhow!("{other:?} is no request"))),
        }
    }
    // The host has closed the port: the test has ended.
    Ok(())
}

fn hello() -> Result<Hello> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
    Ok(Hello {
        kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
        boot_id: read("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        uptime_seconds: read("/proc/uptime")?
            .split(' ')
            .next()
            .and_then(|seconds| seconds.parse().ok())
            .context("/proc/uptime starts with a number")?,
        render_node: fs::exists("/dev/dri/renderD128")?,
    })
}

/// Sends a frame. The port is the only connection to the host, so a failure to write goes to the console.
fn send(port: &Port, kind: Kind, request: u32, payload: &[u8]) {
    let mut to = port.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = write_frame(&mut *to, kind, request, payload) {
        eprintln!("guest agent: {kind:?}: {error}");
    }
}

fn done(port: &Port, request: u32, result: &Result<()>) {
    let text = result.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default();
    send(port, Kind::Done, request, text.as_bytes());
}

fn run(port: &Port, frame: &Frame) {
    if let Err(error) = run_to_its_end(port, frame) {
        send(port, Kind::Stderr, frame.request, format!("guest agent: {error:#}\n").as_bytes());
        let exited = Exited { code: Some(127), signal: None, seconds: 0.0 };
        send(port, Kind::Exited, frame.request, &serde_json::to_vec(&exited).unwrap_or_default());
    }
}

fn run_to_its_end(port: &Port, frame: &Frame) -> Result<()> {
    let request: RunRequest = serde_json::from_slice(&frame.payload).context("reading the request")?;
    let mut command = if request.user == "root" {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &request.script]);
        shell
    } else {
        // su replaces itself by the shell, so the process reported below is the command's own.
        let mut su = Command::new("/bin/su");
        su.args(["-s", "/bin/sh", &request.user, "-c", &request.script]);
        su
    };
    command.envs(&request.environment).current_dir("/tmp").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = command.spawn().context("starting the command")?;
    send(port, Kind::Started, frame.request, child.id().to_string().as_bytes());
    let stdout = child.stdout.take().context("standard output is piped")?;
    let stderr = child.stderr.take().context("standard error is piped")?;
    let status = thread::scope(|scope| {
        scope.spawn(|| forward(port, Kind::Stdout, frame.request, stdout));
        scope.spawn(|| forward(port, Kind::Stderr, frame.request, stderr));
        child.wait()
    })
    .context("waiting for the command")?;
    let seconds = started.elapsed().as_secs_f64();
    let exited = Exited { code: status.code(), signal: status.signal(), seconds };
    send(port, Kind::Exited, frame.request, &serde_json::to_vec(&exited)?);
    Ok(())
}

fn forward(port: &Port, kind: Kind, request: u32, mut from: impl Read) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        send(port, kind, request, &buffer[..length]);
    }
}

fn signal(payload: &[u8]) -> Result<()> {
    let request: SignalRequest = serde_json::from_slice(payload).context("reading the request")?;
    let process = Pid::from_raw(request.process).context("0 is not a process id")?;
    let signal = Signal::from_named_raw(request.signal).context("no such signal")?;
    rustix::process::kill_process(process, signal).context("sending the signal")
}

fn put(payload: &[u8]) -> Result<()> {
    let split =
        payload.iter().position(|byte| *byte == b'\n').context("a file's head ends with a newline")?;
    let request: PutRequest = serde_json::from_slice(&payload[..split]).context("reading the request")?;
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .append(!request.truncate)
        .truncate(request.truncate)
        .mode(request.mode)
        .open(&request.path)
        .with_context(|| format!("opening {}", request.path))?;
    file.set_permissions(fs::Permissions::from_mode(request.mode)).context("setting permissions")?;
    file.write_all(&payload[split + 1..]).context("writing")
}

fn shutdown(payload: &[u8]) -> Result<()> {
    match payload {
        b"reboot" => start("/bin/reboot", &["-f"]),
        b"poweroff" => start("/bin/poweroff", &["-f"]),
        // At once, without notice to any driver: as by a reset button.
        b"reset" => fs::write("/proc/sysrq-trigger", "b").context("resetting"),
        b"kexec" => another_kernel(),
        other => bail!("cannot {}", String::from_utf8_lossy(other)),
    }
}

/// Starts the kernel in `/boot` from this one, with this one's command line.
#[expect(unsafe_code, reason = "two system calls that no crate has")]
fn another_kernel() -> Result<()> {
    let open = |path: &str| File::open(path).with_context(|| format!("opening {path}"));
    let (kernel, initramfs) = (open("/boot/vmlinuz")?, open("/boot/initrd")?);
    let line = fs::read_to_string("/proc/cmdline").context("reading the command line")?;
    let line = CString::new(line.trim_end()).context("a command line")?;
    let length = line.as_bytes_with_nul().len();
    // SAFETY: two open descriptors, and a string of this length that ends in a zero and is only read.
    let loaded = unsafe {
        let (kernel, initramfs) = (kernel.as_raw_fd(), initramfs.as_raw_fd());
        libc::syscall(libc::SYS_kexec_file_load, kernel, initramfs, length, line.as_ptr(), 0)
    };
    if loaded != 0 {
        return Err(io::Error::last_os_error()).context("loading another kernel");
    }
    // SAFETY: no pointers are passed. It returns only if it is refused.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    Err(io::Error::last_os_error()).context("starting another kernel")
}

fn start(program: &str, arguments: &[&str]) -> Result<()> {
    Command::new(program).args(arguments).spawn().with_context(|| format!("starting {program}"))?;
    Ok(())
}

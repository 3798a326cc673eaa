//! Virtual machines for tests: stock QEMU, stock kernel, and an agent inside that runs commands. In one file: the life of one machine.
//!
//! A [`Guest`] is a running machine. Several commands can run in it at once, each can be signalled, and the machine can
//! be rebooted, reset or killed. Every error carries the end of the guest's console and of QEMU's log.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::agent_protocol::{
    Exited, Frame, Hello, Kind, PutRequest, RunRequest, SignalRequest, read_frame, write_frame,
};
use crate::debian::{Kernel, Series};
use crate::direct::TIMEOUT;
use crate::image::{Image, USER};
use crate::paths::{self, Binaries};
use crate::process::{self, Background};
use crate::qemu::Qemu;
use crate::qmp::Monitor;

/// Time limit of a boot. Software emulation on a busy machine of two cores is slow; a short limit only makes tests fail.
const BOOT: Duration = Duration::from_secs(240);
/// Default time limit of a command.
const COMMAND: Duration = Duration::from_secs(240);
const KVM_PROBE: Duration = Duration::from_secs(20);
/// Payload bytes of one frame of a file for the guest; the kernel passes such a frame on in one piece.
const PUT_CHUNK: usize = 16 << 10;

/// The accelerator that executes guest instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// Software emulation; works everywhere.
    Tcg,
    /// Hardware virtualization of the host.
    Kvm,
}

impl Accelerator {
    /// `SLUICE_ACCEL` (`tcg` or `kvm`) if set; else KVM if a probe guest has booted under it, because a `/dev/kvm` that
    /// opens may still be unable to boot a stock kernel; else software emulation.
    ///
    /// # Errors
    /// When `SLUICE_ACCEL` is neither, or the probe cannot be made.
    pub fn choose() -> Result<Self> {
        match env::var("SLUICE_ACCEL").as_deref() {
            Ok("tcg") => Ok(Self::Tcg),
            Ok("kvm") => Ok(Self::Kvm),
            Ok(other) => bail!("SLUICE_ACCEL is {other:?}; it can be tcg or kvm"),
            Err(_) if !can_open_kvm() => Ok(Self::Tcg),
            Err(_) => {
                let _lock = paths::cache_lock("kvm-probe")?;
                let boot =
                    fs::read_to_string("/proc/sys/kernel/random/boot_id").context("reading the boot id")?;
                let memory = paths::cache()?.join("kvm-probe");
                let known = fs::read_to_string(&memory).unwrap_or_default();
                let works = match known.split_once('\n') {
                    Some((known_boot, verdict)) if known_boot == boot.trim() => verdict.trim() == "boots",
                    _ => {
                        let works = probe_kvm()?;
                        let verdict = if works { "boots" } else { "does not boot" };
                        fs::write(&memory, format!("{}\n{verdict}\n", boot.trim()))
                            .context("noting the probe")?;
                        works
                    }
                };
                Ok(if works { Self::Kvm } else { Self::Tcg })
            }
        }
    }

    /// Its name in QEMU.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }

    const fn cpu(self) -> &'static str {
        match self {
            // Emulation runs a string instruction element by element, and kernels clear and copy memory by bytes if the processor
            // claims that this is fast.
            Self::Tcg => "max,-erms,-fsrm,-fsrs,-fzrm",
            Self::Kvm => "host",
        }
    }
}

fn can_open_kvm() -> bool {
    OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

fn probe_kvm() -> Result<bool> {
    let kernel = Kernel::fetch(Series::V6_12)?;
    let image = Image::new(&kernel, &Binaries::locate()?)?;
    let machine =
        Machine { accelerator: Some(Accelerator::Kvm), boot_limit: KVM_PROBE, ..Machine::new("kvm-probe") };
    Ok(Guest::boot(&machine, &kernel, &image).is_ok())
}

/// The machine's graphics device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Gpu {
    /// No graphics device.
    #[default]
    None,
    /// QEMU's own plain virtio-gpu, to test the guest without Sluice.
    Plain,
    /// `vhost-user-gpu-pci` on the socket of a running `sluice-device`.
    VhostUser(PathBuf),
    /// Any virtio device over vhost-user, here a graphics device, on such a socket: it passes on every feature.
    Generic(PathBuf),
    /// The management API's arguments for QEMU: guest memory, which goes before that of the machine, and device.
    Arguments(Vec<String>),
}

/// The machine to boot.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Name in logs and messages.
    pub name: String,
    /// Guest memory, in MiB.
    pub memory_mib: u32,
    /// True if the memory is on huge pages of the host, of 2 MiB.
    pub huge_pages: bool,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// True if its CPUs can run virtual machines themselves, emulated.
    pub nested: bool,
    /// Its graphics device.
    pub gpu: Gpu,
    /// The socket of a second vhost-user graphics device.
    pub another: Option<PathBuf>,
    /// True if it can give memory back, by [`Guest::monitor`].
    pub balloon: bool,
    /// True if its memory can be doubled, by [`Guest::monitor`].
    pub growing: bool,
    /// True if it boots the kernel's image as the distribution ships it, which unpacks itself.
    pub packed: bool,
    /// The QEMU that runs it.
    pub qemu: Qemu,
    /// The accelerator; `None` for the choice of [`Accelerator::choose`].
    pub accelerator: Option<Accelerator>,
    /// Time limit until the agent answers.
    pub boot_limit: Duration,
    /// Folder of the console and QEMU's log; by default one per machine under `target/vm-logs` of the checkout.
    pub logs: Option<PathBuf>,
}

impl Machine {
    /// A machine with one CPU, 1 GiB, no graphics.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: 1024,
            huge_pages: false,
            cpus: 1,
            nested: false,
            gpu: Gpu::None,
            another: None,
            balloon: false,
            growing: false,
            packed: false,
            qemu: Qemu::Installed,
            accelerator: None,
            boot_limit: BOOT,
            logs: None,
        }
    }

    /// All of QEMU's arguments.
    fn arguments(&self, kernel: &Kernel, accelerator: Accelerator, files: &Files) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = [
            "-machine",
            &format!("q35,accel={}", accelerator.name()),
            "-cpu",
            if self.nested { "max,+svm,+npt" } else { accelerator.cpu() },
            "-smp",
            &self.cpus.to_string(),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-chardev",
            &format!("file,id=console,path={}", escape(&files.console)),
            "-serial",
            "chardev:console",
            "-chardev",
            &format!("socket,id=agent,path={}", escape(&files.agent)),
            "-device",
            "virtio-serial-pci",
            "-device",
            "virtserialport,chardev=agent,name=sluice.agent",
            "-kernel",
            &self.boot_file(kernel)?.display().to_string(),
            "-initrd",
            &files.initramfs.display().to_string(),
            "-append",
            // A panic reboots, and an unrequested reboot is reported as an error.
            "console=ttyS0 quiet loglevel=4 panic=-1",
        ]
        .map(str::to_owned)
        .to_vec();
        let outputs = kernel.series.max_outputs();
        if let Some(socket) = &self.another {
            arguments.extend([
                "-chardev".to_owned(),
                format!("socket,id=another,path={}", escape(socket)),
                "-device".to_owned(),
                format!("vhost-user-gpu-pci,chardev=another,max_outputs={outputs}"),
            ]);
        }
        if self.balloon {
            arguments.extend(["-device", "virtio-balloon-pci"].map(str::to_owned));
        }
        if self.balloon || self.growing {
            arguments
                .extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", escape(&files.monitor))]);
        }
        match &self.gpu {
            Gpu::Arguments(given) => {
                arguments.extend(given.iter().cloned());
                return Ok(arguments);
            }
            Gpu::None => {}
            Gpu::Plain => {
                arguments.extend(["-device".to_owned(), "virtio-gpu-pci".to_owned()]);
            }
            Gpu::VhostUser(socket) => arguments.extend([
                "-chardev".to_owned(),
                format!("socket,id=gpu,path={}", escape(socket)),
                "-device".to_owned(),
                format!("vhost-user-gpu-pci,chardev=gpu,max_outputs={outputs}"),
            ]),
            Gpu::Generic(socket) => arguments.extend([
                "-chardev".to_owned(),
                format!("socket,id=gpu,path={}", escape(socket)),
                "-device".to_owned(),
                // Type 16 is a graphics device, which has two queues and twenty bytes of configuration.
                "vhost-user-test-device-pci,chardev=gpu,virtio-id=16,num_vqs=2,vq_size=1024,config_size=20"
                    .to_owned(),
            ]),
        }
        let memory = self.memory_mib;
        let pages = if self.huge_pages { ",hugetlb=on,hugetlbsize=2M" } else { "" };
        arguments.extend([
            "-m".to_owned(),
            if self.growing {
                format!("{memory}M,slots=1,maxmem={}M", 2 * memory)
            } else {
                format!("{memory}M")
            },
            "-machine".to_owned(),
            "memory-backend=mem0".to_owned(),
            // The device maps guest memory, so that must be a file that can be shared.
            "-object".to_owned(),
            format!("memory-backend-memfd,id=mem0,size={memory}M,share=on{pages}"),
        ]);
        Ok(arguments)
    }

    /// The file of the kernel. QEMU starts an unpacked kernel at its entry for PVH, which kernels of other series may lack.
    fn boot_file(&self, kernel: &Kernel) -> Result<PathBuf> {
        if self.packed || !Series::USUAL.contains(&kernel.series) {
            return Ok(kernel.image.clone());
        }
        kernel.unpacked()
    }
}

/// QEMU's option syntax doubles commas.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

struct Files {
    // Removed with its contents when the guest is dropped. Short, because socket paths must be.
    _folder: TempDir,
    initramfs: PathBuf,
    agent: PathBuf,
    monitor: PathBuf,
    console: PathBuf,
    qemu_log: PathBuf,
}

impl Files {
    fn new(machine: &Machine) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = tempfile::Builder::new()
            .prefix("sluice-vm-")
            .tempdir()
            .context("creating a folder for the VM")?;
        let logs = machine.logs.clone().unwrap_or_else(|| {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{}-{}-{number}", machine.name, std::process::id());
            paths::workspace().join("target/vm-logs").join(name)
        });
        fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        Ok(Self {
            initramfs: folder.path().join("initramfs"),
            agent: folder.path().join("agent"),
            monitor: folder.path().join("monitor"),
            console: logs.join("console"),
            qemu_log: logs.join("qemu"),
            _folder: folder,
        })
    }
}

/// The result of a command in the guest.
#[derive(Debug, Clone)]
pub struct Completed {
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal, if one ended it.
    pub signal: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Wall-clock time in the guest.
    pub elapsed: Duration,
}

impl Completed {
    /// True if it exited with code 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// # Errors
    /// When the command did not succeed; the message holds its output.
    pub fn expect_success(self) -> Result<Self> {
        if self.success() {
            return Ok(self);
        }
        bail!(
            "a command in the guest ended with code {:?}, signal {:?}\n{}\n{}",
            self.code,
            self.signal,
            self.stdout,
            self.stderr
        )
    }
}

/// A command to run in the guest.
#[derive(Debug, Clone)]
pub struct GuestCommand {
    request: RunRequest,
    limit: Duration,
}

impl GuestCommand {
    /// A program with arguments; its process is the reported one, so that a signal reaches exactly it.
    #[must_use]
    pub fn program(words: &[&str]) -> Self {
        let quoted: Vec<String> =
            words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        Self::script(&format!("exec {}", quoted.join(" ")))
    }

    /// A shell script.
    #[must_use]
    pub fn script(script: &str) -> Self {
        let request =
            RunRequest { script: script.to_owned(), user: USER.to_owned(), environment: BTreeMap::new() };
        Self { request, limit: COMMAND }
    }

    /// Sets another user than the ordinary one in group `render`: `root`, or `other`, which is in no group.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        user.clone_into(&mut self.request.user);
        self
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.request.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the time limit.
    #[must_use]
    pub const fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

#[derive(Default)]
struct Request {
    process: Option<i32>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exited: Option<Exited>,
    done: Option<String>,
    /// The reason why no answer can come.
    lost: Option<String>,
}

#[derive(Default)]
struct State {
    requests: HashMap<u32, Request>,
    hello: Option<Hello>,
    boots: u32,
    restart_expected: bool,
    /// The reason why the guest cannot be reached.
    closed: Option<String>,
}

impl State {
    fn lose_requests(&mut self, why: &str) {
        for request in self.requests.values_mut() {
            if request.exited.is_none() && request.done.is_none() {
                request.lost = Some(why.to_owned());
            }
        }
    }

    fn receive(&mut self, frame: Frame) {
        if frame.kind == Kind::Hello {
            self.boots += 1;
            self.hello = serde_json::from_slice(&frame.payload).ok();
            let why = if self.boots > 1 && !self.restart_expected {
                "the guest or its agent restarted without a request"
            } else {
                "the guest was rebooted"
            };
            self.lose_requests(why);
            if self.boots > 1 && !self.restart_expected {
                self.closed = Some(why.to_owned());
            }
            self.restart_expected = false;
            return;
        }
        let Some(request) = self.requests.get_mut(&frame.request) else { return };
        let text = || String::from_utf8_lossy(&frame.payload).into_owned();
        match frame.kind {
            Kind::Started => request.process = text().parse().ok(),
            Kind::Stdout => request.stdout.extend_from_slice(&frame.payload),
            Kind::Stderr => request.stderr.extend_from_slice(&frame.payload),
            Kind::Exited => match serde_json::from_slice(&frame.payload) {
                Ok(exited) => request.exited = Some(exited),
                Err(error) => request.lost = Some(format!("the agent sent no valid end: {error}")),
            },
            Kind::Done => request.done = Some(text()),
            _ => {}
        }
    }
}

struct Link {
    state: Mutex<State>,
    changed: Condvar,
    to_agent: Mutex<UnixStream>,
    next_request: AtomicU32,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, kind: Kind, payload: &[u8]) -> Result<u32> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        self.lock().requests.insert(request, Request::default());
        let mut to = self.to_agent.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut *to, kind, request, payload).context("writing to the guest's agent")?;
        Ok(request)
    }

    /// Waits until `ready` returns a value; the error gives the reason why it cannot, or that it took too long.
    fn wait<T>(
        &self,
        limit: Duration,
        what: &str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(why) = &state.closed {
                bail!("{what}: {why}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{what}: not within {limit:?}");
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn read_all(&self, from: UnixStream) {
        let mut from = BufReader::new(from);
        let why = loop {
            match read_frame(&mut from) {
                Ok(Some(frame)) => self.lock().receive(frame),
                Ok(None) => break "QEMU has ended".to_owned(),
                Err(error) => break format!("reading from the guest: {error}"),
            }
            self.changed.notify_all();
        };
        let mut state = self.lock();
        state.lose_requests(&why);
        state.closed = Some(why);
        drop(state);
        self.changed.notify_all();
    }
}

/// A running virtual machine. Dropping it kills QEMU.
pub struct Guest {
    link: Arc<Link>,
    qemu: Background,
    files: Files,
    name: String,
    accelerator: Accelerator,
}

impl Guest {
    /// Boots a machine and waits for its agent. A device must be there or just be starting.
    ///
    /// # Errors
    /// When QEMU does not start or the agent does not answer in time; the message holds console and log.
    pub fn boot(machine: &Machine, kernel: &Kernel, image: &Image) -> Result<Self> {
        let accelerator = match machine.accelerator {
            Some(accelerator) => accelerator,
            None => Accelerator::choose()?,
        };
        let files = Files::new(machine)?;
        image.write(&files.initramfs)?;
        if let Gpu::VhostUser(socket) | Gpu::Generic(socket) = &machine.gpu {
            wait_for_socket(socket)?;
        }
        // QEMU connects to us, so that the agent's first message cannot be lost.
        let listener = UnixListener::bind(&files.agent).context("listening for the guest's agent")?;
        let mut command = machine.qemu.command();
        command.args(machine.arguments(kernel, accelerator, &files)?);
        let mut qemu = Background::start("QEMU", &mut command, &files.qemu_log)?;
        let stream = accept(&listener, &mut qemu)?;
        let link = Arc::new(Link {
            state: Mutex::default(),
            changed: Condvar::new(),
            to_agent: Mutex::new(stream.try_clone().context("duplicating the agent's socket")?),
            next_request: AtomicU32::new(1),
        });
        let reader = Arc::clone(&link);
        thread::spawn(move || reader.read_all(stream));
        let guest = Self { link, qemu, files, name: machine.name.clone(), accelerator };
        guest
            .link
            .wait(machine.boot_limit, "booting", |state| state.hello.as_ref().map(drop))
            .map_err(|error| guest.explain(error))?;
        Ok(guest)
    }

    /// The accelerator in use.
    #[must_use]
    pub const fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The message of the agent after the guest's boot.
    ///
    /// # Errors
    /// When the guest is rebooting.
    pub fn hello(&self) -> Result<Hello> {
        self.link.lock().hello.clone().context("the guest has not booted")
    }

    /// Process id of QEMU.
    #[must_use]
    pub fn qemu_process(&self) -> u32 {
        self.qemu.id()
    }

    /// Runs a shell script as the ordinary user and waits for its end.
    ///
    /// # Errors
    /// When it does not end in time or the guest is lost; a failing command is not an error.
    pub fn run(&self, script: &str) -> Result<Completed> {
        self.start(&GuestCommand::script(script))?.wait()
    }

    /// As [`Self::run`], as root.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_as_root(&self, script: &str) -> Result<Completed> {
        self.start(&GuestCommand::script(script).user("root"))?.wait()
    }

    /// Starts a command and returns when it runs.
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn start(&self, command: &GuestCommand) -> Result<GuestProcess<'_>> {
        let payload = serde_json::to_vec(&command.request).context("encoding a command")?;
        let request = self.link.send(Kind::Run, &payload).map_err(|error| self.explain(error))?;
        let process = self
            .link
            .wait(command.limit, &command.request.script, |state| {
                let request = state.requests.get(&request)?;
                // A command that cannot start ends at once with code 127 and has no process.
                request.process.or_else(|| (request.exited.is_some() || request.lost.is_some()).then_some(0))
            })
            .map_err(|error| self.explain(error))?;
        Ok(GuestProcess { guest: self, request, process, command: command.clone() })
    }

    /// Writes a file in the guest, as root.
    ///
    /// # Errors
    /// When the guest refuses it.
    pub fn put(&self, path: &str, mode: u32, contents: &[u8]) -> Result<()> {
        let mut truncate = true;
        for chunk in contents.chunks(PUT_CHUNK).chain(contents.is_empty().then_some(&[][..])) {
            let head = PutRequest { path: path.to_owned(), mode, truncate };
            let mut payload = serde_json::to_vec(&head).context("encoding a file's head")?;
            payload.push(b'\n');
            payload.extend_from_slice(chunk);
            self.ask(Kind::Put, &payload)?;
            truncate = false;
        }
        Ok(())
    }

    /// Orderly restart; returns when the agent answers again. All processes of the guest are gone.
    ///
    /// # Errors
    /// When it does not come back in time.
    pub fn reboot(&self) -> Result<()> {
        self.restart("reboot")
    }

    /// Restart without warning, as by a reset button.
    ///
    /// # Errors
    /// When it does not come back in time.
    pub fn reset(&self) -> Result<()> {
        self.restart("reset")
    }

    fn restart(&self, how: &str) -> Result<()> {
        let boots = {
            let mut state = self.link.lock();
            state.restart_expected = true;
            state.boots
        };
        self.link.send(Kind::Shutdown, how.as_bytes()).map_err(|error| self.explain(error))?;
        self.link
            .wait(BOOT, how, |state| (state.boots > boots).then_some(()))
            .map_err(|error| self.explain(error))
    }

    /// Starts the kernel in the guest's `/boot` from the running one; returns when its agent answers.
    ///
    /// # Errors
    /// When the agent does not answer in time.
    pub fn into_another_kernel(&self) -> Result<()> {
        self.restart("kexec")
    }

    /// QEMU's monitor, for a machine whose memory changes.
    ///
    /// # Errors
    /// When the machine has none.
    pub fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.files.monitor)
    }

    /// Orderly shutdown; returns when QEMU has ended.
    ///
    /// # Errors
    /// When it does not end in time or not with status 0.
    pub fn power_off(mut self) -> Result<()> {
        self.link.send(Kind::Shutdown, b"poweroff").map_err(|error| self.explain(error))?;
        match self.qemu.wait(BOOT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.explain(anyhow!("QEMU ended with {status}"))),
            None => Err(self.explain(anyhow!("powering off: not within {BOOT:?}"))),
        }
    }

    /// Kills QEMU, as a sudden end of this guest.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        process::signal(self.qemu.id(), Signal::KILL)?;
        self.qemu.wait(TIMEOUT)?.context("QEMU outlived SIGKILL")?;
        Ok(())
    }

    /// The guest's console output so far.
    #[must_use]
    pub fn console(&self) -> String {
        fs::read(&self.files.console)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn ask(&self, kind: Kind, payload: &[u8]) -> Result<()> {
        let request = self.link.send(kind, payload).map_err(|error| self.explain(error))?;
        let answer = self
            .link
            .wait(COMMAND, "waiting for the agent", |state| {
                let request = state.requests.get_mut(&request)?;
                request.done.take().map(Ok).or_else(|| request.lost.take().map(Err))
            })
            .map_err(|error| self.explain(error))?;
        self.link.lock().requests.remove(&request);
        match answer {
            Ok(text) if text.is_empty() => Ok(()),
            Ok(text) | Err(text) => Err(self.explain(anyhow!(text))),
        }
    }

    /// Adds the last output of the guest and QEMU to an error.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let mut text = format!("guest {}: {error:#}", self.name);
        let console = self.console();
        write!(text, "\n--- console (end) ---\n{}", process::tail(&console, 30)).ok();
        let log = self.qemu.printed();
        if !log.is_empty() {
            write!(text, "\n--- QEMU (end) ---\n{}", process::tail(&log, 10)).ok();
        }
        write!(text, "\n--- complete logs: {}", self.files.console.display()).ok();
        anyhow!(text)
    }
}

/// Waits for a socket: QEMU fails at once if a device is still starting.
fn wait_for_socket(socket: &Path) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !socket.exists() {
        if Instant::now() > deadline {
            bail!("there is no vhost-user socket {}", socket.display());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn accept(listener: &UnixListener, qemu: &mut Background) -> Result<UnixStream> {
    listener.set_nonblocking(true).context("preparing the agent's socket")?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("preparing the agent's connection")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("waiting for QEMU"),
        }
        if !qemu.is_running()? || Instant::now() > deadline {
            // Its last output may still be on its way to us.
            thread::sleep(Duration::from_millis(100));
            bail!("QEMU did not start:\n{}", qemu.printed());
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A command that runs in the guest.
pub struct GuestProcess<'guest> {
    guest: &'guest Guest,
    request: u32,
    process: i32,
    command: GuestCommand,
}

impl GuestProcess<'_> {
    /// Its process id in the guest.
    #[must_use]
    pub const fn id(&self) -> i32 {
        self.process
    }

    /// Sends a signal to it.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let request = SignalRequest { process: self.process, signal: signal.as_raw() };
        self.guest.ask(Kind::Signal, &serde_json::to_vec(&request).context("encoding a signal")?)
    }

    /// Waits until its standard output contains a text; returns the output so far.
    ///
    /// # Errors
    /// When it ends or the limit is reached first.
    pub fn wait_for_output(&self, text: &str, limit: Duration) -> Result<String> {
        let what = format!("waiting for {text:?} from {}", self.command.request.script);
        let (output, ended) = self
            .guest
            .link
            .wait(limit, &what, |state| {
                let request = state.requests.get(&self.request)?;
                let output = String::from_utf8_lossy(&request.stdout).into_owned();
                let ended = request.exited.is_some() || request.lost.is_some();
                (output.contains(text) || ended).then_some((output, ended))
            })
            .map_err(|error| self.guest.explain(error))?;
        if ended && !output.contains(text) {
            bail!("{what}: it ended with this output:\n{output}");
        }
        Ok(output)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end within its limit (it is left running then) or the guest is lost.
    pub fn wait(self) -> Result<Completed> {
        let outcome = self
            .guest
            .link
            .wait(self.command.limit, &self.command.request.script, |state| {
                let request = state.requests.get(&self.request)?;
                (request.exited.is_some() || request.lost.is_some()).then_some(())?;
                state.requests.remove(&self.request)
            })
            .map_err(|error| self.guest.explain(error))?;
        match (outcome.exited, outcome.lost) {
            (Some(exited), _) => Ok(Completed {
                code: exited.code,
                signal: exited.signal,
                stdout: String::from_utf8_lossy(&outcome.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&outcome.stderr).into_owned(),
                elapsed: Duration::from_secs_f64(exited.seconds),
            }),
            (None, lost) => {
                let why = lost.unwrap_or_default();
                Err(self.guest.explain(anyhow!("{}: {why}", self.command.request.script)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: Kind, payload: &str) -> Frame {
        Frame { kind, request: 1, payload: payload.as_bytes().to_vec() }
    }

    const HELLO: &str = r#"{"kernel":"6.12","boot_id":"a","uptime_seconds":1.0,"render_node":true}"#;

    #[test]
    fn unexpected_restart_ends_the_running_command_and_the_connection() {
        let mut state = State::default();
        state.receive(frame(Kind::Hello, HELLO));
        state.requests.insert(1, Request::default());
        state.receive(frame(Kind::Stdout, "so far"));
        state.receive(frame(Kind::Hello, HELLO));
        assert!(state.closed.unwrap().contains("without a request"));
        assert!(state.requests[&1].lost.is_some());
        assert_eq!(state.requests[&1].stdout, b"so far");
    }

    #[test]
    fn expected_restart_ends_the_running_command_and_keeps_the_connection() {
        let mut state = State::default();
        state.receive(frame(Kind::Hello, HELLO));
        state.requests.insert(1, Request::default());
        state.restart_expected = true;
        state.receive(frame(Kind::Hello, HELLO));
        assert!(state.closed.is_none());
        assert!(state.requests[&1].lost.is_some());
    }

    #[test]
    fn words_reach_the_guest_unchanged() {
        let command = GuestCommand::program(&["echo", "it's", "a b"]);
        assert_eq!(command.request.script, r"exec 'echo' 'it'\''s' 'a b'");
    }
}

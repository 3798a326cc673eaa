//! A process with a context, as a worker or an arbiter of Sluice is one: in the step's own process, or in another that obeys.

use core::ffi::CStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sluice_driver::{Handle, LaunchArguments};
use sluice_shared_memory::socket;

use crate::driver::Cuda;
use crate::kernels::{Image, Scratch};
use crate::libraries::Libraries;
use crate::link::Link;
use crate::step::{Answer, Stop, confine};

/// A command to a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Load the driver's library.
    Open,
    /// Start the driver.
    Init,
    /// Create a context, after `Open` and `Init` if they did not come before. All other commands do so, too.
    Start,
    /// Create an exportable chunk.
    Create { bytes: u64 },
    /// Export the chunk; the answer carries a descriptor.
    Export,
    /// Import the chunk of the descriptor that comes with this command.
    Import { bytes: u64 },
    /// Reserve an address for the chunk, map it, permit access.
    Map,
    /// Undo `Map`.
    Unmap,
    /// Release the chunk's handle.
    Release,
    /// Write the first word of the chunk.
    Write { value: u32 },
    /// Read the first word of the chunk.
    Read,
    /// Fill the chunk.
    Fill { value: u32 },
    /// Count words with this value in the mapped chunk.
    Count { value: u32 },
    /// Create chunk after chunk and look for words with this value in them.
    Search { value: u32, seconds: u64 },
    /// Free bytes of the device.
    Free,
    /// Load a module and launch its kernel `touch`, if it has one.
    Load { image: Image },
    /// Unload a module.
    Unload { image: Image },
    /// Set the stack of a thread, and launch a kernel that uses local memory.
    Stack { bytes: u64 },
    /// Leave a value in memory of all multiprocessors.
    Leave { scratch: Scratch, value: u32 },
    /// Look for that value.
    Look { scratch: Scratch, value: u32 },
    /// Sample the clock and answer with the intervals in which the kernel did not run.
    Sample { milliseconds: u64 },
    /// Answer the value of a device's attribute.
    Attribute { number: u32 },
}

/// A chunk.
#[derive(Debug)]
struct Chunk {
    handle: Handle,
    bytes: u64,
    at: Option<u64>,
}

/// A process with a context.
#[derive(Debug)]
pub(crate) struct Worker {
    cuda: Cuda,
    /// The first device.
    pub(crate) device: i32,
    chunk: Option<Chunk>,
    modules: Vec<(Image, Handle)>,
}

impl Worker {
    /// Starts the driver and makes a context current.
    pub(crate) fn start(cuda: Cuda) -> Answer<Worker> {
        cuda.ask("cuInit", |driver| driver.init())?;
        let device = cuda.ask("cuDeviceGet", |driver| driver.device(0))?;
        let context = cuda.ask("cuDevicePrimaryCtxRetain", |driver| driver.primary_retain(device, 0))?;
        cuda.ask("cuCtxSetCurrent", |driver| driver.set_current(context))?;
        Ok(Worker { cuda, device, chunk: None, modules: Vec::new() })
    }

    /// The driver.
    pub(crate) fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Answer<(u64, u64)> {
        self.cuda.ask("cuMemGetInfo_v2", |driver| driver.memory_info())
    }

    /// Free memory when two looks agree: the driver may give memory back late.
    pub(crate) fn settled(&self) -> Answer<u64> {
        let mut last = self.memory()?.0;
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(100));
            let now = self.memory()?.0;
            if now == last {
                break;
            }
            last = now;
        }
        Ok(last)
    }

    /// An attribute of the device.
    pub(crate) fn attribute(&self, number: u32) -> Answer<i32> {
        self.cuda.ask("cuDeviceGetAttribute", |driver| driver.device_attribute(number, self.device))
    }

    /// Loads a module once.
    pub(crate) fn module(&mut self, image: Image) -> Answer<Handle> {
        if let Some((_, module)) = self.modules.iter().find(|(loaded, _)| *loaded == image) {
            return Ok(*module);
        }
        let mut log = [0; 4096];
        let (module, used) = {
            let mut used = 0;
            let module = self.cuda.ask("cuModuleLoadDataEx", |driver| {
                let (module, bytes) = driver.module_load(image.text(), &mut log);
                used = bytes;
                module
            });
            (module, used)
        };
        if module.is_err() {
            eprintln!("{image:?}: {}", String::from_utf8_lossy(log.get(..used).unwrap_or_default()));
        }
        self.modules.push((image, module.clone()?));
        module
    }

    /// Unloads a module if it is loaded.
    fn unload(&mut self, image: Image) -> Answer {
        let Some(place) = self.modules.iter().position(|(loaded, _)| *loaded == image) else { return Ok(()) };
        let (_, module) = self.modules.swap_remove(place);
        self.cuda.ask("cuModuleUnload", |driver| driver.module_unload(module))
    }

    /// A function of a module.
    pub(crate) fn function(&mut self, image: Image, name: &CStr) -> Answer<Handle> {
        let module = self.module(image)?;
        self.cuda.ask("cuModuleGetFunction", |driver| driver.module_function(module, name))
    }

    /// Launches a function on the default stream.
    pub(crate) fn launch(&self, function: Handle, shape: [u32; 3], parameters: &[u64]) -> Answer {
        self.launch_on(0, function, shape, parameters)
    }

    /// Launches a function with blocks, threads per block and bytes of dynamic shared memory.
    pub(crate) fn launch_on(
        &self,
        stream: Handle,
        function: Handle,
        shape: [u32; 3],
        parameters: &[u64],
    ) -> Answer {
        let [blocks, threads, shared] = shape;
        let launch = LaunchArguments { function, grid: [blocks, 1, 1], block: [threads, 1, 1], shared };
        let parameters: Vec<u8> = parameters.iter().flat_map(|parameter| parameter.to_ne_bytes()).collect();
        self.cuda.ask("cuLaunchKernel", |driver| driver.launch(&launch, &[], &parameters, stream))
    }

    /// Zeroed device memory that is never freed: a step's process is short.
    pub(crate) fn zeroed(&self, bytes: usize) -> Answer<u64> {
        let at = self.cuda.allocate(bytes)?;
        self.cuda.fill(at, bytes as u64, 0)?;
        Ok(at)
    }

    /// Numbers in device memory.
    pub(crate) fn numbers(&self, at: u64, count: usize) -> Answer<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        self.cuda.read(at, &mut bytes)?;
        let (numbers, _) = bytes.as_chunks();
        Ok(numbers.iter().map(|number| u64::from_ne_bytes(*number)).collect())
    }

    /// Obeys a command that carries no descriptor, and has an answer without one.
    pub(crate) fn ask(&mut self, command: Command) -> Answer<Value> {
        Ok(self.obey(command, None)?.0)
    }

    /// Obeys a command.
    pub(crate) fn obey(
        &mut self,
        command: Command,
        descriptor: Option<OwnedFd>,
    ) -> Answer<(Value, Option<OwnedFd>)> {
        let done = json!(true);
        let value = match command {
            Command::Open | Command::Init | Command::Start => done,
            Command::Create { bytes } => {
                let handle =
                    self.cuda.ask("cuMemCreate", |driver| driver.chunk_create(bytes, self.device))?;
                self.chunk = Some(Chunk { handle, bytes, at: None });
                done
            }
            Command::Export => {
                let handle = self.chunk()?.handle;
                let call = "cuMemExportToShareableHandle";
                return Ok((done, Some(self.cuda.ask(call, |driver| driver.chunk_export(handle))?)));
            }
            Command::Import { bytes } => {
                let descriptor = descriptor.ok_or_else(|| Stop::failed("an import without a descriptor"))?;
                let call = "cuMemImportFromShareableHandle";
                let handle = self.cuda.ask(call, |driver| driver.chunk_import(descriptor.as_fd()))?;
                self.chunk = Some(Chunk { handle, bytes, at: None });
                done
            }
            Command::Map => json!(self.map()?),
            Command::Unmap => {
                self.unmap()?;
                done
            }
            Command::Release => {
                let handle = self.chunk()?.handle;
                self.cuda.ask("cuMemRelease", |driver| driver.chunk_release(handle))?;
                self.chunk = None;
                done
            }
            Command::Write { value } => {
                self.cuda.write(self.address()?, &value.to_ne_bytes())?;
                done
            }
            Command::Read => {
                let mut word = [0; 4];
                self.cuda.read(self.address()?, &mut word)?;
                json!(u32::from_ne_bytes(word))
            }
            Command::Fill { value } => {
                let (at, bytes) = (self.address()?, self.chunk()?.bytes);
                self.cuda.fill(at, bytes, value)?;
                done
            }
            Command::Count { value } => json!(self.tally(value)?),
            Command::Search { value, seconds } => self.search(value, Duration::from_secs(seconds))?,
            Command::Free => json!(self.memory()?.0),
            Command::Load { image } => {
                let touch = self.function(image, c"touch")?;
                self.launch(touch, [1, 1, 0], &[])?;
                self.cuda.synchronize()?;
                done
            }
            Command::Unload { image } => {
                self.unload(image)?;
                done
            }
            Command::Stack { bytes } => {
                const STACK_SIZE: u32 = 0;
                self.cuda.ask("cuCtxSetLimit", |driver| driver.cuCtxSetLimit(STACK_SIZE, bytes))?;
                let function = self.function(Image::Remnants, Scratch::Local.filler())?;
                self.launch(function, [1, 1, 0], &[0])?;
                self.cuda.synchronize()?;
                done
            }
            Command::Leave { scratch, value } => {
                self.leave(scratch, value)?;
                done
            }
            Command::Look { scratch, value } => self.look(scratch, value)?,
            Command::Sample { milliseconds } => self.sample(milliseconds)?,
            Command::Attribute { number } => json!(self.attribute(number)?),
        };
        Ok((value, None))
    }

    fn chunk(&self) -> Answer<&Chunk> {
        self.chunk.as_ref().ok_or_else(|| Stop::failed("there is no chunk"))
    }

    /// Address of the mapped chunk.
    pub(crate) fn address(&self) -> Answer<u64> {
        self.chunk()?.at.ok_or_else(|| Stop::failed("the chunk is not mapped"))
    }

    fn map(&mut self) -> Answer<u64> {
        let (handle, bytes) = (self.chunk()?.handle, self.chunk()?.bytes);
        let at = self.cuda.ask("cuMemAddressReserve", |driver| driver.address_reserve(0, bytes))?;
        self.cuda.ask("cuMemMap", |driver| driver.map(at, bytes, handle))?;
        self.cuda.ask("cuMemSetAccess", |driver| driver.allow(at, bytes, self.device))?;
        self.chunk = Some(Chunk { handle, bytes, at: Some(at) });
        Ok(at)
    }

    fn unmap(&mut self) -> Answer {
        let (at, bytes) = (self.address()?, self.chunk()?.bytes);
        self.cuda.ask("cuMemUnmap", |driver| driver.unmap(at, bytes))?;
        self.cuda.ask("cuMemAddressFree", |driver| driver.address_free(at, bytes))?;
        self.chunk = self.chunk.take().map(|chunk| Chunk { at: None, ..chunk });
        Ok(())
    }

    /// Looks at the start of each 2 MiB of the mapped chunk: words with the value, words that are not 0, words.
    fn tally(&self, value: u32) -> Answer<[u64; 3]> {
        const PAGE: u64 = 2 << 20;
        let (at, bytes) = (self.address()?, self.chunk()?.bytes);
        let mut sample = vec![0; 16 << 10];
        let mut counts = [0; 3];
        for page in 0..bytes.div_ceil(PAGE) {
            self.cuda.read(at + page * PAGE, &mut sample)?;
            for word in sample.as_chunks::<4>().0 {
                let word = u32::from_ne_bytes(*word);
                counts[0] += u64::from(word == value);
                counts[1] += u64::from(word != 0);
                counts[2] += 1;
            }
        }
        Ok(counts)
    }

    /// Takes memory until little is free or the time is over, and looks for the value in it.
    fn search(&mut self, value: u32, limit: Duration) -> Answer<Value> {
        const RESERVE: u64 = 256 << 20;
        let end = Instant::now() + limit;
        let mut counts = [0; 3];
        let mut taken = 0_u64;
        while Instant::now() < end {
            let free = self.memory()?.0;
            let bytes = 64 << 20;
            if free < bytes + RESERVE {
                break;
            }
            // The handle of each chunk but the last is left to the end of the process, so that the next is other memory.
            self.ask(Command::Create { bytes })?;
            self.map()?;
            for (count, more) in counts.iter_mut().zip(self.tally(value)?) {
                *count += more;
            }
            taken += bytes;
        }
        Ok(
            json!({ "bytes": taken, "words_with_value": counts[0], "words_not_zero": counts[1], "words": counts[2] }),
        )
    }

    /// Blocks, threads and bytes of shared memory that reach every multiprocessor several times.
    fn shape(&self, scratch: Scratch) -> Answer<[u32; 3]> {
        const MULTIPROCESSORS: u32 = 16;
        let processors = u32::try_from(self.attribute(MULTIPROCESSORS)?).unwrap_or(1);
        Ok([processors * 4, 128, if scratch == Scratch::Shared { 48 << 10 } else { 0 }])
    }

    fn leave(&mut self, scratch: Scratch, value: u32) -> Answer {
        let function = self.function(Image::Remnants, scratch.filler())?;
        let shape = self.shape(scratch)?;
        let parameters = match scratch {
            Scratch::Shared => vec![value.into(), u64::from(shape[2] / 4)],
            Scratch::Local => vec![value.into()],
            Scratch::Registers => {
                let source = self.zeroed(8)?;
                self.cuda.write(source, &value.to_ne_bytes())?;
                vec![source, source + 4]
            }
        };
        self.launch(function, shape, &parameters)?;
        self.cuda.synchronize()
    }

    fn look(&mut self, scratch: Scratch, value: u32) -> Answer<Value> {
        let function = self.function(Image::Remnants, scratch.looker())?;
        let shape = self.shape(scratch)?;
        let counters = self.zeroed(24)?;
        let parameters = match scratch {
            Scratch::Shared => vec![value.into(), u64::from(shape[2] / 4), counters],
            Scratch::Local => vec![value.into(), counters],
            Scratch::Registers => vec![(!value).into(), counters],
        };
        self.launch(function, shape, &parameters)?;
        self.cuda.synchronize()?;
        let counts = self.numbers(counters, 3)?;
        Ok(json!({ "words_with_value": counts[0], "words_not_zero": counts[1], "words": counts[2] }))
    }

    fn sample(&mut self, milliseconds: u64) -> Answer<Value> {
        /// The answer is one message.
        const ROOM: usize = 1500;
        /// An interval longer than this is not the kernel's own.
        const GAP_NANOSECONDS: u64 = 20_000;
        let function = self.function(Image::Work, c"sample")?;
        let out = self.zeroed((3 + 2 * ROOM) * 8)?;
        let parameters = [out, ROOM as u64, milliseconds * 1_000_000, GAP_NANOSECONDS];
        self.launch(function, [1, 1, 0], &parameters)?;
        self.cuda.synchronize()?;
        Ok(json!(self.numbers(out, 3 + 2 * ROOM)?))
    }
}

/// A worker in a process of its own. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    link: Link,
    process: u32,
    /// `None` if another waits for the process.
    child: Option<Child>,
}

impl Peer {
    /// Starts the process; it has the driver loaded when it answers [`Command::Start`].
    pub(crate) fn start(libraries: &Libraries, user: Option<u32>) -> Answer<Peer> {
        let mut command = Process::new("/proc/self/exe");
        command.arg0("sluice-hardware").arg("worker").args(libraries.arguments());
        if let Some(user) = user {
            command.args(["--user", &user.to_string()]);
        }
        Peer::spawn(&mut command)
    }

    /// Starts a worker by a prepared command.
    pub(crate) fn spawn(command: &mut Process) -> Answer<Peer> {
        let (ours, theirs) = socket::pair()?;
        let child = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Peer { link: Link::new(ours), process: child.id(), child: Some(child) })
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn tell(&self, command: Command) -> Answer {
        self.link.send(&command, None)
    }

    /// Waits for an answer.
    pub(crate) fn answer(&self) -> Answer<(Value, Option<OwnedFd>)> {
        let received: Option<(Result<Value, Stop>, _)> = self.link.receive()?;
        let (answer, descriptor) = received.ok_or_else(|| Stop::failed("the other process ended"))?;
        Ok((answer?, descriptor))
    }

    /// Makes it obey a command.
    pub(crate) fn ask(&self, command: Command) -> Answer<Value> {
        self.tell(command)?;
        Ok(self.answer()?.0)
    }

    /// As [`Peer::ask`], for an answer that is a number.
    pub(crate) fn number(&self, command: Command) -> Answer<u64> {
        self.ask(command)?.as_u64().ok_or_else(|| Stop::failed("the answer is no number"))
    }

    /// Makes it import a chunk.
    pub(crate) fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Answer<Value> {
        self.link.send(&Command::Import { bytes }, Some(descriptor.as_fd()))?;
        Ok(self.answer()?.0)
    }

    /// Makes it export its chunk.
    pub(crate) fn export(&self) -> Answer<OwnedFd> {
        self.tell(Command::Export)?;
        self.answer()?.1.ok_or_else(|| Stop::failed("an export without a descriptor"))
    }

    /// Ends the process and waits until it is reaped.
    pub(crate) fn end(mut self) -> Answer {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Leaves the process to a tracer, which waits for it.
    pub(crate) fn disown(&mut self) {
        self.child = None;
    }

    /// Closes the socket, on which the process ends by itself.
    pub(crate) fn hang_up(&self) -> Answer {
        self.link.close()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The runner kills the group in any case; here the process only ends sooner.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Serves commands on standard input until it is closed.
pub(crate) fn serve(user: Option<u32>, libraries: Libraries) -> Result<()> {
    if let Some(user) = user {
        become_user(user).context("another user")?;
    }
    confine().context("the limits of a child")?;
    let link = Link::new(std::io::stdin().as_fd().try_clone_to_owned().context("the socket")?);
    let mut state = State::Nothing;
    while let Some((command, descriptor)) = link.receive::<Command>()? {
        let answer = state.obey(&libraries, command, descriptor);
        match answer {
            Ok((value, descriptor)) => {
                let answer: Answer<Value> = Ok(value);
                link.send(&answer, descriptor.as_ref().map(|descriptor| descriptor.as_fd()))?;
            }
            Err(stop) => {
                let answer: Answer<Value> = Err(stop);
                link.send(&answer, None)?;
            }
        }
    }
    Ok(())
}

/// The driver in a process that obeys.
enum State {
    Nothing,
    Open(Cuda),
    Running(Worker),
}

impl State {
    fn obey(
        &mut self,
        libraries: &Libraries,
        command: Command,
        descriptor: Option<OwnedFd>,
    ) -> Answer<(Value, Option<OwnedFd>)> {
        *self = match (core::mem::replace(self, State::Nothing), command) {
            (State::Nothing, Command::Open) => State::Open(Cuda::open(&libraries.driver)?),
            (State::Open(cuda), Command::Init) => {
                cuda.ask("cuInit", |driver| driver.init())?;
                State::Open(cuda)
            }
            (State::Nothing, _) => State::Running(Worker::start(Cuda::open(&libraries.driver)?)?),
            (State::Open(cuda), _) => State::Running(Worker::start(cuda)?),
            (running, _) => running,
        };
        match self {
            State::Running(worker) => worker.obey(command, descriptor),
            State::Nothing | State::Open(_) => Ok((json!(true), None)),
        }
    }
}

/// Gives up root for good, as a worker's start does.
fn become_user(user: u32) -> Result<(), rustix::io::Errno> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // A change of the user makes the files of this process in /proc those of root; a start by `execve` would undo that.
    set_dumpable_behavior(DumpableBehavior::Dumpable)
}

//! A process with a context, as a worker or an arbiter of Sluice is one: in the step's own process, or in another that obeys.
//!
//! Steps start it and give it commands. It owns one context and its memory, and never decides about a verdict.

mod measures;
mod peer;
mod searches;

pub(crate) use peer::{Peer, serve};

use core::ffi::CStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sluice_driver::{CompilerOptions, Handle, LaunchArguments};

use crate::driver::Cuda;
use crate::kernels::{Image, Scratch};
use crate::stop::{Answer, Stop};

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
    /// All bytes of the device.
    Total,
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
    /// Launch an empty kernel and wait for it, again and again with pauses, for a time.
    Latency { milliseconds: u64 },
    /// Time a call that asks for free memory, so many times.
    Calls { times: u32 },
    /// Time launches of an empty kernel, so many times.
    Launches { times: u32 },
    /// Time copies of so many bytes, so many times.
    Copies { bytes: u64, pinned: bool, times: u32 },
    /// Time allocations of so many bytes, and their frees, so many times.
    Allocations { bytes: u64, times: u32 },
    /// Time loads of a small module, so many times.
    Loads { times: u32 },
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
        const LOG: u64 = 4096;
        let mut options = None;
        let module = self.cuda.ask("cuModuleLoadDataEx", |driver| {
            driver.module_load(image.text(), options.insert(CompilerOptions::new(&[], 0, LOG)?))
        });
        if let (Err(_), Some(options)) = (&module, &options) {
            eprintln!("{image:?}: {}", String::from_utf8_lossy(options.report().error.text));
        }
        self.modules.push((image, module.clone()?));
        module
    }

    /// Unloads a module if it is loaded.
    fn unload(&mut self, image: Image) -> Answer {
        let Some(place) = self.modules.iter().position(|(loaded, _)| *loaded == image) else { return Ok(()) };
        let (_, module) = self.modules.swap_remove(place);
        self.cuda.ask("cuModuleUnload", |driver| driver.cuModuleUnload(module))
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
                self.cuda.ask("cuMemRelease", |driver| driver.cuMemRelease(handle))?;
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
            Command::Total => json!(self.memory()?.1),
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
            Command::Latency { milliseconds } => self.latency(Duration::from_millis(milliseconds))?,
            Command::Calls { times } => self.calls(times)?,
            Command::Launches { times } => self.launches(times)?,
            Command::Copies { bytes, pinned, times } => self.copies(bytes, pinned, times)?,
            Command::Allocations { bytes, times } => self.allocations(bytes, times)?,
            Command::Loads { times } => self.loads(times)?,
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
}

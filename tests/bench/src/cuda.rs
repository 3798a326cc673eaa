//! The driver API from a program's view: looked up in the `libcuda.so.1` that the loader finds.

#![expect(unsafe_code, reason = "calls C functions found by name")]

use anyhow::{Result, ensure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use std::ffi::CStr;

/// The kernel of the launch rows: three 64-bit parameters. The null driver ignores the code and takes the number of parameters from
/// the name; the software GPU's driver must accept it.
pub(crate) const IMAGE: &CStr = c".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry bench_p3(.param .u64 a, .param .u64 b, .param .u64 c)\n{\n ret;\n}\n";
/// Its name.
pub(crate) const KERNEL: &CStr = c"bench_p3";

macro_rules! functions {
    ($($name:ident($($p:ident: $ty:ty),*);)+) => {
        /// The functions the benchmarks call.
        #[expect(non_snake_case, reason = "the names of cuda.h")]
        pub(crate) struct Cuda {
            $($name: Symbol<unsafe extern "C" fn($($ty),*) -> c_uint>,)+
            _library: Library,
        }

        impl Cuda {
            /// Loads the library.
            pub(crate) fn load() -> Result<Cuda> {
                // SAFETY: a library of the kind the program is made for; its initialisers do not touch our memory.
                let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW) }?;
                // SAFETY: the types are those of cuda.h.
                Ok(Cuda { $($name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,)+ _library: library })
            }

            $(
                #[allow(non_snake_case, clippy::too_many_arguments, reason = "the names and signatures of cuda.h")]
                fn $name(&self $(, $p: $ty)*) -> Result<()> {
                    // SAFETY: callers in this module pass arguments that are valid by cuda.h.
                    let result = unsafe { (self.$name)($($p),*) };
                    ensure!(result == 0, concat!(stringify!($name), " returned {}"), result);
                    Ok(())
                }
            )+
        }
    };
}
functions! {
    cuInit(flags: c_uint);
    cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int);
    cuCtxSetCurrent(context: u64);
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuModuleLoadData(module: *mut u64, image: *const c_void);
    cuModuleUnload(module: u64);
    cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char);
    cuLaunchKernel(f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    cuLaunchKernel_ptsz(f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    cuCtxGetLimit(value: *mut usize, limit: c_uint);
    cuCtxGetCurrent(context: *mut u64);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    cuStreamCreate(stream: *mut u64, flags: c_uint);
    cuStreamDestroy_v2(stream: u64);
    cuStreamQuery(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuLaunchHostFunc(stream: u64, function: HostFunction, data: *mut c_void);
    cuEventCreate(event: *mut u64, flags: c_uint);
    cuEventDestroy_v2(event: u64);
    cuEventRecord(event: u64, stream: u64);
    cuEventSynchronize(event: u64);
}

/// A function of the program that runs in the order of a stream.
type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A kernel, ready to launch.
#[derive(Clone, Copy)]
pub(crate) struct Kernel(u64);

/// Pinned memory.
pub(crate) struct Pinned<'a> {
    cuda: &'a Cuda,
    address: *mut c_void,
    bytes: usize,
}

impl Pinned<'_> {
    /// The bytes, which only copies of this thread write.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` bytes at `address` belong to this object, and every copy into them was waited for.
        unsafe { core::slice::from_raw_parts_mut(self.address.cast(), self.bytes) }
    }

    /// The address, which kernels use, too.
    pub(crate) fn address(&self) -> u64 {
        self.address.addr() as u64
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // The process ends soon in any case.
        let _ = self.cuda.cuMemFreeHost(self.address);
    }
}

impl Cuda {
    /// Loads the library and makes the primary context of device 0 current.
    pub(crate) fn on_device() -> Result<Cuda> {
        let cuda = Cuda::load()?;
        cuda.initialise()?;
        cuda.use_device()?;
        Ok(cuda)
    }

    /// `cuInit`.
    pub(crate) fn initialise(&self) -> Result<()> {
        self.cuInit(0)
    }

    /// Makes the primary context of device 0 current.
    pub(crate) fn use_device(&self) -> Result<()> {
        let mut context = 0;
        self.cuDevicePrimaryCtxRetain(&raw mut context, 0)?;
        self.cuCtxSetCurrent(context)
    }

    /// An ordinary call that the guest's library cannot answer itself.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        self.cuMemGetInfo_v2(&raw mut free, &raw mut total)?;
        Ok((free, total))
    }

    pub(crate) fn synchronise(&self) -> Result<()> {
        self.cuCtxSynchronize()
    }

    pub(crate) fn load_image(&self, image: &CStr) -> Result<u64> {
        let mut module = 0;
        self.cuModuleLoadData(&raw mut module, image.as_ptr().cast())?;
        Ok(module)
    }

    pub(crate) fn unload(&self, module: u64) -> Result<()> {
        self.cuModuleUnload(module)
    }

    /// A kernel of a new module.
    pub(crate) fn kernel(&self, image: &CStr, name: &CStr) -> Result<Kernel> {
        self.kernel_of(self.load_image(image)?, name)
    }

    /// A kernel of a module.
    pub(crate) fn kernel_of(&self, module: u64, name: &CStr) -> Result<Kernel> {
        let mut function = 0;
        self.cuModuleGetFunction(&raw mut function, module, name.as_ptr())?;
        Ok(Kernel(function))
    }

    /// Launches one block with these parameters on the default stream.
    pub(crate) fn launch<P, const NUMBER: usize>(
        &self,
        kernel: Kernel,
        parameters: &mut [P; NUMBER],
    ) -> Result<()> {
        self.launch_on(0, kernel, parameters)
    }

    /// As [`Self::launch`], on a stream.
    pub(crate) fn launch_on<P, const NUMBER: usize>(
        &self,
        stream: u64,
        kernel: Kernel,
        parameters: &mut [P; NUMBER],
    ) -> Result<()> {
        let mut pointers = parameters.each_mut().map(|parameter| (&raw mut *parameter).cast());
        let none = core::ptr::null_mut();
        self.cuLaunchKernel(kernel.0, 1, 1, 1, 32, 1, 1, 0, stream, pointers.as_mut_ptr(), none)
    }

    /// As [`Self::launch`], on the same stream, by the function's name for programs with a default stream for each thread.
    pub(crate) fn launch_by_the_other_name(&self, kernel: Kernel, parameters: &mut [u64; 3]) -> Result<()> {
        const LEGACY_STREAM: u64 = 1;
        let mut pointers = parameters.each_mut().map(|parameter| (&raw mut *parameter).cast());
        let (kernel, none) = (kernel.0, core::ptr::null_mut());
        self.cuLaunchKernel_ptsz(kernel, 1, 1, 1, 32, 1, 1, 0, LEGACY_STREAM, pointers.as_mut_ptr(), none)
    }

    /// A call that a helper thread of the worker answers.
    pub(crate) fn stack_limit(&self) -> Result<usize> {
        let mut value = 0;
        self.cuCtxGetLimit(&raw mut value, 0)?;
        Ok(value)
    }

    pub(crate) fn current_context(&self) -> Result<u64> {
        let mut context = 0;
        self.cuCtxGetCurrent(&raw mut context)?;
        Ok(context)
    }

    /// The number of threads in a warp.
    pub(crate) fn warp_size(&self) -> Result<c_int> {
        const WARP_SIZE: c_uint = 10;
        let mut value = 0;
        self.cuDeviceGetAttribute(&raw mut value, WARP_SIZE, 0)?;
        Ok(value)
    }

    pub(crate) fn stream(&self) -> Result<u64> {
        const NON_BLOCKING: c_uint = 1;
        let mut stream = 0;
        self.cuStreamCreate(&raw mut stream, NON_BLOCKING)?;
        Ok(stream)
    }

    pub(crate) fn destroy_stream(&self, stream: u64) -> Result<()> {
        self.cuStreamDestroy_v2(stream)
    }

    /// Fails unless the stream's work is complete.
    pub(crate) fn query_stream(&self, stream: u64) -> Result<()> {
        self.cuStreamQuery(stream)
    }

    pub(crate) fn synchronise_stream(&self, stream: u64) -> Result<()> {
        self.cuStreamSynchronize(stream)
    }

    /// Has a stream call a function that does nothing.
    pub(crate) fn call_in_stream(&self, stream: u64) -> Result<()> {
        unsafe extern "C" fn function(_: *mut c_void) {}
        self.cuLaunchHostFunc(stream, function, core::ptr::null_mut())
    }

    pub(crate) fn event(&self) -> Result<u64> {
        const WITHOUT_TIME: c_uint = 2;
        let mut event = 0;
        self.cuEventCreate(&raw mut event, WITHOUT_TIME)?;
        Ok(event)
    }

    pub(crate) fn destroy_event(&self, event: u64) -> Result<()> {
        self.cuEventDestroy_v2(event)
    }

    /// Records an event behind the work of a stream, and waits for it.
    pub(crate) fn synchronise_event(&self, event: u64, stream: u64) -> Result<()> {
        self.cuEventRecord(event, stream)?;
        self.cuEventSynchronize(event)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        self.cuMemAlloc_v2(&raw mut address, bytes)?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Result<()> {
        self.cuMemFree_v2(address)
    }

    pub(crate) fn pin(&self, bytes: usize) -> Result<Pinned<'_>> {
        let mut address = core::ptr::null_mut();
        self.cuMemHostAlloc(&raw mut address, bytes, 0)?;
        Ok(Pinned { cuda: self, address, bytes })
    }

    pub(crate) fn copy_in(&self, to: u64, from: &[u8]) -> Result<()> {
        self.cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len())
    }

    pub(crate) fn copy_out(&self, to: &mut [u8], from: u64) -> Result<()> {
        self.cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len())
    }
}

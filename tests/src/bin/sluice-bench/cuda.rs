//! The driver API from a program's view: looked up in the `libcuda.so.1` that the loader finds.

#![expect(unsafe_code, reason = "calls C functions found by name")]

use anyhow::{Result, ensure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use std::ffi::CStr;

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
}

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
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // The process ends soon in any case.
        let _ = self.cuda.cuMemFreeHost(self.address);
    }
}

impl Cuda {
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

    /// A kernel of a module.
    pub(crate) fn kernel(&self, image: &CStr, name: &CStr) -> Result<Kernel> {
        let mut function = 0;
        self.cuModuleGetFunction(&raw mut function, self.load_image(image)?, name.as_ptr())?;
        Ok(Kernel(function))
    }

    /// Launches one block with these parameters, one 64-bit word each.
    pub(crate) fn launch(&self, kernel: Kernel, parameters: &mut [u64; 3]) -> Result<()> {
        let [a, b, c] = parameters;
        let mut pointers: [*mut c_void; 3] =
            [(&raw mut *a).cast(), (&raw mut *b).cast(), (&raw mut *c).cast()];
        self.cuLaunchKernel(kernel.0, 1, 1, 1, 32, 1, 1, 0, 0, pointers.as_mut_ptr(), core::ptr::null_mut())
    }

    /// As [`Self::launch`], on the same stream, by the function's name for programs with a default stream for each thread.
    pub(crate) fn launch_by_the_other_name(&self, kernel: Kernel, parameters: &mut [u64; 3]) -> Result<()> {
        const LEGACY_STREAM: u64 = 1;
        let mut pointers = parameters.each_mut().map(|parameter| (&raw mut *parameter).cast());
        let (kernel, none) = (kernel.0, core::ptr::null_mut());
        self.cuLaunchKernel_ptsz(kernel, 1, 1, 1, 32, 1, 1, 0, LEGACY_STREAM, pointers.as_mut_ptr(), none)
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

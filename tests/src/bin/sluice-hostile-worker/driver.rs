//! The driver's own interface, as a taken-over worker would use it: without requests to the arbiter.

#![expect(unsafe_code, reason = "calls C functions found by name")]

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;

use anyhow::{Result, ensure};
use libloading::os::unix::{Library, RTLD_NOW, Symbol};

/// A kind of handle: `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FILE_DESCRIPTOR: c_uint = 1;

/// A kernel without arguments that counts.
const COUNTING: &CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry count() {
    .reg .pred %more;
    .reg .u32 %i;
    mov.u32 %i, 0;
again:
    add.u32 %i, %i, 1;
    setp.lt.u32 %more, %i, 100000;
    @%more bra again;
    ret;
}";

/// `CUmemAllocationProp` for memory of the first device that can be exported.
#[repr(C)]
struct Properties {
    kind: c_uint,
    handles: c_uint,
    location: [c_uint; 2],
    security: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc` for reading and writing by the first device.
#[repr(C)]
struct Access {
    location: [c_uint; 2],
    flags: c_uint,
}

macro_rules! functions {
    ($($name:ident($($p:ident: $ty:ty),*);)+) => {
        /// The functions of the driver.
        #[expect(non_snake_case, reason = "the names of cuda.h")]
        pub(crate) struct Driver {
            $($name: Symbol<unsafe extern "C" fn($($ty),*) -> c_uint>,)+
            _library: Library,
        }

        impl Driver {
            /// Loads the library.
            pub(crate) fn load(path: &Path) -> Result<Driver> {
                // SAFETY: the driver that the worker was told to load.
                let library = unsafe { Library::open(Some(path), RTLD_NOW) }?;
                // SAFETY: the types are those of cuda.h.
                Ok(Driver { $($name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,)+ _library: library })
            }

            $(
                #[expect(non_snake_case, reason = "the names of cuda.h")]
                #[allow(clippy::too_many_arguments, reason = "the parameters of cuda.h")]
                fn $name(&self $(, $p: $ty)*) -> Result<(), u32> {
                    // SAFETY: callers in this module pass arguments that are valid by cuda.h.
                    match unsafe { (self.$name)($($p),*) } {
                        0 => Ok(()),
                        error => Err(error),
                    }
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
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const c_void, flags: u64);
    cuMemRelease(handle: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, descriptor: *mut c_void, kind: c_uint);
    cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, access: *const c_void, count: usize);
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuModuleLoadData(module: *mut u64, image: *const c_void);
    cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char);
    cuLaunchKernel(
        function: u64, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: u64, arguments: *const c_void, extra: *const c_void
    );
}

/// A mapped piece of device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    handle: u64,
    address: u64,
    bytes: usize,
}

impl Driver {
    /// Starts the driver.
    pub(crate) fn init(&self) -> Result<()> {
        let started = self.cuInit(0);
        ensure!(started.is_ok(), "the driver does not start: {started:?}");
        Ok(())
    }

    /// Starts the driver, with the primary context of the first device.
    pub(crate) fn start(&self) -> Result<()> {
        self.init()?;
        let mut context = 0;
        let started = self.cuDevicePrimaryCtxRetain(&raw mut context, 0);
        let started = started.and_then(|()| self.cuCtxSetCurrent(context));
        ensure!(started.is_ok(), "there is no context: {started:?}");
        Ok(())
    }

    /// Imports a lent chunk and maps it.
    pub(crate) fn import(&self, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Piece, u32> {
        let mut handle = 0;
        let number = core::ptr::without_provenance_mut(descriptor.as_raw_fd().cast_unsigned() as usize);
        self.cuMemImportFromShareableHandle(&raw mut handle, number, POSIX_FILE_DESCRIPTOR)?;
        self.map(handle, bytes)
    }

    /// Makes device memory without a request to the arbiter.
    pub(crate) fn create(&self, bytes: u64) -> Result<u64, u32> {
        let properties = Properties {
            kind: 1,
            handles: POSIX_FILE_DESCRIPTOR,
            location: [1, 0],
            security: core::ptr::null(),
            flags: [0; 8],
        };
        let mut handle = 0;
        self.cuMemCreate(&raw mut handle, size(bytes), (&raw const properties).cast(), 0)?;
        Ok(handle)
    }

    /// Allocates device memory without a request to the arbiter.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64, u32> {
        let mut address = 0;
        self.cuMemAlloc_v2(&raw mut address, size(bytes))?;
        Ok(address)
    }

    /// Computes without end and without a permit or a report.
    pub(crate) fn compute(&self) -> Result<(), u32> {
        let (mut module, mut function, none) = (0, 0, core::ptr::null());
        self.cuModuleLoadData(&raw mut module, COUNTING.as_ptr().cast())?;
        self.cuModuleGetFunction(&raw mut function, module, c"count".as_ptr())?;
        loop {
            self.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, none, none)?;
            self.cuCtxSynchronize()?;
        }
    }

    fn map(&self, handle: u64, bytes: u64) -> Result<Piece, u32> {
        let mut address = 0;
        let bytes = size(bytes);
        self.cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0)?;
        self.cuMemMap(address, bytes, 0, handle, 0)?;
        let access = Access { location: [1, 0], flags: 3 };
        self.cuMemSetAccess(address, bytes, (&raw const access).cast(), 1)?;
        Ok(Piece { handle, address, bytes })
    }

    /// Fills a piece with the same bytes.
    pub(crate) fn write(&self, piece: Piece, pattern: &[u8]) -> Result<(), u32> {
        for at in (0..piece.bytes).step_by(pattern.len()) {
            let bytes = pattern.len().min(piece.bytes - at);
            self.cuMemcpyHtoD_v2(piece.address + at as u64, pattern.as_ptr().cast(), bytes)?;
        }
        self.cuCtxSynchronize()
    }

    /// Unmaps and releases a piece.
    pub(crate) fn unmap(&self, piece: Piece) -> Result<(), u32> {
        self.cuMemUnmap(piece.address, piece.bytes)?;
        self.cuMemRelease(piece.handle)
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

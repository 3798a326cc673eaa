//! The driver calls that the backend makes, one method each.
//!
//! Handles come from this driver and are forgotten before they are destroyed (the session's tables ensure it); addresses come
//! as [`Device`] and [`Host`] ranges, which are made where addresses are checked. The driver checks the rest.

#![expect(unsafe_code, reason = "calls the driver's C functions")]
#![expect(clippy::missing_errors_doc, reason = "every method fails with the driver's own code")]

use crate::{
    Code, Device, Driver, DriverError, Handle, Host, LaunchAttribute, Rows,
    abi::{Access, AllocationProperties, Copy2D, LaunchConfig, POSIX_FILE_DESCRIPTOR, Side},
    code,
};
use core::ffi::{c_char, c_int, c_uint, c_void};
use rustix::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ffi::{CStr, CString};

/// Calls an entry point if the driver has it.
macro_rules! call {
    ($self:ident.$name:ident($($argument:expr),* $(,)?)) => { call!($self.entries: $name($($argument),*)) };
    ($self:ident.$table:ident: $name:ident($($argument:expr),* $(,)?)) => {
        match $self.$table.$name {
            // SAFETY: the signature is that of the driver's header; pointers are to live values of this function or of
            // its caller's borrowed arguments, which outlive the call.
            Some(entry) => match unsafe { entry($($argument),*) } {
                0 => Ok(()),
                failed => Err(failed),
            },
            None => Err(code::NOT_SUPPORTED),
        }
    };
}

/// What a launch is made of, apart from its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The function or kernel.
    pub function: Handle,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

/// What the driver knows of an address; zeros where it knows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// The context of the memory.
    pub context: Handle,
    /// Whether it is memory of a device.
    pub on_device: bool,
    /// Whether it moves between host and device.
    pub managed: bool,
    /// Where its range begins.
    pub start: u64,
    /// Bytes of the range.
    pub bytes: u64,
}

/// A cubin that the driver's linker made, which keeps it until this is dropped.
#[derive(Debug)]
pub struct Linked<'a> {
    driver: &'a Driver,
    state: Handle,
    cubin: *mut c_void,
    bytes: usize,
}

impl Linked<'_> {
    /// The cubin.
    #[must_use]
    pub fn image(&self) -> &[u8] {
        // SAFETY: the driver says that so many bytes are there until the linker's state is destroyed, which dropping this does.
        unsafe { core::slice::from_raw_parts(self.cubin.cast_const().cast(), self.bytes) }
    }
}

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        let driver = self.driver;
        // Where there is no state none was made. One that is not destroyed goes with the process.
        if self.state != 0 {
            let _ = call!(driver.linker: cuLinkDestroy(self.state));
        }
    }
}

type Result<T> = core::result::Result<T, Code>;

fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| code::INVALID_VALUE)
}

fn pointer<T>(address: u64) -> Result<*mut T> {
    Ok(core::ptr::with_exposed_provenance_mut(size(address)?))
}

fn out<T>(value: &mut T) -> *mut c_void {
    core::ptr::from_mut(value).cast()
}

fn input<T>(value: &T) -> *const c_void {
    core::ptr::from_ref(value).cast()
}

// Start-up and devices.
impl Driver {
    /// `cuInit`.
    pub fn init(&self) -> Result<()> {
        call!(self.cuInit(0))
    }

    /// `cuDriverGetVersion`.
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        call!(self.cuDriverGetVersion(&raw mut version))?;
        u32::try_from(version).map_err(|_| code::UNKNOWN)
    }

    /// `cuDeviceGetCount`.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        call!(self.cuDeviceGetCount(&raw mut count))?;
        u32::try_from(count).map_err(|_| code::UNKNOWN)
    }

    /// `cuDeviceGet`.
    pub fn device(&self, ordinal: u32) -> Result<c_int> {
        let ordinal = c_int::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        let mut device = 0;
        call!(self.cuDeviceGet(&raw mut device, ordinal))?;
        Ok(device)
    }

    /// `cuDeviceGetName`.
    pub fn device_name(&self, device: c_int) -> Result<[u8; 128]> {
        let mut name = [0_u8; 128];
        // The length leaves the last byte alone, so the name ends with a NUL whatever the driver does.
        call!(self.cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 127, device))?;
        Ok(name)
    }

    /// `cuDeviceGetUuid_v2`.
    pub fn device_uuid(&self, device: c_int) -> Result<[u8; 16]> {
        let mut uuid = [0_u8; 16];
        call!(self.cuDeviceGetUuid_v2(out(&mut uuid), device))?;
        Ok(uuid)
    }

    /// Makes sure that the driver shows one device and that it is this one, where one is due. What a process is shown was
    /// chosen before it began; should the driver have taken that for something else, nothing may be done with it.
    pub fn confirm(&self, identity: Option<[u8; 16]>) -> core::result::Result<(), DriverError> {
        let Some(identity) = identity else { return Ok(()) };
        let count = self.device_count().map_err(DriverError::Init)?;
        let first = self.device(0).and_then(|device| self.device_uuid(device)).map_err(DriverError::Init)?;
        if count == 1 && first == identity { Ok(()) } else { Err(DriverError::Identity { count }) }
    }

    /// `cuDeviceTotalMem_v2`.
    pub fn device_memory(&self, device: c_int) -> Result<u64> {
        let mut bytes = 0_usize;
        call!(self.cuDeviceTotalMem_v2(&raw mut bytes, device))?;
        Ok(bytes as u64)
    }

    /// `cuDeviceGetAttribute`.
    pub fn device_attribute(&self, attribute: u32, device: c_int) -> Result<i32> {
        let mut value = 0;
        call!(self.cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(value)
    }
}

// Contexts.
impl Driver {
    /// `cuDevicePrimaryCtxSetFlags_v2`.
    pub fn primary_retain(&self, device: c_int, flags: u32) -> Result<Handle> {
        // The flags of an inactive primary context are set before it comes to life; an active one keeps its own.
        if flags != 0 {
            call!(self.cuDevicePrimaryCtxSetFlags_v2(device, flags))?;
        }
        let mut context = 0;
        call!(self.cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(context)
    }

    /// `cuDevicePrimaryCtxRelease_v2`.
    pub fn primary_release(&self, device: c_int) -> Result<()> {
        call!(self.cuDevicePrimaryCtxRelease_v2(device))
    }

    /// `cuCtxCreate_v2`.
    pub fn context_create(&self, device: c_int, flags: u32) -> Result<Handle> {
        let mut context = 0;
        match call!(self.cuCtxCreate_v2(&raw mut context, flags, device)) {
            Err(code::NOT_SUPPORTED) => {
                call!(self.cuCtxCreate_v4(&raw mut context, core::ptr::null_mut(), flags, device))?;
            }
            other => other?,
        }
        Ok(context)
    }

    /// `cuCtxDestroy_v2`.
    pub fn context_destroy(&self, context: Handle) -> Result<()> {
        call!(self.cuCtxDestroy_v2(context))
    }

    /// `cuCtxSetCurrent`.
    pub fn set_current(&self, context: Handle) -> Result<()> {
        call!(self.cuCtxSetCurrent(context))
    }

    /// `cuCtxGetLimit`.
    pub fn limit(&self, limit: u32) -> Result<u64> {
        let mut value = 0_usize;
        call!(self.cuCtxGetLimit(&raw mut value, limit))?;
        Ok(value as u64)
    }

    /// `cuCtxSetLimit`.
    pub fn set_limit(&self, limit: u32, value: u64) -> Result<()> {
        let value = size(value)?;
        call!(self.cuCtxSetLimit(limit, value))
    }

    /// `cuCtxGetStreamPriorityRange`.
    pub fn priorities(&self) -> Result<(i32, i32)> {
        let (mut least, mut greatest) = (0, 0);
        call!(self.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
        Ok((least, greatest))
    }
}

// Device memory, only ever through the virtual-memory API.
impl Driver {
    /// `cuMemGetAllocationGranularity`.
    pub fn granularity(&self, device: c_int) -> Result<u64> {
        let mut bytes = 0_usize;
        let properties = AllocationProperties::device(device);
        call!(self.cuMemGetAllocationGranularity(&raw mut bytes, input(&properties), 0))?;
        Ok(bytes as u64)
    }

    /// `cuMemGetInfo_v2`: free and total bytes of the current context's device.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0_usize, 0_usize);
        call!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    /// `cuMemCreate`.
    pub fn chunk_create(&self, bytes: u64, device: c_int) -> Result<Handle> {
        let mut handle = 0;
        let properties = AllocationProperties::device(device);
        let bytes = size(bytes)?;
        call!(self.cuMemCreate(&raw mut handle, bytes, input(&properties), 0))?;
        Ok(handle)
    }

    /// `cuMemRelease`.
    pub fn chunk_release(&self, handle: Handle) -> Result<()> {
        call!(self.cuMemRelease(handle))
    }

    /// `cuMemExportToShareableHandle`: a descriptor by which another process imports the chunk. The chunk lives as long as
    /// the descriptor does, or a process that imported it.
    pub fn chunk_export(&self, handle: Handle) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        call!(self.cuMemExportToShareableHandle(out(&mut descriptor), handle, POSIX_FILE_DESCRIPTOR, 0))?;
        if descriptor < 0 {
            return Err(code::UNKNOWN);
        }
        // SAFETY: the driver made the descriptor for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// `cuMemImportFromShareableHandle`: a handle of this process for a chunk of another.
    pub fn chunk_import(&self, descriptor: BorrowedFd<'_>) -> Result<Handle> {
        let mut handle = 0;
        // The descriptor travels in the place of a pointer.
        let descriptor = usize::try_from(descriptor.as_raw_fd()).map_err(|_| code::INVALID_VALUE)?;
        let descriptor = core::ptr::without_provenance_mut::<c_void>(descriptor);
        call!(self.cuMemImportFromShareableHandle(&raw mut handle, descriptor, POSIX_FILE_DESCRIPTOR))?;
        Ok(handle)
    }

    /// Reserves addresses near `base`; the answer may be elsewhere.
    pub fn address_reserve(&self, base: u64, bytes: u64) -> Result<u64> {
        let mut got = 0;
        let bytes = size(bytes)?;
        call!(self.cuMemAddressReserve(&raw mut got, bytes, 0, base, 0))?;
        Ok(got)
    }

    /// `cuMemAddressFree`.
    pub fn address_free(&self, base: u64, bytes: u64) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemAddressFree(base, bytes))
    }

    /// `cuMemMap`.
    pub fn map(&self, at: u64, bytes: u64, chunk: Handle) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemMap(at, bytes, 0, chunk, 0))
    }

    /// `cuMemUnmap`.
    pub fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemUnmap(at, bytes))
    }

    /// `cuMemSetAccess` for reading and writing.
    pub fn allow(&self, at: u64, bytes: u64, device: c_int) -> Result<()> {
        self.allow_as(at, bytes, device, 3)
    }

    /// `cuMemSetAccess` with flags: 0 nothing, 1 reading, 3 writing, too.
    pub fn allow_as(&self, at: u64, bytes: u64, device: c_int, flags: u32) -> Result<()> {
        let access = Access::new(device, flags);
        let bytes = size(bytes)?;
        call!(self.cuMemSetAccess(at, bytes, input(&access), 1))
    }

    /// Pins host pages for every context, at device addresses equal to theirs.
    pub fn host_register(&self, address: u64, bytes: u64) -> Result<()> {
        const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
        let (address, bytes) = (pointer(address)?, size(bytes)?);
        call!(self.cuMemHostRegister_v2(address, bytes, PORTABLE_AND_MAPPED))
    }

    /// `cuMemHostUnregister`.
    pub fn host_unregister(&self, address: u64) -> Result<()> {
        let address = pointer(address)?;
        call!(self.cuMemHostUnregister(address))
    }
}

// Copies and fills, all asynchronous.
impl Driver {
    /// `cuMemcpyHtoDAsync_v2`.
    pub fn copy_to_device(&self, to: Device, from: Host, stream: Handle) -> Result<()> {
        let (source, bytes) = (pointer::<c_void>(from.address())?, size(to.bytes().min(from.bytes()))?);
        call!(self.cuMemcpyHtoDAsync_v2(to.address(), source.cast_const(), bytes, stream))
    }

    /// `cuMemcpyDtoHAsync_v2`.
    pub fn copy_from_device(&self, to: Host, from: Device, stream: Handle) -> Result<()> {
        let (target, bytes) = (pointer::<c_void>(to.address())?, size(to.bytes().min(from.bytes()))?);
        call!(self.cuMemcpyDtoHAsync_v2(target, from.address(), bytes, stream))
    }

    /// `cuMemcpyDtoDAsync_v2`.
    pub fn copy_on_device(&self, to: Device, from: Device, stream: Handle) -> Result<()> {
        let bytes = size(to.bytes().min(from.bytes()))?;
        call!(self.cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, stream))
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn copy_rows_to_device(
        &self,
        to: (Device, u64),
        from: (Host, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) =
            (Side::device(to.0.address(), size(to.1)?), Side::host(from.0.address(), size(from.1)?));
        self.copy_2d(to, from, rows, stream)
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn copy_rows_from_device(
        &self,
        to: (Host, u64),
        from: (Device, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) =
            (Side::host(to.0.address(), size(to.1)?), Side::device(from.0.address(), size(from.1)?));
        self.copy_2d(to, from, rows, stream)
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn copy_rows_on_device(
        &self,
        to: (Device, u64),
        from: (Device, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) =
            (Side::device(to.0.address(), size(to.1)?), Side::device(from.0.address(), size(from.1)?));
        self.copy_2d(to, from, rows, stream)
    }

    fn copy_2d(&self, to: Side, from: Side, rows: Rows, stream: Handle) -> Result<()> {
        let copy = Copy2D { from, to, width: size(rows.width)?, height: size(rows.height)? };
        call!(self.cuMemcpy2DAsync_v2(input(&copy), stream))
    }

    /// Fills rows of `width` elements of `element` bytes.
    #[expect(clippy::cast_possible_truncation, reason = "the low bytes of the value are the element")]
    pub fn fill(&self, to: Device, element: u32, value: u32, rows: Rows, stream: Handle) -> Result<()> {
        let (at, pitch) = (to.address(), size(rows.pitch)?);
        let (width, height) = (size(rows.width)?, size(rows.height)?);
        match (element, height) {
            (1, 1) => call!(self.cuMemsetD8Async(at, value as u8, width, stream)),
            (2, 1) => call!(self.cuMemsetD16Async(at, value as u16, width, stream)),
            (4, 1) => call!(self.cuMemsetD32Async(at, value, width, stream)),
            (1, _) => call!(self.cuMemsetD2D8Async(at, pitch, value as u8, width, height, stream)),
            (2, _) => call!(self.cuMemsetD2D16Async(at, pitch, value as u16, width, height, stream)),
            (4, _) => call!(self.cuMemsetD2D32Async(at, pitch, value, width, height, stream)),
            _ => Err(code::INVALID_VALUE),
        }
    }
}

// Modules, libraries, functions, kernels.
impl Driver {
    /// Loads an image as a module; the JIT's messages go to `log`. Returns how many bytes of it are used beside the result.
    pub fn module_load(&self, image: &[u8], log: &mut [u8]) -> (Result<Handle>, usize) {
        const INFO_LOG: c_uint = 3;
        const INFO_LOG_BYTES: c_uint = 4;
        const ERROR_LOG: c_uint = 5;
        const ERROR_LOG_BYTES: c_uint = 6;
        let image = image.as_ptr().cast::<c_void>();
        let mut module = 0;
        if log.is_empty() {
            let done = call!(self.cuModuleLoadDataEx(
                &raw mut module,
                image,
                0,
                core::ptr::null_mut(),
                core::ptr::null_mut()
            ));
            return (done.map(|()| module), 0);
        }
        let (info, error) = log.split_at_mut(log.len() / 2);
        let mut options = [INFO_LOG, INFO_LOG_BYTES, ERROR_LOG, ERROR_LOG_BYTES];
        let mut values = [
            info.as_mut_ptr().cast::<c_void>(),
            core::ptr::without_provenance_mut(info.len()),
            error.as_mut_ptr().cast::<c_void>(),
            core::ptr::without_provenance_mut(error.len()),
        ];
        let done = call!(self.cuModuleLoadDataEx(
            &raw mut module,
            image,
            4,
            options.as_mut_ptr(),
            values.as_mut_ptr()
        ));
        // On success the guest's one buffer carries the information, else the errors.
        let [_, info_used, _, error_used] = values.map(|value| value.addr());
        let used = if done.is_ok() {
            info_used.min(info.len())
        } else {
            let used = error_used.min(error.len());
            info.get_mut(..used).unwrap_or_default().copy_from_slice(error.get(..used).unwrap_or_default());
            used
        };
        (done.map(|()| module), used)
    }

    /// Compiles a PTX text, which ends with its NUL, for the device of the current context. The device's memory is not touched.
    pub fn link(&self, text: &[u8]) -> Result<Linked<'_>> {
        const PTX: c_uint = 1;
        let (none, no_values) = (core::ptr::null_mut::<c_uint>(), core::ptr::null_mut::<*mut c_void>());
        let mut linked = Linked { driver: self, state: 0, cubin: core::ptr::null_mut(), bytes: 0 };
        call!(self.linker: cuLinkCreate_v2(0, none, no_values, &raw mut linked.state))?;
        let data = text.as_ptr().cast_mut().cast::<c_void>();
        let state = linked.state;
        call!(self.linker: cuLinkAddData_v2(
            state,
            PTX,
            data,
            text.len(),
            core::ptr::null(),
            0,
            none,
            no_values
        ))?;
        call!(self.linker: cuLinkComplete(state, &raw mut linked.cubin, &raw mut linked.bytes))?;
        if linked.cubin.is_null() { Err(code::UNKNOWN) } else { Ok(linked) }
    }

    /// `cuLibraryLoadData`.
    pub fn library_load(&self, image: &[u8]) -> Result<Handle> {
        let mut library = 0;
        let none = core::ptr::null_mut::<c_uint>();
        let no_values = core::ptr::null_mut::<*mut c_void>();
        call!(self.cuLibraryLoadData(
            &raw mut library,
            image.as_ptr().cast::<c_void>(),
            none,
            no_values,
            0,
            none,
            no_values,
            0
        ))?;
        Ok(library)
    }

    /// `cuModuleUnload`.
    pub fn module_unload(&self, module: Handle) -> Result<()> {
        call!(self.cuModuleUnload(module))
    }

    /// `cuLibraryUnload`.
    pub fn library_unload(&self, library: Handle) -> Result<()> {
        call!(self.cuLibraryUnload(library))
    }

    /// `cuModuleGetFunction`.
    pub fn module_function(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let mut function = 0;
        call!(self.cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        Ok(function)
    }

    /// `cuLibraryGetKernel`.
    pub fn library_kernel(&self, library: Handle, name: &CStr) -> Result<Handle> {
        let mut kernel = 0;
        call!(self.cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()))?;
        Ok(kernel)
    }

    /// `cuLibraryGetModule`: the library in the current context, made there if need be.
    pub fn library_module(&self, library: Handle) -> Result<Handle> {
        let mut module = 0;
        call!(self.cuLibraryGetModule(&raw mut module, library))?;
        Ok(module)
    }

    /// `cuModuleGetGlobal_v2`.
    pub fn module_global(&self, module: Handle, name: &CStr) -> Result<(u64, u64)> {
        let (mut address, mut bytes) = (0, 0_usize);
        call!(self.cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name.as_ptr()))?;
        Ok((address, bytes as u64))
    }

    /// `cuLibraryGetGlobal`.
    pub fn library_global(&self, library: Handle, name: &CStr) -> Result<(u64, u64)> {
        let (mut address, mut bytes) = (0, 0_usize);
        call!(self.cuLibraryGetGlobal(&raw mut address, &raw mut bytes, library, name.as_ptr()))?;
        Ok((address, bytes as u64))
    }

    /// `cuPointerGetAttributes`: what the driver knows of an address.
    pub fn pointer(&self, address: u64) -> Result<Pointer> {
        const CONTEXT: c_uint = 1;
        const MEMORY_TYPE: c_uint = 2;
        const IS_MANAGED: c_uint = 8;
        const RANGE_START: c_uint = 11;
        const RANGE_BYTES: c_uint = 12;
        const DEVICE: c_uint = 2;
        let mut attributes = [CONTEXT, MEMORY_TYPE, IS_MANAGED, RANGE_START, RANGE_BYTES];
        let (mut context, mut start, mut bytes): (Handle, u64, usize) = (0, 0, 0);
        let (mut kind, mut managed): (c_uint, c_uint) = (0, 0);
        let mut places = [
            (&raw mut context).cast::<c_void>(),
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
        ];
        call!(self.cuPointerGetAttributes(5, attributes.as_mut_ptr(), places.as_mut_ptr(), address))?;
        let bytes = bytes as u64;
        Ok(Pointer { context, on_device: kind == DEVICE, managed: managed != 0, start, bytes })
    }

    /// `cuModuleGetFunctionCount`.
    pub fn module_function_count(&self, module: Handle) -> Result<u32> {
        let mut count = 0;
        call!(self.cuModuleGetFunctionCount(&raw mut count, module))?;
        Ok(count)
    }

    /// `cuLibraryGetKernelCount`.
    pub fn library_kernel_count(&self, library: Handle) -> Result<u32> {
        let mut count = 0;
        call!(self.cuLibraryGetKernelCount(&raw mut count, library))?;
        Ok(count)
    }

    /// The first functions of a module, as many as `into` has room for.
    pub fn module_functions(&self, module: Handle, into: &mut [Handle]) -> Result<()> {
        let count = c_uint::try_from(into.len()).map_err(|_| code::INVALID_VALUE)?;
        call!(self.cuModuleEnumerateFunctions(into.as_mut_ptr(), count, module))
    }

    /// The first kernels of a library, as many as `into` has room for.
    pub fn library_kernels(&self, library: Handle, into: &mut [Handle]) -> Result<()> {
        let count = c_uint::try_from(into.len()).map_err(|_| code::INVALID_VALUE)?;
        call!(self.cuLibraryEnumerateKernels(into.as_mut_ptr(), count, library))
    }

    /// `cuFuncGetName`.
    pub fn function_name(&self, function: Handle) -> Result<CString> {
        let mut name = core::ptr::null();
        call!(self.cuFuncGetName(&raw mut name, function))?;
        owned(name)
    }

    /// `cuKernelGetName`.
    pub fn kernel_name(&self, kernel: Handle) -> Result<CString> {
        let mut name = core::ptr::null();
        call!(self.cuKernelGetName(&raw mut name, kernel))?;
        owned(name)
    }

    /// `cuFuncGetAttribute`.
    pub fn function_attribute(&self, attribute: u32, function: Handle) -> Result<i32> {
        let mut value = 0;
        call!(self.cuFuncGetAttribute(&raw mut value, attribute, function))?;
        Ok(value)
    }

    /// `cuKernelGetAttribute`.
    pub fn kernel_attribute(&self, attribute: u32, kernel: Handle, device: c_int) -> Result<i32> {
        let mut value = 0;
        call!(self.cuKernelGetAttribute(&raw mut value, attribute, kernel, device))?;
        Ok(value)
    }

    /// `cuFuncSetAttribute`.
    pub fn set_function_attribute(&self, attribute: u32, value: i32, function: Handle) -> Result<()> {
        call!(self.cuFuncSetAttribute(function, attribute, value))
    }

    /// `cuKernelSetAttribute`.
    pub fn set_kernel_attribute(
        &self,
        attribute: u32,
        value: i32,
        kernel: Handle,
        device: c_int,
    ) -> Result<()> {
        call!(self.cuKernelSetAttribute(attribute, value, kernel, device))
    }

    /// `cuFuncGetParamInfo`.
    pub fn function_parameter(&self, function: Handle, index: usize) -> Result<(usize, usize)> {
        let (mut offset, mut bytes) = (0, 0);
        call!(self.cuFuncGetParamInfo(function, index, &raw mut offset, &raw mut bytes))?;
        Ok((offset, bytes))
    }

    /// `cuKernelGetParamInfo`.
    pub fn kernel_parameter(&self, kernel: Handle, index: usize) -> Result<(usize, usize)> {
        let (mut offset, mut bytes) = (0, 0);
        call!(self.cuKernelGetParamInfo(kernel, index, &raw mut offset, &raw mut bytes))?;
        Ok((offset, bytes))
    }

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
    pub fn occupancy_blocks(&self, function: Handle, block: i32, shared: u64, flags: u32) -> Result<i32> {
        let (mut blocks, shared) = (0, size(shared)?);
        call!(self.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
            &raw mut blocks,
            function,
            block,
            shared,
            flags
        ))?;
        Ok(blocks)
    }

    /// `cuOccupancyMaxPotentialBlockSizeWithFlags`.
    pub fn occupancy_block_size(
        &self,
        function: Handle,
        shared: u64,
        limit: i32,
        flags: u32,
    ) -> Result<(i32, i32)> {
        let (mut grid, mut block, shared) = (0, 0, size(shared)?);
        call!(self.cuOccupancyMaxPotentialBlockSizeWithFlags(
            &raw mut grid,
            &raw mut block,
            function,
            None,
            shared,
            limit,
            flags
        ))?;
        Ok((grid, block))
    }

    /// `cuOccupancyAvailableDynamicSMemPerBlock`.
    pub fn occupancy_shared(&self, function: Handle, blocks: i32, block: i32) -> Result<u64> {
        let mut bytes = 0_usize;
        call!(self.cuOccupancyAvailableDynamicSMemPerBlock(&raw mut bytes, function, blocks, block))?;
        Ok(bytes as u64)
    }

    /// The largest cluster that fits (`potential`), or how many of the configured clusters run at once.
    pub fn occupancy_clusters(
        &self,
        potential: bool,
        launch: &Launch,
        attributes: &[LaunchAttribute],
    ) -> Result<i32> {
        let mut value = 0;
        let config = config(launch, attributes, 0)?;
        if potential {
            call!(self.cuOccupancyMaxPotentialClusterSize(&raw mut value, launch.function, input(&config)))?;
        } else {
            call!(self.cuOccupancyMaxActiveClusters(&raw mut value, launch.function, input(&config)))?;
        }
        Ok(value)
    }

    /// Launches with `parameters` packed as the function's layout says.
    pub fn launch(
        &self,
        launch: &Launch,
        attributes: &[LaunchAttribute],
        parameters: &[u8],
        stream: Handle,
    ) -> Result<()> {
        const END: *mut c_void = core::ptr::null_mut();
        const BUFFER: *mut c_void = core::ptr::without_provenance_mut(1);
        const BUFFER_BYTES: *mut c_void = core::ptr::without_provenance_mut(2);
        let mut bytes = parameters.len();
        // The driver reads the buffer only; the C signature has no const.
        let buffer = parameters.as_ptr().cast_mut().cast::<c_void>();
        let mut extra = [BUFFER, buffer, BUFFER_BYTES, out(&mut bytes), END];
        let extra = if parameters.is_empty() { core::ptr::null_mut() } else { extra.as_mut_ptr() };
        let none = core::ptr::null_mut::<*mut c_void>();
        if attributes.is_empty() {
            let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
            return call!(self.cuLaunchKernel(
                launch.function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared,
                stream,
                none,
                extra
            ));
        }
        let config = config(launch, attributes, stream)?;
        call!(self.cuLaunchKernelEx(input(&config), launch.function, none, extra))
    }
}

fn config(launch: &Launch, attributes: &[LaunchAttribute], stream: Handle) -> Result<LaunchConfig> {
    Ok(LaunchConfig {
        grid: launch.grid,
        block: launch.block,
        shared: launch.shared,
        stream,
        attributes: attributes.as_ptr(),
        attribute_count: c_uint::try_from(attributes.len()).map_err(|_| code::INVALID_VALUE)?,
    })
}

fn owned(name: *const c_char) -> Result<CString> {
    if name.is_null() {
        return Err(code::UNKNOWN);
    }
    // SAFETY: the driver answered with a C string that lives as long as its module, which is loaded.
    Ok(unsafe { CStr::from_ptr(name) }.to_owned())
}

// Streams and events.
impl Driver {
    /// `cuStreamCreateWithPriority`.
    pub fn stream_create(&self, flags: u32, priority: i32) -> Result<Handle> {
        let mut stream = 0;
        call!(self.cuStreamCreateWithPriority(&raw mut stream, flags, priority))?;
        Ok(stream)
    }

    /// `cuStreamDestroy_v2`.
    pub fn stream_destroy(&self, stream: Handle) -> Result<()> {
        call!(self.cuStreamDestroy_v2(stream))
    }

    /// `cuStreamSynchronize`: waits until all work of the stream is done.
    pub fn stream_synchronize(&self, stream: Handle) -> Result<()> {
        call!(self.cuStreamSynchronize(stream))
    }

    /// `cuStreamWaitEvent`.
    pub fn stream_wait(&self, stream: Handle, event: Handle, flags: u32) -> Result<()> {
        call!(self.cuStreamWaitEvent(stream, event, flags))
    }

    /// `cuEventCreate`.
    pub fn event_create(&self, flags: u32) -> Result<Handle> {
        let mut event = 0;
        call!(self.cuEventCreate(&raw mut event, flags))?;
        Ok(event)
    }

    /// `cuEventDestroy_v2`.
    pub fn event_destroy(&self, event: Handle) -> Result<()> {
        call!(self.cuEventDestroy_v2(event))
    }

    /// `cuEventRecord`.
    pub fn event_record(&self, event: Handle, flags: u32, stream: Handle) -> Result<()> {
        if flags == 0 {
            call!(self.cuEventRecord(event, stream))
        } else {
            call!(self.cuEventRecordWithFlags(event, stream, flags))
        }
    }

    /// `cuEventSynchronize`. For events that are reached: it waits for others.
    pub fn event_synchronize(&self, event: Handle) -> Result<()> {
        call!(self.cuEventSynchronize(event))
    }

    /// Whether everything before the event's last recording is done.
    pub fn event_done(&self, event: Handle) -> Result<bool> {
        match call!(self.cuEventQuery(event)) {
            Ok(()) => Ok(true),
            Err(code::NOT_READY) => Ok(false),
            Err(failed) => Err(failed),
        }
    }

    /// `cuEventElapsedTime_v2`.
    pub fn event_elapsed(&self, start: Handle, end: Handle) -> Result<f32> {
        let mut milliseconds = 0.0;
        match call!(self.cuEventElapsedTime_v2(&raw mut milliseconds, start, end)) {
            Err(code::NOT_SUPPORTED) => call!(self.cuEventElapsedTime(&raw mut milliseconds, start, end))?,
            other => other?,
        }
        Ok(milliseconds)
    }
}

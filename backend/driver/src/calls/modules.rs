//! Modules, libraries, functions, kernels and their launch.

use super::{CompilerOptions, LaunchArguments, Pointer, Result, input, packed, size};
use crate::{Driver, Handle, LaunchAttribute, abi::LaunchConfig, code};
use core::ffi::{c_char, c_uint, c_void};
use std::ffi::{CStr, CString};

impl Driver {
    /// `cuModuleLoadDataEx`. The logs and numbers of the compiler are then in the options.
    pub fn module_load(&self, image: &[u8], options: &mut CompilerOptions) -> Result<Handle> {
        let mut module = 0;
        let (count, ids, values) = options.arguments()?;
        call!(self.cuModuleLoadDataEx(&raw mut module, image.as_ptr().cast(), count, ids, values))?;
        Ok(module)
    }

    /// `cuLibraryLoadData`. The logs and numbers of the compiler are then in the options.
    pub fn library_load(&self, image: &[u8], options: &mut CompilerOptions) -> Result<Handle> {
        let mut library = 0;
        let none = core::ptr::null_mut::<c_uint>();
        let no_values = core::ptr::null_mut::<*mut c_void>();
        let (count, ids, values) = options.arguments()?;
        let image = image.as_ptr().cast::<c_void>();
        call!(self.cuLibraryLoadData(&raw mut library, image, ids, values, count, none, no_values, 0))?;
        Ok(library)
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

    /// `cuLibraryGetManaged`.
    pub fn library_managed(&self, library: Handle, name: &CStr) -> Result<(u64, u64)> {
        let (mut address, mut bytes) = (0, 0_usize);
        call!(self.cuLibraryGetManaged(&raw mut address, &raw mut bytes, library, name.as_ptr()))?;
        Ok((address, bytes as u64))
    }

    /// `cuPointerGetAttributes`: the driver's attributes of an address.
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

    /// The first functions of a module, up to the length of `into`.
    pub fn module_functions(&self, module: Handle, into: &mut [Handle]) -> Result<()> {
        let count = c_uint::try_from(into.len()).map_err(|_| code::INVALID_VALUE)?;
        call!(self.cuModuleEnumerateFunctions(into.as_mut_ptr(), count, module))
    }

    /// The first kernels of a library, up to the length of `into`.
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

    /// The largest cluster that fits (`potential`), or the number of configured clusters that run at once.
    pub fn occupancy_clusters(
        &self,
        potential: bool,
        launch: &LaunchArguments,
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

    /// Launches with `parameters` packed in the layout of the function.
    pub fn launch(
        &self,
        launch: &LaunchArguments,
        attributes: &[LaunchAttribute],
        parameters: &[u8],
        stream: Handle,
    ) -> Result<()> {
        let mut bytes = parameters.len();
        let mut extra = packed(parameters, &mut bytes);
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

fn config(launch: &LaunchArguments, attributes: &[LaunchAttribute], stream: Handle) -> Result<LaunchConfig> {
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
    // SAFETY: the driver returned a C string that lives as long as its module, which is loaded.
    Ok(unsafe { CStr::from_ptr(name) }.to_owned())
}

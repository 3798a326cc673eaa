//! Libraries and kernels: images without a context.

use std::ffi::c_char;

use sluice_cuda_frontend::given;

use super::functions::{attribute, parameter, set_attribute};
use super::modules::parse_file;
use crate::context;
use crate::error::{Error, Result};
use crate::ffi::{In, Out, Text};
use crate::gpu;
use crate::images::IMAGES;
use crate::jit::{JitOptions, OptionValues};
use crate::module;

/// Checks the options of a library: host functions to register (refused), and the guarantee that the image stays.
fn check_options(keys: In<u32>, count: u32) -> Result {
    for key in keys.list(count as usize)? {
        match key {
            1 => {}
            0 => return Err(Error::NOT_SUPPORTED),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(())
}

calls! {
    fn cuLibraryLoadData(
        place: Out<u64>, image: In<u8>, jit_keys: In<u32>, jit_values: OptionValues, jit_count: u32, keys: In<u32>,
        _values: OptionValues, count: u32,
    ) {
        place.required()?;
        check_options(keys, count)?;
        let options = JitOptions::read(jit_count, jit_keys, jit_values)?;
        place.set(match module::parse(image, options.max_registers) {
            Err(refusal) if refusal.error == Error::INVALID_IMAGE && module::is_unknown(image) => {
                options.write(options.start.elapsed(), "", "")?;
                module::load_unread(refusal.error)?
            }
            outcome => module::load_library(module::finish(&options, outcome)?)?,
        })
    }

    fn cuLibraryLoadFromFile(
        place: Out<u64>, name: Text<'_>, jit_keys: In<u32>, jit_values: OptionValues, jit_count: u32, keys: In<u32>,
        _values: OptionValues, count: u32,
    ) {
        place.required()?;
        check_options(keys, count)?;
        let options = JitOptions::read(jit_count, jit_keys, jit_values)?;
        place.set(module::load_library(parse_file(name, options)?)?)
    }

    fn cuLibraryUnload(library: u64) {
        for ended in module::unload_library(library)? {
            IMAGES.module_ended(ended);
        }
        Ok(())
    }

    fn cuLibraryGetKernel(place: Out<u64>, library: u64, name: Text<'_>) {
        place.set(module::library_kernel(library, name.get()?)?)
    }

    fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) {
        count.set(u32::try_from(module::library_kernels(library)?.len()).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuLibraryEnumerateKernels(places: Out<u64>, count: u32, library: u64) {
        for (index, kernel) in module::library_kernels(library)?.into_iter().take(count as usize).enumerate() {
            places.set_at(index, kernel)?;
        }
        Ok(())
    }

    fn cuLibraryGetModule(place: Out<u64>, library: u64) {
        place.required()?;
        place.set(module::library_module(library)?)
    }

    fn cuLibraryGetGlobal(address: Out<u64>, bytes: Out<u64>, library: u64, name: Text<'_>) {
        let (start, size) = module::library_global(library, name.get()?)?;
        address.set_if_given(start);
        bytes.set_if_given(size);
        Ok(())
    }

    fn cuLibraryGetManaged(address: Out<u64>, bytes: Out<u64>, library: u64, name: Text<'_>) {
        let (start, size) = module::library_managed(library, name.get()?)?;
        address.set_if_given(start);
        bytes.set_if_given(size);
        Ok(())
    }

    // Attribute 129 reports that functions have no address that is the same on all devices.
    fn cuLibraryGetUnifiedFunction(_place: Out<u64>, library: u64, name: Text<'_>) {
        module::LIBRARIES.get(library)?;
        name.get()?;
        Err(Error::INVALID_VALUE)
    }

    fn cuKernelGetFunction(place: Out<u64>, kernel: u64) {
        place.required()?;
        place.set(module::kernel(kernel)?.function()?)
    }

    fn cuKernelGetLibrary(place: Out<u64>, kernel: u64) { place.set(module::kernel(kernel)?.library) }

    // NVIDIA's driver refuses it without a current context, whatever its documentation says.
    fn cuKernelGetAttribute(value: Out<i32>, number: i32, kernel: u64, device: i32) {
        context::current()?.ok_or(Error::INVALID_CONTEXT)?;
        let capability = gpu::at(device)?.capability();
        let kernel = module::kernel(kernel)?;
        value.set(attribute(kernel.parsed(), kernel.entry(), kernel.settings(), number, capability)?)
    }

    fn cuKernelSetAttribute(number: i32, value: i32, kernel: u64, device: i32) {
        let capability = gpu::at(device)?.capability();
        let kernel = module::kernel(kernel)?;
        set_attribute(kernel.entry(), kernel.settings(), number, value, capability)
    }

    fn cuKernelSetCacheConfig(kernel: u64, config: u32, device: i32) {
        gpu::at(device)?;
        module::kernel(kernel)?;
        if config > 3 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuKernelGetName(name: Out<*const c_char>, kernel: u64) { name.set(module::kernel(given::<Error>(kernel)?)?.name()?.as_ptr()) }

    fn cuKernelGetParamInfo(kernel: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        parameter(module::kernel(given::<Error>(kernel)?)?.entry(), index, offset, size)
    }

    fn cuKernelGetParamCount(kernel: u64, count: Out<usize>) {
        count.set(module::kernel(kernel)?.entry().params.len())
    }
}

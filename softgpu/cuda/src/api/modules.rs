//! Modules: images in the current context.

use sluice_cuda_frontend::environment::Environment;

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out, Text};
use crate::images::IMAGES;
use crate::jit::{JitOptions, OptionValues};
use crate::module;

pub(super) fn load_file(name: Text<'_>) -> Result<Vec<u8>> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(name.get()?));
    std::fs::read(path).map_err(|_| Error::FILE_NOT_FOUND)
}

pub(super) fn parse_file(name: Text<'_>, options: JitOptions) -> Result<std::sync::Arc<module::Image>> {
    let bytes = load_file(name)?;
    let max_registers = options.max_registers;
    module::finish(&options, module::parse_bytes(&bytes, max_registers))
}

calls! {
    fn cuModuleLoad(place: Out<u64>, name: Text<'_>) {
        place.required()?;
        current_core()?;
        let image = parse_file(name, JitOptions::none())?;
        place.set(module::load(&image)?)
    }

    fn cuModuleLoadData(place: Out<u64>, image: In<u8>) {
        place.required()?;
        place.set(module::load_plain(image)?)
    }

    fn cuModuleLoadDataEx(place: Out<u64>, image: In<u8>, count: u32, keys: In<u32>, values: OptionValues) {
        place.required()?;
        current_core()?;
        let options = JitOptions::read(count, keys, values)?;
        place.set(module::load(&module::finish(&options, module::parse(image, options.max_registers))?)?)
    }

    fn cuModuleLoadFatBinary(place: Out<u64>, image: In<u8>) {
        place.required()?;
        place.set(module::load_plain(image)?)
    }

    fn cuModuleUnload(handle: u64) {
        module::unload(handle)?;
        IMAGES.module_ended(handle);
        Ok(())
    }

    fn cuModuleGetFunction(place: Out<u64>, handle: u64, name: Text<'_>) {
        place.required()?;
        place.set(module::function(handle, name.get()?)?)
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<u64>, handle: u64, name: Text<'_>) {
        let (start, size) = module::global(handle, name.get()?)?;
        address.set_if_given(start);
        bytes.set_if_given(size);
        Ok(())
    }

    // A module is loaded whole in any mode; a library is so with the eager one.
    fn cuModuleGetLoadingMode(mode: Out<u32>) { mode.set(Environment::get().loading as u32) }

    fn cuModuleGetFunctionCount(count: Out<u32>, handle: u64) {
        count.set(u32::try_from(module::functions(handle)?.len()).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuModuleEnumerateFunctions(places: Out<u64>, count: u32, handle: u64) {
        for (index, function) in module::functions(handle)?.into_iter().take(count as usize).enumerate() {
            places.set_at(index, function)?;
        }
        Ok(())
    }
}

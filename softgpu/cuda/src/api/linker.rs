//! The linker. The forms of CUDA 5.5 take the same arguments as the later ones.

use std::ffi::c_void;

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out, Text};
use crate::jit::{JitOptions, OptionValues};
use crate::linker;

fn create(count: u32, keys: In<u32>, values: OptionValues, place: Out<u64>) -> Result {
    place.required()?;
    current_core()?;
    place.set(linker::create(JitOptions::read_for_link(count, keys, values)?)?)
}

#[expect(clippy::too_many_arguments, reason = "the arguments of the C function")]
fn add_data(
    link: u64,
    kind: u32,
    data: In<u8>,
    bytes: usize,
    name: Text<'_>,
    count: u32,
    keys: In<u32>,
    values: OptionValues,
) -> Result {
    linker::find(link)?;
    let options = JitOptions::read_for_input(count, keys, values)?;
    data.required()?;
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // The name is optional.
    let name = String::from_utf8_lossy(name.get().unwrap_or_default());
    linker::add(link, kind, &data.bytes(bytes)?, &name, options.max_registers)
}

fn add_file(link: u64, kind: u32, path: Text<'_>, count: u32, keys: In<u32>, values: OptionValues) -> Result {
    linker::find(link)?;
    let options = JitOptions::read_for_input(count, keys, values)?;
    let bytes = super::modules::load_file(path)?;
    if bytes.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    linker::add(link, kind, &bytes, &String::from_utf8_lossy(path.get()?), options.max_registers)
}

calls! {
    fn cuLinkCreate(count: u32, keys: In<u32>, values: OptionValues, place: Out<u64>) {
        create(count, keys, values, place)
    }

    fn cuLinkCreate_v2(count: u32, keys: In<u32>, values: OptionValues, place: Out<u64>) {
        create(count, keys, values, place)
    }

    fn cuLinkAddData(
        link: u64, kind: u32, data: In<u8>, bytes: usize, name: Text<'_>, count: u32, keys: In<u32>, values: OptionValues,
    ) {
        add_data(link, kind, data, bytes, name, count, keys, values)
    }

    fn cuLinkAddData_v2(
        link: u64, kind: u32, data: In<u8>, bytes: usize, name: Text<'_>, count: u32, keys: In<u32>, values: OptionValues,
    ) {
        add_data(link, kind, data, bytes, name, count, keys, values)
    }

    fn cuLinkAddFile(link: u64, kind: u32, path: Text<'_>, count: u32, keys: In<u32>, values: OptionValues) {
        add_file(link, kind, path, count, keys, values)
    }

    fn cuLinkAddFile_v2(link: u64, kind: u32, path: Text<'_>, count: u32, keys: In<u32>, values: OptionValues) {
        add_file(link, kind, path, count, keys, values)
    }

    fn cuLinkComplete(link: u64, image: Out<*mut c_void>, bytes: Out<usize>) {
        linker::find(link)?;
        image.required()?;
        let (address, length) = linker::complete(link)?;
        image.set(address)?;
        bytes.set_if_given(length);
        Ok(())
    }

    fn cuLinkDestroy(link: u64) { linker::destroy(link) }
}

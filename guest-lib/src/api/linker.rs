//! The functions of the C API for the linker.

use super::{jit, module::read_file};
use crate::{
    arguments::{Call, In, Out},
    error::Result,
    process::{self, ProcessState},
    state::{jit::JitOptions, links::LinkInput},
};
use core::ffi::{c_char, c_uint, c_void};
use sluice_protocol::{
    handle::{Id, Link},
    limits,
};

fn add(process: &ProcessState, link: Id<Link>, input: &LinkInput<'_>, options: &JitOptions) -> Result {
    let context = process.contexts.current_on_host();
    process.links.add(&process.session, &process.arena, context, link, input, options)
}

pub(crate) fn cuLinkCreate_v2(
    _: Call,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
    state: Out<u64>,
) -> Result {
    let process = process::get()?;
    let place = state.required()?;
    let context = process.current()?;
    let options = jit::read(count, options, values)?;
    place.set(process.links.create(
        &process.session,
        &process.arena,
        &process.objects,
        context.raw,
        &options,
    )?)
}

pub(crate) fn cuLinkCreate(
    call: Call,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
    state: Out<u64>,
) -> Result {
    cuLinkCreate_v2(call, count, options, values, state)
}

pub(crate) fn cuLinkAddData_v2(
    _: Call,
    state: u64,
    kind: c_uint,
    data: Out<c_void>,
    size: usize,
    name: In<c_char>,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let link = process.links.find(&process.objects, state)?;
    let options = jit::read_for_input(count, options, values)?;
    let data = data.required()?;
    let name = if name.is_given() { name.text().get_within(limits::NAME_BYTES)? } else { b"" };
    let input = LinkInput { kind, address: data.address(), bytes: size as u64, name };
    add(process, link, &input, &options)
}

pub(crate) fn cuLinkAddData(
    call: Call,
    state: u64,
    kind: c_uint,
    data: Out<c_void>,
    size: usize,
    name: In<c_char>,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result {
    cuLinkAddData_v2(call, state, kind, data, size, name, count, options, values)
}

pub(crate) fn cuLinkAddFile_v2(
    _: Call,
    state: u64,
    kind: c_uint,
    path: In<c_char>,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let link = process.links.find(&process.objects, state)?;
    let options = jit::read_for_input(count, options, values)?;
    // The bytes end with a NUL, which is not part of the file.
    let bytes = read_file(path, limits::LINK_INPUT_BYTES)?;
    let length = bytes.len() as u64 - 1;
    let address = bytes.as_ptr().expose_provenance() as u64;
    let name = path.text().get_within(limits::NAME_BYTES)?;
    let input = LinkInput { kind, address, bytes: length, name };
    add(process, link, &input, &options)
}

pub(crate) fn cuLinkAddFile(
    call: Call,
    state: u64,
    kind: c_uint,
    path: In<c_char>,
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result {
    cuLinkAddFile_v2(call, state, kind, path, count, options, values)
}

pub(crate) fn cuLinkComplete(_: Call, state: u64, image: Out<*mut c_void>, bytes: Out<usize>) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let link = process.links.find(&process.objects, state)?;
    image.required()?;
    let (address, length) =
        process.links.complete(&process.session, &process.arena, process.contexts.current_on_host(), link)?;
    image.set(core::ptr::with_exposed_provenance_mut(address))?;
    bytes.set_if_given(length);
    Ok(())
}

pub(crate) fn cuLinkDestroy(_: Call, state: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    process.links.destroy(&process.session, &process.objects, process.contexts.current_on_host(), state)
}

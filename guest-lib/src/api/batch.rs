//! Batches of copies, and copies with attributes: each is made as a copy without attributes is.

use super::{
    copy::{self, Direction},
    staging::WaitMode,
};
use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    images::IMAGES,
    process::{self, ProcessState},
    state::streams::StreamRef,
};
use core::ffi::c_void;
use sluice_cuda_frontend::batch::{self, BoxOperand, BoxSide, Boxes, FlatCopy, SourceAccess};
use sluice_cuda_graphs::{Copy3D, CopySide, memory_type};

fn flat(process: &ProcessState, stream: StreamRef<'_>, one: &FlatCopy) -> Result {
    copy::flat(process, stream, (one.to, one.from, one.bytes), Direction::Any, WaitMode::Async)
}

fn boxed(process: &ProcessState, stream: StreamRef<'_>, one: &Boxes) -> Result {
    let element = |array| Ok(IMAGES.array(array)?.shape.texel.bytes());
    let Boxes { to, from, extent: [width, height, depth], .. } =
        one.in_bytes(element, Error::INVALID_VALUE)?;
    let side = |operand| match operand {
        BoxOperand::Linear(BoxSide { start, pitch, rows }) => {
            let flat = CopySide::flat(memory_type::UNIFIED, start);
            CopySide { pitch, height: rows, ..flat }
        }
        BoxOperand::Array { array, origin: [x, y, z] } => {
            CopySide { kind: memory_type::ARRAY, array, x, y, z, ..CopySide::default() }
        }
    };
    let request = Copy3D { from: side(from), to: side(to), width, height, depth };
    copy::boxed(process, stream, &request, WaitMode::Async)
}

/// Makes the copies of a batch. After an error the earlier ones are made, and `failed` receives the name of the one that is the reason.
fn run<C>(
    call: Call,
    stream: u64,
    (failed, name): (Out<usize>, impl Fn(usize) -> usize),
    copies: impl FnOnce() -> Result<Vec<C>>,
    access: impl Fn(&C) -> SourceAccess,
    make: impl Fn(&'static ProcessState, StreamRef<'_>, &C) -> Result,
) -> Result {
    let process = process::get()?;
    failed.set_if_given(batch::WHOLE_BATCH);
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    // The header does not allow the legacy stream.
    if stream.slot == process.contexts.get(stream.context)?.legacy {
        return Err(Error::INVALID_VALUE);
    }
    let copies = copies()?;
    for (index, one) in copies.iter().enumerate() {
        make(process, stream, one).inspect_err(|_| failed.set_if_given(name(index)))?;
    }
    if copies.iter().any(|one| access(one) == SourceAccess::DuringCall) {
        // Of a capture, nothing was posted.
        process.session.wait_complete(stream.slot, stream.posted())?;
    }
    Ok(())
}

fn flat_batch(
    call: Call,
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<c_void>,
    starts: In<usize>,
    kinds: usize,
    failed: Out<usize>,
    stream: u64,
) -> Result {
    let copies = || {
        batch::flat(
            to,
            from,
            sizes.cast(),
            count,
            attributes.cast(),
            starts.cast(),
            kinds,
            Error::INVALID_VALUE,
        )
    };
    run(call, stream, (failed, |index| index), copies, |one| one.access, flat)
}

pub(crate) fn cuMemcpyBatchAsync(
    call: Call,
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<c_void>,
    starts: In<usize>,
    kinds: usize,
    failed: Out<usize>,
    stream: u64,
) -> Result {
    flat_batch(call, to, from, sizes, count, attributes, starts, kinds, failed, stream)
}

pub(crate) fn cuMemcpyBatchAsync_v2(
    call: Call,
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<c_void>,
    starts: In<usize>,
    kinds: usize,
    stream: u64,
) -> Result {
    flat_batch(call, to, from, sizes, count, attributes, starts, kinds, Out::missing(), stream)
}

pub(crate) fn cuMemcpyWithAttributesAsync(
    call: Call,
    to: u64,
    from: u64,
    bytes: usize,
    attributes: In<c_void>,
    stream: u64,
) -> Result {
    let copies = || {
        let access = batch::access(attributes.cast(), Error::INVALID_VALUE)?;
        Ok(vec![FlatCopy { to, from, bytes: bytes as u64, access }])
    };
    run(call, stream, (Out::missing(), |index| index), copies, |one| one.access, flat)
}

fn box_batch(
    call: Call,
    count: usize,
    copies: In<c_void>,
    failed: Out<usize>,
    flags: u64,
    stream: u64,
) -> Result {
    let read = || batch::boxes(copies.cast(), count, flags, Error::INVALID_VALUE);
    run(call, stream, (failed, batch::name_of_box), read, |one| one.access, boxed)
}

pub(crate) fn cuMemcpy3DBatchAsync(
    call: Call,
    count: usize,
    copies: In<c_void>,
    failed: Out<usize>,
    flags: u64,
    stream: u64,
) -> Result {
    box_batch(call, count, copies, failed, flags, stream)
}

pub(crate) fn cuMemcpy3DBatchAsync_v2(
    call: Call,
    count: usize,
    copies: In<c_void>,
    flags: u64,
    stream: u64,
) -> Result {
    box_batch(call, count, copies, Out::missing(), flags, stream)
}

pub(crate) fn cuMemcpy3DWithAttributesAsync(call: Call, copy: In<c_void>, flags: u64, stream: u64) -> Result {
    box_batch(call, 1, copy, Out::missing(), flags, stream)
}

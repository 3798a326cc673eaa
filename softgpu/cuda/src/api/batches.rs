//! The entry points for batches of copies, and for copies with attributes. Each copy is made as one without attributes is.

use sluice_cuda_frontend::batch::{
    self, BoxCopy, BoxOperand, BoxSide, Boxes, CopyAttributes, FlatCopy, SourceAccess,
};
use sluice_cuda_graphs::{Copy3D, CopySide};

use super::copies::{copy_in, either};
use crate::copy::When;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::images::{IMAGES, array_side};
use crate::stream::{self, Implicit, StreamTarget, target};

fn flat(target: &StreamTarget, one: &FlatCopy) -> Result {
    let [to, from] = [one.to, one.from].map(either);
    copy_in(target, Copy3D { from, to, width: one.bytes, height: 1, depth: 1 }, When::Queued)
}

fn boxed(target: &StreamTarget, one: &Boxes) -> Result {
    let element = |array| Ok(IMAGES.array(array)?.shape.texel.bytes());
    let one = one.in_bytes(element, Error::INVALID_VALUE)?;
    let [width, height, depth] = one.extent;
    let side = |operand| match operand {
        BoxOperand::Linear(BoxSide { start, pitch, rows }) => {
            CopySide { pitch, height: rows, ..either(start) }
        }
        BoxOperand::Array { array, origin: [x, y, z] } => CopySide { y, z, ..array_side(array, x) },
    };
    let request = Copy3D { from: side(one.from), to: side(one.to), width, height, depth };
    copy_in(target, request, When::Queued)
}

/// Makes the copies of a batch. After an error the earlier ones are made, and `failed` receives the name of the one that is the reason.
fn run<C>(
    (stream, implicit): (u64, Implicit),
    (failed, name): (Out<usize>, impl Fn(usize) -> usize),
    copies: impl FnOnce() -> Result<Vec<C>>,
    access: impl Fn(&C) -> SourceAccess,
    make: impl Fn(&StreamTarget, &C) -> Result,
) -> Result {
    failed.set_if_given(batch::WHOLE_BATCH);
    let target = target(stream, implicit)?;
    // The header does not allow the legacy stream.
    if target.queue == target.core.queues.legacy {
        return Err(Error::INVALID_VALUE);
    }
    let copies = copies()?;
    for (index, one) in copies.iter().enumerate() {
        make(&target, one).inspect_err(|_| failed.set_if_given(name(index)))?;
    }
    if copies.iter().any(|one| access(one) == SourceAccess::DuringCall) {
        stream::synchronize(&target)?;
    }
    Ok(())
}

/// The arrays of a batch of flat copies.
#[derive(Clone, Copy)]
struct FlatBatch {
    to: In<u64>,
    from: In<u64>,
    sizes: In<u64>,
    count: usize,
    attributes: In<CopyAttributes>,
    starts: In<u64>,
    kinds: usize,
}

fn flat_batch(stream: (u64, Implicit), batch: FlatBatch, failed: Out<usize>) -> Result {
    let FlatBatch { to, from, sizes, count, attributes, starts, kinds } = batch;
    let read = || batch::flat(to, from, sizes, count, attributes, starts, kinds, Error::INVALID_VALUE);
    run(stream, (failed, |index| index), read, |one| one.access, flat)
}

fn box_batch(
    stream: (u64, Implicit),
    copies: In<BoxCopy>,
    count: usize,
    flags: u64,
    failed: Out<usize>,
) -> Result {
    let read = || batch::boxes(copies, count, flags, Error::INVALID_VALUE);
    run(stream, (failed, batch::name_of_box), read, |one| one.access, boxed)
}

twins! {
    fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(
        implicit; to: In<u64>, from: In<u64>, sizes: In<u64>, count: usize, attributes: In<CopyAttributes>, starts: In<u64>,
        kinds: usize, failed: Out<usize>, stream: u64,
    ) {
        let batch = FlatBatch { to, from, sizes, count, attributes, starts, kinds };
        flat_batch((stream, implicit), batch, failed)
    }

    fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(
        implicit; to: In<u64>, from: In<u64>, sizes: In<u64>, count: usize, attributes: In<CopyAttributes>, starts: In<u64>,
        kinds: usize, stream: u64,
    ) {
        let batch = FlatBatch { to, from, sizes, count, attributes, starts, kinds };
        flat_batch((stream, implicit), batch, Out::missing())
    }

    fn cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz(
        implicit; to: u64, from: u64, bytes: u64, attributes: In<CopyAttributes>, stream: u64,
    ) {
        let read = || Ok(vec![FlatCopy { to, from, bytes, access: batch::access(attributes, Error::INVALID_VALUE)? }]);
        run((stream, implicit), (Out::missing(), |index| index), read, |one| one.access, flat)
    }

    fn cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz(
        implicit; count: usize, copies: In<BoxCopy>, failed: Out<usize>, flags: u64, stream: u64,
    ) {
        box_batch((stream, implicit), copies, count, flags, failed)
    }

    fn cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz(
        implicit; count: usize, copies: In<BoxCopy>, flags: u64, stream: u64,
    ) {
        box_batch((stream, implicit), copies, count, flags, Out::missing())
    }

    fn cuMemcpy3DWithAttributesAsync, cuMemcpy3DWithAttributesAsync_ptsz(
        implicit; copy: In<BoxCopy>, flags: u64, stream: u64,
    ) {
        box_batch((stream, implicit), copy, 1, flags, Out::missing())
    }
}

//! The entry points for arrays, textures, surfaces and references, and for copies from and to arrays of one dimension. All but the copies
//! are forwarded to the implementation that the guest's library has, too.

use std::ffi::{c_char, c_void};

use super::copies::{copy_flat, device, host};
use crate::copy::When;
use crate::ffi::{In, Out};
use crate::graphs::GRAPHS;
use crate::images::{IMAGES, array_side};

sluice_cuda_images::array_functions!(calls, IMAGES, GRAPHS);
sluice_cuda_images::object_functions!(calls, IMAGES);
sluice_cuda_images::reference_functions!(calls, IMAGES);

twins! {
    fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(
        implicit; to: u64, to_offset: u64, from: u64, from_offset: u64, bytes: u64,
    ) {
        let (to, from) = (array_side(to, to_offset), array_side(from, from_offset));
        copy_flat(implicit, 0, to, from, bytes, When::Started)
    }

    fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(implicit; to: u64, from: u64, offset: u64, bytes: u64) {
        copy_flat(implicit, 0, device(to), array_side(from, offset), bytes, When::Started)
    }

    fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(implicit; to: u64, offset: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, array_side(to, offset), device(from), bytes, When::Started)
    }

    fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(implicit; to: u64, from: u64, offset: u64, bytes: u64) {
        copy_flat(implicit, 0, host(to), array_side(from, offset), bytes, When::Returned)
    }

    fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(implicit; to: u64, offset: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, array_side(to, offset), host(from), bytes, When::Returned)
    }

    fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(
        implicit; to: u64, from: u64, offset: u64, bytes: u64, stream: u64,
    ) {
        copy_flat(implicit, stream, host(to), array_side(from, offset), bytes, When::Queued)
    }

    fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(
        implicit; to: u64, offset: u64, from: u64, bytes: u64, stream: u64,
    ) {
        copy_flat(implicit, stream, array_side(to, offset), host(from), bytes, When::Queued)
    }
}

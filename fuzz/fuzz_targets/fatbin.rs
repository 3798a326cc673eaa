//! The image reader: everything `cuda-abi` offers, on the same bytes. It reads no byte outside them, and its output is never
//! larger than allowed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_cuda_abi::image::{
    Fatbin, Wrapper, cubin_params, device_bytes, nobits_bytes, select_ptx, size_of, target,
};

/// The caller's limit for unpacked bytes. Small, so that an image that claims more is the common case.
const LIMIT: u64 = 256 << 10;

fuzz_target!(|bytes: &[u8]| {
    let mut read = |offset: u64, into: &mut [u8]| {
        let part = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)?.get(..into.len()));
        part.map(|part| into.copy_from_slice(part)).is_some()
    };
    if let Ok(extent) = size_of(&mut read, LIMIT) {
        assert!(extent.bytes <= LIMIT, "larger than the limit");
    }
    if let Some(head) = bytes.first_chunk() {
        let _ = Wrapper::parse(head);
    }
    if let Ok(fatbin) = Fatbin::parse(bytes) {
        // One damaged entry ends the list, so it ends this loop.
        for entry in fatbin.entries().flatten() {
            if let Ok(payload) = entry.payload(LIMIT) {
                assert!(payload.len() as u64 <= LIMIT, "unpacked beyond the limit");
                look_into(&payload);
            }
        }
    }
    if let Ok(text) = select_ptx(bytes, 90, LIMIT as usize) {
        assert!(text.len() as u64 <= LIMIT, "unpacked beyond the limit");
    }
    look_into(bytes);
});

fn look_into(image: &[u8]) {
    let _ = target(image);
    let _ = nobits_bytes(image);
    let _ = device_bytes(image);
    if let Ok(layout) = cubin_params(image, b"k") {
        let inside =
            layout.params.iter().all(|param| param.offset.saturating_add(param.size) <= layout.bytes);
        assert!(inside, "a parameter outside the parameters");
    }
}

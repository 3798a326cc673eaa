//! The `extra` list of a launch: pairs of a key and a value, by which a program passes the parameters of a kernel as one block.

use std::ffi::c_void;
use std::ptr;

use crate::{ErrorCode, In};

/// `CU_LAUNCH_PARAM_END`: the end of the list.
pub const END: u64 = 0;
/// `CU_LAUNCH_PARAM_BUFFER_POINTER`: the value is the address of the block.
pub const BUFFER_POINTER: u64 = 1;
/// `CU_LAUNCH_PARAM_BUFFER_SIZE`: the value is the address of the block's length.
pub const BUFFER_SIZE: u64 = 2;

/// The list of a block and its length. It names their addresses, so both must live for as long as it is used.
#[must_use]
pub fn list(block: &[u8], bytes: &u64) -> [*const c_void; 5] {
    let (block, bytes) = (block.as_ptr().cast::<c_void>(), ptr::from_ref(bytes).cast::<c_void>());
    // A reader may take the addresses for numbers.
    block.expose_provenance();
    bytes.expose_provenance();
    [key(BUFFER_POINTER), block, key(BUFFER_SIZE), bytes, key(END)]
}

/// A key in the place of a pointer.
fn key(number: u64) -> *const c_void {
    ptr::without_provenance(usize::try_from(number).unwrap_or(usize::MAX))
}

/// Reads the first `bytes` of the block that a list names. A block may be longer.
///
/// # Errors
/// `invalid` for an unknown key and for a block that is missing or too short; a null pointer's error.
pub fn block<E: ErrorCode>(extra: In<In<c_void, E>, E>, bytes: usize, invalid: E) -> Result<Vec<u8>, E> {
    let (mut buffer, mut length) = (None, 0);
    for pair in 0.. {
        let value = || extra.get_at(2 * pair + 1);
        match extra.get_at(2 * pair)?.address() {
            END => break,
            BUFFER_POINTER => buffer = Some(value()?.cast::<u8>()),
            BUFFER_SIZE => length = value()?.cast::<usize>().get()?,
            _ => return Err(invalid),
        }
    }
    match buffer {
        _ if length < bytes => Err(invalid),
        Some(buffer) => buffer.bytes(bytes),
        None if bytes == 0 => Ok(Vec::new()),
        None => Err(invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{entry::tests::Error, pointers::tests::input};

    const INVALID: Error = Error::NoRoom;

    fn read(list: &[*const c_void], bytes: usize) -> Result<Vec<u8>, Error> {
        block(input(list).cast(), bytes, INVALID)
    }

    #[test]
    fn block_that_a_list_names_is_read_up_to_the_stated_bytes() {
        let (parameters, length) = ([1, 2, 3, 4], 4);
        let [pointer, at, size, long, end] = list(&parameters, &length);
        assert_eq!(read(&[pointer, at, size, long, end], 3), Ok(vec![1, 2, 3]));
        assert_eq!(read(&[size, long, pointer, at, end], 4), Ok(vec![1, 2, 3, 4]), "in any order");
        assert_eq!(read(&[end], 0), Ok(Vec::new()));
    }

    #[test]
    fn list_without_a_block_that_is_long_enough_is_refused() {
        let (parameters, length) = ([1, 2, 3, 4], 4);
        let [pointer, at, size, long, end] = list(&parameters, &length);
        for wrong in [&[pointer, at, end][..], &[size, long, end], &[end], &[key(3), at, end]] {
            assert_eq!(read(wrong, 4), Err(INVALID), "{wrong:?}");
        }
        assert_eq!(read(&[pointer, at, size, long, end], 5), Err(INVALID), "too short");
    }
}

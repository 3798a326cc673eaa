//! Arguments of C callers: raw pointers become typed values that define their permitted use.
//!
//! A caller of the C API guarantees that its pointers are valid; nothing can check them. The conversions here are the one place
//! that relies on this, so the rest of the shim reads and writes through these types and contains no unsafe code.

#![expect(unsafe_code, reason = "C callers pass raw pointers")]

use crate::error::{Error, Result};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use sluice_protocol::calls::IpcHandle;

/// The properties of a call that follow from the name of the called symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Stream 0 is the calling thread's (`_ptds`, `_ptsz`), not the context's.
    pub(crate) per_thread: bool,
}

/// A parameter of an exported function.
pub(crate) trait Argument {
    /// The type that the function's implementation receives.
    type Value;
    /// Converts the pointer of a C caller, which nothing can check.
    ///
    /// # Safety
    /// The parameter is as the C API requires: a pointer is null or valid for the function's use of it.
    unsafe fn receive(self) -> Self::Value;
}

macro_rules! scalars {
    ($($ty:ty),+) => {$(
        impl Argument for $ty {
            type Value = $ty;
            unsafe fn receive(self) -> $ty {
                self
            }
        }
    )+};
}
scalars!(c_int, c_uint, u64, usize, u8, u16, IpcHandle);

/// A place for a result.
pub(crate) struct Out<T>(*mut T);

/// A place for input of the caller.
pub(crate) struct In<T>(*const T);

// Not derived: a pointer may be copied for any `T`.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}
impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T> Out<T> {
    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }

    /// The same place for a value of another type, as the API defines it.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl<T: Copy> Out<T> {
    /// The place, if the caller gave one.
    pub(crate) fn given(self) -> Option<ResultPlace<T>> {
        (!self.0.is_null()).then_some(ResultPlace(self.0))
    }

    /// The place; `INVALID_VALUE` if the caller gave none.
    pub(crate) fn required(self) -> Result<ResultPlace<T>> {
        self.given().ok_or(Error::INVALID_VALUE)
    }

    /// Writes to a place that must be there.
    pub(crate) fn set(self, value: T) -> Result {
        self.required()?.put(value);
        Ok(())
    }

    /// Writes to a place that may be missing.
    pub(crate) fn set_if_given(self, value: T) {
        if let Some(place) = self.given() {
            place.put(value);
        }
    }
}

impl Out<c_char> {
    /// The place that a caller's list of options names.
    pub(crate) fn from_address(place: *mut c_void) -> Out<c_char> {
        Out(place.cast())
    }
}

impl Out<c_void> {
    /// Writes bytes for which, by the API, the place has room.
    pub(crate) fn set_bytes(self, bytes: &[u8]) -> Result {
        Out(self.0.cast::<u8>()).required()?;
        // SAFETY: the caller gave room for the result that the API documents.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.cast::<u8>(), bytes.len()) };
        Ok(())
    }

    /// Reads bytes that, by the API, are there.
    pub(crate) fn read<const N: usize>(self) -> Result<[u8; N]> {
        In(self.0.cast_const()).read()
    }
}

impl Out<c_char> {
    /// Writes a string of at most `room - 1` bytes and its NUL.
    pub(crate) fn set_string(self, text: &[u8], room: c_int) -> Result {
        self.required()?;
        let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(Error::INVALID_VALUE)?;
        let text = &text[..text.len().min(room - 1)];
        // SAFETY: the caller gave room for `room` bytes.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), self.0.cast::<u8>(), text.len()) };
        // SAFETY: as above, and `text.len() < room`.
        unsafe { self.0.wrapping_add(text.len()).write(0) };
        Ok(())
    }
}

/// Elements behind a pointer: an array of the caller's.
impl<T: Copy> Out<T> {
    /// Writes element `index` of an array that, by the API, is long enough.
    pub(crate) fn set_at(self, index: usize, value: T) -> Result {
        self.required()?;
        // SAFETY: the caller gave an array of more than `index` elements.
        unsafe { self.0.wrapping_add(index).write_unaligned(value) };
        Ok(())
    }

    /// Reads element `index` of an array that, by the API, is long enough.
    pub(crate) fn get_at(self, index: usize) -> Result<T> {
        self.required()?;
        // SAFETY: the caller gave an array of more than `index` elements.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }
}

/// File descriptors that a caller passes in place of a pointer, and receives as numbers.
pub(crate) mod descriptor {
    use crate::error::{Error, Result};
    use rustix::fd::{BorrowedFd, IntoRawFd, OwnedFd};

    /// Reads the first bytes of a file by its number.
    pub(crate) fn read<const N: usize>(number: u64) -> Result<[u8; N]> {
        let number = i32::try_from(number).ok().filter(|number| *number >= 0).ok_or(Error::INVALID_VALUE)?;
        // SAFETY: by the API the descriptor is open; it is used during the call only.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let mut bytes = [0; N];
        match rustix::io::pread(file, &mut bytes, 0) {
            Ok(read) if read == N => Ok(bytes),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Passes the ownership of a descriptor to the caller.
    pub(crate) fn hand_out(file: OwnedFd) -> i32 {
        file.into_raw_fd()
    }
}

/// A result place that is there.
#[derive(Clone, Copy)]
pub(crate) struct ResultPlace<T>(*mut T);

impl<T> ResultPlace<T> {
    pub(crate) fn put(self, value: T) {
        // SAFETY: not null, and by the API valid for a write.
        unsafe { self.0.write_unaligned(value) }
    }
}

impl<T> Argument for *mut T {
    type Value = Out<T>;
    unsafe fn receive(self) -> Out<T> {
        Out(self)
    }
}

impl<T> In<T> {
    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }
}

impl<T: Copy + Default> In<T> {
    /// The first `count` elements of an array that, by the API, is long enough, and defaults; `INVALID_VALUE` if there are more
    /// than `N`, or none is given for a count above 0.
    pub(crate) fn array<const N: usize>(self, count: c_uint) -> Result<[T; N]> {
        let mut array = [T::default(); N];
        let count = usize::try_from(count).map_err(|_| Error::INVALID_VALUE)?;
        let used = array.get_mut(..count).ok_or(Error::INVALID_VALUE)?;
        if count > 0 && self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        for (index, element) in used.iter_mut().enumerate() {
            // SAFETY: not null, and the caller gave an array of `count` elements.
            *element = unsafe { self.0.wrapping_add(index).read_unaligned() };
        }
        Ok(array)
    }
}

impl In<c_void> {
    /// Bytes of this library, as a caller would pass them.
    pub(crate) fn from_bytes(bytes: &[u8]) -> In<c_void> {
        In(bytes.as_ptr().cast())
    }

    /// The place `offset` bytes behind it, in an array that, by the API, is long enough.
    pub(crate) fn at(self, offset: u64) -> Result<In<c_void>> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        let offset = usize::try_from(offset).map_err(|_| Error::INVALID_VALUE)?;
        Ok(In(self.0.cast::<u8>().wrapping_add(offset).cast()))
    }

    /// Reads a structure's bytes.
    pub(crate) fn read<const N: usize>(self) -> Result<[u8; N]> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller gave a structure of at least N bytes.
        Ok(unsafe { self.0.cast::<[u8; N]>().read_unaligned() })
    }
}

impl In<c_char> {
    /// The string, at most `limit` bytes of it.
    pub(crate) fn text(self, limit: usize) -> Result<&'static CStr> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller gave a NUL-terminated string that stays valid for the call; the borrow does not outlive it.
        let text = unsafe { CStr::from_ptr(self.0) };
        if text.count_bytes() > limit { Err(Error::INVALID_VALUE) } else { Ok(text) }
    }
}

impl<T> Argument for *const T {
    type Value = In<T>;
    unsafe fn receive(self) -> In<T> {
        In(self)
    }
}

/// A callback that the shim keeps but never calls.
pub(crate) type Callback = unsafe extern "C" fn();

/// `CUoccupancyB2DSize`: dynamic shared memory for a block size.
pub(crate) type BlockToShared = unsafe extern "C" fn(block: c_int) -> usize;

/// A function of the caller that the call may invoke.
#[derive(Clone, Copy)]
pub(crate) struct SharedSize(BlockToShared);

impl SharedSize {
    /// Dynamic shared memory for blocks of this size.
    pub(crate) fn of(self, block: c_int) -> usize {
        // SAFETY: the caller gave a function of this type, to be called during the call.
        unsafe { (self.0)(block) }
    }
}

impl Argument for Option<BlockToShared> {
    type Value = Option<SharedSize>;
    unsafe fn receive(self) -> Option<SharedSize> {
        self.map(SharedSize)
    }
}

impl Argument for Option<Callback> {
    type Value = Option<Callback>;
    unsafe fn receive(self) -> Option<Callback> {
        self
    }
}

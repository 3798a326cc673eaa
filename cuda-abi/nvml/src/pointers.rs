//! Pointers from C callers: checked for null, and dereferenced in one place.
//!
//! A value of these types can only be an argument of an exported function, whose caller guarantees the conditions that `nvml.h`
//! sets for that argument. Every `unsafe` block here relies on that guarantee.
#![expect(unsafe_code, reason = "the C ABI passes raw pointers")]

use crate::status::{Result, Status};
use core::ffi::{CStr, c_char, c_uint};
use core::marker::PhantomData;

/// A pointer to one or more results.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Returns an error for a null pointer.
    pub(crate) fn required(self) -> Result<Self> {
        if self.0.is_null() { Err(Status::INVALID_ARGUMENT) } else { Ok(self) }
    }

    /// True if the pointer is not null.
    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// Creates a pointer from one inside a structure of the caller.
    pub(crate) fn inside(pointer: *mut T) -> Self {
        Out(pointer)
    }

    /// The same address, for another version of the structure.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Returns the pointer to an element of a list.
    pub(crate) fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }

    pub(crate) fn set(self, value: T) -> Result {
        self.set_at(0, value)
    }

    /// Stores an element of a list of results.
    pub(crate) fn set_at(self, index: usize, value: T) -> Result {
        let place = self.required()?.0.wrapping_add(index);
        // SAFETY: not null, and the caller guarantees room for that many elements.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// Reads the present value.
    pub(crate) fn current(self) -> Result<T>
    where
        T: Copy,
    {
        let place = self.required()?.0;
        // SAFETY: not null, and the interface requires that the caller has initialised it.
        Ok(unsafe { place.read_unaligned() })
    }

    /// Stores the first bytes of a structure, for an older caller whose version is shorter.
    pub(crate) fn set_first(self, value: &T, bytes: usize) -> Result {
        let place = self.required()?.0.cast::<u8>();
        let from = core::ptr::from_ref(value).cast::<u8>();
        // SAFETY: `from` has `size_of::<T>()` bytes, and the caller guarantees room for the size of its version.
        unsafe { core::ptr::copy_nonoverlapping(from, place, bytes.min(size_of::<T>())) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Stores a text with its NUL; it must fit.
    pub(crate) fn text(self, text: &str, room: c_uint) -> Result {
        let place = self.required()?.0.cast::<u8>();
        if text.len() >= room as usize {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        // SAFETY: the caller guarantees `room` bytes, which is more than the text.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
        let end = place.wrapping_add(text.len());
        // SAFETY: the next byte is still within `room`.
        unsafe { end.write(0) };
        Ok(())
    }
}

/// A text argument.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    pub(crate) fn get(self) -> Result<&'a str> {
        if self.0.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller guarantees a C string that lives through the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Status::INVALID_ARGUMENT)
    }
}

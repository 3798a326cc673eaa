//! Pointers as they come from C callers, checked for null and used in one place.
//!
//! A value of these types can only be an argument of an exported function, whose caller guarantees the conditions that `nvml.h`
//! sets for that argument. Every `unsafe` block here rests on that promise.
#![expect(unsafe_code, reason = "the C ABI passes raw pointers")]

use super::status::{Result, Status};
use core::ffi::{CStr, c_char, c_uint};
use core::marker::PhantomData;

/// A place for a result, or for several.
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
    /// The place; a missing one is an invalid argument.
    pub(super) fn required(self) -> Result<Self> {
        if self.0.is_null() { Err(Status::INVALID_ARGUMENT) } else { Ok(self) }
    }

    /// Whether there is a place.
    pub(super) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// A place that stands in a structure of the caller's.
    pub(super) fn inside(pointer: *mut T) -> Self {
        Out(pointer)
    }

    /// The same place, for another version of the structure.
    pub(super) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The place of an element of a list.
    pub(super) fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }

    /// Stores a result.
    pub(super) fn set(self, value: T) -> Result {
        self.set_at(0, value)
    }

    /// Stores an element of a list of results.
    pub(super) fn set_at(self, index: usize, value: T) -> Result {
        let place = self.required()?.0.wrapping_add(index);
        // SAFETY: not null, and the caller vouches for so many places.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// What stands there now.
    pub(super) fn current(self) -> Result<T>
    where
        T: Copy,
    {
        let place = self.required()?.0;
        // SAFETY: not null, and the interface says that the caller has filled it.
        Ok(unsafe { place.read_unaligned() })
    }

    /// Stores the first bytes of a structure of which an older caller knows no more.
    pub(super) fn set_first(self, value: &T, bytes: usize) -> Result {
        let place = self.required()?.0.cast::<u8>();
        let from = core::ptr::from_ref(value).cast::<u8>();
        // SAFETY: `from` has `size_of::<T>()` bytes, and the caller vouches for room for as many as its version has.
        unsafe { core::ptr::copy_nonoverlapping(from, place, bytes.min(size_of::<T>())) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Stores a text with its NUL; it must fit.
    pub(super) fn text(self, text: &str, room: c_uint) -> Result {
        let place = self.required()?.0.cast::<u8>();
        if text.len() >= room as usize {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        // SAFETY: the caller vouches for `room` bytes, which is more than these.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
        let end = place.wrapping_add(text.len());
        // SAFETY: the byte behind them, still within `room`.
        unsafe { end.write(0) };
        Ok(())
    }
}

/// A text argument.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    /// The text.
    pub(super) fn get(self) -> Result<&'a str> {
        if self.0.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller vouches for a C string that lives through the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Status::INVALID_ARGUMENT)
    }
}

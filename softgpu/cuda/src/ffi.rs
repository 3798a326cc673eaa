//! Pointers from C callers: checked for null, and dereferenced in one place.
//!
//! A value of these types can only be an argument of an entry point, whose caller guarantees the conditions that the driver API's
//! documentation sets for that argument. Every `unsafe` block here relies on that guarantee.
#![expect(unsafe_code, reason = "the C ABI passes raw pointers")]

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;

use crate::error::{Error, Result};

/// A pointer to a result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// True if the pointer is not null.
    pub(crate) fn is_wanted(self) -> bool {
        !self.0.is_null()
    }

    /// The address.
    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }

    /// A null pointer.
    pub(crate) fn missing() -> Self {
        Out(std::ptr::null_mut())
    }

    /// Returns an error for a null pointer.
    pub(crate) fn required(self) -> Result<Self> {
        if self.0.is_null() { Err(Error::INVALID_VALUE) } else { Ok(self) }
    }

    /// Creates a pointer from an address inside another argument.
    pub(crate) fn from_address(address: u64) -> Self {
        Out(std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0)))
    }

    /// Stores the result; a null pointer is an invalid value.
    pub(crate) fn set(self, value: T) -> Result {
        self.required()?;
        // SAFETY: not null, and the caller guarantees the memory.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores the result if the pointer is not null.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, and the caller guarantees the memory.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Stores the result at element `index`.
    pub(crate) fn set_at(self, index: usize, value: T) -> Result {
        Out(self.required()?.0.wrapping_add(index)).set(value)
    }

    /// Reads the present value.
    pub(crate) fn current(self) -> Result<T>
    where
        T: Copy,
    {
        self.required()?;
        // SAFETY: not null; the API requires that the caller has initialised it.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl Out<c_void> {
    /// The same address, for a value of another type.
    pub(crate) fn cast<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

impl Out<u8> {
    /// Copies bytes to the address.
    pub(crate) fn fill(self, bytes: &[u8]) -> Result {
        self.required()?;
        // SAFETY: the caller guarantees the room that the entry point's documentation states.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0, bytes.len()) };
        Ok(())
    }

    /// Copies a text with its final NUL, cut to `room` bytes.
    pub(crate) fn text(self, text: &[u8], room: usize) -> Result {
        let Some(limit) = room.checked_sub(1) else { return Err(Error::INVALID_VALUE) };
        let mut bytes = text[..text.len().min(limit)].to_vec();
        bytes.push(0);
        self.fill(&bytes)
    }
}

/// An argument passed by reference.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// True if the pointer is not null.
    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// Reads the argument.
    pub(crate) fn get(self) -> Result<T> {
        self.at(0)
    }

    /// Reads an element of an array argument.
    pub(crate) fn at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller guarantees the array.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }

    /// Reads the first elements of an array argument, which may be null if `count` is 0.
    pub(crate) fn list(self, count: usize) -> Result<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }

    /// Returns the address of an element of an array argument.
    pub(crate) fn address_of(self, index: usize) -> Result<u64> {
        if self.0.is_null() {
            Err(Error::INVALID_VALUE)
        } else {
            Ok(self.0.wrapping_add(index).expose_provenance() as u64)
        }
    }
}

impl In<u8> {
    /// Reads `count` bytes.
    pub(crate) fn bytes(self, count: usize) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        let mut bytes = vec![0; count];
        // SAFETY: the caller guarantees `count` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.0, bytes.as_mut_ptr(), count) };
        Ok(bytes)
    }

    /// True if `count` bytes from `offset` on lie in more than one page of the host.
    pub(crate) fn crosses_page(self, offset: u64, count: u64) -> bool {
        const PAGE: u64 = 4096;
        let start = (self.0.addr() as u64).wrapping_add(offset);
        count > PAGE - start % PAGE
    }

    /// Copies bytes from an offset into a buffer.
    pub(crate) fn read(self, offset: u64, buffer: &mut [u8]) {
        let start = self.0.wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX));
        // SAFETY: the caller guarantees an image as long as its own headers state.
        unsafe { std::ptr::copy_nonoverlapping(start, buffer.as_mut_ptr(), buffer.len()) };
    }
}

impl<T> In<T> {
    /// Creates a pointer from an address inside another argument.
    pub(crate) fn from_address(address: u64) -> In<T> {
        In(std::ptr::with_exposed_provenance(usize::try_from(address).unwrap_or(0)))
    }
}

/// A text argument.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    /// Returns the text without its NUL.
    pub(crate) fn get(self) -> Result<&'a [u8]> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller guarantees a C string that lives through the call.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }
}

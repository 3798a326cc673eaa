//! Pointers of C programs: checked for null, and dereferenced in one place.
//!
//! A value of these types comes from a C program: as an argument of an exported function, or out of memory behind such an
//! argument. The types have the layout of a pointer, so that arrays and structures of a program may contain them; any other value
//! takes an unsafe constructor. The program guarantees for each pointer the conditions that the interface's header sets: it is null
//! or valid, its memory is long enough, and a value to read is initialised. Every `unsafe` block here relies on that guarantee.
//!
//! In return a library uses a pointer as the header allows: for the type that the header names, within the length that the header
//! or the program states, and until the call returns.

#![expect(unsafe_code, reason = "C programs pass raw pointers")]

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;

use crate::entry::ErrorCode;

/// Defines a pointer to one or more values of type `T`, whose errors are of type `E`.
macro_rules! pointer {
    ($(#[$doc:meta])* $name:ident, *$kind:tt, $null:path) => {
        $(#[$doc])*
        #[repr(transparent)]
        pub struct $name<T, E>(*$kind T, PhantomData<fn() -> E>);

        // Not derived: a pointer may be copied for any `T`.
        impl<T, E> Clone for $name<T, E> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T, E> Copy for $name<T, E> {}

        impl<T, E> fmt::Debug for $name<T, E> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:p})"), self.0)
            }
        }

        impl<T, E> $name<T, E> {
            /// Wraps a pointer.
            ///
            /// # Safety
            ///
            /// A C program guarantees for it the conditions that the interface's header sets.
            #[must_use]
            pub const unsafe fn new(pointer: *$kind T) -> Self {
                Self(pointer, PhantomData)
            }

            /// A null pointer.
            #[must_use]
            pub const fn missing() -> Self {
                Self($null(), PhantomData)
            }

            /// True if the pointer is not null.
            #[must_use]
            pub fn is_given(self) -> bool {
                !self.0.is_null()
            }

            /// The address.
            #[must_use]
            pub fn address(self) -> u64 {
                self.0.addr() as u64
            }

            /// The same address, for the type that the header names.
            #[must_use]
            pub const fn cast<U>(self) -> $name<U, E> {
                $name(self.0.cast(), PhantomData)
            }

            /// The same pointer, with errors of another type.
            #[must_use]
            pub const fn with_errors<F>(self) -> $name<T, F> {
                $name(self.0, PhantomData)
            }
        }

        impl<T, E: ErrorCode> $name<T, E> {
            /// Returns an error for a null pointer.
            ///
            /// # Errors
            /// [`ErrorCode::NULL_POINTER`].
            pub fn required(self) -> Result<Self, E> {
                if self.is_given() { Ok(self) } else { Err(E::NULL_POINTER) }
            }

            /// Returns the pointer to an element of an array.
            ///
            /// # Errors
            /// [`ErrorCode::NULL_POINTER`].
            pub fn at(self, index: usize) -> Result<Self, E> {
                Ok(Self(self.required()?.0.wrapping_add(index), PhantomData))
            }
        }

        impl<T: Copy, E: ErrorCode> $name<T, E> {
            /// Reads the value.
            ///
            /// # Errors
            /// [`ErrorCode::NULL_POINTER`].
            pub fn get(self) -> Result<T, E> {
                self.get_at(0)
            }

            /// Reads an element of an array.
            ///
            /// # Errors
            /// [`ErrorCode::NULL_POINTER`].
            pub fn get_at(self, index: usize) -> Result<T, E> {
                let place = self.at(index)?.0;
                // SAFETY: not null, and the program guarantees an array of more than `index` initialised elements.
                Ok(unsafe { place.read_unaligned() })
            }
        }
    };
}

pointer! {
    /// A pointer to results. The program may have initialised them.
    Out, *mut, ptr::null_mut
}

pointer! {
    /// A pointer to input.
    In, *const, ptr::null
}

impl<T, E> Out<T, E> {
    /// The same place, to be read.
    #[must_use]
    pub const fn input(self) -> In<T, E> {
        In(self.0.cast_const(), PhantomData)
    }
}

impl<T, E: ErrorCode> Out<T, E> {
    /// Stores the result.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn set(self, value: T) -> Result<(), E> {
        self.set_at(0, value)
    }

    /// Stores an element of an array of results.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn set_at(self, index: usize, value: T) -> Result<(), E> {
        let place = self.at(index)?.0;
        // SAFETY: not null, and the program guarantees room for more than `index` elements.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// Stores the result unless the pointer is null.
    pub fn set_if_given(self, value: T) {
        if self.is_given() {
            // SAFETY: not null, and the program guarantees the room.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Stores the first bytes of a structure, for a program whose version of it is shorter.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn set_first(self, value: &T, bytes: usize) -> Result<(), E> {
        let place = self.required()?.0.cast::<u8>();
        let from = ptr::from_ref(value).cast::<u8>();
        // SAFETY: `from` has `size_of::<T>()` bytes, and the program guarantees room for the size of its version.
        unsafe { ptr::copy_nonoverlapping(from, place, bytes.min(size_of::<T>())) };
        Ok(())
    }
}

impl<E: ErrorCode> Out<c_void, E> {
    /// Stores bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn set_bytes(self, bytes: &[u8]) -> Result<(), E> {
        let place = self.required()?.0.cast::<u8>();
        // SAFETY: not null, and the program guarantees room for the result that the header states.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        Ok(())
    }
}

impl<E: ErrorCode> Out<c_char, E> {
    /// Stores a text and its NUL, which must fit into `room` bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`], and [`ErrorCode::NO_ROOM`] if the text does not fit.
    pub fn set_text(self, text: impl AsRef<[u8]>, room: impl TryInto<usize>) -> Result<(), E> {
        let (text, place) = (text.as_ref(), self.required()?.0.cast::<u8>());
        if room.try_into().map_or(true, |room| room <= text.len()) {
            return Err(E::NO_ROOM);
        }
        // SAFETY: not null, and the program guarantees `room` bytes, which is more than the text.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), place, text.len()) };
        // SAFETY: the next byte is still within `room`.
        unsafe { place.wrapping_add(text.len()).write(0) };
        Ok(())
    }

    /// Stores a text and its NUL, cut to `room` bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`], and [`ErrorCode::NO_ROOM`] if there is no room for the NUL.
    pub fn set_text_cut(self, text: impl AsRef<[u8]>, room: impl TryInto<usize>) -> Result<(), E> {
        let (text, room) = (text.as_ref(), room.try_into().map_err(|_| E::NO_ROOM)?);
        self.set_text(&text[..text.len().min(room.saturating_sub(1))], room)
    }
}

impl<T: Copy, E: ErrorCode> In<T, E> {
    /// Reads the first elements of an array, which may be null if `count` is 0.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn list(self, count: usize) -> Result<Vec<T>, E> {
        (0..count).map(|index| self.get_at(index)).collect()
    }
}

impl<T: Copy + Default, E: ErrorCode> In<T, E> {
    /// Reads the first elements of an array, which may be null if `count` is 0. The rest of the result are defaults.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`], and [`ErrorCode::NO_ROOM`] if there are more than `N`.
    pub fn array<const N: usize>(self, count: impl TryInto<usize>) -> Result<[T; N], E> {
        let mut array = [T::default(); N];
        let count = count.try_into().map_err(|_| E::NO_ROOM)?;
        for (index, element) in array.get_mut(..count).ok_or(E::NO_ROOM)?.iter_mut().enumerate() {
            *element = self.get_at(index)?;
        }
        Ok(array)
    }
}

impl<E: ErrorCode> In<u8, E> {
    /// Reads bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn read(self, into: &mut [u8]) -> Result<(), E> {
        let from = self.required()?.0;
        // SAFETY: not null, and the program guarantees as many bytes as the header or the bytes before them state.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Reads `count` bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn bytes(self, count: usize) -> Result<Vec<u8>, E> {
        let mut bytes = vec![0; self.required().map(|_| count)?];
        self.read(&mut bytes)?;
        Ok(bytes)
    }
}

impl<E> In<c_char, E> {
    /// The text. It lives no longer than the argument of the call.
    #[must_use]
    pub fn text(&self) -> Text<'_, E> {
        Text(self.0, PhantomData)
    }
}

/// A text argument, which ends with a NUL.
#[repr(transparent)]
pub struct Text<'a, E>(*const c_char, PhantomData<fn() -> (&'a CStr, E)>);

impl<E> Clone for Text<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Text<'_, E> {}

impl<E> fmt::Debug for Text<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({:p})", self.0)
    }
}

impl<'a, E: ErrorCode> Text<'a, E> {
    /// Returns the text without its NUL.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`].
    pub fn get(self) -> Result<&'a [u8], E> {
        if self.0.is_null() {
            return Err(E::NULL_POINTER);
        }
        // SAFETY: not null, and the program guarantees a C string that lives through the call.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// Returns the text without its NUL, if it has at most `limit` bytes.
    ///
    /// # Errors
    /// [`ErrorCode::NULL_POINTER`], and [`ErrorCode::NO_ROOM`] for a longer text.
    pub fn get_within(self, limit: usize) -> Result<&'a [u8], E> {
        self.get().and_then(|text| if text.len() > limit { Err(E::NO_ROOM) } else { Ok(text) })
    }
}

/// True if the number that a program passes in place of a pointer is that of an open file.
#[must_use]
pub fn is_open_descriptor(number: u64) -> bool {
    // SAFETY: the call only asks for the flags of a descriptor, which may be none.
    i32::try_from(number).is_ok_and(|number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::entry::tests::Error;

    fn out<T>(place: &mut [T]) -> Out<T, Error> {
        // SAFETY: the tests use a pointer only while its memory is borrowed, and within it.
        unsafe { Out::new(place.as_mut_ptr()) }
    }

    pub(crate) fn input<T>(place: &[T]) -> In<T, Error> {
        // SAFETY: the same.
        unsafe { In::new(place.as_ptr()) }
    }

    #[test]
    fn null_pointer_is_refused_by_every_access_and_at_every_index() {
        let (place, from) = (Out::<u32, Error>::missing(), In::<u32, Error>::missing());
        let failed = Err(Error::Null);
        assert_eq!([place.set(1), place.set_at(3, 1), place.set_first(&1, 2)], [failed; 3]);
        assert_eq!([place.get(), place.get_at(3), from.get(), from.get_at(3)], [Err(Error::Null); 4]);
        assert!(place.at(3).is_err() && from.at(3).is_err() && place.required().is_err());
        assert_eq!([place.cast().set_bytes(&[1]), place.cast::<c_char>().set_text("a", 9)], [failed; 2]);
        assert_eq!((from.list(1), from.list(0)), (Err(Error::Null), Ok(Vec::new())));
        assert_eq!((from.array::<2>(1), from.array::<2>(0)), (Err(Error::Null), Ok([0; 2])));
        assert_eq!(
            (from.cast::<u8>().bytes(usize::MAX), from.cast::<u8>().read(&mut [])),
            (Err(Error::Null), failed)
        );
        assert_eq!(from.cast().text().get_within(9), Err(Error::Null));
        place.set_if_given(1);
        assert!(!place.is_given() && place.address() == 0);
    }

    #[test]
    fn values_are_read_and_stored_at_any_alignment() {
        let mut bytes = [0_u8; 9];
        let odd = out(&mut bytes).at(1).unwrap().cast::<u32>();
        odd.set(0x0101_0101).unwrap();
        odd.set_at(1, 0x0202_0202).unwrap();
        assert_eq!((odd.get(), odd.get_at(1)), (Ok(0x0101_0101), Ok(0x0202_0202)));
        odd.set_first(&u32::MAX, 1).unwrap();
        odd.cast().set_bytes(&[7]).unwrap();
        assert_eq!(bytes, [0, 7, 1, 1, 1, 2, 2, 2, 2]);
        let odd = input(&bytes).at(5).unwrap();
        assert_eq!((odd.cast::<u32>().list(1), odd.bytes(2)), (Ok(vec![0x0202_0202]), Ok(vec![2, 2])));
    }

    #[test]
    fn pointers_in_memory_of_a_program_are_pointers_of_that_program() {
        let (mut first, second) = ([1_u64], [2_u64, 3]);
        let places: [*mut c_void; 2] = [first.as_mut_ptr().cast(), ptr::null_mut()];
        let places = input(&places).cast::<Out<c_void, Error>>();
        places.get().unwrap().cast::<u64>().set(5).unwrap();
        assert!(!places.get_at(1).unwrap().is_given());
        assert_eq!(first, [5]);
        let lists = [second.as_ptr()];
        assert_eq!(input(&lists).cast::<In<u64, Error>>().get().unwrap().list(2), Ok(vec![2, 3]));
    }

    #[test]
    fn array_longer_than_its_bound_is_refused() {
        let numbers = [1_u8, 2, 3];
        assert_eq!(input(&numbers).array::<4>(3_u32), Ok([1, 2, 3, 0]));
        assert_eq!(input(&numbers).array::<2>(3_u32), Err(Error::NoRoom));
        assert_eq!(input(&numbers).array::<2>(-1), Err(Error::NoRoom));
    }

    #[test]
    fn text_is_cut_or_refused_where_its_nul_does_not_fit() {
        let mut room: [c_char; 4] = [9; 4];
        let place = out(&mut room);
        assert_eq!(
            [place.set_text("abc", 3), place.set_text("", 0), place.set_text_cut("abc", 0)],
            [Err(Error::NoRoom); 3]
        );
        assert_eq!([place.set_text("abc", -1), place.set_text_cut("abc", -1)], [Err(Error::NoRoom); 2]);
        assert_eq!(place.get(), Ok(9), "nothing is written on an error");
        place.set_text("abc", 4_u32).unwrap();
        assert_eq!(input(&room).text().get(), Ok(&b"abc"[..]));
        assert_eq!(input(&room).text().get_within(3), Ok(&b"abc"[..]));
        assert_eq!(input(&room).text().get_within(2), Err(Error::NoRoom));
        out(&mut room).set_text_cut("wxyz", 3).unwrap();
        assert_eq!(input(&room).text().get(), Ok(&b"wx"[..]));
    }

    #[test]
    fn number_of_no_open_file_is_no_descriptor() {
        assert!(!is_open_descriptor(0x7fff_ffff), "no file has it");
        assert!(!is_open_descriptor(0xffff_ffff) && !is_open_descriptor(1 << 32), "no file can have it");
    }
}

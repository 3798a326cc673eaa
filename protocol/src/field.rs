//! The kinds of the call table: the encoding of one parameter.
//!
//! A scalar takes one little-endian 64-bit word. Inline bytes take a word for their length and then as many words as they fill.
//! Decoding checks everything that can be checked without knowing the session: ranges of the type, limits, tags of ids, lengths
//! against the bytes present. The worker checks the rest, which needs the session (is this address inside a window? does this
//! id exist?), and the type enforces it: the worker cannot use the value without that check.

pub use crate::field_error::FieldError;

use crate::{
    handle::{Id, Kind},
    limits,
    staged::{Staged, StagedRange},
};

/// Reads fields from a private copy of a record.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader over `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { left: bytes }
    }

    /// The next word.
    ///
    /// # Errors
    /// [`FieldError::Short`].
    #[inline]
    pub fn word(&mut self) -> Result<u64, FieldError> {
        let (word, left) = self.left.split_first_chunk::<8>().ok_or(FieldError::Short)?;
        self.left = left;
        Ok(u64::from_le_bytes(*word))
    }

    /// The next `bytes` bytes and their padding.
    ///
    /// # Errors
    /// [`FieldError::Short`].
    #[inline]
    pub fn bytes(&mut self, bytes: usize) -> Result<&'a [u8], FieldError> {
        let padded = bytes.checked_next_multiple_of(8).ok_or(FieldError::Short)?;
        let (field, left) = self.left.split_at_checked(padded).ok_or(FieldError::Short)?;
        self.left = left;
        field.get(..bytes).ok_or(FieldError::Short)
    }

    /// Everything that is left.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.left
    }

    /// Ends reading.
    ///
    /// # Errors
    /// [`FieldError::Trailing`] when something is left.
    pub fn finish(self) -> Result<(), FieldError> {
        if self.left.is_empty() { Ok(()) } else { Err(FieldError::Trailing) }
    }
}

/// Writes fields into a caller's buffer.
#[derive(Debug)]
pub struct Writer<'a> {
    buffer: &'a mut [u8],
    length: usize,
}

impl<'a> Writer<'a> {
    /// A writer that begins at the start of `buffer`.
    pub const fn new(buffer: &'a mut [u8]) -> Writer<'a> {
        Writer { buffer, length: 0 }
    }

    /// Appends a word.
    ///
    /// # Errors
    /// [`FieldError::Long`].
    #[inline]
    pub fn word(&mut self, word: u64) -> Result<(), FieldError> {
        let space = self.buffer.get_mut(self.length..).and_then(<[u8]>::first_chunk_mut);
        *space.ok_or(FieldError::Long)? = word.to_le_bytes();
        // The word was in the buffer.
        self.length = self.length.wrapping_add(8);
        Ok(())
    }

    /// Appends bytes, padded with zeroes to a word.
    ///
    /// # Errors
    /// [`FieldError::Long`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), FieldError> {
        let padded = bytes.len().checked_next_multiple_of(8).ok_or(FieldError::Long)?;
        let end = self.length.checked_add(padded).ok_or(FieldError::Long)?;
        let space = self.buffer.get_mut(self.length..end).ok_or(FieldError::Long)?;
        let (data, padding) = space.split_at_mut_checked(bytes.len()).ok_or(FieldError::Long)?;
        data.copy_from_slice(bytes);
        padding.fill(0);
        self.length = end;
        Ok(())
    }

    /// Bytes written.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }
}

/// A parameter kind.
pub trait Field<'a>: Sized {
    /// True if the kind names arena memory, which is sent with the call if memory is not shared.
    const STAGED: bool = false;

    /// Adds the arena memory that the parameter names.
    ///
    /// # Errors
    /// [`FieldError::Range`] when it is not one range.
    fn stage(&self, _staged: &mut Staged) -> Result<(), FieldError> {
        Ok(())
    }

    /// Appends the field.
    ///
    /// # Errors
    /// [`FieldError::Long`] when the buffer is full.
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError>;

    /// Reads and checks the field.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes are not such a field.
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError>;
}

macro_rules! scalars {
    ($($ty:ty),+) => {$(
        impl<'a> Field<'a> for $ty {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                writer.word(u64::from(*self))
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                <$ty>::try_from(reader.word()?).map_err(|_| FieldError::Range)
            }
        }
    )+};
}
scalars!(u8, u16, u32, u64);

impl<'a> Field<'a> for u128 {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.bytes(&self.to_le_bytes())
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        <[u8; 16]>::get(reader).map(u128::from_le_bytes)
    }
}

impl<'a> Field<'a> for i32 {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.cast_unsigned().put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(u32::get(reader)?.cast_signed())
    }
}

impl<'a> Field<'a> for f32 {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.to_bits().put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(f32::from_bits(u32::get(reader)?))
    }
}

impl<'a> Field<'a> for bool {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(u64::from(*self))
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        match reader.word()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FieldError::Range),
        }
    }
}

macro_rules! arrays {
    ($($ty:ty),+) => {$(
        impl<'a, const N: usize> Field<'a> for [$ty; N] {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                self.iter().try_for_each(|word| word.put(writer))
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                let mut array = [0; N];
                for word in &mut array {
                    *word = <$ty>::get(reader)?;
                }
                Ok(array)
            }
        }
    )+};
}
arrays!(u32, u64);

impl<'a, const N: usize> Field<'a> for [u8; N] {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.bytes(self)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        reader.bytes(N)?.try_into().map_err(|_| FieldError::Short)
    }
}

/// A count of bytes or elements that bounds an allocation or a loop: at most `LIMIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size<const LIMIT: u64>(pub u64);

impl<'a, const LIMIT: u64> Field<'a> for Size<LIMIT> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        if self.0 <= LIMIT { writer.word(self.0) } else { Err(FieldError::Range) }
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let value = reader.word()?;
        if value <= LIMIT { Ok(Size(value)) } else { Err(FieldError::Range) }
    }
}

/// A device address as the guest gave it. The worker looks up the whole range in its window table before it uses the
/// address: with unified addressing a forged value would name the worker's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAddress(pub u64);

impl<'a> Field<'a> for DeviceAddress {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(self.0)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(DeviceAddress(reader.word()?))
    }
}

/// A device of the session: a small number below the count that `session_hello` answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordinal(pub u32);

impl<'a> Field<'a> for Ordinal {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(Ordinal(u32::get(reader)?))
    }
}

macro_rules! arena_ranges {
    ($($(#[$doc:meta])* $ty:ident, |$range:ident, $staged:ident| $stage:expr;)+) => {$(
        $(#[$doc])*
        /// Addresses are the same in guest and worker. The worker checks the range against the attached arenas before use.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $ty<const LIMIT: u64> {
            /// The first address.
            pub address: u64,
            /// The length in bytes, at most `LIMIT`.
            pub bytes: u64,
        }

        impl<'a, const LIMIT: u64> Field<'a> for $ty<LIMIT> {
            const STAGED: bool = true;
            fn stage(&self, $staged: &mut Staged) -> Result<(), FieldError> {
                let $range = StagedRange::new(self.address, self.bytes)?;
                $stage
            }
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                writer.word(self.address)?;
                Size::<LIMIT>(self.bytes).put(writer)
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                Ok(Self { address: reader.word()?, bytes: Size::<LIMIT>::get(reader)?.0 })
            }
        }
    )+};
}

arena_ranges! {
    /// A range of arena memory that the call reads.
    ArenaIn, |range, staged| staged.reads(range);
    /// A range of arena memory that the call writes.
    ArenaOut, |range, staged| staged.writes(range);
    /// A range of arena memory that the call may write a text to. The guest has put a NUL at its start.
    ArenaText, |range, staged| {
        staged.reads(range.map(|range| StagedRange { bytes: range.bytes.min(8), ..range }))?;
        staged.writes(range)
    };
}

macro_rules! arena_rows {
    ($($(#[$doc:meta])* $ty:ident, $stage:ident;)+) => {$(
        $(#[$doc])*
        /// If memory is not shared, only rows without gaps are accepted: others would carry the memory between them, too.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $ty {
            /// The address of the first row.
            pub address: u64,
            /// Bytes from the start of a row to the start of the next.
            pub pitch: u64,
            /// Bytes of a row.
            pub width: u64,
            /// Rows.
            pub height: u64,
        }

        impl<'a> Field<'a> for $ty {
            const STAGED: bool = true;
            fn stage(&self, staged: &mut Staged) -> Result<(), FieldError> {
                staged.$stage(StagedRange::rows(self.address, self.pitch, self.width, self.height)?)
            }
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                [self.address, self.pitch, self.width, self.height].iter().try_for_each(|word| writer.word(*word))
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                let (address, pitch) = (reader.word()?, reader.word()?);
                Ok($ty { address, pitch, width: reader.word()?, height: reader.word()? })
            }
        }
    )+};
}

arena_rows! {
    /// Rows of arena memory that the call reads.
    ArenaRowsIn, reads;
    /// Rows of arena memory that the call writes.
    ArenaRowsOut, writes;
}

/// Defines enumerations that cross as their numbers: the type, its `from_number`, and its [`Field`].
#[macro_export]
macro_rules! numbered {
    ($($(#[$doc:meta])* $visibility:vis enum $ty:ident { $($(#[$note:meta])* $name:ident = $number:literal,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        $visibility enum $ty {
            $($(#[$note])* $name = $number,)+
        }

        impl $ty {
            /// The value with this number.
            #[must_use]
            $visibility const fn from_number(number: u32) -> Option<$ty> {
                match number {
                    $($number => Some($ty::$name),)+
                    _ => None,
                }
            }
        }

        impl<'a> $crate::field::Field<'a> for $ty {
            fn put(&self, writer: &mut $crate::field::Writer<'_>) -> Result<(), $crate::field::FieldError> {
                $crate::field::Field::put(&(*self as u32), writer)
            }
            fn get(reader: &mut $crate::field::Reader<'a>) -> Result<Self, $crate::field::FieldError> {
                let number = <u32 as $crate::field::Field>::get(reader)?;
                $ty::from_number(number).ok_or($crate::field::FieldError::Range)
            }
        }
    )+};
}

numbered! {
    /// Access of a device to a mapping, with the numbers of `CUmemAccess_flags`.
    pub enum AccessFlags {
        /// No access.
        None = 0,
        /// The device reads.
        Read = 1,
        /// The device reads and writes.
        ReadWrite = 3,
    }
    /// Bytes of the elements of a `memset`.
    pub enum ElementSize {
        /// `cuMemsetD8`.
        Byte = 1,
        /// `cuMemsetD16`.
        Half = 2,
        /// `cuMemsetD32`.
        Word = 4,
    }
}

impl<'a, K: Kind> Field<'a> for Id<K> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(self.raw())
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Id::from_raw(reader.word()?).ok_or(FieldError::Id)
    }
}

/// A new object whose id the guest chose. The worker checks that the id is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mint<K: Kind>(pub Id<K>);

impl<'a, K: Kind> Field<'a> for Mint<K> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(Mint(Id::get(reader)?))
    }
}

/// An object that ends with the call, even if the driver returns an error. It is the last parameter of its row: a parameter after it
/// could be refused when the object is already out of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take<K: Kind>(pub Id<K>);

impl<'a, K: Kind> Field<'a> for Take<K> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(Take(Id::get(reader)?))
    }
}

impl ElementSize {
    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self as u64
    }
}

/// Inline bytes, at most `LIMIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes<'a, const LIMIT: usize>(pub &'a [u8]);

impl<'a, const LIMIT: usize> Field<'a> for Bytes<'a, LIMIT> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        if self.0.len() > LIMIT {
            return Err(FieldError::Range);
        }
        writer.word(self.0.len() as u64)?;
        writer.bytes(self.0)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let length = usize::try_from(reader.word()?).map_err(|_| FieldError::Range)?;
        if length > LIMIT {
            return Err(FieldError::Range);
        }
        Ok(Bytes(reader.bytes(length)?))
    }
}

/// The parameters of a kernel, in the layout that `module_function` answered.
pub type ParameterBytes<'a> = Bytes<'a, { limits::PARAMETER_BYTES }>;

/// Attributes of a launch (`CUlaunchAttribute`): for each its id as a word, then 64 bytes of value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchAttributes<'a>(pub &'a [u8]);

impl<'a> LaunchAttributes<'a> {
    /// Bytes of one attribute.
    pub const EACH: usize = 72;
}

impl<'a> Field<'a> for LaunchAttributes<'a> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        Bytes::<{ limits::LAUNCH_ATTRIBUTES * LaunchAttributes::EACH }>(self.0).put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let Bytes(attributes) =
            Bytes::<'a, { limits::LAUNCH_ATTRIBUTES * LaunchAttributes::EACH }>::get(reader)?;
        Ok(LaunchAttributes(attributes))
    }
}

/// Options of the driver's compiler and linker (`CUjit_option`) whose values are numbers: a word for each, the option in its low half and the
/// value in its high half. Options whose values are pointers are never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CarriedOptions<'a>(&'a [u8]);

impl<'a> CarriedOptions<'a> {
    /// No options.
    pub const NONE: CarriedOptions<'static> = CarriedOptions(&[]);
    const EACH: usize = 8;

    /// The bytes of one option.
    #[must_use]
    pub const fn one(option: u32, value: u32) -> [u8; 8] {
        (option as u64 | (value as u64) << 32).to_le_bytes()
    }

    /// The options in these bytes, each made by [`CarriedOptions::one`].
    ///
    /// # Errors
    /// [`FieldError::Range`] for a part of an option, or more than [`limits::JIT_OPTIONS`].
    pub const fn new(bytes: &'a [u8]) -> Result<Self, FieldError> {
        if bytes.len().is_multiple_of(Self::EACH) && bytes.len() <= limits::JIT_OPTIONS * Self::EACH {
            Ok(CarriedOptions(bytes))
        } else {
            Err(FieldError::Range)
        }
    }

    /// Each option with its value.
    pub fn list(self) -> impl Iterator<Item = (u32, u32)> + 'a {
        #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        self.0.as_chunks().0.iter().map(move |word| halves(u64::from_le_bytes(*word)))
    }
}

impl<'a> Field<'a> for CarriedOptions<'a> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        Bytes::<{ limits::JIT_OPTIONS * CarriedOptions::EACH }>(self.0).put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let Bytes(options) = Bytes::<'a, { limits::JIT_OPTIONS * CarriedOptions::EACH }>::get(reader)?;
        CarriedOptions::new(options)
    }
}

/// A symbol name: inline bytes without NUL, at most [`limits::NAME_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a>(pub &'a [u8]);

impl<'a> Field<'a> for Name<'a> {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        Bytes::<{ limits::NAME_BYTES }>(self.0).put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let Bytes(name) = Bytes::<'a, { limits::NAME_BYTES }>::get(reader)?;
        if name.contains(&0) { Err(FieldError::Range) } else { Ok(Name(name)) }
    }
}

//! The kinds of the call table: the encoding of one parameter.
//!
//! A scalar takes one little-endian 64-bit word. Inline bytes take a word for their length and then as many words as they fill.
//! Decoding checks everything that can be checked without knowing the session: ranges of the type, limits, tags of ids, lengths
//! against the bytes present. The worker checks the rest, which needs the session (is this address inside a window? does this
//! id exist?), and the type enforces it: the worker cannot use the value without that check.

use crate::{
    handle::{Id, Kind},
    limits,
};

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The record ends inside a field.
    #[error("the record ends inside a field")]
    Short,
    /// Bytes are left after the last field.
    #[error("bytes are left after the last field")]
    Trailing,
    /// A value is outside its type or limit.
    #[error("a value is outside its range")]
    Range,
    /// The writer's buffer is full.
    #[error("the record would be too long")]
    Long,
    /// An id is not of the kind that is due.
    #[error("not an id of the kind that is due")]
    Id,
}

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
    pub fn word(&mut self) -> Result<u64, FieldError> {
        let (word, left) = self.left.split_first_chunk::<8>().ok_or(FieldError::Short)?;
        self.left = left;
        Ok(u64::from_le_bytes(*word))
    }

    /// The next `bytes` bytes and their padding.
    ///
    /// # Errors
    /// [`FieldError::Short`].
    pub fn bytes(&mut self, bytes: usize) -> Result<&'a [u8], FieldError> {
        let padded = bytes.checked_next_multiple_of(8).ok_or(FieldError::Short)?;
        let (field, left) = self.left.split_at_checked(padded).ok_or(FieldError::Short)?;
        self.left = left;
        field.get(..bytes).ok_or(FieldError::Short)
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
    pub fn word(&mut self, word: u64) -> Result<(), FieldError> {
        self.bytes(&word.to_le_bytes())
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

impl<'a> Field<'a> for [u32; 3] {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.iter().try_for_each(|word| word.put(writer))
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok([u32::get(reader)?, u32::get(reader)?, u32::get(reader)?])
    }
}

impl<'a, const N: usize> Field<'a> for [u8; N] {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.bytes(self)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        reader.bytes(N)?.try_into().map_err(|_| FieldError::Short)
    }
}

/// A number of bytes or elements that something will be allocated for or looped over: at most `LIMIT`.
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

/// A device address as the guest gave it. The worker asks its window table for the whole range before it uses one: with
/// unified addressing a forged value would name the worker's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAddress(pub u64);

/// An address in an arena, the same in guest and worker. Checked against the attached arenas before use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaAddress(pub u64);

macro_rules! addresses {
    ($($ty:ident),+) => {$(
        impl<'a> Field<'a> for $ty {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                writer.word(self.0)
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                Ok($ty(reader.word()?))
            }
        }
    )+};
}
addresses!(DeviceAddress, ArenaAddress);

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

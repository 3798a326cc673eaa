//! The arena memory that a call reads and writes: it is carried along where it is not shared.
//!
//! Both ends of a stream call this module, the guest for its own records and the host for a hostile guest's, so neither needs
//! this information from the other.

use crate::{calls::wire, field::FieldError, record::Header};

/// A range of arena memory, never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first address.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl Range {
    fn new(address: u64, bytes: u64) -> Result<Option<Range>, FieldError> {
        address.checked_add(bytes).ok_or(FieldError::Range)?;
        Ok((bytes > 0).then_some(Range { address, bytes }))
    }

    /// Rows that lie without gaps. Others would have what lies between them carried along.
    fn rows(address: u64, pitch: u64, width: u64, height: u64) -> Result<Option<Range>, FieldError> {
        if height > 1 && pitch != width {
            return Err(FieldError::Range);
        }
        Range::new(address, width.checked_mul(height).ok_or(FieldError::Range)?)
    }
}

/// What one call does with arena memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staged {
    /// What it reads.
    pub reads: [Option<Range>; 2],
    /// What it has written when it is answered, or when its sequence is complete if it is not.
    pub writes: Option<Range>,
}

/// Bytes of a text that end it, should nothing be written.
const END: u64 = 8;

/// What a call does with arena memory.
///
/// # Errors
/// [`FieldError`] when its fields cannot be read, or the memory is not one range.
pub fn staged(header: &Header, fields: &[u8]) -> Result<Staged, FieldError> {
    let none = Staged::default();
    Ok(match header.call {
        wire::copy_to_device::CALL => {
            let args = wire::copy_to_device::Args::get(fields)?;
            Staged { reads: [Range::new(args.from.0, args.bytes)?, None], ..none }
        }
        wire::copy_from_device::CALL => {
            let args = wire::copy_from_device::Args::get(fields)?;
            Staged { writes: Range::new(args.to.0, args.bytes)?, ..none }
        }
        wire::copy_rows::CALL => {
            let args = wire::copy_rows::Args::get(fields)?;
            match args.direction {
                0 => {
                    let read = Range::rows(args.from, args.from_pitch, args.width, args.height)?;
                    Staged { reads: [read, None], ..none }
                }
                1 => Staged { writes: Range::rows(args.to, args.to_pitch, args.width, args.height)?, ..none },
                _ => none,
            }
        }
        wire::module_load::CALL => {
            let args = wire::module_load::Args::get(fields)?;
            let log = Range::new(args.log.0, args.log_bytes.0)?;
            let end = log.map(|log| Range { bytes: log.bytes.min(END), ..log });
            Staged { reads: [Range::new(args.image.0, args.bytes.0)?, end], writes: log }
        }
        wire::module_function_name::CALL => {
            let args = wire::module_function_name::Args::get(fields)?;
            Staged { writes: Range::new(args.into.0, args.bytes.0)?, ..none }
        }
        _ => none,
    })
}

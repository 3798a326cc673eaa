//! The arena memory that a call reads and writes. It is sent with the call if memory is not shared.
//!
//! Both ends of a stream derive it from the record by [`crate::calls::staged`], the guest for its own records and the host for
//! a hostile guest's, so neither needs this information from the other.

use crate::field_error::FieldError;

/// A range of arena memory, never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedRange {
    /// Its first address.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl StagedRange {
    pub(crate) fn new(address: u64, bytes: u64) -> Result<Option<StagedRange>, FieldError> {
        address.checked_add(bytes).ok_or(FieldError::Range)?;
        Ok((bytes > 0).then_some(StagedRange { address, bytes }))
    }

    /// Rows without gaps. Rows with gaps are refused, since the memory between them would be sent, too.
    pub(crate) fn rows(
        address: u64,
        pitch: u64,
        width: u64,
        height: u64,
    ) -> Result<Option<StagedRange>, FieldError> {
        if height > 1 && pitch != width {
            return Err(FieldError::Range);
        }
        StagedRange::new(address, width.checked_mul(height).ok_or(FieldError::Range)?)
    }
}

/// The arena memory of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staged {
    /// The ranges that it reads.
    pub reads: [Option<StagedRange>; 2],
    /// The range that it has written when it is answered; for a call without an answer, when its sequence is complete.
    pub writes: Option<StagedRange>,
}

impl Staged {
    /// Adds a range that the call reads.
    pub(crate) fn reads(&mut self, range: Option<StagedRange>) -> Result<(), FieldError> {
        let Some(range) = range else { return Ok(()) };
        *self.reads.iter_mut().find(|read| read.is_none()).ok_or(FieldError::Long)? = Some(range);
        Ok(())
    }

    /// Adds the range that the call writes.
    pub(crate) fn writes(&mut self, range: Option<StagedRange>) -> Result<(), FieldError> {
        if range.is_some() && self.writes.is_some() {
            return Err(FieldError::Long);
        }
        self.writes = self.writes.or(range);
        Ok(())
    }
}

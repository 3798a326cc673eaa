//! The record of one call in the ring: a header and the call's fields.

use crate::field::{FieldError, Reader, Writer};

/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 40;
/// Sentinel: no stream slot.
pub const NO_STREAM: u32 = u32::MAX;
/// Sentinel: no reply slot; the call is a post.
pub const NO_REPLY: u32 = u32::MAX;

/// The header before the fields of every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The call's id in the call table.
    pub call: u16,
    /// The reply slot that waits for an answer, or [`NO_REPLY`].
    pub reply: u32,
    /// Echoed in the answer, so that a late answer to an earlier call in the slot is not mistaken for this one's.
    pub ticket: u32,
    /// The raw id of the calling thread's current context, 0 for none.
    pub context: u64,
    /// The stream slot the work goes to, or [`NO_STREAM`].
    pub stream: u32,
    /// A small number that names the calling guest thread, for diagnostics.
    pub thread: u32,
    /// The work's sequence on its stream: one more than the last posted there. 0 without a stream.
    pub sequence: u64,
}

impl Header {
    /// Writes the header with `size` as the record's whole length.
    #[inline]
    pub fn write(&self, size: u32, into: &mut [u8; HEADER_BYTES]) {
        let words = [
            u64::from(size) | u64::from(self.call) << 32,
            u64::from(self.reply) | u64::from(self.ticket) << 32,
            self.context,
            u64::from(self.stream) | u64::from(self.thread) << 32,
            self.sequence,
        ];
        for (word, bytes) in words.iter().zip(into.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Splits a private copy of a record into header and fields. The size word is not read again: the ring's
    /// consumer decided the length, and the guest may have changed the word since.
    ///
    /// # Errors
    /// [`FieldError`] when the record is shorter than a header, or a reserved bit is set.
    #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
    #[inline]
    pub fn read(record: &[u8]) -> Result<(Header, &[u8]), FieldError> {
        let (head, fields) = record.split_at_checked(HEADER_BYTES).ok_or(FieldError::Short)?;
        let mut reader = Reader::new(head);
        let (w0, w1, w2) = (reader.word()?, reader.word()?, reader.word()?);
        let (w3, w4) = (reader.word()?, reader.word()?);
        if w0 >> 48 != 0 {
            return Err(FieldError::Range);
        }
        let header = Header {
            call: (w0 >> 32) as u16,
            reply: w1 as u32,
            ticket: (w1 >> 32) as u32,
            context: w2,
            stream: w3 as u32,
            thread: (w3 >> 32) as u32,
            sequence: w4,
        };
        Ok((header, fields))
    }

    /// Builds a whole record in `buffer`: the fields that `put` appends, then the header with the final length.
    ///
    /// # Errors
    /// [`FieldError::Long`] when the fields do not fit, or what `put` returns.
    pub fn build<'b>(
        &self,
        buffer: &'b mut [u8],
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> Result<&'b [u8], FieldError> {
        let (head, body) = buffer.split_first_chunk_mut::<HEADER_BYTES>().ok_or(FieldError::Long)?;
        let mut writer = Writer::new(body);
        put(&mut writer)?;
        let length = writer.length().checked_add(HEADER_BYTES).ok_or(FieldError::Long)?;
        self.write(u32::try_from(length).map_err(|_| FieldError::Long)?, head);
        buffer.get(..length).ok_or(FieldError::Long)
    }
}

//! The report of the driver's compiler and linker: the texts and numbers that the driver writes to the places of JIT options.
//!
//! The report lies in arena memory, because a call that fails has no results, and a compilation that fails has the log that counts. It
//! begins with a [`ReportHead`], followed by as many bytes as the guest reserves for the information log, and then by those of
//! the error log. A NUL ends each text.

/// The numbers of a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportHead {
    /// The value of `CU_JIT_WALL_TIME`: the bits of an `f32` in milliseconds.
    pub wall_time: u32,
    /// The value of `CU_JIT_THREADS_PER_BLOCK`.
    pub threads: u32,
    /// The value of `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`: bytes of the log that the driver filled.
    pub info: u32,
    /// The value of `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
    pub error: u32,
}

impl ReportHead {
    /// Bytes of the numbers.
    pub const BYTES: usize = 24;
    /// The first byte of a report that the worker has written. The guest has put a 0 there.
    const WRITTEN: u8 = 1;

    /// The numbers as they lie in arena memory.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [u32::from(Self::WRITTEN), 0, self.wall_time, self.threads, self.info, self.error];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads the numbers; `None` if the worker has written no report.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<ReportHead> {
        let mut words = bytes
            .chunks_exact(4)
            .map(|word| word.iter().rev().fold(0_u32, |value, byte| value << 8 | u32::from(*byte)));
        if words.next() != Some(u32::from(Self::WRITTEN)) {
            return None;
        }
        let mut next = || words.next().unwrap_or(0);
        next();
        Some(ReportHead { wall_time: next(), threads: next(), info: next(), error: next() })
    }
}

/// Bytes of a report with these bytes for the two logs.
#[must_use]
pub const fn report_bytes(info: u64, error: u64) -> u64 {
    (ReportHead::BYTES as u64).saturating_add(info).saturating_add(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_read_as_it_was_written_and_not_before() {
        let head = ReportHead { wall_time: 1.5_f32.to_bits(), threads: 256, info: 0, error: u32::MAX };
        assert_eq!(ReportHead::decode(&head.encode()), Some(head));
        assert_eq!(ReportHead::decode(&[0; ReportHead::BYTES]), None);
        let mut other = head.encode();
        other[0] = 2;
        assert_eq!(ReportHead::decode(&other), None);
    }
}

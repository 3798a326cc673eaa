//! Lists of guest pages that one process passes to another in a memory file.

/// A run of guest pages inside a memory region: 16 bytes in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the region's file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Run {
    /// Size of a run in a list, in bytes.
    pub const BYTES: usize = 16;

    /// Appends the run to a list.
    pub fn push(&self, list: &mut Vec<u8>) {
        list.extend_from_slice(&self.offset.to_le_bytes());
        list.extend_from_slice(&self.bytes.to_le_bytes());
    }

    /// Reads a list; bytes after the last whole run are ignored.
    pub fn list(bytes: &[u8]) -> impl Iterator<Item = Run> + '_ {
        let (words, _) = bytes.as_chunks::<8>();
        let (runs, _) = words.as_chunks::<2>();
        runs.iter().map(|[offset, bytes]| Run {
            offset: u64::from_le_bytes(*offset),
            bytes: u64::from_le_bytes(*bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn run_encoding_round_trips(runs in prop::collection::vec(any::<(u64, u64)>(), 0..20), tail in prop::collection::vec(any::<u8>(), 0..16)) {
            let mut list = Vec::new();
            let runs: Vec<Run> = runs.into_iter().map(|(offset, bytes)| Run { offset, bytes }).collect();
            runs.iter().for_each(|run| run.push(&mut list));
            list.extend(tail);
            prop_assert_eq!(Run::list(&list).collect::<Vec<_>>(), runs);
        }
    }
}

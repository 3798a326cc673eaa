//! A program's advice about managed memory: the preferred location and the expected users.

use std::ops::Range;

use sluice_cuda_frontend::managed::{Advice, Saying};

use super::{Block, Space};
use crate::error::{Error, Result};
use crate::lock::lock;

impl Space {
    /// True if a range lies in one managed block.
    pub(crate) fn is_managed(&self, range: &Range<u64>) -> bool {
        let block = self.block_at(range.start).filter(Block::is_managed);
        block.is_some_and(|block| !range.is_empty() && range.end <= block.range().end)
    }

    /// Records advice about managed memory.
    pub(crate) fn advise(&self, range: &Range<u64>, saying: Saying) -> Result {
        if !self.is_managed(range) {
            return Err(Error::INVALID_VALUE);
        }
        lock(&self.book).advised.say(range, saying);
        Ok(())
    }

    /// Returns each distinct advice for parts of a range.
    pub(crate) fn advice(&self, range: &Range<u64>) -> Result<Vec<Advice>> {
        if !self.is_managed(range) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(lock(&self.book).advised.said(range))
    }
}

//! Options of the just-in-time compiler: the logs, and the time of the compilation. Options that tune machine code have no
//! effect.

use std::time::Instant;

use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::log::log;
use crate::module::Refusal;

const WALL_TIME: u32 = 2;
const INFO_BUFFER: u32 = 3;
const INFO_SIZE: u32 = 4;
const ERROR_BUFFER: u32 = 5;
const ERROR_SIZE: u32 = 6;
const LAST: u32 = 35;

/// The options of one load. Sizes and the time are results, written in place of the option's value.
pub(crate) struct JitOptions {
    start: Instant,
    wall_time: Out<f32>,
    info: JitLog,
    error: JitLog,
}

struct JitLog {
    buffer: Out<u8>,
    /// In: bytes of the buffer. Out: bytes used.
    size: Out<u32>,
}

impl JitLog {
    fn none() -> JitLog {
        JitLog { buffer: Out::missing(), size: Out::missing() }
    }

    fn write(&self, text: &str) -> Result {
        if !self.size.is_wanted() {
            return Ok(());
        }
        let room = self.size.current()?;
        if room == 0 || !self.buffer.is_wanted() {
            return self.size.set(0);
        }
        self.buffer.text(text.as_bytes(), room as usize)?;
        let used = u32::try_from(text.len() + 1).unwrap_or(u32::MAX).min(room);
        self.size.set(if text.is_empty() { 0 } else { used })
    }
}

impl JitOptions {
    pub(crate) fn none() -> JitOptions {
        JitOptions {
            start: Instant::now(),
            wall_time: Out::missing(),
            info: JitLog::none(),
            error: JitLog::none(),
        }
    }

    /// Reads the two lists.
    pub(crate) fn read(count: u32, keys: In<u32>, values: In<u64>) -> Result<JitOptions> {
        let mut options = JitOptions::none();
        for index in 0..count as usize {
            let key = keys.at(index)?;
            let value = || values.at(index);
            let slot = || Ok(Out::from_address(values.address_of(index)?));
            match key {
                WALL_TIME => options.wall_time = Out::from_address(values.address_of(index)?),
                INFO_BUFFER => options.info.buffer = Out::from_address(value()?),
                INFO_SIZE => options.info.size = slot()?,
                ERROR_BUFFER => options.error.buffer = Out::from_address(value()?),
                ERROR_SIZE => options.error.size = slot()?,
                0..=LAST => {}
                _ => return Err(Error::INVALID_VALUE),
            }
        }
        Ok(options)
    }

    /// Writes the logs and returns the outcome.
    pub(crate) fn finish<T>(&self, outcome: std::result::Result<T, Refusal>) -> Result<T> {
        self.wall_time.offer(self.start.elapsed().as_secs_f32() * 1e3);
        self.info.write("")?;
        match outcome {
            Ok(value) => {
                self.error.write("")?;
                Ok(value)
            }
            Err(refusal) => {
                log!("image refused: {}", refusal.text);
                self.error.write(&refusal.text)?;
                Err(refusal.error)
            }
        }
    }
}

//! Options of the just-in-time compiler: the logs, and the time of the compilation. Options that tune machine code have no
//! effect.

use std::ffi::{c_char, c_void};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::log::log;
use crate::module::LoadRefusal;

const WALL_TIME: u32 = 2;
const INFO_BUFFER: u32 = 3;
const INFO_SIZE: u32 = 4;
const ERROR_BUFFER: u32 = 5;
const ERROR_SIZE: u32 = 6;
const LAST: u32 = 35;

/// The values of options: each is a pointer, or stands in the place of one.
pub(crate) type OptionValues = Out<Out<c_void>>;

/// The options of one load. Sizes and the time are results, written in place of the option's value.
pub(crate) struct JitOptions {
    start: Instant,
    wall_time: Out<f32>,
    info: JitLog,
    error: JitLog,
}

struct JitLog {
    buffer: Out<c_char>,
    /// In: bytes of the buffer. Out: bytes used.
    size: Out<u32>,
}

impl JitLog {
    fn none() -> JitLog {
        JitLog { buffer: Out::missing(), size: Out::missing() }
    }

    fn write(&self, text: &str) -> Result {
        if !self.size.is_given() {
            return Ok(());
        }
        let room = self.size.get()?;
        if room == 0 || !self.buffer.is_given() {
            return self.size.set(0);
        }
        self.buffer.set_text_cut(text, room)?;
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
    pub(crate) fn read(count: u32, keys: In<u32>, values: OptionValues) -> Result<JitOptions> {
        let mut options = JitOptions::none();
        for index in 0..count as usize {
            let key = keys.get_at(index)?;
            let buffer = || values.get_at(index).map(|value| value.cast());
            match key {
                WALL_TIME => options.wall_time = values.at(index)?.cast(),
                INFO_BUFFER => options.info.buffer = buffer()?,
                INFO_SIZE => options.info.size = values.at(index)?.cast(),
                ERROR_BUFFER => options.error.buffer = buffer()?,
                ERROR_SIZE => options.error.size = values.at(index)?.cast(),
                0..=LAST => {}
                _ => return Err(Error::INVALID_VALUE),
            }
        }
        Ok(options)
    }

    /// Writes the logs and returns the outcome.
    pub(crate) fn finish<T>(&self, outcome: std::result::Result<T, LoadRefusal>) -> Result<T> {
        self.wall_time.set_if_given(self.start.elapsed().as_secs_f32() * 1e3);
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

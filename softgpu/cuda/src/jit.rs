//! Options of the just-in-time compiler: the logs, the time of the compilation, and a limit on registers. Other options that tune machine
//! code have no effect.

use std::ffi::{c_char, c_void};
use std::time::{Duration, Instant};

use sluice_cuda_abi::jit::{self, JitValue};

use crate::error::{Error, Result};
use crate::ffi::{In, Out};

/// The values of options: each is a pointer, or stands in the place of one.
pub(crate) type OptionValues = Out<Out<c_void>>;

/// Highest level of optimisation.
const LEVELS: u32 = 4;

/// The options of one load or link. Sizes and the time are results, written in place of the option's value.
pub(crate) struct JitOptions {
    pub(crate) start: Instant,
    wall_time: Out<f32>,
    info: JitLog,
    error: JitLog,
    /// True if information about each kernel belongs in the log.
    pub(crate) verbose: bool,
    /// Limit on the registers of a thread.
    pub(crate) max_registers: Option<u32>,
}

struct JitLog {
    buffer: Out<c_char>,
    room: u32,
    /// Receives the bytes used.
    size: Out<u32>,
}

impl JitLog {
    fn none() -> JitLog {
        JitLog { buffer: Out::missing(), room: 0, size: Out::missing() }
    }

    fn write(&self, text: &str) -> Result {
        if !self.size.is_given() {
            return Ok(());
        }
        if self.room == 0 || !self.buffer.is_given() {
            return self.size.set(0);
        }
        self.buffer.set_text_cut(text, self.room)?;
        let used = u32::try_from(text.len() + 1).unwrap_or(u32::MAX).min(self.room);
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
            verbose: false,
            max_registers: None,
        }
    }

    /// Reads the two lists.
    pub(crate) fn read(count: u32, keys: In<u32>, values: OptionValues) -> Result<JitOptions> {
        let mut options = JitOptions::none();
        for index in 0..count as usize {
            let key = keys.get_at(index)?;
            let meaning = jit::value_of(key).ok_or(Error::INVALID_VALUE)?;
            let place = values.at(index)?;
            let number = place.cast::<u32>().required()?.get()?;
            match meaning {
                JitValue::WallTime => options.wall_time = place.cast(),
                JitValue::InfoLog => options.info.buffer = place.get()?.cast(),
                JitValue::ErrorLog => options.error.buffer = place.get()?.cast(),
                JitValue::InfoLogBytes => (options.info.room, options.info.size) = (number, place.cast()),
                JitValue::ErrorLogBytes => (options.error.room, options.error.size) = (number, place.cast()),
                JitValue::Addresses => return Err(Error::NOT_SUPPORTED),
                // The compiled code runs with any number of threads.
                JitValue::Threads | JitValue::HostThreads => {}
                JitValue::Number => match key {
                    jit::MAX_REGISTERS => options.max_registers = Some(number).filter(|number| *number > 0),
                    jit::LOG_VERBOSE => options.verbose = number != 0,
                    jit::OPTIMIZATION_LEVEL if number > LEVELS => return Err(Error::INVALID_VALUE),
                    _ => {}
                },
            }
        }
        Ok(options)
    }

    /// Reads the two lists of a link.
    pub(crate) fn read_for_link(count: u32, keys: In<u32>, values: OptionValues) -> Result<JitOptions> {
        let options = JitOptions::read(count, keys, values)?;
        if keys.list(count as usize)?.contains(&jit::FALLBACK_STRATEGY) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(options)
    }

    /// Reads the two lists of one input of a link.
    pub(crate) fn read_for_input(count: u32, keys: In<u32>, values: OptionValues) -> Result<JitOptions> {
        if !keys.list(count as usize)?.into_iter().all(jit::is_for_input) {
            return Err(Error::INVALID_VALUE);
        }
        JitOptions::read_for_link(count, keys, values)
    }

    /// Writes the logs and the time.
    pub(crate) fn write(&self, time: Duration, info: &str, error: &str) -> Result {
        self.wall_time.set_if_given(time.as_secs_f32() * 1e3);
        self.info.write(info)?;
        self.error.write(error)
    }
}

//! Options of the driver's compiler and linker: the numbers for the host, and the program's places for results.

use crate::{error::Result, host_memory, session::Session, state::memory::arena::Arena};
use sluice_protocol::{
    field::{ArenaText, CarriedOptions, Size},
    jit::{ReportHead, report_bytes},
    limits,
};

/// The options of a call.
#[derive(Default)]
pub(crate) struct JitOptions {
    /// Options with numbers, in the form of the wire.
    numbers: Vec<u8>,
    pub(crate) places: JitPlaces,
}

/// The program's places for logs and numbers, by address. Those of a link stay valid until the link is destroyed.
#[derive(Clone, Default)]
pub(crate) struct JitPlaces {
    pub(crate) info: LogPlace,
    pub(crate) error: LogPlace,
    /// Places for the time, each of four bytes.
    pub(crate) wall_times: Vec<u64>,
    /// Places for the number of threads.
    pub(crate) threads: Vec<u64>,
}

/// The place for a log.
#[derive(Clone, Default)]
pub(crate) struct LogPlace {
    /// The buffer; 0 for none.
    pub(crate) buffer: u64,
    /// Its bytes.
    pub(crate) room: u32,
    /// Places for the number of bytes used, each of four bytes.
    pub(crate) used: Vec<u64>,
}

impl LogPlace {
    /// Bytes of the log to request.
    fn wanted(&self) -> u64 {
        if self.buffer == 0 { 0 } else { u64::from(self.room).min(limits::JIT_LOG_BYTES) }
    }

    /// Writes a log and the number of bytes that the driver has filled.
    fn write(&self, text: &[u8], filled: u32) {
        if self.wanted() > 0 {
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            host_memory::write(self.buffer, &[&text[..end], b"\0"].concat());
        }
        self.used.iter().for_each(|place| host_memory::write(*place, &filled.to_ne_bytes()));
    }
}

impl JitPlaces {
    fn is_empty(&self) -> bool {
        let logs =
            self.info.wanted() + self.error.wanted() + (self.info.used.len() + self.error.used.len()) as u64;
        logs == 0 && self.wall_times.is_empty() && self.threads.is_empty()
    }

    /// Bytes of the two logs.
    pub(crate) fn rooms(&self) -> (Size<{ limits::JIT_LOG_BYTES }>, Size<{ limits::JIT_LOG_BYTES }>) {
        (Size(self.info.wanted()), Size(self.error.wanted()))
    }

    /// Bytes of arena memory for the report; 0 if the program wants none.
    fn bytes(&self) -> u64 {
        if self.is_empty() { 0 } else { report_bytes(self.info.wanted(), self.error.wanted()) }
    }

    /// Runs a call with `bytes` of arena memory, at the address that `call` gets, and with memory for the report of the compiler behind
    /// them. Writes the report to the program's places, whether the call has failed or not.
    pub(crate) fn with_report<R>(
        &self,
        session: &Session,
        arena: &Arena,
        bytes: u64,
        call: impl FnOnce(u64, ArenaText<{ limits::JIT_REPORT_BYTES }>) -> Result<R>,
    ) -> Result<R> {
        let report_length = self.bytes();
        if bytes + report_length == 0 {
            return call(0, ArenaText { address: 0, bytes: 0 });
        }
        arena.with_room(
            session,
            bytes + report_length,
            || Ok(()),
            |address| {
                let at = address + bytes;
                if report_length > 0 {
                    host_memory::clear(at);
                }
                let result = call(address, ArenaText { address: at, bytes: report_length });
                if report_length > 0 {
                    self.write(at);
                }
                result
            },
        )
    }

    /// Writes the report in arena memory to the program's places.
    fn write(&self, at: u64) {
        let mut head = [0; ReportHead::BYTES];
        host_memory::read(at, &mut head);
        let Some(head) = ReportHead::decode(&head) else { return };
        let mut at = at + ReportHead::BYTES as u64;
        for (log, filled) in [(&self.info, head.info), (&self.error, head.error)] {
            let room = log.wanted();
            // Of the room, the last byte is the NUL's.
            let mut text = vec![0; usize::try_from(room.saturating_sub(1)).unwrap_or(0)];
            host_memory::read(at, &mut text);
            log.write(&text, filled.min(log.room));
            at += room;
        }
        let all = |places: &[u64], value: u32| {
            places.iter().for_each(|place| host_memory::write(*place, &value.to_ne_bytes()));
        };
        all(&self.wall_times, head.wall_time);
        all(&self.threads, head.threads);
    }
}

impl JitOptions {
    /// Adds an option with a number.
    pub(crate) fn carry(&mut self, option: u32, value: u32) {
        self.numbers.extend(CarriedOptions::one(option, value));
    }

    /// The options for the host.
    pub(crate) fn carried(&self) -> Result<CarriedOptions<'_>> {
        CarriedOptions::new(&self.numbers).map_err(|_| crate::error::Error::INVALID_VALUE)
    }
}

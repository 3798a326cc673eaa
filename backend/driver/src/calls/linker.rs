//! The driver's linker, and the options and logs of its compiler.

use super::{Result, size};
use crate::{Driver, Handle, code};
use core::ffi::{c_uint, c_void};
use std::{ffi::CStr, sync::Arc};

/// `CUjit_option`s through which a compiler returns its results.
mod option {
    use core::ffi::c_uint;

    pub(super) const THREADS_PER_BLOCK: c_uint = 1;
    pub(super) const WALL_TIME: c_uint = 2;
    pub(super) const INFO_LOG: c_uint = 3;
    pub(super) const INFO_LOG_BYTES: c_uint = 4;
    pub(super) const ERROR_LOG: c_uint = 5;
    pub(super) const ERROR_LOG_BYTES: c_uint = 6;
}

/// Options of the driver's compiler, with buffers of this process for its logs. Their memory does not move when this value does.
#[derive(Debug, Default)]
pub struct CompilerOptions {
    ids: Vec<c_uint>,
    /// Numbers, and addresses of the two buffers, as the driver reads and overwrites them.
    values: Vec<usize>,
    info: Vec<u8>,
    error: Vec<u8>,
}

/// A log of the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogText<'a> {
    /// The number of bytes that the driver reports as filled.
    pub filled: u32,
    /// The text, without its NUL.
    pub text: &'a [u8],
}

impl<'a> LogText<'a> {
    /// The text in a buffer of which the driver reports `filled` bytes.
    fn of(buffer: &'a [u8], filled: u32) -> LogText<'a> {
        let room = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len().saturating_sub(1));
        LogText { filled: filled.min(room), text: buffer.get(..end).unwrap_or_default() }
    }
}

/// The results of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompilerReport<'a> {
    /// The value of `CU_JIT_WALL_TIME`, the bits of an `f32` in milliseconds; 0 if the option was not given.
    pub wall_time: u32,
    /// The value of `CU_JIT_THREADS_PER_BLOCK`; 0 if the option was not given.
    pub threads: u32,
    /// The information log.
    pub info: LogText<'a>,
    /// The error log.
    pub error: LogText<'a>,
}

impl CompilerOptions {
    /// These options, which have numbers as values, and logs of `info` and `error` bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` without memory for the logs.
    pub fn new(numbers: &[(u32, u32)], info: u64, error: u64) -> Result<CompilerOptions> {
        let mut options = CompilerOptions::default();
        for (id, value) in numbers {
            options.push(*id, *value as usize);
        }
        options.info = buffer(info)?;
        options.error = buffer(error)?;
        for (log, id, bytes) in [
            (address(&mut options.info), option::INFO_LOG, option::INFO_LOG_BYTES),
            (address(&mut options.error), option::ERROR_LOG, option::ERROR_LOG_BYTES),
        ] {
            if let Some((log, length)) = log {
                options.push(id, log);
                options.push(bytes, length);
            }
        }
        Ok(options)
    }

    fn push(&mut self, id: c_uint, value: usize) {
        self.ids.push(id);
        self.values.push(value);
    }

    /// The arguments of a C function: the number of options, their ids and their values.
    pub(super) fn arguments(&mut self) -> Result<(c_uint, *mut c_uint, *mut *mut c_void)> {
        let count = c_uint::try_from(self.ids.len()).map_err(|_| code::INVALID_VALUE)?;
        if count == 0 {
            return Ok((0, core::ptr::null_mut(), core::ptr::null_mut()));
        }
        // A pointer and a `usize` have the same layout.
        Ok((count, self.ids.as_mut_ptr(), self.values.as_mut_ptr().cast()))
    }

    /// The results that the driver has written so far.
    #[must_use]
    pub fn report(&self) -> CompilerReport<'_> {
        #[expect(clippy::cast_possible_truncation, reason = "the driver writes 32 bits")]
        let value = |id| {
            let read = |at: usize| {
                // SAFETY: the place is an element of this list. The driver may have written it through the pointer of `arguments`, in
                // a call that has returned.
                self.values.get(at).map(|place| unsafe { core::ptr::from_ref(place).read_volatile() } as u32)
            };
            self.ids.iter().position(|known| *known == id).and_then(read).unwrap_or(0)
        };
        CompilerReport {
            wall_time: value(option::WALL_TIME),
            threads: value(option::THREADS_PER_BLOCK),
            info: LogText::of(&self.info, value(option::INFO_LOG_BYTES)),
            error: LogText::of(&self.error, value(option::ERROR_LOG_BYTES)),
        }
    }
}

fn buffer(bytes: u64) -> Result<Vec<u8>> {
    let bytes = size(bytes)?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|_| code::OUT_OF_MEMORY)?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}

/// The address and the length of a buffer that the driver may write; `None` if it has no bytes.
fn address(buffer: &mut Vec<u8>) -> Option<(usize, usize)> {
    (!buffer.is_empty()).then(|| (buffer.as_mut_ptr().expose_provenance(), buffer.len()))
}

/// A link of the driver's linker. Its driver writes the options' buffers until it ends, with this value.
#[derive(Debug)]
pub struct DriverLink {
    driver: Arc<Driver>,
    state: Handle,
    options: CompilerOptions,
    /// Address and length of the result, which the driver keeps.
    image: Option<(usize, usize)>,
}

impl DriverLink {
    /// `cuLinkCreate`, for the device of the current context.
    pub fn create(driver: &Arc<Driver>, options: CompilerOptions) -> (Result<()>, DriverLink) {
        let mut link = DriverLink { driver: Arc::clone(driver), state: 0, options, image: None };
        let created = link.options.arguments().and_then(|(count, ids, values)| {
            call!(driver.cuLinkCreate_v2(count, ids, values, &raw mut link.state))
        });
        (created, link)
    }

    /// The driver's handle, 0 if it has not created the link.
    #[must_use]
    pub const fn handle(&self) -> Handle {
        self.state
    }

    /// `cuLinkAddData` for the first `bytes` bytes of the input. The driver keeps no reference to them.
    pub fn add(
        &mut self,
        kind: u32,
        input: &[u8],
        bytes: usize,
        name: &CStr,
        options: &mut CompilerOptions,
    ) -> Result<()> {
        if bytes > input.len() {
            return Err(code::INVALID_VALUE);
        }
        let driver = &self.driver;
        let (count, ids, values) = options.arguments()?;
        let (state, name) = (self.state, name.as_ptr());
        // The driver only reads the input; the C signature has no const.
        let data = input.as_ptr().cast_mut().cast::<c_void>();
        call!(driver.cuLinkAddData_v2(state, kind, data, bytes, name, count, ids, values))
    }

    /// `cuLinkComplete`. Returns the length of the result.
    pub fn complete(&mut self) -> Result<usize> {
        let driver = &self.driver;
        let (mut image, mut bytes) = (core::ptr::null_mut::<c_void>(), 0);
        self.image = None;
        call!(driver.cuLinkComplete(self.state, &raw mut image, &raw mut bytes))?;
        if image.is_null() {
            return Err(code::UNKNOWN);
        }
        self.image = Some((image.expose_provenance(), bytes));
        Ok(bytes)
    }

    /// The result; empty before the link is complete.
    #[must_use]
    pub fn image(&self) -> &[u8] {
        let Some((address, bytes)) = self.image else { return &[] };
        let start = core::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: the driver promises this many bytes, unchanged, until the link is destroyed, which only dropping this value does; a
        // later completion of the link needs this value for itself.
        unsafe { core::slice::from_raw_parts(start, bytes) }
    }

    /// The logs and numbers that the driver has written so far.
    #[must_use]
    pub fn report(&self) -> CompilerReport<'_> {
        self.options.report()
    }
}

impl Drop for DriverLink {
    fn drop(&mut self) {
        let driver = &self.driver;
        if self.state != 0 && call!(driver.cuLinkDestroy(self.state)).is_err() {
            // The driver may write the buffers as long as its link exists.
            core::mem::forget(core::mem::take(&mut self.options));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_carry_numbers_and_buffers_and_report_what_was_written_there() {
        let mut options = CompilerOptions::new(&[(7, 3), (2, 0)], 8, 4).unwrap();
        let (count, ids, values) = options.arguments().unwrap();
        assert_eq!(count, 6);
        // SAFETY: the lists have six elements, and this is the only access to them.
        let ids = unsafe { core::slice::from_raw_parts(ids, 6) };
        // SAFETY: the same.
        let values = unsafe { core::slice::from_raw_parts_mut(values.cast::<usize>(), 6) };
        assert_eq!(ids, [7, 2, 3, 4, 5, 6]);
        assert_eq!((values[0], values[3], values[5]), (3, 8, 4));
        values[1] = 0x3fc0_0000;
        // A driver that fills the whole buffer leaves no NUL, and the reported bytes may be more than the buffer has.
        values[5] = 99;
        let buffer = core::ptr::with_exposed_provenance_mut::<u8>(values[4]);
        // SAFETY: the buffer has four bytes.
        unsafe { buffer.write_bytes(b'x', 4) };
        let report = options.report();
        assert_eq!((report.wall_time, report.threads), (0x3fc0_0000, 0));
        assert_eq!(report.info, LogText { filled: 8, text: b"" });
        assert_eq!(report.error, LogText { filled: 4, text: b"xxx" });
    }

    #[test]
    fn options_without_content_are_null_pointers() {
        let mut options = CompilerOptions::new(&[], 0, 0).unwrap();
        let (count, ids, values) = options.arguments().unwrap();
        assert_eq!((count, ids.is_null(), values.is_null()), (0, true, true));
        assert_eq!(options.report().error, LogText { filled: 0, text: b"" });
    }
}

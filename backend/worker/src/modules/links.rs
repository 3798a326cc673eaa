//! The links of a session, and the host memory that the driver keeps for them.

use super::images::{Report, check_extent, unchecked_copy};
use crate::{arenas::HeldRange, helper::jobs::module};
use sluice_cuda_abi::jit::{self, input};
use sluice_driver::{Code, CompilerOptions, Driver, DriverLink, Handle, code};
use sluice_protocol::limits;
use std::{collections::BTreeMap, sync::Arc};

/// The links by the driver's handle.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: BTreeMap<Handle, LiveLink>,
    /// Bytes of the inputs, logs and results of all links.
    bytes: u64,
}

#[derive(Debug)]
struct LiveLink {
    link: DriverLink,
    /// Bytes of its logs.
    info: u64,
    error: u64,
    inputs: u32,
    /// Bytes of its inputs and its logs.
    bytes: u64,
    /// Bytes of its result.
    image: u64,
}

impl Links {
    pub(super) fn create(&mut self, driver: &Arc<Driver>, args: module::link_create) -> Result<(), Code> {
        let module::link_create { link: id, options, info, error, report } = args;
        let report = Report::new(report, info, error)?;
        let bytes = info.saturating_add(error);
        self.check(bytes)?;
        let (created, link) = DriverLink::create(driver, CompilerOptions::new(&options, info, error)?);
        report.write(&link.report());
        created?;
        let handle = link.handle();
        self.bytes = self.bytes.saturating_add(bytes);
        self.links.insert(handle, LiveLink { link, info, error, inputs: 0, bytes, image: 0 });
        id.fill(handle);
        Ok(())
    }

    pub(super) fn add(&mut self, args: &module::link_add) -> Result<(), Code> {
        let bytes = args.input.bytes();
        let for_input = args.options.iter().all(|(option, _)| jit::is_for_input(*option));
        if args.kind > input::NVVM || !for_input || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.check(bytes)?;
        let known = self.links.get_mut(&args.link).ok_or(code::INVALID_HANDLE)?;
        if known.inputs >= limits::LINK_INPUTS {
            return Err(code::OUT_OF_MEMORY);
        }
        let report = Report::new(args.report.clone(), known.info, known.error)?;
        let copy = unchecked_copy(&args.input)?;
        // The driver reads these as far as they declare, whatever length it is told.
        if matches!(args.kind, input::CUBIN | input::FATBINARY) {
            check_extent(&copy)?;
        }
        let length = usize::try_from(bytes).map_err(|_| code::INVALID_VALUE)?;
        let mut options = CompilerOptions::new(&args.options, 0, 0)?;
        let added = known.link.add(args.kind, &copy, length, &args.name, &mut options);
        report.write(&known.link.report());
        // A refused input counts, too: a driver may keep a part of it until the link ends.
        known.inputs = known.inputs.saturating_add(1);
        known.bytes = known.bytes.saturating_add(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
        added
    }

    /// Links the inputs. Returns the bytes of the result.
    pub(super) fn complete(&mut self, args: module::link_complete) -> Result<u64, Code> {
        let known = self.links.get_mut(&args.link).ok_or(code::INVALID_HANDLE)?;
        let report = Report::new(args.report, known.info, known.error)?;
        let completed = known.link.complete();
        report.write(&known.link.report());
        let bytes = completed? as u64;
        self.bytes = self.bytes.saturating_sub(known.image).saturating_add(bytes);
        known.image = bytes;
        if bytes > limits::IMAGE_BYTES || self.bytes > limits::LINK_BYTES {
            return Err(code::OUT_OF_MEMORY);
        }
        Ok(bytes)
    }

    /// Copies a part of a result to the guest.
    pub(super) fn copy(&self, link: Handle, offset: u64, into: &HeldRange) -> Result<(), Code> {
        let image = self.links.get(&link).ok_or(code::INVALID_HANDLE)?.link.image();
        let part = || {
            let start = usize::try_from(offset).ok()?;
            let end = start.checked_add(usize::try_from(into.bytes()).ok()?)?;
            image.get(start..end)
        };
        into.write(part().ok_or(code::INVALID_VALUE)?);
        Ok(())
    }

    pub(super) fn destroy(&mut self, link: Handle) -> Result<(), Code> {
        let known = self.links.remove(&link).ok_or(code::INVALID_HANDLE)?;
        self.bytes = self.bytes.saturating_sub(known.bytes).saturating_sub(known.image);
        Ok(())
    }

    /// Checks that the links may have so many more bytes.
    fn check(&self, bytes: u64) -> Result<(), Code> {
        if self.bytes.saturating_add(bytes) <= limits::LINK_BYTES { Ok(()) } else { Err(code::OUT_OF_MEMORY) }
    }
}

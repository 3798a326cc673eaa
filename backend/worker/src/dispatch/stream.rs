//! The calls that are work on a stream: each checks its addresses and turns its arguments into an operation.

use super::{Dispatcher, calls::OnStream};
use crate::{memory::address::AddressMap, submit::Operation};
use sluice_driver::{Code, DeviceRange, Rows, code};
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, ElementSize},
};

/// A call that moves no bytes becomes no operation, whatever its addresses: the driver accepts that, too.
fn unless_empty(bytes: u64, operation: Result<Operation, Code>) -> Result<Operation, Code> {
    if bytes == 0 { Ok(Operation::Nothing) } else { operation }
}

impl OnStream for Dispatcher {
    fn memcpy_htod(&self, args: &wire::memcpy_htod::Args) -> Result<Operation, Code> {
        let bytes = args.from.bytes;
        let (to, from) = (self.map.device(args.to.0, bytes), self.map.host(args.from.address, bytes));
        unless_empty(bytes, to.and_then(|to| Ok(Operation::MemcpyHtod { to, from: from? })))
    }

    fn memcpy_dtoh(&self, args: &wire::memcpy_dtoh::Args) -> Result<Operation, Code> {
        let bytes = args.to.bytes;
        let (to, from) = (self.map.host(args.to.address, bytes), self.map.device(args.from.0, bytes));
        unless_empty(bytes, to.and_then(|to| Ok(Operation::MemcpyDtoh { to, from: from? })))
    }

    fn memcpy_dtod(&self, args: &wire::memcpy_dtod::Args) -> Result<Operation, Code> {
        let (to, from) = (self.map.device(args.to.0, args.bytes), self.map.device(args.from.0, args.bytes));
        unless_empty(args.bytes, to.and_then(|to| Ok(Operation::MemcpyDtod { to, from: from? })))
    }

    fn memcpy_2d_htod(&self, args: &wire::memcpy_2d_htod::Args) -> Result<Operation, Code> {
        let from = args.from;
        let Some([rows, from_rows]) = rows([args.to_pitch, from.pitch], from.width, from.height) else {
            return Ok(Operation::Nothing);
        };
        Ok(Operation::Memcpy2dHtod {
            to: (self.map.device_rows(args.to.0, rows)?, rows.pitch),
            from: (self.map.host_rows(from.address, from_rows)?, from_rows.pitch),
            rows,
        })
    }

    fn memcpy_2d_dtoh(&self, args: &wire::memcpy_2d_dtoh::Args) -> Result<Operation, Code> {
        let to = args.to;
        let Some([rows, from_rows]) = rows([to.pitch, args.from_pitch], to.width, to.height) else {
            return Ok(Operation::Nothing);
        };
        Ok(Operation::Memcpy2dDtoh {
            to: (self.map.host_rows(to.address, rows)?, rows.pitch),
            from: (self.map.device_rows(args.from.0, from_rows)?, from_rows.pitch),
            rows,
        })
    }

    fn memcpy_2d_dtod(&self, args: &wire::memcpy_2d_dtod::Args) -> Result<Operation, Code> {
        let Some([rows, from_rows]) = rows([args.to_pitch, args.from_pitch], args.width, args.height) else {
            return Ok(Operation::Nothing);
        };
        Ok(Operation::Memcpy2dDtod {
            to: (self.map.device_rows(args.to.0, rows)?, rows.pitch),
            from: (self.map.device_rows(args.from.0, from_rows)?, from_rows.pitch),
            rows,
        })
    }

    fn memset(&self, args: &wire::memset::Args) -> Result<Operation, Code> {
        if args.width == 0 || args.height == 0 {
            return Ok(Operation::Nothing);
        }
        let (to, rows) = filled(&self.map, args.to, args.element, (args.pitch, args.width, args.height))?;
        Ok(Operation::Memset { to, element: args.element as u32, value: args.value, rows })
    }

    fn stream_write_value(&self, args: &wire::stream_write_value::Args) -> Result<Operation, Code> {
        let bytes = if args.wide { 8 } else { 4 };
        if !args.to.0.is_multiple_of(bytes) {
            return Err(code::INVALID_VALUE);
        }
        Ok(Operation::WriteValue { to: self.map.device(args.to.0, bytes)?, value: args.value })
    }

    fn stream_wait_value(&self, args: &wire::stream_wait_value::Args) -> Result<Operation, Code> {
        /// `CU_STREAM_WAIT_VALUE_NOR`.
        const LAST_COMPARISON: u32 = 3;
        let bytes = if args.wide { 8 } else { 4 };
        if !args.at.0.is_multiple_of(bytes) || args.comparison > LAST_COMPARISON {
            return Err(code::INVALID_VALUE);
        }
        let at = self.map.device(args.at.0, bytes)?;
        Ok(Operation::WaitValue { at, value: args.value, comparison: args.comparison })
    }

    fn stream_barrier(&self, args: &wire::stream_barrier::Args) -> Result<Operation, Code> {
        /// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`.
        const LAST_KIND: u32 = 1;
        if args.kind > LAST_KIND {
            Err(code::INVALID_VALUE)
        } else {
            Ok(Operation::Barrier { kind: args.kind })
        }
    }

    fn stream_wait(&self, args: &wire::stream_wait::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::Wait { event: event.handle })
    }

    fn context_record(&self, args: &wire::context_record::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::ContextRecord { event: event.handle })
    }

    fn host_call(&self, args: &wire::host_call::Args) -> Result<Operation, Code> {
        Ok(Operation::HostCall { token: args.token })
    }

    fn event_record(&self, args: &wire::event_record::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::Record { event: event.handle })
    }
}

/// The same rows with two pitches; `None` if they are empty.
fn rows(pitches: [u64; 2], width: u64, height: u64) -> Option<[Rows; 2]> {
    (width > 0 && height > 0).then(|| pitches.map(|pitch| Rows { pitch, width, height }))
}

/// The memory of a fill, and its rows of elements.
pub(super) fn filled(
    map: &AddressMap,
    DeviceAddress(to): DeviceAddress,
    element: ElementSize,
    (pitch, width, height): (u64, u64, u64),
) -> Result<(DeviceRange, Rows), Code> {
    let each = element.bytes();
    let bytes = width.checked_mul(each).ok_or(code::INVALID_VALUE)?;
    if !to.is_multiple_of(each) || (height > 1 && !pitch.is_multiple_of(each)) {
        return Err(code::INVALID_VALUE);
    }
    let to = map.device_rows(to, Rows { pitch, width: bytes, height })?;
    Ok((to, Rows { pitch, width, height }))
}

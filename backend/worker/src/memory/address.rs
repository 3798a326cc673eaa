//! The addresses of this process that a guest may name.
//!
//! With unified addressing a number from a guest could name the worker's own memory. So every range is looked up here, in
//! whole, before the driver receives it: [`DeviceRange`] and [`HostRange`] ranges are made nowhere else. The known ranges are live device
//! allocations, variables of loaded modules, and attached arenas.
//!
//! An allocation stands here and in [`crate::memory::Memory`]. This map is a table of capabilities, which the dispatcher alone owns and
//! reads for every copy and launch without a lock. The other one is the allocator's book, which the memory helper locks while it waits for
//! the driver.

#![expect(unsafe_code, reason = "guarantees the ranges that it has looked up")]

use crate::{
    arenas::{Arena, HeldRange},
    session::objects::ContextRef,
};
use sluice_driver::{Code, Rows, code};
use sluice_driver::{DeviceRange, HostRange};
use sluice_protocol::{
    field::DeviceAddress,
    handle::{Id, Module},
};
use std::{collections::BTreeMap, sync::Arc};

/// The session's address map; owned by the dispatcher.
#[derive(Debug, Default)]
pub(crate) struct AddressMap {
    /// Live allocations: address to bytes and the context of the allocation.
    allocations: BTreeMap<u64, (u64, ContextRef)>,
    /// Variables: address to bytes, their module or library, and the context in which they are; none for the managed variables of a
    /// library, which all contexts share.
    globals: BTreeMap<u64, (u64, Id<Module>, Option<ContextRef>)>,
    /// Mappings of the guest's own that it may access: address to bytes, and the device of the memory.
    reachable: BTreeMap<u64, (u64, i32)>,
    /// Attached arenas by address.
    arenas: BTreeMap<u64, Arc<Arena>>,
}

/// The place of memory that a guest may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryPlace {
    /// Memory of a context.
    Context(ContextRef),
    /// Memory of a device that the guest mapped itself.
    Device(i32),
}

/// True if `address + bytes` lies inside `base + length`, without overflow.
fn inside(address: u64, bytes: u64, base: u64, length: u64) -> bool {
    address.checked_sub(base).is_some_and(|offset| offset <= length && bytes <= length - offset)
}

impl AddressMap {
    pub(crate) fn allocated(&mut self, address: u64, bytes: u64, context: ContextRef) {
        self.allocations.insert(address, (bytes, context));
    }

    /// Removes the variables and allocations of a context that is being destroyed, and returns the addresses of the allocations.
    pub(crate) fn context_gone(&mut self, context: ContextRef) -> Vec<u64> {
        self.globals.retain(|_, (_, _, owner)| *owner != Some(context));
        self.allocations
            .extract_if(.., |_, (_, owner)| *owner == context)
            .map(|(address, _)| address)
            .collect()
    }

    /// Removes an allocation; only its first address is valid.
    pub(crate) fn freed(&mut self, address: DeviceAddress) -> Result<(), Code> {
        self.allocations.remove(&address.0).map(|_| ()).ok_or(code::INVALID_VALUE)
    }

    /// Makes mappings of the guest's own accessible, or inaccessible.
    pub(crate) fn reach(&mut self, address: u64, bytes: u64, device: i32, may: bool) {
        if may {
            self.reachable.insert(address, (bytes, device));
        } else {
            self.unmapped(address, bytes);
        }
    }

    /// The place of the memory at an address; `None` for memory of the host, and for managed memory that belongs to no context.
    pub(crate) fn place(&self, DeviceAddress(address): DeviceAddress) -> Option<MemoryPlace> {
        fn at<T>(ranges: &BTreeMap<u64, T>, address: u64, bytes: impl Fn(&T) -> u64) -> Option<&T> {
            let (base, found) = ranges.range(..=address).next_back()?;
            (address - base < bytes(found)).then_some(found)
        }
        let allocation = || at(&self.allocations, address, |found| found.0).map(|found| found.1);
        let global = || at(&self.globals, address, |found| found.0).and_then(|found| found.2);
        let mapping = || at(&self.reachable, address, |found| found.0);
        let context = allocation().or_else(global).map(MemoryPlace::Context);
        context.or_else(|| mapping().map(|found| MemoryPlace::Device(found.1)))
    }

    /// Removes the mappings of the guest's own that touch a range.
    pub(crate) fn unmapped(&mut self, address: u64, bytes: u64) {
        let Some(end) = address.checked_add(bytes) else { return };
        let before = self.reachable.range(..address).next_back();
        let first =
            before.filter(|(base, (length, _))| **base + length > address).map_or(address, |(base, _)| *base);
        self.reachable.retain(|base, _| *base < first || *base >= end);
    }

    /// True if a range lies in mappings of the guest's own, which may be adjacent.
    fn is_reachable(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let Some((first, _)) = self.reachable.range(..=address).next_back() else { return false };
        let mut covered = *first;
        for (base, (length, _)) in self.reachable.range(*first..) {
            if *base > covered || covered >= end {
                break;
            }
            covered = covered.max(base.saturating_add(*length));
        }
        address < covered && covered >= end
    }

    pub(crate) fn global(
        &mut self,
        module: Id<Module>,
        context: Option<ContextRef>,
        address: u64,
        bytes: u64,
    ) {
        self.globals.insert(address, (bytes, module, context));
    }

    /// Removes the variables of a module, or those of a library in all contexts.
    pub(crate) fn module_gone(&mut self, module: Id<Module>) {
        self.globals.retain(|_, (_, owner, _)| *owner != module);
    }

    pub(crate) fn adopted(&mut self, arena: Arc<Arena>) {
        self.arenas.insert(arena.base(), arena);
    }

    /// Removes the arena of a slot.
    pub(crate) fn detached(&mut self, slot: u32) -> Option<Arc<Arena>> {
        let base = self.arenas.values().find(|arena| arena.slot() == slot)?.base();
        self.arenas.remove(&base)
    }

    /// A range for device work: inside one allocation, one variable, or arenas.
    pub(crate) fn device(&self, address: u64, bytes: u64) -> Result<DeviceRange, Code> {
        let in_allocation = || {
            self.allocations
                .range(..=address)
                .next_back()
                .is_some_and(|(base, (length, _))| inside(address, bytes, *base, *length))
        };
        let in_global = || {
            self.globals
                .range(..=address)
                .next_back()
                .is_some_and(|(base, (length, _, _))| inside(address, bytes, *base, *length))
        };
        // In a gathered arena the device would access private memory instead of the guest's.
        let in_place =
            || self.holders(address, bytes).is_ok_and(|mut arenas| arenas.all(|arena| arena.is_in_place()));
        let reachable = || self.is_reachable(address, bytes);
        (in_allocation() || in_global() || reachable() || in_place())
            .then_some(())
            .ok_or(code::INVALID_VALUE)?;
        // SAFETY: looked up above; the memory stays until the guest has waited for the work that uses it.
        Ok(unsafe { DeviceRange::new(address, bytes) })
    }

    /// A range of arena memory; larger arenas are stitched from several resources, so it may cross their borders.
    pub(crate) fn host(&self, address: u64, bytes: u64) -> Result<HostRange, Code> {
        let _ = self.holders(address, bytes)?;
        // SAFETY: looked up above; arenas stay mapped until no work holds them, and no Rust reference points into them.
        Ok(unsafe { HostRange::new(address, bytes) })
    }

    /// A range of arena memory that the device itself accesses.
    pub(crate) fn pinned(&self, address: u64, bytes: u64) -> Result<HostRange, Code> {
        if !self.holders(address, bytes)?.all(|arena| arena.is_in_place()) {
            return Err(code::NOT_SUPPORTED);
        }
        self.host(address, bytes)
    }

    /// The arenas that a range touches, in order.
    fn holders(&self, address: u64, bytes: u64) -> Result<impl Iterator<Item = &Arc<Arena>>, Code> {
        let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let first = self.arenas.range(..=address).next_back().ok_or(code::INVALID_VALUE)?;
        let mut covered = *first.0;
        let mut last = covered;
        for (base, arena) in self.arenas.range(*first.0..) {
            if *base != covered {
                break;
            }
            // Arenas lie inside `WINDOW_BOUNDS`, so their ends cannot overflow.
            covered = base.saturating_add(arena.bytes());
            last = *base;
            if covered >= end {
                break;
            }
        }
        if covered < end || (bytes == 0 && address > covered) {
            return Err(code::INVALID_VALUE);
        }
        Ok(self.arenas.range(*first.0..=last).map(|(_, arena)| arena))
    }

    /// A range of arena memory together with the arenas that keep it mapped, for another thread.
    pub(crate) fn hold(&self, address: u64, bytes: u64) -> Result<HeldRange, Code> {
        if bytes == 0 {
            // SAFETY: it is empty.
            return Ok(HeldRange::new(unsafe { HostRange::new(address, 0) }, Vec::new()));
        }
        let arenas = self.holders(address, bytes)?.cloned().collect();
        // SAFETY: looked up above, and the arenas are held with it.
        Ok(HeldRange::new(unsafe { HostRange::new(address, bytes) }, arenas))
    }

    /// Rows of device memory.
    pub(crate) fn device_rows(&self, address: u64, rows: Rows) -> Result<DeviceRange, Code> {
        self.device(address, span(rows)?)
    }

    /// Rows of arena memory.
    pub(crate) fn host_rows(&self, address: u64, rows: Rows) -> Result<HostRange, Code> {
        self.host(address, span(rows)?)
    }
}

/// Bytes from the first byte of the first row to the last of the last.
pub(crate) fn span(rows: Rows) -> Result<u64, Code> {
    if rows.height > 1 && rows.pitch < rows.width {
        return Err(code::INVALID_VALUE);
    }
    let Some(before_last) = rows.height.checked_sub(1) else { return Ok(0) };
    before_last
        .checked_mul(rows.pitch)
        .and_then(|bytes| bytes.checked_add(rows.width))
        .ok_or(code::INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(slot: u32, base: u64, bytes: u64) -> Arc<Arena> {
        Arc::new(Arena::for_test(slot, base, bytes))
    }

    #[test]
    fn device_range_outside_one_live_allocation_is_refused() {
        let mut map = AddressMap::default();
        let context = ContextRef { handle: 1, serial: 1 };
        map.allocated(0x1000, 0x100, context);
        map.allocated(0x1100, 0x100, ContextRef { handle: 1, serial: 2 });
        assert!(map.device(0x1000, 0x100).is_ok());
        assert!(map.device(0x10ff, 1).is_ok());
        assert_eq!(map.device(0x1000, 0x101), Err(code::INVALID_VALUE), "crosses into a neighbour");
        assert_eq!(map.device(0xfff, 1), Err(code::INVALID_VALUE));
        assert_eq!(map.device(0x1010, u64::MAX), Err(code::INVALID_VALUE), "would overflow");
        assert_eq!(map.device(u64::MAX, 2), Err(code::INVALID_VALUE));
        assert_eq!(map.freed(DeviceAddress(0x1001)), Err(code::INVALID_VALUE), "not the first address");
        assert_eq!(map.freed(DeviceAddress(0x1000)), Ok(()));
        assert_eq!(map.freed(DeviceAddress(0x1000)), Err(code::INVALID_VALUE), "freed twice");
        assert_eq!(map.device(0x1000, 1), Err(code::INVALID_VALUE));
        map.allocated(0x1000, 0x100, context);
        assert_eq!(map.context_gone(context), [0x1000]);
        assert!(map.device(0x1100, 1).is_ok(), "another context's");
    }

    #[test]
    fn device_range_may_cross_adjacent_mappings_of_the_guest() {
        let mut map = AddressMap::default();
        map.reach(0x1000, 0x1000, 0, true);
        map.reach(0x2000, 0x1000, 0, true);
        map.reach(0x4000, 0x1000, 1, true);
        assert!(map.device(0x1800, 0x1000).is_ok());
        assert_eq!(map.device(0x2800, 0x1000), Err(code::INVALID_VALUE), "not mapped");
        assert_eq!(map.device(0xfff, 2), Err(code::INVALID_VALUE));
        map.unmapped(0x2000, 0x1000);
        assert!(map.device(0x1000, 0x1000).is_ok());
        assert_eq!(map.device(0x1800, 0x1000), Err(code::INVALID_VALUE), "unmapped");
        assert_eq!(map.place(DeviceAddress(0x4fff)), Some(MemoryPlace::Device(1)));
        assert_eq!(map.place(DeviceAddress(0x3000)), None);
        map.reach(0x4000, 0x1000, 1, false);
        assert_eq!(map.device(0x4000, 1), Err(code::INVALID_VALUE), "no access");
    }

    // Promise: C128
    #[test]
    fn variables_end_with_their_module_or_their_context() {
        let mut map = AddressMap::default();
        let (one, two) = (Id::new(1, 1), Id::new(2, 1));
        let [here, there] = [1, 2].map(|serial| ContextRef { handle: 1, serial });
        map.global(one, Some(here), 0x5000, 16);
        map.global(two, Some(here), 0x6000, 16);
        map.global(two, Some(there), 0x7000, 16);
        map.global(two, None, 0x8000, 16);
        map.module_gone(one);
        assert_eq!(map.device(0x5000, 1), Err(code::INVALID_VALUE));
        assert!(map.device(0x6000, 16).is_ok());
        assert!(map.context_gone(here).is_empty());
        assert_eq!(map.device(0x6000, 1), Err(code::INVALID_VALUE));
        assert!(map.device(0x7000, 16).is_ok(), "another context's");
        assert!(map.device(0x8000, 16).is_ok(), "no context's");
        map.module_gone(two);
        assert_eq!(map.device(0x7000, 1), Err(code::INVALID_VALUE));
        assert_eq!(map.device(0x8000, 1), Err(code::INVALID_VALUE));
    }

    #[test]
    fn host_range_may_cross_adjacent_arenas_but_no_gap() {
        let mut map = AddressMap::default();
        map.adopted(arena(1, 0x10_0000, 0x1000));
        map.adopted(arena(2, 0x10_1000, 0x1000));
        map.adopted(arena(3, 0x10_3000, 0x1000));
        assert!(map.host(0x10_0800, 0x1000).is_ok());
        assert!(map.host(0x10_0000, 0x2000).is_ok());
        assert_eq!(map.host(0x10_0000, 0x2001), Err(code::INVALID_VALUE));
        assert_eq!(map.host(0x10_1000, 0x2000), Err(code::INVALID_VALUE), "not mapped");
        assert_eq!(map.host(0x10_3fff, 2), Err(code::INVALID_VALUE));
        assert!(map.device(0x10_3000, 0x1000).is_ok(), "pinned memory is device memory too");
        assert_eq!(map.detached(2).map(|arena| arena.slot()), Some(2));
        assert_eq!(map.host(0x10_0800, 0x1000), Err(code::INVALID_VALUE));
    }

    #[test]
    fn span_of_rows_is_checked_for_overflow() {
        assert_eq!(span(Rows { pitch: 64, width: 10, height: 3 }), Ok(138));
        assert_eq!(span(Rows { pitch: 0, width: 10, height: 1 }), Ok(10));
        assert_eq!(span(Rows { pitch: 4, width: 10, height: 2 }), Err(code::INVALID_VALUE), "rows overlap");
        assert_eq!(span(Rows { pitch: u64::MAX, width: 10, height: 3 }), Err(code::INVALID_VALUE));
        assert_eq!(span(Rows { pitch: 64, width: 10, height: 0 }), Ok(0));
    }
}

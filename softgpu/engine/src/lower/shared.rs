//! The places of static shared variables. A kernel is charged for those that it and its functions name, and for no other.

use std::collections::HashMap;

use super::Res;
use crate::api::{LoadError, LoadErrorKind};
use crate::ptx::Variable;

/// The most shared memory of a kernel that a text can ask for. A launch allows less.
const MOST: u32 = 1 << 20;

/// A shared variable of a module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedVariable {
    /// Its number among those of all units.
    pub(crate) index: u32,
    pub(crate) bytes: u64,
    pub(crate) align: u32,
}

/// A layout: that of all functions, or that of one kernel.
#[derive(Debug, Default)]
pub(crate) struct SharedLayout {
    /// The next free byte.
    next: u32,
    /// Begin and end of each variable of the module that was named.
    places: HashMap<u32, (u32, u32)>,
    /// The end of the last variable that the function in hand names.
    needed: u32,
}

impl SharedLayout {
    /// The layout of a kernel whose functions need the first bytes of this one, which is that of functions.
    pub(crate) fn for_kernel(&self, needed: u32) -> SharedLayout {
        let places = self.places.iter().filter(|(_, (_, end))| *end <= needed);
        SharedLayout { next: needed, places: places.map(|(index, place)| (*index, *place)).collect(), needed }
    }

    /// Bytes up to the last variable.
    pub(crate) fn bytes(&self) -> u32 {
        self.next
    }

    /// Begins with another function. Returns the bytes that the last one needs.
    pub(crate) fn begin_function(&mut self) -> u32 {
        std::mem::take(&mut self.needed)
    }

    /// Places a variable that a function declares.
    pub(super) fn declared(&mut self, v: &Variable<'_>) -> Res<u32> {
        self.place(v.size, v.align, v.line, v.name)
    }

    /// The place of a variable of the module.
    pub(super) fn named(&mut self, v: SharedVariable, line: u32, name: &str) -> Res<u32> {
        let (at, end) = match self.places.get(&v.index) {
            Some(place) => *place,
            None => {
                let at = self.place(v.bytes, v.align, line, name)?;
                self.places.insert(v.index, (at, self.next));
                (at, self.next)
            }
        };
        self.needed = self.needed.max(end);
        Ok(at)
    }

    fn place(&mut self, bytes: u64, align: u32, line: u32, name: &str) -> Res<u32> {
        let at = self.next.next_multiple_of(align.max(1));
        match u32::try_from(bytes).ok().and_then(|bytes| at.checked_add(bytes)).filter(|end| *end <= MOST) {
            Some(end) => {
                self.next = end;
                self.needed = self.needed.max(end);
                Ok(at)
            }
            None => {
                let message = format!("shared variable {name} is too large");
                Err(LoadError { kind: LoadErrorKind::Syntax, line, message })
            }
        }
    }
}

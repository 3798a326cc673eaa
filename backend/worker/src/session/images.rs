//! Arrays and the references to images: the worker's objects behind their ids.
//!
//! The dispatcher owns them and looks boxes of copies up in their shapes; the module helper makes the driver's objects that they
//! name. An array keeps its shape, so that it could be made again. Nothing here calls the driver.

use crate::session::{objects::ContextRef, shape::ArrayShape};
use sluice_driver::{Handle, ImageMemory};
use sluice_protocol::handle::{Array, Id, MipmappedArray, Module};
use std::collections::HashSet;

/// An array, or a level of a mipmapped array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestArray {
    pub(crate) handle: Handle,
    pub(crate) context: ContextRef,
    pub(crate) shape: ArrayShape,
    /// The array of which it is a level.
    pub(crate) level_of: Option<Id<MipmappedArray>>,
}

/// An array with mipmap levels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestMipmapped {
    pub(crate) handle: Handle,
    pub(crate) context: ContextRef,
    pub(crate) shape: ArrayShape,
}

/// The same in the dispatcher's table. Jobs go without the levels, of which there may be as many as arrays.
#[derive(Debug)]
pub(crate) struct MipmappedEntry {
    pub(crate) of: GuestMipmapped,
    /// Arrays that name its levels, and end with it.
    pub(crate) levels: HashSet<Id<Array>>,
    /// Number of names that were requested.
    pub(crate) names: u32,
}

/// A texture or surface reference of a module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestReference {
    pub(crate) handle: Handle,
    pub(crate) module: Id<Module>,
    pub(crate) context: ContextRef,
}

/// The memory of a texture, with the context of its array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResolvedImage {
    /// `None` for a reference without memory.
    pub(crate) memory: Option<ImageMemory>,
    pub(crate) context: Option<ContextRef>,
}

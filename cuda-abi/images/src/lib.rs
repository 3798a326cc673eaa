//! CUDA arrays, textures and surfaces as a program describes them.
//!
//! Descriptors, their checks with the driver's codes, the extents of levels, the state of texture references, and the answers of all
//! getters need no GPU. So one implementation serves the guest's `libcuda.so.1` and the software GPU's. Each of them is an
//! [`ImageDriver`]: it keeps the storage of arrays, and makes the objects that kernels read.
//!
//! - [`Images`]: the functions of the C interface, which [`array_functions!`], [`object_functions!`] and [`reference_functions!`] list for
//!   a library;
//! - [`ImageShape`], [`Texel`], [`Limits`]: extents, elements, and the attributes that bound them;
//! - [`texture`]: textures, surfaces and views; [`mod@reference`]: texture references;
//! - [`ImageDriver`]: a library, which supplies [`ArrayDriver`], [`ObjectDriver`] and [`ReferenceDriver`].
//!
//! The crate runs in the process of a program and trusts it as C does. It knows nothing of transport, sessions or devices, and it
//! never waits.

mod calls;
mod driver;
mod limits;
pub mod reference;
pub mod shape;
mod texel;
pub mod texture;

pub use calls::{ArrayDriver, Images, ObjectDriver, ReferenceDriver};
pub use driver::ImageDriver;
pub use limits::Limits;
pub use shape::{ArrayBox, ArrayKind, ImageShape};
pub use texel::{Component, Texel};
pub use texture::{
    AddressMode, ArrayResource, FilterMode, Linear, Pitched, Resource, Sampling, Texture, View,
};

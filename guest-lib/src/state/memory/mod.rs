//! Memory: device addresses, memory shared with the worker, pools, and the virtual-memory API.
//!
//! The functions of the C API call it, and the modules for images and variables. It owns every address that the program was
//! given. It never waits for work of the device while it holds a lock, and never ends a context.

pub(crate) mod arena;
pub(crate) mod blocks;
pub(crate) mod device_map;
pub(crate) mod imports;
pub(crate) mod managed;
pub(crate) mod pools;
pub(crate) mod registered;
pub(crate) mod variables;
pub(crate) mod windows;

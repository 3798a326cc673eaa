//! The contract between guest and host, byte by byte and word by word.

mod device_wire;
mod driver_symbols;
mod graph;
mod loom;
mod memory;
mod resources;
mod session_memory;
mod stream;
mod wire_calls;

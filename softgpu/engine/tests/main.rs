//! Kernels and single instructions, compared with plain Rust.

mod accesses;
mod accuracy;
mod common;
mod extensions;
mod hostile;
mod images;
mod kernels;
mod machine;
mod newer;
mod ops;
mod schedule;
mod stack;
mod targets;

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
mod sparse;
mod stack;
mod targets;
mod verdicts;

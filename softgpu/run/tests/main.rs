//! `softgpu-run` with programs that use the software GPU, and with shells.
//!
//! The libraries must have been built with the same profile, by `cargo build --workspace`.

mod program;
mod run;

//! The device by itself on a mock queue, and as a process between played peers.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

mod blocked;
mod commands;
mod common;
mod direct;
mod flat;
mod memory;
mod program;
mod users;

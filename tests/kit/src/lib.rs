//! The played peers and the waits of tests, each once. The tests of a crate and of the whole system use it; no product does.
//! A wrong answer of a real peer is a panic, which fails the test.

#![allow(missing_docs, clippy::cast_possible_truncation, reason = "only tests use it, with small numbers")]

pub mod budgets;
pub mod counts;
pub mod escape;
pub mod figures;
pub mod front_end;
pub mod guest;
pub mod processes;
pub mod service_manager;
pub mod trace;
pub mod wait;

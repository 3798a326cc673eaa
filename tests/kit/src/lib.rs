//! The parts that tests of several crates share: fake peers ([`guest`], [`front_end`], [`service_manager`]), processes and waits for
//! them ([`processes`], [`wait`]), counted work with its budgets ([`counts`], [`trace`], [`figures`],
//! [`budgets`]), the expected results of a hostile program ([`escape`]), and the abilities of the machine ([`machine`]).
//!
//! The tests of a crate and of the whole system call it; no product does. A wrong answer of a real peer is a panic, which fails the test.

#![allow(missing_docs, clippy::cast_possible_truncation, reason = "only tests use it, with small numbers")]

pub mod budgets;
pub mod counts;
pub mod escape;
pub mod figures;
pub mod front_end;
pub mod guest;
pub mod machine;
pub mod processes;
pub mod service_manager;
pub mod trace;
pub mod wait;

//! The questions, in files by subject. Each stands beside its expected answer and its consequence.

pub(crate) mod header;
pub(crate) mod self_test;

mod address;
mod cost;
mod host_memory;
mod share;
mod time;

use crate::step::Question;

/// All questions, in order of worth.
pub(crate) const ALL: &[&[Question]] =
    &[share::QUESTIONS, cost::QUESTIONS, address::QUESTIONS, host_memory::QUESTIONS, time::QUESTIONS];

//! The questions, in files by subject.
//!
//! The runner asks them one by one, each in a process of its own. A question owns its calls of the driver, and never changes a setting
//! of the GPU. Each stands beside its expected answer and its consequence.

pub(crate) mod header;
pub(crate) mod self_test;

mod address;
mod codes;
mod cost;
mod headroom;
mod host_memory;
mod modules;
mod remnants;
mod share;
mod system_calls;
mod time;

use crate::step::Question;

/// All questions, in order of worth.
pub(crate) const ALL: &[&[Question]] = &[
    share::QUESTIONS,
    host_memory::QUESTIONS,
    system_calls::QUESTIONS,
    cost::QUESTIONS,
    address::QUESTIONS,
    headroom::QUESTIONS,
    time::QUESTIONS,
    remnants::QUESTIONS,
    modules::QUESTIONS,
    codes::QUESTIONS,
];

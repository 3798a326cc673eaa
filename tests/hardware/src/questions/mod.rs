//! The questions, in files by subject. Each stands beside its expected answer and its consequence.

pub(crate) mod header;
pub(crate) mod self_test;

mod share;

use crate::step::Question;

/// All questions, in order of worth.
pub(crate) const ALL: &[&[Question]] = &[share::QUESTIONS];

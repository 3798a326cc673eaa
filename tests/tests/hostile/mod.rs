//! Hostile guests on the whole path: a front-end that sends any message, to real `sluiced`, device and worker processes with
//! their filters on, beside a neighbour that computes without a pause and checks every result.

#![allow(clippy::cast_possible_truncation, reason = "offsets in the memory of a 64-bit guest")]

mod guest;
mod scene;

mod arguments;
mod attachments;
mod descriptors;
mod floods;
mod records;

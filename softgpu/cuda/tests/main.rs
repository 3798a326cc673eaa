//! The driver through its C interface.

#![allow(unsafe_code, reason = "calls the C interface")]

mod capability;
mod compute;
mod confined;
// Runs: alone
mod fairness;
mod faults;
mod graphs;
mod headroom;
mod images;
mod instances;
mod managed;
mod memory;
mod order;
mod pools;
mod processes;
mod remnants;
mod support;

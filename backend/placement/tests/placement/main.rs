//! The rules of placement against brute force, against simulated arrivals, and against random histories.

mod axis;
mod batch;
mod geometries;
mod simulation;

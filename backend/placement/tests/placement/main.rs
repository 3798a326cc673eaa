//! The rules of placement against brute force, against simulated arrivals, and against random histories.

mod axis;
mod batch;
mod capacity;
mod choice;
mod cost;
mod geometries;
mod histories;
mod life;
mod moving;
mod simulation;

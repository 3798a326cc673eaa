//! The program itself, confined, on the software GPU's management library.

mod common;
mod inventory;
mod placement;

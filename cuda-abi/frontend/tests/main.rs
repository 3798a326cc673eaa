//! The front end, called as a C program calls it.

mod tables;
mod trace;

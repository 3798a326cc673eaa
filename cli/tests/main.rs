//! The command line with the real daemon and launcher; the other processes are stand-ins.

mod commands;
mod common;
mod sluice;

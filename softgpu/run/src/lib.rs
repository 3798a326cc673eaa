//! Runs one program with other CUDA libraries in front of the system's, and ends as the program ends.
//!
//! `softgpu-run` and `sluice run` call it. It owns the search for installed files, the signals of a supervisor and the wait for a
//! program. It never changes a file outside the directories that its caller gives it.

mod files;
mod program;
mod signals;

pub use files::InstalledFile;
pub use program::{Companion, ProgramEnd, StartError, descriptor, offer_driver, run, search_first};
pub use signals::{Signal, Signals};

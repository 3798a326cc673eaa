//! The parts that several fuzz targets use.

pub mod input;
pub mod worker;

//! Devices that several processes share.

mod instances;
mod sharing;
mod storage;

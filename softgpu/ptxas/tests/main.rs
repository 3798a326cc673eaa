//! `softgpu-ptxas` as its callers start it, and its files in the driver.

mod assemble;

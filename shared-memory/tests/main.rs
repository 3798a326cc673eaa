//! Messages with descriptors, and pages that another party changes.

mod mapping;
mod socket;

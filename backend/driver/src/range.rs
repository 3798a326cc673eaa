//! Ranges of memory that driver calls may touch.
//!
//! A wrong range makes the driver read or write other memory, this process's own included. So only code that checks
//! addresses creates ranges.

#![expect(unsafe_code, reason = "declares the conditions for creating a range")]

/// A range of device memory for work of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    address: u64,
    bytes: u64,
}

/// A range of host memory that the driver may read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    address: u64,
    bytes: u64,
}

macro_rules! range {
    ($($name:ident)+) => {$(
        impl $name {
            /// Creates a range.
            ///
            /// # Safety
            /// All of it is memory that is lent to the driver until the work that uses it is complete, and no Rust
            /// reference to it exists.
            #[must_use]
            pub const unsafe fn new(address: u64, bytes: u64) -> $name {
                $name { address, bytes }
            }
            /// Address of the first byte.
            #[must_use]
            pub const fn address(self) -> u64 {
                self.address
            }
            /// Length in bytes.
            #[must_use]
            pub const fn bytes(self) -> u64 {
                self.bytes
            }
        }
    )+};
}
range!(DeviceRange HostRange);

//! Ranges of memory that driver calls may touch.
//!
//! A wrong range makes the driver read or write other memory, this process's own included. So ranges are made where addresses
//! are checked, and nowhere else.

#![expect(unsafe_code, reason = "declares what whoever makes a range has to know")]

/// A range that device work may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    address: u64,
    bytes: u64,
}

/// A range of host memory that the driver may read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    address: u64,
    bytes: u64,
}

macro_rules! range {
    ($($name:ident)+) => {$(
        impl $name {
            /// The range.
            ///
            /// # Safety
            /// All of it is memory that is lent to the driver until the work it is used for is complete, and that nobody
            /// holds a Rust reference to.
            #[must_use]
            pub const unsafe fn new(address: u64, bytes: u64) -> $name {
                $name { address, bytes }
            }
            /// First address.
            #[must_use]
            pub const fn address(self) -> u64 {
                self.address
            }
            /// Bytes.
            #[must_use]
            pub const fn bytes(self) -> u64 {
                self.bytes
            }
        }
    )+};
}
range!(Device Host);

//! The kernels of the steps, as PTX texts. Every parameter is a 64-bit number.

use core::ffi::CStr;

use serde::{Deserialize, Serialize};

/// A module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Image {
    /// Kernels that wait, look at the clock, or write a word.
    Work,
    /// Kernels that leave values in a multiprocessor and look for them.
    Remnants,
    /// A global of 4 KiB, `table`.
    Small,
    /// A global of 64 MiB, `table`.
    Large,
}

impl Image {
    /// The text, which ends with its NUL.
    pub(crate) fn text(self) -> &'static [u8] {
        match self {
            Image::Work => concat!(include_str!("kernels/work.ptx"), "\0").as_bytes(),
            Image::Remnants => concat!(include_str!("kernels/remnants.ptx"), "\0").as_bytes(),
            Image::Small => concat!(include_str!("kernels/small.ptx"), "\0").as_bytes(),
            Image::Large => concat!(include_str!("kernels/large.ptx"), "\0").as_bytes(),
        }
    }
}

/// Memory of a multiprocessor in which a value may remain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scratch {
    /// Dynamic shared memory.
    Shared,
    /// Local memory.
    Local,
    /// Registers.
    Registers,
}

impl Scratch {
    /// Name of the kernel that leaves a value.
    pub(crate) const fn filler(self) -> &'static CStr {
        match self {
            Scratch::Shared => c"fill_shared",
            Scratch::Local => c"fill_local",
            Scratch::Registers => c"fill_registers",
        }
    }

    /// Name of the kernel that looks for it.
    pub(crate) const fn looker(self) -> &'static CStr {
        match self {
            Scratch::Shared => c"look_shared",
            Scratch::Local => c"look_local",
            Scratch::Registers => c"look_registers",
        }
    }
}

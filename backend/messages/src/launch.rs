//! The values on the launcher's command line, which `sluiced` writes and the launcher reads, and the names of the sockets that the
//! launcher makes for devices.

use core::{fmt, str::FromStr};
use serde::Deserialize;
use sluice_protocol::limits;
use std::path::{Path, PathBuf};

/// The reason why a value is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The text is not a range of numbers.
    #[error("{0:?} is not a range of numbers: the first number, which is not 0, `:`, and the count")]
    Range(String),
    /// The text is not a mode of a socket.
    #[error("{0:?} is not a mode of a socket: three octal digits, each 0, 2, 4 or 6, for instance 0660")]
    Mode(String),
}

/// Consecutive numbers: user ids for workers, or VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct NumberRange {
    /// The first number.
    pub first: u32,
    /// The count of the numbers.
    pub count: u32,
}

impl NumberRange {
    /// True if a number is in the range.
    #[must_use]
    pub const fn contains(self, number: u32) -> bool {
        number >= self.first && number.saturating_sub(self.first) < self.count
    }

    /// All numbers of the range.
    pub fn numbers(self) -> impl Iterator<Item = u32> {
        self.first..self.first.saturating_add(self.count)
    }
}

impl FromStr for NumberRange {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let parse = || {
            let (first, count) = text.split_once(':')?;
            let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
            // 0 is root, and not a VM; the last id of all means "no change" to the kernel.
            (first > 0 && count > 0 && first.checked_add(count).is_some()).then_some(Self { first, count })
        };
        parse().ok_or_else(|| ValueError::Range(text.to_owned()))
    }
}

impl TryFrom<String> for NumberRange {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        text.parse()
    }
}

impl fmt::Display for NumberRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.first, self.count)
    }
}

/// The users that may connect to a socket, by the bits of its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SocketMode(pub u32);

impl SocketMode {
    /// Access for the owner and the group.
    pub const GROUP: Self = Self(0o660);
}

impl Default for SocketMode {
    /// Access for the owner.
    fn default() -> Self {
        Self(0o600)
    }
}

impl FromStr for SocketMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| mode & !0o666 == 0);
        mode.map(Self).ok_or_else(|| ValueError::Mode(text.to_owned()))
    }
}

impl TryFrom<String> for SocketMode {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        text.parse()
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:04o}", self.0)
    }
}

/// The socket in `directory` on which the device of VM `id` listens for its VMM.
#[must_use]
pub fn device_socket(directory: &Path, id: u32) -> PathBuf {
    directory.join(format!("vm-{id}.sock"))
}

/// The socket of a virtual socket device of VM `id` whose VMM puts it into `directory`: it exists only if there is such a device.
#[must_use]
pub fn vsock_socket(directory: &Path, id: u32) -> PathBuf {
    directory.join(format!("vm-{id}.vsock"))
}

/// The socket in `directory` on which the device of VM `id` listens for guests that share no memory. Such a VMM derives its name
/// from that of its own socket and the port to which a guest connects.
#[must_use]
pub fn stream_socket(directory: &Path, id: u32) -> PathBuf {
    let mut path = vsock_socket(directory, id).into_os_string();
    path.push(format!("_{}", limits::STREAM_PORT));
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_of_users_that_is_empty_or_has_root_is_refused() {
        assert_eq!("1000:5".parse::<NumberRange>().map(|range| range.numbers().count()), Ok(5));
        for text in ["0:5", "1000:0", "1000", "4294967295:1", "a:b", ":"] {
            assert!(text.parse::<NumberRange>().is_err(), "{text:?} was taken");
        }
    }
}

//! The values on the launcher's command line, which `sluiced` writes and the launcher reads, and the names of the sockets that the
//! launcher makes for devices.

use core::{fmt, str::FromStr};
use serde::Deserialize;
use sluice_protocol::limits;
use std::path::{Path, PathBuf};

/// A value that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not a VM.
    #[error("{0:?} is not a VM: its number, then any of `,direct`, `,scanouts=0|1`")]
    Vm(String),
    /// Not a range of numbers.
    #[error("{0:?} is not a range of numbers: the first, which is not 0, `:`, and how many")]
    Range(String),
    /// Not a mode of a socket.
    #[error("{0:?} is not a mode of a socket: three octal digits, each 0, 2, 4 or 6, for instance 0660")]
    Mode(String),
}

/// A VM whose processes may be started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vm {
    /// Its number.
    pub id: u32,
    /// Whether there is no VM: programs of this host connect to the device themselves.
    pub direct: bool,
    /// Displays of its device, 0 or 1.
    pub scanouts: u8,
}

impl FromStr for Vm {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let error = || ValueError::Vm(text.to_owned());
        let mut parts = text.split(',');
        let id = parts.next().and_then(|id| id.parse().ok()).ok_or_else(error)?;
        let mut vm = Vm { id, ..Vm::default() };
        for part in parts {
            match part {
                "direct" => vm.direct = true,
                "scanouts=0" => vm.scanouts = 0,
                "scanouts=1" => vm.scanouts = 1,
                _ => return Err(error()),
            }
        }
        Ok(vm)
    }
}

impl fmt::Display for Vm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = if self.direct { ",direct" } else { "" };
        write!(formatter, "{}{direct},scanouts={}", self.id, self.scanouts)
    }
}

/// Numbers one after the other: user ids for workers, or VMs that may be made at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct NumberRange {
    /// The first number.
    pub first: u32,
    /// Their number.
    pub count: u32,
}

impl NumberRange {
    /// Whether a number is one of them.
    #[must_use]
    pub const fn contains(self, number: u32) -> bool {
        number >= self.first && number.saturating_sub(self.first) < self.count
    }

    /// The numbers.
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
            // 0 is root, and no VM; the last id of all means "no change" to the kernel.
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
    /// The owner and the group.
    pub const GROUP: Self = Self(0o660);
}

impl Default for SocketMode {
    /// The owner.
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

/// The socket of a virtual socket device of VM `id` whose VMM is told to put it into `directory`: it exists only where
/// there is such a device.
#[must_use]
pub fn vsock_socket(directory: &Path, id: u32) -> PathBuf {
    directory.join(format!("vm-{id}.vsock"))
}

/// The socket in `directory` on which the device of VM `id` listens for guests that share no memory. Its name is the one that such a
/// VMM makes of its own socket's and the port that a guest connects to.
#[must_use]
pub fn stream_socket(directory: &Path, id: u32) -> PathBuf {
    let mut path = vsock_socket(directory, id).into_os_string();
    path.push(format!("_{}", limits::STREAM_PORT));
    path.into()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "tests")]

    use super::*;

    #[test]
    fn vm_is_read_and_written_alike() {
        for text in ["1,scanouts=0", "7,direct,scanouts=1", "4294967295,direct,scanouts=0"] {
            assert_eq!(text.parse::<Vm>().expect("a VM").to_string(), text);
        }
        assert_eq!("3".parse(), Ok(Vm { id: 3, ..Vm::default() }));
        for text in ["", "x", "-1", "1,", "1,scanouts=2", "4294967296", "1, direct", "1,direct="] {
            assert!(text.parse::<Vm>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn range_of_users_never_has_root() {
        assert_eq!("1000:5".parse::<NumberRange>().map(|range| range.numbers().count()), Ok(5));
        for text in ["0:5", "1000:0", "1000", "4294967295:1", "a:b", ":"] {
            assert!(text.parse::<NumberRange>().is_err(), "{text:?} was taken");
        }
    }
}

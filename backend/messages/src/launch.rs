//! The values on the launcher's command line, which `sluiced` writes and the launcher reads, and the names of the sockets that the
//! launcher makes for devices.

use core::{fmt, ops::RangeInclusive, str::FromStr};
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
    /// The text is not a fingerprint.
    #[error("{0:?} is not a fingerprint: 32 hexadecimal digits")]
    Fingerprint(String),
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
            let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            let number = |text: &str| text.parse::<u32>().ok().filter(|_| digits(text));
            let (first, count) = (number(first)?, number(count)?);
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
        let is_octal = !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && mode & !0o666 == 0);
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

/// Limits of the processes of one VM together: of the cgroup that holds its device and its workers. They are far above the needs
/// of a VM with all its sessions, and there to end the growth of a VM that takes all it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmLimits {
    /// Bytes of host memory; `None` for half of the host's.
    pub memory: Option<u64>,
    /// Bytes of swap.
    pub swap: u64,
    /// Bytes of huge pages of each size.
    pub huge_pages: u64,
    /// Threads of all its processes.
    pub tasks: u32,
    /// Threads of one worker.
    pub worker_tasks: u32,
    /// Processor time relative to other VMs.
    pub cpu_weight: u32,
}

impl VmLimits {
    /// Possible limits of host memory: less than this holds not even a device and a worker.
    pub const MEMORY: RangeInclusive<u64> = 256 << 20..=1 << 52;
    /// Possible limits of swap and of huge pages.
    pub const BYTES: RangeInclusive<u64> = 0..=1 << 52;
    /// Possible limits of threads: a worker has some ten, and the kernel has no more numbers for threads than the last.
    pub const TASKS: RangeInclusive<u32> = 64..=1 << 22;
    /// Weights that the kernel takes.
    pub const WEIGHTS: RangeInclusive<u32> = 1..=10_000;

    /// The name and the value of the first limit that is out of its range.
    #[must_use]
    pub fn first_invalid(&self) -> Option<(&'static str, u64)> {
        let all = [
            ("memory", self.memory.unwrap_or(*Self::MEMORY.end()), Self::MEMORY),
            ("swap", self.swap, Self::BYTES),
            ("huge-pages", self.huge_pages, Self::BYTES),
            ("tasks", self.tasks.into(), wide(Self::TASKS)),
            ("worker-tasks", self.worker_tasks.into(), wide(Self::TASKS)),
            ("cpu-weight", self.cpu_weight.into(), wide(Self::WEIGHTS)),
        ];
        all.into_iter().find(|(_, value, range)| !range.contains(value)).map(|(name, value, _)| (name, value))
    }

    /// The options on the launcher's command line.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        let Self { memory, swap, huge_pages, tasks, worker_tasks, cpu_weight } = *self;
        let memory = memory.map(|bytes| ("--vm-memory", bytes));
        let others = [
            ("--vm-swap", swap),
            ("--vm-huge-pages", huge_pages),
            ("--vm-tasks", tasks.into()),
            ("--worker-tasks", worker_tasks.into()),
            ("--vm-cpu-weight", cpu_weight.into()),
        ];
        let options = memory.into_iter().chain(others);
        options.flat_map(|(name, value)| [name.to_owned(), value.to_string()]).collect()
    }
}

impl Default for VmLimits {
    fn default() -> Self {
        Self {
            // The VM of which a host has only one still leaves the other half to its VMM and to the host.
            memory: None,
            // Data of guests is not written to the disks of the host, and the limit of memory is one of all memory.
            swap: 0,
            // Sluice makes no huge pages. Those of a guest's memory belong to its VMM, which touches them first.
            huge_pages: 0,
            // 64 of each session, which has some ten, those of its driver included.
            tasks: 32_768,
            // A driver may start a thread for each processor of the host, to compile code.
            worker_tasks: 1024,
            // The weight of each cgroup that has no other.
            cpu_weight: 100,
        }
    }
}

const fn wide(range: RangeInclusive<u32>) -> RangeInclusive<u64> {
    *range.start() as u64..=*range.end() as u64
}

/// A value that differs if the command line of a launcher or its version differs: 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub [u8; 16]);

impl FromStr for Fingerprint {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let number =
            u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32 && !text.starts_with('+'));
        let number = number.ok_or_else(|| ValueError::Fingerprint(text.to_owned()))?;
        Ok(Self(number.to_be_bytes()))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
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
    fn limit_of_a_vm_that_is_out_of_its_range_is_named() {
        let usual = VmLimits::default();
        assert_eq!(usual.first_invalid(), None);
        assert_eq!(usize::try_from(usual.tasks), Ok(64 * limits::SESSIONS));
        assert!(!usual.options().contains(&"--vm-memory".to_owned()));
        let small = VmLimits { memory: Some(1 << 20), cpu_weight: 0, ..usual };
        assert_eq!(small.first_invalid(), Some(("memory", 1 << 20)));
        assert_eq!(VmLimits { cpu_weight: 10_001, ..usual }.first_invalid(), Some(("cpu-weight", 10_001)));
        assert_eq!(VmLimits { worker_tasks: 3, ..usual }.first_invalid(), Some(("worker-tasks", 3)));
    }

    #[test]
    fn range_of_users_that_is_empty_or_has_root_is_refused() {
        assert_eq!("1000:5".parse::<NumberRange>().map(|range| range.numbers().count()), Ok(5));
        for text in ["0:5", "1000:0", "1000", "4294967295:1", "a:b", ":", "+1000:5", "1000:+5"] {
            assert!(text.parse::<NumberRange>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn fingerprint_is_thirty_two_hexadecimal_digits() {
        let text = "00ff0000000000000000000000000a1b";
        assert_eq!(
            text.parse::<Fingerprint>().map(|fingerprint| fingerprint.to_string()),
            Ok(text.to_owned())
        );
        for text in ["", "0ff", "+0ff0000000000000000000000000a1b", "g0ff0000000000000000000000000a1b"] {
            assert!(text.parse::<Fingerprint>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn mode_of_a_socket_is_octal_digits_of_reading_and_writing() {
        assert_eq!("0660".parse(), Ok(SocketMode::GROUP));
        for text in ["", "+660", "-1", "0770", "8", "0x1"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text:?} was taken");
        }
    }
}

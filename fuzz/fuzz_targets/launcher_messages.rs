//! The launcher's messages and the values on its command line: any bytes are one message or are refused, any text is one value or is
//! refused, and what is accepted is written to a text that is read as the same value.
//!
//! The first byte of the input chooses the kind.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_messages::{
    control::{FromLauncher, Message, ToLauncher, version_of_option},
    inventory::{Visible, VisibleInstance, uuid_text},
    launch::{NumberRange, SocketMode, VmLimits, device_socket, stream_socket, vsock_socket},
};
use std::path::Path;

fn message<M: Message + PartialEq>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        assert_eq!(M::decode(&message.encode()).ok(), Some(message), "another message arrives");
    }
}

fn range(text: &str) {
    let Ok(range) = text.parse::<NumberRange>() else { return };
    assert_eq!(range.to_string().parse(), Ok(range));
    assert_ne!(range.first, 0, "root, or no VM");
    let last = range.first + (range.count - 1);
    // To the kernel, the last id of all means "no change".
    assert_ne!(last, u32::MAX);
    assert!(range.contains(range.first) && range.contains(last));
    assert!(!range.contains(range.first - 1) && !range.contains(last + 1));
    assert_eq!(range.numbers().size_hint().0, range.count as usize);
    assert_eq!((range.numbers().next(), range.numbers().last_of()), (Some(range.first), Some(last)));
}

trait LastOf: Iterator {
    /// The last item, without a look at all others.
    fn last_of(self) -> Option<Self::Item>;
}

impl<I: Iterator<Item = u32>> LastOf for I {
    fn last_of(mut self) -> Option<u32> {
        let before = self.size_hint().0.checked_sub(1)?;
        self.nth(before)
    }
}

fn mode(text: &str) {
    let Ok(mode) = text.parse::<SocketMode>() else { return };
    assert_eq!(mode.to_string().parse(), Ok(mode));
    assert_eq!(mode.0 & !0o666, 0, "more than reading and writing");
}

/// Limits of these values: `sluiced` passes those that it accepts, and the options name each value once.
fn limits(bytes: &[u8]) {
    let mut words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let mut next = || words.next().unwrap_or(100);
    let wanted = VmLimits {
        memory: Some(next()).filter(|bytes| *bytes != 0),
        swap: next(),
        huge_pages: next(),
        tasks: next() as u32,
        worker_tasks: next() as u32,
        cpu_weight: next() as u32,
    };
    let options = wanted.options();
    let value = |name: &str| -> Option<u64> {
        let at = options.iter().position(|option| option == name)?;
        Some(options[at + 1].parse().expect("a number"))
    };
    let read = VmLimits {
        memory: value("--vm-memory"),
        swap: value("--vm-swap").expect("a value"),
        huge_pages: value("--vm-huge-pages").expect("a value"),
        tasks: value("--vm-tasks").expect("a value").try_into().expect("a short number"),
        worker_tasks: value("--worker-tasks").expect("a value").try_into().expect("a short number"),
        cpu_weight: value("--vm-cpu-weight").expect("a value").try_into().expect("a short number"),
    };
    assert_eq!(read, wanted);
    if let Some((name, number)) = wanted.first_invalid() {
        assert!(options.iter().any(|option| option.ends_with(name)), "{name}");
        assert!(options.contains(&number.to_string()), "{number}");
    } else {
        assert!(wanted.memory.is_none_or(|bytes| VmLimits::MEMORY.contains(&bytes)));
        assert!(VmLimits::TASKS.contains(&wanted.tasks) && VmLimits::WEIGHTS.contains(&wanted.cpu_weight));
    }
}

/// A device's sockets lie in the directory itself, and each has a name of its own.
fn sockets(id: u32) {
    let directory = Path::new("/run/sluice");
    let all = [device_socket(directory, id), vsock_socket(directory, id), stream_socket(directory, id)];
    assert!(all.iter().all(|path| path.parent() == Some(directory)));
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
}

/// The variable of a visible device has its UUID's digits and nothing that a driver would take for a list.
fn visible(bytes: &[u8]) {
    let Some(uuid) = bytes.first_chunk::<16>() else { return };
    let text = uuid_text(uuid);
    let digits: String = text.chars().filter(|sign| *sign != '-').collect();
    assert_eq!(u128::from_str_radix(&digits, 16), Ok(u128::from_be_bytes(*uuid)));
    let instance = VisibleInstance { uuid: *uuid, ..VisibleInstance::default() };
    for visible in [Visible::Gpu(*uuid), Visible::Instance(instance), Visible::Ordinal(uuid[0].into())] {
        let variable = visible.variable().expect("a device");
        assert!(variable.chars().all(|sign| sign.is_ascii_alphanumeric() || sign == '-'), "{variable}");
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match kind % 8 {
        0 => message::<ToLauncher>(bytes),
        1 => message::<FromLauncher>(bytes),
        2 => range(&text),
        3 => mode(&text),
        4 => limits(bytes),
        5 => visible(bytes),
        6 => sockets(bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))),
        _ => {
            if let Ok(version) = version_of_option(&text) {
                assert_eq!(version, sluice_messages::control::VERSION);
            }
        }
    }
});

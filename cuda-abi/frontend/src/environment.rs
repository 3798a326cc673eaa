//! The variables of the environment that users set for the vendor's driver. Both drop-in libraries read them here.
//!
//! | variable | effect |
//! |---|---|
//! | `CUDA_VISIBLE_DEVICES` | the visible devices and their order: see [`visible`] |
//! | `CUDA_DEVICE_ORDER` | `PCI_BUS_ID`: devices are numbered by their bus addresses; otherwise the fastest is the first |
//! | `CUDA_LAUNCH_BLOCKING` | `1`: a call that starts work returns when the work is complete, with the error of the work |
//! | `CUDA_MODULE_LOADING` | `EAGER`: all functions of a module are loaded with it; `LAZY` and `DEFAULT`: at their first use |
//! | `CUDA_FORCE_PTX_JIT` | `1`: machine code in images is ignored |
//! | `CUDA_DISABLE_PTX_JIT` | `1`: PTX in images is ignored |
//! | `CUDA_CACHE_DISABLE`, `_PATH`, `_MAXSIZE` | none: no compiled code is kept on a disk |

use sluice_cuda_abi::image::Selection;
use std::{ffi::OsString, sync::OnceLock};

/// The time at which functions of modules are loaded: the values of `CUmoduleLoadingMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LoadingMode {
    /// With their module.
    Eager = 1,
    /// At their first use.
    Lazy = 2,
}

/// The values of the variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Calls that start work return when it is complete.
    pub launches_block: bool,
    /// The time at which functions are loaded.
    pub loading: LoadingMode,
    /// The parts of images that may be used.
    pub images: Selection,
    by_bus: bool,
    visible: Option<String>,
}

/// A device as the variables name it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceNames {
    /// Names that may be cut to a unique prefix: `GPU-…`, `MIG-…`.
    pub prefixes: Vec<String>,
    /// A name that must be given whole: `MIG-GPU-…/1/0`.
    pub whole: Option<String>,
    /// A measure of its speed.
    pub speed: u64,
    /// Domain, bus and device number.
    pub bus: (i32, i32, i32),
}

impl Environment {
    /// The environment of this process, as it was at the first call.
    pub fn get() -> &'static Environment {
        static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
        ENVIRONMENT.get_or_init(|| Environment::read(&|name| std::env::var_os(name)))
    }

    /// Reads the variables. As with the vendor's driver, a value that a variable does not have is the default.
    pub fn read(variable: &dyn Fn(&str) -> Option<OsString>) -> Environment {
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().trim().to_owned());
        let is = |name: &str, value: &str| text(name).is_some_and(|text| text == value);
        let on = |name: &str| {
            text(name).and_then(|text| text.parse::<i64>().ok()).is_some_and(|number| number != 0)
        };
        Environment {
            launches_block: on("CUDA_LAUNCH_BLOCKING"),
            loading: if is("CUDA_MODULE_LOADING", "EAGER") { LoadingMode::Eager } else { LoadingMode::Lazy },
            images: Selection { machine_code: !on("CUDA_FORCE_PTX_JIT"), ptx: !on("CUDA_DISABLE_PTX_JIT") },
            by_bus: is("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            visible: text("CUDA_VISIBLE_DEVICES"),
        }
    }

    /// The indexes of the visible ones of all devices, in the order of their ordinals.
    #[must_use]
    pub fn visible(&self, all: &[DeviceNames]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..all.len()).collect();
        // Both sorts are stable: instances of one GPU keep their order.
        if self.by_bus {
            order.sort_by_key(|index| all[*index].bus);
        } else {
            order.sort_by_key(|index| std::cmp::Reverse(all[*index].speed));
        }
        match &self.visible {
            Some(list) => visible(all, &order, list),
            None => order,
        }
    }
}

/// The rules of `CUDA_VISIBLE_DEVICES`: an entry is a number in the order of devices, a name, or the unique prefix of a name. The first entry that
/// is none of these ends the list. A device that is named twice makes the list empty.
fn visible(all: &[DeviceNames], order: &[usize], list: &str) -> Vec<usize> {
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found = if entry.starts_with("GPU-") || entry.starts_with("MIG-") {
            let mut matches = (0..all.len()).filter(|index| all[*index].is_called(entry));
            match (matches.next(), matches.next()) {
                (Some(index), None) => Some(index),
                _ => None,
            }
        } else {
            entry.parse().ok().and_then(|number: usize| order.get(number).copied())
        };
        match found {
            Some(index) if chosen.contains(&index) => return Vec::new(),
            Some(index) => chosen.push(index),
            None => break,
        }
    }
    chosen
}

impl DeviceNames {
    fn is_called(&self, entry: &str) -> bool {
        let (kind, number) = entry.split_at(4);
        let number = number.to_ascii_lowercase();
        self.whole.as_deref() == Some(entry)
            || self
                .prefixes
                .iter()
                .any(|name| name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(&number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(values: &[(&str, &str)]) -> Environment {
        Environment::read(&|name| {
            values.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into())
        })
    }

    fn device(digit: char, speed: u64, bus: i32) -> DeviceNames {
        let uuid: String = std::iter::repeat_n(digit, 8).collect();
        DeviceNames { prefixes: vec![format!("GPU-{uuid}")], whole: None, speed, bus: (0, bus, 0) }
    }

    // Promise: C100
    #[test]
    fn variables_of_the_driver_have_their_documented_values() {
        let default = environment(&[]);
        assert!(!default.launches_block && default.images == Selection::default());
        assert_eq!(default.loading, LoadingMode::Lazy);
        for (value, expected) in
            [("EAGER", LoadingMode::Eager), ("LAZY", LoadingMode::Lazy), ("DEFAULT", LoadingMode::Lazy)]
        {
            assert_eq!(environment(&[("CUDA_MODULE_LOADING", value)]).loading, expected, "{value}");
        }
        for (value, on) in [("1", true), (" 1 ", true), ("0", false), ("", false), ("yes", false)] {
            assert_eq!(environment(&[("CUDA_LAUNCH_BLOCKING", value)]).launches_block, on, "{value:?}");
            let forced = environment(&[("CUDA_FORCE_PTX_JIT", value)]).images;
            assert_eq!((forced.machine_code, forced.ptx), (!on, true), "{value:?}");
            let disabled = environment(&[("CUDA_DISABLE_PTX_JIT", value)]).images;
            assert_eq!((disabled.machine_code, disabled.ptx), (true, !on), "{value:?}");
        }
    }

    // Promise: C100
    #[test]
    fn devices_are_numbered_by_speed_or_by_bus() {
        let all = [device('1', 10, 9), device('2', 30, 3), device('3', 30, 2), device('4', 20, 1)];
        assert_eq!(environment(&[]).visible(&all), [1, 2, 3, 0]);
        let order = |order: &str, list: &str| {
            environment(&[("CUDA_DEVICE_ORDER", order), ("CUDA_VISIBLE_DEVICES", list)]).visible(&all)
        };
        assert_eq!(environment(&[("CUDA_DEVICE_ORDER", "PCI_BUS_ID")]).visible(&all), [3, 2, 1, 0]);
        assert_eq!(order("PCI_BUS_ID", "0,3"), [3, 0]);
        assert_eq!(order("FASTEST_FIRST", "0,3"), [1, 0]);
        assert_eq!(order("PCI_BUS_ID", "GPU-1,GPU-2"), [0, 1]);
    }

    // Promise: C100
    #[test]
    fn list_of_visible_devices_follows_the_documented_rules() {
        let instance = DeviceNames {
            prefixes: vec!["MIG-22222222".to_owned(), "GPU-22222222".to_owned()],
            whole: Some("MIG-GPU-99999999/2/0".to_owned()),
            ..DeviceNames::default()
        };
        let mut all = [device('a', 0, 0), device('b', 0, 0), instance];
        all[1].prefixes = vec!["GPU-aabbbbbb".to_owned()];
        let chosen = |list: &str| environment(&[("CUDA_VISIBLE_DEVICES", list)]).visible(&all);
        assert_eq!(chosen("2,0"), [2, 0]);
        assert_eq!(chosen(" 0, 1"), [0, 1]);
        assert_eq!(chosen("0,7,1"), [0], "the list ends before the first invalid entry");
        for nothing in ["-1", "", "1,1", "GPU-a", "MIG-a", "GPU-", "NoDevFiles", "0x1", "MIG-GPU-99999999/2"]
        {
            assert_eq!(chosen(nothing), [0_usize; 0], "{nothing}");
        }
        assert_eq!(chosen("GPU-aaa,GPU-AAB"), [0, 1]);
        assert_eq!(chosen("MIG-2"), [2]);
        assert_eq!(chosen("GPU-22222222"), [2], "as a management library names a device that is an instance");
        assert_eq!(chosen("MIG-GPU-99999999/2/0"), [2]);
    }
}

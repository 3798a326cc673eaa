//! Gives the library the vendor's soname, and generates the entry points of unsupported functions.
//!
//! The supported functions are read from the sources: an export that no source defines gets a function that returns an error.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    // Programs and runtimes open `libcuda.so.1`. A driver with threads can never be unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let map = Path::new("../../cuda-abi/data/procmap.json");
    println!("cargo::rerun-if-changed={}", map.display());
    // The functions of arrays and textures are listed for this library and the guest's.
    let folders = ["src/api", "../../cuda-abi/images/src/calls"].map(Path::new);
    for folder in folders {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    let exports = exports(&fs::read_to_string(map).expect("the symbol map is part of the source tree"));
    let served = served(&folders);
    for name in &served {
        assert!(exports.contains(name), "{name} is defined, but the driver has no such export");
    }

    let mut text = String::new();
    for name in exports.difference(&served) {
        writeln!(text, "refuse!({name});").expect("writing to a string");
    }
    writeln!(text, "/// The entry points, in the order of the exported names.").expect("writing to a string");
    writeln!(text, "pub(super) static FUNCTIONS: [EntryPoint; {}] = [", exports.len())
        .expect("writing to a string");
    for name in &exports {
        let function = if served.contains(name) { format!("super::{name}") } else { name.clone() };
        writeln!(text, "    EntryPoint::new({function} as *const ()),").expect("writing to a string");
    }
    text.push_str("];\n");
    writeln!(
        text,
        "#[cfg(test)]\nconst NAMES: [&str; {}] = {:?};",
        exports.len(),
        exports.iter().collect::<Vec<_>>()
    )
    .expect("writing to a string");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("exports.rs"), text).expect("cargo's output directory is writable");
}

/// Every `"symbol":"…"` of the symbol map.
fn exports(map: &str) -> BTreeSet<String> {
    let names = map.split("\"symbol\"").skip(1).filter_map(|rest| rest.split('"').nth(1));
    names.map(str::to_owned).collect()
}

/// The names of the driver's functions on lines that begin a function.
fn served(folders: &[&Path]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let entries =
        folders.iter().flat_map(|folder| fs::read_dir(folder).expect("a folder of the source tree"));
    let paths = entries.map(|entry| entry.expect("a readable folder").path());
    for path in paths {
        let text = fs::read_to_string(&path).expect("a readable source");
        for line in text.lines() {
            let Some(head) = line.trim_start().strip_prefix("fn ") else { continue };
            let head = head.split('(').next().unwrap_or_default();
            for name in head.split(',').map(str::trim) {
                if name
                    .strip_prefix("cu")
                    .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
                {
                    names.insert(name.to_owned());
                }
            }
        }
    }
    names
}

//! Sets the library's soname to the one that programs load as a CUDA driver, and writes an entry for each name of the driver.

use std::fmt::Write as _;
use std::path::Path;

/// Names that the library serves itself.
const OWN: [&str; 2] = ["cuGetProcAddress", "cuGetProcAddress_v2"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    let mut text = String::from("entries! {\n");
    for (place, name) in sluice_cuda_abi::symbols::EXPORTS.iter().enumerate() {
        if !OWN.contains(name) {
            writeln!(text, "    {place} {name};").expect("a text");
        }
    }
    text.push_str("}\n");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("entries.rs"), text).expect("the entries");
}

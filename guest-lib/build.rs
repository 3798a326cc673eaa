//! The build script: it gives the library the vendor's name, keeps it loaded, and lists the exports that are not served yet.

use sluice_cuda_abi::symbols::EXPORTS;
use sluice_protocol::calls;
use std::{collections::BTreeSet, env, fs, path::PathBuf};

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its waker thread and its thread-local destructors outlive any dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let served: BTreeSet<&str> = calls::C
        .iter()
        .filter(|row| row.class != "driver")
        .flat_map(|row| std::iter::once(row.name).chain(row.per_thread.iter().copied()))
        .collect();
    let unserved: Vec<&str> = EXPORTS.iter().copied().filter(|name| !served.contains(name)).collect();
    let addresses: Vec<String> = EXPORTS.iter().map(|name| format!("{name} as *const ()")).collect();
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?);
    fs::write(out.join("unserved.rs"), format!("unserved! {{ {} }}\n", unserved.join(" ")))?;
    fs::write(out.join("addresses.rs"), format!("[{}]\n", addresses.join(", ")))
}

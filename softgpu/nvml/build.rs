//! Gives the library the vendor's soname.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
}

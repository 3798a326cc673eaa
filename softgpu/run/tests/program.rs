//! A program that uses CUDA and NVML: this test binary itself, started by `softgpu-run` for the one ignored test here.
#![expect(unsafe_code, reason = "calls the libraries of the vendor's interface as a program does")]

use std::ffi::{CStr, c_char, c_int};

use libloading::{Library, Symbol};

/// Arguments with which this binary is the program.
pub(crate) const PROGRAM: [&str; 4] =
    ["--ignored", "--exact", "--nocapture", "program::describe_the_devices"];

/// Calls a function that has no result but its code.
macro_rules! check {
    ($library:ident, $name:literal, ($($kind:ty),*), ($($argument:expr),*)) => {{
        let function: Symbol<'_, unsafe extern "C" fn($($kind),*) -> c_int> =
            // SAFETY: the signature is that of the vendor's header.
            unsafe { $library.get($name) }.expect("the library has the function");
        // SAFETY: the arguments are places of this function, as the header wants them.
        let code = unsafe { function($($argument),*) };
        assert_eq!(code, 0, "{}", String::from_utf8_lossy($name));
    }};
}

/// Prints a line for each device: its name and its bytes, by CUDA and by NVML.
#[test]
#[ignore = "it is the program that the other tests start"]
fn describe_the_devices() {
    // SAFETY: the library's start makes no demands.
    let cuda = unsafe { Library::new("libcuda.so.1") }.expect("a driver");
    // SAFETY: as above.
    let nvml = unsafe { Library::new("libnvidia-ml.so.1") }.expect("a management library");
    check!(cuda, b"cuInit", (u32), (0));
    check!(nvml, b"nvmlInit_v2", (), ());
    let (mut devices, mut seen) = (0, 0);
    check!(cuda, b"cuDeviceGetCount", (*mut c_int), (&raw mut devices));
    check!(nvml, b"nvmlDeviceGetCount_v2", (*mut c_int), (&raw mut seen));
    assert_eq!(devices, seen, "both libraries have the same devices");
    for ordinal in 0..devices {
        let mut device: c_int = 0;
        check!(cuda, b"cuDeviceGet", (*mut c_int, c_int), (&raw mut device, ordinal));
        let mut name = [0 as c_char; 64];
        check!(cuda, b"cuDeviceGetName", (*mut c_char, c_int, c_int), (name.as_mut_ptr(), 64, device));
        let mut bytes = 0_usize;
        check!(cuda, b"cuDeviceTotalMem_v2", (*mut usize, c_int), (&raw mut bytes, device));
        // SAFETY: the call has written a text with its end.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        println!("device {ordinal}: {name}, {bytes} bytes");
    }
}

//! Command lines of callers, with the messages, the exit status and the files that they get.
#![expect(unsafe_code, reason = "calls the driver as a program does")]

use std::ffi::{c_int, c_void};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use libloading::{Library, Symbol};
use tempfile::TempDir;

/// Stores 41 and one more.
const TEXT: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.shared .b32 s[10];\n\
    .visible .entry answer(.param .u64 a)\n{ .reg .b32 %r<4>; .reg .b64 %d<4>;\nld.param.u64 %d1, [a];\nmov.u32 %r1, 41;\n\
    add.u32 %r1, %r1, 1;\nst.shared.u32 [s], %r1;\nst.global.u32 [%d1], %r1;\nret; }\n";

fn place() -> TempDir {
    tempfile::Builder::new().prefix("softgpu-test-").tempdir_in("/dev/shm").expect("a directory")
}

fn ptxas(place: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softgpu-ptxas"));
    command.args(words).current_dir(place).output().expect("softgpu-ptxas")
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

// Promise: S85
#[test]
fn text_is_checked_like_the_vendors_assembler_does() {
    let place = place();
    let assemble = |text: &str, words: &[&str]| {
        fs::write(place.path().join("in.ptx"), text).expect("a file");
        ptxas(place.path(), &[&["in.ptx", "-o", "out.cubin"], words].concat())
    };
    let output = assemble(TEXT, &["-v", "--gpu-name=sm_80", "-lineinfo"]);
    assert!(output.status.success(), "{}", error(&output));
    let said = error(&output);
    assert!(said.contains("Compiling entry function 'answer' for 'sm_80'"), "{said}");
    assert!(said.contains("0 bytes spill stores") && said.contains("40 bytes smem"), "{said}");
    assert!(fs::read(place.path().join("out.cubin")).expect("a file").starts_with(b"\x7fELF"));

    fs::remove_file(place.path().join("out.cubin")).expect("a file");
    for (from, to, arch, line) in [
        ("%d1, [a]", "%q1, [a]", "sm_80", 7),
        ("mov.u32 %r1, 41", "mov.u32 %r1, ", "sm_80", 8),
        ("add.u32", "add.u33", "sm_80", 9),
        ("sm_80", "sm_90", "sm_80", 2),
        ("8.0", "99.0", "sm_80", 1),
    ] {
        let output = assemble(&TEXT.replace(from, to), &["-arch", arch]);
        let said = error(&output);
        assert_eq!(output.status.code(), Some(255), "{to}: {said}");
        assert!(said.contains(&format!("ptxas in.ptx, line {line}; error   : ")), "{to}: {said}");
        assert!(said.contains("fatal   : Ptx assembly aborted due to errors"), "{to}: {said}");
        assert!(!place.path().join("out.cubin").exists(), "{to}");
    }
    let output = ptxas(place.path(), &["nowhere.ptx"]);
    assert_eq!(output.status.code(), Some(255));
    assert!(error(&output).contains("'nowhere.ptx' could not be opened"), "{}", error(&output));
}

// Promise: S85
#[test]
fn kernel_that_cannot_run_is_a_warning_that_names_it() {
    let place = place();
    let text = ".version 8.3\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{\nwgmma.fence.sync.aligned;\nret;\n}\n";
    fs::write(place.path().join("in.ptx"), text).expect("a file");
    let output = ptxas(place.path(), &["in.ptx", "-arch=sm_90a"]);
    assert!(output.status.success(), "{}", error(&output));
    assert!(error(&output).contains("warning : kernel 'k' cannot run"), "{}", error(&output));
    assert!(place.path().join("elf.o").exists(), "the vendor's default name");
    let output = ptxas(place.path(), &["in.ptx", "-arch=sm_90a", "-Werror"]);
    assert_eq!(output.status.code(), Some(255), "{}", error(&output));
    let output = ptxas(place.path(), &["in.ptx", "-arch=sm_90a", "-w"]);
    assert_eq!(error(&output), "");
}

/// Calls a function of the driver.
macro_rules! check {
    ($library:ident, $name:literal, ($($kind:ty),*), ($($argument:expr),*)) => {{
        let function: Symbol<'_, unsafe extern "C" fn($($kind),*) -> c_int> =
            // SAFETY: the signature is that of the vendor's header.
            unsafe { $library.get($name) }.expect("the driver has the function");
        // SAFETY: the arguments are places of this function, as the header wants them.
        let code = unsafe { function($($argument),*) };
        assert_eq!(code, 0, "{}", String::from_utf8_lossy($name));
    }};
}

/// Loads the file of its last argument's variable and runs its kernel: a process of its own, since a device is chosen by variables.
#[test]
#[ignore = "it is the program that the next test starts"]
fn load_and_run() {
    let image = fs::read(std::env::var_os("IMAGE").expect("a path")).expect("a file");
    let library = std::env::var_os("LIBRARY").expect("a path");
    // SAFETY: the library's start makes no demands.
    let cuda = unsafe { Library::new(library) }.expect("the driver");
    let (mut context, mut module, mut function) = [std::ptr::null_mut::<c_void>(); 3].into();
    let (mut device, mut memory, mut result) = (0 as c_int, 0_u64, 0_u32);
    check!(cuda, b"cuInit", (u32), (0));
    check!(cuda, b"cuDeviceGet", (*mut c_int, c_int), (&raw mut device, 0));
    check!(cuda, b"cuCtxCreate_v2", (*mut *mut c_void, u32, c_int), (&raw mut context, 0, device));
    check!(
        cuda,
        b"cuModuleLoadData",
        (*mut *mut c_void, *const c_void),
        (&raw mut module, image.as_ptr().cast())
    );
    check!(
        cuda,
        b"cuModuleGetFunction",
        (*mut *mut c_void, *mut c_void, *const std::ffi::c_char),
        (&raw mut function, module, c"answer".as_ptr())
    );
    check!(cuda, b"cuMemAlloc_v2", (*mut u64, usize), (&raw mut memory, 4));
    let mut parameters = [(&raw mut memory).cast::<c_void>()];
    check!(
        cuda,
        b"cuLaunchKernel",
        (*mut c_void, u32, u32, u32, u32, u32, u32, u32, *mut c_void, *mut *mut c_void, *mut *mut c_void),
        (function, 1, 1, 1, 1, 1, 1, 0, std::ptr::null_mut(), parameters.as_mut_ptr(), std::ptr::null_mut())
    );
    check!(
        cuda,
        b"cuMemcpyDtoH_v2",
        (*mut c_void, u64, usize),
        ((&raw mut result).cast::<c_void>(), memory, 4)
    );
    assert_eq!(result, 42);
    println!("the kernel ran");
}

// Promise: S85
#[test]
fn driver_loads_the_file_and_runs_its_kernel() {
    let place = place();
    fs::write(place.path().join("in.ptx"), TEXT).expect("a file");
    let library = Path::new(env!("CARGO_BIN_EXE_softgpu-ptxas")).with_file_name("libsoftgpu_cuda.so");
    assert!(library.exists(), "{} is missing: run `cargo build --release`", library.display());
    for words in [&["--gpu-name=sm_80"][..], &["-arch=sm_75", "-c"]] {
        let text = if words.contains(&"-c") { TEXT.replace("sm_80", "sm_75") } else { TEXT.to_owned() };
        fs::write(place.path().join("in.ptx"), text).expect("a file");
        let output = ptxas(place.path(), &[&["in.ptx", "-o", "out.cubin"], words].concat());
        assert!(output.status.success(), "{}", error(&output));
        let mut program = Command::new(std::env::current_exe().expect("a path"));
        program.args(["--ignored", "--exact", "--nocapture", "assemble::load_and_run"]);
        program.env("IMAGE", place.path().join("out.cubin")).env("LIBRARY", &library);
        program.env("SLUICE_SOFTGPU_STATE", place.path().join("state")).env("SLUICE_SOFTGPU_SCALE", "1024");
        let output = program.output().expect("the program");
        assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), error(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("the kernel ran"));
    }
}

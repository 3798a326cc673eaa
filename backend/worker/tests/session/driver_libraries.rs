#![allow(unsafe_code, reason = "opens a library as a driver does, and calls its function")]

//! The libraries that a driver loads itself: they are there before the session, and no file is opened for them later.

use crate::{
    arbiter::FakeArbiter,
    guest::{Guest, Start, null_driver},
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const COMPILER: &str = "libnvidia-ptxjitcompiler.so";
const VERSION: &str = "580.159.04";

/// Makes a library that has this name in it.
fn make_library(folder: &Path, file: &str, name: &str) -> PathBuf {
    let (source, library) = (folder.join("library.c"), folder.join(file));
    fs::write(&source, "int stand_in(void) { return 7; }\n").expect("written");
    let name = format!("-Wl,-soname,{name}");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", &name, "-o"]).arg(&library).arg(&source).status();
    assert!(built.expect("the linker of this test").success());
    library
}

// Promise: F99
#[test]
fn further_libraries_of_the_driver_are_loaded_before_the_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path();
    let driver = place.join(format!("libcuda.so.{VERSION}"));
    fs::copy(null_driver(), &driver).expect("a copy");
    let compiler = make_library(place, &format!("{COMPILER}.{VERSION}"), &format!("{COMPILER}.1"));
    symlink(&compiler, place.join(format!("{COMPILER}.1"))).expect("a link");
    // It cannot be loaded, which costs a line of log and no session.
    fs::write(place.join("libnvidia-nvvm.so.4"), "no library").expect("written");
    let (log, writer) = io::pipe().expect("a pipe");
    let start =
        Start { lenders: vec![FakeArbiter::new(0).admit()], log: Stdio::from(writer), ..Start::on(driver) };
    let guest = Guest::ready(start);
    let maps = fs::read_to_string(format!("/proc/{}/maps", guest.worker.id())).expect("a list of mappings");
    assert!(maps.contains(compiler.to_str().expect("UTF-8")), "{maps}");
    drop(guest);
    let log = io::read_to_string(log).expect("text");
    let lines = log.lines().filter(|line| line.contains("cannot load"));
    assert_eq!(lines.filter(|line| line.contains("libnvidia-nvvm.so.4")).count(), 1, "{log}");
}

// Promise: F99
#[test]
fn loaded_library_is_found_by_its_name_without_a_file() {
    const NAME: &str = "libnvidia-stand-in.so.1";
    let folder = tempfile::tempdir().expect("a folder");
    let library = make_library(folder.path(), "libnvidia-stand-in.so.580.159.04", NAME);
    let open = || {
        // SAFETY: the stand-in has no constructor.
        unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) }
    };
    assert!(open().is_err(), "no directory of libraries has it");
    let missing = folder.path().join("libnvidia-missing.so");
    assert!(sluice_driver::load_further(&[missing, library]).is_empty(), "a missing one is left out");
    folder.close().expect("removed");
    let library = open().expect("the loaded library");
    // SAFETY: the stand-in's function has this signature.
    let function =
        unsafe { library.get::<unsafe extern "C" fn() -> i32>(b"stand_in\0") }.expect("a function");
    // SAFETY: as above.
    assert_eq!(unsafe { function() }, 7);
}

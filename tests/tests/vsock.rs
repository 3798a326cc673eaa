//! Guests that share no memory with the host. In most tests their messages go through a Unix socket, as after a VMM or a
//! user-space virtual socket device; programs and processes are the same. In one test they come out of a virtual machine.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_protocol::calls;
use sluice_protocol::stream::{FromGuest, HEAD_BYTES, ToGuest};
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::direct::{self, Backend, TIMEOUT};
use sluice_tests::host::{self, Host};
use sluice_tests::image::Image;
use sluice_tests::matrix::{self, Place};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{run, signal, tail};
use sluice_tests::programs::{self, passed, program};
use sluice_tests::qemu::Qemu;
use sluice_tests::virtual_socket::{self, UNIFIED};
use sluice_tests::vm::{Gpu, Guest, GuestCommand, Machine};

fn streamed() -> Result<Backend> {
    Backend::start(&Binaries::locate()?, None)?.over_stream()
}

/// Programs for memory that kernels reach in place, which does not exist here: `lifetimes` and `offspring` release their kernels by writing to
/// pinned memory that they read, `managed` memory is refused, and `zero_copy` reports the available kind, which is a test of its
/// own. The copies of `graphs`, `graph_copies` and `graph_conditional` name host memory, which is refused in graphs here.
const IN_PLACE: &[&str] = &[
    "graph_conditional",
    "graph_copies",
    "graphs",
    "lifetimes",
    "managed",
    "offspring",
    "registered",
    "zero_copy",
];

// Promise: C54, C73, C89, C90, C92, C94, C95, V21
#[test]
fn programs_print_the_same_without_shared_memory() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = streamed()?;
    for program in programs::compile_all()? {
        if IN_PLACE.contains(&program.name.as_str()) {
            continue;
        }
        backend.agrees(&binaries, &program.path, &[UNIFIED])?;
    }
    matrix::ran(Place::new("VSOCK", "none: a Unix socket", "the host's"), "", "")?;
    backend.stop()
}

// Promise: V22
#[test]
fn zero_copy_without_shared_memory_is_masked_and_an_access_faults() -> Result<()> {
    let backend = streamed()?;
    let path = program("zero_copy")?;
    let finished = backend.run(&path, &[])?;
    passed(&finished)?;
    ensure!(finished.stdout.contains("zero-copy is masked: yes"), "{}", finished.stdout);
    let touched = backend.run(&path, &["touch"])?;
    passed(&touched)?;
    ensure!(touched.stdout.contains("cudaErrorIllegalAddress"), "{}", touched.stdout);
    backend.stop()
}

// Promise: V21
#[test]
fn killed_program_ends_its_worker() -> Result<()> {
    let backend = streamed()?;
    let mut neighbour = backend.spawn("neighbour", &program("neighbour")?, &["forever"])?;
    neighbour.wait_for_line("computing", TIMEOUT)?;
    for (number, arguments) in [&["1000"] as &[&str], &["1000", "fork"]].into_iter().enumerate() {
        let hold = program("hold")?;
        let mut doomed = backend.spawn(&format!("doomed-{number}"), &hold, arguments)?;
        doomed.wait_for_line("holding", TIMEOUT)?;
        backend.wait_for_workers(2)?;
        let name: String = hold.file_name().context("a name")?.to_string_lossy().chars().take(15).collect();
        let children = direct::descendants(doomed.id(), &name)?;
        signal(doomed.id(), Signal::KILL)?;
        backend.wait_for_workers(1)?;
        for child in children {
            signal(child, Signal::KILL).context("the child sleeps on")?;
        }
    }
    signal(neighbour.id(), Signal::USR1)?;
    let status = neighbour.wait(TIMEOUT)?.context("the neighbour goes on")?;
    ensure!(status.success(), "{}", neighbour.printed());
    // Their memory is free at once: each of these programs takes all of it.
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    backend.stop()
}

// Promise: V21
#[test]
fn killed_worker_gives_an_error_without_waiting() -> Result<()> {
    let backend = streamed()?;
    let mut bereft = backend.spawn("bereft", &program("bereft")?, &["killed"])?;
    bereft.wait_for_line("waiting", TIMEOUT)?;
    let (workers, _) = backend.wait_for_workers(1)?;
    for worker in workers {
        signal(worker, Signal::KILL)?;
    }
    let status = bereft.wait(TIMEOUT)?.context("the program ends with an error")?;
    ensure!(status.success(), "{}", bereft.printed());
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    backend.stop()
}

// Promise: V21
#[test]
fn program_that_closes_all_descriptors_gets_an_error_without_waiting() -> Result<()> {
    for backend in [streamed()?, Backend::start(&Binaries::locate()?, None)?] {
        passed(&backend.run(&program("bereft")?, &["closed"])?)?;
        backend.wait_for_workers(0)?;
        backend.stop()?;
    }
    Ok(())
}

fn greeted(backend: &Backend) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(backend.socket()?)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(&FromGuest::Hello { version: calls::VERSION }.encode())?;
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head)?;
    ensure!(ToGuest::decode(&head) == Ok(ToGuest::Hello { version: calls::VERSION }), "{head:?}");
    Ok(stream)
}

// Promise: F62
#[test]
fn host_of_another_call_version_gives_a_driver_mismatch() -> Result<()> {
    let folder = tempfile::tempdir().context("a folder for a socket")?;
    let socket = folder.path().join("other.sock");
    let listener = UnixListener::bind(&socket)?;
    // A program asks anew with each of its first calls. The thread ends with the test.
    thread::spawn(move || {
        for mut guest in listener.incoming().flatten() {
            let hello = ToGuest::Hello { version: calls::VERSION.wrapping_add(1) }.encode();
            // A guest that has gone away is no error of the next one.
            guest.read_exact(&mut [0; HEAD_BYTES]).and_then(|()| guest.write_all(&hello)).ok();
        }
    });
    let backend = streamed()?;
    let mut command = backend.command(&program("device_query")?, &[]);
    let finished = run(command.env("SLUICE_SOCKET", &socket), TIMEOUT)?;
    ensure!(
        !finished.status.success() && finished.stdout.contains("cudaErrorSystemDriverMismatch"),
        "{finished:?}"
    );
    // It is asked for a device more than once, and reports the reason for having none once.
    ensure!(finished.stderr.matches("speaks version").count() == 1, "{finished:?}");
    backend.stop()
}

// Promise: V23
#[test]
fn hostile_streams_are_closed_and_harm_no_neighbour() -> Result<()> {
    let backend = streamed()?;
    let device = backend.device()?;
    let mut neighbour = backend.spawn("neighbour", &program("neighbour")?, &["forever"])?;
    neighbour.wait_for_line("computing", TIMEOUT)?;
    let said: [(&str, Vec<u8>); 6] = [
        ("an unknown kind", vec![0xff; HEAD_BYTES]),
        ("a second hello", FromGuest::Hello { version: calls::VERSION }.encode().into()),
        ("a record before a session", {
            [&FromGuest::Record { bytes: 40 }.encode() as &[u8], &[0; 40]].concat()
        }),
        ("memory of no resource", FromGuest::Bulk { address: 4096, bytes: 4096 }.encode().into()),
        ("a session on an unknown resource", FromGuest::Open { resource: 7 }.encode().into()),
        (
            "a session page that is too small",
            [
                FromGuest::Create { resource: 1, bytes: 4096 }.encode(),
                FromGuest::Open { resource: 1 }.encode(),
            ]
            .concat(),
        ),
    ];
    for (what, bytes) in said {
        let mut stream = greeted(&backend)?;
        stream.write_all(&bytes).context(what)?;
        let end = stream.read(&mut [0; 64]);
        ensure!(matches!(end, Ok(0)) || end.is_err(), "{what}: {end:?}");
    }
    // Many connections that send nothing, or half a message, are held and closed.
    let silent: Vec<UnixStream> = (0..60).map(|_| greeted(&backend)).collect::<Result<_>>()?;
    for mut stream in &silent {
        // Those that were silent for too long are closed already.
        stream.write_all(&FromGuest::Record { bytes: 4096 }.encode()[..11]).ok();
    }
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    for mut stream in silent {
        ensure!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)), "it is not served for ever");
    }
    signal(neighbour.id(), Signal::USR1)?;
    let status = neighbour.wait(TIMEOUT)?.context("the neighbour goes on")?;
    ensure!(status.success(), "{}", neighbour.printed());
    ensure!(backend.device()? == device, "the device is the same process");
    ensure!(direct::private_kibibytes(device)? < 64 << 10, "it keeps no memory of theirs");
    backend.stop()
}

// Promise: V23
#[test]
fn guest_that_never_reads_costs_the_device_no_memory() -> Result<()> {
    use sluice_protocol::session;
    let backend = streamed()?;
    let device = backend.device()?;
    let mut stream = greeted(&backend)?;
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    let bytes = session::BYTES as u64;
    stream.write_all(&FromGuest::Create { resource: 1, bytes }.encode())?;
    stream.write_all(&FromGuest::Open { resource: 1 }.encode())?;
    backend.wait_for_workers(1)?;
    // More memory than allowed, repeatedly; then answers that the guest does not read.
    for resource in 2..2000 {
        let frame = FromGuest::Create { resource, bytes: 1 << 30 }.encode();
        if stream.write_all(&frame).is_err() {
            break;
        }
        let frame = FromGuest::Attach { resource, slot: resource % 256, address: 0x7e80_0000_0000 }.encode();
        if stream.write_all(&frame).is_err() {
            break;
        }
    }
    passed(&backend.run(&program("vector_add")?, &[])?)?;
    ensure!(direct::private_kibibytes(device)? < 64 << 10, "it keeps no memory of the guest's");
    drop(stream);
    backend.wait_for_workers(0)?;
    ensure!(backend.device()? == device, "the device is the same process");
    backend.stop()
}

/// A stock kernel without graphics, an ordinary user, no settings: the library finds the host by itself.
// Promise: V24
#[test]
#[ignore = "for the full tier"]
fn guest_without_graphics_computes_over_a_virtual_socket() -> Result<()> {
    let series = Series::V6_12;
    let kernel = format!("{series} cloud, {}", series.distribution());
    let place = Place::new("VSOCK", "QEMU, `vhost-user-vsock-pci`", &kernel);
    let device = match virtual_socket::program() {
        Ok(device) => device,
        Err(error) => {
            sluice_skip::skip(&format!("no virtual socket device: {error:#}"));
            return matrix::not_run(place, "vhost-device-vsock could not be built");
        }
    };
    let binaries = Binaries::locate()?;
    let programs = programs::compile_all()?;
    let kernel = Kernel::fetch_cloud(series)?;
    let image = Image::with_sluice(&kernel, &binaries, &programs)?;
    let host = Host::start(&binaries, series, None)?;
    let workers = |count: usize| {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let workers = direct::descendants(host.process(), "sluice-worker")?;
            if workers.len() == count {
                return anyhow::Ok(());
            }
            ensure!(Instant::now() < deadline, "{} workers live, {count} expected", workers.len());
            thread::sleep(Duration::from_millis(20));
        }
    };
    let uds = host.socket().with_file_name("vm-1.vsock");
    let socket = host.socket().with_file_name("vm-1.vsock.vhost");
    let _device = virtual_socket::start(&device, &uds, &socket, &host.folder().join("vsock.log"))?;
    let memory_mib = 1024;
    let gpu = Gpu::Arguments(virtual_socket::arguments(memory_mib, &socket));
    let machine = Machine { memory_mib, gpu, ..Machine::new("vsock") };
    let guest = Guest::boot(&machine, &kernel, &image)?;
    println!("booted {}", kernel.version);
    ensure!(!guest.hello()?.render_node, "this kernel has graphics");
    let run = |words: &[&str]| guest.start(&GuestCommand::program(words).limit(2 * TIMEOUT))?.wait();
    for program in programs.iter().filter(|program| VISITING.contains(&program.name.as_str())) {
        let native = host::run_native(&binaries, &program.path, &[], TIMEOUT)?;
        let remoted = run(&[&program.name])?;
        println!("{}: native {:?}, in the VM {:?}", program.name, native.elapsed, remoted.elapsed);
        let expected = native.stdout.replace(UNIFIED.0, UNIFIED.1);
        ensure!(
            expected == remoted.stdout && native.status.code() == remoted.code,
            "{}: natively {}\n{}\nin the VM {:?}\n{}\n{}\nthe host's side:\n{}",
            program.name,
            native.status,
            native.stdout,
            remoted.code,
            remoted.stdout,
            remoted.stderr,
            tail(&host.printed(), 30)
        );
    }
    let zero_copy = run(&["zero_copy", "touch"])?.expect_success()?;
    ensure!(zero_copy.stdout.contains("zero-copy is masked: yes"), "{}", zero_copy.stdout);

    // A killed process takes only its own worker with it.
    let neighbour = guest.start(&GuestCommand::program(&["hold", "1000"]))?;
    neighbour.wait_for_output("holding", TIMEOUT)?;
    let doomed = guest.start(&GuestCommand::program(&["hold", "1000"]))?;
    doomed.wait_for_output("holding", TIMEOUT)?;
    workers(2)?;
    doomed.signal(Signal::KILL)?;
    workers(1)?;
    run(&["vector_add"])?.expect_success()?;
    // After a reset, the machine starts again and its old sessions end, because the new system does not have their streams.
    guest.reset()?;
    // The virtual socket device is not ours, and may need a moment to recover.
    let command = GuestCommand::program(&["vector_add"]).env("SLUICE_LOG", "info");
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let completed = guest.start(&command)?.wait()?;
        if completed.success() {
            break;
        }
        println!("after the reset: {}", completed.stderr);
        ensure!(Instant::now() < deadline, "{completed:?}");
    }
    workers(0)?;
    matrix::ran(place, &Qemu::Installed.version()?, &kernel.version)?;
    guest.power_off()?;
    host.stop().map(drop)
}

/// Programs that cover most functions in the least time.
const VISITING: &[&str] = &[
    "device_query",
    "driver_api",
    "errors",
    "matmul_tiled",
    "memory",
    "print",
    "quota",
    "streams",
    "threads",
    "vector_add",
];

//! The cost of calls in virtual machines, on each way to the device, against the cost without a machine.
//!
//! The guest's program is the same as without a machine, on the same driver that does nothing. Both are started in turns, so that
//! other load of the host hits both. One way is measured alone by a part of a name like `vm/vsock`.

use crate::Row;
use anyhow::{Context as _, Result, ensure};
use sluice_kit::figures::quantile;
use sluice_tests::{
    debian::{Kernel, Series},
    host::Host,
    image::Image,
    paths::Binaries,
    process, virtual_socket,
    vm::{Gpu, Guest, GuestCommand, Machine},
    way::{Mode, Way},
};
use std::{path::Path, time::Duration};

/// Rows that characterise a way: both sides awake, a sleeping worker, and data.
const ROWS: [&str; 6] =
    ["call/sync", "call/post-launch", "doorbell/", "wake/", "pageable/16MiB", "pinned/16MiB"];
/// Number of rounds with and without a machine.
const ROUNDS: usize = 3;
/// Time limit of a round in a machine whose processor is emulated.
const LIMIT: Duration = Duration::from_secs(600);
const SERIES: Series = Series::V6_12;
const MEMORY_MIB: u32 = 2048;
/// The virtual socket's name in `SLUICE_TRANSPORT`.
const SOCKET: &str = "vsock";

/// The rows of every way that is available here.
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let (ways, rows): (Vec<String>, Vec<String>) =
        filter.iter().cloned().partition(|part| part.starts_with("vm/"));
    let wanted = |name: &str| {
        let way = format!("vm/{name}/");
        ways.is_empty() || ways.iter().any(|part| way.starts_with(part) || part.starts_with(&way))
    };
    let filter = if rows.is_empty() { ROWS.map(str::to_owned).to_vec() } else { rows };
    let mut measured = Vec::new();
    for mode in [Mode::Legacy, Mode::Flat, Mode::Full].into_iter().filter(|mode| wanted(mode.name())) {
        let way = if mode == Mode::Full { Way::newer(mode) } else { Ok(Way::stock(mode)) };
        match way {
            Ok(way) => measured.extend(by_graphics(&way, binaries, me, &filter)?),
            Err(error) => eprintln!("not measured: no QEMU that passes all features on: {error:#}"),
        }
    }
    if wanted(SOCKET) {
        match virtual_socket::program() {
            Ok(device) => measured.extend(by_socket(&device, binaries, me, &filter)?),
            Err(error) => eprintln!("not measured: no virtual socket device: {error:#}"),
        }
    }
    ensure!(!measured.is_empty(), "nothing was measured of {filter:?} {ways:?}");
    Ok(measured)
}

/// The rows of a way through a graphics device.
fn by_graphics(way: &Way, binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let environment: Vec<_> = way.environment().into_iter().collect();
    let host = host(binaries, &environment)?;
    let name = way.mode.name();
    let machine = way.machine(machine(name), host.socket());
    let rows = of(name, &machine, &Kernel::fetch(SERIES)?, &host, binaries, me, filter)?;
    host.stop()?;
    Ok(rows)
}

/// The rows of the way through a virtual socket.
fn by_socket(device: &Path, binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let host = host(binaries, &[])?;
    let uds = host.socket().with_file_name("vm-1.vsock");
    let socket = host.socket().with_file_name("vm-1.vsock.vhost");
    let _device = virtual_socket::start(device, &uds, &socket, &host.folder().join("vsock.log"))?;
    let gpu = Gpu::Arguments(virtual_socket::arguments(MEMORY_MIB, &socket));
    let machine = Machine { gpu, ..machine(SOCKET) };
    let rows = of(SOCKET, &machine, &Kernel::fetch_cloud(SERIES)?, &host, binaries, me, filter)?;
    host.stop()?;
    Ok(rows)
}

/// The host's side, on the driver that does nothing.
fn host(binaries: &Binaries, environment: &[(&str, &str)]) -> Result<Host> {
    let driver = binaries.get("libsluice_null_driver.so")?.display().to_string();
    Host::start_with(binaries, SERIES, &["--driver", &driver], environment)
}

fn machine(way: &str) -> Machine {
    Machine { cpus: 2, memory_mib: MEMORY_MIB, ..Machine::new(&format!("bench-{way}")) }
}

/// The rows of one way, as ratios to the rows without a machine.
fn of(
    way: &str,
    machine: &Machine,
    kernel: &Kernel,
    host: &Host,
    binaries: &Binaries,
    me: &Path,
    filter: &[String],
) -> Result<Vec<Row>> {
    let mut image = Image::with_sluice(kernel, binaries, &[])?;
    image.program(me, "usr/local/bin/sluice-bench")?;
    let guest = Guest::boot(machine, kernel, &image)
        .with_context(|| format!("log of the host's side:\n{}", process::tail(&host.printed(), 30)))?;
    eprintln!("{way} in a VM ({}, {})", kernel.version, guest.accelerator().name());
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        outside.push(crate::without_a_machine(binaries, me, filter)?);
        inside.push(in_machine(&guest, filter)?);
    }
    guest.power_off()?;
    inside.first().into_iter().flatten().map(|row| compare(way, row, &inside, &outside)).collect()
}

fn in_machine(guest: &Guest, filter: &[String]) -> Result<Vec<Row>> {
    const FILE: &str = "/tmp/rows";
    let mut words = vec!["sluice-bench", "client", FILE];
    words.extend(filter.iter().map(String::as_str));
    guest.start(&GuestCommand::program(&words).limit(LIMIT))?.wait()?.expect_success()?;
    let text = guest.run(&format!("cat {FILE}"))?.expect_success()?.stdout;
    serde_json::from_str(&text).with_context(|| format!("the guest's rows:\n{text}"))
}

/// A row of a machine: medians of the rounds.
fn compare(way: &str, row: &Row, inside: &[Vec<Row>], outside: &[Vec<Row>]) -> Result<Row> {
    let of = |turns: &[Vec<Row>], figure: fn(&Row) -> f64| {
        let same = turns.iter().flatten().filter(|other| other.name == row.name);
        let figures: Vec<f64> = same.map(figure).collect();
        quantile(&figures, 0.5).with_context(|| format!("no {} was measured", row.name))
    };
    let (value, baseline_value) = (of(inside, |row| row.value)?, of(outside, |row| row.value)?);
    Ok(Row {
        name: format!("vm/{way}/{}", row.name),
        value,
        p99: of(inside, |row| row.p99)?,
        baseline: "without a VM".to_owned(),
        baseline_value,
        ratio: value / baseline_value,
        ..row.clone()
    })
}

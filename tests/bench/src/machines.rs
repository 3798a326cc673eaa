//! The cost of calls in virtual machines, on each way to the device, against the cost without a machine.
//!
//! The guest's program is the same as without a machine, on the same driver that does nothing. Both are started in turns, so that
//! other load of the host hits both. One way is measured alone by a part of a name like `vm/vsock`.

use crate::measure::spread;
use anyhow::{Context as _, Result, ensure};
use sluice_tests::{
    debian::{Kernel, Series},
    host::Host,
    image::Image,
    paths::Binaries,
    performance::{Measured, Yardstick},
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
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
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
fn by_graphics(way: &Way, binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
    let environment: Vec<_> = way.environment().into_iter().collect();
    let host = host(binaries, &environment)?;
    let name = way.mode.name();
    let machine = way.machine(machine(name), host.socket());
    let rows = of(name, &machine, &Kernel::fetch(SERIES)?, &host, binaries, me, filter)?;
    host.stop()?;
    Ok(rows)
}

/// The rows of the way through a virtual socket.
fn by_socket(device: &Path, binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
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
) -> Result<Vec<Measured>> {
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

fn in_machine(guest: &Guest, filter: &[String]) -> Result<Vec<Measured>> {
    const FILE: &str = "/tmp/rows";
    let mut words = vec!["sluice-bench", "client", FILE];
    words.extend(filter.iter().map(String::as_str));
    guest.start(&GuestCommand::program(&words).limit(LIMIT))?.wait()?.expect_success()?;
    let text = guest.run(&format!("cat {FILE}"))?.expect_success()?.stdout;
    serde_json::from_str(&text).with_context(|| format!("the guest's rows:\n{text}"))
}

/// A row of a machine: the median of each figure of the rounds, also of the quantiles, against the same row without a machine.
fn compare(
    way: &str,
    row: &Measured,
    inside: &[Vec<Measured>],
    outside: &[Vec<Measured>],
) -> Result<Measured> {
    let of = |turns: &[Vec<Measured>]| -> Result<Vec<Measured>> {
        let same = |rows: &Vec<Measured>| rows.iter().find(|other| other.name == row.name).cloned();
        turns.iter().map(|rows| same(rows).with_context(|| format!("no {} was measured", row.name))).collect()
    };
    let (inside, outside) = (of(inside)?, of(outside)?);
    let median = |rows: &[Measured], figure: fn(&Measured) -> f64| {
        let [median, ..] = spread(&rows.iter().map(figure).collect::<Vec<_>>());
        median
    };
    let ratios: Vec<f64> = inside.iter().zip(&outside).map(|(one, other)| one.value / other.value).collect();
    let [ratio, ratio_low, ratio_high] = spread(&ratios);
    let yardstick = Yardstick {
        name: "without a VM".to_owned(),
        value: median(&outside, |row| row.value),
        p99: median(&outside, |row| row.p99),
        p999: median(&outside, |row| row.p999),
        ratio,
        ratio_low,
        ratio_high,
    };
    Ok(Measured {
        name: format!("vm/{way}/{}", row.name),
        unit: row.unit.clone(),
        value: median(&inside, |row| row.value),
        p99: median(&inside, |row| row.p99),
        p999: median(&inside, |row| row.p999),
        yardstick: Some(yardstick),
    })
}

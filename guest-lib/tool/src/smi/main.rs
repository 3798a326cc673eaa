//! `sluice-smi`, the guest's form of `nvidia-smi`: the same table, lists and queries, about the VM's share of a GPU.
//!
//! It reads the guest's management library and shows nothing else. A share of a GPU has no temperature, clock, power or fan: such values are
//! `N/A`, as for a GPU that does not report them.

mod date;
mod fields;
mod nvml;
mod report;
mod table;
mod values;

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{CommandFactory as _, Parser};
use fields::{APPLICATION_FIELDS, Format, GPU_FIELDS};
use nvml::{Nvml, SmiGpu, System};

/// Show this VM's share of GPUs, as nvidia-smi shows a GPU.
#[derive(Debug, Parser)]
#[command(name = "sluice-smi", version)]
struct Arguments {
    /// List the GPUs
    #[arg(short = 'L', long)]
    list_gpus: bool,
    /// Show all values of the GPUs
    #[arg(short, long)]
    query: bool,
    /// With -q: only these sections, separated by commas
    #[arg(short, long, value_delimiter = ',', requires = "query")]
    display: Vec<report::Section>,
    /// Only these GPUs, separated by commas: indexes, UUIDs or bus ids
    #[arg(short, long, value_delimiter = ',')]
    id: Vec<String>,
    /// Repeat every so many seconds, until the program is interrupted
    #[arg(short = 'l', long = "loop", value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5")]
    every: Option<u64>,
    /// Repeat every so many milliseconds
    #[arg(long, value_name = "MILLISECONDS", conflicts_with = "every")]
    loop_ms: Option<u64>,
    /// Values of GPUs, separated by commas; see --help-query-gpu
    #[arg(long, value_name = "FIELDS", value_delimiter = ',', requires = "format")]
    query_gpu: Vec<String>,
    /// Values of programs, separated by commas; see --help-query-compute-apps
    #[arg(
        long,
        value_name = "FIELDS",
        value_delimiter = ',',
        requires = "format",
        conflicts_with = "query_gpu"
    )]
    query_compute_apps: Vec<String>,
    /// Format of the values: csv, with noheader, nounits
    #[arg(long, value_delimiter = ',')]
    format: Vec<String>,
    /// List the fields of --query-gpu
    #[arg(long)]
    help_query_gpu: bool,
    /// List the fields of --query-compute-apps
    #[arg(long)]
    help_query_compute_apps: bool,
    /// Write the manual page into a directory; for packages
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    manual: Option<std::path::PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluice-smi: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(directory) = &arguments.manual {
        return Ok(clap_mangen::generate_to(Arguments::command(), directory)?);
    }
    if arguments.help_query_gpu || arguments.help_query_compute_apps {
        let gpus = GPU_FIELDS.iter().map(|field| field.names[0]);
        let programs = APPLICATION_FIELDS.iter().map(|field| field.names[0]);
        let names: Vec<&str> = if arguments.help_query_gpu { gpus.collect() } else { programs.collect() };
        println!("{}", names.join("\n"));
        return Ok(());
    }
    let every = match (arguments.every, arguments.loop_ms) {
        (Some(seconds), _) => Some(Duration::from_secs(seconds)),
        (None, milliseconds) => milliseconds.map(Duration::from_millis),
    };
    // Errors of the command line come before those of the device.
    let format = Format::parse(&arguments.format)?;
    let gpu_fields = fields::find(GPU_FIELDS, &arguments.query_gpu)?;
    let program_fields = fields::find(APPLICATION_FIELDS, &arguments.query_compute_apps)?;
    let nvml = Nvml::load()?;
    let mut first = true;
    loop {
        let mut system = nvml.read()?;
        choose(&mut system, &arguments.id)?;
        let now = date::Date::now();
        let text = if !gpu_fields.is_empty() {
            fields::gpus(&gpu_fields, &system, &now, format, first)
        } else if !program_fields.is_empty() {
            fields::applications(&program_fields, &system, &now, format, first)
        } else if arguments.list_gpus {
            system
                .gpus
                .iter()
                .map(|gpu| format!("GPU {}: {} (UUID: {})\n", gpu.index, gpu.name, gpu.uuid))
                .collect()
        } else if arguments.query {
            report::report(&system, &now, &arguments.display)
        } else {
            table::table(&system, &now)
        };
        print!("{text}");
        first = false;
        match every {
            Some(time) => thread::sleep(time),
            None => return Ok(()),
        }
    }
}

/// Keeps the GPUs that the user names.
fn choose(system: &mut System, ids: &[String]) -> Result<()> {
    let is = |gpu: &SmiGpu, id: &str| {
        gpu.index.to_string() == id || gpu.uuid == id || gpu.bus_id.eq_ignore_ascii_case(id)
            // The short form of the bus id, with four digits of the domain.
            || gpu.bus_id.strip_prefix("0000").is_some_and(|short| short.eq_ignore_ascii_case(id))
    };
    for id in ids {
        if !system.gpus.iter().any(|gpu| is(gpu, id)) {
            bail!("no devices were found for {id}");
        }
    }
    if !ids.is_empty() {
        system.gpus.retain(|gpu| ids.iter().any(|id| is(gpu, id)));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nvml::SmiProcess;

    /// A VM with one share of 1 GiB, in which one program holds memory.
    pub(crate) fn system() -> System {
        let gpu = SmiGpu {
            index: 0,
            name: "NVIDIA H200".to_owned(),
            uuid: "GPU-00000000-0000-0000-0000-000000000001".to_owned(),
            bus_id: "00000000:01:00.0".to_owned(),
            bus: (0, 1, 0),
            minor: Some(0),
            capability: Some((9, 0)),
            cores: Some(16896),
            compute_mode: Some(0),
            ecc: Some((1, 1)),
            display: Some((0, 0)),
            memory: Some([1 << 30, 0, 34 << 20, (1 << 30) - (34 << 20)]),
            processes: vec![SmiProcess { pid: 4321, name: "/usr/bin/python3".to_owned(), bytes: 34 << 20 }],
            ..SmiGpu::default()
        };
        System { driver: "615.0".to_owned(), cuda: 13050, gpus: vec![gpu] }
    }

    // Promise: C103
    #[test]
    fn gpus_are_chosen_by_index_uuid_and_bus_id() {
        for id in ["0", "GPU-00000000-0000-0000-0000-000000000001", "00000000:01:00.0", "0000:01:00.0"] {
            let mut chosen = system();
            choose(&mut chosen, &[id.to_owned()]).unwrap();
            assert_eq!(chosen.gpus.len(), 1, "{id}");
        }
        assert!(choose(&mut system(), &["1".to_owned()]).is_err());
    }

    // Promise: C103
    #[test]
    fn command_lines_of_scripts_are_accepted() {
        for line in [
            "sluice-smi",
            "sluice-smi -L",
            "sluice-smi -q -d MEMORY,UTILIZATION -i 0",
            "sluice-smi --query-gpu=name,memory.total --format=csv,noheader,nounits -l 1",
            "sluice-smi --query-compute-apps=pid,used_memory --format=csv",
            "sluice-smi -i 0,1 --loop=2",
        ] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
        for line in ["sluice-smi --query-gpu=name", "sluice-smi -d MEMORY", "sluice-smi -q -d NONSENSE"] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}

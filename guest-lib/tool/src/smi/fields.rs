//! The fields of `--query-gpu` and `--query-compute-apps`, and their lines of comma-separated values.

use crate::date::Date;
use crate::nvml::{SmiGpu, SmiProcess, System};
use crate::values::{COMPUTE_MODES, SWITCH, mebibytes, named};
use anyhow::{Result, bail};

/// A field.
pub(crate) struct Field<T: ?Sized> {
    /// Its name, then other names of it.
    pub(crate) names: &'static [&'static str],
    unit: &'static str,
    /// Its value; `None` if there is none.
    value: fn(&Row<'_>, &T) -> Option<String>,
}

/// The place of a value, beside the object itself.
pub(crate) struct Row<'a> {
    system: &'a System,
    now: &'a Date,
    gpu: &'a SmiGpu,
}

/// The format of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    header: bool,
    units: bool,
}

impl Format {
    pub(crate) fn parse(words: &[String]) -> Result<Format> {
        let mut format = Format { header: true, units: true };
        let mut is_csv = words.is_empty();
        for word in words {
            match word.trim() {
                "csv" => is_csv = true,
                "noheader" => format.header = false,
                "nounits" => format.units = false,
                other => bail!("\"{other}\" is not a valid option of --format"),
            }
        }
        if is_csv { Ok(format) } else { bail!("--format requires csv") }
    }
}

macro_rules! field {
    ($names:expr, $unit:literal, $value:expr) => {
        Field { names: $names, unit: $unit, value: $value }
    };
}

/// A value that a share of a GPU does not have.
macro_rules! absent {
    ($name:literal, $unit:literal) => {
        Field { names: &[$name], unit: $unit, value: |_, _| None }
    };
}

fn memory(gpu: &SmiGpu, index: usize) -> Option<String> {
    Some(mebibytes(gpu.memory?[index]).to_string())
}

fn switch(mode: Option<u32>) -> Option<String> {
    mode.map(|mode| named(Some(mode), SWITCH).to_owned())
}

/// The fields of GPUs.
pub(crate) const GPU_FIELDS: &[Field<SmiGpu>] = &[
    field!(&["timestamp"], "", |row, _| Some(row.now.stamp())),
    field!(&["driver_version"], "", |row, _| Some(row.system.driver.clone())),
    field!(&["count"], "", |row, _| Some(row.system.gpus.len().to_string())),
    field!(&["name", "gpu_name"], "", |_, gpu| Some(gpu.name.clone())),
    field!(&["index"], "", |_, gpu| Some(gpu.index.to_string())),
    field!(&["uuid", "gpu_uuid"], "", |_, gpu| Some(gpu.uuid.clone())),
    field!(&["pci.bus_id", "gpu_bus_id"], "", |_, gpu| Some(gpu.bus_id.clone())),
    field!(&["pci.domain"], "", |_, gpu| Some(format!("{:#06X}", gpu.bus.0).replace('X', "x"))),
    field!(&["pci.bus"], "", |_, gpu| Some(format!("{:#04X}", gpu.bus.1).replace('X', "x"))),
    field!(&["pci.device"], "", |_, gpu| Some(format!("{:#04X}", gpu.bus.2).replace('X', "x"))),
    field!(&["memory.total"], "MiB", |_, gpu| memory(gpu, 0)),
    field!(&["memory.reserved"], "MiB", |_, gpu| memory(gpu, 1)),
    field!(&["memory.used"], "MiB", |_, gpu| memory(gpu, 2)),
    field!(&["memory.free"], "MiB", |_, gpu| memory(gpu, 3)),
    field!(&["utilization.gpu"], "%", |_, gpu| Some(gpu.utilization?.0.to_string())),
    field!(&["utilization.memory"], "%", |_, gpu| Some(gpu.utilization?.1.to_string())),
    field!(&["compute_cap"], "", |_, gpu| gpu.capability.map(|(major, minor)| format!("{major}.{minor}"))),
    field!(&["compute_mode"], "", |_, gpu| gpu
        .compute_mode
        .map(|mode| named(Some(mode), COMPUTE_MODES).to_owned())),
    field!(&["ecc.mode.current"], "", |_, gpu| switch(gpu.ecc.map(|ecc| ecc.0))),
    field!(&["ecc.mode.pending"], "", |_, gpu| switch(gpu.ecc.map(|ecc| ecc.1))),
    field!(&["mig.mode.current"], "", |_, gpu| switch(gpu.mig.map(|mig| mig.0))),
    field!(&["mig.mode.pending"], "", |_, gpu| switch(gpu.mig.map(|mig| mig.1))),
    field!(&["display_mode"], "", |_, gpu| switch(gpu.display.map(|display| display.0))),
    field!(&["display_active"], "", |_, gpu| switch(gpu.display.map(|display| display.1))),
    absent!("persistence_mode", ""),
    absent!("serial", ""),
    absent!("gpu_serial", ""),
    absent!("vbios_version", ""),
    absent!("pstate", ""),
    absent!("fan.speed", "%"),
    absent!("temperature.gpu", ""),
    absent!("temperature.memory", ""),
    absent!("utilization.encoder", "%"),
    absent!("utilization.decoder", "%"),
    absent!("power.draw", "W"),
    absent!("power.limit", "W"),
    absent!("enforced.power.limit", "W"),
    absent!("power.max_limit", "W"),
    absent!("clocks.gr", "MHz"),
    absent!("clocks.sm", "MHz"),
    absent!("clocks.mem", "MHz"),
    absent!("clocks.current.sm", "MHz"),
    absent!("clocks.current.memory", "MHz"),
    absent!("clocks.max.sm", "MHz"),
    absent!("clocks.max.memory", "MHz"),
    absent!("clocks_throttle_reasons.active", ""),
    absent!("pcie.link.gen.current", ""),
    absent!("pcie.link.gen.max", ""),
    absent!("pcie.link.width.current", ""),
    absent!("pcie.link.width.max", ""),
];

/// The fields of programs.
pub(crate) const APPLICATION_FIELDS: &[Field<SmiProcess>] = &[
    field!(&["timestamp"], "", |row, _| Some(row.now.stamp())),
    field!(&["gpu_name"], "", |row, _| Some(row.gpu.name.clone())),
    field!(&["gpu_bus_id"], "", |row, _| Some(row.gpu.bus_id.clone())),
    field!(&["gpu_uuid"], "", |row, _| Some(row.gpu.uuid.clone())),
    absent!("gpu_serial", ""),
    field!(&["pid"], "", |_, process| Some(process.pid.to_string())),
    field!(&["process_name", "name"], "", |_, process| Some(process.name.clone())),
    field!(&["used_gpu_memory", "used_memory"], "MiB", |_, process| Some(
        mebibytes(process.bytes).to_string()
    )),
];

/// The fields of these names, each with the name as given.
pub(crate) fn find<'a, T>(
    all: &'static [Field<T>],
    names: &'a [String],
) -> Result<Vec<(&'a str, &'static Field<T>)>> {
    names
        .iter()
        .map(|name| {
            let name = name.trim();
            match all.iter().find(|field| field.names.contains(&name)) {
                Some(field) => Ok((name, field)),
                None => bail!("Field \"{name}\" is not a valid field to query."),
            }
        })
        .collect()
}

fn lines<'a, T: 'a>(
    fields: &[(&str, &'static Field<T>)],
    rows: impl Iterator<Item = (Row<'a>, &'a T)>,
    format: Format,
    first: bool,
) -> String {
    let mut text = String::new();
    if format.header && first {
        let titles = fields.iter().map(|(name, field)| match field.unit {
            "" => (*name).to_owned(),
            unit => format!("{name} [{unit}]"),
        });
        text += &(titles.collect::<Vec<_>>().join(", ") + "\n");
    }
    for (row, object) in rows {
        let values = fields.iter().map(|(_, field)| match (field.value)(&row, object) {
            None => "[N/A]".to_owned(),
            Some(value) if format.units && !field.unit.is_empty() => format!("{value} {}", field.unit),
            Some(value) => value,
        });
        text += &(values.collect::<Vec<_>>().join(", ") + "\n");
    }
    text
}

/// A line for each GPU.
pub(crate) fn gpus(
    fields: &[(&str, &'static Field<SmiGpu>)],
    system: &System,
    now: &Date,
    format: Format,
    first: bool,
) -> String {
    lines(fields, system.gpus.iter().map(|gpu| (Row { system, now, gpu }, gpu)), format, first)
}

/// A line for each program.
pub(crate) fn applications(
    fields: &[(&str, &'static Field<SmiProcess>)],
    system: &System,
    now: &Date,
    format: Format,
    first: bool,
) -> String {
    let rows = system
        .gpus
        .iter()
        .flat_map(|gpu| gpu.processes.iter().map(move |process| (Row { system, now, gpu }, process)));
    lines(fields, rows, format, first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(',').map(str::to_owned).collect()
    }

    // Promise: C103
    #[test]
    fn queries_have_the_lines_of_the_vendors_tool() {
        let system = crate::tests::system();
        let now = Date::now();
        let query = |names: &str, format: &str, first| {
            let names = words(names);
            let fields = find(GPU_FIELDS, &names).unwrap();
            gpus(&fields, &system, &now, Format::parse(&words(format)).unwrap(), first)
        };
        assert_eq!(
            query("name,memory.total,memory.used", "csv", true),
            "name, memory.total [MiB], memory.used [MiB]\nNVIDIA H200, 1024 MiB, 34 MiB\n"
        );
        assert_eq!(query("memory.free, compute_cap", "csv,noheader,nounits", true), "990, 9.0\n");
        assert_eq!(query("temperature.gpu,mig.mode.current", "csv,noheader", true), "[N/A], [N/A]\n");
        assert_eq!(query("pci.bus,ecc.mode.current", "csv", false), "0x01, Enabled\n", "a header comes once");
        let names = words("pid,process_name,used_memory");
        let fields = find(APPLICATION_FIELDS, &names).unwrap();
        assert_eq!(
            applications(&fields, &system, &now, Format::parse(&words("csv")).unwrap(), true),
            "pid, process_name, used_memory [MiB]\n4321, /usr/bin/python3, 34 MiB\n"
        );
        assert!(find(GPU_FIELDS, &words("memory.nonsense")).is_err());
        assert!(Format::parse(&words("xml")).is_err() && Format::parse(&words("noheader")).is_err());
    }
}

//! The report of `-q`.

use crate::date::Date;
use crate::nvml::{SmiGpu, System};
use crate::table::cuda_version;
use crate::values::{COMPUTE_MODES, SWITCH, mebibytes, named};
use clap::ValueEnum;

/// A part of the report, as `-d` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Section {
    Memory,
    Utilization,
    Ecc,
    Temperature,
    Power,
    Clock,
    Compute,
    Pids,
    Performance,
    SupportedClocks,
    PageRetirement,
    Accounting,
}

/// The lines of a report.
#[derive(Default)]
struct ReportLines(String);

impl ReportLines {
    fn heading(&mut self, depth: usize, name: &str) {
        self.0 += &format!("{:depth$}{name}\n", "", depth = depth * 4);
    }

    fn line(&mut self, depth: usize, name: &str, value: impl AsRef<str>) {
        let width = 50 - depth * 4;
        self.0 += &format!("{:depth$}{name:<width$}: {}\n", "", value.as_ref(), depth = depth * 4);
    }

    fn absent(&mut self, depth: usize, names: &[&str]) {
        names.iter().for_each(|name| self.line(depth, name, "N/A"));
    }
}

/// The report about all GPUs, or only some parts of it.
pub(crate) fn report(system: &System, now: &Date, sections: &[Section]) -> String {
    let mut lines = ReportLines("\n==============NVSMI LOG==============\n\n".to_owned());
    lines.line(0, "Timestamp", now.long());
    lines.line(0, "Driver Version", &system.driver);
    lines.line(0, "CUDA Version", cuda_version(system.cuda));
    lines.0 += "\n";
    lines.line(0, "Attached GPUs", system.gpus.len().to_string());
    for gpu in &system.gpus {
        lines.heading(0, &format!("GPU {}", gpu.bus_id));
        if sections.is_empty() {
            identity(&mut lines, gpu);
        }
        let all = sections.is_empty();
        let wants = |section| all || sections.contains(&section);
        if wants(Section::Memory) {
            memory(&mut lines, gpu);
        }
        if wants(Section::Compute) {
            lines.line(1, "Compute Mode", named(gpu.compute_mode, COMPUTE_MODES));
        }
        if wants(Section::Utilization) {
            lines.heading(1, "Utilization");
            let percent =
                |value: Option<u32>| value.map_or_else(|| "N/A".to_owned(), |value| format!("{value} %"));
            lines.line(2, "GPU", percent(gpu.utilization.map(|(gpu, _)| gpu)));
            lines.line(2, "Memory", percent(gpu.utilization.map(|(_, memory)| memory)));
            lines.absent(2, &["Encoder", "Decoder"]);
        }
        if wants(Section::Ecc) {
            lines.heading(1, "ECC Mode");
            lines.line(2, "Current", named(gpu.ecc.map(|ecc| ecc.0), SWITCH));
            lines.line(2, "Pending", named(gpu.ecc.map(|ecc| ecc.1), SWITCH));
        }
        // Figures of a board, which a share of it does not have.
        for (section, heading, names) in [
            (Section::Temperature, "Temperature", &["GPU Current Temp", "Memory Current Temp"][..]),
            (Section::Power, "GPU Power Readings", &["Average Power Draw", "Current Power Limit"]),
            (Section::Clock, "Clocks", &["Graphics", "SM", "Memory", "Video"]),
        ] {
            if wants(section) {
                lines.heading(1, heading);
                lines.absent(2, names);
            }
        }
        for (section, name) in [
            (Section::Performance, "Performance State"),
            (Section::SupportedClocks, "Supported Clocks"),
            (Section::PageRetirement, "Retired Pages"),
            (Section::Accounting, "Accounting Mode"),
        ] {
            if wants(section) {
                lines.absent(1, &[name]);
            }
        }
        if wants(Section::Pids) {
            processes(&mut lines, gpu);
        }
    }
    lines.0 + "\n"
}

fn identity(lines: &mut ReportLines, gpu: &SmiGpu) {
    lines.line(1, "Product Name", &gpu.name);
    let display = |value: Option<u32>| named(value, SWITCH);
    lines.line(1, "Display Mode", display(gpu.display.map(|display| display.0)));
    lines.line(1, "Display Active", display(gpu.display.map(|display| display.1)));
    lines.absent(1, &["Persistence Mode"]);
    lines.heading(1, "MIG Mode");
    lines.line(2, "Current", named(gpu.mig.map(|mig| mig.0), SWITCH));
    lines.line(2, "Pending", named(gpu.mig.map(|mig| mig.1), SWITCH));
    lines.absent(1, &["Serial Number"]);
    lines.line(1, "GPU UUID", &gpu.uuid);
    let number = |value: Option<u32>| value.map_or_else(|| "N/A".to_owned(), |value| value.to_string());
    lines.line(1, "Minor Number", number(gpu.minor));
    lines.absent(1, &["VBIOS Version"]);
    let capability = gpu.capability.map(|(major, minor)| format!("{major}.{minor}"));
    lines.line(1, "CUDA Compute Capability", capability.unwrap_or_else(|| "N/A".to_owned()));
    lines.line(1, "CUDA Cores", number(gpu.cores));
    lines.line(
        1,
        "Memory Bus Width",
        gpu.bus_width.map_or_else(|| "N/A".to_owned(), |bits| format!("{bits} bits")),
    );
    lines.heading(1, "PCI");
    let (domain, bus, device) = gpu.bus;
    lines.line(2, "Bus", format!("0x{bus:02X}"));
    lines.line(2, "Device", format!("0x{device:02X}"));
    lines.line(2, "Domain", format!("0x{domain:04X}"));
    lines.line(2, "Bus Id", &gpu.bus_id);
    lines.absent(1, &["Fan Speed"]);
}

fn memory(lines: &mut ReportLines, gpu: &SmiGpu) {
    lines.heading(1, "FB Memory Usage");
    for (index, name) in ["Total", "Reserved", "Used", "Free"].into_iter().enumerate() {
        let bytes = gpu.memory.map(|memory| memory[index]);
        lines.line(
            2,
            name,
            bytes.map_or_else(|| "N/A".to_owned(), |bytes| format!("{} MiB", mebibytes(bytes))),
        );
    }
}

fn processes(lines: &mut ReportLines, gpu: &SmiGpu) {
    if gpu.processes.is_empty() {
        lines.line(1, "Processes", "None");
        return;
    }
    lines.heading(1, "Processes");
    for process in &gpu.processes {
        lines.absent(2, &["GPU instance ID", "Compute instance ID"]);
        lines.line(2, "Process ID", process.pid.to_string());
        lines.line(3, "Type", "C");
        lines.line(3, "Name", &process.name);
        lines.line(3, "Used GPU Memory", format!("{} MiB", mebibytes(process.bytes)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C103
    #[test]
    fn report_has_all_parts_or_those_that_are_asked_for() {
        let system = crate::tests::system();
        let all = report(&system, &Date::now(), &[]);
        for part in [
            "Attached GPUs                                     : 1\n",
            "GPU 00000000:01:00.0\n    Product Name                                  : NVIDIA H200\n",
            "        Total                                     : 1024 MiB\n",
            "        Process ID                                : 4321\n",
            "    Temperature\n        GPU Current Temp                          : N/A\n",
        ] {
            assert!(all.contains(part), "{part}\n{all}");
        }
        let some = report(&system, &Date::now(), &[Section::Memory, Section::Utilization]);
        assert!(some.contains("FB Memory Usage") && some.contains("Utilization"), "{some}");
        assert!(!some.contains("Product Name") && !some.contains("Processes"), "{some}");
    }
}

//! The table of a call without options.

use crate::date::Date;
use crate::nvml::System;
use crate::values::{COMPUTE_MODES, SWITCH, mebibytes, named};

const LINE: &str =
    "+-----------------------------------------+------------------------+----------------------+\n";
const FRAME: &str =
    "+-----------------------------------------------------------------------------------------+\n";

/// The end of a text, in at most so many characters.
fn ending(text: &str, width: usize) -> String {
    let characters = text.chars().count();
    if characters <= width {
        return text.to_owned();
    }
    let end: String = text.chars().skip(characters - (width - 3)).collect();
    format!("...{end}")
}

/// The version of CUDA as people write it.
pub(crate) fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

pub(crate) fn table(system: &System, now: &Date) -> String {
    let mut text = format!("{}\n{FRAME}", now.long());
    let title = concat!("SLUICE-SMI ", env!("CARGO_PKG_VERSION"));
    let driver = format!("Driver Version: {}", system.driver);
    let cuda = format!("CUDA Version: {}", cuda_version(system.cuda));
    text += &format!("| {title:<33} {driver:<32} {cuda:<20} |\n");
    text += &LINE.replacen('+', "|", 1).replace("+\n", "|\n");
    text += "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n";
    text += "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n";
    text += "|                                         |                        |               MIG M. |\n";
    text += "|=========================================+========================+======================|\n";
    for gpu in &system.gpus {
        let display = named(gpu.display.map(|display| display.1), &["Off", "On"]);
        let ecc = named(gpu.ecc.map(|ecc| ecc.0), &["Off", "On"]);
        let memory = gpu.memory.map_or_else(
            || "N/A".to_owned(),
            |[total, _, used, _]| format!("{:>7}MiB / {:>6}MiB", mebibytes(used), mebibytes(total)),
        );
        let busy = gpu.utilization.map_or_else(|| "N/A".to_owned(), |(gpu, _)| format!("{gpu}%"));
        let mode = named(gpu.compute_mode, COMPUTE_MODES);
        let mig = named(gpu.mig.map(|mig| mig.0), SWITCH);
        text += &format!("| {:>3}  {:<30} {:>3} ", gpu.index, ending(&gpu.name, 30), "N/A");
        text += &format!("| {:>18} {display:>3} | {ecc:>20} |\n", gpu.bus_id);
        text += &format!(
            "| {:<39} | {memory:>22} | {busy:>7} {mode:>12} |\n",
            "N/A   N/A    N/A              N/A / N/A"
        );
        text += &format!("| {:<39} | {:>22} | {mig:>20} |\n{LINE}", "", "");
    }
    text += &format!("\n{FRAME}");
    text += "| Processes:                                                                              |\n";
    text += "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n";
    text += "|        ID   ID                                                               Usage      |\n";
    text += "|=========================================================================================|\n";
    let mut any = false;
    for gpu in &system.gpus {
        for process in &gpu.processes {
            any = true;
            let (name, memory) = (ending(&process.name, 36), format!("{}MiB", mebibytes(process.bytes)));
            text += &format!(
                "| {:>4}   N/A  N/A {:>16}      C   {name:<36} {memory:>8} |\n",
                gpu.index, process.pid
            );
        }
    }
    if !any {
        text +=
            "|  No running processes found                                                             |\n";
    }
    text + FRAME
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C103
    #[test]
    fn table_has_the_lines_of_the_vendors_tool() {
        let mut system = crate::tests::system();
        let text = table(&system, &Date::now());
        let width = LINE.len() - 1;
        for line in text.lines().skip(1).filter(|line| !line.is_empty()) {
            assert_eq!(line.chars().count(), width, "{line}\n{text}");
        }
        for part in [
            "Driver Version: 615.0 ",
            "CUDA Version: 13.5 ",
            "|   0  NVIDIA H200 ",
            "|   00000000:01:00.0 Off |                   On |",
            "|      34MiB /   1024MiB |     N/A      Default |",
            "|    0   N/A  N/A             4321      C   /usr/bin/python3                        34MiB |",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        system.gpus[0].processes.clear();
        system.gpus[0].name = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition".to_owned();
        let text = table(&system, &Date::now());
        assert!(
            text.contains("No running processes found") && text.contains("...ackwell Workstation Edition"),
            "{text}"
        );
    }
}

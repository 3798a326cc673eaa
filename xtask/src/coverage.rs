//! The page that lists which functions of the driver API a guest has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use sluice_cuda_abi::attributes::{MASKS, Mask};
use sluice_cuda_abi::symbols::{CUDA_VERSION, EXPORTS, Export, export};
use sluice_protocol::calls::C;
use sluice_tests::paths;

/// Groups of functions by the beginnings of their names, with the reason why none of a group is served.
const REFUSED: [(&str, &[&str], &str); 13] = [
    (
        "graphics",
        &[
            "cuGraphics",
            "cuGL",
            "cuEGL",
            "cuVDPAU",
            "cuWGL",
            "cuEventCreateFromEGLSync",
            "cuDeviceGetNvSciSync",
        ],
        "a guest has no graphics API on the GPU of its worker; attributes and the display say so",
    ),
    (
        "external memory",
        &[
            "cuImportExternal",
            "cuDestroyExternal",
            "cuExternalMemory",
            "cuSignalExternal",
            "cuWaitExternal",
            "cuGraphAddExternalSemaphores",
            "cuGraphExternalSemaphores",
            "cuGraphExecExternalSemaphores",
        ],
        "handles of other APIs and drivers belong to the host's processes; attribute 114 is 0",
    ),
    (
        "notifications",
        &["cuDeviceRegisterAsyncNotification", "cuDeviceUnregisterAsyncNotification"],
        "they announce that a budget of memory is exceeded; an allocation beyond a VM's quota is refused instead",
    ),
    ("multicast", &["cuMulticast"], "a VM has no NVSwitch of its own; attribute 132 is 0"),
    ("coredump", &["cuCoredump"], "a core dump of a worker would hold memory of the host's process"),
    ("checkpoint", &["cuCheckpoint"], "only the host may stop and move a worker"),
    (
        "streams of graphics APIs",
        &["cuStreamBeginCaptureToCig", "cuStreamEndCaptureToCig"],
        "a guest has no graphics API on the GPU of its worker; attributes 135, 138, 151 and 159 are 0",
    ),
    (
        "fabric",
        &["cuFabric", "cuLogicalEndpoint", "cuDeviceGetFabric", "cuDeviceGetClique"],
        "a VM is no member of an NVLink fabric; the attributes of its handles and endpoints are 0",
    ),
    (
        "DMA buffers",
        &["cuMemGetHandleForAddressRange"],
        "a guest has no other driver that could use a DMA buffer of the host; attribute 124 is 0",
    ),
    (
        "launches over several devices",
        &["cuLaunchCooperativeKernelMultiDevice"],
        "no NVLink joins the devices of a VM; attribute 96 is 0",
    ),
    ("profiler", &["cuProfilerInitialize"], "counters show the work of all VMs; only the host may profile"),
    (
        "sparse arrays",
        &["cuMemMapArrayAsync"],
        "an array has all of its memory from the driver, and no part of it from memory of the program; attributes 112 and 121 are 0",
    ),
    ("decompression", &["cuMemBatchDecompress"], "attribute 136, of the engine for it, is 0"),
];

/// The areas of the page, by the beginnings of names. A name belongs to the first that fits.
const AREAS: [(&str, &[&str]); 22] = [
    (
        "Start, errors and logs",
        &["cuInit", "cuDriver", "cuGetErr", "cuGetProc", "cuGetExport", "cuLogs", "cuProfiler"],
    ),
    ("Devices", &["cuDevice"]),
    ("Contexts and green contexts", &["cuCtx", "cuGreen"]),
    ("Modules, libraries and kernels", &["cuModule", "cuLibrary", "cuKernel", "cuFunc", "cuLink"]),
    ("Launches", &["cuLaunch", "cuParam", "cuOccupancy"]),
    ("Streams", &["cuStream", "cuThread"]),
    ("Events", &["cuEvent"]),
    ("Graphs", &["cuGraph", "cuUserObject"]),
    ("Multicast", &["cuMulticast"]),
    (
        "Memory pools",
        &[
            "cuMemPool",
            "cuMemAllocAsync",
            "cuMemAllocFromPool",
            "cuMemFreeAsync",
            "cuMemGetDefaultMemPool",
            "cuMemGetMemPool",
            "cuMemSetMemPool",
        ],
    ),
    ("Copies", &["cuMemcpy"]),
    ("Fills", &["cuMemset"]),
    (
        "Virtual memory",
        &[
            "cuMemAddress",
            "cuMemCreate",
            "cuMemExport",
            "cuMemGetAccess",
            "cuMemGetAllocation",
            "cuMemGetHandle",
            "cuMemImport",
            "cuMemMap",
            "cuMemRelease",
            "cuMemRetain",
            "cuMemSetAccess",
            "cuMemUnmap",
        ],
    ),
    ("Managed memory", &["cuMemAdvise", "cuMemAllocManaged", "cuMemDiscard", "cuMemPrefetch", "cuMemRange"]),
    ("Memory shared between processes", &["cuIpc"]),
    ("Memory", &["cuMem", "cuPointer"]),
    ("Arrays, textures and surfaces", &["cuArray", "cuMipmapped", "cuTex", "cuSurf"]),
    ("Tensor maps", &["cuTensor"]),
    (
        "External memory and semaphores",
        &["cuImportExternal", "cuDestroyExternal", "cuExternal", "cuSignalExternal", "cuWaitExternal"],
    ),
    ("Graphics", &["cuGraphics", "cuGL", "cuEGL", "cuVDPAU", "cuWGL"]),
    ("Checkpoints and core dumps", &["cuCheckpoint", "cuCoredump"]),
    ("Other functions", &["cu"]),
];

/// The state of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// All its forms.
    Served,
    /// Its forms up to this version of the driver.
    Older(u32),
    /// None of them, for a reason that stays.
    Refused(&'static str),
    /// None of them yet.
    Missing,
}

/// A function under the name that programs look up.
struct Function {
    name: &'static str,
    /// The driver version that introduced it.
    since: u32,
    state: State,
}

/// Names that a guest's library exports with an implementation.
fn served() -> BTreeSet<&'static str> {
    // Rows of this class are functions that only a worker calls.
    C.iter().filter(|row| row.class != "driver").map(|row| row.name).collect()
}

/// The forms of all functions.
fn exports() -> impl Iterator<Item = &'static Export> {
    (0..EXPORTS.len()).filter_map(export)
}

fn functions() -> Vec<Function> {
    let served = served();
    let mut forms: BTreeMap<&str, Vec<&Export>> = BTreeMap::new();
    for form in exports().filter(|form| !form.per_thread) {
        forms.entry(form.base).or_default().push(form);
    }
    let function = |(name, mut forms): (&'static str, Vec<&Export>)| {
        forms.sort_by_key(|form| form.version);
        let newest_served = forms.iter().rposition(|form| served.contains(form.name));
        let reason = REFUSED.iter().find(|(_, starts, _)| starts.iter().any(|start| name.starts_with(start)));
        let state = match (newest_served, reason) {
            (Some(index), _) if index + 1 == forms.len() => State::Served,
            (Some(index), _) => State::Older(forms[index].version),
            (None, Some((_, _, reason))) => State::Refused(reason),
            (None, _) => State::Missing,
        };
        Function { name, since: forms[0].version, state }
    };
    forms.into_iter().map(function).collect()
}

/// The test programs that call each driver function by its name.
fn programs() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let folder = paths::workspace().join("tests/programs");
    for file in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let file = file?.path();
        if !matches!(file.extension().and_then(|end| end.to_str()), Some("cu" | "c")) {
            continue;
        }
        let program = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for name in names_in(&read(&file)?) {
            found.entry(name).or_default().insert(program.clone());
        }
    }
    Ok(found)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

/// The words of a text that begin like functions of the driver.
fn names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|sign: char| !sign.is_ascii_alphanumeric() && sign != '_');
    let is_driver = |word: &&str| {
        word.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
    };
    words.filter(is_driver).map(str::to_owned).collect()
}

fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// The functions of an area, by a set of names that are defined.
pub(crate) struct Area {
    pub(crate) name: &'static str,
    /// Number of functions of which a form is defined.
    pub(crate) served: usize,
    pub(crate) missing: Vec<&'static str>,
}

/// The areas of functions.
pub(crate) fn areas(defined: &BTreeSet<String>) -> Vec<Area> {
    let mut rest: BTreeSet<&'static str> = exports().map(|form| form.base).collect();
    let is_defined = |base: &str| {
        exports().any(|form| form.base == base && !form.per_thread && defined.contains(form.name))
    };
    let area = |(name, starts): (&'static str, &[&str])| {
        let is_of_area = |base: &&str| starts.iter().any(|start| base.starts_with(start));
        let (of_area, others): (Vec<_>, Vec<_>) = rest.iter().copied().partition(is_of_area);
        rest = others.into_iter().collect();
        let (served, missing): (Vec<_>, Vec<_>) = of_area.into_iter().partition(|base| is_defined(base));
        Area { name, served: served.len(), missing }
    };
    AREAS.into_iter().map(area).collect()
}

/// The page.
pub(crate) fn page() -> Result<String> {
    let (functions, programs) = (functions(), programs()?);
    let count =
        |wanted: fn(&State) -> bool| functions.iter().filter(|function| wanted(&function.state)).count();
    let served = count(|state| matches!(state, State::Served | State::Older(_)));
    let refused = count(|state| matches!(state, State::Refused(_)));
    let mut text = format!(
        "<!-- Generated from protocol/src/calls.rs, cuda-abi/data/procmap.json, cuda-abi/src/attributes.rs and tests/programs by `cargo xtask docs`. Do not edit. -->\n\n\
         # Functions of the CUDA driver API in a guest\n\n\
         Of the {} functions of CUDA {}, {served} are served, {refused} are refused for good, and {} are not served yet. The library of a guest \
         exports all of them: a function that is not served returns `CUDA_ERROR_NOT_SUPPORTED` (801) and names itself in the log, once.\n\n\
         A function is listed under the name that programs look up. *Since* is the CUDA version in which it appeared. A program in *called by* is a \
         test of `tests/programs` that calls it by this name; most programs reach it through the CUDA runtime instead.\n",
        functions.len(),
        version(CUDA_VERSION),
        functions.len() - served - refused,
    );
    let mut rest: Vec<&Function> = functions.iter().collect();
    for (area, starts) in AREAS {
        let (of_area, others): (Vec<_>, Vec<_>) = rest
            .into_iter()
            .partition(|function| starts.iter().any(|start| function.name.starts_with(start)));
        rest = others;
        let there =
            of_area.iter().filter(|function| matches!(function.state, State::Served | State::Older(_)));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "\n## {area}: {} of {}\n\n| function | since | state | called by |\n|---|---|---|---|",
            there.count(),
            of_area.len()
        );
        for Function { name, since, state } in of_area {
            let state = match state {
                State::Served => "served".to_owned(),
                State::Older(version_served) => format!("served as in CUDA {}", version(*version_served)),
                State::Refused(reason) => format!("refused: {reason}"),
                State::Missing => "not yet".to_owned(),
            };
            let forms = exports().filter(|form| form.base == *name);
            let callers: BTreeSet<&String> = forms
                .filter_map(|form| programs.get(form.name))
                .flatten()
                .chain(programs.get(*name).into_iter().flatten())
                .collect();
            let callers =
                callers.into_iter().map(|program| format!("`{program}`")).collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "| `{name}` | {} | {state} | {callers} |", version(*since));
        }
    }
    ensure!(rest.is_empty(), "functions belong to no area");
    text.push_str(
        "\n## Device attributes\n\n\
         An attribute never reports an ability whose functions are refused: a guest gets these values instead of the driver's. All other attributes have the \
         driver's value, except `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS` (89): it is 0 unless \
         `CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED` (86) is 1, because managed memory of a guest stays on the host.\n\n| attribute | number | value | ability |\n|---|---|---|---|\n",
    );
    for Mask { attribute, name, value, ability } in MASKS {
        let _ = writeln!(text, "| `{name}` | {attribute} | {value} | {ability} |");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_is_on_the_page_once_and_its_state_follows_the_table() {
        let page = page().unwrap();
        let all = functions();
        assert_eq!(all.len(), 516);
        for function in &all {
            let row = format!("| `{}` |", function.name);
            assert_eq!(page.matches(&row).count(), 1, "{row}");
        }
        let state = |name: &str| all.iter().find(|function| function.name == name).unwrap().state;
        assert_eq!(state("cuMemAlloc"), State::Served);
        assert!(matches!(state("cuCoredumpGetAttribute"), State::Refused(_)));
        // No function is refused for good and served.
        let served = served();
        for (group, starts, _) in REFUSED {
            let both: Vec<_> =
                served.iter().filter(|name| starts.iter().any(|start| name.starts_with(start))).collect();
            assert!(both.is_empty(), "{group}: {both:?}");
        }
    }

    #[test]
    fn words_that_begin_like_driver_functions_are_found() {
        let found = names_in("CHECK(cuMemAlloc_v2(&p)); cudaMalloc(&q); /* cuCtx */ cute(); CUdeviceptr p;");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["cuCtx", "cuMemAlloc_v2"]);
    }
}
